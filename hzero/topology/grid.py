"""The grid: a machine as tiers of equal groups, and the place of every rank. Only arithmetic, for any world size."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from hzero.config import AUTOMATIC, BASE_TIERS, HERE, SCOPES, TIERS, Scope, Tier, TopologyConfig, tiers_inside
from hzero.validation import ConfigError, some

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
    around: tuple[tuple[Tier, Tier, int], ...] = (("hive", "gpu", 1), ("group", "node", 0), ("cluster", "group", 0))
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

    gcd: int
    hive: int
    gpu: int
    node: int
    group: int
    cluster: int


@dataclass(frozen=True)
class Grid:
    """A rectangular machine.

    It has three tiers by default. A node may be divided into hives, and the world into clusters and groups of nodes.

    Raises:
        ConfigError: Hives do not divide the packages of a node, or clusters or groups do not divide the nodes.

    Attributes:
        nodes: Nodes of the world.
        gpus_per_node: Packages of a node.
        gcds_per_gpu: Devices of a package.
        order: Numbering of the ranks: tiers, slowest first, completed by `complete_order`. The default numbers
            the devices of a package, then the packages of a hive, hives, nodes of a group, groups and clusters.
        ranks: The rank of every place, in the default order, if no order of tiers matches; else None.
        gpus_per_hive: Packages of a hive.
        nodes_per_group: Nodes of a group; None: one group has all nodes of a cluster.
        clusters: Clusters of the world.
        uneven_clusters: Nodes of each cluster if their sizes differ; tier ``node`` then joins them. Empty otherwise.
        automatic: Whether `chosen_group` sets ``nodes_per_group``.
        switch_nodes: Nodes of one switch group, for `chosen_group`; None if unknown.
    """

    nodes: int
    gpus_per_node: int
    gcds_per_gpu: int
    order: tuple[Tier, ...] = TIERS[::-1]
    ranks: tuple[int, ...] | None = None
    gpus_per_hive: int = 1
    nodes_per_group: int | None = None
    clusters: int = 1
    uneven_clusters: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    automatic: bool = dataclasses.field(default=False, compare=False)
    switch_nodes: int | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", complete_order(self.order))
        _check_divides("gpus_per_hive", self.gpus_per_hive, self.gpus_per_node, "packages of a node")
        _check_divides("clusters", self.clusters, self.nodes, "nodes")
        own = self.nodes // self.clusters
        if self.automatic:
            object.__setattr__(self, "nodes_per_group", chosen_group(own, self.switch_nodes))
        _check_divides("nodes_per_group", self.nodes_per_group or 1, own, "nodes")

    @property
    def world_size(self) -> int:
        """Ranks of the world."""
        return self.nodes * self.gpus_per_node * self.gcds_per_gpu

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
            "gcd": self.gcds_per_gpu,
            "hive": self.gpus_per_hive,
            "gpu": self.gpus_per_node // self.gpus_per_hive,
            "node": group,
            "group": own // group,
            "cluster": self.clusters,
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

    def rank(self, gcd: int, hive: int, gpu: int, node: int, group: int, cluster: int) -> int:
        """The rank at given coordinates."""
        return int(self._at((gcd, hive, gpu, node, group, cluster)))

    def tier_between(self, first: int, second: int) -> Tier:
        """The outermost tier on which two ranks differ. Messages between them cross it."""
        home, place = self.coordinates(first), self.coordinates(second)
        return next(tier for tier in TIERS[::-1] if getattr(home, tier) != getattr(place, tier))

    def tier_group(self, rank: int, tier: Tier) -> Sequence[int]:
        """Ranks that differ from ``rank`` only in the coordinate of ``tier``, in the order of that coordinate."""
        place = self.coordinates(rank)
        if not self.regular:
            return [self.rank(*place._replace(**{tier: index})) for index in range(self.size(tier))]
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
            order = complete_order([tier for tier in alone.order if tier != "group"])
            return dataclasses.replace(alone, order=order, automatic=True, switch_nodes=self.switch_nodes)
        part = self._at(np.ix_(*map(np.unique, self._index(np.array(ranks)))))
        sizes = dict(zip(TIERS, part.shape))
        if not len(ranks) == len({*ranks}) == part.size:
            group = some(list(map(str, ranks)), 16)
            has = ", ".join(f"{size} on {tier}" for tier, size in sizes.items() if size > 1)
            raise ConfigError(f"{key}: the group of ranks {group} fills no part of {self} evenly: it has {has}")
        own = Grid(
            sizes["node"] * sizes["group"] * sizes["cluster"],
            sizes["gpu"] * sizes["hive"],
            sizes["gcd"],
            gpus_per_hive=sizes["hive"],
            nodes_per_group=sizes["node"] if sizes["group"] > 1 else None,
            clusters=sizes["cluster"],
        )
        number = {rank: index for index, rank in enumerate(ranks)}
        return own.numbered([number[rank] for rank in part.transpose().ravel().tolist()])

    def numbered(self, ranks: Sequence[int]) -> Grid:
        """The same sizes, with ``ranks`` at the places in the default order. Uses an order of tiers if one matches."""
        listed = dataclasses.replace(self, order=TIERS[::-1], ranks=tuple(ranks))
        everywhere = np.ix_(*(np.arange(self.size(tier)) for tier in TIERS))
        # The rank of the second place on each tier determines the order, if there is one.
        second = {tier: listed.rank(*(int(one == tier) for one in TIERS)) for tier in self.crossed}
        tiers = [tier for tier in TIERS[::-1] if tier in (*BASE_TIERS, *second)]
        order = sorted(tiers, key=lambda tier: -second.get(tier, self.world_size))
        for one in (TIERS[::-1], tuple(order)):
            ordered = dataclasses.replace(self, order=one, ranks=None)
            if np.array_equal(ordered._at(everywhere), listed._at(everywhere)):
                return ordered
        return listed

    def __str__(self) -> str:
        # The units that each tier joins.
        names = {"gcd": "GCD", "hive": "GPU", "gpu": "hive" if self.gpus_per_hive > 1 else "GPU"}
        counts = [(self.size(tier), names.get(tier, tier)) for tier in reversed(self.tiers)]
        return " x ".join(f"{count} {name}{'s' if count != 1 else ''}" for count, name in counts)


# ---- the grid of a run ------------------------------------------------------------------------------------------------------

# The modules that read machines are imported on demand, since a declared grid does not need them.


def resolve_grid(topology: TopologyConfig, world_size: int, where: str = "hzero.topology") -> Grid:
    """The grid of a run.

    Collective over the world if the topology is discovered. A process discovers its world once.

    Args:
        topology: A declared grid, or a source (`hzero.topology.sources.read_source`). Without ``nodes``, a declared grid
            follows from the world size. A file may declare a grid with the same keys, which may be under ``topology``. A
            preset numbers ranks by device, package and node. ``discover``, and the file of a node, need a discovery.
        world_size: Ranks of the world.
        where: Key of the topology, for messages.

    Raises:
        ConfigError: The file cannot be read, a key is wrong, or the product of the sizes is not the world size; the message
            has the factors that would fit. In a discovery: the ranks do not form a grid, or packages are ambiguous.
    """
    declared = declared_grid(topology, where)
    if declared is None:
        from hzero.topology.discovery import discovered_grid

        return discovered_grid(topology.source, world_size).grouped(topology.nodes_per_group)
    if declared is not topology:
        where = topology.source
    inside = (declared.gpus_per_node or 0) * declared.gcds_per_gpu
    if declared.nodes is None and world_size % inside:
        node = f"gpus_per_node={declared.gpus_per_node} x gcds_per_gpu={declared.gcds_per_gpu} is {inside} ranks a node"
        raise ConfigError(f"{where}: {node}, but the world has {world_size}; expected a multiple")
    grid = _grid(declared, declared.nodes or world_size // inside)
    if grid.world_size != world_size:
        factors = {"nodes": grid.nodes, "gpus_per_node": grid.gpus_per_node, "gcds_per_gpu": grid.gcds_per_gpu}
        others = {name: grid.world_size // value for name, value in factors.items()}
        possible = [f"{name}={world_size // other}" for name, other in others.items() if world_size % other == 0]
        would = f"{' or '.join(possible)} would fit" if possible else "no single factor makes it fit"
        product = " x ".join(f"{name}={value}" for name, value in factors.items())
        raise ConfigError(f"{where}: {product} is {grid.world_size} ranks, but the world has {world_size}; {would}")
    return grid


def _grid(declared: TopologyConfig, nodes: int) -> Grid:
    keys = declared.model_dump(exclude={"source", "nodes", "nodes_per_group"})
    return Grid(nodes=nodes, **keys).grouped(declared.nodes_per_group)


def sub_grid(topology: TopologyConfig, ranks: Sequence[int], world_size: int, where: str) -> Grid:
    """The grid of a group of ranks, renumbered in the group. See `resolve_grid` for arguments and errors.

    A declared grid is the grid of the group. Collective over the world if the topology is discovered: every rank passes its
    own group, and the ranks keep their places in the world.
    """
    if declared_grid(topology, where) is not None:
        return resolve_grid(topology, len(ranks), where)
    return resolve_grid(topology, world_size, where).of_ranks(ranks)


def declared_grid(topology: TopologyConfig, where: str) -> TopologyConfig | None:
    """The declared grid, also from a preset or a file; None if a discovery is needed. Arguments: see `resolve_grid`.

    Raises:
        ConfigError: The file is missing, or a key is wrong.
    """
    declared = topology
    if topology.gpus_per_node is None:
        if topology.source in HERE:
            return None
        from hzero.topology.machine import Machine, grid_of_nodes
        from hzero.topology.sources import PRESETS, read_source

        found = read_source(topology.source, where)
        if isinstance(found, Machine) and topology.source not in PRESETS:
            return None
        declared = grid_of_nodes(found, where) if isinstance(found, Machine) else found
        if "nodes_per_group" in topology.model_fields_set:
            declared = declared.model_copy(update={"nodes_per_group": topology.nodes_per_group})
    if declared.nodes is not None:
        _grid(declared, declared.nodes)  # raises if its parts do not divide it
    return declared
