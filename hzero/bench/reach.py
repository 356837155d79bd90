"""Time to a given loss on emulated links: steps that runs of training need, times seconds a step of the same job there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hzero.bench.curves import by_preset, dtype_of, mean_curve
from hzero.bench.markdown import seconds, table
from hzero.bench.measured import STOCK, STOCK_PRESET, Chosen, Measurement
from hzero.bench.rows import ConvergenceRow, StepsRow

#: Shares of the steps after which stock's loss is one that the others are asked for.
SHARES = (0.25, 0.5, 1.0)
#: Engines that were not trained to the end: they compute what ZeRO-3 computes, up to rounding.
_PYTORCH = ("ddp", "fsdp")


@dataclass(frozen=True)
class Reach:
    """Runs of training whose job was also measured on emulated links.

    Attributes:
        measurement: Of the job.
        curves: By peer, smoothed losses by step: the mean over the seeds. PyTorch's peers have stock's.
        seeds: That all of them have.
        losses: That are asked for, the highest first.
        clips: Whether the runs clip gradients, which timed steps do not.
    """

    measurement: Measurement
    curves: dict[str, list[float]]
    seeds: tuple[int, ...]
    losses: tuple[float, ...]
    clips: bool

    def rows(self) -> list[StepsRow]:
        """The peers' rows."""
        return [row for row in self.measurement.rows if row.peer in self.curves]

    def steps_to(self, peer: str, loss: float) -> int | None:
        """Steps until the curve of a peer is at or below a loss; None where it never is."""
        return next((step for step, found in enumerate(self.curves[peer], 1) if found <= loss), None)


def reach(chosen: Chosen) -> tuple[Reach | None, str]:
    """Joins runs of training and the suite training, where they agree.

    Returns:
        What was joined, else None and why not; nothing is said where neither is there.
    """
    measured = chosen.of("training")
    if not measured and not chosen.runs:
        return None, ""
    without = "No time to a given loss on emulated links"
    if not measured or not chosen.runs:
        return None, f"{without}: the {'suite training was' if chosen.runs else 'runs of training were'} not measured."
    apart = {one.title: _apart(one, chosen.runs[0]) for one in measured}
    alike = [one for one in measured if not apart[one.title]]
    if not alike:
        why = "; ".join(
            f"{title} differs from the runs of training in {', '.join(keys)}" for title, keys in apart.items()
        )
        return None, f"{without}: {why}."
    there = by_preset(chosen.runs)
    runs = {STOCK if name == STOCK_PRESET else name: rows for name, rows in there.items()}
    runs = {peer: rows for peer, rows in runs.items() if alike[0].row(peer) is not None}
    seeds = tuple(sorted(set.intersection(*({row.seed for row in rows} for rows in runs.values())))) if runs else ()
    if STOCK not in runs or not seeds:
        return None, f"{without}: {STOCK} is not in both, or no seed is common to all presets."
    curves = {peer: mean_curve([row for row in rows if row.seed in seeds]) for peer, rows in runs.items()}
    curves |= {row.peer: curves[STOCK] for row in alike[0].rows if row.engine in _PYTORCH}
    clips = any((row.config.get("train") or {}).get("grad_clip") for row in chosen.runs)
    losses = _asked(curves[STOCK])
    if not losses:
        return None, f"{without}: no loss of {STOCK} is finite."
    return Reach(alike[0], curves, seeds, losses, clips), ""


def _apart(measurement: Measurement, run: ConvergenceRow) -> list[str]:
    """In what a measured job differs from one that was trained."""
    config, row = measurement.config, measurement.rows[0]
    train = run.config.get("train") or {}
    both: dict[str, tuple[Any, Any]] = {
        "model": (_shape(config.model), _shape(run.config.get("model") or {})),
        "parameters": (row.parameters, run.parameters),
        "micro_batch": (config.train.micro_batch, train.get("micro_batch")),
        "accumulation": (config.train.accumulation, train.get("grad_accumulation")),
        "world size": (row.world_size, run.world_size),
        "dtype": (config.train.dtype, dtype_of(run)),
    }
    return [key for key, (mine, other) in both.items() if mine != other]


def _shape(model: dict[str, Any]) -> dict[str, Any]:
    """A model's sizes; its name and the way its weights are first made do not count."""
    return {key: value for key, value in model.items() if key not in ("name", "zero_init")}


def _asked(curve: Sequence[float]) -> tuple[float, ...]:
    """Losses, rounded up to a hundredth, that a curve has reached after shares of its steps."""
    found = []
    for share in SHARES:
        known = [value for value in curve[: max(1, round(share * len(curve)))] if math.isfinite(value)]
        if known:
            found.append(math.ceil(100 * min(known)) / 100)
    return tuple(dict.fromkeys(found))


def reach_part(found: Reach) -> str:
    """A table of steps and seconds to each loss."""
    rows = []
    for row in found.rows():
        cells = [row.label, seconds(row.median_s)]
        for loss in found.losses:
            steps, base = found.steps_to(row.peer, loss), found.steps_to(STOCK, loss)
            stock = found.measurement.row(STOCK)
            if steps is None or base is None or stock is None:
                cells.append("not reached")
                continue
            time = steps * row.median_s
            cells.append(f"{steps:,} steps, {time:,.0f} s ({time / (base * stock.median_s):.3f})")
        rows.append(cells)
    seeds = ", ".join(map(str, found.seeds))
    text = (
        f"Steps until the smoothed training loss of the convergence runs (mean over the seeds: {seeds}) "
        f"is at or below a loss, times the median step time of the same job in {found.measurement.title} on "
        f"{found.measurement.config.cluster.text()}; in brackets the time over that of DeepSpeed ZeRO-3. The losses are those "
        "that it reaches after 25, 50 and 100 % of its steps. It is computed from two measurements, not watched in one. "
        f"Weights and gradients are {found.measurement.config.train.dtype} here"
        + (", of which codecs save more than of bf16." if found.measurement.config.train.dtype == "fp32" else ".")
    )
    if any(row.engine in _PYTORCH for row in found.rows()):
        text += " PyTorch's peers were not trained: they compute what ZeRO-3 does, so its steps stand for theirs."
    if found.clips:
        text += " The runs clip gradients, which the timed steps do not; that takes no bytes to speak of."
    head = ("peer", "s a step (median)", *(f"loss {loss:.2f}" for loss in found.losses))
    return f"### Time to a given loss on emulated links\n\n{text}\n\n{table(head, rows)}"
