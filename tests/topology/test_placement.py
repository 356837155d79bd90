"""From physical places to grids: any numbering of ranks, uneven nodes, missing devices."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hzero.config import BASE_TIERS, Tier, complete_order
from hzero.topology.discovery import Place, grid_of
from hzero.validation import ConfigError

#: Devices by local rank on a node of four packages of two, as OLCF's `--gpu-bind=closest` gives them.
OLCF = (4, 5, 2, 3, 6, 7, 0, 1)
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))


def node_by_node(nodes: int, devices: tuple[int, ...], width: int = 2, cyclic: bool = False) -> list[Place]:
    """A world in which every node's local ranks are on ``devices``."""
    places = []
    for rank in range(nodes * len(devices)):
        node, local = (rank % nodes, rank // nodes) if cyclic else divmod(rank, len(devices))
        places.append(Place(rank, f"n{node}", *divmod(devices[local], width)))
    return places


@pytest.mark.parametrize(
    ("devices", "cyclic", "order"),
    [
        (tuple(range(8)), False, ("node", "gpu", "gcd")),
        (OLCF, False, ("node", "gpu", "gcd")),
        (OLCF, True, ("gpu", "gcd", "node")),
        ((1, 0, 3, 2, 5, 4, 7, 6), False, ("node", "gpu", "gcd")),
        ((0, 2, 4, 6, 1, 3, 5, 7), False, ("node", "gcd", "gpu")),
        ((0, 2, 4, 6, 1, 3, 5, 7), True, ("gcd", "gpu", "node")),
    ],
)
def test_usual_launches_are_regular(devices: tuple[int, ...], cyclic: bool, order: tuple[Tier, ...]) -> None:
    grid = grid_of(node_by_node(3, devices, cyclic=cyclic))
    assert (grid.nodes, grid.gpus_per_node, grid.gcds_per_gpu) == (3, 4, 2)
    assert grid.regular and grid.order == complete_order(order)


def test_nodes_with_other_orders_of_packages_stay_regular() -> None:
    """Pairing packages by rank costs nothing that a pass over all shards would not cost more."""
    places = [Place(rank, "a", *divmod(rank, 2)) for rank in range(8)]
    places += [Place(8 + local, "b", *divmod(device, 2)) for local, device in enumerate(OLCF)]
    assert grid_of(places).regular


@given(SHAPES, st.randoms(use_true_random=False))
def test_groups_are_physical_whatever_the_numbering(shape: tuple[int, int, int], chance: random.Random) -> None:
    nodes, gpus, gcds = shape
    cells = [(f"n{n}", p, g) for n in range(nodes) for p in range(gpus) for g in range(gcds)]
    chance.shuffle(cells)
    places = [Place(rank, *cell) for rank, cell in enumerate(cells)]
    grid = grid_of(places)
    for place in places:
        group = [places[rank] for rank in grid.tier_group(place.rank, "gcd")]
        assert {(p.host, p.package) for p in group} == {(place.host, place.package)}
        group = [places[rank] for rank in grid.tier_group(place.rank, "gpu")]
        assert {p.host for p in group} == {place.host} and len({p.package for p in group}) == gpus
        assert {p.gcd for p in group} == {place.gcd}
        assert len({places[rank].host for rank in grid.tier_group(place.rank, "node")}) == nodes
        assert [grid.size(tier) for tier in BASE_TIERS] == [gcds, gpus, nodes]


@given(SHAPES, st.lists(st.integers(0, 200), max_size=6))
def test_a_world_is_a_grid_or_its_uneven_nodes_are_named(shape: tuple[int, int, int], missing: list[int]) -> None:
    nodes, gpus, gcds = shape
    cells = [(f"n{n}", p, g) for n in range(nodes) for p in range(gpus) for g in range(gcds)]
    cells = [cell for index, cell in enumerate(cells) if index not in missing] or cells
    by_package: dict[tuple[str, int], int] = Counter((host, package) for host, package, _ in cells)
    by_host: dict[str, int] = Counter(host for host, _ in by_package)
    try:
        grid = grid_of([Place(rank, *cell) for rank, cell in enumerate(cells)])
    except ConfigError as error:
        assert len({*by_package.values()}) > 1 or len({*by_host.values()}) > 1
        assert "the ranks do not form a grid of nodes x packages x devices: node n" in str(error) and "\n" not in str(
            error
        )
        for host, size in re.findall(r"node (n\d+) has (\d+) ranks", str(error)):
            assert sum(count for (name, _), count in by_package.items() if name == host) == int(size)
    else:
        assert grid.world_size == len(cells) and len({*by_package.values()}) == len({*by_host.values()}) == 1


def test_two_ranks_on_one_device_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks 0 and 1 are on the same device of node n0"):
        grid_of([Place(0, "n0", 0, 0), Place(1, "n0", 0, 0)])
