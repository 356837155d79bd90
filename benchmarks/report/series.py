"""Series: the results of a suite along the one thing that it varies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from benchmarks.report.results import Comparison, Result
from benchmarks.rows import StepsRow

#: Keys of the method of a measurement, not of its subject.
_HOW = ("schemes", "rounds", "warmup", "timeout_s", "threads")
#: Keys in which the results of a series may differ. The first one is the axis.
SAME: dict[str, tuple[str, ...]] = {
    "accumulation": ("train.accumulation",),
    "sweep": ("cluster.rates_mbit.inter_node",),
}
#: Suite whose result may be a point of other suites' series.
_LENDER = "main"
_HEADS = {
    "accumulation": "accumulation {}",
    "sweep": "{} Mbit/s",
}


@dataclass(frozen=True)
class Series:
    """Results along an axis.

    Attributes:
        suite: That varies it.
        points: Values and results, by value; infinite for a trunk without a limit.
    """

    suite: str
    points: tuple[tuple[Any, Result], ...]

    def schemes(self) -> list[StepsRow]:
        """A row of each scheme of the suite, in order. Schemes that only borrowed points have do not count."""
        own = [result for _, result in self.points if result.suite == self.suite]
        rows = {row.scheme: row for result in own for row in result.rows}
        order = [row.scheme for result in own for row in result.rows]
        return [rows[scheme] for scheme in dict.fromkeys(order)]

    def of(self, scheme: str) -> dict[Any, StepsRow]:
        """Rows of a scheme by value."""
        return {value: row for value, result in self.points if (row := result.row(scheme))}

    def heads(self) -> list[str]:
        """Heads of the points' columns; a borrowed point names its suite."""
        heads = []
        for value, result in self.points:
            head = "no limit" if value == math.inf else _HEADS[self.suite].format(f"{value:g}")
            heads.append(head + (f" ({result.suite})" if result.suite != self.suite else ""))
        return heads


def work(result: Result, free: tuple[str, ...]) -> dict[str, Any]:
    """What the schemes of a result did, without some dotted keys."""
    config = result.config.model_dump()
    for key in (*_HOW, *free):
        *parents, last = key.split(".")
        block = config
        for parent in parents:
            block = block[parent]
        block.pop(last)
    return config


def series_of(comparison: Comparison, suite: str) -> Series | None:
    """The results of a suite along its axis, and results of lenders that differ along the axis only.

    Returns:
        None if the suite was not measured.
    """
    own = comparison.of(suite)
    if not own:
        return None
    free, first = SAME[suite], own[0]
    schemes = {row.scheme for result in own for row in result.rows}
    points: dict[Any, Result] = {}
    for result in own + comparison.of(_LENDER):
        if work(result, free) == work(first, free) and any(row.scheme in schemes for row in result.rows):
            points.setdefault(_value(result, free[0]), result)
    return Series(suite, tuple(sorted(points.items(), key=lambda pair: pair[0])))


def _value(result: Result, key: str) -> Any:
    value: Any = result.config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return math.inf if value is None else value
