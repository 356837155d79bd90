"""Shape: how many nodes, packages and devices the emulated cluster has, and how fast the links of its tiers are."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator, Field, FiniteFloat, model_validator

from hzero.config import BASE_TIERS, Tier
from hzero.errors import ConfigError
from hzero.schema import Frozen, validated
from hzero.topology import Grid

if TYPE_CHECKING:
    from typing_extensions import Self

Positive = Annotated[int, Field(ge=1)]
#: Every rank is a namespace and at least one process of this machine.
MAX_RANKS = 64
PREFIX = "hzero-"
#: RFC 2544 sets 198.18.0.0/15 aside for measurements of networks: no host is found there. It is used inside the
#: namespaces alone, which are not connected to the machine's networks.
NETWORK = "198.18.0"
#: Mbit/s that queues of the kernel hold well, or None (in YAML also ``none``): not shaped.
Rate = Annotated[
    Annotated[FiniteFloat, Field(ge=0.1, le=100_000)] | None,
    BeforeValidator(lambda value: None if value == "none" else value),
]


class Rates(Frozen):
    """Rate of the links of each tier in Mbit/s (10**6 bits per second, headers included), in each direction.

    Attributes:
        intra_package: Of the link from one rank to the other devices of its package.
        intra_node: Of the link from one rank to the other packages of its node.
        inter_node: Of the trunk of one node, which its ranks share.
    """

    intra_package: Rate
    intra_node: Rate
    inter_node: Rate


class Cluster(Frozen):
    """Nodes x packages x devices, ranks numbered in that order, and the rates of their links.

    Attributes:
        nodes: Nodes of the world.
        packages_per_node: Packages of a node.
        devices_per_package: Devices of a package.
        rates_mbit: Rates of the tiers. That of a tier of size 1 is unused.
    """

    nodes: Positive
    packages_per_node: Positive
    devices_per_package: Positive
    rates_mbit: Rates

    @model_validator(mode="after")
    def _fits_one_machine(self) -> Self:
        if not 2 <= self.world_size <= MAX_RANKS:
            shape = f"{self.nodes}x{self.packages_per_node}x{self.devices_per_package}"
            raise ValueError(f"found {shape}, {self.world_size:,} ranks, expected 2 to {MAX_RANKS} on one machine")
        return self

    @classmethod
    def from_text(cls, shape: str, rates: str) -> Self:
        """Reads the command's ``2x2x2`` and ``200,75,50`` (by tier, innermost first; ``none`` for one or for all: not shaped).

        Raises:
            ConfigError: Names ``--shape`` or ``--rates``.
        """
        counts = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})", shape, re.ASCII)
        if counts is None:
            raise ConfigError(f"--shape: found {shape!r}, expected nodes x GPUs x GCDs, as in 2x2x2")
        words = rates.split(",") if rates != "none" else ["none"] * len(BASE_TIERS)
        if len(words) != len(BASE_TIERS):
            raise ConfigError(
                f"--rates: found {rates!r}, expected Mbit/s of {','.join(BASE_TIERS)}, as in 200,75,50 or none,75,50, or none"
            )
        found = validated(Rates, dict(zip(BASE_TIERS, map(_number, words))), "--rates")
        numbers = dict(zip(("nodes", "packages_per_node", "devices_per_package"), map(int, counts.groups())))
        return validated(cls, {**numbers, "rates_mbit": found}, "--shape")

    def rate_mbit(self, tier: Tier) -> float | None:
        """Rate of the links of a tier in Mbit/s; None: not shaped."""
        rate: float | None = getattr(self.rates_mbit, tier)
        return rate

    @property
    def world_size(self) -> int:
        """Ranks of the world."""
        return self.nodes * self.packages_per_node * self.devices_per_package

    @property
    def ranks_per_node(self) -> int:
        """Ranks of one node."""
        return self.packages_per_node * self.devices_per_package

    @property
    def grid(self) -> Grid:
        """The same machine as a grid of the stage's plan."""
        return Grid(self.nodes, self.packages_per_node, self.devices_per_package)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Tiers that join more than one thing, innermost first: those with links."""
        return tuple(tier for tier in BASE_TIERS if self.grid.size(tier) > 1)

    def node_of(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self.ranks_per_node

    def ranks_of(self, node: int) -> range:
        """The ranks of a node."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def tier_between(self, a: int, b: int) -> Tier:
        """The tier whose links carry what rank ``a`` sends to rank ``b``.

        Raises:
            ValueError: There is no such rank, or both are the same.
        """
        for rank in (a, b):
            if not 0 <= rank < self.world_size:
                raise ValueError(f"rank: found {rank}, expected 0..{self.world_size - 1}")
        if a == b:
            raise ValueError(f"rank {a} sends to itself over no link")
        if self.node_of(a) != self.node_of(b):
            return "inter_node"
        return "intra_node" if a // self.devices_per_package != b // self.devices_per_package else "intra_package"

    def peers(self, rank: int, tier: Tier) -> list[int]:
        """Ranks that ``rank`` reaches over the links of a tier."""
        return [other for other in range(self.world_size) if other != rank and self.tier_between(rank, other) == tier]

    def namespace(self, rank: int) -> str:
        """Network namespace of a rank."""
        return f"{PREFIX}r{rank}"

    def address(self, rank: int) -> str:
        """IPv4 address of a rank."""
        return f"{NETWORK}.{rank + 1}"

    def __str__(self) -> str:
        return f"{self.grid}; {', '.join(f'{tier} {self.rate_text(tier)}' for tier in BASE_TIERS)}"

    def rate_text(self, tier: Tier) -> str:
        """A tier's rate, for people."""
        if tier not in self.tiers:
            return "unused"
        rate = self.rate_mbit(tier)
        return "not shaped" if rate is None else f"{rate:g} Mbit/s"


def _number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word  # "none", or text that the model refuses
