"""Tables of the report, as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from benchmarks.report.results import BASES, LOSSES, STOCK, SUBJECT, Comparison, Result
from benchmarks.report.series import series_of
from benchmarks.rows import StepsRow
from hzero.config import Tier
from hzero.errors import size_text

#: In cells that were not measured.
NONE = "–"
#: Steps at the end whose mean is the final loss.
WINDOW = 50


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table whose first columns are aligned left, the others right."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in [head, rule, *rows])


def cell(text: str) -> str:
    """Text that neither breaks a table nor is HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def rate(value: float) -> str:
    """Tokens per second."""
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def setting(result: Result) -> str:
    """Shape, rates and job of a result in a line."""
    row, config = result.rows[0], result.config
    cluster, train = config.cluster, config.train
    rates = [
        f"{tier} no limit" if (mbit := cluster.rate_mbit(tier)) is None else f"{tier} {mbit:g} Mbit/s"
        for tier in cluster.tiers
    ]
    busy = f" ({row.busy_rounds} more were left out: the machine was busy)" if row.busy_rounds else ""
    return (
        f"{result.title}: {cluster.nodes} x {cluster.packages_per_node} x {cluster.devices_per_package} (nodes x GPUs x GCDs); "
        f"{', '.join(rates)}; {row.parameters:,} parameters, {train.dtype}, micro-batch {train.micro_batch}, accumulation "
        f"{train.accumulation}, {row.tokens_per_step:,} tokens per step; reduce-scatter {config.reduce_scatter}; "
        f"timed steps per scheme: {len(row.step_s)}{busy}."
    )


def step_times(result: Result) -> str:
    """Step times, rates and losses by scheme, with the minimum time of wires and cores."""
    tiers, stock = result.config.cluster.tiers, result.row(STOCK)
    head = (*_TIMES, "ratio to ZeRO-3", "tokens/s", f"wires {' / '.join(tiers)}, s", "cores, s", _loss_head(result))
    rows = []
    for row in result.rows:
        wires = " / ".join(f"{row.wire_s[tier]:.3f}" if tier in row.wire_s else NONE for tier in tiers)
        cores = f"{row.processor_s:.3f}{' *' * row.core_bound}"
        rows.append([*_times(row, stock), rate(row.tokens_per_s), wires, cores, _loss(result, row)])
    return "\n\n".join([setting(result), table(head, rows), *_pairs(result)])


def _pairs(result: Result) -> list[str]:
    """How the schemes of this checkout compare with those of another one that took part (``make bench ARGS="against=.."``)."""
    found = []
    for row in result.rows:
        ours = result.row(row.scheme.partition("@")[0])
        if ours is not None and ours is not row:
            found.append(f"{ours.label}: {ratio_text(ours, row)} of the time of {row.label} (median over the rounds)")
    return ["; ".join(found) + "."] if found else []


#: Heads of `_times` but for the ratio.
_TIMES = ("scheme", "step, s (median)", "min", "max")


def _times(row: StepsRow, base: StepsRow | None) -> list[str]:
    """Label, median, minimum and maximum of a scheme, and its ratio to another."""
    seconds = [f"{value:.3f}" for value in (row.median_s, min(row.step_s), max(row.step_s))]
    return [row.label, *seconds, ratio_text(row, base) if base else NONE]


def ratio(row: StepsRow, base: StepsRow) -> tuple[float, float, float]:
    """How many times as long the steps of a scheme take as another's: the median over the rounds, and its 95 % interval.

    Both schemes run in every round, so whatever slows a round down cancels in its ratio. A bootstrap over the rounds gives the
    interval (Efron 1979, percentile method).
    """
    pairs = np.array(row.step_s) / np.array(base.step_s)
    drawn = np.random.default_rng(0).choice(pairs, (4000, len(pairs)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return float(np.median(pairs)), float(low), float(high)


def ratio_text(row: StepsRow, base: StepsRow) -> str:
    """A `ratio`, with its interval in brackets."""
    if row is base:
        return "1"
    middle, low, high = ratio(row, base)
    return f"{middle:.3f} ({low:.3f}–{high:.3f})"


def _last_step(result: Result) -> int:
    """The last step that all schemes took."""
    return min(len(row.losses) for row in result.rows)


def _loss_head(result: Result) -> str:
    return f"loss, step {_last_step(result)}"


def _loss(result: Result, row: StepsRow) -> str:
    loss = row.losses[_last_step(result) - 1]
    return "not finite" if loss is None else f"{loss:.4f}"


def differences(row: StepsRow) -> dict[Tier, float]:
    """Measured bytes over planned ones minus 1, by tier; infinite where bytes moved that no plan has."""
    pairs = {tier: (row.bytes.measured.get(tier, 0.0), planned) for tier, planned in row.bytes.planned.items()}
    return {
        tier: measured / planned - 1 if planned else math.inf
        for tier, (measured, planned) in pairs.items()
        if measured or planned
    }


def traffic(result: Result) -> str:
    """Megabytes of a step by scheme and tier: measured, planned, and with an ideal reduce-scatter."""
    tiers = result.config.cluster.tiers
    rows = []
    for row in result.rows:
        apart = differences(row)
        cells = []
        for tier in tiers:
            kinds = [row.bytes.measured, *([row.bytes.planned, row.bytes.ideal] if row.bytes.planned else [])]
            off = f" ({apart[tier]:+.1%})" if tier in apart else ""
            cells.append(" / ".join(f"{kind.get(tier, 0) / 1e6:,.2f}" for kind in kinds) + off)
        rows.append([row.label, *cells, NONE if row.fetches is None else f"{row.fetches:.2f}"])
    return table(("scheme", *(f"{tier}, MB" for tier in tiers), "gathers per micro-batch"), rows)


def memory(result: Result) -> str:
    """Memory of a rank by scheme and state."""
    head = ("scheme", "weights", "gradients", "optimizer", "all states", "between steps", "temporary")
    rows = []
    for row in result.rows:
        one = row.memory
        sizes = [one.weights, one.gradients, one.optimizer, one.states, one.kept]
        rows.append([row.label, *map(size_text, sizes), NONE if one.peak is None else size_text(one.peak)])
    return table(head, rows)


def series_table(comparison: Comparison, suite: str) -> str:
    """Step times of a suite along its axis, the shortest of each column bold."""
    series = series_of(comparison, suite)
    if series is None:
        return ""
    first = next(result for _, result in series.points if result.suite == suite)
    names = {row.scheme for row in series.schemes()}
    shortest = [min(row.median_s for row in result.rows if row.scheme in names) for _, result in series.points]
    lines = []
    for scheme in series.schemes():
        cells = [scheme.label]
        for best, (_, result) in zip(shortest, series.points):
            row = result.row(scheme.scheme)
            if row is None:
                cells.append(NONE)
                continue
            median = f"**{row.median_s:.3f}**" if row.median_s == best else f"{row.median_s:.3f}"
            cells.append(f"{median} ({min(row.step_s):.3f}–{max(row.step_s):.3f}){' *' * row.core_bound}")
        lines.append(cells)
    return f"{setting(first)}\n\n{table(['scheme', *series.heads()], lines)}"


def ablation(comparison: Comparison, suite: str) -> str:
    """One line per scheme: times, bytes, loss, memory."""
    parts = []
    for result in comparison.of(suite):
        tiers, subject = result.config.cluster.tiers, result.row(SUBJECT)
        head = (*_TIMES, f"ratio to {SUBJECT}", f"{' / '.join(tiers)}, MB", _loss_head(result), "states of a rank")
        rows = []
        for row in result.rows:
            sent = " / ".join(f"{row.bytes.measured.get(tier, 0) / 1e6:,.2f}" for tier in tiers)
            rows.append([*_times(row, subject), sent, _loss(result, row), size_text(row.memory.states)])
        parts += [setting(result), table(head, rows)]
    return "\n\n".join(parts)


def choices(comparison: Comparison) -> str:
    """Compares preset fit with the fastest other preset without rounding, with FSDP2 and with the fastest other engine."""
    rows = []
    for result in comparison.of("fit"):
        of = {row.scheme: row for row in result.rows}
        chosen = next(row for name, row in of.items() if name.startswith("fit"))
        best, stock = (
            min((of[name] for name in names if name in of), key=lambda row: row.median_s)
            for names in (
                ("lossless", "zero1", "zero2", "zero3", "hpz"),
                ("ddp", "fsdp2", "hsdp-node", "hsdp-package", STOCK),
            )
        )
        to_best, to_fsdp, to_stock = (ratio_text(chosen, other) for other in (best, of["fsdp2"], stock))
        rows.append([result.name, f"{chosen.median_s:.3f}", best.scheme, to_best, to_fsdp, stock.scheme, to_stock])
    head = (
        "measurement",
        "fit, s",
        "best other preset",
        "fit / best",
        "fit / FSDP2",
        "best without hzero",
        "fit / that",
    )
    return table(head, rows) if rows else ""


def final_loss(row: StepsRow) -> float:
    """Mean loss of the last steps; NaN if one was not finite."""
    return statistics.fmean(math.nan if loss is None else loss for loss in row.losses[-WINDOW:])


def losses(comparison: Comparison) -> str:
    """Final losses of long runs by scheme and seed, and their differences to ZeRO-3's, or lossless', of the same seed."""
    parts = []
    for suite in LOSSES:
        results = comparison.of(suite)
        by_scheme: dict[str, dict[int, StepsRow]] = {}
        for result in results:
            for row in result.rows:
                by_scheme.setdefault(row.scheme, {})[result.config.train.seed] = row
        base = next((name for name in (STOCK, *BASES) if name in by_scheme), STOCK)
        rows = []
        for runs in by_scheme.values():
            values = {seed: final_loss(row) for seed, row in runs.items()}
            others = {seed: final_loss(row) for seed, row in by_scheme.get(base, {}).items() if seed in values}
            apart = {seed: values[seed] - other for seed, other in others.items()}
            share = NONE
            if apart and any(apart.values()):
                change = statistics.fmean(apart.values())
                share = f"{change:+.4f} ({change / statistics.fmean(others.values()):+.2%})"
            label, mean = next(iter(runs.values())).label, f"{statistics.fmean(values.values()):.4f}"
            rows.append([label, _by_seed(values, ".4f"), mean, _by_seed(apart, "+.4f"), share])
        if rows:
            to = f"to {'ZeRO-3' if base == STOCK else 'DDP' if base == 'ddp' else base}"
            head = ("scheme", "by seed", "mean", f"{to}, by seed", f"{to}, mean")
            steps = len(results[0].rows[0].losses)
            parts += [
                f"{setting(results[0])} Losses are the mean of the last {WINDOW} of {steps:,} steps.",
                table(head, rows),
            ]
    return "\n\n".join(parts)


def _by_seed(values: Mapping[int, float], form: str) -> str:
    return ", ".join(f"{seed}: {value:{form}}" for seed, value in sorted(values.items())) or NONE


def measured(comparison: Comparison) -> str:
    """When and at which commit each measurement was taken."""
    firsts = [result.rows[0] for result in comparison.results]
    rows = [
        (row.title, f"{row.date:%Y-%m-%d %H:%M}", row.versions.get("commit", "not recorded"), row.id) for row in firsts
    ]
    return table(("measurement", "ended (UTC)", "commit", "id"), rows, left=4) if rows else ""


def machines(comparison: Comparison) -> str:
    """Machines and versions of packages."""
    rows = comparison.rows
    machines = {
        f"{row.machine.processor}, {row.machine.cores} cores, {size_text(row.machine.memory_bytes)} of memory; "
        f"{row.machine.system}; Python {row.machine.python}": None
        for row in rows
    }
    skipped = ("commit", "python", "hzero")
    versions = {
        ", ".join(f"{key} {value}" for key, value in row.versions.items() if key not in skipped): None for row in rows
    }
    return f"Machine: {'; and '.join(machines)}. Versions: {'; and '.join(versions)}."
