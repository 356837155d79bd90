"""``hzero topology``: tables and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hzero import cli
from hzero.commands.topology import show_machine
from hzero.terminal import console
from hzero.topology.machine import Device, Link, Machine, Nic
from hzero.topology.sources import PRESETS, machine_of, preset
from tests.topology import trees


def _gcds(count: int) -> Machine:
    """A made-up node of MI250X: modules in a ring."""
    links = [Link(a, a + 1, "xgmi", 4, 200.0) for a in range(0, count, 2)]
    links += [Link(*sorted((a, (a + 2) % count)), "xgmi", 1, 50.0) for a in range(0, count, 2)]
    devices = [Device(n, f"0000:{16 + n:02x}:00.0", "MI250X", numa=n // 4) for n in range(count)]
    nics = [Nic(f"mlx5_{n}", "ib", 25.0) for n in range(count // 4)]
    return Machine(f"{count} GCDs", tuple(devices), tuple(links), tuple(nics), remarks=("made up",))


AMBIGUOUS = Machine("pairs", tuple(Device(n) for n in range(4)), (Link(0, 1, "xgmi", 2), Link(2, 3, "xgmi", 2)))


def _shown(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", "100")
    with (out := console()).capture() as shown:
        show_machine(machine, out)
    return shown.get().splitlines()


def test_tables_of_frontier(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = _shown(preset("frontier"), monkeypatch)
    assert lines[0] == "preset frontier: 8 devices, 4 packages, 4 NICs"
    words = [line.split() for line in lines]
    assert words[4] == ["0", "0", "0000:c1:00.0", "MI250X", "3"]
    begin = words.index(["links", *map(str, range(8))]) + 2
    rows = ["".join(row[1:]) for row in words[begin : begin + 8]]
    assert rows == ["-41...2.", "4-.1.1..", "1.-42...", ".14-...1", "..2.-41.", ".1..4-.1", "2...1.-4", "...1.14-"]
    assert ["4", "xgmi", "200", "4"] in words
    assert ["hsn2", "cxi", "25"] in words
    monkeypatch.setenv("HZERO_SYSFS", str(trees.frontier(tmp_path)))
    assert _shown(machine_of("auto"), monkeypatch)[0].endswith(": 8 devices, 4 packages, 4 NICs")


@pytest.mark.parametrize("machine", [*map(preset, PRESETS), _gcds(16), _gcds(64), AMBIGUOUS, Machine("none", ())])
def test_tables_are_narrow_and_complete(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = _shown(machine, monkeypatch)
    assert max(map(len, lines)) <= 100
    for device in machine.devices:
        assert sum(device.bus in line for line in lines) == 1 or not device.bus
    assert ("remark: made up" in lines) == bool(machine.remarks)


def test_show_a_preset_as_tables_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["topology", "frontier"]) == 0
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["gcd", "2", "200", "[0,", "1]", "[2,", "3]", "[4,", "5]", "[6,", "7]"] in words
    assert cli.main(["topology", "frontier", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == ["tiers", "source", "devices", "links", "nics", "remarks"]
    assert [tier["size"] for tier in shown["tiers"]] == [2, 1, 4, 1]
    assert shown["tiers"][0] == {"name": "gcd", "size": 2, "groups": [[0, 1], [2, 3], [4, 5], [6, 7]], "gb_s": 200.0}
    assert [tier["gb_s"] for tier in shown["tiers"]] == [200.0, None, 50.0, 12.5]
    assert shown["devices"][5]["bus"] == "0000:d6:00.0"
    assert shown["links"][0] == {"a": 0, "b": 1, "kind": "xgmi", "count": 4, "gb_s": 200.0}


def test_an_ambiguous_machine_is_shown_and_then_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("devices: 4\nlinks: [{count: 2, pairs: [[0, 1], [2, 3]]}]\n")
    assert cli.main(["topology", str(path)]) == 2
    shown = capsys.readouterr()
    assert "packages not known" in shown.out and "tier" not in shown.out
    assert "ambiguous" in shown.err and "packages: [[0, 1], [2, 3]]" in shown.err and shown.err.count("\n") == 1
    assert cli.main(["topology", str(path), "--json"]) == 2
    assert not capsys.readouterr().out
    path.write_text("devices: 4\npackage: []\n")
    assert cli.main(["topology", str(path)]) == 2
    assert f"{path}: unknown key 'package'; did you mean 'packages'?" in capsys.readouterr().err
    assert cli.main(["topology", "frontie"]) == 2
    error = capsys.readouterr().err
    assert "topology: no such file: 'frontie'; expected discover, a file, or a preset: frontier" in error
