"""Search: the settings with the shortest predicted step, those that fit into a device, and all schemes over the nodes."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hzero.commands.experiment import key_of
from hzero.config import BASE_TIERS, DEFAULT_PRESET, PRESETS, ROLES, CodecName, HZeroConfig, Scope, Tier, parse_config
from hzero.files import refusing, replacing
from hzero.plan.collectives import chains_of
from hzero.plan.job import Job, buckets_of
from hzero.plan.machine import Machine
from hzero.plan.memory import Footprint, footprint
from hzero.plan.scenario import Quality, Scenario
from hzero.plan.shards import ShardPlan
from hzero.plan.step import Prediction, predict
from hzero.terminal import size_text
from hzero.validation import ConfigError

#: Number of settings that are shown, and refined.
BEST = 10
#: Elements of a bucket that are tried beside DeepSpeed's default.
_OTHER_BUCKET = 200_000_000
#: Keys with which short messages between nodes are gathered by doubling.
_DOUBLING = {"node_all_gather.algorithm": "doubling", "node_all_gather.below_bytes": 1 << 20}
#: Micro-batches that ``--tune`` tries, and the largest that ``--fit`` does.
_MICRO_BATCHES, _LARGEST = range(1, 17), 1024
_BUCKETS = {"prefetch": "stage3_prefetch_bucket_size", "reduce": "reduce_bucket_size"}
#: Codecs that a search may give to weights and to gradients.
_CODECS: dict[Quality, tuple[tuple[CodecName, ...], tuple[CodecName, ...]]] = {
    "lossless": (("none",), ("none",)),
    "weights": (("none", "int8", "int4"), ("none",)),
    "all": (("none", "int8", "int4"), ("none", "int8", "int4")),
}
_BITS = {"none": 16, "int8": 8, "int4": 4}


@dataclass(frozen=True, eq=False)
class Setting:
    """Settings of the stage and of the step.

    Attributes:
        preset: The preset.
        changes: Keys of the block that differ from it, and their values.
        plan: The shard plan.
        job: The job, with its micro-batch and buckets.
        memory: What it takes of a device.
        prediction: Its step; None where it does not fit.
    """

    preset: str
    changes: dict[str, Any]
    plan: ShardPlan
    job: Job
    memory: Footprint
    prediction: Prediction | None = None

    @property
    def step(self) -> Prediction:
        """The predicted step of a setting that fits."""
        assert self.prediction is not None
        return self.prediction

    @property
    def sequence_s(self) -> float:
        """Predicted seconds of a step per sequence and device."""
        return self.step.step_s / (self.job.micro_batch * self.job.accumulation)

    @property
    def codecs(self) -> tuple[CodecName, CodecName]:
        """Codecs of weights and gradients between nodes."""
        return self.plan.codecs.weights.node.codec, self.plan.codecs.gradients.node.codec

    def block(self) -> dict[str, Any]:
        """The ``"hzero"`` block."""
        return _block(self.preset, self.changes)

    def overrides(self, scenario: Scenario) -> list[str]:
        """The same for `hzero train`, as Hydra's overrides."""
        job = self.job
        found = [f"zero={self.preset}", *(f"zero.{key}={value}" for key, value in self.changes.items())]
        found += [f"train.micro_batch={job.micro_batch}", f"train.grad_accumulation={job.accumulation}"]
        found += [f"train.activation_checkpointing={str(job.checkpointing).lower()}"]
        for name, key in _BUCKETS.items():
            if (size := getattr(job, name)) != getattr(scenario.job, name):
                found.append(f"deepspeed.zero_optimization.{key}={size}")
        return found

    def command(self, scenario: Scenario) -> str:
        """The trainer's command with this setting, and with what the user has given in addition."""
        chosen = self.overrides(scenario)
        keys = set(map(key_of, chosen))
        return shlex.join(["hzero", "train", *(one for one in scenario.given if key_of(one) not in keys), *chosen])

    def __str__(self) -> str:
        job = self.job
        states = str(self.plan).partition("; ")[2]  # without the grid
        doubling = ", doubling" if self.plan.node_all_gather.algorithm == "doubling" else ""
        return (
            f"{states}; {job.micro_batch} x {job.accumulation}{', checkpointing' * job.checkpointing}; "
            f"buckets {job.prefetch / 1e6:g} M{doubling}"
        )


def _block(preset: str, changes: dict[str, Any]) -> dict[str, Any]:
    block = OmegaConf.create({"preset": preset})
    for key, value in changes.items():
        OmegaConf.update(block, key, value)
    return OmegaConf.to_container(block)  # type: ignore[return-value]


def _setting(scenario: Scenario, preset: str, changes: dict[str, Any], job: Job) -> Setting:
    plan = ShardPlan.from_config(parse_config(_block(preset, changes)), scenario.grid, 0)
    return Setting(preset, changes, plan, job, footprint(plan, scenario.grid, job))


def _predicted(setting: Setting, scenario: Scenario) -> Setting:
    return replace(setting, prediction=predict(setting.plan, setting.job, scenario.machine))


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
        settings: Settings by name, in the order in which they are shown.
        best: The best of all.
        tried: Settings that were simulated.
        left_out: Settings that do not fit into memory.
    """

    settings: dict[str, Setting]
    best: Setting
    tried: int
    left_out: int


def _nothing_fits(smallest: Setting, there: int) -> ConfigError:
    memory = smallest.memory
    largest = sorted(memory.states, key=lambda name: -memory.states[name].bytes)[:3]
    most = ", ".join(f"{name} {size_text(memory.states[name].bytes)}" for name in largest)
    return ConfigError(
        f"memory: found {size_text(there)}, and the smallest setting ({smallest}) needs {size_text(memory.bytes)} at "
        f"{memory.fullest}: {most}; possible: more nodes, a smaller model, shorter sequences, smaller buckets"
    )


# ---- fit ----------------------------------------------------------------------------------------------------------------


def fit(scenario: Scenario) -> Search:
    """Finds the largest micro-batch of every preset that fits into a device, without and with checkpointing.

    If the scenario gives a global batch, micro-batches divide it and the accumulation follows; else the accumulation stays.
    The best has the shortest time per sequence; of equal ones, to a thousandth, it takes the least memory.

    Raises:
        ConfigError: Nothing fits.
    """
    there = scenario.memory or 0
    pairs = itertools.product(PRESETS, (False, True))
    found = {f"{name}{', checkpointing' * again}": _largest(name, again, scenario) for name, again in pairs}
    fitting = [one for one in found.values() if one.prediction]
    if not fitting:
        raise _nothing_fits(min(found.values(), key=lambda one: one.memory.bytes), there)
    best = min(fitting, key=lambda one: (float(f"{one.sequence_s:.3e}"), one.memory.bytes))
    return Search(found, best, len(fitting), len(found) - len(fitting))


def _largest(preset: str, checkpointing: bool, scenario: Scenario) -> Setting:
    def of(job: Job) -> Setting:
        return _setting(scenario, preset, {}, job)

    jobs, there = _jobs(scenario, checkpointing), scenario.memory or 0
    # Memory grows with the micro-batch, but for accumulators, which the last division frees.
    if (last := of(jobs[-1])).memory.bytes <= there:
        return _predicted(last, scenario)
    fitting = bisect_right(jobs, there, key=lambda job: of(job).memory.bytes)
    return _predicted(of(jobs[fitting - 1]), scenario) if fitting else of(jobs[0])


def _jobs(scenario: Scenario, checkpointing: bool) -> list[Job]:
    """The job with every micro-batch that is possible, smallest first."""
    job = replace(scenario.job, checkpointing=checkpointing)
    if not scenario.batch_given:
        return [replace(job, micro_batch=size) for size in range(1, _LARGEST + 1)]
    share = scenario.global_batch // scenario.grid.world_size
    sizes = [size for size in range(1, min(share, _LARGEST) + 1) if share % size == 0]
    return [replace(job, micro_batch=size, accumulation=share // size) for size in sizes]


# ---- tune ---------------------------------------------------------------------------------------------------------------


def tune(scenario: Scenario) -> Search:
    """Searches scopes, codecs, micro-batches and checkpointing, then buckets and algorithms of the best.

    Returns:
        The best, shortest first, and the best of every quality that loses less.

    Raises:
        ConfigError: No setting fits into memory.
    """
    machine, there = scenario.machine, scenario.memory or 0
    every = list(settings(scenario))
    fitting = [one for one in every if one.memory.bytes <= there]
    if not fitting:
        raise _nothing_fits(min(every, key=lambda one: one.memory.bytes), there)
    fitting.sort(key=lambda one: (one.job.checkpointing, -one.job.micro_batch))
    found: list[Setting] = []
    tried = 0
    # A setting that loses less is of interest up to the model's error above the best.
    margin = 1 + (machine.profile.error or 0.0)
    for one in fitting:
        if len(found) >= BEST and _compute_s(one.job, machine) > margin * found[BEST - 1].step.step_s:
            continue  # compute alone takes longer
        found.append(_predicted(one, scenario))
        found.sort(key=_order)
        tried += 1
    found = _distinct(found)
    given = _BUCKETS["prefetch"] in scenario.experiment["deepspeed"].get("zero_optimization", {})
    refined = []
    for one in dict.fromkeys([*found[:BEST], *_by_quality(found).values()]):
        best = one
        for bucket, doubling in ((None if given else _OTHER_BUCKET, {}), (None, _DOUBLING)):
            job = _with_bucket(best.job, bucket, scenario) if bucket else best.job
            other = _setting(scenario, best.preset, {**best.changes, **doubling}, job)
            if (bucket or doubling) and other.memory.bytes <= there:
                best = min(best, _predicted(other, scenario), key=_order)
                tried += 1
        refined.append(best)
    refined.sort(key=_order)
    shown = {str(place): one for place, one in enumerate(refined[:BEST], 1)}
    shown |= {name: one for name, one in _by_quality(refined).items() if one is not refined[0]}
    return Search(shown, refined[0], tried, len(every) - len(fitting))


def settings(scenario: Scenario) -> Iterator[Setting]:
    """All settings of a search, those that do not fit into memory too."""
    grid, per_rank = scenario.grid, scenario.global_batch // scenario.grid.world_size
    batches = [size for size in _MICRO_BATCHES if per_rank % size == 0]
    # Of scopes that reach the same ranks the innermost.
    distinct = list({grid.scope_size(scope): scope for scope in reversed(grid.scopes)}.values())[::-1]
    scopes = list(itertools.combinations_with_replacement(distinct, 2))
    configs = {name: parse_config({"preset": name}) for name in PRESETS}
    weights, gradients = _CODECS[scenario.quality]
    for shard, codec, coded, inner in itertools.product(scopes, weights, gradients, (True, False)):
        if not inner and (codec == coded == "none" or grid.nodes == 1):
            continue
        codecs = {
            role: {tier: name if inner or tier == "node" else "none" for tier in BASE_TIERS}
            for role, name in zip(ROLES, (codec, coded))
        }
        changed = {name: _changes(config, shard, codecs) for name, config in configs.items()}
        preset = min(changed, key=lambda name: len(changed[name]))
        for size, again in itertools.product(batches, (False, True)):
            job = replace(scenario.job, micro_batch=size, accumulation=per_rank // size, checkpointing=again)
            yield _setting(scenario, preset, changed[preset], _with_bucket(job, job.prefetch, scenario))


def _changes(
    config: HZeroConfig, shard: tuple[Scope, Scope], codecs: dict[Any, dict[Tier, CodecName]]
) -> dict[str, str]:
    """Keys of the block whose values are not those of a preset."""
    found: dict[str, str] = {}
    for role, scope in zip(ROLES, shard):
        if getattr(config.shard, role) != scope:
            found[f"shard.{role}"] = scope
        for tier, name in codecs[role].items():
            if config.codecs[role][tier].codec != name:
                found[f"codecs.{role}.{tier}"] = name
    return found


def _with_bucket(job: Job, numel: int, scenario: Scenario) -> Job:
    """A job whose buckets have this size, except those whose size the user has given."""
    given = scenario.experiment["deepspeed"].get("zero_optimization", {})
    sizes: dict[str, Any] = {name: numel for name, key in _BUCKETS.items() if key not in given}
    return replace(job, **sizes)


def _compute_s(job: Job, machine: Machine) -> float:
    """Seconds of a step's products at the profile's rate, which no communication shortens."""
    forward, passes = sum(bucket.flops for bucket in buckets_of(job)), 4 if job.checkpointing else 3
    return job.accumulation * passes * job.tokens * forward / machine.rate(job.tokens)


def _distinct(found: Sequence[Setting]) -> list[Setting]:
    """Those that start other collectives, or start them at other times: with one micro-step scopes can be the same."""
    kept: dict[Any, Setting] = {}
    for one in found:
        job = one.job
        chains = chains_of(one.plan, one.plan.grid, min(job.accumulation, 2))
        started = tuple((*when, program.crossings) for when, program in chains.items())
        kept.setdefault((started, _order(one), job.micro_batch, job.checkpointing, one.memory.bytes), one)
    return list(kept.values())


def _by_quality(found: Sequence[Setting]) -> dict[Quality, Setting]:
    """The best of those that lose no more than a quality allows."""
    best: dict[Quality, Setting] = {}
    for quality, (weights, gradients) in _CODECS.items():
        allowed = [one for one in found if one.codecs[0] in weights and one.codecs[1] in gradients]
        if allowed:
            best[quality] = min(allowed, key=_order)
    return best


def _order(one: Setting) -> tuple[float, int, bool, int]:
    """Shortest first; of equal ones, to a thousandth, what loses least and is simplest."""
    lost = 32 - sum(_BITS[codec] for codec in one.codecs)
    step = float(f"{one.step.step_s:.3e}")
    return step, lost, one.job.checkpointing, one.plan.node_all_gather.below_bytes + one.job.prefetch


# ---- sweep --------------------------------------------------------------------------------------------------------------


def node_counts(text: str) -> list[int]:
    """The nodes of ``nodes=1..9408``: both ends and the powers of two between them; or those of ``nodes=2,4,48``.

    Raises:
        ConfigError: It is neither.
    """
    found = re.fullmatch(r"nodes=(\d{1,6})\.\.(\d{1,6})", text)
    if found and 1 <= (first := int(found[1])) <= (last := int(found[2])):
        return sorted({first, last, *(1 << power for power in range(20) if first < 1 << power < last)})
    if re.fullmatch(r"nodes=[1-9]\d{0,5}(,[1-9]\d{0,5})*", text):
        return sorted({int(count) for count in text.partition("=")[2].split(",")})
    raise ConfigError(f"--sweep: found {text!r}, expected nodes=1..9408 or nodes=2,4,48")


def sweep(scenario: Scenario, nodes: Sequence[int]) -> dict[str, dict[int, Prediction]]:
    """Predicts every scheme on every number of nodes, with equal work per device."""
    places = {count: scenario.on(count) for count in nodes}
    curves: dict[str, dict[int, Prediction]] = {}
    for name in PRESETS:
        curves[f"hzero {name}"] = {n: predict(one.shard_plan(name), one.job, one.machine) for n, one in places.items()}
    for name, scheme in scenario.others().items():
        curves[name] = {n: predict(scheme, one.job, one.machine) for n, one in places.items()}
    return curves


def draw(curves: dict[str, dict[int, Prediction]], scenario: Scenario, path: Path) -> None:
    """Draws TFLOPS per device over the nodes; a curve has a gap where the scheme does not fit.

    Raises:
        ConfigError: The file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    profile, job = scenario.machine.profile, scenario.job
    for index, (name, steps) in enumerate(curves.items()):
        nodes = list(steps)
        rates = [step.tflops if scenario.holds(step) else math.nan for step in steps.values()]
        if all(map(math.isnan, rates)):  # fits nowhere; the table says so
            continue
        style = "-" if name.startswith("hzero ") else "--"
        width = 3.0 if name == f"hzero {DEFAULT_PRESET}" else 1.4
        axes.plot(nodes, rates, style, color=f"C{index % 10}", label=name, linewidth=width)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"nodes of {profile.name}")
    axes.set_ylabel("model TFLOPS per device, predicted")
    error = "is not known" if profile.error is None else f"is {profile.error:.0%}"
    tokens = job.tokens * job.accumulation
    axes.set_title(f"{job.name}, {tokens:,} tokens per device and step; the model's error {error}", fontsize=9)
    axes.legend(fontsize=7, ncols=3)
    axes.grid(alpha=0.2)
    with refusing("--out", path), replacing(path, "wb") as file:
        figure.savefig(file, format="png", dpi=150)
    plt.close(figure)
