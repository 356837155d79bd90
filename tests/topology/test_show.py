"""``hzero topology show``: text, JSON and picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hzero import cli
from hzero.topology import command, draw
from hzero.topology.machine import Device, Link, Machine, Nic
from hzero.topology.preset import PRESETS, preset
from tests.ranks import ROOT
from tests.topology import trees

RECORDINGS = ROOT.parent / "shared" / "topologies"


def _gcds(count: int) -> Machine:
    """A made-up node of MI250X: modules in a ring, NICs shared by two modules."""
    links = [Link(a, a + 1, "xgmi", 4, 200.0) for a in range(0, count, 2)]
    links += [Link(*sorted((a, (a + 2) % count)), "xgmi", 1, 50.0) for a in range(0, count, 2)]
    devices = [Device(n, f"0000:{16 + n:02x}:00.0", "MI250X", numa=n // 4, nic=f"mlx5_{n // 4}") for n in range(count)]
    nics = [Nic(f"mlx5_{n}", f"0000:{80 + n:02x}:00.0", "ib", 25.0, n) for n in range(count // 4)]
    return Machine(f"{count} GCDs", tuple(devices), tuple(links), tuple(nics), remarks=("made up",))


def _ambiguous() -> Machine:
    return Machine("pairs", tuple(Device(n) for n in range(4)), (Link(0, 1, "xgmi", 2), Link(2, 3, "xgmi", 2)))


def test_text_of_frontier() -> None:
    lines = draw.text(preset("frontier")).splitlines()
    assert lines[0] == "preset frontier: 8 devices, 4 packages, 4 NICs"
    assert lines[3].split() == ["0", "0", "0000:c1:00.0", "MI250X", "3", "-"]
    assert lines[4].split() == ["1", "0000:c6:00.0", "MI250X", "3", "-"]
    rows = [line.split(maxsplit=1)[1].replace(" ", "") for line in lines[14:25] if "---" not in line]
    assert rows == ["-4|1.|..|2.", "4-|.1|.1|..", "1.|-4|2.|..", ".1|4-|..|.1", "..|2.|-4|1.", ".1|..|4-|.1",
                    "2.|..|1.|-4", "..|.1|.1|4-"]  # fmt: skip
    assert "     4  xgmi, 200 GB/s each way together: 4 pairs" in lines
    assert "     .  no direct link, routed: 16 pairs" in lines
    assert any(line.split()[:4] == ["hsn2", "-", "cxi", "25"] for line in lines)


@pytest.mark.parametrize("machine", [*map(preset, PRESETS), _gcds(8), _gcds(16), _ambiguous(), Machine("none", ())])
def test_text_is_narrow(machine: Machine) -> None:
    lines = draw.text(machine).splitlines()
    assert max(map(len, lines)) <= 100 and not any(line.endswith(" ") for line in lines)
    for device in machine.devices:
        assert sum(device.bus in line for line in lines) == 1 or not device.bus


def test_text_of_several_kinds_and_of_many_devices() -> None:
    devices = tuple(Device(number) for number in range(3))
    mixed = draw.text(Machine("mixed", devices, (Link(0, 1, "nvlink", 4, 100.0), Link(1, 2, "pcie", None, 32.0))))
    assert (
        "     0   - 4n  ." in mixed
        and "    ?p  pcie, 32 GB/s each way together: 1 pair (how many is not stated)" in mixed
    )
    assert "names no direct links" in draw.text(Machine("bare", devices))
    many = draw.text(_gcds(64))
    assert (
        "links of 64 devices (too many for a matrix)" in many and "1  xgmi, 50 GB/s each way together: 32 pairs" in many
    )
    assert draw.text(_gcds(8)).endswith("remark: made up\n")


# Names that a picture might take for formulas; and a NIC of all devices, which stands at no side.
_NAMES = Machine(
    "$x_", tuple(Device(n, nic=r"$\frac$") for n in range(4)), nics=(Nic(r"$\frac$", gb_s=1.0), Nic("$_$"))
)


@pytest.mark.parametrize(
    "machine", [preset("frontier"), _gcds(16), preset("laptop"), _ambiguous(), _NAMES, Machine("none", ())]
)
def test_picture(machine: Machine, tmp_path: Path) -> None:
    from matplotlib.image import imread

    out = tmp_path / "node.png"
    out.write_text("old")
    draw.png(machine, out)
    pixels = imread(out)
    assert pixels.shape[0] > 1000 and [path.name for path in tmp_path.iterdir()] == ["node.png"]
    colours = {tuple(int(255 * part) for part in pixel[:3]) for pixel in pixels[::3, ::3].reshape(-1, pixels.shape[2])}
    assert bool(machine.devices) == ((0xE8, 0xF1, 0xF8) in colours)  # the inside of a device


def test_picture_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["topology", "show", "laptop", "--png", str(tmp_path / "no" / "folder.png")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
    (tmp_path / "folder.png").mkdir()
    assert cli.main(["topology", "show", "laptop", "--png", str(tmp_path / "folder.png")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_show_a_preset(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["topology", "show", "frontier", "--png"]) == 0
    out = capsys.readouterr().out
    assert "parallel links" in out and (tmp_path / "topology.png").stat().st_size > 10_000
    assert "  gcd        2    200 GB/s            [0, 1] [2, 3] [4, 5] [6, 7]\n" in out
    assert out.endswith("picture: topology.png\n")
    assert cli.main(["topology", "show", "frontier"]) == 0
    assert "picture" not in capsys.readouterr().out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["topology", "show", "frontier", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == ["source", "tiers", "devices", "links", "nics", "remarks"]
    assert [tier["name"] for tier in shown["tiers"]] == ["gcd", "hive", "gpu", "node", "cluster"]
    assert shown["tiers"][0] == {
        "name": "gcd", "size": 2, "members": [[0, 1], [2, 3], [4, 5], [6, 7]], "gb_s": 200.0, "latency_us": None,
    }  # fmt: skip
    assert [tier["size"] for tier in shown["tiers"]] == [2, 1, 4, 1, 1]
    assert shown["devices"][5]["bus"] == "0000:d6:00.0"
    assert shown["links"][0] == {"a": 0, "b": 1, "kind": "xgmi", "count": 4, "gb_s": 200.0}
    assert len(shown["nics"]) == 4


def test_an_ambiguous_machine_is_drawn_and_then_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "machine_of", lambda source: _ambiguous())
    assert cli.main(["topology", "show", "x", "--png", str(tmp_path / "x.png")]) == 2
    shown = capsys.readouterr()
    assert "packages not known" in shown.out and "     0  - 2 . ." in shown.out and "tier" not in shown.out
    assert "ambiguous" in shown.err and "packages: [[0, 1], [2, 3]]" in shown.err and shown.err.count("\n") == 1
    assert (tmp_path / "x.png").exists()
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
    assert f"{path}: line 2: unknown key 'package'; did you mean 'packages'?" in shown_error


def test_show_a_recording(capsys: pytest.CaptureFixture[str]) -> None:
    path = RECORDINGS / "topo_8p1h.xml"
    if not path.exists():
        pytest.skip(f"there is no {path.name} beside this checkout")
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
        (["draw", "frontier"], "unknown action 'draw'; Possible: show"),
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
    assert ", ".join(PRESETS) in out and "--png" in out
