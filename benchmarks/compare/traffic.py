"""Bytes by tier that a scheme's collectives move in one step, in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.cluster.shape import Cluster
from hzero.config import BASE_TIERS, FIT, Tier, parse_config
from hzero.program.collectives import Scheme, chains_of, ring_links, step_traffic
from hzero.program.program import Cross
from hzero.program.shards import ShardPlan
from hzero.topology import Grid


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

    Empty with a hook of DDP, with tensor groups, and if hzero chooses the layout at the start.

    Args:
        scheme: The catalog's entry.
        cluster: Places of the ranks.
        numels: Elements of every parameter.
        itemsize: Bytes of one element on a wire without codec.
        accumulation: Micro-batches per step.
        reduce_scatter: ``gloo``, whose own moves everything twice, or ``ring``, as RCCL's.
        fetches: Gathers of each weight per micro-batch. It is below 2 for DeepSpeed, which keeps the last weights of forward
            for backward.
    """
    grid = cluster.grid
    if scheme.get("hook") is not None or scheme["engine"] == "tensor":
        return {}
    if (block := scheme.get("block")) is not None and block.get("preset", FIT) == FIT:
        return {}
    if block is not None:
        return _hzero_bytes(block, grid, numels, itemsize, accumulation, fetches)
    total = dict.fromkeys(BASE_TIERS, 0.0)
    weights = sum(numels) * itemsize
    for (phase, _), program in chains_of(engine_of(scheme), grid, accumulation).items():
        # DeepSpeed keeps the last weights of forward for backward.
        times = fetches - 1 if phase == "backward" and scheme["engine"] == "deepspeed" else 1
        for crossing in program.crossings:
            shards = crossing.rows * (crossing.ranks if crossing.kind == "all_gather" else 1)
            size = weights * shards / grid.world_size
            for tier, sent in _collective_bytes(crossing, size, cluster, reduce_scatter).items():
                total[tier] += sent * times
    return _present(total, grid)


def engine_of(entry: dict[str, Any]) -> Scheme:
    """A catalog entry of another engine than hzero, for the performance model."""
    keys = {key: value for key, value in entry.items() if key not in ("label", "hook", "reshard_after_forward", "dion")}
    return Scheme(**keys, reshard=entry.get("reshard_after_forward"))


def _collective_bytes(crossing: Cross, size: float, cluster: Cluster, reduce_scatter: str) -> dict[Tier, float]:
    """Bytes that all groups of one collective send over an array of ``size`` bytes."""
    grid, tiers = cluster.grid, crossing.tiers
    sizes = [grid.size(tier) for tier in tiers]
    count = crossing.ranks
    groups = grid.world_size // count
    # gloo reduces and then gathers around a ring, also where only a part of the sum is asked for.
    twice = crossing.kind == "all_reduce" or (crossing.kind, reduce_scatter) == ("reduce_scatter", "gloo")
    total = dict.fromkeys(BASE_TIERS, 0.0)
    for tier, links in zip(tiers, ring_links(sizes)):
        total[tier] = groups * links * (2 if twice else 1) * size * (count - 1) / count
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
    rows = step_traffic(plan, grid, numels, itemsize=itemsize, accumulation=accumulation, fetches=fetches)
    sent = {
        tier: float(sum(row.wire_bytes for row in rows if row.tier == tier) * grid.world_size) for tier in BASE_TIERS
    }
    return _present(sent, grid)


def _present(total: dict[Tier, float], grid: Grid) -> dict[Tier, float]:
    return {tier: total[tier] for tier in BASE_TIERS if grid.size(tier) > 1}
