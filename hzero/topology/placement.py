"""Placement: the grid that the stage works on, from where every rank physically sits; or the reason why none exists."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hzero.config import BASE_TIERS
from hzero.topology.grid import Grid
from hzero.validation import ConfigError, some

#: Nodes, and ranges of ranks, that a message names.
_NAMED = 64


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


#: Ranks by node, package and device, as physical indices number them.
_Table = dict[str, dict[int, dict[int, int]]]


def grid_of(places: Sequence[Place]) -> Grid:
    """The grid of a world whose nodes all have the same packages, and packages the same number of devices.

    Coordinates follow physical places, so that groups of tier ``gpu`` hold devices at the same position of their
    packages, and those of tier ``node`` the same packages; they are numbered as the ranks are wherever one of the six
    orders of axes allows it. Nodes whose ranks go through packages in different orders are paired by rank. Where no
    order holds, the grid lists the rank of every place.

    Args:
        places: One per rank, in rank order.

    Raises:
        ConfigError: Two ranks sit on one device, or the world is not rectangular; the message names the nodes that
            differ and the ranks to drop.
    """
    table = _table(places)
    shapes = {
        host: sorted((len(package) for package in packages.values()), reverse=True) for host, packages in table.items()
    }
    first = next(iter(shapes.values()))
    if any(shape != first for shape in shapes.values()) or len(set(first)) != 1:
        raise ConfigError(_refusal(table, shapes))
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


def _table(places: Iterable[Place]) -> _Table:
    """Nodes in the order of their lowest rank."""
    table: _Table = {}
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


def _refusal(table: _Table, shapes: dict[str, list[int]]) -> str:
    """Why no grid exists, and which ranks to leave out to get one."""
    even = Counter(tuple(shape) for shape in shapes.values() if len(set(shape)) == 1)
    common = even.most_common(1)[0][0] if even else ()
    odd = [host for host, shape in shapes.items() if tuple(shape) != common]
    named = ", ".join(f"node {host} has {_shape(shapes[host])}" for host in odd[:4])
    more = f" and {len(odd) - 4} more differ" if len(odd) > 4 else ""
    others = f"; every other node has {_shape(common)}" if len(odd) < len(shapes) else ""
    gpus, gcds, dropped = _smallest_drop(table)
    ranks = {host: {r for package in packages.values() for r in package.values()} for host, packages in table.items()}
    left = sum(map(len, ranks.values())) - len(dropped)
    where = [host for host, own in ranks.items() if not own.isdisjoint(dropped)]
    return (
        f"topology: the world is no grid of nodes x packages x devices: {named}{more}{others}. Dropping the ranks "
        f"{_ranges(dropped)} (on {some(where, _NAMED)}) leaves {Grid(left // (gpus * gcds), gpus, gcds)}"
    )


def _ranges(ranks: Sequence[int]) -> str:
    """Ranks as ranges: ``0-7, 12``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    shown = ", ".join("-".join(map(str, run)) for run in runs[:_NAMED])
    return shown if len(runs) <= _NAMED else f"{shown} and others, {len(ranks)} in all"


def _shape(shape: Sequence[int]) -> str:
    devices = f"{shape[0]}" if len(set(shape)) == 1 else "/".join(map(str, shape))
    ranks, packages = "rank" + "s" * (sum(shape) != 1), "package" + "s" * (len(shape) != 1)
    return f"{sum(shape)} {ranks} on {len(shape)} {packages} of {devices}"


def _smallest_drop(table: _Table) -> tuple[int, int, list[int]]:
    """Packages per node, devices per package, and the ranks outside of the largest grid that the world holds."""
    nodes = list(table.values())
    ways = []
    for gcds in {len(package) for packages in nodes for package in packages.values()}:
        wide = [sum(len(package) >= gcds for package in packages.values()) for packages in nodes]
        ways += [(sum(count >= gpus for count in wide) * gpus * gcds, gcds, gpus) for gpus in set(wide) - {0}]
    _, gcds, gpus = max(ways)  # of two ways to keep as many, the one with whole packages: their links are the fastest
    # Packages that most nodes have are kept, so that what is left still pairs the same packages of all nodes.
    shared = Counter(label for packages in nodes for label, package in packages.items() if len(package) >= gcds)
    dropped: list[int] = []
    for packages in nodes:
        fitting = sorted(
            (label for label, p in packages.items() if len(p) >= gcds), key=lambda label: (-shared[label], label)
        )
        kept = fitting[:gpus] if len(fitting) >= gpus else []
        for label, package in packages.items():
            order = sorted(package)
            dropped += [package[gcd] for gcd in (order[gcds:] if label in kept else order)]
    return gpus, gcds, sorted(dropped)
