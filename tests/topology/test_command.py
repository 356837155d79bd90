"""``hzero topology``: what it prints declares the node that it shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hzero.tools import cli
from hzero.tools.commands.topology import text_of
from hzero.topology.node import Device, Link, Nic, Node, tiers_of
from hzero.topology.sources import PRESETS, preset, read_node
from tests.topology import trees


def _gcds(count: int) -> Node:
    """A made-up node of MI250X: modules in a ring."""
    links = [Link(a, a + 1, "xgmi", 4, 200.0) for a in range(0, count, 2)]
    links += [Link(*sorted((a, (a + 2) % count)), "xgmi", 1, 50.0) for a in range(0, count, 2)]
    devices = [Device(n, f"0000:{16 + n:02x}:00.0", "MI250X", numa=n // 4) for n in range(count)]
    nics = [Nic(f"mlx5_{n}", "ib", 25.0) for n in range(count // 4)]
    return Node(f"{count} GCDs", tuple(devices), tuple(links), tuple(nics), remarks=("made\nup",))


AMBIGUOUS = Node("pairs", tuple(Device(n) for n in range(4)), (Link(0, 1, "xgmi", 2), Link(2, 3, "xgmi", 2)))


def test_frontier(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cli.main(["topology", "frontier"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "# preset frontier",
        "kind: MI250X",
        "devices: 8",
        "packages: [[0, 1], [2, 3], [4, 5], [6, 7]]",
    ]
    assert "  - {kind: xgmi, count: 2, gb_s: 100.0, pairs: [[0, 6], [2, 4]]}" in lines
    assert "  - {name: hsn2, kind: cxi, gb_s: 25.0}" in lines
    assert lines[-3:] == [
        "# tier intra_package: 2, 200 GB/s each way [0, 1] [2, 3] [4, 5] [6, 7]",
        "# tier intra_node: 4, 50 GB/s each way [0, 2, 4, 6] [1, 3, 5, 7]",
        "# tier inter_node: 1, 12.5 GB/s each way",
    ]
    monkeypatch.setenv("HZERO_SYSFS", str(trees.frontier(tmp_path)))
    assert cli.main(["topology"]) == 0
    found = capsys.readouterr().out.splitlines()
    assert [line for line in found if line[:8] in ("devices:", "packages")] == lines[2:4]


@pytest.mark.parametrize("machine", [*map(preset, PRESETS), _gcds(16), _gcds(64), AMBIGUOUS, Node("none", ())])
def test_what_is_printed_declares_the_same_node(machine: Node, tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text(text_of(machine))
    read = read_node(str(path))
    if machine is AMBIGUOUS:
        assert read.packages is None and read.links == machine.links
        return
    assert tiers_of(read) == tiers_of(machine)
    assert read == replace(machine, source=read.source, packages=read.packages, remarks=())
    assert not machine.remarks or "# made\\nup" in path.read_text().splitlines()


def test_an_ambiguous_machine_is_shown_and_then_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("devices: 4\nlinks: [{count: 2, pairs: [[0, 1], [2, 3]]}]\n")
    assert cli.main(["topology", str(path)]) == 2
    shown = capsys.readouterr()
    assert "devices: 4" in shown.out and "packages" not in shown.out and "tier" not in shown.out
    assert "ambiguous" in shown.err and "packages: [[0, 1], [2, 3]]" in shown.err and shown.err.count("\n") == 1
    path.write_text("devices: 4\npackage: []\n")
    assert cli.main(["topology", str(path)]) == 2
    assert f"{path}: found key 'package'; expected" in capsys.readouterr().err
    assert cli.main(["topology", "frontie"]) == 2
    error = capsys.readouterr().err
    assert "topology: found no file 'frontie'; expected discover, a file, or a preset: frontier" in error
