"""Collectives: what the stage or another engine starts for a bucket in one step, in order, and the bytes by tier.

The stage's are those of the programs that it runs, other engines' those of their `Scheme`. `hzero.plan.step` simulates the
time of the same collectives.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hzero.codecs.formats import CHECKSUM_BYTES, chunk_numel
from hzero.config import (
    DEFAULT_BLOCK_SIZE,
    NET_TIERS,
    PLAIN,
    ROLES,
    CodecConfig,
    CodecsConfig,
    Dimension,
    Role,
    Scope,
    Tier,
    TierCodecs,
    tiers_inside,
    tiers_outside,
)
from hzero.plan.program import Cross, Decode, Encode, Kind, Order, Program, StagePrograms, Sum, all_to_all_program
from hzero.plan.shards import ShardPlan
from hzero.topology import Grid


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
        hierarchical: Whether all-gathers are hierarchical, as in RCCL 2.30 and later; see `hzero.plan.machine.HIERARCHICAL`.
        visible: Devices that a rank sees, which ZeRO++ takes for its node; None: all devices of the node. With ``srun
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
#: What one bucket starts in one step, in order, by when it starts and by micro-step, from 0: ``refresh`` as soon as the step
#: before has changed the weights, ``forward`` and ``backward`` in time for a use of the bucket, ``reduce`` when backward has made
#: its gradients, ``boundary`` when it and the buckets that waited for it have parts that are worth a message, ``after`` when the
#: optimizer has stepped.
Chains: TypeAlias = dict[tuple[str, int], Program]


# ---- in order -----------------------------------------------------------------------------------------------------------


def chains_of(scheme: Scheme | ShardPlan, grid: Grid, accumulation: int) -> Chains:
    """What the stage or another engine starts for one bucket in one step."""
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
        # Whole gradients, of which ZeRO's ranks keep their part (use_multi_rank_bucket_allreduce, on by default in 0.19).
        micros = range(accumulation) if scheme.stage == 2 else [last]
        chains = {("reduce", micro): reduced for micro in micros}
        if scheme.engine == "deepspeed":
            chains["after", last] = _gather("world", grid)
        return chains
    codec = CodecConfig(codec="int8", block_size=DEFAULT_BLOCK_SIZE) if scheme.quantized else PLAIN
    far = _gather(scheme.shard, grid, codec)
    near = _gather(scheme.hpz or scheme.reshard or scheme.shard, grid, codec)
    reduce = whole = _zeropp_reduce(scheme, grid) if scheme.quantized else _reduce("reduce_scatter", scheme.shard, grid)
    if outside := tuple(tier for tier in tiers_outside(scheme.shard) if grid.size(tier) > 1):
        replicas = grid.world_size // grid.scope_size(scheme.shard)
        whole = Program((*reduce.steps, Cross("gradients", "all_reduce", outside, replicas, PLAIN, replicas)))
    for micro in range(accumulation):
        # hpZ's copy is made anew in a step's first forward (DeepSpeed 0.19).
        chains["forward", micro] = near if scheme.hpz and micro else far
        chains["backward", micro] = near
        chains["reduce", micro] = whole if micro == last else reduce
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
        codec: Codec of the messages; several names with exceptions.
        wire_bytes: Bytes received, scales and record padding included.
        raw_bytes: The same with codec ``none``, without padding.
        crossings: How often per step a whole set of parameters crosses the tier; with exceptions the most of a parameter.
        used: Whether the tier has more than one rank; its codec means nothing otherwise.
        checksum_bytes: Bytes of the checksums that come with each collective, where messages carry some. They are in no other
            number, nor in the wire log, since a plan does not know how many collectives share a step's bytes.
    """

    role: Role | Dimension
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

    For the stage these are exactly the bytes that its wire log counts, and all ranks receive the same. Another engine's are
    averages over the ranks: its flat rings go node by node and package by package (`ring_links`), as RCCL and NCCL build
    them, so those ranks where a ring enters a node receive everything over the node tier and the others nothing. Several
    rings, each with its part of the bytes, spread this. Averages times the ranks of a node are what enters a node.

    Args:
        scheme: The stage's shard plan, or another engine whose collectives are rings without codecs.
        grid: The machine.
        numels: Elements of each trainable parameter.
        itemsize: Bytes of one weight, and of one gradient on a hop with codec ``none`` (2 for bf16 and fp16).
        accumulation: Micro-steps per step.
        fetches: Gathers of every parameter per micro-step, on average: forward and backward. A parameter that is used
            again soon is kept by DeepSpeed (``stage3_max_reuse_distance``), so small models fetch less.
        names: As of `ShardPlan.parts`.

    Returns:
        One entry per role and tier, weights first, tiers innermost first; whole bytes.
    """
    stage = scheme if isinstance(scheme, ShardPlan) else None
    parts = stage.parts(numels, names) if stage else [(scheme, numels)]
    sums = {(role, tier): [0.0, 0.0] for role in ROLES for tier in grid.tiers}  # on the wire, raw
    times = {place: [0.0] * len(parts) for place in sums}
    for number, (part, of_part) in enumerate(parts):
        chunks = [chunk_numel(numel, grid.world_size) for numel in of_part]
        for (phase, _), program in chains_of(part, grid, accumulation).items():
            often = fetches - 1 if phase == "backward" else 1
            for crossing in program.crossings:
                raw = crossing.rows * sum(chunks) * itemsize
                wire = crossing.message_bytes(chunks, itemsize) if stage else raw  # records, with padding
                links = ring_links([grid.size(tier) for tier in crossing.tiers])
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


def exchange_bytes(grid: Grid, codecs: TierCodecs, parts: Iterable[int], itemsize: int) -> dict[Tier, int]:
    """Bytes that a rank receives in all-to-alls over a grid, by tier.

    Args:
        grid: Of the ranks that exchange.
        codecs: Of the messages.
        parts: Elements for each rank, of every all-to-all.
        itemsize: Bytes of an element.
    """
    if grid.world_size == 1:
        return {}
    config = CodecsConfig(weights=codecs, gradients=codecs)
    crossings = all_to_all_program(ShardPlan(grid, 0, "world", "world", config)).crossings
    sizes = Counter(parts)
    return {
        cross.tiers[0]: round(
            cross.received * sum(cross.message_bytes([part], itemsize) * count for part, count in sizes.items())
        )
        for cross in crossings
    }


def muon_traffic(plan: ShardPlan, matrices: Sequence[int], itemsize: int) -> list[TierTraffic]:
    """Bytes of one optimizer step of Muon: each matrix to one rank and back, as `hzero.deepspeed.muon` sends it.

    Args:
        plan: The shard plan.
        matrices: Elements of each matrix.
        itemsize: Bytes of an element on the wire.
    """
    codecs, grid = plan.codecs.optimizer, plan.grid
    chunks = sorted((chunk_numel(numel, grid.world_size) for numel in matrices), reverse=True)
    rounds = [chunk for chunk in chunks[:: grid.world_size] for _ in ("there", "back")]  # the longest of a round counts
    raw = sum(rounds) * grid.world_size * itemsize
    return [
        TierTraffic("optimizer", tier, codecs[tier].codec, wire, raw - raw // grid.size(tier), 2, used=True)
        for tier, wire in exchange_bytes(grid, codecs, rounds, itemsize).items()
        if wire
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
    """Minimum bytes into one node per step under other schemes: each byte that a node lacks enters it once.

    With M the bytes of the weights, A the micro-steps and f = (nodes - 1) / nodes: ZeRO-3 gathers twice and reduces once
    per micro-step, 3 A M f. Its hpZ serves all gathers but the first of a step from the node, (1 + A) M f. ZeRO++
    (arXiv 2306.10209) sends 8 and 4 bits where these two send 16, (0.5 + 0.25 A) M f. FSDP2 sends as often as ZeRO-3, and
    HSDP over the node reduces gradients across nodes once per step: an all-reduce brings 2 M f. Flat rings bring
    (ranks - 1) / ranks instead of f (`step_traffic`).
    """
    m, f, a = sum(numels) * itemsize, (grid.nodes - 1) / grid.nodes, accumulation
    deepspeed = {"ZeRO-3": 3 * a * m * f, "hpZ": (1 + a) * m * f, "ZeRO++": (0.5 + 0.25 * a) * m * f * 2 / itemsize}
    return {**deepspeed, "FSDP2": 3 * a * m * f, "HSDP, node": 2 * m * f}
