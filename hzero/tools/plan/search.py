"""Search: the settings with the shortest predicted step, and the largest micro-batches that fit into a device."""

from __future__ import annotations

import itertools
import shlex
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from omegaconf import OmegaConf

from hzero.codecs.formats import TRAITS
from hzero.config import BASE_TIERS, PLAIN, PRESETS, ROLES, CodecName, HZeroConfig, parse_config
from hzero.errors import ConfigError
from hzero.program.shards import ShardPlan
from hzero.tools.experiment import key_of
from hzero.tools.plan.memory import Footprint, footprint
from hzero.tools.plan.scenario import Job, Quality, Scenario, expecting
from hzero.tools.plan.step import Prediction, compute_s, predict
from hzero.tools.terminal import size_text

#: Number of settings that are refined and shown.
BEST = 10
#: Size of buckets that is tried in addition to DeepSpeed's default, in elements.
_OTHER_BUCKET = 200_000_000
#: Keys for short all-gathers between nodes by doubling.
_DOUBLING = {"node_all_gather.algorithm": "doubling", "node_all_gather.below_bytes": 1 << 20}
#: Micro-batches that ``--tune`` tries, and the largest that ``--fit`` tries.
_MICRO_BATCHES, _LARGEST = range(1, 17), 1024
_BUCKETS = {"prefetch": "stage3_prefetch_bucket_size", "reduce": "reduce_bucket_size"}
#: Codecs of weights and of gradients that a search may use.
_CODECS: dict[Quality, tuple[tuple[CodecName, ...], tuple[CodecName, ...]]] = {
    "lossless": (("exact",), ("none",)),
    "weights": (("exact", "int8", "int4"), ("none",)),
    "all": (("exact", "int8", "int4"), ("none", "int8", "int4")),
}


@dataclass(frozen=True, eq=False)
class Setting:
    """Settings of the stage and of the step.

    Attributes:
        scenario: The scenario of the search.
        preset: The preset.
        changes: Keys of the block that differ from the preset, and their values.
        job: The job, with its micro-batch and buckets.
    """

    scenario: Scenario
    preset: str
    changes: dict[str, Any]
    job: Job

    @cached_property
    def block(self) -> dict[str, Any]:
        """The ``"hzero"`` block."""
        block = OmegaConf.create({"preset": self.preset})
        for key, value in self.changes.items():
            OmegaConf.update(block, key, value)
        return OmegaConf.to_container(block)  # type: ignore[return-value]

    @cached_property
    def plan(self) -> ShardPlan:
        """The shard plan."""
        plan = ShardPlan.from_config(parse_config(self.block), self.scenario.grid, 0)
        return expecting(plan, self.scenario.bits)

    @cached_property
    def memory(self) -> Footprint:
        """Memory of a device."""
        return footprint(self.plan, self.scenario.grid, self.job)

    @property
    def fits(self) -> bool:
        """Whether the memory fits into a device."""
        return self.scenario.holds(self.memory.bytes)

    @cached_property
    def step(self) -> Prediction:
        """The predicted step."""
        return predict(self.plan, self.job, self.scenario.machine)

    @property
    def sequence_s(self) -> float:
        """Predicted seconds of a step per sequence and device."""
        return self.step.step_s / (self.job.micro_batch * self.job.accumulation)

    @property
    def codecs(self) -> tuple[CodecName, CodecName]:
        """Codecs of weights and gradients between nodes."""
        return self.plan.codecs.weights.inter_node.codec, self.plan.codecs.gradients.inter_node.codec

    @property
    def overrides(self) -> list[str]:
        """The setting for `hzero train`, as Hydra's overrides."""
        job = self.job
        found = [f"zero={self.preset}", *(f"zero.{key}={value}" for key, value in self.changes.items())]
        found += [f"train.micro_batch={job.micro_batch}", f"train.grad_accumulation={job.accumulation}"]
        found += [f"train.activation_checkpointing={str(job.checkpointing).lower()}"]
        for name, key in _BUCKETS.items():
            if (size := getattr(job, name)) != getattr(self.scenario.job, name):
                found.append(f"deepspeed.zero_optimization.{key}={size}")
        return found

    @property
    def command(self) -> str:
        """The `hzero train` command with this setting and the user's other overrides."""
        keys = set(map(key_of, self.overrides))
        given = [one for one in self.scenario.given if key_of(one) not in keys]
        return shlex.join(["hzero", "train", *given, *self.overrides])

    def __str__(self) -> str:
        job = self.job
        states = str(self.plan).partition("; ")[2]  # without the grid
        doubling = ", doubling" if self.plan.node_all_gather.algorithm == "doubling" else ""
        return (
            f"{states}; {job.micro_batch} x {job.accumulation}{', checkpointing' * job.checkpointing}; "
            f"buckets {job.prefetch / 1e6:g} M{doubling}"
        )


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
        settings: Settings by name, in the order of the table.
        best: The best setting.
        tried: Number of settings that were simulated.
        left_out: Number of settings that do not fit into memory.
    """

    settings: dict[str, Setting]
    best: Setting
    tried: int
    left_out: int


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


# ---- fit ----------------------------------------------------------------------------------------------------------------


def fit(scenario: Scenario) -> Search:
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
        ones = [Setting(scenario, preset, {}, job) for job in jobs]
        # Memory grows with the micro-batch. The exception is the last division, which needs no gradient accumulation buffers.
        last = len(ones) if ones[-1].fits else bisect_left(ones, True, key=lambda one: not one.fits)
        found[f"{preset}{', checkpointing' * again}"] = ones[max(last - 1, 0)]
    fitting = _fitting(list(found.values()))
    best = min(fitting, key=lambda one: (float(f"{one.sequence_s:.3e}"), one.memory.bytes))
    return Search(found, best, len(fitting), len(found) - len(fitting))


# ---- tune ---------------------------------------------------------------------------------------------------------------


def tune(scenario: Scenario) -> Search:
    """Searches scopes, codecs, micro-batches and checkpointing, then buckets and algorithms of the best settings.

    Returns:
        The best settings, shortest step first, and the best setting of every stricter quality.

    Raises:
        ConfigError: No setting fits into memory.
    """
    every = list(settings(scenario))
    fitting = sorted(_fitting(every), key=lambda one: (one.job.checkpointing, -one.job.micro_batch))
    found: list[Setting] = []
    # A setting with less loss is useful if its step is longer by no more than the model's error.
    margin = 1 + (scenario.machine.profile.error or 0.0)
    for one in fitting:
        if len(found) >= BEST and compute_s(one.job, one.scenario.machine) > margin * found[BEST - 1].step.step_s:
            continue  # even without communication its step is longer
        found.append(one)
        found.sort(key=_order)
    distinct: dict[Any, Setting] = {}  # different scopes can be equal in time and memory with one micro-batch
    for one in found:
        distinct.setdefault((_order(one), one.job.micro_batch, one.memory.bytes), one)
    best = list(distinct.values())
    refined = sorted(map(_refined, dict.fromkeys([*best[:BEST], *_by_quality(best).values()])), key=_order)
    shown = {str(place): one for place, one in enumerate(refined[:BEST], 1)}
    shown |= {name: one for name, one in _by_quality(refined).items() if one is not refined[0]}
    return Search(shown, refined[0], len(found) + 2 * len(refined), len(every) - len(fitting))


def settings(scenario: Scenario) -> Iterator[Setting]:
    """All settings of a search, including settings that do not fit into memory."""
    grid, share = scenario.grid, scenario.sequences or scenario.job.micro_batch * scenario.job.accumulation
    batches = [size for size in _MICRO_BATCHES if share % size == 0]
    # Among scopes that reach the same ranks, the innermost.
    distinct = list({grid.scope_size(scope): scope for scope in reversed(grid.scopes)}.values())[::-1]
    scopes = list(itertools.combinations_with_replacement(distinct, 2))
    presets = {name: _keys(parse_config({"preset": name})) for name in PRESETS}
    weights, gradients = _CODECS[scenario.quality]
    for shard, codec, coded, inner in itertools.product(scopes, weights, gradients, (True, False)):
        if not inner and ((TRAITS[codec].plain and TRAITS[coded].plain) or grid.nodes == 1):
            continue
        wanted: dict[str, str] = {}
        for role, scope, name in zip(ROLES, shard, (codec, coded)):
            wanted[f"shard.{role}"] = scope
            wanted |= {
                f"codecs.{role}.{tier}": name if inner or tier == "inter_node" else PLAIN.codec for tier in BASE_TIERS
            }
        changes = {
            name: {key: wanted[key] for key in keys if wanted[key] != keys[key]} for name, keys in presets.items()
        }
        preset = min(changes, key=lambda name: len(changes[name]))
        for size, again in itertools.product(batches, (False, True)):
            job = replace(scenario.job, micro_batch=size, accumulation=share // size, checkpointing=again)
            yield Setting(scenario, preset, changes[preset], _with_bucket(job, job.prefetch, scenario))


def _keys(config: HZeroConfig) -> dict[str, str]:
    """Scopes and codecs of a block."""
    scopes = {f"shard.{role}": getattr(config.shard, role) for role in ROLES}
    return scopes | {f"codecs.{role}.{tier}": config.codecs[role][tier].codec for role in ROLES for tier in BASE_TIERS}


def _with_bucket(job: Job, numel: int, scenario: Scenario) -> Job:
    """The job with buckets of ``numel`` elements, unless the user has given their size."""
    given = scenario.experiment["deepspeed"].get("zero_optimization", {})
    if _BUCKETS["prefetch"] in given:
        numel = job.prefetch
    sizes: dict[str, Any] = {name: numel for name, key in _BUCKETS.items() if key not in given}
    return replace(job, **sizes)


def _refined(one: Setting) -> Setting:
    """The setting with larger buckets, and with another all-gather between nodes, if they make it better."""
    for numel, changes in ((_OTHER_BUCKET, {}), (one.job.prefetch, _DOUBLING)):
        job = one.job if changes else _with_bucket(one.job, numel, one.scenario)
        other = replace(one, changes={**one.changes, **changes}, job=job)
        if other.fits:
            one = min(one, other, key=_order)
    return one


def _by_quality(found: Sequence[Setting]) -> dict[Quality, Setting]:
    """The best setting that each quality allows."""
    best: dict[Quality, Setting] = {}
    for quality, (weights, gradients) in _CODECS.items():
        if allowed := [one for one in found if one.codecs[0] in weights and one.codecs[1] in gradients]:
            best[quality] = min(allowed, key=_order)
    return best


def _order(one: Setting) -> tuple[float, float, bool, int]:
    """Sort key: the shortest step; among equal ones, to a thousandth, the least loss and the simplest setting."""
    kept = sum(one.plan.codecs[role].inter_node.format.element_bytes(2) for role in ROLES)
    step = float(f"{one.step.step_s:.3e}")
    return step, -kept, one.job.checkpointing, one.plan.node_all_gather.below_bytes + one.job.prefetch
