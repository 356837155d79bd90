"""Losses of the trainings, and the time to a loss on emulated links."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report.results import STOCK, STOCK_PRESET, Comparison, Result
from benchmarks.rows import StepsRow, TrainingRow

#: Steps at the end whose mean is the final training loss.
WINDOW = 50
#: Shares of the steps after which stock's loss is one that the others are asked for.
_SHARES = (0.25, 0.5, 1.0)


def final_training(row: TrainingRow) -> float:
    """Mean training loss of the last steps; NaN if one was not finite."""
    return statistics.fmean(math.nan if loss is None else loss for loss in row.losses[-WINDOW:])


def final_exact(row: TrainingRow) -> float:
    """Loss of the last evaluation with exact weights; NaN if it was not finite or did not take place."""
    loss = row.evaluations[-1].loss_exact if row.evaluations else None
    return math.nan if loss is None else loss


def by_preset(rows: Sequence[TrainingRow]) -> dict[str, dict[int, TrainingRow]]:
    """Trainings by preset and seed."""
    found: dict[str, dict[int, TrainingRow]] = {}
    for row in rows:
        found.setdefault(row.preset, {})[row.seed] = row
    return found


def to_stock(
    runs: Mapping[int, TrainingRow], stock: Mapping[int, TrainingRow], metric: Callable[[TrainingRow], float]
) -> dict[int, float]:
    """Differences of a preset's final loss to stock's with the same seed, by seed."""
    return {seed: metric(row) - metric(stock[seed]) for seed, row in runs.items() if seed in stock}


def smoothed(row: TrainingRow, weight: float = 0.9) -> list[float]:
    """Exponential mean of the training loss by step, corrected for its start; NaN only where the loss was not finite."""
    means, mean, norm = [], 0.0, 0.0
    for loss in row.losses:
        if loss is not None:
            mean, norm = mean * weight + loss * (1 - weight), norm * weight + (1 - weight)
        means.append(math.nan if loss is None else mean / norm)
    return means


@dataclass(frozen=True)
class Reach:
    """Steps that trainings take to a loss, with step times of the same job on emulated links.

    Attributes:
        result: The measurement of the job.
        curves: Smoothed losses by scheme, the mean over the seeds. PyTorch's schemes have stock's: they compute the same.
        losses: That are asked for, the highest first.
    """

    result: Result
    curves: dict[str, list[float]]
    losses: tuple[float, ...]

    @property
    def rows(self) -> list[StepsRow]:
        """Rows of the schemes that have a curve."""
        return [row for row in self.result.rows if row.scheme in self.curves]

    def steps_to(self, scheme: str, loss: float) -> int | None:
        """Steps until the curve of a scheme is at or below a loss; None if it never is."""
        return next((step for step, found in enumerate(self.curves[scheme], 1) if found <= loss), None)


def reach(comparison: Comparison) -> Reach | None:
    """Joins the trainings with the measurement of their job; None if either is missing or the jobs differ."""
    runs = by_preset(comparison.trainings)
    result = next(
        (one for one in comparison.of("training") if comparison.trainings and _same_job(one, comparison.trainings[0])),
        None,
    )
    if result is None or STOCK_PRESET not in runs:
        return None
    known = {STOCK if preset == STOCK_PRESET else preset: found for preset, found in runs.items()}
    known = {scheme: found for scheme, found in known.items() if result.row(scheme)}
    seeds = sorted(set.intersection(*map(set, known.values()))) if STOCK in known else []
    if not seeds:
        return None
    curves = {
        scheme: [statistics.fmean(losses) for losses in zip(*(smoothed(found[seed]) for seed in seeds))]
        for scheme, found in known.items()
    }
    curves |= {row.scheme: curves[STOCK] for row in result.rows if row.engine in ("ddp", "fsdp")}
    reached = []
    for share in _SHARES:
        part = [loss for loss in curves[STOCK][: max(1, round(share * len(curves[STOCK])))] if math.isfinite(loss)]
        reached += [math.ceil(100 * min(part)) / 100] if part else []
    return Reach(result, curves, tuple(dict.fromkeys(reached)))


def _same_job(result: Result, run: TrainingRow) -> bool:
    config, train = result.config, run.config["train"]

    def sizes(model: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in model.items() if key not in ("name", "zero_init")}

    return (
        sizes(config.model) == sizes(run.config["model"])
        and result.rows[0].world_size == run.world_size
        and config.train.micro_batch == train["micro_batch"]
        and config.train.accumulation == train["grad_accumulation"]
        # The trainer's auto is float32 on processors, where the comparison runs.
        and config.train.dtype == ("fp32" if train["dtype"] == "auto" else train["dtype"])
    )
