"""Collectives of one bucket in one step, of the stage or another engine, in order, and their bytes by tier.

The stage's collectives come from the programs that it runs, and another engine's from its `Scheme`.
`hzero.tools.plan.step` simulates the time of the same collectives.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hzero import config
from hzero.codecs.formats import CHECKSUM_BYTES, chunk_numel
from hzero.config import PLAIN, CodecConfig, Scope, Tier
from hzero.program.program import Cross, Decode, Encode, Kind, Order, Program, StagePrograms, Sum, all_to_all_program
from hzero.program.shards import ShardPlan
from hzero.topology import Grid


@dataclass(frozen=True)
class Scheme:
    """An engine other than the stage, with flat collectives.

    Attributes:
        engine: ``ddp``; ``fsdp`` for FSDP2 and HSDP; ``deepspeed`` for ZeRO-1 to ZeRO-3 and ZeRO++.
        stage: ZeRO stage of DeepSpeed.
        shard: Scope over which FSDP shards; replicated across the rest.
        reshard: Scope over which FSDP keeps weights sharded from forward to backward; None: ``shard``.
        hpz: Scope of DeepSpeed's secondary copy; None for none.
        quantized: Whether weights are sent in 8 bits and gradients in 4, as in ZeRO++.
        hierarchical: Whether all-gathers are hierarchical, as in RCCL 2.30 and later (`hzero.tools.plan.machine.HIERARCHICAL`).
        visible: Devices that a rank sees. ZeRO++ treats them as its node. None: all devices of the node. With ``srun
            --gpus-per-task=1``, as on Frontier, a rank sees one.
    """

    engine: Literal["ddp", "fsdp", "deepspeed"]
    stage: Literal[1, 2, 3] = 3
    shard: Scope = "world"
    reshard: Scope | None = None
    hpz: Scope | None = None
    quantized: bool = False
    hierarchical: bool = False
    visible: int | None = None


#: Other engines that predictions compare with.
OTHERS = {
    "DDP": Scheme("ddp"),
    "FSDP2": Scheme("fsdp"),
    "FSDP2, RCCL 2.30": Scheme("fsdp", hierarchical=True),
    "HSDP, node": Scheme("fsdp", shard="node"),
    "HSDP, package": Scheme("fsdp", shard="package"),
    "ZeRO-1": Scheme("deepspeed", stage=1),
    "ZeRO-2": Scheme("deepspeed", stage=2),
    "ZeRO-3": Scheme("deepspeed"),
    "ZeRO-3, RCCL 2.30": Scheme("deepspeed", hierarchical=True),
    "hpZ": Scheme("deepspeed", hpz="node"),
    "ZeRO++": Scheme("deepspeed", hpz="node", quantized=True),
}
#: Programs of one bucket in one step, in order, by phase and micro-batch, from 0. ``refresh`` starts when the previous step has
#: changed the weights, ``forward`` and ``backward`` before a use of the bucket, and ``reduce`` when backward has made its
#: gradients. ``boundary`` starts when the waiting buckets together fill a message, and ``after`` when the optimizer has stepped.
Chains: TypeAlias = dict[tuple[str, int], Program]


# ---- in order -----------------------------------------------------------------------------------------------------------


def chains_of(scheme: Scheme | ShardPlan, grid: Grid, accumulation: int) -> Chains:
    """The programs of one bucket in one step, of the stage or another engine."""
    chains: Chains = {}
    last = accumulation - 1
    if isinstance(scheme, ShardPlan):
        programs = StagePrograms.of(scheme)
        chains["refresh", 0] = programs.refresh
        whole = Program(programs.micro.steps + programs.boundary.steps)
        for micro in range(accumulation):
            chains["forward", micro] = chains["backward", micro] = programs.unshard
            chains["reduce", micro] = whole if micro == last else programs.micro
        chains["boundary", last] = programs.outermost
        return {key: program for key, program in chains.items() if program.steps}
    if scheme.engine == "ddp" or scheme.stage < 3:
        reduced = _reduce("all_reduce", "world", grid)
        # Whole gradients, of which each rank of ZeRO keeps its part (use_multi_rank_bucket_allreduce, the default in 0.19).
        micros = range(accumulation) if scheme.stage == 2 else [last]
        chains = {("reduce", micro): reduced for micro in micros}
        if scheme.engine == "deepspeed":
            chains["after", last] = _gather("world", grid)
        return chains
    codec = CodecConfig(codec="int8", block_size=config.DEFAULT_BLOCK_SIZE) if scheme.quantized else PLAIN
    far = _gather(scheme.shard, grid, codec)
    near = _gather(scheme.hpz or scheme.reshard or scheme.shard, grid, codec)
    reduce = whole = _zeropp_reduce(scheme, grid) if scheme.quantized else _reduce("reduce_scatter", scheme.shard, grid)
    if outside := tuple(tier for tier in config.tiers_outside(scheme.shard) if grid.size(tier) > 1):
        replicas = grid.world_size // grid.scope_size(scheme.shard)
        whole = Program((*reduce.steps, Cross("gradients", "all_reduce", outside, replicas, PLAIN, replicas)))
    for micro in range(accumulation):
        # hpZ's copy is rebuilt in the first forward of a step (DeepSpeed 0.19).
        chains["forward", micro] = near if scheme.hpz and micro else far
        chains["backward", micro] = near
        chains["reduce", micro] = whole if micro == last else reduce
    return chains


def _zeropp_reduce(scheme: Scheme, grid: Grid) -> Program:
    """ZeRO++ reduces by an all-to-all inside its node, and by one between nodes (arXiv 2306.10209)."""
    codec = CodecConfig(codec="int4", block_size=config.DEFAULT_BLOCK_SIZE)
    if scheme.visible == 1:  # every device counts as a node: one all-to-all over the world
        return _reduce("all_to_all", "world", grid, codec)
    inside = _reduce("all_to_all", "node", grid, codec)
    if grid.nodes == 1:
        return inside
    between = tuple(tier for tier in config.NET_TIERS if grid.size(tier) > 1)
    across = Cross("gradients", "all_to_all", between, grid.nodes, codec, grid.nodes)
    return Program((*inside.steps, Encode(codec, Order.of_rows(grid.nodes)), across, Sum(codec, grid.nodes, 1)))


def _gather(scope: Scope, grid: Grid, codec: CodecConfig = PLAIN) -> Program:
    """An all-gather over all ranks of a scope, which together have all shards of the world."""
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
    return tuple(tier for tier in config.tiers_inside(scope) if grid.size(tier) > 1)


# ---- bytes --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TierTraffic:
    """Bytes that enter one rank over one tier for one role, in one optimizer step.

    Attributes:
        role: The kind of state, or the parallel dimension of activations.
        tier: The tier.
        codec: Codec of the messages; with exceptions, several names.
        wire_bytes: Bytes received, scales and record padding included.
        raw_bytes: The same with codec ``none``, without padding.
        crossings: Number of times per step that all parameters cross the tier; with exceptions, the maximum over parameters.
        used: Whether the tier has more than one rank; its codec means nothing otherwise.
        checksum_bytes: Bytes of the checksums of each collective, if messages have checksums. No other number, nor the wire
            log, includes them, since the plan cannot tell how many collectives share the bytes of a step.
    """

    role: config.Role | config.Dimension
    tier: Tier
    codec: str
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
    accumulation: int = 1,
    fetches: float = 2,
    names: Sequence[Sequence[str]] = (),
) -> list[TierTraffic]:
    """Bytes of one optimizer step.

    For the stage these are exactly the bytes of its wire log, and equal on all ranks. For another engine they are averages over
    the ranks. RCCL and NCCL build flat rings node by node and package by package (`ring_links`). The rank at which a ring
    enters a node receives everything over the node tier, and the other ranks nothing. Several rings, each with its part of
    the bytes, spread this. The average times the ranks of a node is the number of bytes that enter a node.

    Args:
        scheme: The stage's shard plan, or another engine whose collectives are rings without codecs.
        grid: The machine.
        numels: Elements of each trainable parameter.
        itemsize: Bytes of one weight, and of one gradient on a hop with codec ``none`` (2 for bf16 and fp16).
        accumulation: Micro-batches per step.
        fetches: Average gathers of a parameter per micro-batch; 2 for forward and backward. DeepSpeed keeps a parameter that
            is used again soon (``stage3_max_reuse_distance``), so small models have fewer.
        names: See `ShardPlan.parts`.

    Returns:
        One entry per role and tier, weights first, tiers innermost first; whole bytes.
    """
    stage = scheme if isinstance(scheme, ShardPlan) else None
    parts = stage.parts(numels, names) if stage else [(scheme, numels)]
    sums = {(role, tier): [0.0, 0.0] for role in config.ROLES for tier in grid.tiers}  # on the wire, raw
    times = {place: [0.0] * len(parts) for place in sums}
    for number, (part, of_part) in enumerate(parts):
        own = part.grid if isinstance(part, ShardPlan) else grid
        chunks = [chunk_numel(numel, own.world_size) for numel in of_part]
        for (phase, _), program in chains_of(part, own, accumulation).items():
            often = fetches - 1 if phase == "backward" else 1
            for crossing in program.crossings:
                raw = crossing.rows * sum(chunks) * itemsize
                wire = crossing.message_bytes(chunks, itemsize) if stage else raw  # records, with padding
                links = ring_links([own.size(tier) for tier in crossing.tiers])
                for tier, count in zip(crossing.tiers, links):
                    received, place = crossing.received * count / crossing.ranks * often, (crossing.role, tier)
                    sums[place] = [sums[place][0] + wire * received, sums[place][1] + raw * received]
                    times[place][number] += often
    rows = []
    for (role, tier), found in sums.items():
        codecs = [part.codecs[role][tier].codec if isinstance(part, ShardPlan) else PLAIN.codec for part, _ in parts]
        checksum = CHECKSUM_BYTES * (grid.size(tier) - 1) if stage and stage.checksum else 0
        wire, raw, crossings = map(round, (*found, max(times[role, tier])))
        codec = ", ".join(dict.fromkeys(codecs))
        rows.append(TierTraffic(role, tier, codec, wire, raw, crossings, grid.size(tier) > 1, checksum))
    return rows


def exchange_program(grid: Grid, codecs: config.TierCodecs) -> Program:
    """The program of an all-to-all over a grid; empty for one rank. ``codecs`` are the codecs of messages, by tier."""
    plan = ShardPlan(grid, 0, "world", "world", config.CodecsConfig(weights=codecs, gradients=codecs))
    return all_to_all_program(plan) if grid.world_size > 1 else Program(())


def exchange_bytes(grid: Grid, codecs: config.TierCodecs, parts: Iterable[int], itemsize: int) -> dict[Tier, int]:
    """Bytes that a rank receives in all-to-alls over a grid, by tier.

    Args:
        grid: Grid of the ranks that exchange.
        codecs: Codecs of the messages, by tier.
        parts: Elements for each rank, of every all-to-all.
        itemsize: Bytes of an element.
    """
    crossings = exchange_program(grid, codecs).crossings
    sizes = Counter(parts)
    return {
        cross.tiers[0]: round(
            cross.received * sum(cross.message_bytes([part], itemsize) * count for part, count in sizes.items())
        )
        for cross in crossings
    }


def token_traffic(plan: ShardPlan, group: Grid, tokens: int, width: int, size: int, times: int) -> list[TierTraffic]:
    """Bytes of one optimizer step of tokens on their way to experts and back, if the router spreads them evenly.

    Args:
        plan: The shard plan.
        group: Grid of the ranks that exchange tokens.
        tokens: Tokens of an exchange that a rank sends to every rank, itself included; one for each expert of a token.
        width: Elements of a token.
        size: Bytes of an element.
        times: Exchanges per step.
    """
    found, inside = list[TierTraffic](), 1
    for tier in group.crossed:
        codec, rows = plan.codecs.expert[tier], tokens * inside * (group.size(tier) - 1)
        wire, raw = codec.format.message_bytes((width,), rows, size), rows * width * size
        found.append(TierTraffic("expert", tier, codec.codec, times * wire, times * raw, times, used=True))
        inside *= group.size(tier)
    return found


def ring_links(sizes: Sequence[int]) -> list[int]:
    """Number of links on every level of a ring that visits the units of each level one after the other.

    A ring over 2 nodes of 4 packages of 2 devices, ``sizes`` (2, 4, 2), has 8 links inside packages, 6 between packages of a
    node, and 2 between nodes. It enters and leaves a node once, whatever the number of its ranks.

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
    """Bytes that enter one node per step, over the tiers between nodes, for all ranks of the node."""
    return sum(row.wire_bytes for row in traffic if row.tier in config.NET_TIERS) * grid.scope_size("node")


def schemes_node_bytes(
    grid: Grid, numels: Sequence[int], *, itemsize: int = 2, accumulation: int = 1
) -> dict[str, float]:
    """Minimum bytes into one node per step under other schemes. Each byte that a node lacks enters it once.

    M is the bytes of the weights, A the micro-batches, and f = (nodes - 1) / nodes. ZeRO-3 gathers twice and reduces once per
    micro-batch: 3 A M f. With hpZ only the first gather of a step leaves the node: (1 + A) M f. ZeRO++ (arXiv 2306.10209) sends
    8 and 4 bits instead of 16: (0.5 + 0.25 A) M f. FSDP2 sends as often as ZeRO-3. HSDP over the node all-reduces gradients
    between nodes once per step: 2 M f. Flat rings have the factor (ranks - 1) / ranks instead of f (`step_traffic`).
    """
    m, f, a = sum(numels) * itemsize, (grid.nodes - 1) / grid.nodes, accumulation
    deepspeed = {"ZeRO-3": 3 * a * m * f, "hpZ": (1 + a) * m * f, "ZeRO++": (0.5 + 0.25 * a) * m * f * 2 / itemsize}
    return {**deepspeed, "FSDP2": 3 * a * m * f, "HSDP, node": 2 * m * f}
