"""Search: the largest micro-batch of every preset that fits into a device, and the preset with the shortest predicted step."""

from __future__ import annotations

import itertools
import shlex
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hzero.config import PRESETS, ROLES
from hzero.errors import ConfigError, size_text
from hzero.program.shards import ShardPlan, lossy_crossings
from hzero.tools.experiment import key_of
from hzero.tools.plan.memory import Footprint, footprint
from hzero.tools.plan.scenario import Job, Scenario
from hzero.tools.plan.step import Prediction, predict

#: The largest micro-batch that is tried.
_LARGEST = 1024


@dataclass(frozen=True, eq=False)
class Setting:
    """A preset and a step.

    Attributes:
        scenario: The scenario of the search.
        preset: The preset.
        job: The job, with its micro-batch.
    """

    scenario: Scenario
    preset: str
    job: Job

    @cached_property
    def plan(self) -> ShardPlan:
        """The shard plan."""
        return self.scenario.shard_plan(self.preset)

    @cached_property
    def memory(self) -> Footprint:
        """Memory of a device."""
        return footprint(self.plan, self.scenario.grid, self.job)

    @property
    def fits(self) -> bool:
        """Whether the memory fits into a device."""
        return self.scenario.holds(self.memory.bytes)

    @property
    def rounds(self) -> bool:
        """Whether a codec on a tier rounds."""
        return any(lossy_crossings(self.plan.codecs[role], self.scenario.grid) for role in ROLES)

    @cached_property
    def step(self) -> Prediction:
        """The predicted step."""
        return predict(self.plan, self.job, self.scenario.machine)

    @property
    def sequence_s(self) -> float:
        """Predicted seconds of a step per sequence and device."""
        return self.step.step_s / (self.job.micro_batch * self.job.accumulation)

    @property
    def overrides(self) -> list[str]:
        """The setting for `hzero train`, as Hydra's overrides."""
        job = self.job
        step = [f"train.micro_batch={job.micro_batch}", f"train.grad_accumulation={job.accumulation}"]
        return [f"zero={self.preset}", *step, f"train.activation_checkpointing={str(job.checkpointing).lower()}"]

    @property
    def command(self) -> str:
        """The `hzero train` command with this setting and the user's other overrides."""
        keys = set(map(key_of, self.overrides))
        given = [one for one in self.scenario.given if key_of(one) not in keys]
        return shlex.join(["hzero", "train", *given, *self.overrides])

    def __str__(self) -> str:
        job, states = self.job, str(self.plan).partition("; ")[2]  # without the grid
        return f"{states}; {job.micro_batch} x {job.accumulation}{', checkpointing' * job.checkpointing}"


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
        settings: Settings by name, in the order of the table.
        best: The best setting without rounding, or else with it.
        rounded: The best setting of all.
        left_out: Number of settings that do not fit into memory.
    """

    settings: dict[str, Setting]
    best: Setting
    rounded: Setting
    left_out: int


def search(scenario: Scenario) -> Search:
    """Finds the largest micro-batch of every preset that fits into a device, without and with checkpointing.

    With a global batch, micro-batches divide it, and the accumulation follows. Otherwise the accumulation is constant. The best
    setting has the shortest time per sequence; among equal times, to a thousandth, it has the least memory.

    Raises:
        ConfigError: Nothing fits.
    """
    found = {}
    for preset, again in itertools.product(PRESETS, (False, True)):
        job, share = replace(scenario.job, checkpointing=again), scenario.sequences
        if share is None:
            jobs = [replace(job, micro_batch=size) for size in range(1, _LARGEST + 1)]
        else:
            sizes = [size for size in range(1, min(share, _LARGEST) + 1) if share % size == 0]
            jobs = [replace(job, micro_batch=size, accumulation=share // size) for size in sizes]
        ones = [Setting(scenario, preset, job) for job in jobs]
        # Memory grows with the micro-batch. The exception is the last division, which needs no gradient accumulation buffers.
        last = len(ones) if ones[-1].fits else bisect_left(ones, True, key=lambda one: not one.fits)
        found[f"{preset}{', checkpointing' * again}"] = ones[max(last - 1, 0)]
    fitting = sorted(_fitting(list(found.values())), key=lambda one: (float(f"{one.sequence_s:.3e}"), one.memory.bytes))
    best = next((one for one in fitting if not one.rounds), fitting[0])
    return Search(found, best, fitting[0], len(found) - len(fitting))


def _fitting(every: Sequence[Setting]) -> list[Setting]:
    """The settings that fit into a device. Raises `ConfigError` if none fits."""
    if fitting := [one for one in every if one.fits]:
        return fitting
    smallest = min(every, key=lambda one: one.memory.bytes)
    memory, there = smallest.memory, smallest.scenario.memory or 0
    largest = sorted(memory.states, key=lambda name: -memory.states[name].bytes)[:3]
    most = ", ".join(f"{name} {size_text(memory.states[name].bytes)}" for name in largest)
    raise ConfigError(
        f"memory: found {size_text(there)}, but the smallest setting ({smallest}) needs {size_text(memory.bytes)} at "
        f"{memory.fullest}: {most}; expected more nodes, a smaller model, shorter sequences or smaller buckets"
    )
