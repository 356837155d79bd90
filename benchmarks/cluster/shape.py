"""Shape: how many nodes, packages and devices the emulated cluster has, and how fast the links of its tiers are."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hzero.config import TIERS, Tier
from hzero.topology import Grid
from hzero.validation import ConfigError, one_of

if TYPE_CHECKING:
    from typing_extensions import Self

#: Every rank is a namespace and at least one process of this machine.
MAX_RANKS = 64
#: Range of rates that queues of the kernel hold well, in Mbit/s.
MIN_MBIT, MAX_MBIT = 0.1, 100_000.0
PREFIX = "hzero-"
#: RFC 2544 sets 198.18.0.0/15 aside for measurements of networks: no host is found there. It is used inside the
#: namespaces alone, which are not connected to the machine's networks.
NETWORK = "198.18.0"
_COUNTS = ("nodes", "gpus_per_node", "gcds_per_gpu")


@dataclass(frozen=True)
class Cluster:
    """Nodes x packages x devices, ranks numbered in that order, and the rates of their links.

    Attributes:
        nodes: Nodes of the world.
        gpus_per_node: Packages of a node.
        gcds_per_gpu: Devices of a package.
        rates_mbit: For every tier Mbit/s (10**6 bits a second, headers included) each way, or None: not shaped. ``gcd``:
            what one rank may send to the other devices of its package; ``gpu``: what it may send to the other packages
            of its node; ``node``: the trunk of one node, which its ranks share. The rate of a tier of size 1 is unused.

    Raises:
        ConfigError: A count or rate that cannot be set up.
    """

    nodes: int
    gpus_per_node: int
    gcds_per_gpu: int
    rates_mbit: dict[Tier, float | None]

    def __post_init__(self) -> None:
        _check("cluster", {key: getattr(self, key) for key in _COUNTS}, self.rates_mbit)

    @classmethod
    def from_config(cls, where: str, config: Mapping[str, Any]) -> Self:
        """Reads ``{nodes, gpus_per_node, gcds_per_gpu, rates_mbit: {gcd, gpu, node}}``.

        Args:
            where: Name of the block, for messages.
            config: The block. A rate may be None (in YAML also ``none``): not shaped.

        Raises:
            ConfigError: A key is unknown or missing, a count is no whole number of at least 1, there are fewer than 2 or
                more than `MAX_RANKS` ranks, or a rate is no number from `MIN_MBIT` to `MAX_MBIT`.
        """
        values = _block(where, config, (*_COUNTS, "rates_mbit"))
        rates = _block(f"{where}.rates_mbit", values.pop("rates_mbit"), TIERS)
        rates = {tier: None if rates[tier] == "none" else rates[tier] for tier in TIERS}
        _check(where, values, rates)
        return cls(**values, rates_mbit={tier: None if rates[tier] is None else float(rates[tier]) for tier in TIERS})

    @classmethod
    def from_text(cls, shape: str, rates: str) -> Self:
        """Reads the command's ``2x2x2`` and ``200,75,50`` (Mbit/s of gcd, gpu, node; each may be none, or all by one word).

        Raises:
            ConfigError: As of `from_config`, or the text has another form.
        """
        counts = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})", shape, re.ASCII)
        if counts is None:
            raise ConfigError(f"--shape: found {shape!r}, expected nodes x GPUs x GCDs, as in 2x2x2")
        words = rates.split(",") if rates != "none" else ["none"] * len(TIERS)
        if len(words) != len(TIERS):
            raise ConfigError(
                f"--rates: found {rates!r}, expected Mbit/s of gcd,gpu,node, as in 200,75,50 or none,75,50, or none"
            )
        values = {tier: _rate_of_text(tier, word) for tier, word in zip(TIERS, words)}
        nodes, gpus_per_node, gcds_per_gpu = map(int, counts.groups())
        _check("--shape", dict(zip(_COUNTS, (nodes, gpus_per_node, gcds_per_gpu))), values, rates_at="--rates")
        return cls(nodes, gpus_per_node, gcds_per_gpu, values)

    @property
    def world_size(self) -> int:
        """Ranks of the world."""
        return self.nodes * self.gpus_per_node * self.gcds_per_gpu

    @property
    def ranks_per_node(self) -> int:
        """Ranks of one node."""
        return self.gpus_per_node * self.gcds_per_gpu

    @property
    def grid(self) -> Grid:
        """The same machine as the stage's plan knows it."""
        return Grid(self.nodes, self.gpus_per_node, self.gcds_per_gpu)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Tiers that join more than one thing, innermost first: those with links."""
        return tuple(tier for tier in TIERS if self.grid.size(tier) > 1)

    def node_of(self, rank: int) -> int:
        """The node on which a rank stands."""
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
            return "node"
        return "gpu" if a // self.gcds_per_gpu != b // self.gcds_per_gpu else "gcd"

    def peers(self, rank: int, tier: Tier) -> list[int]:
        """Ranks that ``rank`` reaches over the links of a tier."""
        return [other for other in range(self.world_size) if other != rank and self.tier_between(rank, other) == tier]

    def namespace(self, rank: int) -> str:
        """Network namespace of a rank."""
        return f"{PREFIX}r{rank}"

    def address(self, rank: int) -> str:
        """IPv4 address of a rank."""
        return f"{NETWORK}.{rank + 1}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `from_config` reads it back."""
        return {**{key: getattr(self, key) for key in _COUNTS}, "rates_mbit": dict(self.rates_mbit)}

    def __str__(self) -> str:
        return f"{self.grid}; {', '.join(f'{tier} {self.rate_text(tier)}' for tier in TIERS)}"

    def rate_text(self, tier: Tier) -> str:
        """A tier's rate, for people."""
        if tier not in self.tiers:
            return "unused"
        rate = self.rates_mbit[tier]
        return "not shaped" if rate is None else f"{rate:g} Mbit/s"


def check_rate(key: str, rate: Any) -> None:
    """Refuses what is neither None nor a rate that can be set up.

    Raises:
        ConfigError: Names ``key``.
    """
    if rate is None:
        return
    number = isinstance(rate, (int, float)) and not isinstance(rate, bool) and math.isfinite(rate)
    if not number or not MIN_MBIT <= rate <= MAX_MBIT:
        raise ConfigError(f"{key}: found {rate!r}, expected {MIN_MBIT:g} to {MAX_MBIT:,.0f} Mbit/s, or none")


def _check(where: str, counts: Mapping[str, Any], rates: Mapping[Any, Any], rates_at: str | None = None) -> None:
    for key, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(f"{where}.{key}: found {count!r}, expected a whole number of at least 1")
    ranks = math.prod(counts.values())
    shape = "x".join(str(count) for count in counts.values())
    if not 2 <= ranks <= MAX_RANKS:
        raise ConfigError(f"{where}: found {shape}, {ranks:,} ranks, expected 2 to {MAX_RANKS} on one machine")
    at = rates_at or f"{where}.rates_mbit"
    for tier, rate in _block(at, rates, TIERS).items():
        check_rate(f"{at}.{tier}", rate)


def _block(where: str, block: Any, keys: Sequence[str]) -> dict[str, Any]:
    if not isinstance(block, Mapping):
        raise ConfigError(f"{where}: found {block!r}, expected a block with keys {', '.join(keys)}")
    for key in block:
        if key not in keys:
            raise one_of(where, key, keys, "key")
    for key in keys:
        if key not in block:
            raise ConfigError(f"{where}.{key}: missing")
    return dict(block)


def _rate_of_text(tier: Tier, word: str) -> float | None:
    if word == "none":
        return None
    try:
        return float(word)
    except ValueError:
        raise ConfigError(f"--rates.{tier}: found {word!r}, expected a number of Mbit/s, or none") from None
