"""Nodes against the links they should have, whatever their device numbers are."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hzero.doctor import expected
from hzero.doctor.expected import PairFinding, compare, expected_for, relabelling
from hzero.topology.machine import Device, Link, Machine
from hzero.topology.preset import preset
from hzero.topology.readers import read_file
from hzero.validation import ConfigError
from tests.ranks import ROOT

FRONTIER_ORDER = (4, 5, 2, 3, 6, 7, 0, 1)


def _node(
    name: str,
    numbers: Sequence[int] = (),
    *,
    kind: str | None = None,
    buses: bool = False,
    without: Sequence[int] = (),
    lost: Sequence[tuple[int, int]] = (),
) -> Machine:
    """A preset's node as a source would describe it: other numbers, links without packages; parts of it lost."""
    machine = preset(name)
    new = dict(enumerate(numbers or range(len(machine.devices))))
    devices = [
        replace(device, number=new[device.number], kind=kind or device.kind, bus=device.bus if buses else "")
        for device in machine.devices
        if device.number not in without
    ]
    links = [
        replace(link, a=min(new[link.a], new[link.b]), b=max(new[link.a], new[link.b]))
        for link in machine.links
        if not {link.a, link.b} & set(without) and (link.a, link.b) not in lost
    ]
    return Machine("dumped", tuple(devices), tuple(links))


def _bad(findings: Sequence[PairFinding]) -> list[PairFinding]:
    return [finding for finding in findings if finding.state != "good"]


@pytest.mark.parametrize(
    ("machine", "name"),
    [
        (_node("frontier"), "frontier"),
        (_node("frontier", kind="gfx90a", numbers=FRONTIER_ORDER), "frontier"),
        (_node("frontier", kind="AMD Instinct MI250X"), "frontier"),
        (_node("frontier", without=[3]), "frontier"),
        (_node("frontier", kind="gfx90a", lost=[(0, 6)]), "frontier"),
        (_node("frontier", without=[3, 4, 5, 6]), None),  # half of a node tells nothing
        (_node("mi300x"), "mi300x"),
        (_node("mi300x", kind="gfx942"), "mi300x"),
        (_node("mi300x", kind="gfx90a"), None),  # 8 MI210 are no MI250X
        (_node("mi300x", kind="gfx942", without=[4, 5, 6, 7]), None),  # 4 of 8 MI300X are no node of 4 MI300A
        (_node("mi300x", kind="MI210"), None),
        (_node("el_capitan"), "el_capitan"),
        (_node("el_capitan", kind="gfx942"), "el_capitan"),
        (_node("dgx_h200"), "dgx_h200"),
        (_node("dgx_h200", kind="NVIDIA H200"), "dgx_h200"),
        (_node("dgx_h200", kind="NVIDIA H200 NVL"), None),
        (preset("laptop"), None),
        (Machine("none", ()), None),
        (Machine("mixed", (Device(0, kind="H200"), Device(1, kind="MI300X"))), None),
    ],
)
def test_which_machine_it_is(machine: Machine, name: str | None) -> None:
    expected = expected_for(machine)
    assert (expected.source if expected else None) == (f"preset {name}" if name else None)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("topo_8p1h", "frontier"),
        ("topo_8p_940", "mi300x"),
        ("topo_8p_90a", None),
        ("topo_4p3l_2h", None),
        ("topo_16p1h", None),
    ],
)
def test_dumped_machines(file: str, name: str | None) -> None:
    """Dumped nodes are as expected, though their numbers are not those of the preset."""
    path = ROOT.parent / "shared" / "topologies" / f"{file}.xml"
    if not path.exists():
        pytest.skip(f"there is no {path.name} next to this checkout")
    machine = read_file(path)
    expected = expected_for(machine)
    assert (expected.source if expected else None) == (f"preset {name}" if name else None)
    assert expected is None or not _bad(compare(machine, expected))


@settings(max_examples=60)
@given(numbers=st.permutations(range(8)), lost=st.sampled_from(preset("frontier").links))
def test_a_lost_link_is_named_under_any_numbering(numbers: list[int], lost: Link) -> None:
    whole = _node("frontier", numbers)
    assert not _bad(compare(whole, preset("frontier")))
    (finding,) = _bad(compare(_node("frontier", numbers, lost=[(lost.a, lost.b)]), preset("frontier")))
    assert finding.pair == tuple(sorted((numbers[lost.a], numbers[lost.b])))
    assert finding.found is None and finding.expected is not None and finding.expected.count == lost.count
    assert finding.state == "degraded" and "found none (routed)" in finding.text


def test_routed_pairs_are_good_and_every_pair_is_there() -> None:
    findings = compare(_node("frontier"), preset("frontier"))
    assert len(findings) == 28 and {finding.state for finding in findings} == {"good"}
    routed = [finding for finding in findings if finding.expected is None]
    assert len(routed) == 16 and routed[0].text == "0-3: routed, as expected"
    assert findings[0].text == "0-1: 4 xgmi links of 200 GB/s together, as expected"


def test_bus_ids_decide_where_both_sides_state_them() -> None:
    """With bus ids the lost link is where it is, though another numbering would explain more."""
    node = _node("frontier", FRONTIER_ORDER, buses=True, lost=[(4, 5)])
    assert relabelling(node, preset("frontier")) == dict(enumerate(FRONTIER_ORDER))
    (finding,) = _bad(compare(node, preset("frontier")))
    assert finding.pair == (6, 7)
    # Links that are there under other numbers do not excuse links that are not there.
    moved = _node("frontier", buses=True)
    swapped = [replace(d, bus=moved.devices[{0: 2, 2: 0}.get(d.number, d.number)].bus) for d in moved.devices]
    assert len(_bad(compare(replace(moved, devices=tuple(swapped)), preset("frontier")))) > 4


def test_fewer_links_less_bandwidth_and_links_too_many() -> None:
    node = _node("frontier")
    links = {(link.a, link.b): link for link in node.links}
    links[2, 3] = replace(links[2, 3], count=3, gb_s=150.0)
    links[0, 6] = replace(links[0, 6], gb_s=60.0)
    links[1, 3] = replace(links[1, 3], gb_s=48.0)  # rounding of a source
    links[4, 6] = replace(links[4, 6], count=None, gb_s=None)  # not stated: a fault only where it is asked for
    links[0, 7] = Link(0, 7, "xgmi", 1, 50.0)
    findings = {
        finding.pair: finding for finding in compare(replace(node, links=tuple(links.values())), preset("frontier"))
    }
    states = {pair: finding.state for pair, finding in findings.items() if finding.state != "good"}
    assert states == {(2, 3): "degraded", (0, 6): "degraded", (4, 6): "unknown", (0, 7): "remark"}
    assert findings[2, 3].text == (
        "2-3: expected 4 xgmi links of 200 GB/s together, found 3 xgmi links of 150 GB/s together"
    )
    assert findings[4, 6].text == (
        "4-6: expected 1 xgmi link of 50 GB/s together, found xgmi links, which the source does not count"
    )


def test_links_with_a_bandwidth_alone() -> None:
    node = _node("frontier", FRONTIER_ORDER)
    node = replace(node, links=tuple(replace(link, count=None) for link in node.links))
    assert not _bad(compare(node, preset("frontier")))


@settings(max_examples=40)
@given(numbers=st.permutations(range(8)), gone=st.integers(0, 7), buses=st.booleans())
def test_a_missing_device_is_named_with_its_neighbour(numbers: list[int], gone: int, buses: bool) -> None:
    expected = preset("frontier")
    (finding,) = _bad(compare(_node("frontier", numbers, without=[gone], buses=buses), expected))
    assert finding.pair == () and finding.state == "degraded" and "7 of 8 devices are there" in finding.text
    assert f"shares its package with device {numbers[gone ^ 1]};" in finding.text
    if buses:  # without them, dies with the same links cannot be told apart
        assert f"device {gone} of preset frontier ({expected.device(gone).bus})" in finding.text


def test_packages_are_laid_on_packages() -> None:
    """A module whose four inner links are all gone is still that module, as the source states modules."""
    node = _node("frontier", FRONTIER_ORDER, lost=[(2, 3)])
    modules = {FRONTIER_ORDER[index]: f"m{index // 2}" for index in range(8)}
    node = replace(node, devices=tuple(replace(d, module=modules[d.number]) for d in node.devices))
    (finding,) = _bad(compare(node, preset("frontier")))
    assert finding.pair == (2, 3)


def test_too_many_devices() -> None:
    with pytest.raises(ConfigError, match="9 devices cannot be compared with the 8 of preset frontier"):
        compare(Machine("many", tuple(Device(number) for number in range(9))), preset("frontier"))


def test_time_is_bounded_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "MAX_STEPS", 5000)
    draw = random.Random(0)
    devices = tuple(Device(number) for number in range(16))

    def machine() -> Machine:
        pairs = [(a, b) for b in range(16) for a in range(b) if draw.random() < 0.4]
        return Machine("random", devices, tuple(Link(a, b, "xgmi", draw.choice([1, 2, 4])) for a, b in pairs))

    begun = time.process_time()
    assert len(compare(machine(), machine())) == 120
    assert time.process_time() - begun < 5
