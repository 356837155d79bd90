"""Memory: bytes of every state on one rank, transient buffers and residuals included."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from hzero.config import ROLES, TIERS, Tier
from hzero.sharding.plan import ShardPlan
from hzero.sharding.records import chunk_numel, element_bytes, record_format
from hzero.topology import Grid

#: DeepSpeed's default ``stage3_prefetch_bucket_size``: elements in flight in a gather, and in a message of the refresh.
BUCKET_NUMEL = 50_000_000
#: Maximum number of reductions in flight, and of refresh messages ahead of the gathers.
IN_FLIGHT = 2
#: Channels of an NCCL or RCCL communicator, as ``slurm/frontier.env`` asks for; by default they depend on the
#: machine. ``NCCL_BUFFSIZE`` is 4 MiB by default, for each channel and neighbour.
CHANNELS, CHANNEL_BYTES = 16, 4 << 20


@dataclass(frozen=True)
class StateMemory:
    """Memory of one state on one rank.

    Attributes:
        name: The state, as `hzero.zero.StageState.memory` names it.
        bytes: Bytes on the device.
        what: Description of the content.
    """

    name: str
    bytes: int
    what: str


def plan_memory(
    plan: ShardPlan,
    numels: Sequence[int],
    *,
    itemsize: int = 2,
    optimizer_bytes: int = 12,
    accumulation_itemsize: int = 4,
    bucket_numel: int = BUCKET_NUMEL,
    accumulation: int = 2,
    channels: int = CHANNELS,
) -> list[StateMemory]:
    """Bytes of every state of the stage on one rank, without activations.

    Args:
        plan: The shard plan.
        numels: Elements of each trainable parameter.
        itemsize: Bytes of one weight.
        optimizer_bytes: Optimizer bytes per parameter: a float32 master and Adam's two moments make 12.
        accumulation_itemsize: Bytes of one element of the gradient shard.
        bucket_numel: Elements of parameters gathered or reduced together.
        accumulation: Micro-steps per step; with one no accumulators are kept.
        channels: Channels of a communicator; 0 on processors, whose communicators keep no such buffers.
    """
    world = plan.grid.world_size
    chunks = [chunk_numel(numel, world) for numel in numels]
    shard = sum(chunks)
    resident = 0
    if plan.resident and plan.decoded:
        resident = shard * world * itemsize
    elif plan.resident:
        resident = record_format(plan.resident_codec).message_bytes(chunks, plan.resident_rows, itemsize)
    residual: int = sum(
        2 * 4 * shard * _rows_before(plan, tier)
        for tier in plan.error_feedback
        if plan.grid.size(tier) > 1 and plan.codecs.gradients[tier].codec != "none"
    )
    largest = max(numels, default=0)
    bucket = min(max(bucket_numel, largest), sum(numels))
    gather_bits = max((element_bytes(hop.codec, itemsize) for hop in plan.gather_hops()), default=0.0)
    refresh_bits = itemsize if plan.differences else gather_bits  # a whole refresh has no codec
    decoded_bits = itemsize if plan.decoded or plan.differences else 0
    reduce_bits = max((element_bytes(hop.codec, itemsize) for hop in plan.reduce_hops()), default=0.0)
    refreshed = min(max(plan.refresh_numel(bucket_numel, itemsize), largest), sum(numels)) if plan.refresh_hops() else 0
    first = plan.reduce_hops()[0].size if plan.reduce_hops() else 1
    lossless = all(hop.codec.codec == "none" for hop in plan.reduce_hops())
    return [
        StateMemory("primary weights", shard * itemsize, f"{itemsize} bytes over the world"),
        StateMemory("resident weights", resident, _resident_what(plan)),
        StateMemory("gradient shard", shard * accumulation_itemsize, f"{accumulation_itemsize} bytes over the world"),
        StateMemory(
            "gradient accumulators",
            _accumulator_bytes(plan, numels, shard) if accumulation > 1 else 0,
            _accumulators_what(plan, accumulation),
        ),
        StateMemory("optimizer", shard * optimizer_bytes, f"{optimizer_bytes} bytes over the world"),
        StateMemory("error feedback", residual, "float32 residuals, kept and of this step" if residual else "none"),
        StateMemory(
            "transient gather",
            0 if plan.decoded else round(bucket * (itemsize + gather_bits)),
            "none: the weights are whole" if plan.decoded else f"whole weights and payload of {bucket:,} elements",
        ),
        StateMemory(
            "transient refresh",
            round(
                refreshed
                * (2 * (IN_FLIGHT + 1) * refresh_bits + decoded_bits)
                / plan.grid.scope_size(plan.weights_scope)
            ),
            f"two payloads of each of {IN_FLIGHT + 1} messages of {refreshed:,} elements{', one decoded' * bool(decoded_bits)}"
            if refreshed
            else "none",
        ),
        StateMemory(
            "transient reduce",
            round(bucket * (itemsize + 2 * IN_FLIGHT * reduce_bits + (0 if lossless else 4 + 4 / first))),
            f"gradients, two payloads of each of {IN_FLIGHT} buckets, float32 staging of {bucket:,} elements",
        ),
        _communicators(1 + len(ROLES) * sum(plan.grid.size(tier) > 1 for tier in TIERS), channels),
    ]


def zero3_memory(
    grid: Grid,
    numels: Sequence[int],
    *,
    itemsize: int = 2,
    optimizer_bytes: int = 12,
    accumulation_itemsize: int = 4,
    bucket_numel: int = BUCKET_NUMEL,
    channels: int = CHANNELS,
) -> list[StateMemory]:
    """The same for plain ZeRO-3."""
    shard = sum(chunk_numel(numel, grid.world_size) for numel in numels)
    bucket = min(max(bucket_numel, max(numels, default=0)), sum(numels))
    return [
        StateMemory("primary weights", shard * itemsize, f"{itemsize} bytes over the world"),
        StateMemory("gradient shard", shard * accumulation_itemsize, f"{accumulation_itemsize} bytes over the world"),
        StateMemory("optimizer", shard * optimizer_bytes, f"{optimizer_bytes} bytes over the world"),
        StateMemory("transient gather", 2 * bucket * itemsize, f"whole weights and bucket of {bucket:,} elements"),
        StateMemory("transient reduce", 2 * bucket * itemsize, f"gradients and bucket of {bucket:,} elements"),
        _communicators(1, channels),
    ]


def as_dicts(states: Sequence[StateMemory]) -> list[dict[str, object]]:
    """As plain dictionaries, for JSON."""
    return [dataclasses.asdict(state) for state in states]


def _communicators(count: int, channels: int) -> StateMemory:
    """An estimate of the buffers of NCCL's or RCCL's communicators: of each role and tier, and of DeepSpeed's world.

    A ring has two neighbours, whatever its size, and a buffer for each on every channel (NVIDIA/nccl#986, #1450). Left out,
    since no source gives them: the smaller buffers of the protocols LL and LL128, trees, and the connections of an all-to-all.
    Logs show more: 67 MB for 4 channels (ROCm/rccl#419), 1.6 GB for a communicator on NVIDIA GPUs (NVIDIA/nccl#864).
    """
    buffers = count * 2 * channels * CHANNEL_BYTES
    return StateMemory("communicators", buffers, f"estimate: rings of {count}, {channels} channels of 2 x 4 MiB each")


def _rows_before(plan: ShardPlan, tier: Tier) -> int:
    """Shards that a rank holds when a reduction reaches a tier."""
    rows = plan.grid.world_size
    for hop in plan.reduce_hops():
        if hop.tier == tier:
            return rows
        rows //= hop.size
    return 0


def _accumulator_bytes(plan: ShardPlan, numels: Sequence[int], shard: int) -> int:
    if not plan.accumulates:
        return 0
    return 4 * (shard * plan.gradient_rows if plan.micro_hops() else sum(numels))  # no hop has padded them


def _accumulators_what(plan: ShardPlan, accumulation: int) -> str:
    if not plan.accumulates:
        return "none: gradients are over the world"
    return f"float32 over the {plan.gradients_scope}" if accumulation > 1 else "none: a step has one micro-step"


def _resident_what(plan: ShardPlan) -> str:
    if not plan.resident:
        return "none: the weights' scope is the whole world"
    if plan.decoded:
        return "decoded, whole on every device"
    codec = plan.resident_codec.codec
    return f"{'uncoded' if codec == 'none' else codec} over the {plan.weights_scope}"
