"""``hzero report``: loss curves and bytes by tier of one or more runs, as PNG and one HTML page."""

from __future__ import annotations

import argparse
import base64
import dataclasses
import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from hzero.config import ROLES, TIERS
from hzero.train.folder import CONFIG, METRICS, SUMMARY, read_metrics
from hzero.train.summary import TRAFFIC_HEAD, traffic_rows, zero3_bytes
from hzero.validation import ConfigError

#: Okabe and Ito's colours, which stay apart for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


@dataclass(frozen=True)
class Run:
    """A run as its folder describes it.

    Attributes:
        name: The folder's name, shown in plots.
        steps: Metrics of steps.
        evaluations: Metrics of evaluations.
        summary: ``summary.json``; empty if the run has not ended.
        config: Text of the resolved configuration.
        torn: Lines of metrics that could not be read.
    """

    name: str
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    summary: dict[str, Any]
    config: str
    torn: int


def read_run(path: Path) -> Run:
    """Reads a run's folder.

    Raises:
        ConfigError: The folder is missing or holds no run, or no step has been logged.
    """
    if not path.is_dir():
        raise ConfigError(f"RUN: no folder {str(path)!r}")
    if not (path / METRICS).is_file():
        raise ConfigError(f"RUN: {str(path)!r} holds no {METRICS}; it is not the folder of a run")
    rows, torn = read_metrics(path)
    steps = [row for row in rows if row.get("kind") == "step"]
    if not steps:
        raise ConfigError(f"RUN: no step has been logged in {str(path / METRICS)!r}")
    try:
        summary = json.loads((path / SUMMARY).read_text())
    except (OSError, ValueError):
        summary = {}
    config = (path / CONFIG).read_text() if (path / CONFIG).exists() else ""
    evaluations = [row for row in rows if row.get("kind") == "eval"]
    return Run(path.resolve().name, steps, evaluations, summary, config, torn)


def run_report(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments. Raises `ConfigError` for input that cannot be used."""
    parser = argparse.ArgumentParser(
        prog="hzero report",
        description="Draws loss curves and bytes by tier of runs: loss.png, bytes.png and report.html.",
        epilog="example: hzero report runs/lossless runs/mild runs/topo -o comparison",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="folder of a run, such as runs/default")
    parser.add_argument("-o", "--output", type=Path, help="folder to write to (default RUN/report; several: ./report)")
    parsed = parser.parse_args(list(arguments))
    runs = [read_run(path) for path in parsed.runs]
    if len({run.name for run in runs}) < len(runs):
        runs = [dataclasses.replace(run, name=str(path)) for run, path in zip(runs, parsed.runs)]
    output = parsed.output or (parsed.runs[0] / "report" if len(runs) == 1 else Path("report"))
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_report(runs, output)
    except OSError as error:
        raise ConfigError(f"--output: cannot write {str(output)!r}: {error.strerror}") from None
    print(f"written: {output / 'report.html'} (with loss.png and bytes.png)")
    return 0


def write_report(runs: Sequence[Run], output: Path) -> None:
    """Writes ``loss.png``, ``bytes.png`` and ``report.html`` with both inside."""
    images = {"loss.png": _loss_figure(runs), "bytes.png": _bytes_figure(runs)}
    shown = [name for name, figure in images.items() if figure is not None]
    for name in shown:
        images[name].savefig(output / name, dpi=130)
        plt.close(images[name])
    (output / "report.html").write_text(_page(runs, output, shown), encoding="utf-8")


def smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential mean, corrected for its start."""
    smoothed, mean, norm = [], 0.0, 0.0
    for value in values:
        mean, norm = mean * weight + value * (1 - weight), norm * weight + (1 - weight)
        smoothed.append(mean / norm)
    return smoothed


def number(loss: float | None) -> float:
    """A loss of the metrics, where null stands for one that was not finite."""
    return math.nan if loss is None else loss


def _loss_figure(runs: Sequence[Run]) -> Any:
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for index, run in enumerate(runs):
        colour = COLOURS[index % len(COLOURS)]
        steps, losses = [row["step"] for row in run.steps], [number(row["loss"]) for row in run.steps]
        axes.plot(steps, losses, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(steps, smooth(losses), color=colour, linewidth=1.8, label=run.name)
        if run.evaluations:
            at = [row["step"] for row in run.evaluations]
            exact = [number(row["loss_exact"]) for row in run.evaluations]
            axes.scatter(at, exact, color=colour, marker="D", s=28, zorder=3)
    axes.set(xlabel="optimizer step", ylabel="loss, nats per token", title="Training loss (diamonds: evaluation)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def _bytes_figure(runs: Sequence[Run]) -> Any:
    logged = [run for run in runs if run.summary.get("zero3")]
    if not logged:
        return None
    bars: list[tuple[str, dict[tuple[str, str], float]]] = []
    for run in logged:
        if run.summary["traffic"]:
            steps = max(run.summary["steps_here"], 1)
            bars.append((run.name, {(r["role"], r["tier"]): r["wire_bytes"] / steps for r in run.summary["traffic"]}))
    bars.append(("ZeRO-3 (computed)", zero3_bytes(logged[0].summary)))
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    width = 0.8 / len(bars)
    for index, (name, sizes) in enumerate(bars):
        colour = "#999999" if name.startswith("ZeRO-3") else COLOURS[index % len(COLOURS)]
        for role, hatch in zip(ROLES, ("", "//")):
            places = [place + index * width for place in range(len(TIERS))]
            heights = [sizes.get((role, tier), 0) / 1e6 for tier in TIERS]
            below = [sum(sizes.get((r, tier), 0) for r in ROLES[: ROLES.index(role)]) / 1e6 for tier in TIERS]
            label = name if role == "weights" else None
            axes.bar(places, heights, width * 0.92, below, color=colour, hatch=hatch, edgecolor="white", label=label)
    middles = [place + width * (len(bars) - 1) / 2 for place in range(len(TIERS))]
    axes.set_xticks(middles, [f"tier {tier}" for tier in TIERS])
    axes.set(
        ylabel="MB received per step, all ranks together", title="Bytes by tier (plain: weights, hatched: gradients)"
    )
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    return figure


_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}td,th{border-bottom:1px solid #ddd;padding:.3rem .8rem;text-align:right}
td:first-child,th:first-child{text-align:left}img{max-width:100%}pre{background:#f6f6f6;padding:1rem;overflow:auto}
.note{color:#777}"""


def _page(runs: Sequence[Run], output: Path, images: Sequence[str]) -> str:
    head = f"<!doctype html><meta charset=utf-8><title>hzero report</title><style>{_STYLE}</style>"
    parts = [head, "<h1>hzero report</h1>", _runs_table(runs)]
    for name in images:
        data = base64.b64encode((output / name).read_bytes()).decode()
        parts.append(f'<p><img alt="{name}" src="data:image/png;base64,{data}"></p>')
    for run in runs:
        parts.append(f"<h2>{html.escape(run.name)}</h2>")
        if run.torn:
            parts.append(f"<p class=note>{run.torn} lines of its metrics could not be read and are left out.</p>")
        if not run.summary:
            parts.append("<p class=note>The run has no summary: it is under way, or was ended from outside.</p>")
        elif run.summary.get("traffic"):
            parts.append("<p>Bytes received per step, all ranks together:</p>")
            parts.append(_table(TRAFFIC_HEAD, traffic_rows(run.summary)))
        versions = run.summary.get("versions")
        if versions:
            parts.append(f"<p class=note>{html.escape(', '.join(f'{k} {v}' for k, v in versions.items()))}</p>")
        parts.append(f"<details><summary>configuration</summary><pre>{html.escape(run.config)}</pre></details>")
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line(head, "th") + "".join(line(row, "td") for row in rows) + "</table>"


def _runs_table(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        summary = run.summary
        evaluation, rate = summary.get("eval"), summary.get("tokens_per_s")
        losses = [run.steps[0]["loss"], run.steps[-1]["loss"]]
        losses += [evaluation[key] for key in ("loss_decoded", "loss_exact")] if evaluation else []
        rows.append(
            [
                run.name,
                str(summary.get("preset", "")),
                summary.get("status", "no summary"),
                f"{run.steps[-1]['step']:,}",
                *(f"{number(loss):.4f}" for loss in losses),
                *([] if evaluation else ["", ""]),
                f"{rate:,.0f}" if rate else "",
            ]
        )
    head = ["run", "preset", "status", "steps", "first loss", "last loss", "eval, decoded", "eval, exact", "tokens/s"]
    return _table(head, rows)
