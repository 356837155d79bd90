"""Links file: bandwidths and latencies of the tiers as `hzero bench links` has measured them, kept as JSON.

Sizes, algorithm and bus bandwidth are those of rccl-tests (its doc/PERFORMANCE.md): the size is that of the whole array
over the group, ``algbw`` is size over time, and ``busbw`` is what every device sends or receives a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import reprlib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from hzero.config import TIERS, ConfigError

#: Value of the key ``schema`` in the files that this release writes and reads.
SCHEMA = "hzero-links-1"
#: Largest file that is read: many times what a probe of all sizes writes.
LARGEST_BYTES = 16 << 20


def algorithm_bandwidth(size_bytes: int, seconds: float) -> float:
    """``algbw`` in GB/s: bytes of the whole array over the time of the collective."""
    return size_bytes / seconds / 1e9


def bus_bandwidth(size_bytes: int, seconds: float, ranks: int) -> float:
    """``busbw`` in GB/s of an all-gather, reduce-scatter or all-to-all: ``algbw`` x (n - 1) / n.

    The factor is the same for the three collectives that hops are made of (doc/PERFORMANCE.md of
    nccl-tests): a rank's own part of the array crosses no link.
    """
    return algorithm_bandwidth(size_bytes, seconds) * (ranks - 1) / ranks


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LinkRow(_Part):
    """One measurement.

    Attributes:
        tier: ``gcd``, ``gpu`` or ``node``.
        ranks: Ranks of a group of that tier; all groups ran at once.
        op: ``all_gather``, ``all_to_all`` or ``reduce_scatter``; for a hop its role, ``weights`` or ``gradients``.
        codec: Codec of a hop, which is encoding, collective and decoding; None for a bare collective.
        size_bytes: Bytes of the whole array over the group, for a hop those before encoding.
        count: Elements of one rank's part of it.
        type: Type of the elements.
        median_us: Median time of an iteration of its slowest rank, in microseconds.
        min_us: Least of these times.
        max_us: Largest of these times.
        algbw_gb_s: By the median; for a hop it is an effective rate.
        busbw_gb_s: By the median; for a hop it is an effective rate.
    """

    tier: Literal["gcd", "gpu", "node"]
    ranks: int = Field(ge=2, lt=2**31)
    op: Literal["all_gather", "all_to_all", "reduce_scatter", "weights", "gradients"]
    codec: Literal["none", "bf16", "int8", "int4"] | None
    size_bytes: int = Field(ge=1, lt=2**63)
    count: int = Field(ge=1, lt=2**63)
    type: str
    median_us: FiniteFloat = Field(gt=0)
    min_us: FiniteFloat = Field(gt=0)
    max_us: FiniteFloat = Field(gt=0)
    algbw_gb_s: FiniteFloat = Field(gt=0)
    busbw_gb_s: FiniteFloat = Field(gt=0)


class TierRate(_Part):
    """What a plan needs of one tier.

    Attributes:
        gb_s: ``busbw`` of the largest all-gather: what a device receives a second over this tier.
        latency_us: Time of the smallest all-gather, in microseconds.
    """

    gb_s: FiniteFloat = Field(gt=0)
    latency_us: FiniteFloat = Field(gt=0)


class LinksFile(_Part):
    """The content of a links file.

    Attributes:
        schema_name: `SCHEMA`; in the file the key is ``schema``.
        date: When it was measured, ISO 8601 in UTC.
        machine: Host of rank 0 and its processor.
        versions: Of Python, hzero and torch.
        backend: Of torch.distributed.
        device: What the ranks computed on.
        codecs: Backend of the codecs.
        launcher: What started the ranks.
        grid: Size of every tier.
        settings: Of the command.
        tiers: Summary of every tier of more than one rank.
        rows: All measurements, in order.
    """

    schema_name: Literal["hzero-links-1"] = Field(alias="schema")
    date: str
    machine: dict[str, str]
    versions: dict[str, str]
    backend: str
    device: str
    codecs: str
    launcher: str
    grid: dict[str, int]
    settings: dict[str, Any]
    tiers: dict[str, TierRate]
    rows: list[LinkRow]

    def grid_text(self) -> str:
        """Sizes of the tiers, outermost first."""
        return " x ".join(f"{self.grid[tier]} {tier}" for tier in ("node", "gpu", "gcd"))

    @model_validator(mode="after")
    def _agrees(self) -> LinksFile:
        if set(self.grid) != set(TIERS) or min(self.grid.values()) < 1:
            raise ValueError(f"grid: found {self.grid}, expected a size of at least 1 for each of {', '.join(TIERS)}")
        measured = {tier for tier in TIERS if self.grid[tier] > 1}
        if set(self.tiers) != measured:
            raise ValueError(
                f"tiers: found {', '.join(self.tiers) or 'none'}, but the grid {self.grid} has more than one rank on "
                f"{', '.join(sorted(measured)) or 'no tier'}"
            )
        for index, row in enumerate(self.rows):
            if row.ranks != self.grid[row.tier]:
                raise ValueError(
                    f"rows.{index}.ranks: found {row.ranks}, but tier {row.tier} has {self.grid[row.tier]}"
                )
        return self


def tier_rate(rows: list[LinkRow]) -> TierRate:
    """The summary of one tier from its rows, an all-gather among them."""
    gathers = sorted((row for row in rows if row.op == "all_gather"), key=lambda row: row.size_bytes)
    return TierRate(gb_s=gathers[-1].busbw_gb_s, latency_us=gathers[0].median_us)


def write_links(path: Path, links: LinksFile) -> None:
    """Writes a links file: whole or not at all.

    Raises:
        ConfigError: It cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(json.dumps(links.model_dump(by_alias=True), indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise ConfigError(f"--out: cannot write {str(path)!r}: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def read_links(path: Path) -> LinksFile:
    """Reads a links file.

    Raises:
        ConfigError: There is no such file, or it is none; the message names the file and the key.
    """
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise ConfigError(f"{path}: {path.stat().st_size:,} bytes, which no links file has")
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; `hzero bench links` writes links files") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: is no JSON: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise ConfigError(
            f"{path}: schema: found {_short(found)}, expected {SCHEMA!r}, which `hzero bench links` writes"
        )
    try:
        return LinksFile.model_validate(content)
    except (ValidationError, OverflowError) as error:
        raise ConfigError(f"{path}: {_first_of(error)}") from None


def _first_of(error: ValidationError | OverflowError) -> str:
    if isinstance(error, OverflowError):
        return f"a number is too large: {error}"
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ValueError):
        return str(cause)
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{key}: missing"
    # A key may hold line breaks.
    return " ".join(f"{key}: found {_short(first.get('input'))}; {first['msg'][0].lower()}{first['msg'][1:]}".split())


def _short(value: Any) -> str:
    return reprlib.repr(value)
