"""Fit: what of a job fits into a device, by preset."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hzero.config import PRESETS
from hzero.formatting import size_text
from hzero.model.footprint import Footprint, footprint
from hzero.model.job import Job
from hzero.model.step import Prediction, predict
from hzero.parsing import parse_config
from hzero.plan.scenario import Scenario
from hzero.sharding.plan import ShardPlan
from hzero.topology import Grid
from hzero.validation import ConfigError

#: The largest micro-batch that is tried; beyond it none is of use.
_LARGEST = 1024
#: States that are named where they fill a device.
_NAMED = 3


@dataclass(frozen=True, eq=False)
class Fitting:
    """The largest micro-batch of a preset that fits, with or without checkpointing.

    Attributes:
        preset: The preset.
        job: The job with that micro-batch, or with the smallest where none fits.
        footprint: Its memory.
        fits: Whether it fits.
        prediction: Its step; None where it does not fit.
    """

    preset: str
    job: Job
    footprint: Footprint
    fits: bool
    prediction: Prediction | None

    @property
    def sequence_s(self) -> float:
        """Predicted seconds of a step per sequence and device."""
        assert self.prediction is not None
        return self.prediction.step_s / (self.job.micro_batch * self.job.accumulation)

    def overrides(self) -> list[str]:
        """For `hzero train`, as Hydra's overrides."""
        job = self.job
        return [
            f"zero={self.preset}",
            f"train.micro_batch={job.micro_batch}",
            f"train.grad_accumulation={job.accumulation}",
            f"train.activation_checkpointing={str(job.checkpointing).lower()}",
        ]


@dataclass(frozen=True)
class Fittings:
    """What fits.

    Attributes:
        found: Every preset, without and with checkpointing.
        best: The one with the shortest predicted time per sequence.
    """

    found: list[Fitting]
    best: Fitting


def fits(job: Job, grid: Grid, *, channels: int) -> dict[str, int]:
    """Bytes that each preset needs on a device for a job."""
    return {name: _footprint(name, job, grid, channels).bytes for name in PRESETS}


def fit(scenario: Scenario) -> Fittings:
    """Finds, for every preset, the largest micro-batch that fits.

    Where the scenario gives a global batch, micro-batches divide it and the accumulation follows; else the accumulation stays.

    Raises:
        ConfigError: Nothing fits.
    """
    found = [_largest(name, again, scenario) for name in PRESETS for again in (False, True)]
    fitting = [one for one in found if one.fits]
    if not fitting:
        raise ConfigError(_nothing(min(found, key=lambda one: one.footprint.bytes), scenario))
    # Of equally fast ones that which computes nothing again and takes less.
    return Fittings(found, min(fitting, key=lambda one: (float(f"{one.sequence_s:.3e}"), one.footprint.bytes)))


def fullest(states: Footprint) -> list[tuple[str, int]]:
    """The states that take most, most first."""
    return sorted(((s.name, s.bytes) for s in states.states), key=lambda item: -item[1])[:_NAMED]


def _footprint(preset: str, job: Job, grid: Grid, channels: int) -> Footprint:
    return footprint(_plan(preset, grid), grid, job.model.numels, job, channels=channels)


def _plan(preset: str, grid: Grid) -> ShardPlan:
    return ShardPlan.from_config(parse_config({"preset": preset}), grid, 0)


def _jobs(scenario: Scenario, checkpointing: bool) -> Sequence[Job]:
    """The job with every micro-batch that is possible, smallest first."""
    job = replace(scenario.job, checkpointing=checkpointing)
    if not scenario.batch_given:
        return [replace(job, micro_batch=size) for size in range(1, _LARGEST + 1)]
    share = scenario.global_batch // scenario.grid.world_size
    sizes = [size for size in range(1, min(share, _LARGEST) + 1) if share % size == 0]
    return [replace(job, micro_batch=size, accumulation=share // size) for size in sizes]


def _largest(preset: str, checkpointing: bool, scenario: Scenario) -> Fitting:
    jobs, grid = _jobs(scenario, checkpointing), scenario.grid
    chosen: tuple[Job, Footprint] | None = None
    low, high = 0, len(jobs)  # memory grows with the micro-batch, but for accumulators, which the last division frees
    last = _footprint(preset, jobs[-1], grid, scenario.profile.channels)
    if last.bytes <= scenario.memory_bytes:
        chosen, low = (jobs[-1], last), high
    while low < high:
        middle = (low + high) // 2
        found = _footprint(preset, jobs[middle], grid, scenario.profile.channels)
        if found.bytes <= scenario.memory_bytes:
            chosen, low = (jobs[middle], found), middle + 1
        else:
            high = middle
    if chosen is None:
        job = jobs[0]
        return Fitting(preset, job, _footprint(preset, job, grid, scenario.profile.channels), False, None)
    job, states = chosen
    return Fitting(preset, job, states, True, predict(_plan(preset, grid), job, grid, scenario.profile))


def _nothing(least: Fitting, scenario: Scenario) -> str:
    """Why nothing fits, and what would help."""
    most = ", ".join(f"{name} {size_text(size)}" for name, size in fullest(least.footprint))
    helps = [text for text, job, grid in _changes(least.job, scenario) if _any_fits(job, grid, scenario)]
    return (
        f"memory: found {size_text(scenario.memory_bytes)}, and the smallest, {least.preset} with micro-batch "
        f"{least.job.micro_batch}{' and checkpointing' if least.job.checkpointing else ''}, needs "
        f"{size_text(least.footprint.bytes)} at {least.footprint.fullest}: {most}; "
        + (
            f"possible: {', or '.join(helps[:2])}"
            if helps
            else "possible: a smaller model, or devices with more memory"
        )
    )


def _any_fits(job: Job, grid: Grid, scenario: Scenario) -> bool:
    return any(size <= scenario.memory_bytes for size in fits(job, grid, channels=scenario.profile.channels).values())


def _changes(job: Job, scenario: Scenario) -> Iterator[tuple[str, Job, Grid]]:
    """Jobs that need less, the gentlest first."""
    smaller = replace(job, buffers=replace(job.buffers, prefetch=5_000_000, reduce=50_000_000, reuse=0))
    keys = "{reduce_bucket_size: 50000000, stage3_prefetch_bucket_size: 5000000, stage3_max_reuse_distance: 0}"
    yield shlex.quote(f"++deepspeed.zero_optimization={keys}"), smaller, scenario.grid
    nodes = 2 * scenario.grid.nodes
    while nodes <= scenario.profile.nodes:
        grid = replace(scenario.grid, nodes=nodes, ranks=None)
        if _any_fits(job, grid, scenario):
            yield f"nodes={nodes}", job, grid
            break
        nodes *= 2
    length = job.model.seq_length // 2
    while length >= 128:
        shorter = replace(job, model=replace(job.model, seq_length=length))
        if _any_fits(shorter, scenario.grid, scenario):
            yield f"model.seq_length={length}", shorter, scenario.grid
            break
        length //= 2
