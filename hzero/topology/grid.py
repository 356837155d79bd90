"""The grid: nodes x packages x devices, and the place of every rank. Pure arithmetic, whatever the size of the world."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hzero.config import Scope, Tier, tiers_inside


class Coordinates(NamedTuple):
    """A rank's place."""

    node: int
    gpu: int
    gcd: int


@dataclass(frozen=True)
class Grid:
    """A rectangular machine.

    Attributes:
        nodes: Nodes of the world.
        gpus_per_node: Packages of a node.
        gcds_per_gpu: Devices of a package.
        order: How ranks are numbered: axis names, slowest first. The default numbers the devices of a package, then
            the packages of a node, then the nodes.
        ranks: Where no such order holds, the rank of every place, devices fastest, then packages, then nodes; else None.
    """

    nodes: int
    gpus_per_node: int
    gcds_per_gpu: int
    order: tuple[Tier, Tier, Tier] = ("node", "gpu", "gcd")
    ranks: tuple[int, ...] | None = None

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
        return {"gcd": self.gcds_per_gpu, "gpu": self.gpus_per_node, "node": self.nodes}[tier]

    def stride(self, tier: Tier) -> int:
        """Distance between the ranks of neighbours in a tier group.

        Raises:
            ValueError: The ranks are numbered in no regular order.
        """
        if self.ranks is not None:
            raise ValueError("stride: ranks are numbered in no regular order")
        return _stride(self, self.order, tier)

    def scope_size(self, scope: Scope) -> int:
        """Ranks reached by a scope."""
        return math.prod(self.size(tier) for tier in tiers_inside(scope))

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank stands.

        Raises:
            ValueError: The rank is out of range.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank: found {rank}, expected 0..{self.world_size - 1}")
        axes: tuple[Tier, Tier, Tier] = ("node", "gpu", "gcd")
        order = self.order if self.ranks is None else axes
        place = rank if self.ranks is None else self._place_of[rank]
        return Coordinates(*(place // _stride(self, order, tier) % self.size(tier) for tier in axes))

    def rank(self, node: int, gpu: int, gcd: int) -> int:
        """The rank at given coordinates."""
        if self.ranks is not None:
            return self.ranks[(node * self.gpus_per_node + gpu) * self.gcds_per_gpu + gcd]
        return node * self.stride("node") + gpu * self.stride("gpu") + gcd * self.stride("gcd")

    def tier_group(self, rank: int, tier: Tier) -> Sequence[int]:
        """Ranks that differ from ``rank`` in the coordinate of ``tier`` alone, in the order of that coordinate."""
        place = self.coordinates(rank)
        if self.ranks is not None:
            return [self.rank(*place._replace(**{tier: index})) for index in range(self.size(tier))]
        first = rank - getattr(place, tier) * self.stride(tier)
        return range(first, first + self.size(tier) * self.stride(tier), self.stride(tier))

    @functools.cached_property
    def _place_of(self) -> dict[int, int]:
        assert self.ranks is not None
        return {rank: place for place, rank in enumerate(self.ranks)}

    def __str__(self) -> str:
        counts = {"node": self.nodes, "GPU": self.gpus_per_node, "GCD": self.gcds_per_gpu}
        return " x ".join(f"{count} {name}{'s' if count != 1 else ''}" for name, count in counts.items())


def _stride(grid: Grid, order: Sequence[Tier], tier: Tier) -> int:
    return math.prod(grid.size(axis) for axis in order[order.index(tier) + 1 :])
