"""Grid: nodes x packages x devices, and which rank stands where. Pure arithmetic, whatever the size of the world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hzero.config import SCOPES, TIERS


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
    """

    nodes: int
    gpus_per_node: int
    gcds_per_gpu: int
    order: tuple[str, str, str] = ("node", "gpu", "gcd")

    @property
    def world_size(self) -> int:
        """Ranks of the world."""
        return self.nodes * self.gpus_per_node * self.gcds_per_gpu

    def size(self, tier: str) -> int:
        """Ranks of a tier group."""
        return {"gcd": self.gcds_per_gpu, "gpu": self.gpus_per_node, "node": self.nodes}[tier]

    def stride(self, tier: str) -> int:
        """Distance between the ranks of neighbours in a tier group."""
        stride = 1
        for axis in reversed(self.order):
            if axis == tier:
                return stride
            stride *= self.size(axis)
        raise KeyError(tier)

    def scope_size(self, scope: str) -> int:
        """Ranks reached by a scope."""
        size = 1
        for tier in TIERS[: SCOPES.index(scope) + 1]:
            size *= self.size(tier)
        return size

    def coordinates(self, rank: int) -> Coordinates:
        """Where a rank stands.

        Raises:
            ValueError: There is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank: found {rank}, expected 0..{self.world_size - 1}")
        return Coordinates(*(rank // self.stride(tier) % self.size(tier) for tier in ("node", "gpu", "gcd")))

    def rank(self, node: int, gpu: int, gcd: int) -> int:
        """Which rank stands at given coordinates."""
        return node * self.stride("node") + gpu * self.stride("gpu") + gcd * self.stride("gcd")

    def tier_group(self, rank: int, tier: str) -> range:
        """Ranks that differ from ``rank`` in the coordinate of ``tier`` alone, in the order of that coordinate."""
        own = getattr(self.coordinates(rank), tier)
        first = rank - own * self.stride(tier)
        return range(first, first + self.size(tier) * self.stride(tier), self.stride(tier))

    def __str__(self) -> str:
        counts = {"node": self.nodes, "GPU": self.gpus_per_node, "GCD": self.gcds_per_gpu}
        return " x ".join(f"{count} {name}{'s' if count != 1 else ''}" for name, count in counts.items())
