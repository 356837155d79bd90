"""`hzero train` with `model.sequence_parallel`: the losses of whole sequences. 4 ranks as 2 x 2 sequence groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hzero.cli import main
from hzero.plan.command import compute
from hzero.settings.conf import compose, plain
from hzero.settings.settings import Settings
from hzero.train.batches import IGNORED, Batch
from hzero.train.sequence_parallel import part_of
from hzero.validation import ConfigError
from tests.forks import Command

#: A length that blocks do not divide, and one head for each rank.
SHAPE = [
    "model.hidden_size=44",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.intermediate_size=54",
    "model.seq_length=26",
    "model.vocab_size=301",
    "topology.nodes=2",
    "topology.gpus_per_node=1",
    "topology.gcds_per_gpu=2",
]
JOB = ["train.timeout_s=60", "train.warmup_steps=2", "train.steps=4", "checkpoint.every=2", "sample.tokens=4"]
TEXT, EXAMPLES = ("data.path=book.txt",), ("data.path=talk.jsonl", "data.packing=false")
PARTS = ("model.sequence_parallel=2", "train.micro_batch=2")
LOSSY = ("zero=hybrid", "train.grad_accumulation=3", "train.activation_checkpointing=true")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, and runs on whole sequences and on parts of the same."""
    path = tmp_path_factory.mktemp("sequence")
    lines = [
        f"the {i % 17} quick brown foxes jump over {i % 5} lazy dogs, {i * 7919 % 1000} times\n" for i in range(4000)
    ]
    (path / "book.txt").write_text("".join(lines))
    # Of many lengths: most batches are no multiple of two long, and few tokens of some count.
    examples = [{"prompt": f"say {i % 7}", "completion": f"{'so ' * (i % 9 + 1)}{i}"} for i in range(400)]
    (path / "talk.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    _train(path, "whole", "zero=lossless", "train.micro_batch=1", *TEXT)
    _train(path, "parts", "zero=lossless", *PARTS, *TEXT)
    return path


def _train(folder: Path, name: str, *overrides: str) -> None:
    command = ["train", *SHAPE, *JOB, *overrides, f"run.name={name}"]
    env = {"XDG_CACHE_HOME": str(folder / "cache")}
    code, out, err = Command(command, folder, folder / f"output-{name}", env).finish()
    assert code == 0, out + err


def _steps(folder: Path, name: str) -> dict[int, dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if row["kind"] == "step"}


def _summary(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "runs" / name / "summary.json").read_text())
    return found


def _check_same(whole: dict[int, dict[str, Any]], parts: dict[int, dict[str, Any]]) -> None:
    assert list(whole) == list(parts) == [1, 2, 3, 4]
    for step, row in whole.items():
        for key in ("loss", "grad_norm"):
            assert parts[step][key] == pytest.approx(row[key], rel=1e-5), (step, key)
        assert parts[step]["tokens"] == row["tokens"]


def test_parts_train_as_whole_sequences(folder: Path) -> None:
    whole, parts = _steps(folder, "whole"), _steps(folder, "parts")
    _check_same(whole, parts)
    assert whole[4]["loss"] < whole[1]["loss"]
    ours, theirs = _summary(folder, "parts"), _summary(folder, "whole")
    assert (ours["sequence_parallel"], theirs["sequence_parallel"]) == (2, 1)
    for key in ("loss_exact", "loss_decoded"):
        assert ours["eval"][key] == pytest.approx(theirs["eval"][key], rel=1e-5)
    assert {(row["role"], row["tier"]) for row in ours["traffic"]} >= {("weights", "node"), ("sequence", "gcd")}
    written = [(folder / "runs" / name / "samples.jsonl").read_text() for name in ("whole", "parts")]
    assert len({json.loads(text)["text"] for text in written}) == 1, "samples are of whole sequences"


def test_parts_of_examples_train_as_whole_ones(folder: Path) -> None:
    _train(folder, "examples", "zero=lossless", "train.micro_batch=1", *EXAMPLES)
    _train(folder, "parts of examples", "zero=lossless", *PARTS, *EXAMPLES)
    _check_same(_steps(folder, "examples"), _steps(folder, "parts of examples"))


def test_stock_zero3_trains_parts_too(folder: Path) -> None:
    _train(folder, "stock", "zero=stock", *PARTS, *TEXT)
    _check_same(_steps(folder, "whole"), _steps(folder, "stock"))
    assert {row["role"] for row in _summary(folder, "stock")["traffic"]} == {"sequence"}


def test_a_checkpoint_goes_on_with_whole_sequences(folder: Path) -> None:
    _train(
        folder,
        "resumed",
        "zero=lossless",
        "train.micro_batch=1",
        *TEXT,
        "resume=runs/parts/checkpoints/step_000002",
    )
    before, after = _steps(folder, "parts"), _steps(folder, "resumed")
    for step in (3, 4):
        assert after[step]["loss"] == pytest.approx(before[step]["loss"], rel=1e-5)


def test_codecs_of_activations_cost_little_and_the_plan_says_their_bytes(folder: Path) -> None:
    _train(folder, "lossy", *LOSSY, *PARTS, *TEXT, "checkpoint.every=0")
    steps = _steps(folder, "lossy")
    assert steps[1]["loss"] == pytest.approx(_steps(folder, "whole")[1]["loss"], abs=0.05)
    assert steps[4]["loss"] < steps[1]["loss"]
    counted = {(row["role"], row["tier"]): row for row in _summary(folder, "lossy")["traffic"]}
    planned = {(row["role"], row["tier"]): row for row in compute([*SHAPE, *LOSSY, *PARTS], 4)["traffic"]}
    row = counted["sequence", "gcd"]
    assert row["codec"] == "int8" and row["raw_bytes"] / row["wire_bytes"] > 3
    assert row["hops"] == 4 * 4 * planned["sequence", "gcd"]["crossings"]  # ranks, steps
    for key in ("wire_bytes", "raw_bytes"):
        assert row[key] == 4 * 4 * planned["sequence", "gcd"][key]


@given(
    ranks=st.integers(1, 5),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 23)),
    seed=st.integers(0, 99),
)
def test_parts_together_are_the_batch(ranks: int, sizes: tuple[int, int], seed: int) -> None:
    random = np.random.default_rng(seed)
    ids = random.integers(0, 9, sizes)
    labels = np.where(random.random(sizes) < 0.3, IGNORED, ids)
    batch = Batch({"input_ids": ids, "labels": labels}, share=0.7)
    parts = [part_of(batch, rank, ranks) for rank in range(ranks)]
    assert all(part.share == 0.7 for part in parts)
    assert len({part.inputs["input_ids"].shape for part in parts}) == 1, "exchanges need equal parts"
    whole = {name: np.concatenate([part.inputs[name] for part in parts], 1) for name in ("input_ids", "shift_labels")}
    places = np.concatenate([part.inputs["position_ids"] for part in parts], 1)
    length = sizes[1]
    assert (whole["input_ids"][:, :length] == ids).all() and (places == np.arange(places.shape[1])).all()
    assert (whole["shift_labels"][:, : length - 1] == labels[:, 1:]).all()
    assert (whole["shift_labels"][:, length - 1 :] == IGNORED).all()
    for part in parts:
        assert part.inputs["num_items_in_batch"] == np.float32((labels[:, 1:] != IGNORED).sum() / ranks)


def test_a_plan_shows_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["topology=frontier", "nodes=48", "model=gpt_neox_20b", "model.sequence_parallel=4"]
    assert main(["plan", *job]) == 0
    out = capsys.readouterr().out
    assert "sequence parallel: 4 ranks, 1 node x 2 GPUs x 2 GCDs, such as 0, 1, 2, 3" in out
    assert main(["plan", "--fit", *job]) == 2
    assert "model.sequence_parallel: found 4, which predictions do not know" in capsys.readouterr().err


def test_what_cannot_be_divided_is_refused_in_one_line(folder: Path) -> None:
    for overrides, message in (
        (["model.sequence_parallel=3"], "model.sequence_parallel: found 3, which does not divide model.num_heads 2"),
        (["model.sequence_parallel=2", "model.seq_length=25"], "which does not divide model.seq_length 25"),
        (["model.sequence_parallel=2", "topology.gcds_per_gpu=1"], "model.sequence_parallel: found 2, .*possible: 1$"),
        (["model.sequence_parallel=2", "model.tensor_parallel=2"], "found 2 with model.tensor_parallel 2; one of them"),
        (["model.sequence_parallel=0"], "model.sequence_parallel: found 0"),
        (["zero.codecs.sequence=int8"], "zero.codecs.sequence: given without model.sequence_parallel"),
        (
            ["model.sequence_parallel=2", "zero.codecs.sequence.node=int8"],
            r"zero.codecs.sequence: none on the tiers that sequence groups of 2 ranks cross \(gcd\)",
        ),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            Settings(plain(compose([*SHAPE, "zero=topo", *overrides])))
        assert "\n" not in str(error.value)
    command = ["train", *SHAPE, *JOB, *PARTS, "data.path=talk.jsonl", "run.name=packed"]
    env = {"XDG_CACHE_HOME": str(folder / "cache")}
    code, _, err = Command(command, folder, folder / "output-packed", env).finish()
    assert code == 2 and "data.packing: found true with model.sequence_parallel 2" in err
