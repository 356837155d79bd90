"""The grid: a machine as tiers of equal groups, and the place of every rank. Pure arithmetic, for a world of any size."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hzero.config import AUTOMATIC, BASE_TIERS, SCOPES, TIERS, Scope, Tier, complete_order, tiers_inside
from hzero.validation import ConfigError, some

#: Nodes from which on groups are chosen: fewer exchange as fast without.
GROUPED_NODES = 64


def chosen_group(nodes: int, switch_nodes: int | None = None) -> int | None:
    """Nodes of a group where the user chooses none: the divisor of ``nodes`` that is nearest to its square root.

    A collective over n nodes pays a latency for each of n - 1 peers; over groups of g nodes for g - 1 and n / g - 1. The
    nearest divisor is the largest one up to the root: its partner n / g is farther away.

    Args:
        nodes: Nodes that exchange.
        switch_nodes: Nodes of one switch group. A divisor of that is preferred, from half the root on.

    Returns:
        None for less than `GROUPED_NODES` nodes, and without a divisor between a quarter and four times the root.
    """
    if nodes < GROUPED_NODES:
        return None
    near = [size for size in range(1, math.isqrt(nodes) + 1) if nodes % size == 0 and 16 * size * size >= nodes]
    preferred = [size for size in near if switch_nodes and switch_nodes % size == 0 and 4 * size * size >= nodes]
    return max(preferred or near, default=None)


class Coordinates(NamedTuple):
    """A rank's place, by tier."""

    node: int
    gpu: int
    gcd: int
    hive: int = 0
    group: int = 0
    cluster: int = 0


@dataclass(frozen=True)
class Grid:
    """A rectangular machine.

    Three tiers by default. A node may be divided into hives, the world into groups of nodes and into clusters.

    Attributes:
        nodes: Nodes of the world.
        gpus_per_node: Packages of a node.
        gcds_per_gpu: Devices of a package.
        order: How ranks are numbered: tiers, slowest first, completed by `hzero.config.complete_order`. The default numbers
            the devices of a package, then the packages of a hive, hives, nodes of a group, groups and clusters.
        ranks: Where no such order holds, the rank of every place, in the default order; else None.
        gpus_per_hive: Packages of a hive.
        nodes_per_group: Nodes of a group; None where all nodes of a cluster are one.
        clusters: Clusters of the world.
        automatic: Whether `chosen_group` sets ``nodes_per_group``.
        switch_nodes: Nodes of one switch group, for that choice; None if not known.
    """

    nodes: int
    gpus_per_node: int
    gcds_per_gpu: int
    order: tuple[Tier, ...] = TIERS[::-1]
    ranks: tuple[int, ...] | None = None
    gpus_per_hive: int = 1
    nodes_per_group: int | None = None
    clusters: int = 1
    automatic: bool = dataclasses.field(default=False, compare=False)
    switch_nodes: int | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", complete_order(self.order))
        if self.automatic:
            object.__setattr__(self, "nodes_per_group", chosen_group(self.nodes // self.clusters, self.switch_nodes))

    @property
    def world_size(self) -> int:
        """Ranks of the world."""
        return self.nodes * self.gpus_per_node * self.gcds_per_gpu

    @property
    def regular(self) -> bool:
        """Whether a rank's coordinates follow from ``order`` alone, so that `stride` exists."""
        return self.ranks is None

    def size(self, tier: Tier) -> int:
        """Ranks of a tier group."""
        return self._sizes[tier]

    @functools.cached_property
    def _sizes(self) -> dict[Tier, int]:
        own = self.nodes // self.clusters
        group = self.nodes_per_group or own
        return {
            "gcd": self.gcds_per_gpu,
            "hive": self.gpus_per_hive,
            "gpu": self.gpus_per_node // self.gpus_per_hive,
            "node": group,
            "group": own // group,
            "cluster": self.clusters,
        }

    def declaration(self) -> dict[str, Any]:
        """The block `hzero.config.TopologyConfig` that declares it, where ranks are numbered in some order."""
        values = dataclasses.asdict(self)
        groups = AUTOMATIC if self.automatic else self.nodes_per_group
        return {key: values[key] for key in values if key not in ("ranks", "automatic")} | {"nodes_per_group": groups}

    def grouped(self, nodes_per_group: int | Literal["automatic"] | None) -> Grid:
        """The same ranks in other groups of nodes, as `hzero.config.TopologyConfig` declares them.

        Raises:
            ConfigError: The nodes do not form such groups.
        """
        if nodes_per_group == AUTOMATIC:
            return dataclasses.replace(self, automatic=True)
        own = self.nodes // self.clusters
        if nodes_per_group is not None and own % nodes_per_group:
            raise ConfigError(
                f"topology.nodes_per_group: found {nodes_per_group}, which does not divide the {own} nodes; possible: "
                f"{', '.join(str(size) for size in range(1, own + 1) if own % size == 0)}"
            )
        return dataclasses.replace(self, automatic=False, nodes_per_group=nodes_per_group)

    @property
    def groups_text(self) -> str:
        """How groups were chosen, or why there are none; empty where the user chose, and for few nodes."""
        own = self.nodes // self.clusters
        if not self.automatic or own < GROUPED_NODES:
            return ""
        if self.nodes_per_group is not None:
            return f"groups of {self.nodes_per_group} nodes, chosen for {own:,} nodes; topology.nodes_per_group sets others"
        near = (count for step in itertools.count(1) for count in (own - step, own + step))
        fitting = next(count for count in near if chosen_group(count, self.switch_nodes))
        return (
            f"{own:,} nodes form no groups: no divisor lies between a quarter and four times their square root, so collectives "
            f"between nodes are slow; {fitting:,} nodes would form groups"
        )

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The three tiers that every machine has, and the others that this one has, innermost first."""
        return tuple(tier for tier in TIERS if tier in BASE_TIERS or self.size(tier) > 1)

    @property
    def crossed(self) -> tuple[Tier, ...]:
        """The tiers of more than one rank, innermost first."""
        return tuple(tier for tier in TIERS if self.size(tier) > 1)

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """The scopes that this machine has, narrowest first; of two that end at the same of its `tiers` one, `world` at last."""
        found: dict[tuple[Tier, ...], Scope] = {}
        for scope in SCOPES:
            reached = tuple(tier for tier in tiers_inside(scope) if tier in self.tiers)
            if reached not in found or found[reached] in ("group", "cluster"):
                found[reached] = scope
        return tuple(found.values())

    def stride(self, tier: Tier) -> int:
        """Distance between the ranks of neighbours in a tier group.

        Raises:
            ValueError: The ranks are numbered in no regular order.
        """
        if self.ranks is not None:
            raise ValueError("stride: ranks are numbered in no regular order")
        return self._strides[tier]

    @functools.cached_property
    def _strides(self) -> dict[Tier, int]:
        """In places where a table gives the ranks."""
        order = self.order if self.ranks is None else TIERS[::-1]
        return {tier: math.prod(map(self.size, order[index + 1 :])) for index, tier in enumerate(order)}

    def scope_size(self, scope: Scope) -> int:
        """Ranks reached by a scope."""
        return math.prod(self.size(tier) for tier in tiers_inside(scope))

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a rank.

        Raises:
            ValueError: The rank is out of range.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank: found {rank}, expected 0..{self.world_size - 1}")
        place = rank if self.ranks is None else self._place_of[rank]
        return Coordinates(**{tier: place // stride % self.size(tier) for tier, stride in self._strides.items()})

    def rank(self, node: int, gpu: int, gcd: int, hive: int = 0, group: int = 0, cluster: int = 0) -> int:
        """The rank at given coordinates, in the order of `Coordinates`."""
        place = Coordinates(node, gpu, gcd, hive, group, cluster)
        number = sum(getattr(place, tier) * stride for tier, stride in self._strides.items())
        return number if self.ranks is None else self.ranks[number]

    def tier_between(self, first: int, second: int) -> Tier:
        """The outermost tier on which two ranks differ, over which messages between them go."""
        home, place = self.coordinates(first), self.coordinates(second)
        return next(tier for tier in TIERS[::-1] if getattr(home, tier) != getattr(place, tier))

    def tier_group(self, rank: int, tier: Tier) -> Sequence[int]:
        """Ranks that differ from ``rank`` in the coordinate of ``tier`` alone, in the order of that coordinate."""
        place = self.coordinates(rank)
        if self.ranks is not None:
            return [self.rank(*place._replace(**{tier: index})) for index in range(self.size(tier))]
        first = rank - getattr(place, tier) * self.stride(tier)
        return range(first, first + self.size(tier) * self.stride(tier), self.stride(tier))

    def of_ranks(self, ranks: Sequence[int]) -> Grid:
        """The grid of a group of ranks, in the group's own numbers. They keep their places.

        Args:
            ranks: Of this grid, in the order in which the group numbers them.

        Raises:
            ConfigError: They do not fill a part of every tier evenly.
        """
        if self.automatic:  # by how many nodes these ranks have
            alone = dataclasses.replace(self, automatic=False, nodes_per_group=None).of_ranks(ranks)
            order = complete_order([tier for tier in alone.order if tier != "group"])
            return dataclasses.replace(alone, order=order, automatic=True, switch_nodes=self.switch_nodes)
        places = {self.coordinates(rank): number for number, rank in enumerate(ranks)}
        used = {tier: sorted({getattr(place, tier) for place in places}) for tier in TIERS}
        sizes = {tier: len(indices) for tier, indices in used.items()}
        if not len(ranks) == len(places) == math.prod(sizes.values()):
            group = some(list(map(str, ranks)), 16)
            has = ", ".join(f"{size} on {tier}" for tier, size in sizes.items() if size > 1)
            raise ConfigError(f"topology: the group of ranks {group} fills no part of {self} evenly: it has {has}")
        own = Grid(
            sizes["node"] * sizes["group"] * sizes["cluster"],
            sizes["gpu"] * sizes["hive"],
            sizes["gcd"],
            gpus_per_hive=sizes["hive"],
            nodes_per_group=sizes["node"] if sizes["group"] > 1 else None,
            clusters=sizes["cluster"],
        )
        cells = itertools.product(*(used[tier] for tier in TIERS[::-1]))
        numbers = tuple(places[Coordinates(**dict(zip(TIERS[::-1], cell)))] for cell in cells)
        return own.numbered(numbers)

    def numbered(self, ranks: Sequence[int]) -> Grid:
        """The same sizes, with these ranks at the places, which are in the default order: by an order of tiers if one fits."""
        places, of_places = range(self.world_size), dataclasses.replace(self, order=TIERS[::-1], ranks=None)
        # If the ranks have an order, the distance to the neighbour on each tier gives it.
        distance = {tier: ranks[stride] for tier, stride in of_places._strides.items() if self.size(tier) > 1}
        tiers = [tier for tier in TIERS[::-1] if tier in (*BASE_TIERS, *distance)]
        order = sorted(tiers, key=lambda tier: -distance.get(tier, self.world_size))
        for one in (TIERS[::-1], tuple(order)):
            ordered = dataclasses.replace(of_places, order=one)
            if all(ordered.rank(*of_places.coordinates(place)) == ranks[place] for place in places):
                return ordered
        return dataclasses.replace(of_places, ranks=tuple(ranks))

    @functools.cached_property
    def _place_of(self) -> dict[int, int]:
        assert self.ranks is not None
        return {rank: place for place, rank in enumerate(self.ranks)}

    def __str__(self) -> str:
        names = {"gcd": "GCD", "hive": "GPU", "gpu": "hive" if self.gpus_per_hive > 1 else "GPU"}  # what a tier joins
        counts = [(self.size(tier), names.get(tier, tier)) for tier in reversed(self.tiers)]
        return " x ".join(f"{count} {name}{'s' if count != 1 else ''}" for count, name in counts)
