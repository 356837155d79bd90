"""``hzero report``: loss, gradient norm, speed, bytes, memory and hidden time of runs, as PNG and one HTML page."""

from __future__ import annotations

import argparse
import dataclasses
import html
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hzero.arguments import Parser
from hzero.files import replacing
from hzero.formatting import size_text
from hzero.train import curves
from hzero.train.runs import Run, numbers, read_run
from hzero.train.summary import (
    MEMORY_HEAD,
    TRACED_HEAD,
    TRAFFIC_HEAD,
    ends,
    memory_rows,
    traced_rows,
    traffic_rows,
)
from hzero.train.sweep import members, write_sweep
from hzero.validation import ConfigError

if TYPE_CHECKING:
    from hzero.train.pictures import Picture


def parser() -> argparse.ArgumentParser:
    """Reads the command's arguments."""
    made = Parser(
        prog="hzero report",
        description="Draws loss, gradient norm, throughput, bytes by tier, memory and hidden time of runs: a PNG each, and "
        "report.html with all of them and tables.",
        epilog="examples: hzero report runs/lossless runs/mild runs/topo -o comparison; hzero report multirun/paper_20b",
    )
    made.add_argument(
        "runs", nargs="+", metavar="RUN", type=Path,
        help="folder of a run, such as runs/default, or of the runs of a sweep, which gets one table (sweep.csv) and one picture",
    )  # fmt: skip
    made.add_argument("-o", "--output", type=Path, help="folder to write to (default RUN/report; several: ./report)")
    return made


def run_report(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments. Raises `ConfigError` for input that cannot be used."""
    parsed = parser().parse_args(list(arguments))
    swept = [member for path in parsed.runs for member in members(path)]
    paths = [member for path in parsed.runs for member in members(path) or [path]]
    runs = [read_run(path, begun=path not in swept) for path in paths]
    if len({run.name for run in runs}) < len(runs):
        runs = [dataclasses.replace(run, name=str(path)) for run, path in zip(runs, paths)]
    drawn = [run for run in runs if run.steps]
    if not drawn:
        raise ConfigError(f"RUN: no step has been logged in any run of {', '.join(map(str, parsed.runs))}")
    output = parsed.output or (parsed.runs[0] / "report" if len(parsed.runs) == 1 else Path("report"))
    try:
        output.mkdir(parents=True, exist_ok=True)
        written = [*(write_sweep(runs, output) if swept else ()), *write_report(drawn, output)]
    except OSError as error:
        raise ConfigError(f"--output: cannot write {str(output)!r}: {error.strerror}") from None
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        names = ", ".join(map(str, parsed.runs))
        raise ConfigError(f"RUN: {names}: holds files that no run has written ({cause})") from None
    for run in runs:
        if not run.steps:
            print(f"hzero: warning: {run.name}: no step has been logged, so it is in sweep.csv alone", file=sys.stderr)
    print(f"written: {output / 'report.html'} (with {', '.join(written)})")
    return 0


def write_report(runs: Sequence[Run], output: Path) -> list[str]:
    """Writes a PNG per picture, and ``report.html`` with all of them inside. Returns the names of the PNG files."""
    from hzero.train import pictures  # imports matplotlib, which completion and refusals do without

    made = pictures.pictures(runs)
    for picture in made:
        pictures.write_png(picture, runs, output / f"{picture.name}.png")
    with replacing(output / "report.html") as file:
        file.write(_page(runs, made))
    return [f"{picture.name}.png" for picture in made]


_STYLE = """
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;max-width:74rem;margin:0 auto;padding:1rem;color:var(--ink);background:var(--ground)}
h1{font-size:1.5rem;margin:.5rem 0}h2{font-size:1.2rem;margin:2rem 0 .5rem;overflow-wrap:anywhere}
h3{font-size:1rem;margin:1rem 0 .3rem}
.box{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{border-bottom:1px solid var(--line);padding:.3rem .7rem;text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left;padding-left:0;position:sticky;left:0;background:var(--ground);white-space:normal;min-width:7rem}
.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1.5rem 2rem;margin:1.5rem 0}
figure{margin:0;min-width:0}figure svg{display:block;width:100%;height:auto}
figure h2{font-size:1rem;margin:0 0 .3rem}
figcaption,.note{color:var(--faint);font-size:.87rem}
.legend{display:flex;flex-wrap:wrap;gap:0 1.2rem;font-size:.87rem;overflow-wrap:anywhere}
.legend svg{display:inline-block;width:2.2rem;height:.7rem;margin-right:.4rem}
summary{cursor:pointer}pre{background:var(--block);padding:1rem;overflow:auto}
"""


def _page(runs: Sequence[Run], made: Sequence[Picture]) -> str:
    from hzero.train import pictures

    light, dark = pictures.variables(dark=False), pictures.variables(dark=True)
    style = (
        f":root{{color-scheme:light dark;{light}--line:#d5d9de;--faint:#5c636b;--block:#f3f4f6}}"
        f"@media(prefers-color-scheme:dark){{:root{{{dark}--line:#3a4048;--faint:#a0a7b0;--block:#1f242b}}}}{_STYLE}"
    )
    names = ", ".join(run.name for run in runs)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{html.escape(names)} | hzero report</title><style>{style}</style></head><body>",
        "<h1>hzero report</h1>",
        _runs_table(runs),
        '<div class="pictures">',
    ]
    for picture in made:
        legend = _legend(runs, picture.stock) if len(runs) > 1 or picture.stock else ""
        parts += [
            f"<figure><h2>{html.escape(picture.title)}</h2>{legend}{pictures.svg(picture)}",
            f"<figcaption>{html.escape(picture.note)}</figcaption></figure>",
        ]
    parts.append("</div>")
    for run in runs:
        parts += [f"<h2>{html.escape(run.name)}</h2>", *_section(run)]
    return "\n".join([*parts, "</body></html>"])


def _legend(runs: Sequence[Run], stock: bool) -> str:
    from hzero.train import pictures

    entries = []
    for index, run in enumerate(runs):
        look = pictures.look_of(index)
        dashes = " ".join(f"{length * 3:g}" for length in look.dashes)
        line = f'<line x1="0" x2="36" y1="6" y2="6" stroke="{look.variable}" stroke-width="3" stroke-dasharray="{dashes}"/>'
        entries.append((line, run.name))
    if stock:
        entries.append(('<line x1="6" x2="30" y1="6" y2="6" stroke="currentColor" stroke-width="4"/>', pictures.STOCK))
    keys = "".join(
        f'<span><svg viewBox="0 0 36 12" aria-hidden="true">{drawing}</svg>{html.escape(name)}</span>'
        for drawing, name in entries
    )
    return f'<div class="legend">{keys}</div>'


def _section(run: Run) -> Iterator[str]:
    """Notes and tables of one run."""
    for note in _notes(run):
        yield f'<p class="note">{html.escape(note)}</p>'
    summary = run.summary
    if summary.get("traffic"):
        yield _table("Bytes received per step, all ranks together", TRAFFIC_HEAD, traffic_rows(summary))
    if summary.get("memory"):
        yield _table("Memory of states, maximum over the ranks", MEMORY_HEAD, memory_rows(summary))
    if summary.get("traced"):
        title = "Time per traced step, rank 0 (a second may count in both shares)"
        yield _table(title, TRACED_HEAD, traced_rows(summary))
    versions = summary.get("versions")
    if versions:
        yield f'<p class="note">{html.escape(", ".join(f"{k} {v}" for k, v in versions.items()))}</p>'
    yield f"<details><summary>configuration</summary><pre>{html.escape(run.config)}</pre></details>"


def _notes(run: Run) -> Iterator[str]:
    bad = [row["step"] for row in run.steps if row["loss"] is None]
    if bad:
        yield f"The loss was not finite in {len(bad):,} of {len(run.steps):,} steps, gaps in its curve: {curves.spans(bad)}."
    skipped = [row["step"] for row in run.steps if row.get("skipped")]
    if skipped:
        yield f"The optimizer skipped {len(skipped):,} steps: {curves.spans(skipped)}."
    if run.torn:
        yield f"{run.torn} lines of its metrics could not be read and are left out."
    if not run.summary:
        yield f"The run has no summary ({run.state}): bytes, memory and hidden time are not known."


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    heading = f"<h3>{html.escape(title)}</h3>" if title else ""
    table = f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"
    return f'{heading}<div class="box" tabindex="0">{table}</div>'


def _runs_table(runs: Sequence[Run]) -> str:
    columns, windows = [], set()
    for run in runs:
        summary = run.summary
        first, last, window = ends([row["loss"] for row in run.steps])
        windows.add(window)
        evaluation = run.evaluations[-1] if run.evaluations else {}
        columns.append(
            [
                run.name,
                str(summary.get("model", "")),
                str(summary.get("preset", "")),
                run.state,
                f"{run.steps[-1]['step']:,}",
                *map(_loss, (first, last)),
                *(_loss(evaluation[key]) if evaluation else "" for key in ("loss_exact", "loss_decoded")),
                *(_median(run, key) for key in ("tokens_per_s", "tflops_per_rank", "step_s")),
                *_states(summary),
            ]
        )
    names = ["run", "model", "preset", "state", "steps", "first loss", "last loss", "evaluation, exact"]
    names += ["evaluation, decoded", "tokens/s", "TFLOPS per rank", "s per step", "states per rank", "of ZeRO-3's"]
    head, *rows = (row for row in zip(names, *columns) if any(row[1:]))
    steps = " or ".join(map(str, sorted(windows)))
    note = (
        f"First and last loss are means of {steps} steps; rates are medians. Evaluation with exact and with decoded weights. "
        "States are without transient buffers."
    )
    return f'{_table("", head, rows)}<p class="note">{note}</p>'


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None or loss != loss else f"{loss:.4f}"


def _median(run: Run, key: str) -> str:
    """A rate as the summary has it; of a run without a summary, of the steps so far."""
    known = [value for value in numbers(run.steps, key) if value == value]
    value = run.summary.get("step_s_median" if key == "step_s" else key) or (
        statistics.median(known) if known else None
    )
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _states(summary: dict[str, Any]) -> tuple[str, str]:
    """Bytes of all states on a rank, without transient buffers, and as a multiple of plain ZeRO-3's."""
    if not summary.get("memory"):
        return "", ""
    stock = {row["name"]: row["bytes"] for row in summary["zero3"]["memory"]}
    own = summary["memory"]
    plain = sum(stock.get(name, 0) for name in own)  # none with pipeline stages
    return size_text(sum(own.values())), f"{sum(own.values()) / plain:.2f} x" if plain else ""
