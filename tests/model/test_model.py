"""The performance model: its resources, collectives and steps, and its errors on measured rows."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.calibration import (
    Check,
    all_reduce_rows,
    calibrates,
    collective_checks,
    emulated_checks,
    emulated_rows,
    fabric,
    fit_all_reduce,
    fit_net_ring,
    fit_recomputed,
    fit_trained,
    link_checks,
    misordered,
    training_checks,
)
from hzero.model.collectives import Phase, transfer
from hzero.model.compute import model_buckets
from hzero.model.job import Job
from hzero.model.profile import Source, load_profile, profile_names
from hzero.model.shape import gpt_neox_shape
from hzero.model.sharing import speeds
from hzero.model.simulate import COMPUTE, Task, simulate
from hzero.model.step import Prediction, predict
from hzero.parsing import parse_config
from hzero.sharding.plan import ShardPlan
from hzero.sharding.sequence import PLAIN, Crossing, Scheme
from hzero.topology import Grid
from hzero.validation import ConfigError
from tests.ranks import ROOT

FRONTIER = load_profile("frontier-2026")


def _model(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "conf" / "model" / f"{name}.yaml").read_text())


def _preset(name: str, grid: Grid) -> ShardPlan:
    return ShardPlan.from_config(parse_config({"preset": name}), grid, 0)


def _predicted(scheme: str | Scheme, nodes: int, **keys: Any) -> Prediction:
    grid = Grid(nodes, 4, 2)
    made = _preset(scheme, grid) if isinstance(scheme, str) else scheme
    exact = keys.pop("exact", False)
    return predict(made, Job(gpt_neox_shape(_model("gpt_neox_20b")), **keys), grid, FRONTIER, exact=exact)


# ---- resources and events -----------------------------------------------------------------------------------------------


def test_transfers_share_a_full_resource_alike_and_leave_the_rest_to_others() -> None:
    assert speeds([{"a": 1.0}, {"a": 1.0}]) == [0.5, 0.5]
    assert speeds([{"a": 1.0, "b": 0.1}, {"a": 1.0}, {"b": 1.0}]) == pytest.approx([0.5, 0.5, 0.95])
    assert speeds([{"a": 0.25}, {"a": 0.5}]) == [1.0, 1.0]
    assert speeds([{"a": 1 / 50}, {"a": 1 / 50, "b": 1 / 10}], math.inf) == pytest.approx([40, 10])


def test_tasks_wait_for_others_and_for_their_lane() -> None:
    first = Task("wire", "first", [Phase(1.0, {"node": 2.0})], details={"tier": "node"})
    second = Task("other", "second", [Phase(0.0, {"node": 2.0})], details={"tier": "node"})
    compute = Task(COMPUTE, "compute", [Phase(0.0, {"compute": 1.0})], [first])
    timeline = simulate([first, second, compute])
    # The second is alone for a second, then both share the node until it has ended.
    assert (second.end, first.end, compute.start, timeline.seconds) == pytest.approx((3.0, 4.0, 4.0, 5.0))
    assert timeline.exposed == pytest.approx({"node": 4.0})
    assert timeline.latency == pytest.approx(1.0)
    with pytest.raises(ValueError, match="nothing can start"):
        late = Task("wire", "late", [Phase(1.0)])
        simulate([Task("wire", "early", [Phase(1.0)], [late]), late])


def test_a_flat_ring_waits_for_milliseconds_where_tiers_do_not() -> None:
    """384 ranks: 383 steps of a flat ring, 47 between nodes; three tiers have 47 + 3 + 1 steps."""
    grid = Grid(48, 4, 2)
    flat = transfer(Crossing("weights", "all_gather", ("gcd", "gpu", "node"), 384, PLAIN, 1), 1 << 30, grid, FRONTIER)
    tiers = [
        transfer(Crossing("weights", "all_gather", (tier,), grid.size(tier), PLAIN, 1), 1 << 30, grid, FRONTIER)
        for tier in ("node", "gpu", "gcd")
    ]
    assert flat.latency_s > 1.5e-3 > sum(phase.latency_s for phase in tiers)
    doubled = Crossing("weights", "all_gather", ("node",), 48, PLAIN, 1)
    short = [transfer(doubled, 1 << 20, grid, FRONTIER, algorithm=name).latency_s for name in ("library", "doubling")]
    assert short[1] < short[0] / 3


def test_messages_to_all_peers_pay_for_links_between_switch_groups() -> None:
    crossing = Crossing("gradients", "all_to_all", ("node",), 256, PLAIN, 256)
    near = transfer(crossing, 1 << 30, Grid(128, 4, 2), FRONTIER)
    far = transfer(crossing, 1 << 30, Grid(256, 4, 2), FRONTIER)
    assert "uplink" not in near.work
    assert far.work["uplink"] == pytest.approx(far.work["node"] * 0.5 * 1.75)


# ---- measured rows ------------------------------------------------------------------------------------------------------


def test_the_profiles_hold_what_the_calibration_rows_give() -> None:
    fits = {**fit_all_reduce(), **fit_recomputed(), **fabric(), **fit_net_ring(FRONTIER)}
    assert {name: FRONTIER.value(name) for name in fits} == pytest.approx(fits, rel=0.01)
    before = load_profile("frontier-2023")
    assert before.value("compute_tflops") == pytest.approx(fit_trained(before), rel=0.01)


def test_published_collectives_that_were_not_fit() -> None:
    checks = [check for check in collective_checks(FRONTIER) if check.use == "K"]
    assert len(checks) == sum(use == "K" for use, *_ in all_reduce_rows()) == 10
    for check in checks:
        assert abs(check.error) < (0.10 if check.size >= 1 << 24 else 0.25), check
    # Both are too fast: nothing that was fit says what forwarding costs.
    assert [abs(check.error) < 0.10 for check in link_checks()] == [True, True]


def test_published_training_that_was_not_fit() -> None:
    [check] = [check for check in training_checks(load_profile("frontier-2023")) if check.use == "K"]
    assert abs(check.error) < 0.08


def test_the_emulated_cluster() -> None:
    checks = emulated_checks(emulated_rows("2026-11-22"), load_profile("emulated"))
    for row, check in checks:
        if not row.core_bound and calibrates(row):
            assert abs(check.error) < 0.10, check
    held_out = [check.error for row, check in checks if row.suite == "sweep"]
    assert sum(abs(error) < 0.15 for error in held_out) >= len(held_out) - 2
    assert max(map(abs, held_out)) < 0.18
    assert not misordered(checks)
    assert Check("K", "", 0, 2.0, 3.0).error == 0.5


# ---- steps --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["topo", "zero3", Scheme("deepspeed", hpz="node", quantized=True, visible=1)])
def test_layers_and_micro_steps_are_alike(scheme: str | Scheme) -> None:
    keys = {"micro_batch": 1, "accumulation": 5}
    short, exact = _predicted(scheme, 48, **keys), _predicted(scheme, 48, exact=True, **keys)
    assert short.step_s == pytest.approx(exact.step_s, rel=0.02)
    assert sum(short.exposed.values()) == pytest.approx(sum(exact.exposed.values()), rel=0.05, abs=0.01)
    assert exact.timeline is not None and short.timeline is None


def test_the_whole_machine_takes_less_than_a_second() -> None:
    start = time.process_time()
    found = _predicted("topo", 9408, micro_batch=2, accumulation=4)
    assert time.process_time() - start < 1
    assert found.step_s > _predicted("topo", 48, micro_batch=2, accumulation=4).step_s


@given(bucket_numel=st.integers(1, 2 * 10**9), name=st.sampled_from(["gpt_neox_1m", "gpt_neox_125m", "gpt_neox_20b"]))
def test_buckets_of_every_size_add_up_to_the_model(bucket_numel: int, name: str) -> None:
    shape = gpt_neox_shape(_model(name))
    buckets = model_buckets(shape, bucket_numel)
    assert [numel for bucket in buckets for numel in bucket.numels] == shape.numels, "each parameter once, in order"
    flops = shape.layers * (shape.layer_flops + shape.attention_flops) + shape.after_flops
    assert sum(bucket.flops for bucket in buckets) == pytest.approx(flops)
    largest = max(bucket.numel for bucket in buckets[1:-1])
    left_over = bucket_numel // 100  # a bias
    assert largest <= max(bucket_numel, *shape.layer) + left_over


def test_small_models_are_gathered_together_and_kept() -> None:
    """DeepSpeed gathers ahead across layers up to its bucket, and releases what is not used again soon."""
    shape = gpt_neox_shape(_model("gpt_neox_125m"))
    layer = sum(shape.layer)
    buckets = model_buckets(shape, 5 * layer)
    assert [bucket.name for bucket in buckets] == ["embedding", "5 layers", "5 layers", "2 layers", "head"]
    assert sum(bucket.numel for bucket in buckets) == sum(shape.numels)
    one_by_one = model_buckets(shape, layer)
    assert sum(bucket.flops for bucket in buckets) == pytest.approx(sum(bucket.flops for bucket in one_by_one))

    def gathers(reuse_numel: int, scheme: str | Scheme = "topo") -> list[str]:
        made = _preset(scheme, Grid(2, 4, 2)) if isinstance(scheme, str) else scheme
        job = Job(shape, bucket_numel=5 * layer, reuse_numel=reuse_numel)
        timeline = predict(made, job, Grid(2, 4, 2), FRONTIER, exact=True).timeline
        assert timeline is not None
        return [task.name.removeprefix("backward ") for task in timeline.tasks
                if task.name.startswith("backward") and task.lane != COMPUTE]  # fmt: skip

    assert gathers(0) == ["2 layers", "5 layers", "5 layers", "embedding"], "the last is kept"
    head = sum(shape.after)
    assert gathers(2 * head + 1) == ["5 layers", "5 layers", "embedding"]
    assert gathers(10**9) == []
    assert len(gathers(10**9, Scheme("fsdp"))) == shape.layers + 2, "FSDP2 gathers each layer, and again"


def test_layers_that_are_kept_are_not_extrapolated() -> None:
    shape = gpt_neox_shape({**_model("gpt_neox_1b"), "num_layers": 24})
    grid, plan = Grid(4, 4, 2), _preset("zero3", Grid(4, 4, 2))
    job = Job(shape, reuse_numel=10**9)
    short, exact = (predict(plan, job, grid, FRONTIER, exact=exact).step_s for exact in (False, True))
    assert short == pytest.approx(exact, rel=0.01)
    assert short < predict(plan, Job(shape), grid, FRONTIER).step_s


def test_ddp_waits_for_its_buckets_when_backward_has_ended() -> None:
    source = Source(what="a slow network", date="now", stack="none", kind="assumed")
    slow = FRONTIER.with_values(source, net_tree_gb_s=1.0)
    job = Job(gpt_neox_shape({**_model("gpt_neox_1b"), "num_layers": 8}))
    timeline = predict(Scheme("ddp"), job, Grid(16, 4, 2), slow, exact=True).timeline
    assert timeline is not None
    backward = [task for task in timeline.tasks if task.name.startswith("backward")]
    reductions = [task for task in timeline.tasks if task.name.startswith("reduce")]
    assert len(backward) == len(reductions) > 8
    assert all(after.start == before.end for before, after in itertools.pairwise(backward))
    assert reductions[1].end > backward[-1].end, "the second is under way when backward ends"


@pytest.mark.parametrize("preset", ["hpz", "lossless"])
def test_a_micro_step_does_not_wait_for_reductions_of_the_last(preset: str) -> None:
    source = Source(what="slow", date="2026-11", stack="test", kind="assumed")
    slow = FRONTIER.with_values(source, net_ring_gb_s=0.5, net_rails_gb_s=0.5, gpu_pairs_gb_s=0.5)
    grid, job = Grid(2, 4, 2), Job(gpt_neox_shape(_model("gpt_neox_1b")), accumulation=2)
    timeline = predict(_preset(preset, grid), job, grid, slow, exact=True).timeline
    assert timeline is not None
    second = [task for task in timeline.tasks if task.lane == COMPUTE][
        2 * len(model_buckets(job.model, job.bucket_numel))
    ]
    assert second.name.startswith("forward")
    before = timeline.tasks[: timeline.tasks.index(second)]
    last = max(task.end for task in before if task.name.startswith("reduce"))
    assert second.start < last


def test_compression_and_tiers_win_where_tokens_are_few() -> None:
    keys = {"micro_batch": 1, "accumulation": 1}
    steps = {name: _predicted(name, 48, **keys).step_s for name in ("topo", "lossless", "zeropp", "zero3")}
    steps["flat"] = _predicted(Scheme("deepspeed"), 48, **keys).step_s
    assert sorted(steps, key=steps.__getitem__)[0] == "topo"
    assert steps["flat"] > steps["topo"]
    one = _predicted(Scheme("deepspeed", hpz="node", quantized=True, visible=1), 512, **keys)
    assert one.latency_s > _predicted(Scheme("deepspeed", hpz="node", quantized=True), 512, **keys).latency_s


def test_a_checksum_is_a_second_short_collective() -> None:
    grid, job = Grid(48, 4, 2), Job(gpt_neox_shape(_model("gpt_neox_20b")))
    plans = [
        ShardPlan.from_config(parse_config({"preset": "topo", "checksum": checksum}), grid, 0)
        for checksum in (False, True)
    ]
    steps = [predict(plan, job, grid, FRONTIER) for plan in plans]
    assert steps[0].step_s < steps[1].step_s < 1.2 * steps[0].step_s


def test_a_step_with_everything_else_free_is_its_compute() -> None:
    found = _predicted("topo", 1, micro_batch=8, accumulation=1, checkpointing=True)
    assert found.compute_s <= found.step_s < 1.05 * found.compute_s
    assert found.full == "compute"


def test_nodes_spread_over_switch_groups_share_narrow_links() -> None:
    spread = FRONTIER.spread(48)
    assert FRONTIER.groups == 74 and spread is not None and spread.group_nodes == 1
    assert FRONTIER.spread(9408) is None, "all groups are full"
    assert load_profile("emulated").spread(4) is None, "no groups are known"
    grid = Grid(48, 4, 2)
    rail = Crossing("weights", "all_gather", ("node",), 48, PLAIN, 1)
    pairs = Crossing("gradients", "all_to_all", ("node",), 48, PLAIN, 1)
    for crossing, leaves in ((rail, 1.0), (pairs, 47 / 48)):
        packed, apart = (transfer(crossing, 1e9, grid, profile) for profile in (FRONTIER, spread))
        assert "uplink" not in packed.work, "one group holds them"
        assert apart.work["uplink"] == pytest.approx(FRONTIER.taper * leaves * apart.work["node"])
    wide = transfer(Crossing("weights", "all_gather", ("node",), 256, PLAIN, 1), 1e9, Grid(256, 4, 2), FRONTIER)
    assert wide.work["uplink"] < 0.02 * wide.work["node"], "a ring leaves a packed group once"
    plan = _preset("zero3", grid)
    job = Job(gpt_neox_shape(_model("gpt_neox_20b")))
    assert predict(plan, job, grid, spread).step_s > predict(plan, job, grid, FRONTIER).step_s


# ---- profiles -----------------------------------------------------------------------------------------------------------


def test_every_constant_names_its_source(tmp_path: Path) -> None:
    assert set(profile_names()) >= {"frontier-2023", "frontier-2026", "lumi", "dgx_h200", "emulated"}
    for name in profile_names():
        assert load_profile(name).sources
    broken = yaml.safe_load((ROOT / "hzero" / "model" / "profiles" / "dgx_h200.yaml").read_text())
    del broken["constants"]["net_rails_gb_s"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(broken))
    with pytest.raises(ConfigError, match=r"mine\.yaml: constants\.net_rails_gb_s: missing"):
        load_profile(str(tmp_path / "mine.yaml"))
    broken["constants"]["net_rails_gb_s"] = {"value": 1.0, "source": "hearsay"}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(broken))
    with pytest.raises(ConfigError, match=r"constants\.net_rails_gb_s\.source: found 'hearsay', possible: assumed"):
        load_profile(str(tmp_path / "other.yaml"))
    with pytest.raises(ConfigError, match="did you mean 'frontier-2026'"):
        load_profile("frontier-2027")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"name: \xff", r"'.*a\.yaml' is not UTF-8: invalid start byte at byte 6"),
        (b"name: [", r"'.*a\.yaml' is not YAML: while parsing"),
        (b"[" * 5000, r"'.*a\.yaml' is not YAML"),
        (b"extends: a.yaml", r"a\.yaml' extends itself: a\.yaml -> a\.yaml"),
        (b"extends: b.yaml", r"a\.yaml' extends itself: a\.yaml -> b\.yaml -> a\.yaml"),
        (b"extends: [3]", r"extends: found \[3\], expected a profile's name"),
        (b"extends: frontier-2027", "did you mean 'frontier-2026'"),
        (b"extends: lumi\nconstants: [1]", r"a\.yaml: constants: found \[1\]"),
        (b"extends: lumi\nconstants: {gcd_gb_s: {value: -1, source: olcf}}", r"constants\.gcd_gb_s\.value: found -1"),
        (b"extends: lumi\nconstants: {gcd_gb_s: {value: 0, source: olcf}}", r"gcd_gb_s\.value: found 0, expected more"),
        (
            b"extends: lumi\nconstants: {ll_share: {value: 2, source: olcf}}",
            r"ll_share\.value: found 2, expected a share",
        ),
        (b"extends: lumi\ngroup_nodes: 0", "group_nodes: found 0"),
        (b"extends: lumi\nvisible: 3", "visible: found 3, possible: 1, or null"),
        (b"extends: lumi\nerror: -1", "error: found -1"),
        (b"- 3", "expected a block with keys name"),
    ],
)
def test_profiles_that_cannot_be_used_are_one_line(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(content)
    (tmp_path / "b.yaml").write_bytes(b"extends: a.yaml")
    with pytest.raises(ConfigError, match=says) as error:
        load_profile(str(tmp_path / "a.yaml"))
    assert "\n" not in str(error.value)


def test_a_profile_extends_the_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\nname: a")
    (tmp_path / "b.yaml").write_text("extends: lumi\nname: b\nconstants: {gcd_gb_s: {value: 7, source: olcf}}")
    profile = load_profile(str(tmp_path / "a.yaml"))
    assert (profile.name, profile.nodes, profile.value("gcd_gb_s")) == ("a", 2978, 7)


def test_machines_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="nodes: found 9,409; frontier-2026 has 9,408"):
        _predicted("topo", 9409)
    with pytest.raises(ConfigError, match="found a node of 2 x 2 devices, expected 4 x 2"):
        predict(_preset("topo", Grid(2, 2, 2)), Job(gpt_neox_shape(_model("gpt_neox_20b"))), Grid(2, 2, 2), FRONTIER)
