"""The trainer with pipeline stages: the same losses as the whole model, what it sends, and what it refuses."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from hzero.cli import main
from hzero.settings.conf import compose, plain
from hzero.settings.settings import Settings
from hzero.sharding.tensor_groups import stage_layers
from hzero.train.export import run_export
from hzero.train.loop import deepspeed_config
from hzero.train.pipeline_parallel import Stage
from hzero.train.report import run_report
from hzero.validation import ConfigError
from tests.forks import Command

#: Sizes that neither ranks nor blocks divide, where layers allow it; 2 nodes x 2 GPUs x 2 GCDs.
SHAPE = [
    *("model.hidden_size=40", "model.num_layers=3", "model.num_heads=2", "model.intermediate_size=54"),
    *("model.seq_length=24", "model.vocab_size=301", "topology.nodes=2", "topology.gcds_per_gpu=2"),
]
JOB = [
    *("data.path=book.txt", "train.timeout_s=60", "train.warmup_steps=2", "train.steps=4", "checkpoint.every=0"),
    *("sample.at_end=false",),
]
#: TP 2 x PP 2 x DP 2 on 8 ranks; and the batches of 4 ranks of a whole model.
STAGES = (
    "topology.gpus_per_node=2",
    "model.tensor_parallel=2",
    "model.pipeline_parallel=2",
    "train.grad_accumulation=2",
)
WHOLE = ("topology.gpus_per_node=1", "train.eval_batches=2")
#: With buckets of which a step has several.
LOSSY = [
    *(f"zero.codecs.{role}=int8" for role in ("tensor", "pipeline", "optimizer")),
    *(
        "+deepspeed.zero_optimization.reduce_bucket_size=9001",
        "+deepspeed.zero_optimization.allgather_bucket_size=7002",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of the whole model, and of one in stages without codecs and with them."""
    path = tmp_path_factory.mktemp("stages")
    lines = [
        f"the {i % 17} quick brown foxes jump over {i % 5} lazy dogs, {i * 7919 % 1000} times\n" for i in range(4000)
    ]
    (path / "book.txt").write_text("".join(lines))
    _train(path, "whole", "zero=lossless", *WHOLE)
    _train(path, "stages", "zero=lossless", "train.activation_checkpointing=true", *STAGES)
    _train(path, "lossy", "zero=topo", *LOSSY, "train.dtype=bf16", *STAGES)
    return path


def _train(folder: Path, name: str, *overrides: str) -> None:
    code, out, err = _run(folder, name, *overrides)
    assert code == 0, out + err


def _run(folder: Path, name: str, *overrides: str) -> tuple[int, str, str]:
    command = ["train", *SHAPE, *JOB, "train.micro_batch=2", *overrides, f"run.name={name}"]
    env = {"XDG_CACHE_HOME": str(folder / "cache")}
    return Command(command, folder, folder / f"output-{name}", env).finish()


def _steps(folder: Path, name: str) -> dict[int, dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if row["kind"] == "step"}


def _summary(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "runs" / name / "summary.json").read_text())
    return found


def test_stages_train_as_the_whole(folder: Path) -> None:
    whole, stages = _steps(folder, "whole"), _steps(folder, "stages")
    assert list(whole) == list(stages) == [1, 2, 3, 4]
    for step, row in whole.items():
        for key in ("loss", "grad_norm"):
            assert stages[step][key] == pytest.approx(row[key], rel=1e-5), (step, key)
        assert stages[step]["tokens"] == row["tokens"]
    ours, theirs = _summary(folder, "stages"), _summary(folder, "whole")
    assert ours["parameters"] == theirs["parameters"]
    assert (ours["pipeline_parallel"], theirs["pipeline_parallel"]) == (2, 1)
    assert ours["eval"]["loss_exact"] == pytest.approx(theirs["eval"]["loss_exact"], rel=1e-5)


def test_codecs_cost_little_and_the_summary_has_every_role(folder: Path) -> None:
    steps, exact = _steps(folder, "lossy"), _steps(folder, "stages")
    assert steps[4]["loss"] < steps[1]["loss"]
    for step, row in exact.items():
        assert steps[step]["loss"] == pytest.approx(row["loss"], abs=0.05)
        assert steps[step]["loss"] != row["loss"]
    traffic = {(row["role"], row["tier"]): row for row in _summary(folder, "lossy")["traffic"]}
    assert {key: row["codec"] for key, row in traffic.items()} == {
        ("gradients", "gpu"): "int4",
        ("tensor", "gcd"): "int8",
        ("pipeline", "node"): "int8",
        ("optimizer", "gpu"): "int8",
    }
    # Steps, micro-batches, forward and backward, pipelines; half of 2 x 24 x 40 bfloat16 for each tensor rank. Not evaluations.
    assert traffic["pipeline", "node"]["raw_bytes"] == 4 * 2 * 2 * 4 * (2 * 24 * 40 // 2) * 2
    assert traffic["pipeline", "node"]["raw_bytes"] > 1.9 * traffic["pipeline", "node"]["wire_bytes"]


def test_the_plan_has_the_bytes_that_were_sent(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = [*SHAPE, *JOB, *STAGES, "zero=topo", *LOSSY, "train.dtype=bf16"]
    assert main(["plan", *job, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [stage["layers"] for stage in plan["stages"]] == [2, 1]
    planned: Counter[tuple[str, str, str]] = Counter()
    ranks, steps = 4, 4
    for stage in plan["stages"]:
        for row in stage["traffic"]:
            for size in ("wire_bytes", "raw_bytes"):
                planned[row["role"], row["tier"], size] += row[size] * ranks * steps
    sent = {
        (row["role"], row["tier"], size): row[size]
        for row in _summary(folder, "lossy")["traffic"]
        for size in ("wire_bytes", "raw_bytes")
    }
    assert planned == sent
    memory = _summary(folder, "lossy")["memory"]
    for state in ("weights", "optimizer"):  # but for the padding of partitions
        assert memory[state] == pytest.approx(max(stage["memory"][state] for stage in plan["stages"]), rel=1e-3)
    assert main(["plan", *job]) == 0
    text = capsys.readouterr().out
    assert "pipeline parallel: 2 stages, 2 nodes x 1 GPU x 1 GCD, such as 0, 4" in text
    assert main(["plan", *job, "memory=1GB"]) != 0 and main(["presets", *SHAPE, *JOB, *STAGES]) != 0
    err = capsys.readouterr().err
    assert (
        "memory: given with model.pipeline_parallel 2" in err and "`hzero presets`, whose degrees have no effect" in err
    )


def test_a_run_of_stages_goes_on_bit_for_bit(folder: Path) -> None:
    same = ("zero=topo", *LOSSY, "train.dtype=bf16", *STAGES, "checkpoint.every=2", "run.dir='runs/again[1]'")
    _train(folder, "begun", *same, "train.steps=2")
    before = _steps(folder, "again[1]")
    _train(folder, "gone-on", *same, "resume=auto")
    steps, exact = before | _steps(folder, "again[1]"), _steps(folder, "lossy")
    # The rate of learning falls with train.steps: of the first two steps it is that of the warm-up.
    assert [steps[step]["loss"] for step in (1, 2, 3, 4)] == [exact[step]["loss"] for step in (1, 2, 3, 4)]
    half = "resume='runs/again[1]/checkpoints/step_000002'"
    _train(folder, "clipped", *same, half, "train.grad_clip=0.000001", "run.dir=runs/clipped")
    clipped = _steps(folder, "clipped")
    assert clipped[3]["loss"] == exact[3]["loss"] and clipped[4]["loss"] != exact[4]["loss"]
    assert (
        run_report([str(folder / "runs" / "again[1]"), str(folder / "runs" / "whole"), "-o", str(folder / "report")])
        == 0
    )
    code, _, err = _run(
        folder,
        "whole-again",
        "zero=topo",
        "train.dtype=bf16",
        *STAGES,
        "model.pipeline_parallel=1",
        *same[-2:],
        "resume=auto",
    )
    assert code != 0
    assert "was trained with model.pipeline_parallel=2, and goes on with the same alone; found 1" in err
    with pytest.raises(ConfigError, match=r"is of 2 pipeline stages .*, which are not joined"):
        run_export([str(folder / "runs" / "again[1]")])


def test_examples_are_refused_in_one_line(folder: Path) -> None:
    rows = [
        json.dumps({"prompt": f"count to {i % 9}", "completion": " ".join(map(str, range(i % 9)))}) for i in range(400)
    ]
    (folder / "examples.jsonl").write_text("\n".join(rows))
    code, _, err = _run(folder, "examples", "zero=lossless", *STAGES, "data.path=examples.jsonl")
    assert code != 0
    assert "data.path: found examples with model.pipeline_parallel 2" in err


def test_what_stages_do_not_have_is_refused_in_one_line() -> None:
    for overrides, message in (
        (["model.num_layers=1"], "model.pipeline_parallel: found 2, more than model.num_layers 1"),
        (["model.zero_init=true"], "model.pipeline_parallel: found 2 with model.zero_init true"),
        (["model.sequence_parallel=2"], "model.pipeline_parallel: found 2 with model.sequence_parallel 2; one of them"),
        (["topology.nodes=3"], "model.pipeline_parallel: found 2, into which .*possible: 1, 3, 6, 12$"),
        (["topology.order=[gcd,gpu,node]"], "topology.order: found .* with model.pipeline_parallel 2"),
        (["sample.at_end=true"], "sample.at_end: found True with"),
        (["sample.every=2"], "sample.every: found 2 with"),
        (["+deepspeed.zero_optimization.round_robin_gradients=true"], "round_robin_gradients: found True with"),
        (["+deepspeed.zero_optimization.elastic_checkpoint=true"], "elastic_checkpoint: found True with"),
        (["+deepspeed.pipeline.pipe_partitioned=false"], "deepspeed.pipeline: found {'pipe_partitioned': False} with"),
        (["train.dtype=fp16"], "train.dtype: found fp16 with"),
        (["trace.steps=[1,2]"], "trace.steps: found"),
        (["+deepspeed.zero_optimization.stage3_max_live_parameters=9"], "stage3_max_live_parameters: found 9 with"),
        (["zero.shard.weights=node"], "zero.shard: given with pipeline stages"),
        (["zero.codecs.weights.node=int8"], "zero.codecs.weights: given with pipeline stages"),
        (["zero.guard.every=5"], "zero.guard: given with pipeline stages"),
        (
            ["zero.codecs.pipeline.gcd=int8"],
            r"zero.codecs.pipeline: none on the tiers that pipelines of 2 ranks cross \(node\)",
        ),
        (
            ["zero.codecs.optimizer.node=int8"],
            "zero.codecs.optimizer: none on the tiers that data-parallel groups of 4",
        ),
        (
            ["zero.codecs.pipeline=exp", "train.dtype=fp32"],
            "zero.codecs.pipeline.node: found 'exp', which holds bfloat16",
        ),
        (
            ["model.pipeline_parallel=1", "zero.codecs.pipeline=int8"],
            "zero.codecs.pipeline: given without model.pipeline",
        ),
        (
            ["model.pipeline_parallel=1", "zero.codecs.optimizer=int8"],
            "zero.codecs.optimizer: given without model.pipe",
        ),
    ):
        stages = ["model.pipeline_parallel=2", "topology.gpus_per_node=2"]
        with pytest.raises(ConfigError, match=message) as error:
            Settings(plain(compose([*SHAPE, *JOB, "zero=topo", *stages, *overrides])))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("preset", ["zhybrid", "mzhybrid", "hybrid"])
def test_what_a_preset_says_of_other_dimensions_is_no_mistake(preset: str) -> None:
    for overrides in (
        ["model.pipeline_parallel=1"],
        ["model.pipeline_parallel=2"],
        [*STAGES],
        ["model.tensor_parallel=2"],
    ):
        Settings(plain(compose([*SHAPE, *JOB, f"zero={preset}", "topology.gpus_per_node=2", *overrides])))


def test_the_block_has_what_stages_have_alone() -> None:
    settings = Settings(plain(compose([*SHAPE, *JOB, "zero=topo", *STAGES, "zero.error_feedback=[gpu]"])))
    zero = deepspeed_config(settings)["zero_optimization"]
    assert zero["stage"] == 1
    assert set(zero["hzero"]) == {"preset", "error_feedback", "topology"}


def test_predictions_say_that_they_do_not_know_stages(capsys: pytest.CaptureFixture[str]) -> None:
    job = [*SHAPE, *JOB, "sample.at_end=true"]  # which stages would refuse, and no plan reads
    assert main(["plan", *job, "topology.gpus_per_node=2", "model.pipeline_parallel=2"]) == 0
    assert main(["plan", "--fit", "memory=64GB", *job, "topology.gpus_per_node=2", "model.pipeline_parallel=2"]) == 2
    assert "model.pipeline_parallel: found 2, which predictions do not know" in capsys.readouterr().err


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_stages_one_after_the_other_are_the_model(stages: int) -> None:
    config = GPTNeoXConfig(
        hidden_size=24, vocab_size=41, intermediate_size=36, num_hidden_layers=5, num_attention_heads=2, use_cache=False
    )

    def model() -> Any:
        torch.manual_seed(3)
        return GPTNeoXForCausalLM(config)

    ids = torch.arange(2 * 7).view(2, 7) * 5 % 41
    parts = [Stage(model(), number, stages) for number in range(stages)]
    hidden = ids
    for one in parts:
        hidden = one(hidden)
    torch.testing.assert_close(hidden, model()(ids).logits, rtol=1e-6, atol=1e-6)
    assert sum(p.numel() for one in parts for p in one.parameters()) == sum(p.numel() for p in model().parameters())
    bounds = [stage_layers(5, number, stages) for number in range(stages)]
    assert bounds[0][0] == 0 and bounds[-1][1] == 5
    assert all(one[1] == other[0] for one, other in itertools.pairwise(bounds))
