"""The reader of rocm-smi's output."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hzero.topology.machine import Machine, TopologyError
from hzero.topology.readers import read_file, rocm_smi, source
from hzero.topology.tiers import packages_of
from tests.topology.hostile import machine_or_error, mutated
from tests.topology.trees import FRONTIER_BUSES, FRONTIER_LINKS


def topology() -> str:
    """What --showtopo --showbus --showproductname --showuniqueid --json prints on a Frontier node."""
    pairs = [(a, b) for a in range(8) for b in range(a + 1, 8)]
    system = {}
    for a, b in pairs:
        direct = (a, b) in FRONTIER_LINKS
        system[f"(Topology) Weight between DRM devices {a} and {b}"] = "15" if direct else "30"
        system[f"(Topology) Hops between DRM devices {a} and {b}"] = "1"
        system[f"(Topology) Link type between DRM devices {a} and {b}"] = "XGMI"
    cards = {
        f"card{number}": {
            "PCI Bus": f"0000:{bus.upper()}:00.0",
            "Card Series": "AMD Instinct MI250X",
            "Card Model": "0x740c",
            "Unique ID": f"0x{0xF00 + number:x}",
            "(Topology) Numa Node": str((3, 1, 0, 2)[number // 2]),
            "(Topology) Numa Affinity": str((3, 1, 0, 2)[number // 2]),
        }
        for number, bus in enumerate(FRONTIER_BUSES)
    }
    return json.dumps({**cards, "system": system})


def bandwidths() -> str:
    """What --shownodesbw prints there."""
    rows = [
        "=== ROCm System Management Interface ===",
        "=== Bandwidth ===",
        "      " + "".join(f"GPU{n:<9}" for n in range(8)),
    ]
    for a in range(8):
        cells = []
        for b in range(8):
            count = FRONTIER_LINKS.get((min(a, b), max(a, b)), 0)
            cells.append("N/A" if a == b else f"50000-{50000 * count}" if count else "0-0")
        rows.append(f"GPU{a}  " + "".join(f"{cell:<13}" for cell in cells))
    return "\n".join(
        [*rows, "Format: min-max; Units: mps", '"0-0" min-max bandwidth indicates devices are not connected']
    )


def read(tmp_path: Path, text: str) -> Machine:
    path = tmp_path / "topo.json"
    path.write_text(text)
    return rocm_smi.read(path)


def test_with_bandwidths_links_are_counted(tmp_path: Path) -> None:
    machine = read(tmp_path, f"{topology()}\n{bandwidths()}\n")
    assert {(link.a, link.b): link.count for link in machine.links} == FRONTIER_LINKS
    assert [device.bus for device in machine.devices] == [f"0000:{bus}:00.0" for bus in FRONTIER_BUSES]
    assert [device.numa for device in machine.devices] == [3, 3, 1, 1, 0, 0, 2, 2]
    assert {device.kind for device in machine.devices} == {"MI250X"} and machine.remarks == ()
    assert machine.devices[1].uuid == "GPU-0000000000000f01"
    assert packages_of(machine) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert read_file(tmp_path / "topo.json") == machine


def test_bandwidths_as_json(tmp_path: Path) -> None:
    pairs = {
        f" min-max bandwidth between DRM devices {a} and {b}": f"50000-{50000 * n}"
        for (a, b), n in FRONTIER_LINKS.items()
    }
    machine = read(tmp_path, topology() + json.dumps({"system": pairs}))
    assert {(link.a, link.b): link.count for link in machine.links} == FRONTIER_LINKS


def test_without_bandwidths_weights_tell_no_counts(tmp_path: Path) -> None:
    machine = read(tmp_path, topology())
    assert {(link.a, link.b) for link in machine.links} == set(FRONTIER_LINKS)
    assert {link.count for link in machine.links} == {None}
    assert "add the output of rocm-smi --shownodesbw" in machine.remarks[0]


def test_bandwidths_tell_routed_pairs_where_weights_do_not(tmp_path: Path) -> None:
    machine = read(tmp_path, topology().replace('"30"', '"15"') + "\n" + bandwidths())
    assert {(link.a, link.b): link.count for link in machine.links} == FRONTIER_LINKS


def test_pairs_over_pcie_have_no_link(tmp_path: Path) -> None:
    assert read(tmp_path, topology().replace('"XGMI"', '"PCIE"')).links == ()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"15"', '"-15"', ":1: found weight '-15'"),
        ("0000:C1:00.0", "C1", ":1: found 'C1', expected a PCI bus id"),
        ("0000:C6:00.0", "0000:C1:00.0", "0000:c1:00.0 is there twice"),
        ('"(Topology) Numa Node": "3"', '"(Topology) Numa Node": "three"', ":1: found numa node 'three'"),
        ("devices 0 and 1", "devices 1 and 1", ":1: device 1 is linked to itself"),
        ("50000-200000", "50000-200001", "200001 at most"),
        ("GPU1  50000-200000", "GPU1  60000-180000", ":6: bandwidth of 1 and 0 is '60000-180000', but '50000-200000'"),
        ("GPU0  N/A", "GPU0  N/A 0-0", ":5: found 9 cells, expected 8"),
    ],
)
def test_contradictions_name_the_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = f"{topology()}\n{bandwidths()}"
    assert old in text
    with pytest.raises(TopologyError, match=message) as caught:
        read(tmp_path, text.replace(old, new))
    assert "topo.json" in str(caught.value)


@pytest.mark.parametrize(
    "noise",
    [
        "",
        "{" * 2**20,
        '{"card0":' * 5000,
        "GPU0 " * 2**18,
        " " * 2**20,
        "[1]",
        "{}" * 2**20,
        "x" + "\n" * 2**20,
        "x\n" + " " * 2**20,
        "x\n" + "{ " * 2**19,
        '{"card0": {"x": ' + "9" * 5000 + "}}",
    ],
)
def test_noise(tmp_path: Path, noise: str) -> None:
    path = tmp_path / "noise"
    path.write_text(noise)
    assert machine_or_error(rocm_smi.read, path) is None
    if noise[:1] != "{":  # else it might be a declared machine
        assert machine_or_error(read_file, path) is None


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=mutated(f"{topology()}\n{bandwidths()}"))
def test_any_change_gives_a_machine_or_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "topo.json"
    path.write_bytes(content)
    machine_or_error(rocm_smi.read, path)


KEYS = st.sampled_from(
    [
        *(
            f"(Topology) {what} between DRM devices {pair}"
            for what in ("Weight", "Hops", "Link type")
            for pair in ("0 and 1", "1 and 2")
        ),
        "min-max bandwidth between DRM devices 0 and 1",
        "(Topology) Weight between DRM devices 1 and 1",
        *("PCI Bus", "Unique ID", "Card Series", "(Topology) Numa Node"),
    ]
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.sampled_from(["15", "XGMI", "50000-200000", "-1", "0000:C1:00.0", "9" * 30, "0-0", "-"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(KEYS, inner, max_size=2)),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.dictionaries(st.sampled_from(["system", "card0", "card1", "card999999"]), st.dictionaries(KEYS, VALUES))
)
def test_any_values_give_a_machine_or_an_error(tmp_path: Path, content: object) -> None:
    path = tmp_path / "topo.json"
    path.write_text(json.dumps(content))
    machine_or_error(rocm_smi.read, path)


def tool(folder: Path, script: str) -> None:
    path = folder / "rocm-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_query_asks_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "topology").write_text(topology())
    (tmp_path / "bandwidths").write_text(bandwidths())
    tool(
        tmp_path, f'case "$1" in --showtopo) cat {tmp_path}/topology;; --shownodesbw) cat {tmp_path}/bandwidths;; esac'
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    machine = rocm_smi.query()
    assert machine.source == "rocm-smi"
    assert {(link.a, link.b): link.count for link in machine.links} == FRONTIER_LINKS


def test_query_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TopologyError, match=r"rocm-smi --showtopo .*: cannot be run: no such file"):
        rocm_smi.query()
    tool(tmp_path, "echo 'Driver not initialized' >&2; exit 3")
    with pytest.raises(
        TopologyError, match=r"rocm-smi --showtopo .*: failed with exit status 3: Driver not initialized"
    ):
        rocm_smi.query()
    tool(tmp_path, "echo nothing of use")
    with pytest.raises(TopologyError, match="rocm-smi: has no output of rocm-smi"):
        rocm_smi.query()


def test_a_tool_that_hangs_is_ended_with_its_children() -> None:
    with pytest.raises(TopologyError, match=r"sh -c sleep 60 & sleep 60: no answer within 0.2 s"):
        source.run(["sh", "-c", "sleep 60 & sleep 60"], timeout_s=0.2)
