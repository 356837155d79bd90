"""Tables of `benchmarks.hybrid`: codecs by parallel dimension, as in the table of arXiv 2409.02423."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.report.tables import NONE, rate, table
from benchmarks.rows import LayoutRow, Sent
from hzero.errors import size_text

#: In the order of the tables.
LAYOUTS = ("tp2-dp4", "tp2-pp2-dp2")
SCHEMES = ("baseline", "naive", "zhybrid", "mzhybrid", "hybrid", "lossless")


def layouts(rows: Sequence[LayoutRow]) -> str:
    """Step times, losses and bytes of every layout; empty without rows."""
    rows = sorted(rows, key=lambda row: (LAYOUTS.index(row.layout), SCHEMES.index(row.scheme), row.seed))
    parts = []
    for group in _groups(rows):
        parts += [f"### {_title(group[0])}", *([_times(group)] if group[0].rates else []), _losses(group)]
        parts += ["Bytes that all ranks receive per step, by role and tier:", _sent(group)]
    return "\n\n".join(parts)


def _groups(rows: Sequence[LayoutRow]) -> list[list[LayoutRow]]:
    """Rows that differ in scheme and seed only, in the order of layouts, rows of the cluster first."""
    found: dict[tuple[int, bool, str, int, int, int], list[LayoutRow]] = {}
    for row in rows:
        size = (row.parameters, row.tokens_per_step, len(row.losses))
        key = (LAYOUTS.index(row.layout), row.rates is None, row.rates or "", *size)
        found.setdefault(key, []).append(row)
    return [found[key] for key in sorted(found)]


def _title(row: LayoutRow) -> str:
    train = row.config["train"]
    where = (
        f"links of {row.rates} Mbit/s (intra_package, intra_node, inter_node)"
        if row.rates
        else "without emulated links"
    )
    return (
        f"{row.layout}, {where}, {len(row.losses):,} steps; {row.config['model']['name']}, {row.parameters:,} parameters, "
        f"{train['grad_accumulation']} x {train['micro_batch']} sequences per rank, {row.tokens_per_step:,} tokens per step"
    )


def _schemes(rows: Sequence[LayoutRow]) -> dict[str, list[LayoutRow]]:
    return {name: found for name in SCHEMES if (found := [row for row in rows if row.scheme == name])}


def _times(rows: Sequence[LayoutRow]) -> str:
    """Step time and tokens per second: of the seeds' medians the median, and the change against baseline."""
    medians = {name: statistics.median(row.median_s for row in found) for name, found in _schemes(rows).items()}
    base = medians.get("baseline")
    return table(
        ("scheme", "step, s", "min to max, s", "tokens/s", "tokens/s against baseline", "runs"),
        [
            (
                name,
                f"{medians[name]:.3f}",
                f"{min(min(row.timed_s) for row in found):.3f} to {max(max(row.timed_s) for row in found):.3f}",
                rate(found[0].tokens_per_step / medians[name]),
                NONE if base is None else f"{base / medians[name] - 1:+.1%}",
                str(len(found)),
            )
            for name, found in _schemes(rows).items()
        ],
    )


def _losses(rows: Sequence[LayoutRow]) -> str:
    """Loss of each seed at the end of training and in the evaluation after it, against baseline's of the same seed."""
    seeds = sorted({row.seed for row in rows})
    of = {(row.scheme, row.seed): (_last(row), _nan(row.evaluation)) for row in rows}
    head = ["scheme"]
    for what in ("training", "evaluation"):
        head += [f"{what}, seed {seed}" for seed in seeds] + [f"{what} against baseline"]
    lines = []
    for name in _schemes(rows):
        line = [name]
        for place in (0, 1):
            line += [f"{of[name, seed][place]:.4f}" if (name, seed) in of else NONE for seed in seeds]
            shared = [seed for seed in seeds if (name, seed) in of and ("baseline", seed) in of]
            ratios = [of[name, seed][place] / of["baseline", seed][place] - 1 for seed in shared]
            mean = f"; mean {statistics.fmean(ratios):+.2%}" if len(ratios) > 1 else ""
            line.append((", ".join(f"{one:+.2%}" for one in ratios) or NONE) + mean)
        lines.append(line)
    return table(head, lines)


def _last(row: LayoutRow) -> float:
    """Mean loss of the last 50 steps, at most half of all; NaN if one of them was not finite."""
    return statistics.fmean(map(_nan, row.losses[-max(min(50, len(row.losses) // 2), 1) :]))


def _nan(loss: float | None) -> float:
    return math.nan if loss is None else loss


def _sent(rows: Sequence[LayoutRow]) -> str:
    """Bytes by role and tier, with the codec, of a scheme's first seed."""
    of: dict[str, dict[tuple[str, str], list[Sent]]] = {}
    for name, found in _schemes(rows).items():
        of[name] = {}
        for one in found[0].sent:
            of[name].setdefault((one.role, one.tier), []).append(one)
    keys = sorted({key for sent in of.values() for key in sent})
    return table(
        ["scheme", *(f"{role}, {tier}" for role, tier in keys), "all"],
        [
            [
                name,
                *(
                    f"{size_text(sum(one.wire_bytes for one in sent[key]))} ({', '.join(one.codec for one in sent[key])})"
                    if key in sent
                    else NONE
                    for key in keys
                ),
                size_text(sum(one.wire_bytes for each in sent.values() for one in each)),
            ]
            for name, sent in of.items()
        ],
    )
