"""`hzero train` with `model.tensor_parallel`: the losses and weights of the whole model. 4 ranks as 2 x 2 tensor groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from hzero.cli import main
from hzero.plan.command import compute
from hzero.settings.conf import compose, plain
from hzero.settings.settings import Settings, model_numels
from hzero.train.tensor_parallel import SPLIT, ColumnParallel, joined
from hzero.validation import ConfigError
from tests.forks import Command

#: Sizes that neither ranks nor blocks divide, where layers allow it.
SHAPE = [
    "model.hidden_size=40",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.intermediate_size=54",
    "model.seq_length=24",
    "model.vocab_size=301",
    "topology.nodes=2",
    "topology.gpus_per_node=1",
    "topology.gcds_per_gpu=2",
]
JOB = [
    *("data.path=book.txt", "train.timeout_s=60", "train.warmup_steps=2", "train.steps=4", "checkpoint.every=2"),
    "sample.tokens=4",
]
SPLIT_IN_TWO = ("model.tensor_parallel=2", "train.micro_batch=2")
LOSSY = ("zero=topo", "zero.codecs.tensor=int8", "train.grad_accumulation=3", "train.activation_checkpointing=true")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of the whole model, and of the same in two parts, without codecs and with them."""
    path = tmp_path_factory.mktemp("tensor")
    lines = [
        f"the {i % 17} quick brown foxes jump over {i % 5} lazy dogs, {i * 7919 % 1000} times\n" for i in range(4000)
    ]
    (path / "book.txt").write_text("".join(lines))
    _train(path, "whole", "zero=lossless", "train.micro_batch=1")
    _train(path, "parts", "zero=lossless", *SPLIT_IN_TWO)
    return path


def _train(folder: Path, name: str, *overrides: str) -> None:
    command = ["train", *SHAPE, *JOB, *overrides, f"run.name={name}"]
    code, out, err = Command(
        command, folder, folder / f"output-{name}", {"XDG_CACHE_HOME": str(folder / "cache")}
    ).finish()
    assert code == 0, out + err


def _steps(folder: Path, name: str) -> dict[int, dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if row["kind"] == "step"}


def _summary(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "runs" / name / "summary.json").read_text())
    return found


def test_parts_train_as_the_whole(folder: Path) -> None:
    whole, parts = _steps(folder, "whole"), _steps(folder, "parts")
    assert list(whole) == list(parts) == [1, 2, 3, 4]
    for step, row in whole.items():
        for key in ("loss", "grad_norm"):
            assert parts[step][key] == pytest.approx(row[key], rel=1e-5), (step, key)
        assert parts[step]["tokens"] == row["tokens"]
    assert whole[4]["loss"] < whole[1]["loss"]
    ours, theirs = _summary(folder, "parts"), _summary(folder, "whole")
    assert ours["parameters"] == theirs["parameters"] and (ours["tensor_parallel"], theirs["tensor_parallel"]) == (2, 1)
    assert ours["eval"]["loss_exact"] == pytest.approx(theirs["eval"]["loss_exact"], rel=1e-5)
    assert {(row["role"], row["tier"]) for row in ours["traffic"]} == {
        ("weights", "node"),
        ("gradients", "node"),
        ("tensor", "gcd"),
    }


def test_an_export_joins_the_parts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = []
    for name in ("whole", "parts"):
        target = folder / f"{name}-export"
        assert main(["export", str(folder / "runs" / name), "-o", str(target)]) == 0
        models.append(GPTNeoXForCausalLM.from_pretrained(target).state_dict())
    assert models[0].keys() == models[1].keys()
    for name, want in models[0].items():
        torch.testing.assert_close(
            models[1][name], want, rtol=0, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_resumed_run_goes_on_alike_and_in_the_same_layout_alone(folder: Path) -> None:
    half = "resume=runs/parts/checkpoints/step_000002"
    _train(folder, "resumed", "zero=lossless", *SPLIT_IN_TWO, half)
    before, after = _steps(folder, "parts"), _steps(folder, "resumed")
    assert [after[step]["loss"] for step in (3, 4)] == [before[step]["loss"] for step in (3, 4)]
    for number, (overrides, message) in enumerate(
        (
            (
                ("train.micro_batch=1",),
                "was trained with model.tensor_parallel=2, and goes on with the same alone; found 1",
            ),
            (
                (*SPLIT_IN_TWO, "topology.nodes=4"),
                "was written by 4 ranks with tensor or pipeline parallelism, and goes on with as many",
            ),
        )
    ):
        command = ["train", *SHAPE, *JOB, *overrides, "zero=lossless", half, "run.name=other"]
        env = {"XDG_CACHE_HOME": str(folder / "cache")}
        code, _, err = Command(command, folder, folder / f"output-other{number}", env).finish()
        assert code == 2 and message in err


def test_codecs_of_activations_cost_little_and_the_plan_says_their_bytes(folder: Path) -> None:
    _train(folder, "lossy", *LOSSY, *SPLIT_IN_TWO, "checkpoint.every=0")
    steps = _steps(folder, "lossy")
    assert steps[1]["loss"] == pytest.approx(_steps(folder, "whole")[1]["loss"], abs=0.05)
    assert steps[4]["loss"] < steps[1]["loss"]
    counted = {(row["role"], row["tier"]): row for row in _summary(folder, "lossy")["traffic"]}
    planned = {(row["role"], row["tier"]): row for row in compute([*SHAPE, *LOSSY, *SPLIT_IN_TWO], 4)["traffic"]}
    row = counted["tensor", "gcd"]
    assert row["codec"] == "int8" and row["raw_bytes"] / row["wire_bytes"] > 3
    assert row["hops"] == 4 * 4 * 2 * planned["tensor", "gcd"]["crossings"]  # ranks, steps, reduction and copy
    for key in ("wire_bytes", "raw_bytes"):
        assert row[key] == 4 * 4 * planned["tensor", "gcd"][key]
        # A step has one refresh and one boundary, so all of node's gradients are the plan's too.
        assert counted["gradients", "node"][key] == 4 * 4 * planned["gradients", "node"][key]


@pytest.mark.parametrize(("preset", "codec"), [("zhybrid", "zfp"), ("mzhybrid", "mpc"), ("hybrid", "int8")])
def test_presets_of_dimensions_train_the_parts(folder: Path, preset: str, codec: str) -> None:
    _train(folder, preset, f"zero={preset}", *SPLIT_IN_TWO, "checkpoint.every=0")
    steps, whole = _steps(folder, preset), _steps(folder, "whole")
    # Of the first step the codecs of weights and activations alone are seen; mzhybrid loses nothing of either.
    exact = preset == "mzhybrid"
    assert steps[1]["loss"] == pytest.approx(whole[1]["loss"], rel=1e-6 if exact else 0.02)
    assert steps[4]["loss"] == pytest.approx(whole[4]["loss"], rel=0.02)
    counted = {(row["role"], row["tier"]): row for row in _summary(folder, preset)["traffic"]}
    row = counted["tensor", "gcd"]
    assert row["codec"] == codec and row["wire_bytes"] < row["raw_bytes"]


def test_codecs_that_a_preset_has_for_dimensions_that_are_not_there_are_no_mistake() -> None:
    for preset in ("zhybrid", "mzhybrid", "hybrid"):
        assert Settings(plain(compose([*SHAPE, f"zero={preset}"]))).preset == preset
        with pytest.raises(ConfigError, match=r"zero.codecs.tensor: given without model.tensor_parallel"):
            Settings(plain(compose([*SHAPE, f"zero={preset}", "zero.codecs.tensor.gcd=bf16"])))
    notes = compute([*SHAPE, "zero=mzhybrid", *SPLIT_IN_TWO], 4)["notes"]
    assert any(note.startswith("codec mpc: its bytes are the most") for note in notes)


def test_a_plan_shows_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "topology=frontier", "nodes=48", "model=gpt_neox_20b", "model.tensor_parallel=4"]) == 0
    out = capsys.readouterr().out
    assert "tensor parallel: 4 ranks, 1 node x 2 GPUs x 2 GCDs, such as 0, 1, 2, 3" in out
    assert "data parallel: 96 ranks, 48 nodes x 2 GPUs x 1 GCD, such as 0, 4, 8" in out
    whole, parts = (
        compute(["topology=frontier", "nodes=48", "model=gpt_neox_20b", f"model.tensor_parallel={tensor}"])
        for tensor in (1, 4)
    )
    assert whole["parameters"] == parts["parameters"] and whole["layout"] is None
    assert (
        main(["plan", "--fit", "model=gpt_neox_20b", "topology=frontier", "nodes=48", "model.tensor_parallel=4"]) == 2
    )
    assert "model.tensor_parallel: found 4, which predictions do not know" in capsys.readouterr().err


def test_what_cannot_be_split_is_refused_in_one_line() -> None:
    for overrides, message in (
        (["model.tensor_parallel=4"], "model.tensor_parallel: found 4, which does not divide model.num_heads 2"),
        (["model.tensor_parallel=2", "model.intermediate_size=55"], "does not divide model.intermediate_size 55"),
        (["model.tensor_parallel=2", "topology.gcds_per_gpu=1"], "model.tensor_parallel: found 2, .*possible: 1$"),
        (
            ["model.tensor_parallel=2", "model.zero_init=true"],
            "model.tensor_parallel: found 2 with model.zero_init true",
        ),
        (["model.tensor_parallel=0"], "model.tensor_parallel: found 0"),
        (["zero.codecs.tensor=int8"], "zero.codecs.tensor: given without model.tensor_parallel"),
        (["zero.codecs.expert.gcd=int8"], "zero.codecs.expert: given, and nothing of the trainer's models"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            Settings(plain(compose([*SHAPE, "zero=topo", *overrides])))
        assert "\n" not in str(error.value)


def test_parts_have_the_sizes_that_plans_count_and_join_to_the_whole() -> None:
    settings = Settings(plain(compose([*SHAPE, "zero=topo", *SPLIT_IN_TWO])))
    config = settings["model"]
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            hidden_size=config["hidden_size"],
            vocab_size=config["vocab_size"],
            intermediate_size=config["intermediate_size"],
            num_hidden_layers=config["num_layers"],
            num_attention_heads=config["num_heads"],
        )
    )
    sizes = []
    for name, whole in model.named_parameters():
        kind = next((kind for split, kind in SPLIT.items() if f".{split}." in name), None)
        dim = 0 if kind is ColumnParallel else 1
        split = kind is not None and not (dim and name.endswith("bias"))
        parts = list(whole.chunk(2, dim)) if split else [whole, whole]
        assert torch.equal(joined(name, parts), whole), name
        sizes.append(parts[0].numel())
    assert sizes == settings.numels and sum(sizes) < sum(model_numels(config))
