"""The dated report as Markdown, section by section; what was not measured has no section."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from hzero.bench.curves import convergence_part
from hzero.bench.markdown import as_yaml, folded, size, table
from hzero.bench.measured import Chosen, Measurement, run_of
from hzero.bench.rows import StepsRow
from hzero.bench.series import Series, ablation_part, accumulation_part, all_series, nodes_part, sweep_part
from hzero.bench.tables import Traces, measurement_part, targets

#: Suites in the report's order, and what they are.
SUITES = {
    "main": "the main measurement, which the targets are about",
    "reduce_scatter": "other reduce-scatters for the peers",
    "accumulation": "accumulation of gradients over micro-steps",
    "nodes_weak": "numbers of nodes, the same work a rank",
    "nodes_strong": "numbers of nodes, the same work in all",
    "sweep": "rates between nodes",
    "codecs": "codecs of `topo`",
    "shards": "shard degrees of `topo`",
    "convergence": "convergence over many steps and seeds",
}
_PARTS: Mapping[str, Callable[[Series], str]] = {
    "accumulation": accumulation_part,
    "nodes_weak": nodes_part,
    "nodes_strong": nodes_part,
    "sweep": sweep_part,
}
_WORDS = """A *rank* is one process on one emulated device (GCD: half of an MI250X). Devices of a GPU talk over tier `gcd`,
GPUs of a node over tier `gpu`, nodes over tier `node`. *Planned* bytes are hzero's own count; of other peers they follow from
the closed form of their collectives. gloo's reduce-scatter sends more than it has to, so the bytes with an *ideal* reduce-scatter
stand beside. Where the ranges (min–max) of two peers overlap, their medians may differ by chance."""


def document(
    chosen: Chosen, *, date: str, name: str, images: Iterable[str], traces: Traces, notes: Sequence[str]
) -> str:
    """The report's text.

    Args:
        chosen: What it is made of.
        date: In its title and in the names of its files, as YYYY-MM-DD.
        name: The same.
        images: Ends of the names of the figures that stand beside it.
        traces: What is said of the traces of rows.
        notes: What was found and is not in it.
    """
    prefix, drawn = f"{date}-{name}", set(images)

    def image(end: str, text: str) -> list[str]:
        return [f"![{text}]({prefix}-{end}.png)"] if end in drawn else []

    parts = [f"# Comparison on an emulated cluster, {date}", *_head(chosen, date, name, notes)]
    main = chosen.of("main")
    if main:
        parts.append("## What it must show")
        parts.append(
            "Quotients of medians of the timed steps, computed from the rows; the paper's figures were not repeated here."
        )
        for measurement in main:
            parts += [f"### Targets, {measurement.title}"] if len(main) > 1 else []
            parts.append(targets(measurement))
    detailed = main + chosen.of("reduce_scatter")
    detailed += [m for m in chosen.measurements if m.suite not in SUITES]
    if detailed:
        parts += ["## By peer", *image("step-time", "step time by peer"), *image("bytes", "bytes by tier")]
        parts += image("loss-time", "loss against time")
        for measurement in detailed:
            parts.append(measurement_part(measurement, traces))
            if measurement.suite == "reduce_scatter":
                parts += ["The targets beside this variant:", targets(measurement)]
    figure_of = {"accumulation": "accumulation", "nodes_weak": "scaling", "nodes_strong": "scaling", "sweep": "sweep"}
    series = all_series(chosen)
    for suite, one in series.items():
        parts.append(f"## {one.title}")
        if not (suite == "nodes_strong" and "nodes_weak" in series):
            parts += image(figure_of[suite], one.title)
        parts.append(_PARTS[suite](one))
        if one.left_out:
            parts.append(f"Not in this series, since more differs than its axis: {', '.join(one.left_out)}.")
    for suite, title in (("codecs", "Codecs"), ("shards", "Shard degrees")):
        if chosen.of(suite):
            parts += [f"## {title}, one changed at a time", ablation_part(chosen.of(suite))]
    if chosen.runs:
        parts += ["## Convergence", *image("convergence", "training loss by preset")]
        parts.append(convergence_part([run_of(line) for line in chosen.runs]))
    parts += ["## Full configuration", *_configurations(chosen)]
    return "\n\n".join(parts) + "\n"


def _head(chosen: Chosen, date: str, name: str, notes: Sequence[str]) -> list[str]:
    prefix = f"{date}-{name}"
    rows = [line.row for line in chosen.lines]
    machines = _distinct(
        f"{row.machine.processor}, {row.machine.cores} cores, {size(row.machine.memory_bytes)} of memory; "
        f"{row.machine.system}; Python {row.machine.python}"
        for row in rows
    )
    versions = _distinct(", ".join(f"{key} {value}" for key, value in row.versions.items()) for row in rows)
    clusters = _distinct(_cluster(row) for row in rows if isinstance(row, StepsRow))
    days = sorted({f"{row.date:%Y-%m-%d}" for row in rows})
    lines = [("measured", days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}")]
    lines += [("machine", text) for text in machines] + [("versions", text) for text in versions]
    lines += [("emulated", text) for text in clusters]
    there = {measurement.suite for measurement in chosen.measurements} | ({"convergence"} if chosen.runs else set())
    absent = [text for suite, text in SUITES.items() if suite not in there]
    inside = [text for suite, text in SUITES.items() if suite in there]
    inside += [f"suite `{suite}`" for suite in sorted(there - set(SUITES))]
    parts = [
        table(("what", "found"), lines, left=2),
        "Every rank ran on this machine's processor cores, which all ranks share; the links between them are emulated "
        "network interfaces with limited rates. **None of this ran on AMD GPUs.** It shows what the schemes send and how "
        "long slow wires take for it, not how fast a model trains on Frontier.",
        f"In this report: {'; '.join(inside)}.",
    ]
    if absent:
        parts.append(f"Not measured: {'; '.join(absent)}.")
    if len(machines) > 1 or len(versions) > 1:
        parts.append("The rows come from several machines or versions; within one measurement they are the same.")
    parts += ["Notes:\n\n" + "\n".join(f"- {note}" for note in notes)] if notes else []
    parts.append(
        f"Repeat with `make bench` (Linux and root). The rows of this report are in [{prefix}.jsonl]({prefix}.jsonl); "
        f"`hzero bench report {prefix}.jsonl -o . --name {name} --date {date}` writes it again."
    )
    return [*parts, _WORDS]


def _cluster(row: StepsRow) -> str:
    cluster = row.config.cluster
    rates = " / ".join(f"{tier} {rate:g}" for tier, rate in cluster.rates_mbit.items() if rate is not None)
    return f"{cluster.text()}, Mbit/s each way: {rates or 'not limited'} (gcd, gpu: a rank; node: a node's trunk)"


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _configurations(chosen: Chosen) -> list[str]:
    parts = [folded(measurement.title, as_yaml(_configuration(measurement))) for measurement in chosen.measurements]
    for line in chosen.runs:
        run = run_of(line)
        title = f"convergence {run.measurement}: preset {run.preset}, seed {run.seed}"
        parts.append(folded(title, as_yaml({"id": run.id, "configuration": line.content["config"]})))
    return parts


def _configuration(measurement: Measurement) -> dict[str, object]:
    first = measurement.lines[0].content
    peers = {line.content["peer"]: line.content["peer_config"] for line in measurement.lines}
    return {"id": first["id"], "date": first["date"], "configuration": first["config"], "peers": peers}
