"""All-to-alls and broadcasts over any grid, on simulated ranks; the settings of a communicator, and the grid of a group."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hzero.comm import Bucket, Collectives, WireLog
from hzero.comm.runtime import Call
from hzero.comm.settings import parse_communicator
from hzero.config import CodecsConfig
from hzero.plan.program import Program, all_to_all_program, broadcast_program
from hzero.plan.shards import ShardPlan
from hzero.topology import Grid
from tests.comm.simulated import Wires, boxes, finished, on_all, transport
from tests.plan.test_shards import GRIDS


@settings(max_examples=25)
@given(GRIDS.filter(lambda grid: 1 < grid.world_size <= 32), st.integers(1, 5), st.randoms(use_true_random=False))
def test_moves_reach_their_ranks_on_any_grid(grid: Grid, chunk: int, random: Any) -> None:
    world = grid.world_size
    config = parse_communicator({"gather": {"gcd": "bf16", "gpu": "none"}})  # of which small integers lose nothing
    codecs = CodecsConfig(weights=config.gather, gradients=config.codecs)
    groups: dict[Any, Any] = {}

    def collectives(rank: int) -> Collectives:
        plan = ShardPlan(grid, rank, "world", "world", codecs)
        lanes = {}
        for tier in grid.crossed:
            ranks = list(plan.tier_group(tier))
            shared = groups.setdefault((tier, tuple(ranks)), boxes(len(ranks)))
            lanes["moves", tier] = Wires(ranks.index(rank), len(ranks), shared), ranks
        return Collectives(plan, transport(rank, lanes), WireLog())

    every = [collectives(rank) for rank in range(world)]
    bucket = Bucket((0,), (chunk,), torch.float32, "moves", "moves")
    values = torch.arange(world * world * chunk).remainder(251).float().view(world, world, chunk)

    def run(one: Collectives, program: Program, read: Any) -> torch.Tensor:
        return finished(one.bind(program, bucket).hops(read, lambda tensors: tensors[0], 0, 0, Call()))

    def move(one: Collectives) -> torch.Tensor:
        return run(one, all_to_all_program(one.plan), lambda: [values[one.plan.rank].reshape(-1)])

    for rank, got in enumerate(on_all(every, move)):
        assert torch.equal(got.view(world, chunk), values[:, rank])
    source = random.randrange(world)

    def spread(one: Collectives) -> torch.Tensor:
        program = broadcast_program(one.plan, source)
        size = program.crossings[0].message_bytes(bucket.chunks, 4)
        own = one.plan.rank == source
        return run(one, program, (lambda: [values[source, 0]]) if own else lambda: torch.empty(size, dtype=torch.uint8))

    for got in on_all(every, spread):
        assert torch.equal(got, values[source, 0])
