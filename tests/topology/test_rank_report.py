"""What ranks say of themselves adds up to the node, also where each sees only its own device."""

from __future__ import annotations

import dataclasses

import pytest

from hzero.topology.discovery import assemble
from hzero.topology.machine import AmbiguousTopologyError, Device, Link, Machine, Nic
from hzero.topology.rank_report import RankReport, places_of, report_of
from hzero.validation import ConfigError

PAIRS = {
    4: [(0, 1), (2, 3), (4, 5), (6, 7)],
    2: [(0, 6), (2, 4)],
    1: [(0, 2), (1, 3), (1, 5), (3, 7), (4, 6), (5, 7)],
}
BUSES = [f"0000:{bus}:00.0" for bus in ("c1", "c6", "c9", "ce", "d1", "d6", "d9", "de")]


def node(see: set[int] | None = None) -> Machine:
    """A node of four MI250X; of the devices that are not in ``see`` only the number is known."""
    seen = set(range(8)) if see is None else see
    devices = [
        Device(i, BUSES[i], "gfx90a", node=f"kfd{i}") if i in seen else Device(i, node=f"kfd{i}", hidden=True)
        for i in range(8)
    ]
    links = [Link(a, b, "xgmi", n, 50.0 * n) for n, pairs in PAIRS.items() for a, b in pairs if {a, b} & seen]
    return Machine("test", tuple(devices), tuple(links), (Nic("hsn0", kind="cxi", gb_s=25.0),))


def reports(machines: list[Machine], devices: list[int]) -> list[RankReport]:
    """Of ranks 0.. on ``devices``, each from its own view of the node."""
    return [
        RankReport.decode(report_of(rank, len(machines), "n", machine, machine.device(device)).encode())
        for rank, (machine, device) in enumerate(zip(machines, devices))
    ]


def test_a_report_survives_its_journey() -> None:
    report = report_of(3, 8, "n", node(), node().device(2))
    assert RankReport.decode(report.encode()) == report
    assert report.fabric == "cxi"
    assert len(report.encode()) < 500
    assert RankReport.decode(report_of(0, 1, "n", Machine("none", ()), None).encode()).device is None


@pytest.mark.parametrize("order", [list(range(8)), [4, 5, 2, 3, 6, 7, 0, 1]])
def test_whole_views_and_views_of_one_device_give_the_same_places(order: list[int]) -> None:
    whole = places_of(reports([node()] * 8, order))
    own = places_of(reports([node({device}) for device in order], order))
    assert whole == own
    assert [(place.package, place.gcd) for place in whole] == [divmod(device, 2) for device in order]


def test_packages_are_known_where_only_one_of_their_devices_has_a_rank() -> None:
    order = [1, 3, 4, 6]
    places = places_of(reports([node({device}) for device in order], order))
    assert [place.package for place in places] == sorted({place.package for place in places})


def test_contradictions_name_the_ranks() -> None:
    said = reports([node()] * 2, [0, 1])
    peer, kind, _, rate = said[1].links[0]
    said[1] = dataclasses.replace(said[1], links=((peer, kind, 2, rate), *said[1].links[1:]))
    with pytest.raises(ConfigError, match=r"ranks 0 and 1 of node n contradict each other .*c1.*c6.*4 and 2 links"):
        places_of(said)


def test_ranks_of_different_worlds_are_refused() -> None:
    said = reports([node()] * 2, [0, 1])
    said[1] = dataclasses.replace(said[1], world_size=3)
    with pytest.raises(ConfigError, match="rank 1 of 2 was assigned rank 1 of 3"):
        assemble(said)


def test_an_ambiguous_node_is_named() -> None:
    chain = Machine("test", tuple(Device(i) for i in range(3)), (Link(0, 1, "xgmi", 2), Link(1, 2, "xgmi", 2)))
    with pytest.raises(AmbiguousTopologyError, match="node n: ambiguous"):
        places_of(reports([_ring()] * 4, [0, 1, 2, 3]))
    assert [place.package for place in places_of(reports([chain] * 3, [0, 1, 2]))] == [0, 1, 2]


def _ring() -> Machine:
    """Every device has two links to one neighbour and two to the other, and one across: no pairs stand out."""
    links = [
        Link(0, 1, "xgmi", 2),
        Link(1, 2, "xgmi", 2),
        Link(2, 3, "xgmi", 2),
        Link(0, 3, "xgmi", 2),
        Link(0, 2, "xgmi", 1),
    ]
    return Machine("test", tuple(Device(i) for i in range(4)), tuple(links))


def test_some_ranks_with_devices_and_some_without_are_refused() -> None:
    said = [*reports([node()], [0]), RankReport(1, 2, "n", None)]
    with pytest.raises(ConfigError, match=r"ranks \[1\] of node n have no device"):
        places_of(said)


def test_declared_packages_count() -> None:
    flat = Machine("test", tuple(Device(i) for i in range(4)), packages=((0, 2), (1, 3)))
    assert [(p.package, p.gcd) for p in places_of(reports([flat] * 4, [0, 1, 2, 3]))] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    ]
