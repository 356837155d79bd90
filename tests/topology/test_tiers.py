"""Tiers of nodes: dumps of real ones, declared ones, and those that can be read in two ways."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hzero.errors import ConfigError
from hzero.topology.node import AmbiguousTopologyError, Device, Link, Node, bus_id, packages_of, tiers_of
from tests.topology.trees import FRONTIER_LINKS

FRONTIER = {n: [pair for pair, count in FRONTIER_LINKS.items() if count == n] for n in (4, 2, 1)}


def machine(count: int, pairs: dict[int, list[tuple[int, int]]], kind: str = "gfx90a", **more: object) -> Node:
    links = [Link(a, b, "xgmi", n, 50.0 * n) for n, joined in pairs.items() for a, b in joined]
    return Node("test", tuple(Device(number, kind=kind) for number in range(count)), tuple(links), **more)  # type: ignore[arg-type]


def sizes(node: Node) -> dict[str, int]:
    return {tier.name: tier.size for tier in tiers_of(node)}


def test_groups_hold_devices_at_the_same_position_whatever_their_numbers() -> None:
    """Positions follow PCI bus ids: only these groups of a Frontier node are joined by direct links all around."""
    numbers = random.Random(3).sample(range(8), 8)
    devices = tuple(Device(numbers[i], f"0000:{i:02x}:00.0", "gfx90a") for i in range(8))
    links = tuple(Link(*sorted((numbers[a], numbers[b])), "xgmi", n) for n, pairs in FRONTIER.items() for a, b in pairs)
    gpu = next(tier for tier in tiers_of(Node("test", devices, links)) if tier.name == "intra_node")
    assert set(gpu.groups) == {tuple(sorted(numbers[i] for i in range(start, 8, 2))) for start in (0, 1)}


@pytest.mark.parametrize("gone", [0, 5])
def test_a_missing_die_leaves_its_partner_alone_in_its_package(gone: int) -> None:
    links = tuple(Link(a, b, "xgmi", n) for n, pairs in FRONTIER.items() for a, b in pairs if gone not in (a, b))
    node = Node("test", tuple(Device(i, kind="gfx90a") for i in range(8) if i != gone), links)
    assert (gone ^ 1,) in packages_of(node)
    assert {len(group) for group in tiers_of(node)[0].groups} == {1, 2}
    unknown = Node("test", tuple(Device(i) for i in range(8) if i != gone), links)
    with pytest.raises(AmbiguousTopologyError, match=r"declare the machine in a file, for example with packages: \[\["):
        tiers_of(unknown)


@pytest.mark.parametrize(
    ("kind", "pairs"),
    [
        ("", {2: [(0, 1), (1, 2), (2, 3), (0, 3)], 1: [(0, 2), (1, 3)]}),  # a ring of the most links
        ("", {4: [(0, 1), (2, 3), (2, 4), (3, 4)], 1: [(0, 2)]}),  # a pair and a triple
        ("", {3: [(0, 1), (2, 3)]}),  # two dies, or two bridged cards
        ("gfx90a", {4: [(0, 1), (1, 2), (0, 2)]}),
        ("AMD Instinct MI250X", {2: [(0, 3), (1, 2)], 1: [(0, 1), (2, 3)]}),  # one die of each module of Frontier
        ("gfx90a", {**FRONTIER, 4: FRONTIER[4][1:]}),  # a module that has lost its links
    ],
)
def test_ambiguous_machines_are_reported_with_the_choice(kind: str, pairs: dict[int, list[tuple[int, int]]]) -> None:
    node = machine(1 + max(number for joined in pairs.values() for pair in joined for number in pair), pairs, kind)
    with pytest.raises(AmbiguousTopologyError, match=r"^test: ambiguous: ") as raised:
        tiers_of(node)
    ways = re.findall(r"packages: (\[\[.*?\]\])", str(raised.value))
    assert ways, "what is offered can be declared"
    for way in ways:
        declared = dataclasses.replace(node, packages=tuple(map(tuple, json.loads(way))))
        assert len(packages_of(declared)) == len(json.loads(way))


def test_links_without_counts_are_ambiguous_where_a_module_may_have_two_dies() -> None:
    links = tuple(Link(a, b) for a, b in itertools.combinations(range(4), 2))
    with pytest.raises(AmbiguousTopologyError, match=r"0-1: \?"):
        tiers_of(Node("test", tuple(Device(i, kind="gfx90a") for i in range(4)), links))
    single = Node("test", tuple(Device(i, kind="MI300X") for i in range(4)), links)
    assert sizes(single)["intra_package"] == 1


def test_one_process_does_not_judge_devices_that_are_hidden_from_it() -> None:
    devices = (Device(0, kind="MI250X"), *(Device(i, hidden=True) for i in range(1, 8)))
    links = tuple(Link(a, b, "xgmi", n) for n, pairs in FRONTIER.items() for a, b in pairs if a == 0)
    node = Node("test", devices, links)
    with pytest.raises(AmbiguousTopologyError, match=r"hides the devices \[1, 2, .*srun"):
        tiers_of(node)
    assert (0, 1) in packages_of(node, of_ranks=True)


def test_modules_and_declared_packages_come_before_links() -> None:
    pairs = {1: [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]}
    assert packages_of(machine(4, pairs, packages=((0, 3), (1, 2)))) == ((0, 3), (1, 2))
    devices = tuple(Device(i, module=f"board{i % 2}") for i in range(4))
    assert packages_of(Node("test", devices)) == ((0, 2), (1, 3))


def test_bridged_pairs_of_nvidia_cards_are_hives() -> None:
    links = (Link(0, 1, "nvlink", 12, 300.0), Link(2, 3, "nvlink", 12, 300.0))
    node = Node("test", tuple(Device(i, kind="NVIDIA A100-PCIE-80GB") for i in range(4)), links)
    assert sizes(node) == {"intra_package": 1, "intra_hive": 2, "intra_node": 2, "inter_node": 1}


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(1, 4)), max_size=30),
    st.sampled_from(["", "gfx90a", "MI300X"]),
)
def test_any_links_give_tiers_or_an_ambiguity(drawn: list[tuple[int, int, int]], kind: str) -> None:
    links = {(a, b): Link(a, b, "xgmi", n) for a, b, n in drawn if a < b}
    node = Node("test", tuple(Device(i, kind=kind) for i in range(8)), tuple(links.values()))
    try:
        tiers = tiers_of(node)
    except AmbiguousTopologyError:
        return
    for tier in tiers:
        assert sorted(number for group in tier.groups for number in group) == list(range(8))
        assert tier.size == max(len(group) for group in tier.groups)


@given(st.text(max_size=20))
def test_other_text_is_no_bus_id(text: str) -> None:
    assert bus_id("C1:00.0") == bus_id("00000000:c1:00.0") == "0000:c1:00.0"
    with contextlib.suppress(ConfigError):
        assert bus_id(bus_id(text, "test"), "test")
