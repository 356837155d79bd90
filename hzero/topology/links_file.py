"""Links file: bandwidth and latency of every tier, as measured by `hzero links`, in JSON.

Sizes and bandwidths are defined as in rccl-tests (its doc/PERFORMANCE.md). The size is the whole array over the group. ``algbw``
is size / time, and ``busbw`` is the rate at which every device sends or receives.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from hzero.config import ALGORITHMS, BASE_TIERS, Algorithm, NodeAllGather, Tier
from hzero.errors import ConfigError
from hzero.files import read_json, refusing, replacing
from hzero.schema import Frozen, Quantity, validated
from hzero.topology.grid import Grid, sizes_text


class LinkRow(Frozen):
    """One measurement.

    Attributes:
        tier: The tier.
        ranks: Ranks of a group of the tier. All groups ran at once.
        algorithm: Algorithm of the all-gather.
        size_bytes: Bytes of the whole array over the group.
        median_us: Median time of an iteration on its slowest rank, in microseconds.
        min_us: Shortest of these times.
        max_us: Longest of these times.
    """

    tier: Tier
    ranks: int = Field(ge=2, lt=2**31)
    algorithm: Algorithm
    size_bytes: int = Field(ge=1, lt=2**63)
    median_us: Quantity
    min_us: Quantity
    max_us: Quantity

    @property
    def algbw_gb_s(self) -> float:
        """``algbw`` from the median time, in GB/s."""
        return self.size_bytes / self.median_us / 1e3

    @property
    def busbw_gb_s(self) -> float:
        """``busbw`` from the median time, in GB/s. A rank's own part of the array crosses no link."""
        return self.algbw_gb_s * (self.ranks - 1) / self.ranks


class TierRate(NamedTuple):
    """Bandwidth and latency of one tier, for a plan.

    Attributes:
        gb_s: ``busbw`` of the largest all-gather: bytes that a device receives per second over this tier.
        latency_us: Time of the smallest all-gather, in microseconds.
    """

    gb_s: float
    latency_us: float


class LinksFile(Frozen):
    """The content of a links file.

    Attributes:
        schema_name: Version of the format. The key in the file is ``schema``.
        date: Time of the measurement, ISO 8601 in UTC.
        machine: Host of rank 0 and its processor.
        versions: Versions of Python, hzero and torch.
        backend: Backend of torch.distributed, or ``mpi``.
        device: The ranks' device type.
        grid: Size of every tier that the machine has.
        rows: All measurements, in order.
        together: How much of the shorter tiers' times adds to the longest one's if all tiers are busy, 0 to 1; null if it was
            not measured.
        coding_s: Seconds to encode and to decode one weight in codec ``exact``; null if they were not measured.
    """

    schema_name: Literal["hzero-links-1"] = Field(alias="schema")
    date: str
    machine: dict[str, str]
    versions: dict[str, str]
    backend: str
    device: str
    grid: dict[Tier, int]
    rows: list[LinkRow]
    together: float | None = Field(default=None, ge=0, le=1)
    coding_s: list[Annotated[float, Field(gt=0, le=1)]] | None = Field(default=None, min_length=2, max_length=2)

    @property
    def tiers(self) -> dict[Tier, TierRate]:
        """Rates of the measured tiers."""
        found: dict[Tier, TierRate] = {}
        for tier in self.grid:
            gathers = [row for row in self.rows if (row.tier, row.algorithm) == (tier, "library")]
            if gathers:
                largest, smallest = (choose(gathers, key=lambda row: row.size_bytes) for choose in (max, min))
                found[tier] = TierRate(largest.busbw_gb_s, smallest.median_us)
        return found

    def rate(self, tier: Tier) -> TierRate | None:
        """The rate of a tier; None if it was not measured. ``inter_group`` falls back to ``inter_node``: both use the NICs."""
        return self.tiers.get(tier, self.tiers.get("inter_node") if tier == "inter_group" else None)

    def grid_text(self) -> str:
        """Sizes of the tiers, outermost first."""
        return sizes_text(self.grid)

    @model_validator(mode="after")
    def _agrees(self) -> LinksFile:
        if not set(BASE_TIERS) <= set(self.grid) or min(self.grid.values()) < 1:
            raise ValueError(f"grid: found {self.grid}; expected sizes of at least 1 for {', '.join(BASE_TIERS)}")
        for index, row in enumerate(self.rows):
            if row.ranks != (size := self.grid.get(row.tier, 1)):
                raise ValueError(f"rows.{index}.ranks: found {row.ranks}, but tier {row.tier} has {size}")
        return self


def node_all_gather(rows: list[LinkRow]) -> NodeAllGather:
    """The setting with the fastest measured all-gathers on tier ``inter_node``, relative to the library's.

    The cost of a setting is the sum of the logarithms of time ratios over all sizes below its limit, so that one noisy
    measurement changes little. A gain of less than a tenth of one measurement's time is ignored.
    """
    times: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.tier == "inter_node":
            times.setdefault(row.algorithm, {})[row.size_bytes // row.ranks] = row.median_us
    library = times.get("library", {})
    sizes = sorted(library)
    best, least = NodeAllGather(), math.log(0.9)
    for algorithm in ALGORITHMS[1:]:
        cost = 0.0
        for size, following in zip(sizes, sizes[1:] + [size + 1 for size in sizes[-1:]]):
            if size not in times.get(algorithm, {}):
                break
            cost += math.log(times[algorithm][size] / library[size])
            if cost < least:
                best, least = NodeAllGather(algorithm=algorithm, below_bytes=following), cost
    return best


def write_links(path: Path, links: LinksFile, key: str = "--out") -> None:
    """Writes a links file atomically. Raises `ConfigError` if it cannot be written, with the ``key`` of the path."""
    with refusing(key, path), replacing(path) as file:
        file.write(json.dumps(links.model_dump(by_alias=True), indent=1) + "\n")


def read_links(path: Path) -> LinksFile:
    """Reads a links file. Raises `ConfigError` if it is invalid."""
    return validated(LinksFile, read_json(path), f"{path}:")


def links_for(path: Path, grid: Grid) -> LinksFile:
    """Reads a links file for a grid. Tiers are matched by name, so the grid of the file may differ.

    Raises:
        ConfigError: The file is invalid, or a tier that the grid crosses was not measured.
    """
    links = read_links(path)
    for tier in grid.crossed:
        if links.rate(tier) is None:
            raise ConfigError(
                f"{path}: tier {tier}: missing, and the plan's grid ({grid}) needs it; measured: "
                f"{', '.join(links.tiers) or 'none'}, on a grid of {links.grid_text()}"
            )
    return links
