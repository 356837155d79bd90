"""All-to-alls and broadcasts over any grid, on simulated ranks; the settings of a communicator, and the grid of a group."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hzero.collectives import Bucket, WireLog
from hzero.collectives.moves import TieredMoves
from hzero.collectives.settings import parse_communicator
from hzero.config import CodecsConfig
from hzero.sharding.plan import ShardPlan
from hzero.topology import Grid
from tests.sharding.test_plan import GRIDS


class _Wires:
    """A transport of simulated ranks, whose generators are resumed once all ranks have begun a tier's hop."""

    def __init__(self, plan: ShardPlan, posted: dict[tuple[str, int], torch.Tensor]) -> None:
        self._plan, self._posted = plan, posted

    def scatter(self, lane: tuple[str, str], message: torch.Tensor, *_: Any) -> Any:
        tier: Any = lane[1]
        self._posted[tier, self._plan.rank] = message
        yield tier
        group = list(self._plan.tier_group(tier))
        own = group.index(self._plan.rank)
        return torch.cat([self._posted[tier, peer].view(len(group), -1)[own] for peer in group])

    def spread(self, lane: tuple[str, str], message: torch.Tensor, root: int, *_: Any) -> Any:
        tier: Any = lane[1]
        self._posted[tier, self._plan.rank] = message
        yield tier
        return self._posted[tier, list(self._plan.tier_group(tier))[root]]


def _run(chains: list[Any], tiers: Any) -> list[torch.Tensor]:
    """Results of the ranks' generators, which cross the tiers in this order; not every rank crosses all."""
    results: dict[int, torch.Tensor] = {}
    at: dict[int, Any] = {}

    def resume(rank: int) -> None:
        try:
            at[rank] = next(chains[rank])
        except StopIteration as stop:
            at[rank], results[rank] = "end", stop.value

    for step in (None, *tiers):
        for rank in range(len(chains)):
            if step is None:
                assert next(chains[rank]) is None  # the inputs have been read
                resume(rank)
        for rank in [rank for rank in range(len(chains)) if step is not None and at[rank] == step]:
            resume(rank)
    return [results[rank] for rank in range(len(chains))]


@settings(max_examples=25)
@given(GRIDS.filter(lambda grid: 1 < grid.world_size <= 32), st.integers(1, 5), st.randoms(use_true_random=False))
def test_moves_reach_their_ranks_on_any_grid(grid: Grid, chunk: int, random: Any) -> None:
    world = grid.world_size
    config = parse_communicator({"gather": {"gcd": "bf16", "gpu": "none"}})  # of which small integers lose nothing
    codecs = CodecsConfig(weights=config.gather, gradients=config.codecs)
    posted: dict[tuple[str, int], torch.Tensor] = {}
    moves = []
    for rank in range(world):
        plan = ShardPlan(grid, rank, "world", "world", codecs)
        moves.append(TieredMoves(plan, _Wires(plan, posted), WireLog()))  # type: ignore[arg-type]
    bucket = Bucket((0,), (chunk,), torch.float32, "all_to_all")
    values = torch.arange(world * world * chunk).remainder(251).float().view(world, world, chunk)
    same: Any = lambda tensor: tensor  # noqa: E731
    hops = moves[0].plan.gather_hops()
    chains = [one._all_to_all(hops[::-1], bucket, values[rank].reshape(-1), same, 0) for rank, one in enumerate(moves)]
    for rank, got in enumerate(_run(chains, [hop.tier for hop in hops[::-1]])):
        assert torch.equal(got.view(world, chunk), values[:, rank])
    source = random.randrange(world)
    submitted: list[Any] = []
    for rank, one in enumerate(moves):
        with mock.patch.object(one.pipeline, "submit", lambda hops, lanes: submitted.append(hops)):
            one.broadcast(bucket, values[rank, 0], source, same)
    for got in _run(submitted, [hop.tier for hop in hops]):
        assert torch.equal(got, values[source, 0])
