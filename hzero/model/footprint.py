"""Footprint: memory of a device under every scheme, activations included."""

from __future__ import annotations

from collections.abc import Sequence

from hzero.model.shape import ModelShape
from hzero.sharding.memory import plan_memory, zero3_memory
from hzero.sharding.plan import ShardPlan
from hzero.sharding.sequence import Scheme
from hzero.topology import Grid


def activation_bytes(model: ModelShape, micro_batch: int, checkpointing: bool) -> int:
    """Bytes of activations of one device.

    34 per token, hidden unit and layer, those of a GPT, for other architectures too (arXiv 2205.05198, eq. 2, without the
    scores, which attention in blocks never stores); with checkpointing 2 and one whole layer. Logits: 16 bits, and float32
    for the loss.
    """
    tokens = micro_batch * model.seq_length
    unit = tokens * model.hidden
    layers = model.layers
    kept = 2 * unit * layers + 34 * unit if checkpointing else 34 * unit * layers
    return int(kept + 6 * tokens * model.vocab)


def state_bytes(
    scheme: Scheme | ShardPlan,
    grid: Grid,
    numels: Sequence[int],
    *,
    itemsize: int,
    bucket_numel: int,
    accumulation: int,
    channels: int,
) -> int:
    """Bytes of the model states and transient buffers of one device."""
    if isinstance(scheme, ShardPlan):
        states = plan_memory(
            scheme,
            numels,
            itemsize=itemsize,
            bucket_numel=bucket_numel,
            accumulation=accumulation,
            channels=channels,
        )
        return sum(state.bytes for state in states)
    total = sum(numels)
    bucket = 4 * itemsize * min(max(bucket_numel, max(numels)), total)
    if scheme.engine == "ddp":
        return total * 16 + bucket // 2
    if scheme.engine == "fsdp":
        return total * 16 // grid.scope_size(scheme.shard) + bucket
    if scheme.stage < 3:
        gradients = total * itemsize if scheme.stage == 1 else total * itemsize // grid.world_size
        return total * itemsize + gradients + total * 16 // grid.world_size + bucket
    states = zero3_memory(grid, numels, itemsize=itemsize, bucket_numel=bucket_numel, channels=channels)
    # In the weights' type with ZeRO++ too, which quantises what is sent (DeepSpeed 0.19, _partition_param_sec).
    copy = total * itemsize // grid.scope_size(scheme.hpz) if scheme.hpz else 0
    return sum(state.bytes for state in states) + copy
