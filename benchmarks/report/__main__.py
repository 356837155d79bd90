"""``python -m benchmarks.report``: writes the report of a comparison from its rows."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import NAME, first_run, write_report
from benchmarks.report.results import Comparison
from hzero.errors import ConfigError

_EXAMPLES = """files, each name beginning with DATE-NAME:
  .md                        tables and text; sections without measurements are left out
  .jsonl                     the rows that count
  -step-time.png, -bytes, -accumulation, -memory, -sweep

examples:
  python -m benchmarks.report runs/bench                            into runs/bench/report, as `make bench` does
  python -m benchmarks.report runs/bench -o benchmarks/reports      a report to publish
  python -m benchmarks.report benchmarks/reports/2026-11-23-accumulation.jsonl -o /tmp/again
  python -m benchmarks.report first_run runs/first_run-JOB          the page of slurm/first_run.sbatch, into that folder"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit status; input that cannot be used is one line on stderr and status 2."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report",
        description="Writes the dated report of a comparison: tables, figures and a copy of the rows that count.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", nargs="+", metavar="RESULTS", type=Path, help="results folder, or file of rows")
    parser.add_argument(
        "-o", "--output", metavar="DIR", type=Path, help="folder to write to (default: report in the first RESULTS)"
    )
    parser.add_argument("--name", default=NAME, help="second part of the files' names (default %(default)s)")
    parser.add_argument(
        "--date", metavar="YYYY-MM-DD", help="first part of the files' names (default: of the newest row)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a report of the same name")
    given = parser.parse_args(arguments)
    try:
        if given.results[0] == Path("first_run"):
            if len(given.results) != 2:
                raise ConfigError(
                    f"first_run: found {len(given.results) - 1} folders; expected one, runs/first_run-JOB"
                )
            print(f"page: {first_run.write(given.results[1])}")
            return 0
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", given.name):
            raise ConfigError(f"--name: found {given.name!r}, expected letters, digits, '.', '_' and '-'")
        if given.date and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", given.date):
            raise ConfigError(f"--date: found {given.date!r}, expected a day such as 2026-11-21")
        first = given.results[0]
        output = given.output or (first if first.is_dir() else first.parent) / "report"
        comparison, files = write_report(
            given.results, output, name=given.name, date=given.date, overwrite=given.overwrite
        )
    except ConfigError as error:
        print(f"report: error: {error}", file=sys.stderr)
        return 2
    show(comparison, files)
    return 0


def show(comparison: Comparison, files: Sequence[Path]) -> None:
    """Prints the fastest schemes and where the report is."""
    for result in comparison.detailed():
        fastest = sorted(result.rows, key=lambda row: row.median_s)
        print(f"{result.title}: {', '.join(f'{row.label} {row.median_s:.3f} s' for row in fastest)}")
    for note in comparison.notes:
        print(f"note: {note}")
    print(f"report: {files[0]}")


if __name__ == "__main__":
    raise SystemExit(main())
