"""Sequence: the chains of a step, of the stage and of other engines."""

from __future__ import annotations

from hzero.parsing import parse_config
from hzero.plan.sequence import Chain, Scheme, scheme_chains, stage_chains
from hzero.plan.shards import ShardPlan
from hzero.topology import Grid

GRID = Grid(48, 4, 2)


def _shape(chains: list[Chain]) -> list[tuple[str, int, list[tuple[str, int, int]]]]:
    return [(c.phase, c.micro, [("+".join(x.tiers), x.ranks, x.rows) for x in c.crossings]) for c in chains]


def test_topo_refreshes_once_and_crosses_nodes_in_the_last_micro_step() -> None:
    plan = ShardPlan.from_config(parse_config({"preset": "topo"}), GRID, 0)
    fetch, inside = [("gcd", 2, 192)], [("gcd", 2, 384), ("gpu", 4, 192)]
    assert _shape(stage_chains(plan, 2)) == [
        ("refresh", 0, [("node", 48, 1), ("gpu", 4, 48)]),
        ("forward", 0, fetch),
        ("backward", 0, fetch),
        ("reduce", 0, inside),
        ("forward", 1, fetch),
        ("backward", 1, fetch),
        ("reduce", 1, [*inside, ("node", 48, 48)]),
    ]


def test_zeropp_takes_the_devices_that_a_rank_sees_for_its_node() -> None:
    def reduce(visible: int | None) -> list[tuple[str, int, int]]:
        scheme = Scheme("deepspeed", hpz="node", quantized=True, visible=visible)
        return _shape(scheme_chains(scheme, GRID, 1))[-1][2]

    assert reduce(None) == [("gcd+gpu", 8, 384), ("node", 48, 48)]
    assert reduce(1) == [("gcd+gpu+node", 384, 384)]


def test_other_engines() -> None:
    hsdp = _shape(scheme_chains(Scheme("fsdp", shard="node"), GRID, 2))
    assert hsdp[-1] == ("reduce", 1, [("gcd+gpu", 8, 384), ("node", 48, 48)])
    assert hsdp[2] == ("reduce", 0, [("gcd+gpu", 8, 384)])
    assert [c.phase for c in scheme_chains(Scheme("deepspeed", stage=2), GRID, 3)] == ["reduce"] * 3 + ["after"]
    stage1 = scheme_chains(Scheme("deepspeed", stage=1), GRID, 3)
    assert [c.phase for c in stage1] == ["reduce", "after"]
    assert [c.crossings[0].kind for c in stage1] == ["all_reduce", "all_gather"]
    hpz = scheme_chains(Scheme("deepspeed", hpz="node"), GRID, 2)
    assert [c.crossings[0].ranks for c in hpz if c.crossings[0].role == "weights"] == [384, 8, 8, 8]
    assert len(scheme_chains(Scheme("ddp"), GRID, 4)) == 1
