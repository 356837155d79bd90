"""Placement: the grid that the stage works on, from where every rank physically sits; or the reason why none exists."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hzero.config import BASE_TIERS
from hzero.topology.grid import Grid
from hzero.validation import ConfigError, some


@dataclass(frozen=True)
class Place:
    """Where one rank sits.

    Attributes:
        rank: The rank.
        host: Its node.
        package: Index of its package among those of the node, in the order of PCI bus ids; hives one after the other.
        gcd: Index of its device in the package.
    """

    rank: int
    host: str
    package: int
    gcd: int


def grid_of(places: Sequence[Place]) -> Grid:
    """The grid of a world whose nodes all have the same packages, and packages the same number of devices.

    Coordinates follow physical places, so that groups of tier ``gpu`` hold devices at the same position of their
    packages, and those of tier ``node`` the same packages; they are numbered as the ranks are wherever one of the six
    orders of axes allows it. Nodes whose ranks go through packages in different orders are paired by rank. Where no
    order holds, the grid lists the rank of every place.

    Args:
        places: One per rank, in rank order.

    Raises:
        ConfigError: Two ranks sit on one device, or the world is not rectangular; the message names the nodes that differ.
    """
    table = _table(places)
    shapes = {
        host: tuple(sorted((len(package) for package in packages.values()), reverse=True))
        for host, packages in table.items()
    }
    first = next(iter(shapes.values()))
    if any(shape != first for shape in shapes.values()) or len(set(first)) != 1:
        raise ConfigError(_refusal(shapes))
    physical = [
        [[gcds[gcd] for gcd in sorted(gcds)] for _, gcds in sorted(packages.items())] for packages in table.values()
    ]
    by_place = _numbered_as_ranks(physical)
    by_rank = [sorted(packages, key=min) for packages in by_place]
    for cells in (by_place, by_rank):
        for order in itertools.permutations(BASE_TIERS[::-1]):
            grid = Grid(len(cells), len(cells[0]), len(cells[0][0]), order)
            if all(
                grid.rank(node, gpu, gcd) == rank
                for node, packages in enumerate(cells)
                for gpu, package in enumerate(packages)
                for gcd, rank in enumerate(package)
            ):
                return grid
    ranks = tuple(rank for packages in by_place for package in packages for rank in package)
    return Grid(len(by_place), len(by_place[0]), len(by_place[0][0]), ranks=ranks)


def _table(places: Iterable[Place]) -> dict[str, dict[int, dict[int, int]]]:
    """Ranks by node, package and device, as physical indices number them; nodes in the order of their lowest rank."""
    table: dict[str, dict[int, dict[int, int]]] = {}
    for place in places:
        package = table.setdefault(place.host, {}).setdefault(place.package, {})
        if place.gcd in package:
            raise ConfigError(
                f"topology: ranks {package[place.gcd]} and {place.rank} are on the same device of node {place.host}; each "
                "rank needs a device of its own: bind them with --gpus-per-task=1, LOCAL_RANK or ROCR_VISIBLE_DEVICES"
            )
        package[place.gcd] = place.rank
    return table


def _numbered_as_ranks(cells: list[list[list[int]]]) -> list[list[list[int]]]:
    """The same places with the axes' labels in the order in which rank 0's own node and package number them."""
    node = next(n for n, packages in enumerate(cells) if 0 in itertools.chain(*packages))
    home = next(p for p, package in enumerate(cells[node]) if 0 in package)
    own = cells[node][home].index(0)
    gcds = sorted(range(len(cells[0][0])), key=lambda gcd: cells[node][home][gcd])
    packages = sorted(range(len(cells[0])), key=lambda package: cells[node][package][own])
    nodes = sorted(range(len(cells)), key=lambda node: cells[node][home][own])
    return [[[cells[n][p][g] for g in gcds] for p in packages] for n in nodes]


def _refusal(shapes: dict[str, tuple[int, ...]]) -> str:
    even = Counter(shape for shape in shapes.values() if len(set(shape)) == 1)
    usual = even.most_common(1)[0][0] if even else ()
    odd = [f"node {host} has {_shape(shape)}" for host, shape in shapes.items() if shape != usual]
    others = f"; every other node has {_shape(usual)}" if len(odd) < len(shapes) else ""
    return (
        f"topology: the world is no grid of nodes x packages x devices: {some(odd, 4)}{others}. Start the same number of "
        "ranks on the same packages of every node"
    )


def _shape(shape: Sequence[int]) -> str:
    return f"{sum(shape)} ranks on packages of {'/'.join(map(str, shape))}"
