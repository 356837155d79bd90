"""`hzero plan --tune`, `--sweep`, `--from` and `--trace`: what they choose, print and write, and what they refuse."""

from __future__ import annotations

import gzip
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from hzero.cli import main
from hzero.parsing import parse_config
from hzero.plan.scenario import read_scenario, with_links
from hzero.plan.sweep import node_counts
from hzero.settings.conf import compose, plain
from hzero.settings.settings import Settings
from hzero.sharding.plan import ShardPlan
from hzero.validation import ConfigError

FRONTIER = ["model=gpt_neox_20b", "topology=frontier"]


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_tune_chooses_what_fits_and_writes_what_trains(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "choice.json"
    keys = ["--tune", *FRONTIER, "nodes=48", "global_batch=384", "codecs=lossless", "memory=45GB"]
    result = _json(capsys, *keys, "--out", str(out))
    assert json.loads(out.read_text()) == result
    assert 1 < len(result["best"]) <= 10
    steps = [one["step_s"] for one in result["best"]]
    assert steps == pytest.approx(sorted(steps), rel=2e-3)
    first = result["best"][0]
    assert all(one["memory_bytes"] <= 45e9 for one in result["best"])
    assert result["left_out"] > 0
    assert parse_config(first["block"]).codecs.weights.node.codec == "none"
    settings = Settings(plain(compose([*FRONTIER, "topology.nodes=48", *first["overrides"]])))
    train = settings["train"]
    assert train["micro_batch"] * train["grad_accumulation"] * 384 == 384
    assert settings.plan is not None
    assert settings.plan.weights_scope == first["block"]["shard"]["weights"]
    assert {row["if"] for row in result["otherwise"]} >= {"latencies twice as long", "compute at half the rate"}
    assert any("spread over all 74 switch groups" in row["if"] for row in result["otherwise"])
    assert "net_rails_gb_s" in result["assumed"] and "core_s_per_gb" not in result["assumed"]


def test_tune_prints_a_command_that_trains_what_it_chose(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["--tune", "model=gpt_neox_4m", "global_batch=24", "train.dtype=bf16", "train.steps=7"]
    result = _json(capsys, *keys, "+deepspeed.zero_optimization.stage3_prefetch_bucket_size=789760")
    first, command = result["best"][0], shlex.split(result["command"])
    assert command[:2] == ["hzero", "train"]
    settings = Settings(plain(compose(command[2:])))
    wanted = ShardPlan.from_config(parse_config(first["block"]), settings.grid, 0)
    assert settings.plan == wanted
    train = settings["train"]
    assert (train["dtype"], train["steps"]) == ("bf16", 7)
    assert train["micro_batch"] * train["grad_accumulation"] == 3
    assert settings["deepspeed"]["zero_optimization"]["stage3_prefetch_bucket_size"] == 789760, "as it was given"
    # Three sequences of a rank at once: every divisor is tried. Equal settings stand there once.
    assert train["micro_batch"] == 3
    assert len({(one["step_s"], one["memory_bytes"]) for one in result["best"]}) == len(result["best"])


def test_weights_are_as_long_as_the_trainer_sends_them() -> None:
    """With dtype auto it sends float32 on processors."""
    sizes = [read_scenario(keys).job.itemsize for keys in ([*FRONTIER, "topology.nodes=2"], ["model=gpt_neox_4m"])]
    assert sizes == [2, 4]
    assert read_scenario(["model=gpt_neox_4m", "train.dtype=bf16"]).job.itemsize == 2


def test_what_deepspeed_is_told_to_keep_and_to_gather_ahead() -> None:
    job = read_scenario(["model=gpt_neox_4m"]).job
    assert (job.bucket_numel, job.reuse_numel, job.ahead) == (50_000_000, 10**9, 1), "DeepSpeed's defaults"
    keys = {
        "stage3_prefetch_bucket_size": 800_000,
        "stage3_max_live_parameters": 900_000,
        "stage3_max_reuse_distance": 7,
    }
    told = [f"+deepspeed.zero_optimization.{key}={value}" for key, value in keys.items()]
    job = read_scenario(["model=gpt_neox_4m", *told]).job
    assert (job.bucket_numel, job.reuse_numel, job.ahead) == (800_000, 7, 0)


def test_what_would_change_the_order(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Kinds of settings outside the first ten are compared too."""
    slow = tmp_path / "slow.yaml"
    slow.write_text("extends: frontier-2026\nname: slow\nconstants: {hbm_gb_s: {value: 60, source: olcf}}")
    result = _json(capsys, "--tune", "model=gpt_neox_1b", "topology=frontier", "nodes=4", f"profile={slow}")
    first = result["best"][0]["setting"]
    assert "none" not in first
    slower = next(row for row in result["otherwise"] if row["if"].startswith("kernels of codecs"))
    assert "none" in slower["first"] and 0.02 < slower["gain"] < slower["longer"]


def test_tune_prefers_less_loss_where_the_model_cannot_tell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--tune", *FRONTIER, "nodes=48", "train.micro_batch=1", "codecs=weights"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for expected in (
        "the first wins: compute is full",
        "with codecs=lossless",
        '"hzero": {"preset": "lossless"',
        "hzero train",
    ):
        assert expected in text, expected


def test_sweep_draws_every_scheme(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "scaling.png"
    result = _json(capsys, "--sweep", "nodes=2,48", *FRONTIER, "--out", str(out))
    assert out.read_bytes().startswith(b"\x89PNG")
    assert {"hzero topo", "DDP", "FSDP2", "HSDP, node", "ZeRO-1", "ZeRO-2", "ZeRO-3", "hpZ", "ZeRO++"} <= set(
        result["curves"]
    )
    assert [point["nodes"] for point in result["curves"]["hzero topo"]] == [2, 48]
    assert not result["curves"]["DDP"][0]["fits"]
    assert node_counts("nodes=1..9408")[:3] == [1, 2, 4]
    assert node_counts("nodes=1..9408")[-2:] == [8192, 9408]


@pytest.mark.parametrize("model", ["gpt_neox_10b", "gpt_neox_20b"])
def test_topo_keeps_its_rate_on_many_nodes(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys = [f"model={model}", "topology=frontier", "train.micro_batch=1", "--out", str(tmp_path / "scaling.png")]
    curves = _json(capsys, "--sweep", "nodes=16,128,1024,9408", *keys)["curves"]
    topo = [point["tflops"] for point in curves["hzero topo"]]
    assert all(point["fits"] for point in curves["hzero topo"]) and min(topo) >= 0.93 * topo[0]
    for other in ("HSDP, node", "FSDP2", "ZeRO-3"):
        assert all(own >= point["tflops"] for own, point in zip(topo, curves[other]) if point["fits"]), other


def test_sweep_says_which_counts_form_no_groups(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "--sweep", "nodes=64,254", *FRONTIER, "--out", str(tmp_path / "scaling.png")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "254 nodes form no groups" in text and "64 nodes form" not in text


def test_a_predicted_step_opens_beside_a_measured_one(tmp_path: Path) -> None:
    out = tmp_path / "step.json.gz"
    assert main(["plan", "--trace", str(out), "model=gpt_neox_1m", "train.grad_accumulation=2"]) == 0
    events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"compute", "weights node", "weights gcd", "gradients node"} <= tracks
    spans = [event for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in spans) == 0
    assert sum(event["name"] == "optimizer" for event in spans) == 1


def test_a_run_beside_its_prediction(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(plain(compose(["model=gpt_neox_1m", "zero=topo"]))))
    (run / "metrics.jsonl").write_text("".join(json.dumps({"kind": "step", "step_s": 2.0}) + "\n" for _ in range(6)))
    hops = {"tier": "node", "hops": 9, "seconds": 88.0, "hidden_seconds": 8.0}
    (run / "summary.json").write_text(
        json.dumps({"world_size": 8, "steps_here": 10, "step_s_median": 2.5, "traffic": [hops]})
    )
    result = _json(capsys, "--from", str(run))
    assert result["step"]["measured_s"] == 2.0
    assert result["parts"]["waiting for tier node"]["measured_s"] == 1.0
    assert sum(part["measured_s"] for part in result["parts"].values()) == pytest.approx(2.0)
    assert sum(part["predicted_s"] for part in result["parts"].values()) == pytest.approx(result["step"]["predicted_s"])
    assert main(["plan", "--from", str(run)]) == 0
    assert f"largest gap: {result['largest_gap']}" in " ".join(capsys.readouterr().out.split())

    summary = {"world_size": 8, "steps_here": 10, "step_s_median": 2.5, "traffic": [hops]}
    traced = {"node": {"wire_s": 0.8, "behind_compute": 0.25, "behind_tiers": 0.0}}
    (run / "summary.json").write_text(json.dumps({**summary, "traced": traced}))
    result = _json(capsys, "--from", str(run))
    assert result["waiting_by"] == "trace"
    assert result["parts"]["waiting for tier node"]["measured_s"] == pytest.approx(0.6)
    for changed, says in (
        ({"world_size": None}, "summary.json: world_size: found None"),
        ({"steps_here": "x"}, "summary.json: steps_here: found 'x'"),
        ({"traffic": [{"tier": "rack"}]}, "summary.json: traffic.0.tier: unknown value 'rack'"),
        ({"step_s_median": None}, "the run made no step"),
        ({"world_size": 6}, "config.yaml: "),
    ):
        (run / "summary.json").write_text(json.dumps({**summary, **changed}))
        assert main(["plan", "--from", str(run)]) == 2
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1, error
    (run / "summary.json").write_text(json.dumps(summary))
    (run / "metrics.jsonl").write_text("[1]\n" * 6)
    assert _json(capsys, "--from", str(run))["step"]["measured_s"] == 2.5, "the summary's, where no step can be read"


def test_measured_links_replace_those_of_the_profile(tmp_path: Path) -> None:
    links: dict[str, Any] = {
        "schema": "hzero-links-1", "date": "2026-11-22", "machine": {}, "versions": {}, "backend": "nccl", "device": "cuda",
        "codecs": "device", "launcher": "", "grid": {"gcd": 2, "gpu": 4, "node": 2}, "settings": {}, "rows": [],
        "tiers": {tier: {"gb_s": rate, "latency_us": 30.0} for tier, rate in (("gcd", 150.0), ("gpu", 70.0), ("node", 9.0))},
    }  # fmt: skip
    (tmp_path / "links.json").write_text(json.dumps(links))
    scenario = read_scenario([*FRONTIER, "topology.nodes=48"], tmp_path / "links.json")
    assert (scenario.profile.value("net_rails_gb_s"), scenario.profile.value("launch_us")) == (72.0, 30.0)
    assert scenario.profile.sources["given"].kind == "measured"
    del links["tiers"]["node"], links["grid"]["node"]
    links["grid"]["node"] = 1
    (tmp_path / "one.json").write_text(json.dumps(links))
    with pytest.raises(ConfigError, match=r"one\.json: tiers\.node: missing, and the plan's grid"):
        with_links(scenario.profile, tmp_path / "one.json", scenario.grid)


def test_a_plan_predicts_where_a_profile_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    result = _json(capsys, *FRONTIER, "nodes=48")
    assert list(result["predicted"]["steps"]) == ["hzero topo", "HSDP, node", "ZeRO-3", "hpZ", "ZeRO++"]
    assert _json(capsys, "topology=mi300x", "nodes=2")["predicted"] is None


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip


def test_other_architectures_by_their_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    keys = ["model=hf", f"model.path={file}", "model.seq_length=128"]
    plan = _json(capsys, *keys)
    assert plan["predicted"]["steps"]["hzero topo"]["step_s"] > 0
    shape = read_scenario(keys).job.model
    query, kv, inner = 64 * 64, 2 * 32 * 64, 3 * 64 * 160
    assert (shape.layers, shape.hidden, shape.before, shape.after) == (6, 64, (512 * 64,), (64, 512 * 64))
    assert sum(shape.layer) == 2 * query + kv + inner + 2 * 64 and sum(shape.numels) == plan["parameters"]
    # Two operations per weight, norms included: those of the last norm are shared among the layers.
    assert shape.layer_flops == pytest.approx(2 * (sum(shape.layer) + 64 / 6))
    assert (shape.attention_flops, shape.after_flops) == (4 * 128 * 64, 2 * 512 * 64)
    tuned = _json(capsys, "--tune", *keys)
    assert Settings(plain(compose(shlex.split(tuned["command"])[2:]))).plan is not None


def test_layers_that_differ_are_not_simulated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "model_type": "qwen2_moe", "num_experts": 4, "decoder_sparse_step": 2,
                                "num_experts_per_tok": 1, "moe_intermediate_size": 32}))  # fmt: skip
    keys = ["model=hf", f"model.path={file}", "model.seq_length=128"]
    assert _json(capsys, *keys)["predicted"] is None
    assert main(["plan", "--tune", *keys]) == 2
    assert "differ, and predictions need equal ones; possible:" in capsys.readouterr().err


def test_what_fits_is_the_largest_that_plans_say_fits(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [*FRONTIER, "nodes=48", "global_batch=12288", "memory=40GB"]
    result = _json(capsys, "--fit", *keys)
    found = {(one["preset"], one["checkpointing"]): one for one in result["fittings"]}
    assert not found["zero1", True]["fits"] and found["zero1", True]["over_bytes"] > 0
    half = found["half", True]
    assert half["fits"] and half["micro_batch"] * half["accumulation"] == 32 and half["memory_bytes"] <= 40e9

    def plan(micro: int) -> dict[str, Any]:
        step = [f"train.micro_batch={micro}", f"accumulation={32 // micro}", "train.activation_checkpointing=true"]
        return _json(capsys, *FRONTIER, "nodes=48", "memory=40GB", "preset=half", *step)

    same, larger = plan(half["micro_batch"]), plan(2 * half["micro_batch"])
    assert same["memory_bytes"] == half["memory_bytes"] == same["presets_bytes"]["half"] <= same["device_bytes"]
    assert {state["name"]: state["bytes"] for state in same["memory"]} == half["states"]
    assert larger["memory_bytes"] > 40e9, "a larger one fits too"
    assert result["best"]["sequence_s"] == min(one["sequence_s"] for one in result["fittings"] if one["fits"])
    assert main(["plan", "--fit", *keys]) == 0
    text = capsys.readouterr().out
    assert f"zero={result['best']['preset']}" in result["command"] and result["command"] in text and "too much" in text


def test_a_plan_says_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [*FRONTIER, "nodes=48", "preset=topo", "train.grad_accumulation=2"]
    assert main(["plan", *keys]) == 0
    said = capsys.readouterr().out
    assert "topo does not fit into 64.00 GB: " in said and "of all presets fit: half (" in said

    def states(*more: str) -> dict[str, int]:
        return {state["name"]: state["bytes"] for state in _json(capsys, *keys, *more)["memory"]}

    zero = "deepspeed.zero_optimization"
    small, scores = states(f"+{zero}.reduce_bucket_size=1000000"), states("attention=math")
    assert states()["gradient buffer"] == 10**9 and small["gradient buffer"] == 2_000_000
    assert states(f"+{zero}.contiguous_gradients=false")["gradient buffer"] == 0
    assert states(f"+{zero}.offload_optimizer.device=cpu")["optimizer"] == 0
    assert scores["activations"] - states()["activations"] == pytest.approx(44 * 64 * 2048 * 4096 * 4, rel=0.1)
    assert states("+deepspeed.data_types.grad_accum_dtype=fp32")["gradient shard"] == 2 * states()["gradient shard"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tune", *FRONTIER, "nodes=1", "memory=20GB"], "memory: found 20 GB, and the smallest setting needs"),
        (["--tune", *FRONTIER, "nodes=9409"], "nodes: found 9,409; frontier-2026 has 9,408"),
        (["--tune", *FRONTIER, "nodes=48", "global_batch=100"], "expected a multiple of the 384 devices, such as 384"),
        (["--tune", *FRONTIER, "nodes=48", "memory=much"], "memory: found 'much', expected GB as in memory=64GB"),
        (["--tune", *FRONTIER, "nodes=48", "codecs=lossles"], "did you mean 'lossless'"),
        (["--tune", *FRONTIER, "nodes=48", "profile=emulated"], "profile emulated: found nodes of 4 x 2 devices, expected 2 x 2"),
        (["--tune", "topology=mi300x", "nodes=2"], "profile: none is known for topology=mi300x"),
        (["--tune", "topology=frontier", "nodes=2", "profile=none.yaml"], "profile: cannot read 'none.yaml'"),
        (["--sweep", "nodes=9..2", *FRONTIER], "--sweep: found 'nodes=9..2', expected nodes=1..9408"),
        (["--sweep", "nodes=2,9409", *FRONTIER], "--sweep: found 9,409 nodes; profile frontier-2026 has 9,408"),
        (["--sweep", "nodes=2,4", *FRONTIER, "nodes=3"], "nodes: given twice; --sweep says them"),
        (["--sweep", "nodes=2,4", *FRONTIER, "preset=topo"], "zero.preset: given with --sweep, which predicts all presets"),
        (["--tune", "+deepspeed.zero_optimization.stage3_prefetch_bucket_size=auto"], "found 'auto', expected a number of"),
        (["--tune", *FRONTIER, "nodes=2", "zero=topo"], "zero: given with --tune, which searches the block"),
        (["--tune", *FRONTIER, "nodes=2", "train.activation_checkpointing=true"], "with --tune, which searches it"),
        (["--tune", *FRONTIER, "nodes=2", "global_batch=16", "train.micro_batch=1"], "given with global_batch, which --tune"),
        (["--from", "nowhere"], "--from: cannot read 'nowhere/config.yaml'"),
        ([*FRONTIER, "nodes=2", "codecs=all"], "codecs: given without --tune"),
        ([*FRONTIER, "nodes=2", "attention=fast"], "attention: unknown value 'fast'; did you mean 'flash'?"),
        (["--fit", *FRONTIER, "nodes=48", "preset=topo"], "zero.preset: given with --fit, which looks at all presets"),
        (["--fit", *FRONTIER, "nodes=48", "train.micro_batch=2"], "train.micro_batch: given with --fit, which finds the"),
        (["--fit", *FRONTIER, "nodes=48", "codecs=all"], "codecs: given with --fit, which does not read it"),
        (["--fit", *FRONTIER, "nodes=8", "memory=16GB"], "possible: '++deepspeed.zero_optimization={reduce_bucket_size: 5"),
        (["--sweep", "nodes=2,4", *FRONTIER, "codecs=all"], "codecs: given with --sweep, which does not read it; it reads"),
        ([*FRONTIER, "nodes=2", "--out", "x"], "--out: given without --tune or --sweep"),
    ],
)  # fmt: skip
def test_input_that_cannot_be_used_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
