"""Memory: bytes of every state on one rank, transient buffers and residuals included."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from hzero.codecs.formats import chunk_numel, element_bytes, record_format
from hzero.config import ROLES, TIERS, Tier
from hzero.plan.shards import ShardPlan
from hzero.topology import Grid

#: DeepSpeed's default ``stage3_prefetch_bucket_size``: elements in flight in a gather, and in a message of the refresh.
BUCKET_NUMEL = 50_000_000
#: Its default ``reduce_bucket_size``.
REDUCE_NUMEL = 500_000_000
#: Its defaults of ``stage3_max_reuse_distance``, ``stage3_max_live_parameters`` and ``sub_group_size``.
REUSE_NUMEL = LIVE_NUMEL = SUB_GROUP_NUMEL = 10**9
#: Maximum number of reductions in flight, and of refresh messages ahead of the gathers.
IN_FLIGHT = 2
#: Channels of an NCCL or RCCL communicator, as ``slurm/frontier.env`` asks for; by default they depend on the
#: machine. ``NCCL_BUFFSIZE`` is 4 MiB by default, for each channel and neighbour.
CHANNELS, CHANNEL_BYTES = 16, 4 << 20


@dataclass(frozen=True)
class StateMemory:
    """Memory of one state on one rank.

    Attributes:
        name: The state, as `hzero.deepspeed.StageState.memory` names it. What comes and goes within a step is ``transient``.
        bytes: Bytes on the device, at most.
        what: Description of the content.
    """

    name: str
    bytes: int
    what: str


@dataclass(frozen=True)
class Buffers:
    """Sizes of DeepSpeed's buffers, in elements; by default its own.

    Attributes:
        prefetch: ``stage3_prefetch_bucket_size``: gathered ahead of use.
        reduce: ``reduce_bucket_size``: reduced together.
        contiguous: ``contiguous_gradients``: whether a buffer of that size is kept for gradients, however small the model.
        reuse: ``stage3_max_reuse_distance``: a parameter stays whole until its next use if that is no further away.
        sub_group: ``sub_group_size``: elements that the optimizer steps together.
        module: Elements of the largest layer that is gathered as a whole, if the plan's `unit_numel` allows; the largest
            parameter's where that is more.
        accumulation_itemsize: Bytes of an element of the gradient shard; None: of a weight, as DeepSpeed's default is.
        offload: Whether the optimizer and the gradient shard are on the host.
    """

    prefetch: int = BUCKET_NUMEL
    reduce: int = REDUCE_NUMEL
    contiguous: bool = True
    reuse: int = REUSE_NUMEL
    sub_group: int = SUB_GROUP_NUMEL
    module: int = 0
    accumulation_itemsize: int | None = None
    offload: bool = False


def plan_memory(
    plan: ShardPlan,
    numels: Sequence[int],
    *,
    itemsize: int = 2,
    accumulation: int = 2,
    channels: int = CHANNELS,
    buffers: Buffers = Buffers(),
) -> list[StateMemory]:
    """Bytes of every state of the stage on one rank, without activations.

    Transient states are not all there at once; `hzero.plan.memory` says how much is.

    Args:
        plan: The shard plan.
        numels: Elements of each trainable parameter.
        itemsize: Bytes of one weight.
        accumulation: Micro-steps per step; with one no accumulators are kept.
        channels: Channels of a communicator; 0 on CPUs, whose communicators keep no such buffers.
        buffers: Sizes of DeepSpeed's buffers.
    """
    world = plan.grid.world_size
    chunks = [chunk_numel(numel, world) for numel in numels]
    shard, total, largest = sum(chunks), sum(numels), max(numels, default=0)
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
    gather_bits = max((element_bytes(hop.codec, itemsize) for hop in plan.gather_hops()), default=0.0)
    refresh_bits = itemsize if plan.differences else gather_bits  # a whole refresh has no codec
    refreshed = 0
    if plan.refresh_hops():
        refreshed = min(max(plan.refresh_numel(buffers.prefetch, itemsize), largest), total)
        refresh_bits *= 1 + 1 / plan.refresh_hops()[-1].size  # received, and sent
    bucket = min(max(buffers.reduce, largest), total)
    reduce_bits = staged = rounded = 0.0
    if hops := plan.reduce_hops():
        lossy = any(hop.codec.codec != "none" for hop in hops)
        # Sent and received: by an all-to-all as much as is sent, by a reduce-scatter a share of it.
        reduce_bits = max(element_bytes(hop.codec, itemsize) for hop in hops) * (2 if lossy else 1 + 1 / hops[0].size)
        staged = 4 / hops[0].size if lossy else 0
    if accumulation > 1 and plan.accumulates and plan.accumulator_bytes < 4:
        # Float32 sums, and what rounding makes of one.
        rounded = (4 * bucket + 16 * largest) / plan.grid.scope_size(plan.gradients_scope)
    unit = min(buffers.module, plan.unit_numel)
    buffers = dataclasses.replace(buffers, module=unit)
    fetched = _fetched(numels, buffers)
    # A request ahead brings all of the layer in which it ends.
    widened = dataclasses.replace(buffers, prefetch=buffers.prefetch + unit if buffers.prefetch else 0)
    decoded_bits = itemsize if plan.decoded or plan.differences else 0
    gathered = sum(1 / hop.size for hop in plan.fetch_hops()[-1:]) + 1
    return [
        *_sharded(shard, itemsize, buffers),
        StateMemory("resident weights", resident, _resident_what(plan)),
        StateMemory(
            "gradient accumulators",
            _accumulator_bytes(plan, numels, shard) if accumulation > 1 else 0,
            _accumulators_what(plan, accumulation),
        ),
        StateMemory("error feedback", residual, "float32 residuals, kept and of this step" if residual else "none"),
        _gradient_buffer(total, itemsize, channels, buffers),
        StateMemory("transient parameters", 0, "none: the weights are whole")
        if plan.decoded
        else _live(numels, itemsize, widened),
        StateMemory(
            "transient gather",
            0 if plan.decoded else round(fetched * gather_bits * gathered),
            "none: the weights are whole" if plan.decoded else f"payload of {fetched:,} elements on their way",
        ),
        StateMemory(
            "transient refresh",
            round(
                refreshed * ((IN_FLIGHT + 1) * refresh_bits + decoded_bits) / plan.grid.scope_size(plan.weights_scope)
            ),
            f"{IN_FLIGHT + 1} messages of {refreshed:,} elements{', one decoded' * bool(decoded_bits)}"
            if refreshed
            else "none",
        ),
        StateMemory(
            "transient reduce",
            round(
                bucket * ((IN_FLIGHT + 1) * reduce_bits + staged + (0 if buffers.contiguous else itemsize))
                + largest * itemsize
                + rounded
            ),
            f"{IN_FLIGHT + 1} buckets of {bucket:,} elements on their way, the largest gradient",
        ),
        _step(shard, buffers),
        _communicators(1 + len(ROLES) * sum(plan.grid.size(tier) > 1 for tier in TIERS), channels),
    ]


def zero3_memory(
    grid: Grid, numels: Sequence[int], *, itemsize: int = 2, channels: int = CHANNELS, buffers: Buffers = Buffers()
) -> list[StateMemory]:
    """The same for plain ZeRO-3."""
    shard = sum(chunk_numel(numel, grid.world_size) for numel in numels)
    total, largest, fetched = sum(numels), max(numels, default=0), _fetched(numels, buffers)
    bucket = min(max(buffers.reduce, largest), total)
    return [
        *_sharded(shard, itemsize, buffers),
        _gradient_buffer(total, itemsize, channels, buffers),
        _live(numels, itemsize, buffers),
        StateMemory("transient gather", fetched * itemsize, f"{fetched:,} elements on their way"),
        StateMemory(
            "transient reduce",
            (bucket * (1 if buffers.contiguous else 2) + largest) * itemsize,
            f"a bucket of {bucket:,} elements on its way, the largest gradient",
        ),
        _step(shard, buffers),
        _communicators(1, channels),
    ]


def _sharded(shard: int, itemsize: int, buffers: Buffers) -> list[StateMemory]:
    """What is sharded over the world under every scheme of stage 3. A float32 master and Adam's two moments make 12 bytes."""
    gradient = buffers.accumulation_itemsize or itemsize
    return [
        StateMemory("primary weights", shard * itemsize, f"{itemsize} bytes over the world"),
        StateMemory("gradient shard", 0, "on the host")
        if buffers.offload
        else StateMemory("gradient shard", shard * gradient, f"{gradient} bytes over the world"),
        StateMemory("optimizer", 0, "on the host")
        if buffers.offload
        else StateMemory("optimizer", shard * 12, "12 bytes over the world"),
    ]


def _gradient_buffer(total: int, itemsize: int, channels: int, buffers: Buffers) -> StateMemory:
    """DeepSpeed's buffer of a bucket's gradients (stage3.py, ``bucket.buffer``), made whole at the start.

    On CPUs memory that no gradient is ever written to takes none.
    """
    numel = buffers.reduce if channels else min(buffers.reduce, total)
    if not buffers.contiguous:
        return StateMemory("gradient buffer", 0, "none: contiguous_gradients is false")
    return StateMemory("gradient buffer", numel * itemsize, f"reduce_bucket_size, {numel:,} elements")


def _fetched(numels: Sequence[int], buffers: Buffers) -> int:
    """Elements on their way: a module's, and those gathered ahead."""
    return min(max(buffers.module, max(numels, default=0)) + buffers.prefetch, sum(numels))


def _live(numels: Sequence[int], itemsize: int, buffers: Buffers) -> StateMemory:
    """Whole parameters. Forward ends with those that backward uses next: behind each lie half as many as until its next use."""
    module = max(buffers.module, max(numels, default=0))
    live = min(module + max(buffers.reuse // 2, buffers.prefetch), sum(numels))
    return StateMemory("transient parameters", live * itemsize, f"{live:,} whole, in use or used again soon")


def _step(shard: int, buffers: Buffers) -> StateMemory:
    """Float32 gradients of a sub-group, and two temporaries of torch's Adam."""
    group = 0 if buffers.offload else min(shard, buffers.sub_group)
    return StateMemory("transient step", 12 * group, "float32 gradients and two temporaries of Adam")


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
    # Without a hop nothing has padded them.
    return plan.accumulator_bytes * (shard * plan.gradient_rows if plan.micro_hops() else sum(numels))


def _accumulators_what(plan: ShardPlan, accumulation: int) -> str:
    if not plan.accumulates:
        return "none: gradients are over the world"
    dtype = "float32" if plan.accumulator_bytes == 4 else "bfloat16"
    return f"{dtype} over the {plan.gradients_scope}" if accumulation > 1 else "none: a step has one micro-step"


def _resident_what(plan: ShardPlan) -> str:
    if not plan.resident:
        return "none: the weights' scope is the whole world"
    if plan.decoded:
        return "decoded, whole on every device"
    codec = plan.resident_codec.codec
    return f"{'uncoded' if codec == 'none' else codec} over the {plan.weights_scope}"
