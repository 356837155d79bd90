"""Collectives: what the stage or another engine starts for a bucket in one step, in order, and the bytes by tier.

The stage's are those of the programs that it runs, other engines' those of their `Scheme`. `hzero.plan.step` simulates the
time of the same collectives.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hzero.codecs.formats import chunk_numel
from hzero.config import (
    DEFAULT_BLOCK_SIZE,
    NET_TIERS,
    PLAIN,
    ROLES,
    TIERS,
    CodecConfig,
    CodecName,
    Role,
    Scope,
    Tier,
    tiers_inside,
    tiers_outside,
)
from hzero.plan.program import Cross, Decode, Encode, Kind, Order, Program, StagePrograms, Sum
from hzero.plan.shards import ShardPlan
from hzero.topology import Grid

#: When a chain starts: ``refresh`` as soon as the step before has changed the weights, ``forward`` and ``backward`` in time
#: for a use of the bucket, ``reduce`` when backward has made its gradients, ``after`` when the optimizer has stepped.
Phase: TypeAlias = Literal["refresh", "forward", "backward", "reduce", "after"]
#: Bytes of a checksum, one for each message of a peer.
CHECKSUM_BYTES = 16


@dataclass(frozen=True)
class Scheme:
    """Another engine than the stage, with flat collectives.

    Attributes:
        engine: ``ddp``; ``fsdp``, FSDP2 and HSDP; ``deepspeed``, ZeRO-1 to ZeRO-3 and ZeRO++.
        stage: Of DeepSpeed.
        shard: Scope over which FSDP shards; replicated across the rest.
        reshard: Scope over which FSDP keeps weights sharded from forward to backward; None: ``shard``.
        hpz: Scope of DeepSpeed's secondary copy; None for none.
        quantized: Whether weights travel in 8 and gradients in 4 bits, as in ZeRO++.
        visible: Devices that a rank sees, which ZeRO++ takes for its node; None: all devices of the node. With ``srun
            --gpus-per-task=1``, as on Frontier, a rank sees one.
    """

    engine: Literal["ddp", "fsdp", "deepspeed"]
    stage: Literal[1, 2, 3] = 3
    shard: Scope = "world"
    reshard: Scope | None = None
    hpz: Scope | None = None
    quantized: bool = False
    visible: int | None = None


@dataclass(frozen=True)
class Chain:
    """What one bucket starts at one time.

    Attributes:
        phase: When it starts.
        micro: Micro-step, from 0.
        program: Its steps.
    """

    phase: Phase
    micro: int
    program: Program


# ---- in order -----------------------------------------------------------------------------------------------------------


def chains_of(scheme: Scheme | ShardPlan, grid: Grid, accumulation: int) -> list[Chain]:
    """What the stage or another engine starts for one bucket in one step."""
    if isinstance(scheme, ShardPlan):
        return _stage_chains(StagePrograms.of(scheme), accumulation)
    if scheme.engine == "fsdp":
        return _fsdp_chains(scheme, grid, accumulation)
    last, reduced = accumulation - 1, _reduce("all_reduce", "world", grid)
    if scheme.engine == "ddp":
        return [Chain("reduce", last, reduced)]
    if scheme.stage < 3:
        # Whole gradients, of which every rank keeps its part (use_multi_rank_bucket_allreduce, on by default in 0.19).
        reducing = range(accumulation) if scheme.stage == 2 else [last]
        after = Chain("after", last, _gather("world", grid))
        return [*(Chain("reduce", micro, reduced) for micro in reducing), after]
    weights = CodecConfig(codec="int8", block_size=DEFAULT_BLOCK_SIZE) if scheme.quantized else PLAIN
    far = _gather("world", grid, weights)
    near = _gather(scheme.hpz, grid, weights) if scheme.hpz else far
    reduced = _zeropp_reduce(scheme, grid) if scheme.quantized else _reduce("reduce_scatter", "world", grid)
    chains = []
    for micro in range(accumulation):
        # hpZ's copy is made anew in a step's first forward (DeepSpeed 0.19).
        chains.append(Chain("forward", micro, far if micro == 0 else near))
        chains += [Chain("backward", micro, near), Chain("reduce", micro, reduced)]
    return chains


def _stage_chains(programs: StagePrograms, accumulation: int) -> list[Chain]:
    chains = [Chain("refresh", 0, programs.refresh)] if programs.refresh.steps else []
    whole = Program(programs.micro.steps + programs.boundary.steps)
    for micro in range(accumulation):
        chains += [Chain("forward", micro, programs.fetch), Chain("backward", micro, programs.fetch)]
        reduction = whole if micro == accumulation - 1 else programs.micro
        if reduction.steps:
            chains.append(Chain("reduce", micro, reduction))
    return chains


def _fsdp_chains(scheme: Scheme, grid: Grid, accumulation: int) -> list[Chain]:
    chains = []
    gather, again = _gather(scheme.shard, grid), _gather(scheme.reshard or scheme.shard, grid)
    reduce = whole = _reduce("reduce_scatter", scheme.shard, grid)
    if outside := tuple(tier for tier in tiers_outside(scheme.shard) if grid.size(tier) > 1):
        replicas = grid.world_size // grid.scope_size(scheme.shard)
        whole = Program((*reduce.steps, Cross("gradients", "all_reduce", outside, replicas, PLAIN, replicas)))
    for micro in range(accumulation):
        chains += [Chain("forward", micro, gather), Chain("backward", micro, again)]
        chains.append(Chain("reduce", micro, whole if micro == accumulation - 1 else reduce))
    return chains


def _zeropp_reduce(scheme: Scheme, grid: Grid) -> Program:
    """ZeRO++ reduces by an all-to-all inside what it takes for a node and one across (arXiv 2306.10209)."""
    codec = CodecConfig(codec="int4", block_size=DEFAULT_BLOCK_SIZE)
    if scheme.visible == 1:  # every device is a node of its own: one all-to-all over the world
        return _reduce("all_to_all", "world", grid, codec)
    inside = _reduce("all_to_all", "node", grid, codec)
    if grid.nodes == 1:
        return inside
    between = tuple(tier for tier in NET_TIERS if grid.size(tier) > 1)
    across = Cross("gradients", "all_to_all", between, grid.nodes, codec, grid.nodes)
    return Program((*inside.steps, Encode(codec, Order.of_rows(grid.nodes)), across, Sum(codec, grid.nodes, 1)))


def _gather(scope: Scope, grid: Grid, codec: CodecConfig = PLAIN) -> Program:
    """An all-gather over all ranks of a scope, whose ranks together hold all shards of the world."""
    ranks, tiers = grid.scope_size(scope), _tiers(scope, grid)
    rows = grid.world_size // ranks
    cross = Cross("weights", "all_gather", tiers, ranks, codec, rows)
    encoded = () if codec is PLAIN else (Encode(codec, Order.of_rows(rows)),)
    return Program((*encoded, cross, Decode(codec, Order.of_rows(grid.world_size))))


def _reduce(kind: Kind, scope: Scope, grid: Grid, codec: CodecConfig = PLAIN) -> Program:
    """A reduction of whole gradients over all ranks of a scope."""
    ranks, rows = grid.scope_size(scope), grid.world_size
    cross = Cross("gradients", kind, _tiers(scope, grid), ranks, codec, rows)
    summed = (Sum(codec, ranks, rows // ranks),) if kind == "all_to_all" else ()
    return Program((Encode(codec, Order.of_rows(rows)), cross, *summed))


def _tiers(scope: Scope, grid: Grid) -> tuple[Tier, ...]:
    return tuple(tier for tier in tiers_inside(scope) if grid.size(tier) > 1)


# ---- bytes --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TierTraffic:
    """Bytes that enter one rank over one tier for one role, in one optimizer step.

    Attributes:
        role: The kind of state; of activations the parallel dimension.
        tier: The tier.
        codec: Codec of the messages.
        wire_bytes: Bytes received, scales and record padding included.
        raw_bytes: The same with codec ``none``, without padding.
        crossings: How often per step a whole set of parameters crosses the tier.
        used: Whether the tier has more than one rank; its codec means nothing otherwise.
        checksum_bytes: Bytes of the checksums that come with each collective, where messages carry some. They are in no other
            number, nor in the wire log, since a plan does not know how many collectives share a step's bytes.
    """

    role: Role
    tier: Tier
    codec: CodecName
    wire_bytes: int
    raw_bytes: int
    crossings: int
    used: bool
    checksum_bytes: int = 0


def step_traffic(
    scheme: Scheme | ShardPlan,
    grid: Grid,
    numels: Sequence[int],
    *,
    itemsize: int = 2,
    comm_itemsize: int | None = None,
    accumulation: int = 1,
    fetches: float = 2,
) -> list[TierTraffic]:
    """Bytes of one optimizer step.

    For the stage these are exactly the bytes that its wire log counts, and all ranks receive the same. Another engine's are
    averages over the ranks: its flat rings go node by node and package by package (`ring_links`), as RCCL and NCCL build
    them, so those ranks where a ring enters a node receive everything over the node tier and the others nothing. Several
    rings, each with its part of the bytes, spread this. Averages times the ranks of a node are what enters a node.

    Args:
        scheme: The stage's shard plan, or another engine whose collectives are rings without codecs.
        grid: The machine.
        numels: Elements of each trainable parameter.
        itemsize: Bytes of one weight (2 for bf16 and fp16).
        comm_itemsize: Bytes of one gradient on a hop with codec ``none``; ``itemsize`` if not given.
        accumulation: Micro-steps per step.
        fetches: Gathers of every parameter per micro-step, on average: forward and backward. A parameter that is used
            again soon is kept by DeepSpeed (``stage3_max_reuse_distance``), so small models fetch less.

    Returns:
        One entry per role and tier, weights first, tiers innermost first; whole bytes.
    """
    stage = scheme if isinstance(scheme, ShardPlan) else None
    itemsizes: dict[Role, int] = {"weights": itemsize, "gradients": comm_itemsize or itemsize}
    chunks = [chunk_numel(numel, grid.world_size) for numel in numels]
    wire: dict[tuple[Role, Tier], float] = defaultdict(float)
    raw: dict[tuple[Role, Tier], float] = defaultdict(float)
    crossings: dict[tuple[Role, Tier], float] = defaultdict(float)
    for chain in chains_of(scheme, grid, accumulation):
        times = fetches - 1 if chain.phase == "backward" else 1
        for crossing in chain.program.crossings:
            size = itemsizes[crossing.role]
            links = ring_links([grid.size(tier) for tier in crossing.tiers])
            for tier, count in zip(crossing.tiers, links):
                received = crossing.received * count / crossing.ranks * times
                elements = crossing.rows * sum(chunks) * size
                raw[crossing.role, tier] += elements * received
                # Only the stage's messages are records, with padding.
                wire[crossing.role, tier] += (crossing.message_bytes(chunks, size) if stage else elements) * received
                crossings[crossing.role, tier] += times
    return [
        TierTraffic(
            role=role,
            tier=tier,
            codec=stage.codecs[role][tier].codec if stage else "none",
            wire_bytes=round(wire[role, tier]),
            raw_bytes=round(raw[role, tier]),
            crossings=round(crossings[role, tier]),
            used=grid.size(tier) > 1,
            checksum_bytes=CHECKSUM_BYTES * (grid.size(tier) - 1) if stage and stage.checksum else 0,
        )
        for role in ROLES
        for tier in grid.tiers
    ]


def ring_links(sizes: Sequence[int]) -> list[int]:
    """How many links of every level a ring has that visits the units of each level one after the other.

    A ring over 2 nodes of 4 packages of 2 devices, ``sizes`` (2, 4, 2), has 8 links inside packages, 6 between the packages
    of a node, and 2 between nodes: it enters and leaves a node once, whatever the number of ranks on it.

    Args:
        sizes: Units of each level, innermost first.
    """
    links, units = [], math.prod(sizes)
    closing = max((level for level, size in enumerate(sizes) if size > 1), default=None)
    for level, size in enumerate(sizes):
        units //= size
        links.append(units * (size - 1) + (level == closing))
    return links


def node_bytes(traffic: Sequence[TierTraffic], grid: Grid) -> int:
    """Bytes that enter one node per step: those of the tiers between nodes, of both roles and all ranks of the node."""
    return sum(row.wire_bytes for row in traffic if row.tier in NET_TIERS) * grid.scope_size("node")


def schemes_node_bytes(
    grid: Grid, numels: Sequence[int], *, itemsize: int = 2, accumulation: int = 1
) -> dict[str, float]:
    """Minimum bytes into one node per step under each scheme of DeepSpeed: each byte that a node lacks enters it once.

    With M the bytes of the weights, A the micro-steps and f = (nodes - 1) / nodes: ZeRO-3 gathers twice and reduces once
    per micro-step, 3 A M f. Its hpZ serves all gathers but the first of a step from the node, (1 + A) M f. ZeRO++
    (arXiv 2306.10209) sends 8 and 4 bits where these two send 16, (0.5 + 0.25 A) M f. Flat rings bring (ranks - 1) / ranks
    instead of f (`step_traffic`).
    """
    m, f, a = sum(numels) * itemsize, (grid.nodes - 1) / grid.nodes, accumulation
    return {"ZeRO-3": 3 * a * m * f, "hpZ": (1 + a) * m * f, "ZeRO++": (0.5 + 0.25 * a) * m * f * 2 / itemsize}


def link_seconds(traffic: Sequence[TierTraffic], rates_gb_s: Mapping[str, float | None]) -> dict[Tier, float]:
    """Seconds per step that each tier's links need by their bandwidth alone; tiers without a rate are left out.

    All bytes that cross a tier, over the bandwidth of all its links. Both sides of the division are per device: the
    average over the devices, and a device's share of the links. On 8 devices that share NICs of 100 GB/s, 12.5 GB/s are a
    device's share, and a flat ring that brings M bytes into the node has brought M / 8 per device.

    Latency, computation and overlap are left out. The result is a lower bound if no link of the tier carries more than its
    rate; it is reached if the bytes are spread evenly over the links.
    """
    return {
        tier: sum(row.wire_bytes for row in traffic if row.tier == tier) / (rate * 1e9)
        for tier in TIERS
        if (rate := rates_gb_s.get(tier))
    }
