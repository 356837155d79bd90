"""``hzero topology show``: tables and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from hzero import cli
from hzero.topology import command
from hzero.topology.machine import Device, Link, Machine, Nic
from hzero.topology.preset import PRESETS, preset
from hzero.topology.readers import read_file
from hzero.topology.show import show_machine
from tests.ranks import ROOT
from tests.topology import trees

DUMPS = ROOT.parent / "shared" / "topologies"


def _gcds(count: int) -> Machine:
    """A made-up node of MI250X: modules in a ring, NICs shared by two modules."""
    links = [Link(a, a + 1, "xgmi", 4, 200.0) for a in range(0, count, 2)]
    links += [Link(*sorted((a, (a + 2) % count)), "xgmi", 1, 50.0) for a in range(0, count, 2)]
    devices = [Device(n, f"0000:{16 + n:02x}:00.0", "MI250X", numa=n // 4, nic=f"mlx5_{n // 4}") for n in range(count)]
    nics = [Nic(f"mlx5_{n}", f"0000:{80 + n:02x}:00.0", "ib", 25.0, n) for n in range(count // 4)]
    return Machine(f"{count} GCDs", tuple(devices), tuple(links), tuple(nics), remarks=("made up",))


def _ambiguous() -> Machine:
    return Machine("pairs", tuple(Device(n) for n in range(4)), (Link(0, 1, "xgmi", 2), Link(2, 3, "xgmi", 2)))


def _shown(machine: Machine) -> list[str]:
    with (out := Console(markup=False, emoji=False, width=100)).capture() as shown:
        show_machine(machine, out)
    return shown.get().splitlines()


def test_tables_of_frontier() -> None:
    lines = _shown(preset("frontier"))
    assert lines[0] == "preset frontier: 8 devices, 4 packages, 4 NICs"
    words = [line.split() for line in lines]
    assert words[2] == ["package", "device", "bus", "kind", "NUMA"], "no column without a value"
    assert words[4] == ["0", "0", "0000:c1:00.0", "MI250X", "3"]
    begin = words.index(["links", *map(str, range(8))]) + 2
    rows = ["".join(row[1:]) for row in words[begin : begin + 11] if row]
    assert rows == ["-41...2.", "4-.1.1..", "1.-42...", ".14-...1", "..2.-41.", ".1..4-.1", "2...1.-4", "...1.14-"]
    assert "    4  xgmi, 200 GB/s each way together: 4 pairs" in lines
    assert "    .  no direct link, routed: 16 pairs" in lines
    assert ["hsn2", "cxi", "25"] in words


def test_places_of_nics_are_shown_where_the_source_knows_them(tmp_path: Path) -> None:
    """A node's own tree does; the user guide that the preset follows names no module for a NIC, which is said."""
    words = [line.split() for line in _shown(read_file(trees.frontier(tmp_path)))]
    assert ["2", "4", "0000:d1:00.0", "MI250X", "0", "hsn2"] in words
    assert ["NIC", "bus", "kind", "GB/s", "NUMA", "nearest", "of", "devices"] in words
    assert ["hsn2", "0000:d3:00.0", "cxi", "25", "0", "4", "5"] in words
    remark = "remark: the source does not say which NIC is nearest to which device"
    assert remark in _shown(preset("frontier")) and remark.split() not in words


@pytest.mark.parametrize("machine", [*map(preset, PRESETS), _gcds(8), _gcds(16), _ambiguous(), Machine("none", ())])
def test_tables_are_narrow(machine: Machine) -> None:
    lines = _shown(machine)
    assert max(map(len, lines)) <= 100
    for device in machine.devices:
        assert sum(device.bus in line for line in lines) == 1 or not device.bus


def test_several_kinds_and_many_devices() -> None:
    devices = tuple(Device(number) for number in range(3))
    mixed = "\n".join(
        _shown(Machine("mixed", devices, (Link(0, 1, "nvlink", 4, 100.0), Link(1, 2, "pcie", None, 32.0))))
    )
    assert "   ?p  pcie, 32 GB/s each way together: 1 pair, the source does not count them" in mixed and "4n" in mixed
    assert "names no direct links" in "\n".join(_shown(Machine("bare", devices)))
    many = "\n".join(_shown(_gcds(64)))
    assert "1  xgmi, 50 GB/s each way together: 32 pairs" in many and "links  0" not in many
    assert _shown(_gcds(8))[-1] == "remark: made up"


def test_show_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["topology", "show", "frontier"]) == 0
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["gcd", "2", "200", "[0,", "1]", "[2,", "3]", "[4,", "5]", "[6,", "7]"] in words


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["topology", "show", "frontier", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == ["source", "tiers", "devices", "links", "nics", "remarks"]
    assert [tier["name"] for tier in shown["tiers"]] == ["gcd", "hive", "gpu", "node", "cluster"]
    assert shown["tiers"][0] == {
        "name": "gcd", "size": 2, "members": [[0, 1], [2, 3], [4, 5], [6, 7]], "gb_s": 200.0,
    }  # fmt: skip
    assert [tier["size"] for tier in shown["tiers"]] == [2, 1, 4, 1, 1]
    assert shown["devices"][5]["bus"] == "0000:d6:00.0"
    assert shown["links"][0] == {"a": 0, "b": 1, "kind": "xgmi", "count": 4, "gb_s": 200.0}
    assert len(shown["nics"]) == 4


def test_an_ambiguous_machine_is_shown_and_then_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "machine_of", lambda source: _ambiguous())
    assert cli.main(["topology", "show", "x"]) == 2
    shown = capsys.readouterr()
    assert "packages not known" in shown.out and "    0  -  2  .  ." in shown.out and "tier" not in shown.out
    assert "ambiguous" in shown.err and "packages: [[0, 1], [2, 3]]" in shown.err and shown.err.count("\n") == 1
    assert cli.main(["topology", "show", "x", "--json"]) == 2
    shown = capsys.readouterr()
    assert not shown.out and "ambiguous" in shown.err


def test_show_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("devices: 4\npackages: [[0, 3], [1, 2]]\n")
    assert cli.main(["topology", "show", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["source"] == str(path) and shown["tiers"][0]["members"] == [[0, 3], [1, 2]]
    path.write_text("devices: 4\npackage: []\n")
    assert cli.main(["topology", "show", str(path)]) == 2
    shown_error = capsys.readouterr().err
    assert f"{path}: unknown key 'package'; did you mean 'packages'?" in shown_error


def test_show_a_dump(capsys: pytest.CaptureFixture[str]) -> None:
    path = DUMPS / "topo_8p1h.xml"
    if not path.exists():
        pytest.skip(f"there is no {path.name} next to this checkout")
    assert cli.main(["topology", "show", str(path)]) == 0
    out = capsys.readouterr().out
    assert "8 devices, 4 packages" in out and "4  xgmi" in out


def test_show_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trees.frontier(tmp_path)
    monkeypatch.setenv("HZERO_SYSFS", str(tmp_path))
    assert cli.main(["topology", "show", "auto"]) == 0
    assert "8 devices, 4 packages, 4 NICs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["show", "frontie"], "unknown source 'frontie'; did you mean 'frontier'? Possible: auto, frontier"),
        (["plot", "frontier"], "unknown action 'plot'; Possible: show"),
        (["show", "./none.yaml"], "none.yaml"),
    ],
)
def test_wrong_arguments(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["topology", *arguments]) == 2
    error = capsys.readouterr().err
    assert says.replace("; Possible", ". Possible") in error and error.count("\n") == 1


def test_help_names_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["topology", "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert ", ".join(PRESETS) in out
