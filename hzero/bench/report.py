"""``hzero bench report``: the dated report of a comparison, from the rows that it left."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hzero.bench.document import document
from hzero.bench.markdown import count, ratio, seconds, size
from hzero.bench.measured import STOCK, Chosen, choose
from hzero.bench.results import read_results
from hzero.bench.targets import SUBJECT, outcomes, variants
from hzero.config import ConfigError, one_of

#: Where reports go by default.
REPORTS = Path("benchmarks/reports")
#: Largest trace that is copied without having been asked for, in bytes.
LARGEST_TRACE = 5_000_000
_EXAMPLES = """written to the folder of --output, DATE and NAME in front:
  DATE-NAME.md                 tables; what was not measured is left out, and said
  DATE-NAME.jsonl              the rows that count
  DATE-NAME-step-time.png, -bytes, -loss-time, -accumulation, -nodes, -scaling, -sweep, -convergence
  DATE-NAME-trace-*.json.gz    traces (see --traces); open them at https://ui.perfetto.dev

examples:
  hzero bench report runs/bench
  hzero bench report runs/bench runs/convergence/results.jsonl -o /tmp/reports --name first --traces topo"""


@dataclass(frozen=True)
class Written:
    """Files of a report before they stand in its folder.

    Attributes:
        copies: Traces to copy: where from, and the name to have.
        said: What the report says of a row's trace, by suite, measurement and peer.
        lines: Objects of the copy of the rows.
    """

    copies: dict[str, Path]
    said: dict[tuple[str, str, str], str]
    lines: list[dict[str, Any]]


def run_report(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments.

    Raises:
        ConfigError: Results that cannot be read or hold no rows, arguments that cannot be used, or a folder that cannot
            be written.
    """
    parsed = _parse(arguments)
    rows, notes = read_results(parsed.results)
    chosen = choose(rows)
    notes = [*notes, *chosen.notes]
    date = parsed.date or max(row.date for row in chosen.rows).strftime("%Y-%m-%d")
    prefix = f"{date}-{parsed.name}"
    written = _traces(chosen, parsed.traces, parsed.output, prefix)
    try:
        paths = _write(chosen, written, parsed.output, date, parsed.name, notes)
    except OSError as error:
        raise ConfigError(f"--output: cannot write {str(parsed.output)!r}: {error.strerror}") from None
    _show(chosen, notes)
    for path in paths:
        print(f"written: {path}")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hzero bench report",
        description="Writes the dated report of a comparison: tables, plots and a copy of the rows.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", nargs="+", metavar="RESULTS", type=Path, help="results folder, or a file of rows")
    parser.add_argument("-o", "--output", type=Path, default=REPORTS, help="folder to write to (default %(default)s)")
    parser.add_argument("--name", default="comparison", help="in the names of the files (default %(default)s)")
    parser.add_argument("--date", metavar="YYYY-MM-DD", help="in the names of the files (default: of the newest row)")
    parser.add_argument(
        "--traces",
        metavar="PEER,..",
        default="auto",
        help=f"peers whose traces are copied, or none (default: {SUBJECT}, {STOCK} and peers whose target is missed, "
        "traces of at most 5 MB)",
    )
    parsed = parser.parse_args(list(arguments))
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", parsed.name):
        raise ConfigError(f"--name: found {parsed.name!r}, expected letters, digits, '.', '_' and '-'")
    if parsed.date is not None:
        try:
            parsed.date = datetime.datetime.strptime(parsed.date, "%Y-%m-%d").strftime("%Y-%m-%d")
        except ValueError:
            raise ConfigError(f"--date: found {parsed.date!r}, expected a day as 2026-11-21") from None
    return parsed


def _traces(chosen: Chosen, asked: str, output: Path, prefix: str) -> Written:
    """Which traces go beside the report.

    Args:
        chosen: What the report is made of.
        asked: Value of ``--traces``.
        output: Folder of the report. Traces that rows name there are those of an earlier report, and stay.
        prefix: Of the names of all files.

    Raises:
        ConfigError: A peer was asked for that no row with a trace has.
    """
    named = set() if asked in ("auto", "none") else set(asked.split(","))
    traced = {row.peer for measurement in chosen.measurements for row in measurement.rows if row.trace}
    for peer in sorted(named - traced):
        raise one_of("--traces", peer, sorted(traced) or ["none"], "peer")
    if asked == "auto":
        named = {SUBJECT, STOCK}
        for measurements in variants(chosen):
            named.update(*(one.found[0].peers for one in outcomes(measurements)))
    written = Written({}, {}, [])
    shown = chosen.detailed()
    for measurement in chosen.measurements:
        for row in measurement.rows:
            content = row.content
            if row.trace:
                source = row.folder / row.trace
                name = f"{prefix}-trace-{_short(measurement.title, row.id)}-{_plain(row.peer)[:60]}.json.gz"
                said = "not copied"
                if source.is_file() and (
                    source.parent.resolve() == output.resolve()
                    or (asked != "auto" and row.peer in named)
                    or (row.peer in named and measurement in shown and source.stat().st_size <= LARGEST_TRACE)
                ):
                    written.copies[name] = source
                    said, content = f"[{size(source.stat().st_size)}]({name})", {**content, "trace": name}
                written.said[row.suite, row.measurement, row.peer] = said
            written.lines.append(content)
    written.lines.extend(run.content for run in chosen.runs)
    return written


def _short(title: str, identity: str) -> str:
    """A measurement's title in a file name, which holds 255 bytes: overrides make some titles long."""
    plain = _plain(title)
    return plain if len(plain) <= 60 else f"{plain[:60]}-{identity[:8]}"


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)


def _write(chosen: Chosen, written: Written, output: Path, date: str, name: str, notes: Sequence[str]) -> list[Path]:
    """Writes all files beside their place, then moves them there, the report last. Returns their paths, it first."""
    import matplotlib.pyplot as plt

    from hzero.bench.figures import DPI, figures

    prefix = f"{date}-{name}"
    output.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{prefix}.", suffix=".partial", dir=output))
    try:
        for end, figure in (drawn := figures(chosen)).items():
            figure.savefig(partial / f"{prefix}-{end}.png", dpi=DPI)
            plt.close(figure)
        for target, source in written.copies.items():
            (partial / target).write_bytes(_read(source))
        rows = "".join(json.dumps(content, ensure_ascii=False) + "\n" for content in written.lines)
        (partial / f"{prefix}.jsonl").write_text(rows, encoding="utf-8")
        text = document(chosen, date=date, name=name, images=drawn, traces=written.said, notes=notes)
        (partial / f"{prefix}.md").write_text(text, encoding="utf-8")
        names = sorted((path.name for path in partial.iterdir()), key=lambda file: (file == f"{prefix}.md", file))
        for file in names:
            os.replace(partial / file, output / file)
        for stale in _of_report(output, prefix):
            if stale.name not in names:  # of an earlier report under the same name
                stale.unlink()
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return [output / file for file in reversed(names)]


def _read(source: Path) -> bytes:
    try:
        return source.read_bytes()
    except OSError as error:
        raise ConfigError(f"RESULTS: cannot read the trace {str(source)!r}: {error.strerror}") from None


def _of_report(output: Path, prefix: str) -> Iterator[Path]:
    """Figures and traces in a folder that a report of that prefix wrote."""
    from hzero.bench.figures import ENDS

    yield from (path for end in ENDS if (path := output / f"{prefix}-{end}.png").is_file())
    yield from (path for path in output.glob(f"{prefix}-trace-*.json.gz") if path.is_file())


def _show(chosen: Chosen, notes: Sequence[str]) -> None:
    """The short of it on the terminal: the main measurement and its targets, else a line a measurement."""
    console = Console(soft_wrap=True)
    for measurement in chosen.of("main"):
        stock = measurement.row(STOCK)
        shown = Table(
            "peer", "step, s (median)", "min", "max", "ratio to ZeRO-3", "tokens/s", title=escape(measurement.title)
        )
        for row in measurement.rows:
            to_stock = ratio(row.median_s / stock.median_s if stock else None)
            times = [seconds(value) for value in (row.median_s, min(row.step_s), max(row.step_s))]
            shown.add_row(escape(row.label), *times, to_stock, count(row.tokens_per_s))
        console.print(shown)
        for one in outcomes([measurement]):
            found = ": ".join(filter(None, (f"{one.found[0].text} ({one.limit})", one.found[0].verdict)))
            console.print(f"{one.what} against {one.against}: {found}", markup=False, highlight=False)
    others = [measurement for measurement in chosen.measurements if measurement.suite != "main"]
    if others or chosen.runs:
        shown = Table("measurement", "peers", "fastest", "step, s (median)", title="other measurements")
        for measurement in others:
            first = measurement.fastest()[0]
            shown.add_row(
                escape(measurement.title), str(len(measurement.rows)), escape(first.label), seconds(first.median_s)
            )
        if chosen.runs:
            shown.add_row("convergence", f"{len(chosen.runs)} runs", "", "")
        console.print(shown)
    for note in notes:
        console.print(f"note: {note}", markup=False, highlight=False)
