"""The choice of preset fit: arithmetic on plans, without ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hzero.config import PRESETS, TIERS, bytes_of, parse_config
from hzero.errors import ConfigError
from hzero.program.choice import EQUAL, Load, Rates, choose, room_of
from hzero.program.held import held_states
from hzero.program.shards import ShardPlan
from hzero.topology import Grid
from hzero.topology.links_file import TierRate

GRIDS = [Grid(2, 2, 2), Grid(4, 1, 2), Grid(3, 1, 1), Grid(1, 4, 2), Grid(2, 2, 3), Grid(4, 2, 2, nodes_per_group=2)]
RATES = st.builds(
    lambda rates, together, encode, decode: Rates(
        {tier: TierRate(10**rate, 10**late) for tier, (rate, late) in zip(TIERS, rates)}, together, encode, decode
    ),
    st.lists(st.tuples(st.floats(-3, 3), st.floats(0, 4)), min_size=len(TIERS), max_size=len(TIERS)),
    st.floats(0, 1),
    st.floats(0, 1e-7),
    st.floats(0, 1e-7),
)
LOADS = st.builds(
    lambda numels, frozen, *rest: Load(tuple(numels), tuple(numels[frozen:]), *rest),
    st.lists(st.integers(1, 10**7), min_size=1, max_size=6),
    st.integers(0, 6),
    st.sampled_from([2, 4]),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(1, 4),
)
BLOCKS = st.sampled_from(
    [
        {},
        {"rounding": "int4"},
        {"shard": {"gradients": "world"}},
        {"codecs": {"weights": "int8"}},
        {"shard": {"weights": "node", "except": {"*norm*": {"weights": "device"}}}},
    ]
)


@given(st.sampled_from(GRIDS), LOADS, RATES, BLOCKS, st.none() | st.integers(0, 10**9))
def test_the_choice_fits_and_nothing_that_fits_is_faster(
    grid: Grid, load: Load, rates: Rates, block: dict[str, Any], room: int | None
) -> None:
    config = parse_config(block)
    try:
        choice = choose(config, grid, load, rates, room)
    except ConfigError as error:
        assert room is not None and "shard" in block and str(error).startswith("hzero.memory: found room for")
        return
    best, own = choice.best, [one for one in choice.every if one.config is not None]
    assert best.config is not None and (room is None or best.bytes <= room)
    fitting = [one for one in own if room is None or one.bytes <= room]
    assert best.seconds <= min(one.seconds for one in fitting) * (1 + EQUAL)
    equal = [one for one in fitting if one.seconds <= fitting[0].seconds * (1 + EQUAL)]
    assert best.bytes == min(one.bytes for one in equal)
    assert not best.coded or all(one.coded for one in equal if one.bytes == best.bytes)  # a tie needs no codec
    assert choose(config, grid, load, rates, room) == choice
    plan = ShardPlan.from_config(best.config, grid, 0)
    held = held_states(plan, load.trained, load.itemsize, load.accumulation)
    held |= {name: one for name, one in held_states(plan, load.numels, load.itemsize, 1).items() if "secondary" in name}
    assert sum(state.bytes for state in held.values()) == best.bytes
    # Written keys keep their values. Nothing else rounds.
    assert all(
        getattr(best.config.shard, role) == scope for role, scope in block.get("shard", {}).items() if role != "except"
    )
    assert bool(best.config.shard.exceptions) == ("except" in block.get("shard", {}))
    lossy = {
        (hop.codec.codec, role) for role, hops in (("w", plan.gather_hops()), ("g", plan.reduce_hops())) for hop in hops
    }
    allowed = {("none", "w"), ("exact", "w"), ("none", "g")}
    allowed |= {("int8", "g"), ("int4", "g")} if "rounding" in block else set()
    assert lossy <= allowed | ({("int8", "w")} if "codecs" in block else set())


@given(st.sampled_from(GRIDS), LOADS, RATES, st.integers(0, 10**9), st.integers(0, 10**9))
def test_more_memory_never_costs_time(grid: Grid, load: Load, rates: Rates, room: int, more: int) -> None:
    config = parse_config({})
    small, large = (choose(config, grid, load, rates, size) for size in (room, room + more))
    assert large.best.seconds <= small.best.seconds * (1 + EQUAL)


def test_slow_links_between_nodes_choose_changes_and_fast_links_none() -> None:
    load, grid = Load((10**8,), (10**8,), 2, 4, 10, 1), Grid(4, 2, 2)
    for between, exact in ((1.0, True), (1000.0, False)):
        tiers = {
            "intra_package": TierRate(1000, 1),
            "intra_node": TierRate(1000, 1),
            "inter_node": TierRate(between, 1),
        }
        choice = choose(parse_config({}), grid, load, Rates(tiers, 0.0, 1e-10, 1e-10), 10**10)  # type: ignore[arg-type]
        assert ("codec exact" in choice.best.name) == exact, choice
    assert "hzero saves no time here" in str(choose(parse_config({}), Grid(1, 1, 2), load, _equal(), 0))
    # Written gradients leave the weights free, which fit over the world.
    written = choose(parse_config({"shard": {"gradients": "device"}}), grid, load, _equal(), 4 * 10**8)
    assert written.best.config is not None and written.best.config.shard.weights == "world"


def _equal() -> Rates:
    return Rates({tier: TierRate(1.0, 1.0) for tier in TIERS}, 0.0, 0.0, 0.0)


def test_room_is_what_states_and_activations_leave() -> None:
    load, grid = Load((8_000_000,), (8_000_000,), 2, 1, 1, 1), Grid(2, 2, 2)
    cases: list[tuple[dict[str, Any], int | None, int]] = [
        ({}, 116_000_000, 50_000_000),  # half, beside 16 bytes of a million weights
        ({"activations": "90MB"}, 116_000_000, 10_000_000),
        ({"device": "118MB"}, None, 50_000_000),  # the weights' shards too
        ({"device": 118_000_000, "activations": 0}, None, 100_000_000),
    ]
    for memory, free, room in cases:
        assert room_of(parse_config({"memory": memory}), grid, load, free) == room, memory
    assert room_of(parse_config({}), grid, replace(load, state_bytes=0), 116_000_000) == 58_000_000  # offloaded
    for memory, says in (
        ({"device": "10MB"}, r"memory.device: found 10.00 MB; expected at least 18.00 MB"),
        ({"device": "20MB", "activations": "10MB"}, r"memory.activations: found 10.00 MB; expected at most 2.00 MB"),
    ):
        with pytest.raises(ConfigError, match=says):
            room_of(parse_config({"memory": memory}), grid, load)


@given(
    st.integers(0, 10**6), st.sampled_from([("kB", 1e3), ("GB", 1e9), ("KiB", 1024), ("TiB", 2**40), ("MiB", 2**20)])
)
def test_bytes_as_users_write_them(count: int, unit: tuple[str, float]) -> None:
    assert (
        bytes_of(count) == count and bytes_of(f"{count}{unit[0]}") == bytes_of(f"{count} {unit[0]}") == count * unit[1]
    )
    for wrong in (f"{count}", f"-{count}GB", f"{count}gb", f"{count} G", 1.5, True, None, -1 - count):
        with pytest.raises(ValueError, match="expected bytes, or a text such as 64GB"):
            bytes_of(wrong)


def test_rounding_is_one_key() -> None:
    for rounding, inside, between in (("none", "none", "none"), ("int8", "int8", "int8"), ("int4", "int8", "int4")):
        for preset in ("fit", "lossless", "zero1"):
            gradients = parse_config({"preset": preset, "rounding": rounding}).codecs.gradients
            assert [gradients[tier].codec for tier in ("intra_package", "intra_node", "inter_node")] == [
                inside,
                inside,
                between,
            ]
    assert (
        parse_config({"rounding": "int4", "codecs": {"gradients": "bf16"}}).codecs.gradients.inter_node.codec == "bf16"
    )
    rounded = parse_config({"preset": "lossless", "rounding": "int4"})
    assert rounded.codecs == parse_config({"preset": "exact"}).codecs
    own = [name for name, one in PRESETS.items() if one.gradients_codec != "none"]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rounding": "int2"}, "rounding: found 'int2'; expected none, int8 or int4"),
        *(({"preset": name, "rounding": "none"}, f"with preset '{name}', which has its own") for name in own),
        *(
            ({"preset": "topo", key: value}, f"{key}: found with preset 'topo'")
            for key, value in (("links", "a"), ("memory", {}))
        ),
    ]
    for block, says in cases:
        with pytest.raises(ConfigError, match=says):
            parse_config(block)
