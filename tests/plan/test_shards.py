"""The shard plan: nesting, coordinates, groups and index maps of any grid, without walking the world."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hzero.config import SCOPES, TIERS, parse_config, tiers_inside
from hzero.errors import ConfigError
from hzero.program.shards import ShardPlan
from hzero.topology.grid import Grid
from tests.plan.grids import GRIDS

NAMED = [(1, 1, 8), (1, 4, 2), (2, 2, 2), (3, 1, 2), (8, 1, 1)]


def plan_of(grid: Grid, rank: int = 0, **block: object) -> ShardPlan:
    return ShardPlan.from_config(parse_config({"preset": "lossless", **block}), grid, rank)


@given(GRIDS)
def test_coordinates_and_ranks_are_inverse(grid: Grid) -> None:
    for rank in range(grid.world_size):
        assert grid.rank(grid.coordinates(rank)) == rank


@given(GRIDS)
def test_groups_of_a_tier_partition_the_world(grid: Grid) -> None:
    for tier in TIERS:
        groups = {tuple(grid.tier_group(rank, tier)) for rank in range(grid.world_size)}
        assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
        for group in groups:
            assert [getattr(grid.coordinates(rank), tier) for rank in group] == list(range(grid.size(tier)))


@given(GRIDS)
def test_scopes_reach_ever_more_of_the_machines_tiers(grid: Grid) -> None:
    reached = [tuple(tier for tier in tiers_inside(scope) if tier in grid.tiers) for scope in grid.scopes]
    assert reached == [grid.tiers[:count] for count in range(len(grid.tiers) + 1)]
    assert {"device", "package", "node", "world"} <= set(grid.scopes)


def test_a_scope_that_the_machine_lacks_is_refused_with_what_declares_it() -> None:
    with pytest.raises(
        ConfigError, match=r"gradients: found 'group', which .* expected device, package, node, world; nodes_per"
    ):
        plan_of(Grid(4, 2, 2), shard={"gradients": "group"})
    with pytest.raises(
        ConfigError, match=r"weights: found 'hive', .* expected device, package, node, cluster, world; packages_per"
    ):
        plan_of(Grid(4, 2, 2, clusters=2), shard={"weights": "hive"})


def test_tiers_take_the_codec_of_their_neighbour() -> None:
    codecs = {
        "weights": {"inter_node": "int4", "inter_cluster": "none"},
        "gradients": {"intra_node": "int8", "inter_group": "int4"},
    }
    plan = plan_of(Grid(8, 4, 1, packages_per_hive=2, nodes_per_group=2, clusters=2), codecs=codecs)
    found = {
        role: [hop.codec.codec for hop in hops] for role, hops in (("w", plan.gather_hops()), ("g", plan.reduce_hops()))
    }
    assert found == {"w": ["none", "int8", "int4", "none", "none"], "g": ["int8", "int8", "none", "int4", "int4"]}
    assert plan_of(Grid(4, 2, 2), codecs=codecs).notes == (
        "codecs on tiers of size 1 are unused: int4 of gradients on inter_group",
    )


@given(GRIDS, st.data())
def test_hops_cover_every_tier_once(grid: Grid, data: st.DataObject) -> None:
    pair = [data.draw(st.sampled_from(grid.scopes)) for _ in range(2)]
    weights, gradients = sorted(pair, key=SCOPES.index)
    plan = plan_of(grid, shard={"weights": weights, "gradients": gradients})
    tiers = [tier for tier in TIERS if grid.size(tier) > 1]
    assert [hop.tier for hop in plan.refresh_hops() + plan.unshard_hops()] == tiers[::-1]
    assert [hop.tier for hop in plan.micro_hops() + plan.boundary_hops()] == tiers
    assert math.prod(hop.size for hop in plan.refresh_hops()) == plan.secondary_rows
    assert grid.world_size // math.prod(hop.size for hop in plan.micro_hops()) == plan.gradient_rows


def test_refresh_messages_have_the_bytes_per_rank_that_are_asked_for() -> None:
    grid, bucket = Grid(48, 4, 2), 50_000_000
    for preset, itemsize, of_element in (("topo", 2, 1 + 2 / 128), ("lossless", 2, 2.0), ("lossless", 4, 4.0)):
        plans = [
            ShardPlan.from_config(parse_config({"preset": preset, "refresh_message_bytes": least}), grid, 0)
            for least in (0, 1 << 20)
        ]
        assert plans[0].refresh_numel(bucket, itemsize) == bucket
        assert plans[1].refresh_numel(bucket, itemsize) * of_element / 384 == pytest.approx(1 << 20, rel=0.001)


def test_parts_of_the_outermost_tier_are_large_where_many_ranks_wait_for_them() -> None:
    for grid, least in ((Grid(15, 4, 2), 0), (Grid(16, 4, 2), 1 << 16), (Grid(60, 4, 2, nodes_per_group=12), 0)):
        plan = ShardPlan.from_config(parse_config({}), grid, 0)
        assert plan.boundary_message_bytes == least
        written = parse_config({"boundary_message_bytes": 9})
        assert ShardPlan.from_config(written, grid, 0).boundary_message_bytes == 9
        waiting = plan.boundary_numel(10**6, 2) - 10**6
        element = plan.boundary_hops()[-1].codec.format.element_bytes(2)
        assert waiting * element / grid.world_size == pytest.approx(least, rel=0.001)
    assert not ShardPlan.from_config(parse_config({"preset": "zero3"}), Grid(16, 4, 2), 0).boundary_message_bytes
    with pytest.raises(ConfigError, match="boundary_message_bytes"):
        parse_config({"boundary_message_bytes": (1 << 24) + 1})


@pytest.mark.parametrize("layout", NAMED)
def test_presets_never_mean_whole_copies_by_accident(layout: tuple[int, int, int]) -> None:
    grid = Grid(*layout)
    for preset in ("lossless", "topo", "hpz", "zeropp"):
        plan = ShardPlan.from_config(parse_config({"preset": preset}), grid, 0)
        assert grid.scope_size(plan.weights_scope) > 1
        assert grid.scope_size(plan.gradients_scope) > 1
        assert SCOPES.index(plan.weights_scope) <= SCOPES.index(plan.gradients_scope)
        if layout == (8, 1, 1) and preset == "topo":
            assert any("sharded over the world" in note for note in plan.adaptations)
    explicit = ShardPlan.from_config(
        parse_config({"preset": "topo", "shard": {"weights": "package"}}), Grid(2, 4, 1), 0
    )
    assert explicit.weights_scope == "package"
    assert len([note for note in explicit.notes if "unused" in note]) == 1


def test_where_codec_exact_applies() -> None:
    """On all refreshed tiers of this machine or on none; elsewhere it is codec none."""
    for preset, codecs, grid, refreshed in (
        ("lossless", {}, Grid(2, 4, 2), ["inter_node", "intra_node"]),
        ("lossless", {}, Grid(2, 8, 1), ["inter_node"]),  # weights over the node
        ("lossless", {}, Grid(1, 8, 1), []),  # weights over all devices
        ("topo", {"inter_node": "exact", "intra_node": "none"}, Grid(2, 4, 2), ["inter_node", "intra_node"]),
        ("zero3", dict.fromkeys(TIERS, "exact"), Grid(2, 4, 2), []),
    ):
        plan = ShardPlan.from_config(parse_config({"preset": preset, "codecs": {"weights": codecs}}), grid, 0)
        assert plan.exact == bool(refreshed) and [hop.tier for hop in plan.refresh_hops() if plan.exact] == refreshed
        assert {hop.codec.codec for hop in plan.refresh_hops()} == ({"exact"} if refreshed else set())
        assert {hop.codec.codec for hop in plan.unshard_hops()} <= {"int8" if preset == "topo" else "none"}
    mixed = parse_config({"preset": "topo", "codecs": {"weights": {"inter_node": "exact"}}})
    with pytest.raises(
        ConfigError, match=r"codecs\.weights\.intra_node: found 'int8', with 'exact' on inter_node; expected"
    ):
        ShardPlan.from_config(mixed, Grid(2, 4, 2), 0)
    assert ShardPlan.from_config(mixed, Grid(2, 8, 1), 0).exact, "int8 on a tier that no refresh crosses"
