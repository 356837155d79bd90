"""Measurements as the report counts them: the rows that were chosen, and what follows from them by arithmetic."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hzero.bench.results import Line
from hzero.bench.rows import ConvergenceRow, StepsRow

#: Stable order of the peers in tables and plots; others come after these.
PEERS = (
    *("ddp", "fsdp2", "fsdp2-node", "hsdp-node", "hsdp-package", "zero3-deepspeed", "hpz-deepspeed"),
    *("zero3", "hpz", "zeropp", "lossless", "mild", "topo"),
)
_ENGINES = ("ddp", "fsdp", "deepspeed", "hzero")
#: Blocks of the configuration in which measurements have to be alike to stand in one series.
_WORK = ("cluster", "model", "data", "train", "reduce_scatter")


@dataclass(frozen=True)
class Measurement:
    """Peers that did the same work in one interleaved run.

    Attributes:
        suite: What it belongs to.
        name: Unique in the suite.
        rows: One a peer, in the stable order.
        lines: The same rows as they were read.
        missing: Peers of its configuration without a row.
    """

    suite: str
    name: str
    rows: tuple[StepsRow, ...]
    lines: tuple[Line, ...]
    missing: tuple[str, ...]

    @property
    def config(self) -> Any:
        """The configuration that all peers share."""
        return self.rows[0].config

    @property
    def title(self) -> str:
        """Suite and name, said once where they are the same."""
        return self.name if self.name.startswith(self.suite) else f"{self.suite} {self.name}"

    def row(self, peer: str) -> StepsRow | None:
        """The row of a peer, None where it has none."""
        return next((row for row in self.rows if row.peer == peer), None)

    def key(self, row: StepsRow) -> tuple[str, str, str]:
        """What tells one row of the report from all others."""
        return self.suite, self.name, row.peer

    def fastest(self) -> list[StepsRow]:
        """Rows by median step time, the fastest first."""
        return sorted(self.rows, key=lambda row: row.median_s)


@dataclass(frozen=True)
class Chosen:
    """What the report is made of.

    Attributes:
        measurements: In the order of their first rows.
        runs: Runs of training, with the lines they were read from.
        notes: What was found and is not in it.
    """

    measurements: tuple[Measurement, ...]
    runs: tuple[Line, ...]
    notes: tuple[str, ...]

    def of(self, *suites: str) -> list[Measurement]:
        """Measurements of some suites."""
        return [measurement for measurement in self.measurements if measurement.suite in suites]

    @property
    def lines(self) -> list[Line]:
        """Every row that counts."""
        return [line for measurement in self.measurements for line in measurement.lines] + list(self.runs)


def rank_of_peer(peer: str, engine: str = "hzero") -> tuple[int, int, str]:
    """Sorts peers in the stable order."""
    if peer in PEERS:
        return 0, PEERS.index(peer), peer
    return 1, _ENGINES.index(engine), peer


def choose(lines: Sequence[Line]) -> Chosen:
    """Groups rows by measurement, and of different runs of a measurement takes the newest whole one.

    Rows of one run share configuration, machine and versions. A run is whole that has a row of every peer.
    """
    notes: list[str] = []
    groups: dict[tuple[str, str], list[Line]] = {}
    runs: dict[str, list[Line]] = {}
    for line in lines:
        if isinstance(line.row, StepsRow):
            groups.setdefault((line.row.suite, line.row.measurement), []).append(line)
        else:
            runs.setdefault(line.row.measurement, []).append(line)
    measurements = [_measurement(suite, name, group, notes) for (suite, name), group in groups.items()]
    newest = []
    for name, group in runs.items():
        newest.append(_newest(group))
        if len(group) > 1:
            notes.append(f"convergence {name}: {len(group)} runs were found; the one of {_when(newest[-1])} counts.")
    return Chosen(tuple(measurements), tuple(newest), tuple(notes))


def _measurement(suite: str, name: str, group: Sequence[Line], notes: list[str]) -> Measurement:
    runs: dict[str, dict[str, list[Line]]] = {}
    for line in group:
        row = _steps(line)
        key = json.dumps([row.id, row.machine.model_dump(), row.versions], sort_keys=True)
        runs.setdefault(key, {}).setdefault(row.peer, []).append(line)

    def worth(run: dict[str, list[Line]]) -> tuple[bool, Any]:
        newest = [_newest(lines) for lines in run.values()]
        return not _missing(newest), max(line.row.date for line in newest)

    best = max(runs.values(), key=worth)
    kept = [_newest(lines) for lines in best.values()]
    kept.sort(key=lambda line: rank_of_peer(_steps(line).peer, _steps(line).engine))
    rows = tuple(_steps(line) for line in kept)
    found = Measurement(suite, name, rows, tuple(kept), _missing(kept))
    if len(runs) > 1:
        latest = max(kept, key=lambda line: line.row.date)
        notes.append(
            f"{found.title}: runs of {len(runs)} different configurations, machines or versions were found; the newest "
            f"whole one counts, of {_when(latest)} (id {latest.row.id})."
            if not found.missing
            else f"{found.title}: runs of {len(runs)} different configurations, machines or versions were found, none of "
            f"them whole; the newest counts, of {_when(latest)} (id {latest.row.id})."
        )
    again = [peer for peer, lines in best.items() if len(lines) > 1]
    if again:
        notes.append(f"{found.title}: several rows of {', '.join(again)}; the newest of each counts.")
    if found.missing:
        notes.append(f"{found.title}: no rows of {', '.join(found.missing)}.")
    if len({row.tokens_per_step for row in rows}) > 1:
        notes.append(f"{found.title}: the peers differ in tokens a step, so that their times do not compare.")
    return found


def _steps(line: Line) -> StepsRow:
    assert isinstance(line.row, StepsRow)
    return line.row


def _missing(kept: Sequence[Line]) -> tuple[str, ...]:
    there = {_steps(line).peer for line in kept}
    return tuple(peer for peer in _steps(kept[0]).config.peers if peer not in there)


def _newest(group: Sequence[Line]) -> Line:
    return max(enumerate(group), key=lambda pair: (pair[1].row.date, pair[0]))[1]


def _when(line: Line) -> str:
    return f"{line.row.date:%Y-%m-%d %H:%M}"


def run_of(line: Line) -> ConvergenceRow:
    """The training run of a line that holds one."""
    assert isinstance(line.row, ConvergenceRow)
    return line.row


def wire_seconds(row: StepsRow) -> dict[str, float]:
    """Least seconds that the measured bytes take on the wires of each shaped tier, in tier order.

    Bytes are taken as spread evenly: over the ranks in gcd and gpu, where each rank has its own link, and over the
    nodes in node, where the ranks of a node share a trunk.
    """
    cluster = row.config.cluster
    links = {"gcd": row.world_size, "gpu": row.world_size, "node": cluster.nodes}
    return {
        tier: 8 * row.bytes.measured.get(tier, 0) / links[tier] / (rate * 1e6)
        for tier in row.tiers
        if (rate := cluster.rates_mbit.get(tier)) is not None
    }


def elapsed(row: StepsRow) -> list[float]:
    """Seconds from the start to the end of every step; warm-up steps, which are not timed, count as the median step."""
    seconds = [row.median_s] * (len(row.losses) - len(row.step_s)) + row.step_s
    ends: list[float] = []
    for step in seconds:
        ends.append((ends[-1] if ends else 0.0) + step)
    return ends


def common_loss(rows: Iterable[StepsRow]) -> float | None:
    """The least loss that every peer with a finite loss reaches; None where no peer has one."""
    return max((min(known) for row in rows if (known := _known(row))), default=None)


def time_to(row: StepsRow, loss: float) -> float | None:
    """Seconds to the end of the first step whose loss is at or below a loss; None where there is none."""
    for end, found in zip(elapsed(row), row.losses):
        if found is not None and found <= loss:
            return end
    return None


def _known(row: StepsRow) -> list[float]:
    return [loss for loss in row.losses if loss is not None]


def points(chosen: Chosen, suite: str, key: str) -> list[tuple[float, Measurement]]:
    """Measurements of a suite along one axis, with those of main that differ in nothing else.

    Args:
        chosen: All measurements.
        suite: Of the series.
        key: ``accumulation``, ``nodes`` or ``rate``: what changes along the axis.

    Returns:
        Pairs of a value and a measurement, by value. A value is there once, and all differ from the suite's first
        measurement along the axis alone.
    """
    first = chosen.of(suite)[0]
    free = ("nodes", "micro_batch", "accumulation") if suite == "nodes_strong" else (key,)
    along: dict[float, Measurement] = {}
    for measurement in chosen.of(suite) + chosen.of("main"):
        alike = _work(measurement, free) == _work(first, free)
        if suite == "nodes_strong":
            alike &= measurement.rows[0].tokens_per_step == first.rows[0].tokens_per_step
        if alike:
            along.setdefault(_value(measurement, key), measurement)
    return sorted(along.items(), key=lambda pair: pair[0])


def _value(measurement: Measurement, key: str) -> float:
    config = measurement.config
    if key == "accumulation":
        return config.train.accumulation
    return config.cluster.nodes if key == "nodes" else config.cluster.rates_mbit.get("node") or 0


def _work(measurement: Measurement, free: Sequence[str]) -> dict[str, Any]:
    config = measurement.config.model_dump()
    work = {name: config.get(name) for name in _WORK}
    for block, key in (("train", "accumulation"), ("train", "micro_batch"), ("cluster", "nodes")):
        if key in free:
            work[block].pop(key, None)
    if "rate" in free:
        work["cluster"]["rates_mbit"].pop("node", None)
    return work
