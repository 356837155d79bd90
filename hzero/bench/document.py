"""The dated report as Markdown, section by section; what was not measured has no section."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import yaml

from hzero.bench.curves import convergence_part
from hzero.bench.markdown import cell, size, table
from hzero.bench.measured import Chosen, Measurement
from hzero.bench.reach import reach, reach_part
from hzero.bench.rows import StepsRow
from hzero.bench.series import ablation_part, series_of, series_part
from hzero.bench.suites import SUITES
from hzero.bench.tables import Traces, measurement_part, targets
from hzero.bench.targets import SUBJECT, variants

#: Figures of series; those of weak scaling have strong scaling in them.
_FIGURES = {
    "accumulation": ("accumulation",),
    "nodes_weak": ("nodes", "scaling"),
    "nodes_strong": ("nodes", "scaling"),
    "sweep": ("sweep",),
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
    compared = variants(chosen)
    if compared:
        parts.append("## What it must show")
        parts.append(
            "Quotients of medians of the timed steps, computed from the rows; the paper's figures were not repeated here."
        )
        for measurements in compared:
            parts += [f"### Targets, {measurements[0].title}"] if len(compared) > 1 else []
            parts.append(targets(measurements))
    detailed = chosen.detailed()
    if detailed:
        parts += ["## By peer", *image("step-time", "step time by peer"), *image("bytes", "bytes by tier")]
        parts += [] if chosen.of("training") else image("loss-time", "loss against time")
        parts += [measurement_part(measurement, traces) for measurement in detailed]
    shown: set[str] = set()
    for suite, kind in SUITES.items():
        if kind.shown == "series" and (series := series_of(chosen, suite)):
            parts.append(f"## {kind.title}")
            for end in _FIGURES[suite]:
                parts += [] if end in shown else image(end, kind.title)
                shown.add(end)
            parts.append(series_part(series))
        elif kind.shown == "ablation" and chosen.of(suite):
            peers = {row.peer for measurement in chosen.of(suite) for row in measurement.rows}
            own = any(peer.startswith(f"{SUBJECT}-") for peer in peers)
            parts += [f"## {kind.title}" + (f" of {SUBJECT}" if own else ""), ablation_part(chosen.of(suite))]
    parts += _losses(chosen, traces, image)
    parts += ["## Full configuration", *_configurations(chosen)]
    return "\n\n".join(parts) + "\n"


def _losses(chosen: Chosen, traces: Traces, image: Callable[[str, str], list[str]]) -> list[str]:
    """Convergence, and the time to a loss on emulated links."""
    joined, note = reach(chosen)
    if not chosen.runs and not chosen.of("training"):
        return []
    parts = ["## Convergence", *image("convergence", "training loss by preset")]
    parts += [convergence_part(chosen.runs)] if chosen.runs else []
    parts += [reach_part(joined), *image("loss-time", "loss against time")] if joined else [note]
    return parts + [measurement_part(measurement, traces) for measurement in chosen.of("training")]


def _head(chosen: Chosen, date: str, name: str, notes: Sequence[str]) -> list[str]:
    prefix = f"{date}-{name}"
    rows = chosen.rows
    steps = [row for row in rows if isinstance(row, StepsRow)]
    machines = _distinct(
        f"{row.machine.processor}, {row.machine.cores} cores, {size(row.machine.memory_bytes)} of memory; "
        f"{row.machine.system}; Python {row.machine.python}"
        for row in rows
    )
    versions = _distinct(", ".join(f"{key} {value}" for key, value in row.versions.items()) for row in rows)
    clusters = _distinct(f"{one.text()}; each way: {one.rates_text()}" for one in (row.config.cluster for row in steps))
    days = sorted({f"{row.date:%Y-%m-%d}" for row in rows})
    lines = [("measured", days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}")]
    lines += [("machine", text) for text in machines] + [("versions", text) for text in versions]
    lines += [("emulated", text) for text in clusters]
    there = {measurement.suite for measurement in chosen.measurements} | ({"convergence"} if chosen.runs else set())
    absent = [suite.what for name, suite in SUITES.items() if name not in there]
    inside = [suite.what for name, suite in SUITES.items() if name in there]
    inside += [f"suite `{suite}`" for suite in sorted(there - set(SUITES))]
    parts = [
        table(("what", "found"), lines, left=2),
        _ran(steps, bool(chosen.runs)),
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
    return [*parts, _WORDS] if steps else parts


def _ran(steps: Sequence[StepsRow], trained: bool) -> str:
    """On what the ranks ran, and how they were linked."""
    text = "Every rank ran on this machine's processor cores, which all ranks share"
    limited = any(rate is not None for row in steps for rate in row.config.cluster.rates_mbit.values())
    if steps:
        text += f"; the links between them are emulated network interfaces{' with limited rates' if limited else ''}"
        text += " (those of the convergence runs are not)" if trained else ""
    text += ". **None of this ran on AMD GPUs.**"
    if steps:
        text += (
            " It shows what the schemes send"
            + (" and how long slow wires take for it" if limited else "")
            + ", not how fast a model trains on Frontier. Headers of packets (66 bytes of 9,000) and acknowledgements make 1 to "
            "2.5 % of measured bytes, more where messages are small; what makes the comparison fair is written down in "
            "[docs/benchmarks.md](../../docs/benchmarks.md)."
        )
    return text


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _configurations(chosen: Chosen) -> list[str]:
    parts = [_folded(measurement.title, _configuration(measurement)) for measurement in chosen.measurements]
    for run in chosen.runs:
        title = f"{run.title}: preset {run.preset}, seed {run.seed}"
        parts.append(_folded(title, {"id": run.id, "configuration": run.content["config"]}))
    return parts


def _configuration(measurement: Measurement) -> dict[str, Any]:
    first = measurement.rows[0].content
    peers = {row.peer: row.content["peer_config"] for row in measurement.rows}
    head = {key: first[key] for key in ("id", "date", "machine", "versions")}
    return {**head, "configuration": first["config"], "peers": peers}


def _folded(title: str, content: dict[str, Any]) -> str:
    """A part that unfolds, as YAML."""
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
    return f"<details>\n<summary>{cell(title)}</summary>\n\n````yaml\n{text}````\n\n</details>"
