"""Series of measurements along an axis: accumulation, numbers of nodes, rates between nodes; and ablations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hzero.bench.markdown import NONE, by_tier, count, loss, ratio, seconds, size, table
from hzero.bench.measured import Chosen, Measurement, core_bound, overlap, processor_seconds, rank_of_peer
from hzero.bench.rows import LINK_OF, StepsRow, Tier
from hzero.bench.suites import SUITES
from hzero.bench.targets import SUBJECT

#: In what the measurements of a series may differ: its axis first.
_FREE = {
    "accumulation": ("accumulation",),
    "nodes_weak": ("nodes",),
    "nodes_strong": ("nodes", "micro_batch", "accumulation"),
    "sweep": ("rate",),
}
#: Suites whose measurements other suites' series may have as points.
_LENDERS = ("main", "nodes_weak")
#: Keys of a peer's configuration that its label and the text say.
_SAID = ("engine", "label")


@dataclass(frozen=True)
class Series:
    """Measurements along one axis.

    Attributes:
        suite: That it is of; another one may have lent a point.
        points: Pairs of a value and a measurement, by value; infinite where a tier's rate is not limited.
        left_out: Titles of the suite's measurements that differ in more than the axis.
    """

    suite: str
    points: tuple[tuple[float, Measurement], ...]
    left_out: tuple[str, ...]

    def peers(self) -> list[StepsRow]:
        """A row of every peer of the suite, in the stable order; those of lent points alone make no series."""
        rows: dict[str, StepsRow] = {}
        for measurement in (measurement for _, measurement in self.points if measurement.suite == self.suite):
            for row in measurement.rows:
                rows.setdefault(row.peer, row)
        return sorted(rows.values(), key=rank_of_peer)

    def of(self, peer: str) -> list[tuple[float, StepsRow]]:
        """Values and rows of a peer."""
        found = ((value, measurement.row(peer)) for value, measurement in self.points)
        return [(value, row) for value, row in found if row is not None]

    def columns(self) -> list[str]:
        """Heads of the points' columns."""
        column = SUITES[self.suite].column
        named = [
            ("not limited between nodes" if math.isinf(value) else column.format(f"{value:g}"), measurement)
            for value, measurement in self.points
        ]
        return [
            text + (f" ({measurement.suite})" if measurement.suite != self.suite else "") for text, measurement in named
        ]


def series_of(chosen: Chosen, suite: str) -> Series | None:
    """A suite's measurements along its axis, with those of the lenders that differ in nothing else.

    A value is there once, and all differ from the suite's first measurement along the axis alone. Measurements without any
    of the suite's peers are no points.

    Returns:
        None where the suite was not measured.
    """
    own = chosen.of(suite)
    if not own:
        return None
    free = _FREE[suite]
    peers = {row.peer for measurement in own for row in measurement.rows}
    along: dict[float, Measurement] = {}
    for measurement in own + [one for lender in _LENDERS for one in chosen.of(lender)]:
        alike = measurement.work(free) == own[0].work(free)
        if suite == "nodes_strong":
            alike &= measurement.rows[0].tokens_per_step == own[0].rows[0].tokens_per_step
        if alike and any(row.peer in peers for row in measurement.rows):
            along.setdefault(_value(measurement, free[0]), measurement)
    shown = list(along.values())
    left_out = tuple(one.title for one in own if one not in shown)
    return Series(suite, tuple(sorted(along.items(), key=lambda pair: pair[0])), left_out)


def _value(measurement: Measurement, key: str) -> float:
    config = measurement.config
    if key == "accumulation":
        return config.train.accumulation
    if key == "nodes":
        return config.cluster.nodes
    rate = config.cluster.rates_mbit.get("node")
    return math.inf if rate is None else rate


def series_part(series: Series) -> str:
    """Where it was measured, tables of a series, and notes on what its points do not share."""
    first = series.points[0][1].config.train
    said = f"{first.dtype}, micro-batch {first.micro_batch}; Mbit/s each way: {_rates(series)}."
    times = ["Step time, s: median (min–max).", _spans(series), *_fastest(series)]
    more = {"accumulation": _accumulation, "sweep": lambda _: []}.get(series.suite, _nodes)(series)
    return "\n\n".join([said, *times, *more, *_processor(series), *_notes(series)])


def _rates(series: Series) -> str:
    """Rates of every tier, several where they are the axis."""
    found: dict[Tier, dict[str, None]] = {}
    for cluster in (measurement.config.cluster for _, measurement in series.points):
        for tier in cluster.tiers:
            rate = cluster.rates_mbit.get(tier)
            found.setdefault(tier, {})["not limited" if rate is None else f"{rate:g}"] = None
    return "; ".join(f"{tier} {', '.join(rates)} {LINK_OF[tier]}" for tier, rates in found.items())


def _processor(series: Series) -> list[str]:
    """For how long steps keep the cores busy."""
    said = (
        "Processor, s: for how long a step keeps all cores of this machine busy. Where that is longer than what the wires of the "
        "slowest tier take, marked *, the cores set the pace and not the wires, and what the series says there is about them."
    )
    return [said, _grid(series, lambda row: seconds(processor_seconds(row)) + " *" * (core_bound(row) > 1))]


def _notes(series: Series) -> list[str]:
    rows = [measurement.rows[0] for _, measurement in series.points]
    lent = [measurement for _, measurement in series.points if measurement.suite != series.suite]
    notes = [f"The point marked ({one.suite}) is of {one.title}, measured at another time." for one in lent]
    if len({str(row.machine) for row in rows}) > 1:
        notes.append("Note: the points were measured on different machines.")
    plain = [{key: value for key, value in row.versions.items() if key != "commit"} for row in rows]
    if any(one != plain[0] for one in plain):
        notes.append("Note: the points were measured with different versions; see the full configuration.")
    commits = [row.versions.get("commit", "unknown") for row in rows]
    if len(set(commits)) > 1:
        each = [f"{column}: {commit}" for column, commit in zip(series.columns(), commits)]
        notes.append(f"Note: the points are of different commits ({', '.join(each)}).")
    if series.left_out:
        notes.append(f"Not in this series, since more differs than its axis: {', '.join(series.left_out)}.")
    return notes


def _grid(series: Series, form: Callable[[StepsRow], str]) -> str:
    rows = []
    for peer in series.peers():
        there = dict(series.of(peer.peer))
        rows.append([peer.label, *(form(there[value]) if value in there else NONE for value, _ in series.points)])
    return table(["peer", *series.columns()], rows)


def _spans(series: Series) -> str:
    return _grid(series, lambda row: f"{row.median_s:.3f} ({min(row.step_s):.3f}–{max(row.step_s):.3f})")


def _accumulation(series: Series) -> list[str]:
    return ["Tokens/s.", _grid(series, lambda row: count(row.tokens_per_s))]


def efficiency(series: Series, peer: str) -> list[tuple[float, float]]:
    """Tokens/s a rank over those at the least number of nodes, by number of nodes; empty where that was not measured."""
    rates = {value: row.tokens_per_s / row.world_size for value, row in series.of(peer)}
    base = rates.get(series.points[0][0])
    return [(value, rate / base) for value, rate in rates.items()] if base else []


def _nodes(series: Series) -> list[str]:
    least = series.points[0][0]
    rates = _grid(series, lambda row: count(row.tokens_per_s / row.world_size))
    rows = []
    for peer in series.peers():
        there = dict(efficiency(series, peer.peer))
        rows.append([peer.label, *(ratio(there.get(value)) for value, _ in series.points)])
    per_step = ", ".join(f"{m.rows[0].tokens_per_step:,} at {value:g}" for value, m in series.points)
    return [
        f"Tokens a step: {per_step}. All nodes share the same cores, so that more nodes also means less processor a rank.",
        "Tokens/s a rank.",
        rates,
        f"Efficiency: tokens/s a rank over those at {least:g} node{'s' if least != 1 else ''}.",
        table(["peer", *series.columns()], rows),
    ]


def _fastest(series: Series) -> list[str]:
    """The fastest peer at every point, and the best of hzero beside the best of the others."""
    winners = []
    peers = {row.peer for row in series.peers()}
    for column, (_, measurement) in zip(series.columns(), series.points):
        ordered = [row for row in measurement.fastest() if row.peer in peers]
        first, *others = ordered
        tie = bool(others) and overlap(first, others[0])
        fastest = f"tie of {first.label} and {others[0].label}" if tie else first.label
        by = f"{others[0].label}, {others[0].median_s / first.median_s - 1:.1%} slower" if others else NONE
        foreign = [row for row in ordered if row.engine != "hzero"]
        own = [row for row in ordered if row.engine == "hzero"]
        lead = f"{own[0].median_s / foreign[0].median_s:.3f}" if own and foreign else NONE
        both = f"{own[0].label} to {foreign[0].label}: {lead}" if own and foreign else NONE
        winners.append([column, fastest, seconds(first.median_s), by, both])
    head = ("at", "fastest", "step time, s", "next", "best of hzero to best of the others")
    return [table(head, winners, left=2), "It is called a tie where the ranges of the two fastest overlap."]


def ablation_part(measurements: Sequence[Measurement]) -> str:
    """One line a peer of every measurement: what it is, times, bytes, loss, memory."""
    head = (
        *("measurement", "peer", "configuration", "step time, s (median)", f"ratio to {SUBJECT}", "min", "max"),
        *("bytes a step, measured", "last loss", "states of a rank", "of it optimizer"),
    )
    rows = []
    for measurement in measurements:
        equal = min(len(row.losses) for row in measurement.rows)
        subject = measurement.row(SUBJECT)
        for row in measurement.rows:
            state = row.memory
            settings = [f"{key} {value}" for key, value in _flat(row.peer_config).items() if key not in _SAID]
            rows.append(
                [
                    *(measurement.name, row.label, ", ".join(settings) or NONE, seconds(row.median_s)),
                    ratio(row.median_s / subject.median_s if subject else None),
                    *(seconds(min(row.step_s)), seconds(max(row.step_s)), by_tier(row.bytes.measured, size)),
                    loss(row.losses[equal - 1]),
                    size(state.weights + state.gradients + state.optimizer),
                    size(state.optimizer),
                ]
            )
    text = (
        f"Peers whose name begins with `{SUBJECT}` are {SUBJECT} with one thing changed; the others stand beside for "
        "comparison."
    )
    return f"{text}\n\n{table(head, rows, left=3)}"


def _flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested block with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {name: value}
    return found
