"""All-to-alls and broadcasts over any grid, on simulated ranks."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hzero.comm import Bucket, Runtime, WireLog
from hzero.comm.communicator import parse_communicator
from hzero.config import CodecsConfig
from hzero.program.program import Program, all_to_all_program, broadcast_program
from hzero.program.shards import ShardPlan
from hzero.topology import Grid
from tests.comm.simulated import AtOnce, on_all, peers_of
from tests.plan.test_shards import GRIDS


@settings(max_examples=25)
@given(GRIDS.filter(lambda grid: 1 < grid.world_size <= 32), st.integers(1, 5), st.randoms(use_true_random=False))
def test_moves_reach_their_ranks_on_any_grid(grid: Grid, chunk: int, random: Any) -> None:
    world = grid.world_size
    config = parse_communicator(
        {"gather": {"intra_package": "bf16", "intra_node": "none"}}
    )  # of which small integers lose nothing
    codecs = CodecsConfig(weights=config.gather, gradients=config.codecs)
    groups: dict[Any, Any] = {}

    plans = [ShardPlan(grid, rank, "world", "world", codecs) for rank in range(world)]
    every = [Runtime(plan, peers_of(plan, "moves", groups), WireLog(), AtOnce(), library_sums=False) for plan in plans]
    bucket = Bucket((0,), (chunk,), torch.float32, "moves", "moves")
    values = torch.arange(world * world * chunk).remainder(251).float().view(world, world, chunk)

    def run(one: Runtime, program: Program, read: Any) -> torch.Tensor:
        return one.bind(program, bucket).run(read, lambda tensors: tensors[0]).wait()

    def move(one: Runtime) -> torch.Tensor:
        return run(one, all_to_all_program(one.plan), lambda: [values[one.plan.rank].reshape(-1)])

    for rank, got in enumerate(on_all(every, move)):
        assert torch.equal(got.view(world, chunk), values[:, rank])
    source = random.randrange(world)

    def spread(one: Runtime) -> torch.Tensor:
        program = broadcast_program(one.plan, source)
        size = program.crossings[0].message_bytes(bucket.chunks, 4)
        own = one.plan.rank == source
        return run(one, program, (lambda: [values[source, 0]]) if own else lambda: torch.empty(size, dtype=torch.uint8))

    for got in on_all(every, spread):
        assert torch.equal(got, values[source, 0])
