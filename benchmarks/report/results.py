"""Which rows count: the results of each measurement."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rows import RESULTS, LayoutRow, MeasurementConfig, Row, StepsRow, read_rows
from hzero.errors import ConfigError

#: DeepSpeed's ZeRO-3, to which ratios are taken.
STOCK = "zero3-deepspeed"
#: The schemes to which losses are compared where that one took no part.
BASES = ("lossless", "ddp")
#: The scheme of the claims.
SUBJECT = "topo"
#: Order of the schemes in tables and plots; others follow.
SCHEMES = (
    *("ddp", "fsdp2", "fsdp2-node", "hsdp-node", "hsdp-package", STOCK, "hpz-deepspeed"),
    *("zero3", "hpz", "zeropp", "lossless", "mild", SUBJECT),
)
#: Suites of long runs, of which the report shows losses.
LOSSES = ("convergence", "choices", "muon-losses")
#: Suites that have a section; measurements of other suites are shown like main's.
SHOWN = ("accumulation", "sweep", "codecs", "shards", *LOSSES)


@dataclass(frozen=True)
class Result:
    """Schemes that did the same work in turns.

    Attributes:
        suite: Of the measurement.
        name: Unique in the suite.
        rows: One per scheme, in the order of `SCHEMES`.
    """

    suite: str
    name: str
    rows: tuple[StepsRow, ...]

    @property
    def config(self) -> MeasurementConfig:
        """Of the measurement."""
        return self.rows[0].config

    @property
    def title(self) -> str:
        """Suite and name."""
        return self.rows[0].title

    def row(self, scheme: str) -> StepsRow | None:
        """The row of a scheme; None if it took no part."""
        return next((row for row in self.rows if row.scheme == scheme), None)


@dataclass(frozen=True)
class Comparison:
    """The rows of a report.

    Attributes:
        results: In the order of their first rows.
        layouts: Rows of `benchmarks.hybrid`.
        notes: About rows that do not count.
    """

    results: tuple[Result, ...]
    layouts: tuple[LayoutRow, ...]
    notes: tuple[str, ...]

    @property
    def rows(self) -> list[Row]:
        """All rows that count."""
        return [*(row for result in self.results for row in result.rows), *self.layouts]

    def of(self, *suites: str) -> list[Result]:
        """Results of some suites, in the order of the suites."""
        return [result for suite in suites for result in self.results if result.suite == suite]

    def detailed(self) -> list[Result]:
        """Results that are shown in full: of main first, then of suites without a section of their own."""
        others = [one for one in self.results if one.suite not in ("main", *SHOWN)]
        return self.of("main") + others


def read(paths: Sequence[Path]) -> Comparison:
    """Reads results folders or files of rows; see `choose`.

    Raises:
        ConfigError: A file cannot be read, a line is not a row, or no rows were found.
    """
    rows: list[Row] = []
    notes: list[str] = []
    for path in paths:
        file = path / RESULTS if path.is_dir() else path
        found, torn = read_rows(file)
        rows += [row for row in found if row not in rows]
        notes += [f"Line {number} of {file.name} is torn and left out." for number in torn]
    if not rows:
        raise ConfigError(f"RESULTS: no rows in {', '.join(map(str, paths))}")
    return choose(rows, notes)


def choose(rows: Sequence[Row], notes: Sequence[str] = ()) -> Comparison:
    """Selects the rows that count.

    A measurement that was taken several times counts once: the take with all its schemes first, then the one with more
    schemes, with more rounds, the newest.
    """
    said = list(notes)
    takes: dict[tuple[str, str], dict[Hashable, list[StepsRow]]] = {}
    for row in rows:
        if isinstance(row, StepsRow):
            takes.setdefault((row.suite, row.measurement), {}).setdefault((row.id, row.date), []).append(row)
    results = [_result(*key, list(found.values()), said) for key, found in takes.items()]
    return Comparison(tuple(results), tuple(row for row in rows if isinstance(row, LayoutRow)), tuple(said))


def _result(suite: str, name: str, takes: Sequence[Sequence[StepsRow]], notes: list[str]) -> Result:
    def missing(take: Sequence[StepsRow]) -> list[str]:
        return [scheme for scheme in take[0].config.schemes if scheme not in {row.scheme for row in take}]

    best = max(takes, key=lambda take: (not missing(take), len(take), take[0].config.rounds, take[0].date))
    result = Result(suite, name, tuple(sorted(best, key=lambda row: _place(row.scheme))))
    if len(takes) > 1:
        notes.append(f"{result.title} was taken {len(takes)} times; the take of {best[0].date:%Y-%m-%d %H:%M} counts.")
    if missing(best):
        notes.append(f"{result.title} has no row of {', '.join(missing(best))}.")
    return result


def _place(name: str) -> tuple[int, str]:
    """Sorts schemes: `SCHEMES` in their order, then others."""
    return SCHEMES.index(name) if name in SCHEMES else len(SCHEMES), name
