"""Tiered collectives against what one process computes from everyone's data. Run by test_tiered.py on several ranks."""

from __future__ import annotations

import os
import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hzero.codecs.formats import chunk_numel
from hzero.comm import Bucket, Chain, HopError, Runtime, WireLog, peers_of
from hzero.comm.wires import STAGE, world_timeout
from hzero.config import ALGORITHMS, parse_config
from hzero.errors import ConfigError, agreed
from hzero.program.program import gather_program, reduce_program
from hzero.program.shards import ShardPlan
from hzero.topology.grid import Grid
from tests.rank_main import HOP_TIMEOUT_S, TRANSPORT, begin_anew

NUMELS = (1, 3, 17 * 5, 257, 1024, 5 * 129)
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
GRIDS = {
    8: [Grid(2, 2, 2), Grid(8, 1, 1), Grid(2, 2, 2, ranks=(3, 0, 5, 6, 1, 7, 4, 2)), Grid(4, 2, 1, nodes_per_group=2),
     Grid(2, 4, 1, order=("intra_node", "inter_node", "intra_package"), packages_per_hive=2, clusters=2)],
    6: [Grid(3, 1, 2), Grid(1, 3, 2), Grid(3, 1, 2, ranks=(5, 0, 3, 1, 2, 4))],
    4: [Grid(2, 1, 2), Grid(1, 2, 2, ranks=(3, 0, 2, 1))],
}  # fmt: skip


def _collectives(grid: Grid, weights=None, gradients=None, feedback=(), **block) -> Runtime:
    codecs = {"weights": weights or {}, "gradients": gradients or {}}
    block = {"preset": "hpz", "codecs": codecs, "transport": TRANSPORT, **block}
    plan = ShardPlan.from_config(parse_config({**block, "error_feedback": list(feedback)}), grid, dist.get_rank())
    return Runtime(plan, peers_of(plan), WireLog())


def _bucket(role: str, dtype: torch.dtype) -> Bucket:
    return Bucket(tuple(range(len(NUMELS))), tuple(chunk_numel(n, WORLD) for n in NUMELS), dtype, role)


def _everyones(dtype: torch.dtype, seed: int = 0) -> list[list[torch.Tensor]]:
    """Tensors of every rank, the same on all: [rank][tensor]."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(n, generator=generator).to(dtype) for n in NUMELS] for _ in range(WORLD)]


def reduce(collectives: Runtime, hops, bucket: Bucket, tensors, rows: int = WORLD, **how) -> Chain:
    program = reduce_program(collectives.plan, hops, rows, shard_order=rows == WORLD)
    return collectives.bind(program, bucket).run(lambda: tensors, **how)


def check_overflow_survives() -> None:
    for bad in (float("nan"), float("inf")):
        collectives = _collectives(
            GRIDS[WORLD][0],
            gradients=dict.fromkeys(("intra_package", "intra_node", "inter_node"), "int4"),
            feedback=("inter_node",),
        )
        bucket, rank = _bucket("gradients", torch.float32), dist.get_rank()
        mine = _everyones(torch.float32)[rank]
        if rank == WORLD - 1:
            mine[4][7] = bad
        shards = reduce(collectives, collectives.plan.reduce_hops(), bucket, mine).wait()
        owner = 7 // bucket.chunks[4]
        assert bool(torch.isfinite(shards[4]).all()) == (rank != owner)
        again = reduce(collectives, collectives.plan.reduce_hops(), bucket, _everyones(torch.float32)[rank]).wait()
        assert all(bool(torch.isfinite(t).all()) for t in again)


def check_chains_give_their_own_results_in_any_order_of_waits() -> None:
    """Ranks wait in orders of their own, as DeepSpeed does over sets; so do chains of two roles."""
    grid = GRIDS[WORLD][0]
    collectives = _collectives(grid, weights=dict.fromkeys(("intra_package", "intra_node", "inter_node"), "int8"))
    plan, whole, rank = collectives.plan, _everyones(torch.float32)[0], dist.get_rank()
    weights, gradients = _bucket("weights", torch.float32), _bucket("gradients", torch.float32)
    gathering = gather_program(plan, plan.gather_hops())

    def gather(factor: int) -> Chain:
        shards = [t[rank * c : (rank + 1) * c] * factor for t, c in zip(whole, weights.chunks)]
        return collectives.bind(gathering, weights).run(lambda: shards)

    def sums(factor: int) -> Chain:
        return reduce(collectives, plan.reduce_hops(), gradients, [t * factor for t in whole])

    once, summed = gather(1).wait(), sums(1).wait()
    for turn in range(20 if WORLD == 8 else 5):
        order = [(kind, factor) for factor in (1, 2, 4, 8) for kind in (gather, sums)]
        chains = [(kind, factor, kind(factor)) for kind, factor in order]
        random.Random(turn * WORLD + rank).shuffle(chains)
        for kind, factor, chain in chains:
            want = once if kind is gather else summed
            for got, expected in zip(chain.wait(), want):
                assert torch.equal(got, expected * factor), (turn, kind, factor)


def check_draining_waits_for_every_chain() -> None:
    collectives = _collectives(GRIDS[WORLD][0])
    plan, bucket = collectives.plan, _bucket("gradients", torch.float32)
    tensors = _everyones(torch.float32)[0]
    chains = [reduce(collectives, plan.reduce_hops(), bucket, tensors) for _ in range(3)]
    collectives.lanes.drain()
    assert all(chain.done for chain in chains)


def check_all_algorithms_of_an_all_gather_give_the_same_bytes() -> None:
    """On 2 to 8 ranks, for messages of awkward sizes and of none; of one rank after the other."""
    if WORLD == 6:
        pytest.skip("8 ranks try 2 to 8")
    rank, lane = dist.get_rank(), (STAGE, "inter_node")
    for ranks in range(2, WORLD + 1):
        if rank >= ranks:
            continue
        order = Grid(ranks, 1, 1, ranks=(ranks - 1, *range(ranks - 1)))  # not the order of rank numbers
        plan = ShardPlan.from_config(parse_config({"transport": TRANSPORT}), order, rank)
        collectives = Runtime(plan, peers_of(plan), WireLog())
        coordinates = list(order.tier_group(rank, "inter_node"))
        for count in (0, 1, 3, 16, 257, 40_000):
            generator = torch.Generator().manual_seed(count)
            everyones = torch.randint(0, 256, (ranks, count), dtype=torch.uint8, generator=generator)
            for algorithm in ALGORITHMS:
                message = everyones[rank].clone()
                gather = collectives.prepare(lane, "all_gather", count, "a message", algorithm=algorithm)
                gathered = gather.run(message)
                assert torch.equal(gathered, everyones[coordinates].view(-1)), (ranks, count, algorithm)


def check_all_ranks_raise_the_error_of_the_lowest() -> None:
    rank = dist.get_rank()
    with pytest.raises(ConfigError, match=r"^found by rank 1$"), agreed():
        if rank:
            raise ConfigError(f"found by rank {rank}")


def check_a_peer_that_does_not_come_is_named() -> None:
    """Last, since a group that timed out cannot be used again."""
    assert world_timeout() == timedelta(seconds=HOP_TIMEOUT_S)  # what groups get where nothing else is said
    grid = GRIDS[WORLD][0]
    plan = _collectives(grid).plan
    collectives = Runtime(plan, peers_of(plan, timedelta(seconds=2)), WireLog())
    everyone = torch.zeros(16 * grid.devices_per_package, dtype=torch.uint8)

    def swap(what: str) -> None:
        collectives.prepare((STAGE, "intra_package"), "all_to_all", everyone.nbytes, what).run(everyone)

    swap("a first message")  # connects, which is not what is timed
    if dist.get_rank() not in plan.grid.tier_group(0, "intra_package"):
        swap("gradients")
    elif dist.get_rank():
        with pytest.raises(HopError) as error:
            swap("gradients")
        for part in (
            "all-to-all of gradients",
            "tier 'intra_package'",
            f"rank {dist.get_rank()} among [0, 1]",
            "32 bytes",
        ):
            assert part in str(error.value), error.value
    begin_anew()
