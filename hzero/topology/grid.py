"""The grid: a machine as tiers of equal groups, and the place of every rank. Only arithmetic, for any world size."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from hzero.config import AUTOMATIC, BASE_TIERS, SCOPES, TIERS, Scope, Tier, tiers_inside
from hzero.errors import ConfigError, some

#: Minimum number of nodes for which groups are chosen. With fewer nodes, groups save no time.
GROUPED_NODES = 64


def chosen_group(nodes: int, switch_nodes: int | None = None) -> int | None:
    """The default number of nodes of a group: the divisor of ``nodes`` that is nearest to its square root.

    A collective over n nodes has the latency of n - 1 peers. Over groups of g nodes it has the latency of g - 1 and n / g - 1
    peers. The nearest divisor is the largest one up to the root, since its partner n / g is farther away.

    Args:
        nodes: Nodes that exchange messages.
        switch_nodes: Nodes of one switch group. Its divisors are preferred if they are at least half the root.

    Returns:
        The number; None for less than `GROUPED_NODES` nodes, or without a divisor between a quarter and four times the root.
    """
    if nodes < GROUPED_NODES:
        return None
    near = [size for size in range(1, math.isqrt(nodes) + 1) if nodes % size == 0 and 16 * size * size >= nodes]
    preferred = [size for size in near if switch_nodes and switch_nodes % size == 0 and 4 * size * size >= nodes]
    return max(preferred or near, default=None)


def complete_order(tiers: Sequence[Tier]) -> tuple[Tier, ...]:
    """Completes an order of tiers, slowest first. A missing tier is placed next to the tier that it divides."""
    order = list(tiers)
    around: tuple[tuple[Tier, Tier, int], ...] = (
        ("intra_hive", "intra_node", 1),
        ("inter_group", "inter_node", 0),
        ("inter_cluster", "inter_group", 0),
    )
    for missing, neighbour, after in around:
        if missing not in order:
            order.insert(order.index(neighbour) + after, missing)
    return tuple(order)


def _check_divides(key: str, part: int, whole: int, what: str) -> None:
    if whole % part:
        possible = ", ".join(str(size) for size in range(1, whole + 1) if whole % size == 0)
        raise ConfigError(f"topology.{key}: found {part}; expected a divisor of the {whole} {what}: {possible}")


class Coordinates(NamedTuple):
    """A rank's place, by tier."""

    intra_package: int
    intra_hive: int
    intra_node: int
    inter_node: int
    inter_group: int
    inter_cluster: int


@dataclass(frozen=True)
class Grid:
    """A rectangular machine.

    It has three tiers by default. A node may be divided into hives, and the world into clusters and groups of nodes.

    Raises:
        ConfigError: Hives do not divide the packages of a node, or clusters or groups do not divide the nodes.

    Attributes:
        nodes: Nodes of the world.
        packages_per_node: Packages of a node.
        devices_per_package: Devices of a package.
        order: Numbering of the ranks: tiers, slowest first, completed by `complete_order`. The default numbers
            the devices of a package, then the packages of a hive, hives, nodes of a group, groups and clusters.
        ranks: The rank of every place, in the default order, if no order of tiers matches; else None.
        packages_per_hive: Packages of a hive.
        nodes_per_group: Nodes of a group; None: one group has all nodes of a cluster.
        clusters: Clusters of the world.
        uneven_clusters: Nodes of each cluster if their sizes differ; tier ``inter_node`` then joins them. Empty otherwise.
        automatic: Whether `chosen_group` sets ``nodes_per_group``.
        switch_nodes: Nodes of one switch group, for `chosen_group`; None if unknown.
    """

    nodes: int
    packages_per_node: int
    devices_per_package: int
    order: tuple[Tier, ...] = TIERS[::-1]
    ranks: tuple[int, ...] | None = None
    packages_per_hive: int = 1
    nodes_per_group: int | None = None
    clusters: int = 1
    uneven_clusters: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    automatic: bool = dataclasses.field(default=False, compare=False)
    switch_nodes: int | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", complete_order(self.order))
        _check_divides("packages_per_hive", self.packages_per_hive, self.packages_per_node, "packages of a node")
        _check_divides("clusters", self.clusters, self.nodes, "nodes")
        own = self.nodes // self.clusters
        if self.automatic:
            object.__setattr__(self, "nodes_per_group", chosen_group(own, self.switch_nodes))
        _check_divides("nodes_per_group", self.nodes_per_group or 1, own, "nodes")

    @property
    def world_size(self) -> int:
        """Ranks of the world."""
        return self.nodes * self.packages_per_node * self.devices_per_package

    @property
    def regular(self) -> bool:
        """Whether ``order`` determines a rank's coordinates, so that `stride` exists."""
        return self.ranks is None

    def size(self, tier: Tier) -> int:
        """Ranks of a tier group."""
        return self._sizes[tier]

    @functools.cached_property
    def _sizes(self) -> dict[Tier, int]:
        own = self.nodes // self.clusters
        group = self.nodes_per_group or own
        return {
            "intra_package": self.devices_per_package,
            "intra_hive": self.packages_per_hive,
            "intra_node": self.packages_per_node // self.packages_per_hive,
            "inter_node": group,
            "inter_group": own // group,
            "inter_cluster": self.clusters,
        }

    # Ranks are numbered in the order of `_axes`. In an irregular grid, `ranks` lists the rank of every place in that order. A
    # regular grid needs no memory per rank.

    @property
    def _axes(self) -> tuple[Tier, ...]:
        return self.order if self.ranks is None else TIERS[::-1]

    @functools.cached_property
    def _listed(self) -> tuple[np.ndarray, np.ndarray]:
        """The rank of every place, and the place of every rank, of an irregular grid."""
        ranks = np.array(self.ranks)
        return ranks, np.argsort(ranks)

    def _index(self, ranks: Any) -> list[Any]:
        """The coordinates of one rank or an array of ranks, in the order of `TIERS`."""
        places = ranks if self.ranks is None else self._listed[1][ranks]
        index = dict(zip(self._axes, np.unravel_index(places, [self.size(tier) for tier in self._axes])))
        return [index[tier] for tier in TIERS]

    def _at(self, index: Sequence[Any]) -> Any:
        """The ranks at coordinates that broadcast, in the order of `TIERS`."""
        by_tier = dict(zip(TIERS, index))
        sizes = [self.size(tier) for tier in self._axes]
        places = np.ravel_multi_index([by_tier[tier] for tier in self._axes], sizes)
        return places if self.ranks is None else self._listed[0][places]

    def grouped(self, nodes_per_group: int | Literal["automatic"] | None) -> Grid:
        """The same ranks in other groups of nodes. See `hzero.config.TopologyConfig` for the value."""
        if nodes_per_group == AUTOMATIC:
            return dataclasses.replace(self, automatic=True)
        return dataclasses.replace(self, automatic=False, nodes_per_group=nodes_per_group)

    @property
    def groups_text(self) -> str:
        """A remark about chosen groups, or about their absence; empty if the user has chosen, and for few nodes."""
        own = self.nodes // self.clusters
        if not self.automatic or own < GROUPED_NODES:
            return ""
        if self.nodes_per_group is not None:
            return f"groups of {self.nodes_per_group} nodes, chosen for {own:,} nodes; topology.nodes_per_group sets others"
        near = (count for step in itertools.count(1) for count in (own - step, own + step))
        fitting = next(count for count in near if chosen_group(count, self.switch_nodes))
        return (
            f"{own:,} nodes form no groups: no divisor lies between a quarter and four times their square root, so collectives "
            f"between nodes have {own - 1:,} peers; {fitting:,} nodes would form groups"
        )

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The three basic tiers, and the other tiers of this machine, innermost first."""
        return tuple(tier for tier in TIERS if tier in BASE_TIERS or self.size(tier) > 1)

    @property
    def crossed(self) -> tuple[Tier, ...]:
        """The tiers with more than one rank, innermost first."""
        return tuple(tier for tier in TIERS if self.size(tier) > 1)

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """The scopes of this machine, narrowest first. Of scopes that end at the same tier one is listed; `world` is the last."""
        found: dict[tuple[Tier, ...], Scope] = {}
        for scope in SCOPES:
            reached = tuple(tier for tier in tiers_inside(scope) if tier in self.tiers)
            if reached not in found or found[reached] in ("group", "cluster"):
                found[reached] = scope
        return tuple(found.values())

    def stride(self, tier: Tier) -> int:
        """Distance between the ranks of neighbours in a tier group of a `regular` grid."""
        return math.prod(map(self.size, self.order[self.order.index(tier) + 1 :]))

    def scope_size(self, scope: Scope) -> int:
        """Ranks reached by a scope."""
        return math.prod(self.size(tier) for tier in tiers_inside(scope))

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a rank.

        Raises:
            ValueError: The rank is out of range.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank: found {rank}; expected 0..{self.world_size - 1}")
        return Coordinates(*map(int, self._index(rank)))

    def rank(self, place: Sequence[int]) -> int:
        """The rank at given coordinates."""
        return int(self._at(place))

    def tier_between(self, first: int, second: int) -> Tier:
        """The outermost tier on which two ranks differ. Messages between them cross it."""
        home, place = self.coordinates(first), self.coordinates(second)
        return next(tier for tier in TIERS[::-1] if getattr(home, tier) != getattr(place, tier))

    def tier_group(self, rank: int, tier: Tier) -> Sequence[int]:
        """Ranks that differ from ``rank`` only in the coordinate of ``tier``, in the order of that coordinate."""
        place = self.coordinates(rank)
        if not self.regular:
            return [self.rank(place._replace(**{tier: index})) for index in range(self.size(tier))]
        first, stride = rank - getattr(place, tier) * self.stride(tier), self.stride(tier)
        return range(first, first + self.size(tier) * stride, stride)

    def of_ranks(self, ranks: Sequence[int], key: str = "topology") -> Grid:
        """The grid of a group of ranks, renumbered in the group. The ranks keep their places.

        Args:
            ranks: Ranks of this grid, in the order of the group.
            key: Key that forms the group, for messages.

        Raises:
            ConfigError: The ranks do not form a grid.
        """
        if self.automatic:  # groups depend on the nodes of these ranks
            alone = dataclasses.replace(self, automatic=False, nodes_per_group=None).of_ranks(ranks, key)
            order = complete_order([tier for tier in alone.order if tier != "inter_group"])
            return dataclasses.replace(alone, order=order, automatic=True, switch_nodes=self.switch_nodes)
        part = self._at(np.ix_(*map(np.unique, self._index(np.array(ranks)))))
        sizes = dict(zip(TIERS, part.shape))
        if not len(ranks) == len({*ranks}) == part.size:
            group = some(list(map(str, ranks)), 16)
            has = ", ".join(f"{size} on {tier}" for tier, size in sizes.items() if size > 1)
            raise ConfigError(
                f"{key}: the group of ranks {group} fills no part of {self} evenly: it has {has}; expected as many ranks "
                "on each node and package that it touches, since shards have one size"
            )
        own = Grid(
            sizes["inter_node"] * sizes["inter_group"] * sizes["inter_cluster"],
            sizes["intra_node"] * sizes["intra_hive"],
            sizes["intra_package"],
            packages_per_hive=sizes["intra_hive"],
            nodes_per_group=sizes["inter_node"] if sizes["inter_group"] > 1 else None,
            clusters=sizes["inter_cluster"],
        )
        number = {rank: index for index, rank in enumerate(ranks)}
        return own.numbered([number[rank] for rank in part.transpose().ravel().tolist()])

    def numbered(self, ranks: Sequence[int]) -> Grid:
        """The same sizes, with ``ranks`` at the places in the default order. Uses an order of tiers if one matches."""
        listed = dataclasses.replace(self, order=TIERS[::-1], ranks=tuple(ranks))
        everywhere = np.ix_(*(np.arange(self.size(tier)) for tier in TIERS))
        # The rank of the second place on each tier determines the order, if there is one.
        second = {tier: listed.rank([int(one == tier) for one in TIERS]) for tier in self.crossed}
        tiers = [tier for tier in TIERS[::-1] if tier in (*BASE_TIERS, *second)]
        order = sorted(tiers, key=lambda tier: -second.get(tier, self.world_size))
        for one in (TIERS[::-1], tuple(order)):
            ordered = dataclasses.replace(self, order=one, ranks=None)
            if np.array_equal(ordered._at(everywhere), listed._at(everywhere)):
                return ordered
        return listed

    def __str__(self) -> str:
        return sizes_text({tier: self.size(tier) for tier in self.tiers})


def sizes_text(sizes: Mapping[Tier, int]) -> str:
    """Describes sizes of tiers by the units that each tier joins, outermost first, such as 2 nodes x 4 packages x 2 devices."""
    units = ("device", "package", "hive" if sizes.get("intra_hive", 1) > 1 else "package", "node", "group", "cluster")
    counts = [(sizes[tier], unit) for tier, unit in zip(TIERS, units) if tier in sizes]
    return " x ".join(f"{count} {unit}{'s' if count != 1 else ''}" for count, unit in reversed(counts))
