"""Job: what is trained, and how a step is cut."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hzero.model.shape import ModelShape
from hzero.sharding.memory import BUCKET_NUMEL, Buffers

#: How attention is computed, by torch's names: ``flash`` never stores scores, ``math`` keeps them for backward.
Attention = Literal["flash", "math"]


@dataclass(frozen=True)
class Job:
    """What is trained, and how a step is cut.

    Attributes:
        model: Shape of the model.
        micro_batch: Sequences per rank and micro-step.
        accumulation: Micro-steps per step.
        checkpointing: Whether backward computes activations again.
        itemsize: Bytes of a weight and of a gradient on the wire.
        bucket_numel: Elements gathered or reduced together, DeepSpeed's prefetch and reduce bucket.
        reuse_numel: Elements of other parameters between the uses in forward and backward up to which DeepSpeed keeps a
            parameter gathered (``stage3_max_reuse_distance``). It always keeps the last.
        ahead: Buckets that are gathered ahead of their use, where the engine does that.
        overlap: Whether collectives run beside compute; without it each is waited for where it starts.
        buffers: Sizes of DeepSpeed's buffers, for memory alone.
        attention: How attention is computed, for memory alone.
    """

    model: ModelShape
    micro_batch: int = 1
    accumulation: int = 1
    checkpointing: bool = False
    itemsize: int = 2
    bucket_numel: int = BUCKET_NUMEL
    reuse_numel: int = 0
    ahead: int = 1
    overlap: bool = True
    buffers: Buffers = field(default_factory=Buffers)
    attention: Attention = "flash"

    @property
    def tokens(self) -> int:
        """Tokens per rank and micro-step."""
        return self.micro_batch * self.model.seq_length
