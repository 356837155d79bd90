"""Compute: floating-point operations of a model's buckets, and the time that they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hzero.model.collectives import Phase
from hzero.model.profile import Profile
from hzero.model.shape import ModelShape


@dataclass(frozen=True)
class Bucket:
    """Parameters that are gathered and reduced together.

    Attributes:
        name: For traces; equal buckets have equal names.
        numels: Elements of every parameter.
        flops: Of forward, per token.
    """

    name: str
    numels: tuple[int, ...]
    flops: float

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(self.numels)


def layers_together(model: ModelShape, bucket_numel: int) -> int:
    """Whole layers that one bucket holds: DeepSpeed gathers ahead, and reduces, across modules; at least 1."""
    return max(bucket_numel // sum(model.layer), 1)


def model_buckets(model: ModelShape, bucket_numel: int) -> list[Bucket]:
    """Buckets of a model in the order of forward: as many layers, or else parameters of a layer, as fit; at least one.

    Args:
        model: Its shape.
        bucket_numel: Max elements of a bucket of several parameters.
    """
    embedding, head = Bucket("embedding", model.before, 0.0), Bucket("head", model.after, model.after_flops)
    if (together := layers_together(model, bucket_numel)) > 1:
        each = model.layer_flops + model.attention_flops
        counts = [min(together, model.layers - first) for first in range(0, model.layers, together)]
        of_layers = [Bucket(f"{count} layers", model.layer * count, each * count) for count in counts]
        return [embedding, *of_layers, head]
    parts, each = _split(model.layer, bucket_numel), model.layer_flops / sum(model.layer)
    # Attention's own operations stand in the bucket of the first matrix.
    attention = [model.attention_flops if index == 0 else 0.0 for index in range(len(parts))]
    of_layer = [
        Bucket(f"layer.{index}", tuple(part), each * sum(part) + extra)
        for index, (part, extra) in enumerate(zip(parts, attention))
    ]
    return [embedding, *of_layer * model.layers, head]


def _split(numels: Sequence[int], limit: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for numel in numels:
        if parts[-1] and sum(parts[-1]) + numel > limit:
            parts.append([])
        parts[-1].append(numel)
    if len(parts) > 1 and sum(parts[-1]) < limit // 100:  # a bias that is left over
        bias = parts.pop()
        parts[-1] += bias
    return parts


def model_flops(buckets: Sequence[Bucket], tokens: int) -> float:
    """Operations of forward and backward of ``tokens`` tokens, without what is computed again."""
    return 3.0 * tokens * sum(bucket.flops for bucket in buckets)


def compute_phase(profile: Profile, flops: float, tokens: int, world: int) -> Phase:
    """Time of ``flops`` operations in a micro-batch of ``tokens`` tokens per rank.

    Short micro-batches use a device badly: the rate is ``compute_tflops`` x tokens / (tokens + ``half_tokens``).
    """
    rate = profile.value("compute_tflops") * 1e12 * tokens / (tokens + profile.value("half_tokens"))
    host = profile.value("host_us") / 1e6
    if profile.cores:
        share = world / profile.cores
        return Phase(0.0, {"cores": (flops / rate + host) * share})
    return Phase(host, {"compute": flops / rate}) if flops else Phase(host)


def optimizer_phase(profile: Profile, shard: int, states: int, world: int) -> Phase:
    """Time of Adam on a rank's ``shard`` elements, which reads and writes ``states`` bytes of each."""
    fixed = profile.value("step_us") / 1e6
    if profile.cores:
        seconds = shard / 1e9 * profile.value("optimizer_s_per_g") * world / profile.cores
        return Phase(fixed, {"cores": seconds})
    return Phase(fixed, {"memory": shard * states / profile.value("hbm_gb_s") / 1e9})
