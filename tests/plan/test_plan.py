"""`hzero plan` and its modes: what they compute, choose, print and write, and what they refuse."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from hzero.config import PRESETS
from hzero.tools.cli import main
from hzero.tools.experiment import compose
from hzero.tools.plan.against import node_counts
from hzero.tools.plan.scenario import read_scenario

NICS = ["model=gpt_neox_1m", "topology=nic", "nodes=2"]
FRONTIER = ["model=gpt_neox_20b", "topology=frontier"]


def _json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def _text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


# ---- a plan -------------------------------------------------------------------------------------------------------------


def test_a_plan_shows_bytes_memory_times_and_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    text = _text(capsys, *FRONTIER, "nodes=48")
    for expected in ("384 devices", "secondary partition", "nominal rates, not measured", "ZeRO++", "predicted step"):
        assert expected in text, expected
    assert all(f"│ {preset} " in text for preset in PRESETS)
    result = _json(capsys, "topology=frontier", "nodes=2", "accumulation=4", "preset=half")
    assert (result["preset"], result["accumulation"], result["world_size"]) == ("half", 4, 16)
    assert {row["tier"] for row in result["traffic"] if row["seconds"]} == {"intra_package", "intra_node", "inter_node"}
    others = ["FSDP2", "FSDP2, RCCL 2.30", "HSDP, node", "ZeRO-3", "ZeRO-3, RCCL 2.30", "hpZ", "ZeRO++"]
    assert list(result["schemes"]) == [*PRESETS, "FSDP2, topo", "FSDP2, lossless", *others]
    assert all(one["step_s"] > 0 for one in result["schemes"].values())
    unknown = _json(capsys, "topology=mi300x", "nodes=2")
    assert unknown["predicted"] is None and unknown["schemes"]["topo"].keys().isdisjoint({"step_s", "tflops"})


def test_a_plan_says_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [*FRONTIER, "nodes=48", "preset=topo", "train.grad_accumulation=2"]
    assert "topo fits into 80.00 GB" in _text(capsys, *keys, "memory=80GB")
    assert "topo does not fit, " in _text(capsys, *keys), "64 GB are the profile's"

    def states(*more: str) -> dict[str, int]:
        return {state["name"]: state["bytes"] for state in _json(capsys, *keys, *more)["memory"]}

    zero = "deepspeed.zero_optimization"
    small = states(f"+{zero}.reduce_bucket_size=1000000")
    assert states()["gradient buffer"] == 10**9 and small["gradient buffer"] == 2_000_000
    assert states(f"+{zero}.contiguous_gradients=false")["gradient buffer"] == 0
    assert states(f"+{zero}.offload_optimizer.device=cpu")["optimizer"] == 0
    narrow, wide = (
        states("deepspeed.bf16.bf16_master_weights_and_grads=true", "deepspeed.bf16.bf16_optimizer_states=true"),
        states(),
    )
    assert all(2 * narrow[name] == wide[name] for name in ("optimizer", "transient step"))
    assert states("deepspeed.data_types.grad_accum_dtype=fp32")["gradient shard"] == 2 * states()["gradient shard"]


def test_what_deepspeed_is_told_to_keep_and_to_gather_ahead() -> None:
    job = read_scenario(["model=gpt_neox_4m"]).job
    assert (job.prefetch, job.reuse, job.ahead) == (50_000_000, 10**9, 1), "DeepSpeed's defaults"
    assert job.itemsize == 4, "with dtype auto a run on CPU sends float32"
    keys = ("prefetch_bucket_size=800000", "max_live_parameters=900000", "max_reuse_distance=7")
    told = [f"deepspeed.zero_optimization.stage3_{key}" for key in keys]
    job = read_scenario(["model=gpt_neox_4m", "train.dtype=bf16", *told]).job
    assert (job.prefetch, job.reuse, job.ahead, job.itemsize) == (800_000, 7, 0, 2)


def test_muon_sends_matrices_and_keeps_one_momentum(capsys: pytest.CaptureFixture[str]) -> None:
    """Its bytes are compared with a run's in tests/parity. Embeddings and norms are Adam's."""
    keys = [
        "model=gpt_neox_1m",
        "topology=frontier",
        "nodes=2",
        "model.num_layers=4",
        "zero.codecs.optimizer.inter_node=int8",
    ]
    adam = _json(capsys, *keys, "deepspeed.optimizer.type=AdamW")
    keys.append("deepspeed.zero_optimization.reduce_scatter=false")
    muon = _json(capsys, *keys, "deepspeed.optimizer.type=Muon")
    rows = [(row["tier"], row["codec"]) for row in muon["traffic"] if row["role"] == "optimizer"]
    assert rows == [("intra_package", "none"), ("intra_node", "none"), ("inter_node", "int8")]
    assert muon["traffic"][: len(adam["traffic"])] == adam["traffic"] and muon["notes"] != adam["notes"]
    states = [{row["name"]: row["bytes"] for row in one["memory"]}["optimizer"] for one in (adam, muon)]
    # A momentum of bfloat16 instead of two moments of float32, of four layers on sixteen ranks.
    assert states[0] - states[1] == 4 * 12 * 128 * 128 * 6 // 16


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
}  # fmt: skip


def test_other_architectures_by_their_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    keys = ["model=hf", f"model.path={file}", "model.seq_length=128", "topology=frontier", "nodes=2"]
    plan = _json(capsys, *keys)
    assert plan["schemes"]["topo"]["step_s"] > 0
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 160 + 2 * 64
    assert plan["parameters"] == 2 * 512 * 64 + 6 * layer + 64
    tuned = _json(capsys, "--best", *keys)
    assert compose(shlex.split(tuned["command"])[2:]).plan is not None
    # Layers that differ have bytes and memory, and no prediction.
    file.write_text(json.dumps({**LLAMA, "model_type": "qwen2_moe", "num_experts": 4, "decoder_sparse_step": 2,
                                "num_experts_per_tok": 1, "moe_intermediate_size": 32}))  # fmt: skip
    assert _json(capsys, *keys)["predicted"] is None
    assert main(["plan", "--best", *keys]) == 2
    assert "layers of qwen2_moe differ; expected equal layers" in capsys.readouterr().err


def test_scopes_and_codecs_by_pattern_count(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}))
    keys = ["model=hf", f"model.path={file}", "model.seq_length=128", "topology=frontier", "nodes=2", "preset=lossless"]
    one = _json(capsys, *keys, "accumulation=3")
    scoped = _json(capsys, *keys, "accumulation=3", "zero.shard.except={*experts*: {weights: world}}")
    experts = 6 * 4 * 3 * 64 * 160  # their shards need no padding
    before, after = ({state["name"]: state["bytes"] for state in plan["memory"]} for plan in (one, scoped))
    assert before["secondary partition"] - after["secondary partition"] == experts * 2 // 2, "2 bytes, over a package"
    assert before["gradient accumulation buffers"] == after["gradient accumulation buffers"]
    assert scoped["memory_bytes"] == scoped["schemes"]["lossless"]["memory_bytes"] < one["memory_bytes"]
    assert scoped["schemes"]["lossless"]["step_s"] > one["schemes"]["lossless"]["step_s"]
    coded = _json(capsys, *keys, "accumulation=3", "zero.codecs.except={*experts*: int8}")
    assert coded["traffic"][0]["codec"] == "none, int8"
    assert main(["plan", *keys, "zero.shard.except={*expertz*: {weights: world}}"]) == 2
    assert "the nearest first: model.layers.0.mlp.experts.gate_up_proj, " in capsys.readouterr().err
    tied = [*keys, "+model.config={tie_word_embeddings: true}"]
    two = "zero.shard.except={*embed*: {weights: %s}, *lm_head*: {weights: %s}}"
    ways = []
    for one in (two % ("world", "world"), "zero.shard.except={*embed*: {weights: world}}"):
        scenario = read_scenario([*tied, one])
        plan, model = scenario.experiment.plan, scenario.job.model
        assert plan is not None
        ways.append([(part.way, numels) for part, numels in plan.parts(model.numels, model.names)])
    assert ways[0] == ways[1] and sum(ways[0][0][1]) == 512 * 64
    assert main(["plan", *tied, two % ("world", "node")]) == 2
    says = "found '*lm_head*' for model.embed_tokens.weight = lm_head.weight, which are tied and have '*embed*' too; expected"
    assert says in capsys.readouterr().err


# ---- searches -----------------------------------------------------------------------------------------------------------


def test_bits_of_codec_exact_follow_the_learning_rate_or_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [*FRONTIER, "nodes=48", "preset=lossless"]

    def bits(*more: str) -> float:
        plan = _json(capsys, *keys, *more)
        sent = next(row for row in plan["traffic"] if (row["role"], row["tier"]) == ("weights", "inter_node"))
        return 8 * 8 * sent["wire_bytes"] / plan["parameters"] * 48 / 47  # eight devices share a node's bytes

    by_rate = [bits(f"train.lr={lr}") for lr in (1e-5, 1e-4, 1e-3)]
    assert by_rate == pytest.approx([1.4, 2.0, 4.0], rel=0.02)
    assert bits("--bits", "7") == pytest.approx(7, rel=0.02)
    assert bits("zero.codecs.weights.inter_node={codec: exact, bits: 9}") == pytest.approx(9, rel=0.02)
    for value in ("0", "17", "nan"):
        assert main(["plan", *keys, "--bits", value]) == 2
        assert "--bits: found" in capsys.readouterr().err


def test_best_finds_the_largest_that_plans_say_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # in which cells are not wrapped
    keys = [*FRONTIER, "nodes=48", "global_batch=12288", "memory=40GB"]
    result = _json(capsys, "--best", *keys)
    found = result["settings"]
    assert not found["zero1, checkpointing"]["fits"] and found["zero1, checkpointing"]["memory_bytes"] > 40e9
    half = found["half, checkpointing"]
    assert half["fits"] and half["micro_batch"] * half["accumulation"] == 32 and half["memory_bytes"] <= 40e9

    def plan(micro: int) -> dict[str, Any]:
        step = [f"train.micro_batch={micro}", f"accumulation={32 // micro}", "train.activation_checkpointing=true"]
        return _json(capsys, *FRONTIER, "nodes=48", "memory=40GB", "preset=half", *step)

    same, larger = plan(half["micro_batch"]), plan(2 * half["micro_batch"])
    assert same["memory_bytes"] == half["memory_bytes"] == same["schemes"]["half"]["memory_bytes"]
    assert {state["name"]: state["bytes"] for state in same["memory"]} == half["states"]
    assert larger["memory_bytes"] > 40e9, "a larger one fits too"
    fitting = {name.partition(",")[0]: one for name, one in found.items() if one["fits"]}
    assert result["rounded"]["sequence_s"] == min(one["sequence_s"] for one in found.values() if one["fits"])
    best = result["best"]["block"]["preset"]
    assert (
        best in fitting
        and PRESETS[best].gradients_codec == "none"
        and "with rounding, " in _text(capsys, "--best", *keys)
    )
    text = _text(capsys, "--best", *keys)
    assert result["command"] in text and "too much" in text


def test_numbers_of_nodes() -> None:
    counts = node_counts("1..9408")
    assert node_counts("nodes=1..9408") == counts and node_counts("48") == [48]
    assert counts[:3] == [1, 2, 4] and counts[-2:] == [8192, 9408]


# ---- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--best", *FRONTIER, "nodes=1", "memory=20GB"], "memory: found 20.00 GB, but the smallest setting"),
        (["--best", *FRONTIER, "nodes=8", "memory=16GB"], "at backward: optimizer"),
        (["--best", *FRONTIER, "nodes=48", "global_batch=100"], "expected a multiple of the 384 devices, such as 384"),
        ([*FRONTIER, "nodes=48", "profile=dgx_h200"], "profile dgx_h200: found nodes of 4 x 2 devices; expected 8 x 1"),
        (["--best", "topology=mi300x", "nodes=2"], "profile: none is known for this topology"),
        (["--against", "nodes=9..2", *FRONTIER], "--against: found 'nodes=9..2'; expected nodes, as in 48"),
        (["--against", "nodes=2,9409", *FRONTIER], "nodes: found 9,409; expected at most the 9,408 of frontier-2026"),
        (["--against", "nodes=2,4", *FRONTIER, "nodes=3"], "found with --against, which sets it itself; expected the nodes"),
        (["--best", "deepspeed.zero_optimization.reduce_bucket_size=auto"], "size: found 'auto'; expected a valid number"),
        (["--best", *FRONTIER, "nodes=2", "global_batch=16", "train.micro_batch=1"], "train.micro_batch: found with --best"),
        ([*FRONTIER, "nodes=2", "global_batch=16"], "global_batch: found with a plain plan, which does not read it; expected"),
        ([*NICS, "topology.nics_gbit=25"], "topology: found key 'nics_gbit'; expected"),
        ([*FRONTIER, "nodes=2", "topology.nics_per_node=4"], "topology.nics_per_node: found 4 without topology.nic_gbit"),
        (["zero=stock"], "zero.preset: found none; expected one"),
        (["zero.codecs.weights.inter_node=exp"], "codecs.weights.inter_node.codec: found 'exp'; expected none, bf16, int8,"),
        ([*NICS, "topology.nic_gbit=1e-320"], "topology.nic_gbit: found 1e-320; expected"),
        ([*NICS, "topology.bandwidth_gb_s.inter_node=1e-320"], "topology.bandwidth_gb_s.inter_node: found 1e-320; expected"),
        (["model.num_layers=1000000000"], "model.num_layers: found 1000000000"),
        (["topology=frontier", "nodes=1000000000000"], "topology.nodes: found 1000000000000"),
        ([*FRONTIER, "nodes=2", "--links", "a\0"], "--links: found 'a\\x00'; expected a text without NUL"),
        (["model=hf", "model.path=a\0"], "model.path: found 'a\\x00'; expected a text without NUL"),
        ([*FRONTIER, "nodes=2", f"memory={'9' * 400}"], "memory: found '999999999999...9999999999999'; expected bytes, or a"),
    ],
)  # fmt: skip
def test_input_that_cannot_be_used_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_experts_of_autoep_are_refused_as_a_run_refuses_them(capsys: pytest.CaptureFixture[str]) -> None:
    """Their bytes are compared with a run's in tests/deepspeed."""
    config = str({**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}).replace("'", "")
    keys = ["model=hf", f"model.config={config}", "model.seq_length=128", "topology=frontier", "nodes=4"]
    size = "deepspeed.expert_parallel={enabled: true, autoep_size: %d}"
    experts = [*keys, "zero.codecs.expert.intra_node=int8", size % 8]
    assert main(["plan", *experts]) == 0
    for words, message in (
        (["--best", *keys, size % 8], "deepspeed.expert_parallel.enabled: found True with --best"),
        ([*keys, size % 3], "deepspeed.expert_parallel.autoep_size: found 3; expected a divisor of the 32"),
        ([*keys, size % 16], "autoep_size: found 16 for a model with 8 experts in a layer"),
        (["model=gpt_neox_1m", *keys[3:], size % 8], "autoep_size: found 8 for a model with 0 experts in a layer"),
        (
            [*experts, "zero.codecs.expert.intra_package=mpc"],
            "codecs.expert.intra_package: found 'mpc' with coded tokens",
        ),
    ):
        capsys.readouterr()
        assert main(["plan", *words]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
