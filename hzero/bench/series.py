"""Series of measurements: accumulation, numbers of nodes, rates between nodes, and ablations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hzero.bench.markdown import NONE, by_tier, count, flat, loss, ratio, seconds, size, table
from hzero.bench.measured import Chosen, Measurement, points, rank_of_peer
from hzero.bench.rows import StepsRow


@dataclass(frozen=True)
class Series:
    """Measurements along one axis.

    Attributes:
        title: Heading of its part.
        axis: What changes, with its unit.
        column: Head of a value's column.
        suite: That it is of; main may have given a point.
        points: Pairs of a value and a measurement, by value.
        left_out: Titles of the suite's measurements that differ in more than the axis.
    """

    title: str
    axis: str
    column: str
    suite: str
    points: tuple[tuple[float, Measurement], ...]
    left_out: tuple[str, ...]

    def peers(self) -> list[StepsRow]:
        """A row of every peer of the suite, in the stable order; those of main alone make no series."""
        rows: dict[str, StepsRow] = {}
        for measurement in (measurement for _, measurement in self.points if measurement.suite == self.suite):
            for row in measurement.rows:
                rows.setdefault(row.peer, row)
        return sorted(rows.values(), key=lambda row: rank_of_peer(row.peer, row.engine))

    def of(self, peer: str) -> list[tuple[float, StepsRow]]:
        """Values and rows of a peer."""
        found = ((value, measurement.row(peer)) for value, measurement in self.points)
        return [(value, row) for value, row in found if row is not None]


#: Suite, title, what changes in the configuration, the axis, and the head of a column.
_SERIES = (
    ("accumulation", "Accumulation", "accumulation", "micro-steps a step", "accumulation {:g}"),
    ("nodes_weak", "Nodes, weak scaling", "nodes", "nodes", "nodes: {:g}"),
    ("nodes_strong", "Nodes, strong scaling", "nodes", "nodes", "nodes: {:g}"),
    ("sweep", "Bandwidth between nodes", "rate", "Mbit/s a node", "{:g} Mbit/s a node"),
)


#: Keys of a peer's configuration that its label and the text say.
_SAID = ("engine", "label")


def all_series(chosen: Chosen) -> dict[str, Series]:
    """The series that were measured, by suite."""
    found = {}
    for suite, title, key, axis, column in _SERIES:
        if chosen.of(suite):
            along = tuple(points(chosen, suite, key))
            shown = [measurement for _, measurement in along]
            left_out = tuple(one.title for one in chosen.of(suite) if one not in shown)
            found[suite] = Series(title, axis, column, suite, along, left_out)
    return found


def _grid(series: Series, form: Callable[[StepsRow], str]) -> str:
    head = ["peer", *(series.column.format(value) for value, _ in series.points)]
    rows = []
    for peer in series.peers():
        there = dict(series.of(peer.peer))
        rows.append([peer.label, *(form(there[value]) if value in there else NONE for value, _ in series.points)])
    return table(head, rows)


def _spans(series: Series) -> str:
    return _grid(series, lambda row: f"{row.median_s:.3f} ({min(row.step_s):.3f}–{max(row.step_s):.3f})")


def accumulation_part(series: Series) -> str:
    """Step time and rate by peer and accumulation."""
    rates = _grid(series, lambda row: count(row.tokens_per_s))
    return f"Step time, s: median (min–max).\n\n{_spans(series)}\n\nTokens/s.\n\n{rates}"


def efficiency(series: Series, peer: str) -> list[tuple[float, float]]:
    """Tokens/s a rank over those at the least number of nodes, by number of nodes; empty where that was not measured."""
    rates = {value: row.tokens_per_s / row.world_size for value, row in series.of(peer)}
    base = rates.get(series.points[0][0])
    return [(value, rate / base) for value, rate in rates.items()] if base else []


def nodes_part(series: Series) -> str:
    """Step time, rate a rank and efficiency by peer and number of nodes."""
    least = series.points[0][0]
    rates = _grid(series, lambda row: count(row.tokens_per_s / row.world_size))
    head = ["peer", *(series.column.format(value) for value, _ in series.points)]
    rows = []
    for peer in series.peers():
        there = dict(efficiency(series, peer.peer))
        rows.append([peer.label, *(ratio(there.get(value)) for value, _ in series.points)])
    per_step = ", ".join(f"{m.rows[0].tokens_per_step:,} at {value:g}" for value, m in series.points)
    return "\n\n".join(
        [
            f"Tokens a step: {per_step}. All nodes share the same cores, so that more nodes also means less processor a rank.",
            "Step time, s: median (min–max).",
            _spans(series),
            "Tokens/s a rank.",
            rates,
            f"Efficiency: tokens/s a rank over those at {least:g} node{'s' if least != 1 else ''}.",
            table(head, rows),
        ]
    )


def sweep_part(series: Series) -> str:
    """Step time by peer and rate, and the fastest at each rate."""
    winners = []
    names = {row.peer for row in series.peers()}
    for value, measurement in series.points:
        ordered = [row for row in measurement.fastest() if row.peer in names]
        first, *others = ordered
        by = f"{others[0].label}, {others[0].median_s / first.median_s - 1:.1%} slower" if others else NONE
        foreign = [row for row in ordered if row.engine != "hzero"]
        own = [row for row in ordered if row.engine == "hzero"]
        lead = f"{own[0].median_s / foreign[0].median_s:.3f}" if own and foreign else NONE
        both = f"{own[0].label} to {foreign[0].label}: {lead}" if own and foreign else NONE
        winners.append([f"{value:g}", first.label, seconds(first.median_s), by, both])
    head = ("Mbit/s a node", "fastest", "step time, s", "next", "best of hzero to best of the others")
    return f"Step time, s: median (min–max).\n\n{_spans(series)}\n\n{table(head, winners, left=2)}"


def ablation_part(measurements: Sequence[Measurement]) -> str:
    """One line a peer of every measurement: what it is, times, bytes, loss, memory."""
    head = (
        *("measurement", "peer", "configuration", "step time, s (median)", "min", "max", "bytes a step, measured"),
        *("last loss", "states of a rank", "of it optimizer"),
    )
    rows = []
    for measurement in measurements:
        equal = min(len(row.losses) for row in measurement.rows)
        for row in measurement.rows:
            state = row.memory
            settings = (
                ", ".join(f"{key} {value}" for key, value in flat(row.peer_config).items() if key not in _SAID) or NONE
            )
            rows.append(
                [
                    *(measurement.name, row.label, settings, seconds(row.median_s)),
                    *(seconds(min(row.step_s)), seconds(max(row.step_s)), by_tier(row.bytes.measured, size)),
                    loss(row.losses[equal - 1]),
                    size(state.weights + state.gradients + state.optimizer),
                    size(state.optimizer),
                ]
            )
    return table(head, rows, left=3)
