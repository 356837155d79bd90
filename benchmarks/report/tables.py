"""Tables of the report, as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.report.curves import by_preset, final_exact, final_training, reach, to_stock
from benchmarks.report.results import STOCK, STOCK_PRESET, SUBJECT, Comparison, Result
from benchmarks.report.series import series_of
from benchmarks.report.targets import differences, lines, variants
from benchmarks.rows import StepsRow, TrainingRow
from hzero.train.summary import size_text

#: Stands where nothing was measured.
NONE = "–"


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
    return (
        f"{result.title}: {cluster.nodes} x {cluster.gpus_per_node} x {cluster.gcds_per_gpu} (nodes x GPUs x GCDs); "
        f"{', '.join(rates)}; {row.parameters:,} parameters, {train.dtype}, micro-batch {train.micro_batch}, accumulation "
        f"{train.accumulation}, {row.tokens_per_step:,} tokens per step; reduce-scatter {config.reduce_scatter}; "
        f"timed steps per scheme: {len(row.step_s)}."
    )


def targets(comparison: Comparison) -> str:
    """Targets and whether they are met, with one column per reduce-scatter."""
    results = variants(comparison)
    if not results:
        return ""
    heads = [f"reduce-scatter {one.config.reduce_scatter}" for one in results]
    rows = lines(results)
    return table(("quantity", "target", *heads, "source of the target"), rows, left=len(rows[0]))


def step_times(result: Result) -> str:
    """Step times, rates and losses by scheme, with the minimum time of wires and processor."""
    tiers, stock = result.config.cluster.tiers, result.row(STOCK)
    head = (*_TIMES, "ratio to ZeRO-3", "tokens/s", f"wires {' / '.join(tiers)}, s", "cores, s", _loss_head(result))
    rows = []
    for row in result.rows:
        wires = " / ".join(f"{row.wire_s[tier]:.3f}" if tier in row.wire_s else NONE for tier in tiers)
        cores = f"{row.processor_s:.3f}{' *' * row.core_bound}"
        rows.append([*_times(row, stock), rate(row.tokens_per_s), wires, cores, _loss(result, row)])
    return f"{setting(result)}\n\n{table(head, rows)}"


#: Heads of `_times` but for the ratio.
_TIMES = ("scheme", "step, s (median)", "min", "max")


def _times(row: StepsRow, base: StepsRow | None) -> list[str]:
    """Label, median, minimum and maximum of a scheme, and its ratio to another."""
    seconds = [f"{value:.3f}" for value in (row.median_s, min(row.step_s), max(row.step_s))]
    return [row.label, *seconds, f"{row.median_s / base.median_s:.3f}" if base else NONE]


def _last_step(result: Result) -> int:
    """The last step that all schemes took."""
    return min(len(row.losses) for row in result.rows)


def _loss_head(result: Result) -> str:
    return f"loss, step {_last_step(result)}"


def _loss(result: Result, row: StepsRow) -> str:
    loss = row.losses[_last_step(result) - 1]
    return "not finite" if loss is None else f"{loss:.4f}"


def traffic(result: Result) -> str:
    """Megabytes of a step by scheme and tier: measured, planned, and with an ideal reduce-scatter."""
    tiers = result.config.cluster.tiers
    rows = []
    for row in result.rows:
        apart = differences(row)
        cells = []
        for tier in tiers:
            kinds = (row.bytes.measured, row.bytes.planned, row.bytes.ideal)
            off = f" ({apart[tier]:+.1%})" if tier in apart else ""
            cells.append(" / ".join(f"{kind.get(tier, 0) / 1e6:,.2f}" for kind in kinds) + off)
        rows.append([row.label, *cells, NONE if row.fetches is None else f"{row.fetches:.2f}"])
    return table(("scheme", *(f"{tier}, MB" for tier in tiers), "gathers per micro-step"), rows)


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
    """Step times of a suite along its axis, the shortest of each column bold; of nodes also rates and efficiency."""
    series = series_of(comparison, suite)
    if series is None:
        return ""
    first = next(result for _, result in series.points if result.suite == suite)
    names = {row.scheme for row in series.schemes()}
    shortest = [min(row.median_s for row in result.rows if row.scheme in names) for _, result in series.points]

    def grid(form: Callable[[StepsRow, str, int], str]) -> str:
        rows = []
        for scheme in series.schemes():
            there = series.of(scheme.scheme)
            cells = [
                form(there[value], scheme.scheme, index) if value in there else NONE
                for index, (value, _) in enumerate(series.points)
            ]
            rows.append([scheme.label, *cells])
        return table(["scheme", *series.heads()], rows)

    def times(row: StepsRow, _: str, index: int) -> str:
        median = f"**{row.median_s:.3f}**" if row.median_s == shortest[index] else f"{row.median_s:.3f}"
        return f"{median} ({min(row.step_s):.3f}–{max(row.step_s):.3f}){' *' * row.core_bound}"

    def rates(row: StepsRow, scheme: str, index: int) -> str:
        share = series.efficiency(scheme).get(series.points[index][0])
        return f"{rate(row.tokens_per_s / row.world_size)} ({NONE if share is None else f'{share:.3f}'})"

    parts = [setting(first), grid(times)]
    if suite.startswith("nodes"):
        parts += ["Tokens/s per rank, and in brackets over those of the first column:", grid(rates)]
    return "\n\n".join(parts)


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


def losses(comparison: Comparison) -> str:
    """Final losses by preset: training and evaluation."""
    presets = by_preset(comparison.trainings)
    if not presets:
        return ""
    stock = presets.get(STOCK_PRESET, {})
    first = comparison.trainings[0]
    head = ("preset", "by seed", "mean", "range of the seeds", "to stock, by seed", "to stock, mean")

    def one(metric: Callable[[TrainingRow], float]) -> str:
        rows = []
        for name, runs in presets.items():
            values = {seed: metric(row) for seed, row in runs.items()}
            apart = {} if name == STOCK_PRESET else to_stock(runs, stock, metric)
            mean = statistics.fmean(values.values())
            share = ""
            if apart:
                difference = statistics.fmean(apart.values())
                share = (
                    f"{difference:+.4f} ({difference / statistics.fmean(metric(stock[seed]) for seed in apart):+.2%})"
                )
            width = max(values.values()) - min(values.values()) if len(values) > 1 else math.nan
            rows.append([name, _by_seed(values, ".4f"), *map(_finite, (mean, width)), _by_seed(apart, "+.4f"), share])
        return table(head, rows)

    train = first.config["train"]
    said = (
        f"{first.config['model']['name']}, {first.parameters:,} parameters; {len(first.losses):,} steps of "
        f"{first.world_size} ranks, micro-batch {train['micro_batch']}, accumulation {train['grad_accumulation']}, learning "
        f"rate {train['lr']}."
    )
    parts = [said, "Training loss, mean of the last 50 steps:", one(final_training)]
    if all(row.evaluations for row in comparison.trainings):
        parts += ["Evaluation after the last step, with exact weights:", one(final_exact)]
    return "\n\n".join(parts)


def _by_seed(values: Mapping[int, float], form: str) -> str:
    return ", ".join(f"{seed}: {value:{form}}" for seed, value in values.items()) or NONE


def _finite(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else NONE


def times_to_loss(comparison: Comparison) -> str:
    """Steps and seconds to each loss, by scheme."""
    found = reach(comparison)
    if found is None:
        return ""
    stock = found.result.row(STOCK)
    assert stock is not None
    rows = []
    for row in found.rows:
        cells = [row.label, f"{row.median_s:.3f}"]
        for loss in found.losses:
            steps, base = found.steps_to(row.scheme, loss), found.steps_to(STOCK, loss)
            if steps is None or base is None:
                cells.append("not reached")
            else:
                time = steps * row.median_s
                cells.append(f"{steps:,} steps, {time:,.0f} s ({time / (base * stock.median_s):.3f})")
        rows.append(cells)
    head = ("scheme", "step, s (median)", *(f"loss {loss:.2f}" for loss in found.losses))
    return f"{setting(found.result)}\n\n{table(head, rows)}"


def measured(comparison: Comparison) -> str:
    """When and at which commit each measurement and training was taken."""
    firsts = [*(result.rows[0] for result in comparison.results), *comparison.trainings]
    rows = [
        (row.title, f"{row.date:%Y-%m-%d %H:%M}", row.versions.get("commit", "not recorded"), row.id) for row in firsts
    ]
    return table(("measurement", "ended (UTC)", "commit", "id"), rows, left=4)


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
