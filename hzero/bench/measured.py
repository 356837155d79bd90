"""Measurements as the report counts them: which rows count, and what follows from them by arithmetic."""

from __future__ import annotations

import json
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hzero.bench.results import Row
from hzero.bench.rows import ConvergenceRow, StepsConfig, StepsRow
from hzero.bench.suites import shown_as

#: DeepSpeed's own ZeRO-3: what ratios of measurements are taken to, and the preset of its runs of training.
STOCK, STOCK_PRESET = "zero3-deepspeed", "stock"
#: Stable order of the peers in tables and plots; others come after these.
PEERS = (
    *("ddp", "fsdp2", "fsdp2-node", "hsdp-node", "hsdp-package", STOCK, "hpz-deepspeed"),
    *("zero3", "hpz", "zeropp", "lossless", "mild", "topo"),
)
#: hzero's presets without codecs.
_LOSSLESS = ("zero3", "hpz", "lossless")
_ENGINES = ("ddp", "fsdp", "deepspeed", "hzero")
#: Parts of a trainer's configuration that say what is trained. The preset of ``zero`` is what runs compare.
_TRAINED = ("model", "data", "topology", "train", "zero", "deepspeed")


@dataclass(frozen=True)
class Measurement:
    """Peers that did the same work in one interleaved run.

    Attributes:
        suite: What it belongs to.
        name: Unique in the suite.
        rows: One a peer, in the stable order.
        missing: Peers of its configuration without a row.
    """

    suite: str
    name: str
    rows: tuple[StepsRow, ...]
    missing: tuple[str, ...]

    @property
    def config(self) -> StepsConfig:
        """The configuration that all peers share."""
        return self.rows[0].config

    @property
    def title(self) -> str:
        """Suite and name, said once where they are the same."""
        return self.name if self.name.startswith(self.suite) else f"{self.suite} {self.name}"

    def row(self, peer: str) -> StepsRow | None:
        """The row of a peer, None where it has none."""
        return next((row for row in self.rows if row.peer == peer), None)

    def fastest(self) -> list[StepsRow]:
        """Rows by median step time, the fastest first."""
        return sorted(self.rows, key=lambda row: row.median_s)

    def work(self, free: Sequence[str] = ()) -> dict[str, Any]:
        """What peers did, less some keys: those in which measurements may differ and still compare.

        Args:
            free: ``rate`` (between nodes), ``reduce_scatter``, or keys of the blocks cluster and train.
        """
        config = self.config.model_dump()
        work: dict[str, Any] = {key: config.get(key) for key in ("model", "data", "reduce_scatter") if key not in free}
        work["rates"] = {tier: rate for tier, rate in config["cluster"].pop("rates_mbit").items() if rate is not None}
        if "rate" in free:
            work["rates"].pop("node", None)
        for block in ("cluster", "train"):
            work[block] = {key: value for key, value in config[block].items() if key not in free}
        return work


@dataclass(frozen=True)
class Chosen:
    """What the report is made of.

    Attributes:
        measurements: In the order of their first rows.
        runs: Runs of training that compare.
        notes: What was found and is not in it.
    """

    measurements: tuple[Measurement, ...]
    runs: tuple[ConvergenceRow, ...]
    notes: tuple[str, ...]

    def of(self, *suites: str) -> list[Measurement]:
        """Measurements of some suites, in the suites' order."""
        return [one for suite in suites for one in self.measurements if one.suite == suite]

    def detailed(self) -> list[Measurement]:
        """Measurements that are shown each by itself: main, other reduce-scatters, and suites that this release does not know."""
        others = [one for one in self.measurements if one.suite not in ("main", "reduce_scatter")]
        return self.of("main", "reduce_scatter") + [one for one in others if shown_as(one.suite) == "detail"]

    @property
    def rows(self) -> list[Row]:
        """Every row that counts."""
        return [*(row for measurement in self.measurements for row in measurement.rows), *self.runs]


def rank_of_peer(row: StepsRow) -> tuple[int, int, str]:
    """Sorts peers in the stable order."""
    if row.peer in PEERS:
        return 0, PEERS.index(row.peer), row.peer
    return 1, _ENGINES.index(row.engine), row.peer


def choose(rows: Sequence[Row]) -> Chosen:
    """Which rows count.

    Rows of one run of a measurement share configuration, machine and versions. Of several runs, one counts: a whole one,
    with a row of every peer, before others; then one of more peers, of more rounds, a newer one. Runs of training count
    that differ in preset and seed alone: of several such groups the one of most steps.
    """
    notes: list[str] = []
    groups: dict[tuple[str, str], list[StepsRow]] = {}
    for row in rows:
        if isinstance(row, StepsRow):
            groups.setdefault((row.suite, row.measurement), []).append(row)
    measurements = [_measurement(suite, name, group, notes) for (suite, name), group in groups.items()]
    runs = _trainings([row for row in rows if isinstance(row, ConvergenceRow)], notes)
    return Chosen(tuple(measurements), tuple(runs), tuple(notes))


def _measurement(suite: str, name: str, group: Sequence[StepsRow], notes: list[str]) -> Measurement:
    runs: dict[str, dict[str, list[StepsRow]]] = {}
    for row in group:
        key = json.dumps([row.id, row.machine.model_dump(), row.versions], sort_keys=True)
        runs.setdefault(key, {}).setdefault(row.peer, []).append(row)

    def worth(run: Mapping[str, Sequence[StepsRow]]) -> tuple[bool, int, int, Any]:
        newest = [_newest(rows) for rows in run.values()]
        return not _missing(newest), len(newest), newest[0].config.rounds, max(row.date for row in newest)

    best = max(runs.values(), key=worth)
    kept = tuple(sorted((_newest(rows) for rows in best.values()), key=rank_of_peer))
    found = Measurement(suite, name, kept, _missing(kept))
    if len(runs) > 1:
        latest = _newest(kept)
        notes.append(
            f"{found.title}: runs of {len(runs)} different configurations, machines or versions were found"
            + (", none of them whole" if found.missing else "")
            + f"; of those with most peers and then most rounds the newest{'' if found.missing else ' whole one'} counts, of "
            f"{latest.date:%Y-%m-%d %H:%M} (id {latest.id})."
        )
    again = [peer for peer, rows in best.items() if len(rows) > 1]
    if again:
        notes.append(f"{found.title}: several rows of {', '.join(again)}; the newest of each counts.")
    if found.missing:
        notes.append(f"{found.title}: no rows of {', '.join(found.missing)}.")
    if len({row.tokens_per_step for row in kept}) > 1:
        notes.append(f"{found.title}: the peers differ in tokens a step, so that their times do not compare.")
    return found


def _missing(kept: Sequence[StepsRow]) -> tuple[str, ...]:
    there = {row.peer for row in kept}
    return tuple(peer for peer in kept[0].config.peers if peer not in there)


def _newest(rows: Sequence[StepsRow]) -> StepsRow:
    return max(enumerate(rows), key=lambda pair: (pair[1].date, pair[0]))[1]


def _trainings(rows: Sequence[ConvergenceRow], notes: list[str]) -> list[ConvergenceRow]:
    groups: dict[Hashable, dict[tuple[str, int], list[ConvergenceRow]]] = {}
    for row in rows:
        of_group = groups.setdefault((_trained(row), len(row.losses)), {})
        of_group.setdefault((row.preset, row.seed), []).append(row)
    if not groups:
        return []

    def worth(group: Mapping[Any, Sequence[ConvergenceRow]]) -> tuple[int, int, Any]:
        runs = [run for runs in group.values() for run in runs]
        return len(runs[0].losses), len(group), max(run.date for run in runs)

    best = max(groups.values(), key=worth)
    for group in groups.values():
        if group is not best:
            names = ", ".join(runs[0].measurement for runs in group.values())
            steps = len(next(iter(group.values()))[0].losses)
            notes.append(
                f"convergence: {names}, of {steps:,} steps, are of another configuration than those that count, which are "
                "of most steps."
            )
    counting = []
    for runs in best.values():
        counting.append(max(enumerate(runs), key=lambda pair: (pair[1].date, pair[0]))[1])
        if len(runs) > 1:
            notes.append(
                f"{counting[-1].title}: {len(runs)} runs were found; the one of {counting[-1].date:%Y-%m-%d %H:%M} counts."
            )
    return counting


def _trained(row: ConvergenceRow) -> str:
    """What a run trained, less preset and seed."""
    config: dict[str, Any] = {key: row.config.get(key) for key in _TRAINED}
    for block, key in (("zero", "preset"), ("train", "seed")):
        if isinstance(config[block], Mapping):
            config[block] = {name: value for name, value in config[block].items() if name != key}
    return json.dumps([config, row.parameters, row.world_size], sort_keys=True, default=str)


def wire_seconds(row: StepsRow) -> dict[str, float]:
    """Least seconds that the measured bytes take on the wires of each shaped tier, in tier order.

    They are those of the tier's busiest link: a rank's own in gcd and gpu, a node's trunk in node.
    """
    rates = {tier: row.config.cluster.rates_mbit.get(tier) for tier in row.tiers}
    return {tier: 8 * row.busiest.get(tier, 0.0) / (rate * 1e6) for tier, rate in rates.items() if rate is not None}


def processor_seconds(row: StepsRow) -> float:
    """Seconds for which a step keeps all cores busy."""
    return row.cpu_s / row.machine.cores


def core_bound(row: StepsRow) -> float:
    """Processor's time over that of the slowest tier's wires; 0 where no tier is shaped. Above 1 the cores set the pace."""
    wires = max(wire_seconds(row).values(), default=0.0)
    return processor_seconds(row) / wires if wires else 0.0


def sends_what_it_has(row: StepsRow) -> bool:
    """Whether a peer trains without codecs, so that losses should be those of its like but for rounding."""
    if row.engine != "hzero":
        return True
    block = row.peer_config.get("block", {})
    return block.get("preset") in _LOSSLESS and not block.get("codecs")


def elapsed(row: StepsRow) -> list[float]:
    """Seconds from the start to the end of every step; warm-up steps, which are not timed, count as the median step."""
    seconds = [row.median_s] * (len(row.losses) - len(row.step_s)) + row.step_s
    ends: list[float] = []
    for step in seconds:
        ends.append((ends[-1] if ends else 0.0) + step)
    return ends


def common_loss(rows: Iterable[StepsRow]) -> float | None:
    """The least loss that every peer with a finite loss reaches; None where no peer has one."""
    known = ([loss for loss in row.losses if loss is not None] for row in rows)
    return max((min(losses) for losses in known if losses), default=None)


def time_to(row: StepsRow, loss: float) -> float | None:
    """Seconds to the end of the first step whose loss is at or below a loss; None where there is none."""
    for end, found in zip(elapsed(row), row.losses):
        if found is not None and found <= loss:
            return end
    return None


def overlap(first: StepsRow, second: StepsRow) -> bool:
    """Whether the ranges of the timed steps of two peers overlap."""
    return min(first.step_s) <= max(second.step_s) and min(second.step_s) <= max(first.step_s)


def mean(values: Iterable[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    known = list(values)
    return statistics.fmean(known) if known else None
