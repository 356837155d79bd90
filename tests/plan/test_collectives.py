"""Collectives of a step: their order, and bytes and memory against a walk of every message and closed forms."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hzero.codecs.formats import chunk_numel
from hzero.config import parse_config
from hzero.program.collectives import Chains, Scheme, chains_of, step_traffic
from hzero.program.program import StagePrograms
from hzero.program.shards import ShardPlan
from hzero.topology.grid import Grid
from tests.plan.grids import GRIDS

ZERO3 = Scheme("deepspeed")
GRID = Grid(48, 4, 2)
NUMELS = st.lists(st.integers(1, 3000), min_size=1, max_size=5)


def _walk(
    plan: ShardPlan, numels: list[int], itemsize: int, accumulation: int, fetches: int
) -> dict[tuple[str, str], int]:
    """Received bytes of one rank by following every message of every hop, record by record."""
    world = plan.grid.world_size
    chunks = [chunk_numel(n, world) for n in numels]
    received = {(role, tier): 0 for role in ("weights", "gradients") for tier in plan.grid.tiers}

    def message(hop, rows: int) -> int:
        fmt = hop.codec.format
        return sum(fmt.record_bytes(chunk, itemsize) for _ in range(rows) for chunk in chunks)

    rows = 1
    for hop in plan.refresh_hops():
        received["weights", hop.tier] += sum(message(hop, rows) for _ in range(hop.size - 1))
        rows *= hop.size
    for hop in plan.unshard_hops():
        received["weights", hop.tier] += fetches * accumulation * (hop.size - 1) * message(hop, rows)
        rows *= hop.size
    rows = world
    for hop in plan.reduce_hops():
        times = 1 if hop in plan.boundary_hops() else accumulation
        rows //= hop.size
        received["gradients", hop.tier] += times * (hop.size - 1) * message(hop, rows)
    return received


@settings(max_examples=40)
@given(GRIDS, NUMELS, st.sampled_from(["zero3", "hpz", "zeropp", "lossless", "topo"]), st.integers(1, 4))
def test_traffic_is_what_a_walk_of_all_messages_counts(
    grid: Grid, numels: list[int], preset: str, accumulation: int
) -> None:
    plan = ShardPlan.from_config(parse_config({"preset": preset}), grid, grid.world_size - 1)
    walked = _walk(plan, numels, 2, accumulation, 2)
    for row in step_traffic(plan, grid, numels, itemsize=2, accumulation=accumulation):
        assert row.wire_bytes == walked[row.role, row.tier], row
        assert row.used == (grid.size(row.tier) > 1)


def test_zero3_sends_everything_but_one_shard_over_every_link_of_its_ring() -> None:
    """2 x 2 x 2: 4 of the ring's 8 links are inside packages, 2 between packages of a node, 2 between nodes."""
    rows = {(r.role, r.tier): r for r in step_traffic(ZERO3, Grid(2, 2, 2), [8 * 100], itemsize=2, accumulation=3)}
    link = 7 * 100 * 2  # M (w - 1) / w of M = 1,600 bytes
    assert {key: row.wire_bytes for key, row in rows.items()} == {
        ("weights", "intra_package"): 4 * link * 6 / 8,
        ("weights", "intra_node"): 2 * link * 6 / 8,
        ("weights", "inter_node"): 2 * link * 6 / 8,
        ("gradients", "intra_package"): 4 * link * 3 / 8,
        ("gradients", "intra_node"): 2 * link * 3 / 8,
        ("gradients", "inter_node"): 2 * link * 3 / 8,
    }
    assert (
        4 * rows["weights", "inter_node"].wire_bytes == 6 * link
    )  # a node's four ranks together: one link of the ring
    assert not any(row.used for row in step_traffic(ZERO3, Grid(1, 1, 1), [100]))


def test_buffers_of_programs_are_what_a_step_takes_and_leaves() -> None:
    chunks = [1024]
    plans = {
        name: ShardPlan.from_config(parse_config({"preset": name}), Grid(2, 2, 2), 0) for name in ("topo", "zero3")
    }
    topo, zero3 = (StagePrograms.of(plan) for plan in plans.values())
    message = plans["topo"].codecs.gradients["intra_package"].format.message_bytes(chunks, 8, 2)
    assert topo.micro.peak_bytes(chunks, 2) == message // 2 + 4 * 2 * 1024, (
        "messages of peers, and their sum in float32"
    )
    whole = 8 * 1024 * 2
    assert zero3.unshard.peak_bytes(chunks, 2) == whole + whole // 2 == zero3.micro.peak_bytes(chunks, 2)
    kept = parse_config({"preset": "topo", "error_feedback": ["intra_node", "inter_node"]})
    programs = StagePrograms.of(ShardPlan.from_config(kept, Grid(2, 2, 2), 0))
    assert (programs.micro.residual_rows, programs.outermost.residual_rows) == (4, 2)


# ---- order --------------------------------------------------------------------------------------------------------------


def _shape(chains: Chains) -> list[tuple[str, int, list[tuple[str, int, int]]]]:
    return [(*when, [("+".join(x.tiers), x.ranks, x.rows) for x in made.crossings]) for when, made in chains.items()]


def test_topo_refreshes_once_and_crosses_nodes_in_the_last_micro_step() -> None:
    plan = ShardPlan.from_config(parse_config({"preset": "topo"}), GRID, 0)
    fetch, inside = [("intra_package", 2, 192)], [("intra_package", 2, 384), ("intra_node", 4, 192)]
    assert _shape(chains_of(plan, GRID, 2)) == [
        ("refresh", 0, [("inter_node", 48, 1), ("intra_node", 4, 48)]),
        ("forward", 0, fetch),
        ("backward", 0, fetch),
        ("reduce", 0, inside),
        ("forward", 1, fetch),
        ("backward", 1, fetch),
        ("reduce", 1, inside),
        ("boundary", 1, [("inter_node", 48, 48)]),
    ]


def test_zeropp_takes_the_devices_that_a_rank_sees_for_its_node() -> None:
    def reduce(visible: int | None) -> list[tuple[str, int, int]]:
        scheme = Scheme("deepspeed", hpz="node", quantized=True, visible=visible)
        return _shape(chains_of(scheme, GRID, 1))[-1][2]

    assert reduce(None) == [("intra_package+intra_node", 8, 384), ("inter_node", 48, 48)]
    assert reduce(1) == [("intra_package+intra_node+inter_node", 384, 384)]


def test_other_engines() -> None:
    hsdp = _shape(chains_of(Scheme("fsdp", shard="node"), GRID, 2))
    assert hsdp[-1] == ("reduce", 1, [("intra_package+intra_node", 8, 384), ("inter_node", 48, 48)])
    assert hsdp[2] == ("reduce", 0, [("intra_package+intra_node", 8, 384)])
    assert [phase for phase, _ in chains_of(Scheme("deepspeed", stage=2), GRID, 3)] == ["reduce"] * 3 + ["after"]
    stage1 = chains_of(Scheme("deepspeed", stage=1), GRID, 3)
    assert [phase for phase, _ in stage1] == ["reduce", "after"]
    assert [program.crossings[0].kind for program in stage1.values()] == ["all_reduce", "all_gather"]
    hpz = [program.crossings[0] for program in chains_of(Scheme("deepspeed", hpz="node"), GRID, 2).values()]
    assert [crossing.ranks for crossing in hpz if crossing.role == "weights"] == [384, 8, 8, 8]
    assert len(chains_of(Scheme("ddp"), GRID, 4)) == 1
