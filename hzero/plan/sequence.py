"""Sequence: the collectives that a bucket of parameters starts in one step, in order. No process group, no tensor.

The stage's are read off the shard plan, those of other engines off their `Scheme`. `hzero.plan.traffic` adds up the
bytes of these chains, and `hzero.plan` simulates their time: both see the same sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from hzero.config import (
    DEFAULT_BLOCK_SIZE,
    NET_TIERS,
    PLAIN,
    CodecConfig,
    Role,
    Scope,
    tiers_inside,
    tiers_outside,
)
from hzero.plan.program import Cross, Kind, Program, gather_program, reduce_program
from hzero.plan.shards import ShardPlan
from hzero.topology import Grid

#: When a chain starts: ``refresh`` as soon as the step before has changed the weights, ``forward`` and ``backward`` in time
#: for a use of the bucket, ``reduce`` when backward has made its gradients, ``after`` when the optimizer has stepped.
Phase: TypeAlias = Literal["refresh", "forward", "backward", "reduce", "after"]


@dataclass(frozen=True)
class Chain:
    """Crossings of one bucket, one after the other.

    Attributes:
        phase: When it starts.
        micro: Micro-step, from 0.
        crossings: The collectives.
    """

    phase: Phase
    micro: int
    crossings: tuple[Cross, ...]


def stage_chains(plan: ShardPlan, accumulation: int) -> list[Chain]:
    """What the stage starts for one bucket in one step."""
    chains = []
    refresh, hops = plan.refresh_hops(), plan.gather_hops()
    if refresh:
        chains.append(Chain("refresh", 0, gather_program(plan, refresh, left=PLAIN).crossings))
        fetch = gather_program(plan, plan.fetch_hops(), held=plan.resident_codec, rows=plan.resident_rows)
    else:
        fetch = gather_program(plan, hops) if hops else Program(())
    micro, boundary = plan.micro_hops(), plan.boundary_hops()
    inside = reduce_program(plan, micro, plan.grid.world_size, shard_order=True).crossings
    outside = reduce_program(plan, boundary, plan.gradient_rows, shard_order=not micro).crossings
    for step in range(accumulation):
        chains += [Chain(phase, step, fetch.crossings) for phase in ("forward", "backward")]
        reduction = inside + outside if step == accumulation - 1 else inside
        if reduction:
            chains.append(Chain("reduce", step, reduction))
    return chains


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


def scheme_chains(scheme: Scheme, grid: Grid, accumulation: int) -> list[Chain]:
    """What another engine starts for one bucket in one step."""
    last = accumulation - 1
    if scheme.engine == "ddp":
        return [Chain("reduce", last, (_flat("gradients", "all_reduce", "world", grid),))]
    if scheme.engine == "fsdp":
        return _fsdp_chains(scheme, grid, accumulation)
    if scheme.stage < 3:
        reducing = range(accumulation) if scheme.stage == 2 else [last]
        # Whole gradients, of which every rank keeps its part (use_multi_rank_bucket_allreduce, on by default in 0.19).
        reduce = _flat("gradients", "all_reduce", "world", grid)
        gather = _flat("weights", "all_gather", "world", grid)
        return [*(Chain("reduce", micro, (reduce,)) for micro in reducing), Chain("after", last, (gather,))]
    weights = CodecConfig(codec="int8", block_size=DEFAULT_BLOCK_SIZE) if scheme.quantized else PLAIN
    far = replace(_flat("weights", "all_gather", "world", grid), codec=weights)
    near = replace(_flat("weights", "all_gather", scheme.hpz, grid), codec=weights) if scheme.hpz else far
    chains = []
    for micro in range(accumulation):
        # hpZ's copy is made anew in a step's first forward (DeepSpeed 0.19).
        chains.append(Chain("forward", micro, (far if micro == 0 else near,)))
        chains.append(Chain("backward", micro, (near,)))
        chains.append(Chain("reduce", micro, _deepspeed_reductions(scheme, grid)))
    return chains


def _fsdp_chains(scheme: Scheme, grid: Grid, accumulation: int) -> list[Chain]:
    chains = []
    gather = _flat("weights", "all_gather", scheme.shard, grid)
    again = _flat("weights", "all_gather", scheme.reshard or scheme.shard, grid)
    reduce = _flat("gradients", "reduce_scatter", scheme.shard, grid)
    outside = tuple(tier for tier in tiers_outside(scheme.shard) if grid.size(tier) > 1)
    for micro in range(accumulation):
        chains += [Chain("forward", micro, (gather,)), Chain("backward", micro, (again,))]
        crossings = [reduce]
        if outside and micro == accumulation - 1:
            replicas = grid.world_size // grid.scope_size(scheme.shard)
            crossings.append(Cross("gradients", "all_reduce", outside, replicas, PLAIN, replicas))
        chains.append(Chain("reduce", micro, tuple(crossings)))
    return chains


def _deepspeed_reductions(scheme: Scheme, grid: Grid) -> tuple[Cross, ...]:
    """ZeRO++ reduces by an all-to-all inside what it takes for a node and one across (arXiv 2306.10209)."""
    if not scheme.quantized:
        return (_flat("gradients", "reduce_scatter", "world", grid),)
    codec = CodecConfig(codec="int4", block_size=DEFAULT_BLOCK_SIZE)
    if scheme.visible == 1:  # every device is a node of its own: one all-to-all over the world
        return (replace(_flat("gradients", "all_to_all", "world", grid), codec=codec),)
    inside = replace(_flat("gradients", "all_to_all", "node", grid), codec=codec, rows=grid.world_size)
    if grid.nodes == 1:
        return (inside,)
    between = tuple(tier for tier in NET_TIERS if grid.size(tier) > 1)
    return inside, Cross("gradients", "all_to_all", between, grid.nodes, codec, grid.nodes)


def _flat(role: Role, kind: Kind, scope: Scope, grid: Grid) -> Cross:
    """A collective over all ranks of a scope; shards are those of the world."""
    tiers = tuple(tier for tier in tiers_inside(scope) if grid.size(tier) > 1)
    ranks = grid.scope_size(scope)
    whole = grid.world_size
    return Cross(role, kind, tiers, ranks, PLAIN, whole // ranks if kind == "all_gather" else whole)
