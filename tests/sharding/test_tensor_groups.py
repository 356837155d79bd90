"""Layouts: tensor groups innermost, data-parallel groups across them, on any grid; and grids of some of a grid's ranks."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hzero.config import TIERS
from hzero.sharding.tensor_groups import TensorGroups, sizes
from hzero.topology.grid import Grid
from hzero.validation import ConfigError
from tests.sharding.test_plan import IRREGULAR, REGULAR

LAYOUTS = (REGULAR | IRREGULAR).flatmap(
    lambda grid: st.sampled_from(sizes(grid)).map(lambda tensor: TensorGroups(grid, tensor))
)


@given(LAYOUTS)
def test_groups_cover_the_world_and_meet_once(layout: TensorGroups) -> None:
    world = range(layout.grid.world_size)
    assert layout.tensor * layout.data == len(world)
    for rank in world:
        tensor, data = layout.tensor_group(rank), layout.data_group(rank)
        assert (len(tensor), len(data)) == (layout.tensor, layout.data) and set(tensor) & set(data) == {rank}
        assert tensor[layout.tensor_rank(rank)] == rank == data[layout.data_rank(rank)]
        assert all(layout.tensor_group(peer) == tensor for peer in tensor)
    if layout.tensor == 1:
        assert layout.data_grid == layout.grid and layout.data_group(0) == list(world)


@given(LAYOUTS)
def test_tensor_groups_are_innermost_and_their_ranks_keep_their_places(layout: TensorGroups) -> None:
    inside, outside = layout.tensor_grid, layout.data_grid
    assert inside.nodes == 1
    for tier in TIERS:
        assert inside.size(tier) * outside.size(tier) == layout.grid.size(tier)
    for outer, inner in (("gpu", "gcd"), ("hive", "gcd"), ("gpu", "hive")):
        if inside.size(outer) > 1:
            assert outside.size(inner) == 1, "the inner tier is full"
    for rank in (0, layout.grid.world_size - 1):
        for grid, group in ((inside, layout.tensor_group(rank)), (outside, layout.data_group(rank))):
            own = grid if rank == 0 else layout.grid.of_ranks(group)
            assert {tier: own.size(tier) for tier in TIERS} == {tier: grid.size(tier) for tier in TIERS}
            for number, member in enumerate(group):
                for tier in TIERS:
                    peers = [group[peer] for peer in own.tier_group(number, tier)]
                    assert set(peers) <= set(layout.grid.tier_group(member, tier)) and member in peers


@given(REGULAR | IRREGULAR, st.data())
def test_any_product_of_coordinates_is_a_grid_and_nothing_else(grid: Grid, data: st.DataObject) -> None:
    kept = {tier: data.draw(st.sets(st.integers(0, grid.size(tier) - 1), min_size=1)) for tier in TIERS}
    ranks = [
        rank
        for rank in range(grid.world_size)
        if all(getattr(grid.coordinates(rank), tier) in kept[tier] for tier in TIERS)
    ]
    own = grid.of_ranks(data.draw(st.permutations(ranks)))
    assert {tier: own.size(tier) for tier in TIERS} == {tier: len(kept[tier]) for tier in TIERS}
    assert math.prod(map(own.size, TIERS)) == len(ranks)
    if sum(len(indices) > 1 for indices in kept.values()) > 1:
        with pytest.raises(ConfigError, match=r"fills no part of .* evenly"):
            grid.of_ranks(ranks[:-1])
    with pytest.raises(ConfigError, match="evenly"):
        grid.of_ranks([*ranks, ranks[0]])


def test_sizes_that_do_not_fit_are_refused_with_those_that_do() -> None:
    assert sizes(Grid(48, 4, 2)) == [1, 2, 4, 8] and sizes(Grid(1, 3, 4)) == [1, 2, 4, 12]
    for tensor in (0, 3, 16):
        with pytest.raises(ConfigError, match=rf"model.tensor_parallel: found {tensor}, .*possible: 1, 2, 4, 8$"):
            TensorGroups(Grid(48, 4, 2), tensor)


def test_the_largest_machine_takes_a_moment() -> None:
    started = time.process_time()
    layout = TensorGroups(Grid(9408, 4, 2), 8)
    assert layout.data_grid == Grid(9408, 1, 1) and layout.data_rank(75_263) == 9407
    assert time.process_time() - started < 5


@given(REGULAR | IRREGULAR, st.data())
def test_stages_are_outermost_and_meet_the_other_groups_once(grid: Grid, data: st.DataObject) -> None:
    tensor = data.draw(st.sampled_from(sizes(grid)))
    pipeline = data.draw(st.sampled_from(TensorGroups(grid, tensor)._stages()))
    layout = TensorGroups(grid, tensor, pipeline)
    world = range(grid.world_size)
    assert layout.tensor * layout.data * layout.pipeline == len(world)
    for rank in world:
        groups = layout.tensor_group(rank), layout.data_group(rank), layout.pipeline_group(rank)
        assert [len(group) for group in groups] == [layout.tensor, layout.data, layout.pipeline]
        places = layout.tensor_rank(rank), layout.data_rank(rank), layout.stage(rank)
        assert all(group[place] == rank for group, place in zip(groups, places))
        assert {layout.stage(peer) for peer in groups[0] + groups[1]} == {layout.stage(rank)}
    for tier in TIERS:
        inside = layout.tensor_grid.size(tier) * layout.data_grid.size(tier) * layout.pipeline_grid.size(tier)
        assert inside == grid.size(tier)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (2, 2), (2, 4), (4, 2), (1, 16), (8, 2)])
def test_the_layout_is_that_of_deepspeed(tensor: int, pipeline: int) -> None:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    layout = TensorGroups(Grid(2, 4, 2), tensor, pipeline)
    topology = PipeModelDataParallelTopology(pipeline, tensor, layout.data)
    for axis, group in (("pipe", layout.pipeline_group), ("data", layout.data_group), ("model", layout.tensor_group)):
        assert sorted(topology.get_axis_comm_lists(axis)) == sorted(
            {tuple(group(rank)): group(rank) for rank in range(16)}.values()
        )
    for rank in range(16):
        place = topology.get_coord(rank)
        assert (place.pipe, place.data, place.model) == (
            layout.stage(rank),
            layout.data_rank(rank),
            layout.tensor_rank(rank),
        )


def test_stages_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.pipeline_parallel: found 5, into which .* possible: 1, 3, 6, 12$"):
        TensorGroups(Grid(3, 4, 2), 2, 5)
