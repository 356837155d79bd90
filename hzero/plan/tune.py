"""Tune: searches the settings of the stage with the shortest predicted step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hzero.config import BASE_TIERS, PRESETS, ROLES, CodecName, Scope, Tier
from hzero.model.footprint import footprint
from hzero.model.job import Job
from hzero.model.profile import Profile, Source
from hzero.model.step import Prediction, predict
from hzero.parsing import parse_config
from hzero.plan.scenario import Quality, Scenario
from hzero.settings.buffers import BUCKET, REDUCE_BUCKET
from hzero.sharding.plan import ShardPlan
from hzero.sharding.sequence import stage_chains
from hzero.validation import ConfigError

#: Number of settings that are shown, and refined.
BEST = 10
#: Elements of a bucket that are tried beside DeepSpeed's default.
_OTHER_BUCKET = 200_000_000
_CODECS: dict[Quality, tuple[tuple[CodecName, ...], tuple[CodecName, ...]]] = {
    "lossless": (("none",), ("none",)),
    "weights": (("none", "int8", "int4"), ("none",)),
    "all": (("none", "int8", "int4"), ("none", "int8", "int4")),
}
#: What a machine may be other than its profile says, to see whether another setting would then be the best.
_OTHERWISE: tuple[tuple[str, dict[str, float]], ...] = (
    ("nodes at half the rate", {"net_rails_gb_s": 0.5, "net_ring_gb_s": 0.5, "net_all_reduce_gb_s": 0.5}),
    ("nodes at twice the rate", {"net_rails_gb_s": 2, "net_ring_gb_s": 2, "net_all_reduce_gb_s": 2}),
    ("latencies twice as long", {"launch_us": 2, "ring_net_us": 2, "ring_net_ll_us": 2, "pair_us": 2}),
    ("compute at half the rate", {"compute_tflops": 0.5}),
    ("kernels of codecs at a quarter of the memory's rate", {"hbm_gb_s": 0.25}),
)
#: Micro-batches that are tried.
_MICRO_BATCHES = range(1, 17)


@dataclass(frozen=True)
class Candidate:
    """Settings of the stage and of the step.

    Attributes:
        weights: Scope of the weights.
        gradients: Scope of the gradients.
        weights_codec: Codec of the weights.
        gradients_codec: Codec of the gradients.
        inner: Whether tiers inside the node have the codecs too.
        micro_batch: Sequences per rank and micro-step.
        accumulation: Micro-steps per step.
        checkpointing: Whether activations are computed again.
        bucket_numel: DeepSpeed's prefetch and reduce bucket.
        doubling_below: Messages between nodes of fewer bytes are gathered by doubling.
    """

    weights: Scope
    gradients: Scope
    weights_codec: CodecName
    gradients_codec: CodecName
    inner: bool
    micro_batch: int
    accumulation: int
    checkpointing: bool
    bucket_numel: int
    doubling_below: int = 0

    def block(self) -> dict[str, Any]:
        """The ``"hzero"`` block, whose preset is the one that differs least."""
        shard, codecs = self._leaves()
        block: dict[str, Any] = {
            "preset": min(PRESETS, key=lambda name: len(self._other_leaves(name))),
            "shard": shard,
            "codecs": codecs,
        }
        if self.doubling_below:
            block["node_all_gather"] = {"algorithm": "doubling", "below_bytes": self.doubling_below}
        return block

    def _leaves(self) -> tuple[dict[str, Scope], dict[str, dict[Tier, CodecName]]]:
        names: dict[str, CodecName] = {"weights": self.weights_codec, "gradients": self.gradients_codec}
        codecs: dict[str, dict[Tier, CodecName]] = {
            role: {tier: name if self.inner or tier == "node" else "none" for tier in BASE_TIERS}
            for role, name in names.items()
        }
        return {"weights": self.weights, "gradients": self.gradients}, codecs

    def _other_leaves(self, preset: str) -> dict[str, str]:
        """Keys of the block whose values are not the preset's."""
        config = parse_config({"preset": preset})
        shard, codecs = self._leaves()
        found: dict[str, str] = {
            f"shard.{role}": scope for role, scope in shard.items() if getattr(config.shard, role) != scope
        }
        for role in ROLES:
            for tier in BASE_TIERS:
                if config.codecs[role][tier].codec != codecs[role][tier]:
                    found[f"codecs.{role}.{tier}"] = codecs[role][tier]
        return found

    def overrides(self) -> list[str]:
        """The same for `hzero train`, as Hydra's overrides."""
        preset = self.block()["preset"]
        found = [f"zero={preset}", *(f"zero.{key}={value}" for key, value in self._other_leaves(preset).items())]
        if self.doubling_below:
            found += ["zero.node_all_gather.algorithm=doubling"]
            found += [f"zero.node_all_gather.below_bytes={self.doubling_below}"]
        found += [f"train.micro_batch={self.micro_batch}", f"train.grad_accumulation={self.accumulation}"]
        found += [f"train.activation_checkpointing={str(self.checkpointing).lower()}"]
        # ++: whether the configuration has the key or not.
        return found + [f"++deepspeed.zero_optimization.{key}={self.bucket_numel}" for key in (BUCKET, REDUCE_BUCKET)]

    def __str__(self) -> str:
        where = "" if self.inner or (self.weights_codec, self.gradients_codec) == ("none", "none") else " between nodes"
        return (
            f"weights {self.weights} {self.weights_codec}, gradients {self.gradients} {self.gradients_codec}{where}; "
            f"{self.micro_batch} x {self.accumulation}{', checkpointing' if self.checkpointing else ''}"
            f"; buckets {self.bucket_numel / 1e6:g} M{', doubling' if self.doubling_below else ''}"
        )


@dataclass(frozen=True, eq=False)
class Found:
    """A candidate and its predicted step."""

    candidate: Candidate
    prediction: Prediction


@dataclass(frozen=True)
class Otherwise:
    """A machine that differs in one thing.

    Attributes:
        what: What differs.
        longer: How much longer the step of the first setting then takes, as a share.
        best: The setting that would then be the first.
        gain: How much longer the first's step then takes than that one's, as a share.
    """

    what: str
    longer: float
    best: Candidate
    gain: float


@dataclass(frozen=True)
class Tuning:
    """The result of a search.

    Attributes:
        best: The best, first first.
        by_quality: The best of every quality that was allowed.
        tried: Settings that were simulated.
        left_out: Settings that do not fit into memory.
        otherwise: What would be the best if the machine were otherwise.
    """

    best: list[Found]
    by_quality: dict[Quality, Found]
    tried: int
    left_out: int
    otherwise: list[Otherwise]


def tune(scenario: Scenario) -> Tuning:
    """Searches scopes, codecs, micro-batches and checkpointing, then buckets and algorithms of the best.

    Raises:
        ConfigError: No setting fits into memory.
    """
    fitting: list[Candidate] = []
    least, smallest, left_out = float("inf"), "", 0
    for candidate in candidates(scenario):
        size = _memory(candidate, scenario)
        if size < least:
            least, smallest = size, str(candidate)
        if size <= scenario.memory_bytes:
            fitting.append(candidate)
        else:
            left_out += 1
    if not fitting:
        raise ConfigError(
            f"memory: found {scenario.memory_bytes / 1e9:g} GB, and the smallest setting needs {least / 1e9:.1f} GB per "
            f"device ({smallest}); possible: more nodes, a smaller model, or shorter sequences"
        )
    fitting.sort(key=lambda one: (one.checkpointing, -one.micro_batch))
    found: list[Found] = []
    tried = 0
    # One that loses less is of interest up to the model's error above the best.
    margin = 1 + (scenario.profile.error or 0.0)
    for candidate in fitting:
        if len(found) >= BEST and _compute_s(candidate, scenario) > margin * found[BEST - 1].prediction.step_s:
            continue  # compute alone takes longer
        found.append(Found(candidate, _predicted(candidate, scenario)))
        found.sort(key=_order)
        tried += 1
    found = _distinct(found, scenario)
    given = BUCKET in scenario.settings["deepspeed"].get("zero_optimization", {})
    refined = []
    for one in dict.fromkeys([*found[:BEST], *_by_quality(found).values()]):
        best = one
        for bucket, below in ((0 if given else _OTHER_BUCKET, 0), (0, 1 << 20)):
            now = best.candidate
            other = replace(now, bucket_numel=bucket or now.bucket_numel, doubling_below=below or now.doubling_below)
            if other != now and _memory(other, scenario) <= scenario.memory_bytes:
                best = min(best, Found(other, _predicted(other, scenario)), key=_order)
                tried += 1
        refined.append(best)
    refined.sort(key=_order)
    return Tuning(refined[:BEST], _by_quality(refined), tried, left_out, _otherwise(refined, found, scenario))


def _distinct(found: Sequence[Found], scenario: Scenario) -> list[Found]:
    """Those that start other collectives, or start them at other times: with one micro-step scopes can be the same."""
    kept: dict[Any, Found] = {}
    for one in found:
        now = one.candidate
        chains = tuple(stage_chains(_plan(now, scenario), min(now.accumulation, 2)))
        kept.setdefault((chains, _order(one), now.micro_batch, now.checkpointing, one.prediction.memory_bytes), one)
    return list(kept.values())


def _by_quality(found: Sequence[Found]) -> dict[Quality, Found]:
    """The best of those that lose no more than a quality allows."""
    best: dict[Quality, Found] = {}
    for quality, (weights, gradients) in _CODECS.items():
        for one in sorted(found, key=_order):
            if one.candidate.weights_codec in weights and one.candidate.gradients_codec in gradients:
                best[quality] = one
                break
    return best


def _order(found: Found) -> tuple[float, int, bool, int]:
    """Shortest first; of equal ones, to a thousandth, what loses least and is simplest."""
    one = found.candidate
    bits = {"none": 16, "bf16": 16, "int8": 8, "int4": 4}
    lost = 32 - bits[one.weights_codec] - bits[one.gradients_codec]
    step = float(f"{found.prediction.step_s:.3e}")
    return step, lost, one.checkpointing, one.doubling_below + one.bucket_numel


def candidates(scenario: Scenario) -> Iterator[Candidate]:
    """All settings of a search, those that do not fit into memory too."""
    per_rank = scenario.global_batch // scenario.grid.world_size
    batches = [size for size in _MICRO_BATCHES if per_rank % size == 0]
    weights, gradients = _CODECS[scenario.quality]
    names = scenario.grid.scopes
    scopes = [(a, b) for a in names for b in names if names.index(a) <= names.index(b)]
    sizes = [scenario.grid.scope_size(scope) for scope in names]
    for (of_weights, of_gradients), codec, coded, inner, size, again in itertools.product(
        scopes, weights, gradients, (True, False), batches, (False, True)
    ):
        if not inner and (codec == coded == "none" or scenario.grid.nodes == 1):
            continue
        if any(  # a scope that reaches no more ranks than the one inside it is the same
            index and sizes[index] == sizes[index - 1] for index in map(names.index, (of_weights, of_gradients))
        ):
            continue
        yield Candidate(
            of_weights,
            of_gradients,
            codec,
            coded,
            inner,
            size,
            per_rank // size,
            again,
            scenario.job.bucket_numel,
        )


def _plan(candidate: Candidate, scenario: Scenario) -> ShardPlan:
    return ShardPlan.from_config(parse_config(candidate.block()), scenario.grid, 0)


def _job(candidate: Candidate, scenario: Scenario) -> Job:
    bucket = candidate.bucket_numel
    return replace(
        scenario.job,
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        checkpointing=candidate.checkpointing,
        bucket_numel=bucket,
        buffers=replace(scenario.job.buffers, prefetch=bucket, reduce=bucket),
    )


def _memory(candidate: Candidate, scenario: Scenario) -> int:
    plan, job = _plan(candidate, scenario), _job(candidate, scenario)
    return footprint(plan, scenario.grid, job.model.numels, job, channels=scenario.profile.channels).bytes


def _compute_s(candidate: Candidate, scenario: Scenario) -> float:
    """Seconds of a step's products at the profile's rate, which no communication shortens."""
    model, profile = scenario.job.model, scenario.profile
    if profile.cores:
        return 0.0
    tokens = candidate.micro_batch * model.seq_length
    layers = model.layers * (model.layer_flops + model.attention_flops)
    flops = (4 if candidate.checkpointing else 3) * tokens * (layers + model.after_flops)
    rate = profile.value("compute_tflops") * 1e12 * tokens / (tokens + profile.value("half_tokens"))
    return candidate.accumulation * flops / rate


def _predicted(candidate: Candidate, scenario: Scenario, profile: Profile | None = None) -> Prediction:
    return predict(_plan(candidate, scenario), _job(candidate, scenario), scenario.grid, profile or scenario.profile)


def _otherwise(best: Sequence[Found], found: Sequence[Found], scenario: Scenario) -> list[Otherwise]:
    """Compares the best of every kind of setting on machines that differ: the first few alone are too alike."""
    kinds: dict[Any, Found] = {}
    for one in found:
        now = one.candidate
        kinds.setdefault((now.weights_codec, now.gradients_codec, now.inner), one)
        kinds.setdefault((now.weights, now.gradients), one)
        kinds.setdefault((now.micro_batch, now.checkpointing), one)
    rivals = list(dict.fromkeys([*best, *kinds.values()]))
    result = []
    for what, profile in _machines(scenario):
        steps = [_predicted(one.candidate, scenario, profile).step_s for one in rivals]
        winner = min(range(len(rivals)), key=lambda index: (float(f"{steps[index]:.3e}"), index))
        longer = steps[0] / rivals[0].prediction.step_s - 1
        result.append(Otherwise(what, longer, rivals[winner].candidate, steps[0] / steps[winner] - 1))
    return result


def _machines(scenario: Scenario) -> Iterator[tuple[str, Profile]]:
    profile, nodes = scenario.profile, scenario.grid.nodes
    if (spread := profile.spread(nodes)) is not None:
        yield f"its nodes spread over all {profile.groups} switch groups, and other jobs as busy there", spread
    source = Source(what="changed, to see what follows", date="now", stack="none", kind="assumed")
    for what, factors in _OTHERWISE:
        if nodes == 1 and what.startswith("nodes"):
            continue
        values = {name: profile.value(name) * factor for name, factor in factors.items()}
        if profile.cores and "hbm_gb_s" in values:
            continue  # processors take no time of it
        yield what, profile.with_values(source, **values)
