"""Job: what is trained, and how DeepSpeed cuts its step into buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hzero.commands.experiment import Architecture


@dataclass(frozen=True)
class Job:
    """What is trained, and how a step is cut. Sizes of buffers are in elements.

    Attributes:
        name: Of the model.
        model: Its shapes.
        seq_length: Tokens of a sequence.
        micro_batch: Sequences per rank and micro-step.
        accumulation: Micro-steps per step.
        checkpointing: Whether backward computes activations again.
        itemsize: Bytes of a weight and of a gradient on the wire.
        prefetch: ``stage3_prefetch_bucket_size``: gathered ahead of use. Buckets of a prediction have this size.
        ahead: Buckets that are gathered ahead of their use, where the engine does that.
        reduce: ``reduce_bucket_size``: reduced together.
        contiguous: ``contiguous_gradients``: whether a buffer of that size is kept for gradients, however small the model.
        reuse: ``stage3_max_reuse_distance``: a parameter stays whole until its next use if no more lie between the uses in
            forward and backward. DeepSpeed always keeps the last.
        sub_group: ``sub_group_size``: elements that the optimizer steps together.
        gradient_itemsize: Bytes of an element of the gradient shard; None: of a weight, as DeepSpeed's default is.
        offload: Whether the optimizer and the gradient shard are on the host.
    """

    name: str
    model: Architecture
    seq_length: int
    micro_batch: int
    accumulation: int
    checkpointing: bool
    itemsize: int
    prefetch: int
    ahead: int
    reduce: int
    contiguous: bool
    reuse: int
    sub_group: int
    gradient_itemsize: int | None
    offload: bool

    @property
    def tokens(self) -> int:
        """Tokens per rank and micro-step."""
        return self.micro_batch * self.seq_length

    @property
    def layer(self) -> int:
        """Elements of a layer; 0 where layers differ."""
        return sum(self.model.layer or ())

    @property
    def layers_together(self) -> int:
        """Whole layers that one bucket holds: DeepSpeed gathers ahead, and reduces, across modules; at least 1."""
        return max(self.prefetch // self.layer, 1)


@dataclass(frozen=True)
class Bucket:
    """Parameters that are gathered and reduced together.

    Attributes:
        name: Equal buckets have equal names.
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


def buckets_of(job: Job, layers: int | None = None) -> list[Bucket]:
    """Buckets of a job in the order of forward: as many layers, or else parameters of a layer, as fit; at least one.

    A token takes 2 operations for each weight that it is multiplied with, and 4 x length x width in attention.

    Args:
        job: The job; all layers of its model are alike.
        layers: Number of layers; None: the model's.
    """
    model = job.model
    assert model.layer is not None
    layers = model.layers if layers is None else layers
    vocab = model.vocab_size * model.hidden
    weights = 2.0 * (job.layer - model.idle / model.layers)
    attention = 4.0 * job.seq_length * model.attention / model.layers
    embedding, head = Bucket("embedding", model.before, 0.0), Bucket("head", model.after, 2.0 * vocab)
    if (together := job.layers_together) > 1:
        counts = [min(together, layers - first) for first in range(0, layers, together)]
        return [embedding, *(Bucket(f"{n} layers", model.layer * n, (weights + attention) * n) for n in counts), head]
    of_layer = []
    for index, part in enumerate(_split(model.layer, job.prefetch)):
        # The operations of attention itself count with the bucket of the first matrix.
        flops = weights / job.layer * sum(part) + (attention if index == 0 else 0.0)
        of_layer.append(Bucket(f"layer.{index}", tuple(part), flops))
    return [embedding, *of_layer * layers, head]


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
