"""Bytes by tier that a scheme's collectives move in one step, in closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.cluster.shape import Cluster
from hzero.config import SCOPES, TIERS, Scope, Tier, parse_config
from hzero.sharding.plan import ShardPlan
from hzero.sharding.traffic import plan_traffic, ring_links
from hzero.topology import Grid


@dataclass(frozen=True)
class Collective:
    """One kind of collective of a step.

    Attributes:
        kind: Its name.
        inside: The ranks of each such scope form a group.
        across: Instead, the ranks at the same position of every such scope form a group.
        size: Bytes of the whole tensor that a group gathers or reduces.
        times: How often in a step, on average over the weights.
    """

    kind: Literal["all_gather", "reduce_scatter", "all_reduce"]
    inside: Scope
    size: float
    times: float
    across: bool = False


def step_bytes(
    scheme: dict[str, Any],
    cluster: Cluster,
    numels: Sequence[int],
    *,
    itemsize: int,
    accumulation: int,
    reduce_scatter: str,
    fetches: float = 2,
) -> dict[Tier, float]:
    """Bytes that all ranks send in one optimizer step, by tier; tiers of size 1 are left out.

    Args:
        scheme: The catalog's entry.
        cluster: Where ranks stand.
        numels: Elements of every parameter.
        itemsize: Bytes of one element on a wire without codec.
        accumulation: Micro-steps per step.
        reduce_scatter: ``gloo``, ``all_to_all`` or ``ring``, as in `benchmarks.compare.reduce_scatter`.
        fetches: Gathers of each weight per micro-step. It is below 2 for DeepSpeed, which keeps the last weights of forward
            for backward.
    """
    grid = cluster.grid
    if scheme["engine"] == "hzero":
        return _hzero_bytes(scheme["block"], grid, numels, itemsize, accumulation, fetches)
    total = dict.fromkeys(TIERS, 0.0)
    for collective in collectives(scheme, grid, sum(numels) * itemsize, accumulation, fetches):
        for tier, size in _collective_bytes(collective, cluster, reduce_scatter).items():
            total[tier] += size
    return _present(total, grid)


def collectives(
    scheme: dict[str, Any], grid: Grid, weights: float, accumulation: int, fetches: float = 2
) -> list[Collective]:
    """Collectives of a step of DDP, FSDP or DeepSpeed, with weights of ``weights`` bytes."""
    if scheme["engine"] == "ddp":
        return [Collective("all_reduce", "world", weights, 1)]
    if scheme["engine"] == "deepspeed":
        hpz = scheme.get("hpz")
        # hpZ's copy is made anew in a step's first forward (DeepSpeed 0.19).
        far = 1 if hpz else fetches * accumulation
        near = [Collective("all_gather", hpz, weights, fetches * accumulation - 1)] if hpz else []
        return [
            Collective("all_gather", "world", weights, far),
            *near,
            Collective("reduce_scatter", "world", weights, accumulation),
        ]
    shard = scheme.get("shard", "world")
    between = scheme.get("reshard_after_forward") or shard
    steps = [
        Collective("all_gather", shard, weights, accumulation),
        Collective("all_gather", between, weights, accumulation),
        Collective("reduce_scatter", shard, weights, accumulation),
    ]
    size = grid.scope_size(shard)
    if size < grid.world_size:
        steps.append(Collective("all_reduce", shard, weights / size, 1, across=True))
    return steps


def _collective_bytes(collective: Collective, cluster: Cluster, reduce_scatter: str) -> dict[Tier, float]:
    grid = cluster.grid
    within = TIERS[: SCOPES.index(collective.inside) + 1]
    tiers = [tier for tier in TIERS if (tier in within) != collective.across]
    sizes = [grid.size(tier) for tier in tiers]
    count = math.prod(sizes)
    groups = grid.world_size // count
    pairwise = collective.kind == "reduce_scatter" and reduce_scatter == "all_to_all"
    # gloo reduces and then gathers around a ring, also where only a part of the sum is asked for.
    rounds = (
        2 if collective.kind == "all_reduce" or (collective.kind, reduce_scatter) == ("reduce_scatter", "gloo") else 1
    )
    total = dict.fromkeys(TIERS, 0.0)
    inside = 1
    for tier, size, links in zip(tiers, sizes, ring_links(sizes)):
        if pairwise:  # every rank sends each of the others its part
            sent = count * inside * (size - 1) * collective.size / count
            inside *= size
        else:
            sent = links * rounds * collective.size * (count - 1) / count
        total[tier] = groups * sent * collective.times
    return total


def _hzero_bytes(
    block: dict[str, Any],
    grid: Grid,
    numels: Sequence[int],
    itemsize: int,
    accumulation: int,
    fetches: float,
) -> dict[Tier, float]:
    plan = ShardPlan.from_config(parse_config(block), grid, 0)
    rows = plan_traffic(plan, numels, itemsize=itemsize, accumulation=accumulation, fetches=fetches)
    sent = {tier: float(sum(row.wire_bytes for row in rows if row.tier == tier) * grid.world_size) for tier in TIERS}
    return _present(sent, grid)


def _present(total: dict[Tier, float], grid: Grid) -> dict[Tier, float]:
    return {tier: total[tier] for tier in TIERS if grid.size(tier) > 1}
