"""Tensor and pipeline parallelism beside hzero, hierarchical gathers of RCCL, and clusters with ordinary NICs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from hzero.config import PLAIN
from hzero.program.collectives import OTHERS
from hzero.program.program import Cross
from hzero.tools.cli import main
from hzero.tools.plan.against import PIPELINE, TENSOR_FSDP, Degrees, against, price
from hzero.tools.plan.machine import CONSTANTS, HIERARCHICAL, Machine, Profile, Source, load_profile
from hzero.tools.plan.scenario import Job, buckets_of, read_scenario
from hzero.tools.plan.step import REST, predict, predict_range
from hzero.topology import Grid

FRONTIER = load_profile("frontier-2026")
ZERO1, FSDP2 = OTHERS["ZeRO-1"], OTHERS["FSDP2"]


def _free() -> Profile:
    """Frontier without latencies, jitter or slow links, so that compute alone takes time."""
    source = Source(what="free", date="2026-11", stack="test", kind="assumed")
    fast = {name: 1e9 for name in CONSTANTS if name.endswith("_gb_s")}
    free = {name: 0.0 for name in CONSTANTS if name.endswith("_us") or name in ("stolen_share", "jitter_share")}
    return FRONTIER.with_values(source, **fast, **free, attention_share=1.0)


def _job(**keys: Any) -> Job:
    job = read_scenario(["model=gpt_neox_1b", "topology=frontier", "topology.nodes=8"]).job
    return replace(job, **{"micro_batch": 1, "accumulation": 16, **keys})


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


# ---- prices -------------------------------------------------------------------------------------------------------------


def test_a_pipeline_waits_for_its_bubble() -> None:
    """(m + (p - 1) / v) / m as long as without one: arXiv 2104.04473, section 2.2."""
    job, profile, grid = _job(), _free(), Grid(8, 4, 2)
    job = replace(job, model=replace(job.model, after=(), numels=job.model.before + (job.model.layer or ()) * 16))
    layers = sum(bucket.flops for bucket in buckets_of(job)[1:-1])
    head = buckets_of(job)[-1].flops
    m = job.accumulation
    for stages, chunks in ((2, 1), (4, 1), (4, 2), (8, 2)):
        step = price(ZERO1, job, grid, profile, Degrees(1, stages, chunks)).step_s
        micro = 3 * job.tokens * (layers / stages + head) / Machine(grid, profile).rate(job.tokens)
        assert step == pytest.approx(micro * (m + (stages - 1) / chunks), rel=2e-3), (stages, chunks)


def test_schemes_are_priced_for_one_batch() -> None:
    scenario = read_scenario(["model=gpt_neox_1b", "topology=frontier", "topology.nodes=8", "train.micro_batch=2"])
    for batch in (None, 32):
        prices = against(replace(scenario, global_batch=batch))
        total = batch or 128
        for name, one in prices.items():
            replicas = 64 // (one.degrees.tensor * one.degrees.pipeline if one.degrees else 1)
            assert one.job.micro_batch * one.job.accumulation * replicas == total, (name, batch)
        assert {TENSOR_FSDP, PIPELINE} <= set(prices)
        # 64 devices cannot share 32 sequences without model parallelism.
        assert ("hzero topo" in prices) == (batch != 32)
        assert ("ZeRO-3, RCCL 2.30" in prices) == ("ZeRO-3" in prices)


def test_the_spread_of_a_step_is_its_communication() -> None:
    job, slow = _job(), FRONTIER.slower
    for name in ("FSDP2", "DDP"):
        few, many = (predict_range(OTHERS[name], job, Machine(Grid(nodes, 4, 2), FRONTIER)) for nodes in (2, 64))
        assert 1 <= few.spread < many.spread < 1 + (FRONTIER.error or 0), name
    machine = Machine(Grid(1, 4, 2), FRONTIER)
    assert machine.compute(1e12, 2048) == Machine(Grid(1, 4, 2), slow).compute(1e12, 2048)


# ---- the command --------------------------------------------------------------------------------------------------------


def test_against_says_which_is_the_fastest_where(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["--against", "2,16", "model=gpt_neox_1b", "topology=frontier", "train.micro_batch=1"]
    result = _json(capsys, *keys, "global_batch=2048")
    assert [row["nodes"] for row in result["winners"]] == [2, 16]
    for row in result["winners"]:
        points = {name: next((p for p in curve if p["nodes"] == row["nodes"]), None)
                  for name, curve in result["curves"].items()}  # fmt: skip
        fitting = {name: point["step_s"] for name, point in points.items() if point and point["fits"]}
        assert row["best"] == min(fitting, key=lambda name: fitting[name])
        assert row["lead"] == pytest.approx(fitting[row["other"]] / fitting[row["hzero"]])
        assert row["over_zero3"] == pytest.approx(fitting["ZeRO-3"] / fitting[row["hzero"]])
        spread = {name: point["spread"] for name, point in points.items() if point}
        far = {name: (1 + REST) * spread[row["best"]] * spread[name] for name in fitting if name != row["best"]}
        # Collectives are uncertain, compute is common.
        assert row["equal"] == [name for name in far if fitting[name] <= fitting[row["best"]] * far[name]]
        assert row["lead_interval"][0] < row["lead"] < row["lead_interval"][1]
        low, high = points["ZeRO-3"]["interval_s"]
        assert high / fitting["ZeRO-3"] == pytest.approx(fitting["ZeRO-3"] / low) == 1 + result["step_error"]
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", *keys]) == 0
    text = capsys.readouterr().out
    assert "ZeRO-3 with RCCL 2.20 to 2.26" in " ".join(text.split()) and re.search(r"fastest on [\d,]+", text)
    for name in ("FSDP2, RCCL 2.30", "TP x PP x ZeRO-1", "FSDP2, hzero topo"):
        assert f" {name} " in text, "names stay whole on narrow terminals"
    assert main(["plan", "--against", "nodes=2,4", "model=gpt_neox_1b", "topology=mi300x"]) == 2
    assert "profile: none is known" in capsys.readouterr().err
    assert main(["plan", *keys, "global_batch=7.5"]) == 2
    assert "global_batch: found '7.5'" in capsys.readouterr().err


# ---- hierarchical all-gathers -------------------------------------------------------------------------------------------


def test_hierarchical_gathers_save_latency_up_to_their_buffer() -> None:
    for nodes in (4, 8, 16, 64):
        machine = Machine(Grid(nodes, 4, 2), FRONTIER)
        crossing = Cross("weights", "all_gather", ("intra_package", "intra_node", "inter_node"), 8 * nodes, PLAIN, 1)
        limit = max((size for least, size in HIERARCHICAL.items() if nodes >= least), default=0)
        for size in (1 << 20, 64 << 20, 128 << 20, 256 << 20):
            flat, two = (machine.transfer(crossing, size, how) for how in ("library", "hierarchical"))
            saved = flat.latency_s - two.latency_s
            assert saved > 0 if size <= limit else flat == two, (nodes, size)
            summed = replace(crossing, kind="reduce_scatter")
            assert machine.transfer(summed, size, "hierarchical") == machine.transfer(summed, size)


# ---- ordinary clusters --------------------------------------------------------------------------------------------------


def test_nics_set_the_rates_between_nodes() -> None:
    keys = ["model=gpt_neox_1b", "topology=nic", "nodes=4", "train.micro_batch=1"]
    steps = {}
    for gbit, nics in ((10, 1), (25, 1), (100, 1), (400, 1), (100, 4)):
        scenario = read_scenario([*keys, f"topology.nic_gbit={gbit}", f"topology.nics_per_node={nics}"])
        assert scenario.machine.profile.value("net_ring_gb_s") == gbit * nics / 8
        steps[gbit, nics] = [predict(one, scenario.job, scenario.machine).step_s
                             for one in (scenario.shard_plan("topo"), scenario.others()["ZeRO-3"])]  # fmt: skip
    assert steps[10, 1] > steps[25, 1] > steps[100, 1] > steps[400, 1] == steps[100, 4]
    assert all(topo < zero3 for topo, zero3 in steps.values())
    four = read_scenario([*keys, "packages_per_node=4"])
    assert four.grid == Grid(4, 4, 1) and four.machine.profile.value("net_ring_gb_s") == 12.5
