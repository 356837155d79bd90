"""Bytes by tier that a peer's collectives move in one step, in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.cluster.shape import Cluster
from hzero.config import TIERS, parse_config
from hzero.sharding.plan import ShardPlan
from hzero.sharding.traffic import plan_traffic
from hzero.topology.grid import Grid


@dataclass(frozen=True)
class Collective:
    """One kind of collective of a step.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
        inside: Scope whose ranks form a group, each scope its own.
        across: Whether groups are instead of the ranks at the same place of every scope ``inside``.
        size: Bytes of the whole tensor that a group gathers or reduces.
        times: How often in a step, on average over the weights.
    """

    kind: str
    inside: str
    size: float
    times: float
    across: bool = False


def step_bytes(
    peer: dict[str, Any],
    cluster: Cluster,
    numels: Sequence[int],
    *,
    itemsize: int,
    accumulation: int,
    reduce_scatter: str,
    fetches: float = 2,
) -> dict[str, float]:
    """Bytes that all ranks send in one optimizer step, by tier; tiers of size 1 are left out.

    Args:
        peer: The catalog's entry.
        cluster: Where ranks stand.
        numels: Elements of every parameter.
        itemsize: Bytes of one element on a wire without codec.
        accumulation: Micro-steps a step.
        reduce_scatter: ``gloo``, ``all_to_all`` or ``ring``, as in `benchmarks.compare.reduce_scatter`.
        fetches: Gathers of every weight a micro-step. DeepSpeed keeps what it is about to use again, the last weights of
            forward, so it is below 2 there.
    """
    grid = cluster.grid
    if peer["engine"] == "hzero":
        return _hzero_bytes(peer["block"], grid, numels, itemsize, accumulation, reduce_scatter, fetches)
    total = dict.fromkeys(TIERS, 0.0)
    for collective in collectives(peer, grid, sum(numels) * itemsize, accumulation, fetches):
        for tier, size in _collective_bytes(collective, cluster, reduce_scatter).items():
            total[tier] += size
    return _present(total, grid)


def collectives(
    peer: dict[str, Any], grid: Grid, weights: float, accumulation: int, fetches: float = 2
) -> list[Collective]:
    """What a step of DDP, FSDP or DeepSpeed consists of, with weights of ``weights`` bytes."""
    if peer["engine"] == "ddp":
        return [Collective("all_reduce", "world", weights, 1)]
    if peer["engine"] == "deepspeed":
        hpz = peer.get("hpz")
        # hpZ's copy is made anew in a step's first forward (DeepSpeed 0.19).
        far = 1 if hpz else fetches * accumulation
        near = [Collective("all_gather", hpz, weights, fetches * accumulation - 1)] if hpz else []
        return [
            Collective("all_gather", "world", weights, far),
            *near,
            Collective("reduce_scatter", "world", weights, accumulation),
        ]
    shard = peer.get("shard", "world")
    between = peer.get("reshard_after_forward") or shard
    steps = [
        Collective("all_gather", shard, weights, accumulation),
        Collective("all_gather", between, weights, accumulation),
        Collective("reduce_scatter", shard, weights, accumulation),
    ]
    size = grid.scope_size(shard)
    if size < grid.world_size:
        steps.append(Collective("all_reduce", shard, weights / size, 1, across=True))
    return steps


def _collective_bytes(collective: Collective, cluster: Cluster, reduce_scatter: str) -> dict[str, float]:
    size, world = cluster.grid.scope_size(collective.inside), cluster.world_size
    if collective.across:
        groups = [list(range(first, world, size)) for first in range(size)]
    else:
        groups = [list(range(first, first + size)) for first in range(0, world, size)]
    pairwise = collective.kind == "reduce_scatter" and reduce_scatter == "all_to_all"
    # gloo reduces and then gathers around a ring, also where only a part of the sum is asked for.
    rounds = (
        2 if collective.kind == "all_reduce" or (collective.kind, reduce_scatter) == ("reduce_scatter", "gloo") else 1
    )
    total = dict.fromkeys(TIERS, 0.0)
    for ranks in groups:
        count = len(ranks)
        if count == 1:
            continue
        for index, rank in enumerate(ranks):
            if pairwise:
                for other in ranks:
                    if other != rank:
                        total[cluster.tier_between(rank, other)] += collective.size / count
            else:
                ahead = ranks[(index + 1) % count]
                total[cluster.tier_between(rank, ahead)] += rounds * collective.size * (count - 1) / count
    return {tier: bytes_ * collective.times for tier, bytes_ in total.items()}


def _hzero_bytes(
    block: dict[str, Any],
    grid: Grid,
    numels: Sequence[int],
    itemsize: int,
    accumulation: int,
    reduce_scatter: str,
    fetches: float,
) -> dict[str, float]:
    plan = ShardPlan.from_config(parse_config(block), grid, 0)
    total = dict.fromkeys(TIERS, 0.0)
    for row in plan_traffic(plan, numels, itemsize=itemsize, accumulation=accumulation, fetches=fetches):
        twice = row.role == "gradients" and row.codec == "none" and reduce_scatter == "gloo"
        total[row.tier] += row.wire_bytes * grid.world_size * (2 if twice else 1)
    return _present(total, grid)


def _present(total: dict[str, float], grid: Grid) -> dict[str, float]:
    return {tier: total[tier] for tier in TIERS if grid.size(tier) > 1}
