"""Convergence: runs of training beside stock ZeRO-3's, by preset and seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from hzero.bench.markdown import NONE, cell, loss, names, table
from hzero.bench.measured import PEERS, STOCK_PRESET
from hzero.bench.rows import ConvergenceRow
from hzero.train.report import smooth

#: Steps at the end whose mean is the final training loss.
WINDOW = 50
_UNCLEAN = "no clean difference"
Metric = Callable[[ConvergenceRow], float | None]


def final_training(row: ConvergenceRow) -> float | None:
    """Mean training loss of the last steps; None where one was not finite."""
    last = row.losses[-WINDOW:]
    return None if None in last else statistics.fmean(value for value in last if value is not None)


def final_exact(row: ConvergenceRow) -> float | None:
    """Last evaluation with exact weights; NaN where there is none."""
    return row.evaluations[-1].loss_exact if row.evaluations else math.nan


def final_decoded(row: ConvergenceRow) -> float | None:
    """Last evaluation with the weights that forward reads; NaN where there is none."""
    return row.evaluations[-1].loss_decoded if row.evaluations else math.nan


def by_preset(rows: Sequence[ConvergenceRow]) -> dict[str, list[ConvergenceRow]]:
    """Runs of every preset by seed: stock first, then in the stable order of peers."""
    order = (STOCK_PRESET, *PEERS)
    presets = sorted({row.preset for row in rows}, key=lambda name: (order.index(name) if name in order else 99, name))
    runs = {name: [row for row in rows if row.preset == name] for name in presets}
    return {name: sorted(found, key=lambda row: row.seed) for name, found in runs.items()}


def smoothed(row: ConvergenceRow) -> list[float]:
    """Smoothed training loss by step; NaN at steps whose loss was not finite, and only there."""
    means = iter(smooth([value for value in row.losses if value is not None]))
    return [math.nan if value is None else next(means) for value in row.losses]


def mean_curve(runs: Sequence[ConvergenceRow]) -> list[float]:
    """Mean over runs of their smoothed losses; NaN at steps at which one was not finite."""
    return [statistics.fmean(values) for values in zip(*map(smoothed, runs))]


def spread(values: Sequence[float]) -> float | None:
    """Largest less least; None of fewer than two."""
    return max(values) - min(values) if len(values) > 1 else None


def convergence_part(rows: Sequence[ConvergenceRow]) -> str:
    """What was trained, and tables of final losses."""
    presets = by_preset(rows)
    parts = [
        trained(rows[0]),
        "Difference to stock: of runs with the same seed, and the mean over the seeds. Beside it stands the spread between "
        "stock's own seeds (largest less least), which is what another seed alone changed here. Of few seeds that is a rough "
        "measure, and a difference below it is not shown to be none.",
    ]
    if STOCK_PRESET not in presets:
        parts.append("There is no run of stock ZeRO-3 among these, so nothing to take differences to.")
    torn = [
        f"{row.preset} seed {row.seed} ({row.losses.count(None)} of {len(row.losses)} steps)"
        for row in rows
        if None in row.losses
    ]
    if torn:
        parts.append(f"Losses that were not finite: {names(torn)}. These runs have {_UNCLEAN} to stock.")
    parts.append(f"Final training loss, nats a token: mean of the last {min(WINDOW, len(rows[0].losses))} steps.")
    parts.append(_metric(presets, final_training))
    if any(row.evaluations for row in rows):
        parts.append("Final evaluation, nats a token, with exact weights.")
        parts.append(_metric(presets, final_exact, final_decoded))
    return "\n\n".join(parts)


def trained(row: ConvergenceRow) -> str:
    """What a run trained, in a sentence."""
    model, train = (row.config.get(key) or {} for key in ("model", "train"))
    steps = (
        f"{len(row.losses):,} optimizer steps of {row.world_size} ranks; a micro-batch of {train.get('micro_batch', '?')} "
        f"sequences a rank of {model.get('seq_length', '?')} tokens, accumulation {train.get('grad_accumulation', '?')}"
    )
    return (
        f"Model {model.get('name', '?')} of {row.parameters:,} parameters, {steps}; learning rate {train.get('lr', '?')}, "
        f"type {dtype_of(row)}. These runs are of `hzero train` without emulated links, which change no loss."
    )


def dtype_of(row: ConvergenceRow) -> str:
    """Type of the weights. The trainer's ``auto`` is float32 on processors, where the comparison runs."""
    dtype = str((row.config.get("train") or {}).get("dtype", "?"))
    return "fp32" if dtype == "auto" else dtype


def _metric(presets: dict[str, list[ConvergenceRow]], metric: Metric, second: Metric | None = None) -> str:
    stock = presets.get(STOCK_PRESET, [])
    deviate = any(len(runs) > 2 for runs in presets.values())
    head = ["preset", "seeds", "by seed", "mean", "spread (max–min)", *(["standard deviation"] if deviate else [])]
    head += [
        *(["mean, decoded weights"] if second else []),
        *("difference to stock by seed", "mean difference", "mean difference beside spread of stock's seeds"),
    ]
    lines = []
    for name, runs in presets.items():
        found = _values(runs, metric)
        seeds = ", ".join(f"{row.seed}: {_shown(metric(row))}" for row in runs)
        average = f"{statistics.fmean(found):.4f}" if found else NONE
        line = [name, str(len(runs)), seeds, average, _four(spread(found))]
        if deviate:
            line.append(f"{statistics.stdev(found):.4f}" if len(found) > 2 else NONE)
        if second:
            decoded = _values(runs, second)
            line.append(f"{statistics.fmean(decoded):.4f}" if decoded else NONE)
        lines.append([*line, *(_difference(runs, stock, metric) if name != STOCK_PRESET else (NONE, NONE, NONE))])
    return table(head, lines)


def _values(runs: Sequence[ConvergenceRow], metric: Metric) -> list[float]:
    found = [metric(row) for row in runs]
    return [value for value in found if value is not None and math.isfinite(value)]


def _clean(row: ConvergenceRow, metric: Metric) -> float | None:
    """The value of a run all of whose losses were finite."""
    value = metric(row)
    return None if None in row.losses or value is None or math.isnan(value) else value


def _difference(
    runs: Sequence[ConvergenceRow], stock: Sequence[ConvergenceRow], metric: Metric
) -> tuple[str, str, str]:
    """Difference to stock by seed, its mean, and the mean beside the spread of stock."""
    base = {row.seed: row for row in stock}
    pairs = [(row.seed, _clean(row, metric), _clean(base[row.seed], metric)) for row in runs if row.seed in base]
    apart = {seed: None if mine is None or other is None else mine - other for seed, mine, other in pairs}
    known = [value for value in apart.values() if value is not None]
    if not apart:
        return NONE, NONE, NONE
    each = ", ".join(f"{seed}: {_UNCLEAN if value is None else f'{value:+.4f}'}" for seed, value in apart.items())
    if len(known) < len(apart):
        return each, _UNCLEAN, NONE
    average = statistics.fmean(known)
    share = average / statistics.fmean(other for _, _, other in pairs if other is not None)
    wide = spread(_values(stock, metric))
    beside = "one seed of stock only" if wide is None else f"{average:+.4f} beside {wide:.4f}"
    return each, f"{average:+.4f} ({share:+.2%})", beside


def _shown(value: float | None) -> str:
    return NONE if value is not None and math.isnan(value) else cell(loss(value))


def _four(value: float | None) -> str:
    return "one seed" if value is None else f"{value:.4f}"
