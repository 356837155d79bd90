"""Convergence: runs of training beside stock ZeRO-3's, by preset and seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from hzero.bench.markdown import NONE, cell, loss, table
from hzero.bench.measured import PEERS
from hzero.bench.rows import ConvergenceRow

#: Preset of runs with DeepSpeed's own ZeRO-3.
STOCK = "stock"
#: Steps at the end whose mean is the final training loss.
WINDOW = 50
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


def groups(rows: Sequence[ConvergenceRow]) -> dict[str, list[ConvergenceRow]]:
    """Runs that compare: of the same model, ranks and steps, by these as text."""
    found: dict[str, list[ConvergenceRow]] = {}
    for row in rows:
        title = f"{row.parameters:,} parameters, {row.world_size} ranks, {len(row.losses):,} steps"
        found.setdefault(title, []).append(row)
    return found


def by_preset(rows: Sequence[ConvergenceRow]) -> dict[str, list[ConvergenceRow]]:
    """Runs of every preset by seed: stock first, then in the stable order of peers."""
    order = (STOCK, *PEERS)
    presets = sorted({row.preset for row in rows}, key=lambda name: (order.index(name) if name in order else 99, name))
    runs = {name: [row for row in rows if row.preset == name] for name in presets}
    return {name: sorted(found, key=lambda row: row.seed) for name, found in runs.items()}


def spread(values: Sequence[float]) -> float | None:
    """Largest less least; None of fewer than two."""
    return max(values) - min(values) if len(values) > 1 else None


def convergence_part(rows: Sequence[ConvergenceRow]) -> str:
    """Tables of final losses, one pair a group of runs that compare."""
    parts = [
        "Difference to stock: of the means over the seeds that both have. It is set beside the spread between stock's own "
        "seeds (largest less least), which is what another seed alone changes."
    ]
    for title, group in groups(rows).items():
        parts.append(f"### {title}")
        if not any(row.preset == STOCK for row in group):
            parts.append("There is no run of stock ZeRO-3 among these, so nothing to take differences to.")
        parts.append(f"Final training loss, nats a token: mean of the last {min(WINDOW, len(group[0].losses))} steps.")
        parts.append(_metric(group, final_training))
        if any(row.evaluations for row in group):
            parts.append("Final evaluation, nats a token, with exact weights.")
            parts.append(_metric(group, final_exact, final_decoded))
    return "\n\n".join(parts)


def _metric(group: Sequence[ConvergenceRow], metric: Metric, second: Metric | None = None) -> str:
    presets = by_preset(group)
    stock = _values(presets.get(STOCK, []), metric)
    deviate = any(len(runs) > 2 for runs in presets.values())
    head = ["preset", "seeds", "by seed", "mean", "spread (max–min)", *(["standard deviation"] if deviate else [])]
    head += [
        *(["mean, decoded weights"] if second else []),
        "difference to stock",
        "below the spread of stock's seeds (difference, spread)",
    ]
    lines = []
    for name, runs in presets.items():
        found = _values(runs, metric)
        seeds = ", ".join(f"{row.seed}: {_shown(metric(row))}" for row in runs)
        mean = f"{statistics.fmean(found.values()):.4f}" if found else NONE
        line = [name, str(len(runs)), seeds, mean, _four(spread(list(found.values())))]
        if deviate:
            line.append(f"{statistics.stdev(found.values()):.4f}" if len(found) > 2 else NONE)
        if second:
            decoded = _values(runs, second)
            line.append(f"{statistics.fmean(decoded.values()):.4f}" if decoded else NONE)
        lines.append([*line, *_difference(name, found, stock)])
    return table(head, lines)


def _values(runs: Sequence[ConvergenceRow], metric: Metric) -> dict[int, float]:
    """Finite values by seed."""
    found = {row.seed: metric(row) for row in runs}
    return {seed: value for seed, value in found.items() if value is not None and math.isfinite(value)}


def _difference(name: str, found: dict[int, float], stock: dict[int, float]) -> tuple[str, str]:
    """Difference to stock in percent, and whether stock's spread is larger."""
    seeds = found.keys() & stock.keys()
    if name == STOCK or not seeds:
        return NONE, NONE
    base = statistics.fmean(stock[seed] for seed in seeds)
    apart = statistics.fmean(found[seed] for seed in seeds) - base
    wide = spread(list(stock.values()))
    verdict = (
        "one seed only" if wide is None else f"{'yes' if abs(apart) < wide else 'no'} ({abs(apart):.4f}, {wide:.4f})"
    )
    return f"{apart / base:+.2%}", verdict


def _shown(value: float | None) -> str:
    return NONE if value is not None and math.isnan(value) else cell(loss(value))


def _four(value: float | None) -> str:
    return "one seed" if value is None else f"{value:.4f}"
