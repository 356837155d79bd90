"""Fine-tuning of small local checkpoints on conversations, exported and loaded again."""

from __future__ import annotations

import csv
import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Command, fork, join
from tests.train import checkpoints

CHAT = [
    "model=hf",
    "model.seq_length=64",
    "data=chat",
    "data.path=chat.jsonl",
    "data.eval_share=0.2",
    "topology.gcds_per_gpu=1",
    "train.warmup_steps=2",
    "train.micro_batch=1",
    "train.eval_batches=2",
    "train.timeout_s=60",
    "sample.temperature=0",
]


def _call(folder: Path, function: Callable[..., Any], *arguments: Any) -> None:
    """Calls a function in a process that has imported transformers."""
    err = folder / f"{function.__name__}.err"
    process = fork(function, *arguments, folder=folder, env={"OMP_NUM_THREADS": "1"}, out=err, err=err)
    join(process, 300)
    assert process.exitcode == 0, err.read_text()


def _run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    output = folder / f"output{len(list(folder.glob('output*')))}"
    return Command(arguments, folder, output, {"XDG_CACHE_HOME": str(folder / "cache")}).finish()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints, conversations, and a Llama that four ranks have fine-tuned in shards from its first moment on."""
    path = tmp_path_factory.mktemp("fine tuning")
    _call(path, checkpoints.make, path)
    code, out, err = _run(
        path,
        *("train", *CHAT, "run.name=llama", "model.path=llama", "model.zero_init=true", "zero=lossless"),
        *(
            "train.steps=6",
            "train.lr=0.01",
            "checkpoint.every=3",
            "sample.every=3",
            "profile.steps=[2,3]",
            "train.monitor=csv",
        ),
    )
    assert code == 0, out + err
    return path


def test_a_llama_is_exported_as_it_was_trained(folder: Path) -> None:
    run = folder / "runs" / "llama"
    code, out, err = _run(folder, "export", str(run))
    assert code == 0 and "step 6, fp32" in out, out + err
    _call(folder, checkpoints.check_export, run, 4, folder / "llama")
    losses = [row["loss"] for row in map(json.loads, (run / "metrics.jsonl").open()) if row["kind"] == "step"]
    assert losses[-1] < losses[0] - 0.5


def test_samples_profile_and_events_are_in_the_folder(folder: Path) -> None:
    run = folder / "runs" / "llama"
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in samples] == [3, 6]
    assert all(row["prompt"].endswith("[assistant]") and 0 < row["tokens"] <= 32 for row in samples)
    events = json.loads(gzip.decompress((run / "profile-rank0.json.gz").read_bytes()))["traceEvents"]
    assert any("AdamW" in event.get("name", "") for event in events)
    with open(run / "monitor" / "train_loss.csv") as file:
        logged = {int(row["step"]): float(row["loss"]) for row in csv.DictReader(file)}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert logged == {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}
    assert {path.stem for path in (run / "monitor").iterdir()} >= {
        "train_lr",
        "train_grad_norm",
        "train_tokens_per_s",
        "eval_loss_exact",
    }


def test_a_gpt2_with_tied_embeddings_and_unpacked_examples(folder: Path) -> None:
    """Two ranks, `topo`, micro-steps with different numbers of tokens."""
    job = (
        *("train", *CHAT, "run.name=gpt2", "model.path=gpt2", "zero=topo", "topology.gpus_per_node=1"),
        *("data.packing=false", "train.grad_accumulation=2", "checkpoint.every=2", "train.monitor=tensorboard"),
    )
    no_dropout = "model.config={attn_pdrop:0.0,embd_pdrop:0.0,resid_pdrop:0.0}"
    code, out, err = _run(folder, *job, "train.steps=4", no_dropout)
    assert code == 0, out + err
    run = folder / "runs" / "gpt2"
    assert list((run / "monitor").glob("events.*"))
    code, out, err = _run(folder, "export", str(run), "-o", str(run / "export"))
    assert code == 0, out + err
    _call(folder, checkpoints.check_export, run, 2, folder / "gpt2")
    refused = {
        ("export", str(run)): "holds an export; --overwrite replaces it",
        ("export", str(run), "-o", str(folder)): "holds other files than an export",
        ("export", str(folder)): "is not the folder of a run",
        (*job, f"resume={run}", "run.name=no", "train.steps=9", "model.config={activation_function:relu}"): (
            "was saved by a model of another shape"
        ),
    }
    for command, message in refused.items():
        code, out, err = _run(folder, *command)
        assert code == 2 and message in err and err.count("\n") == 1, err
    before = (run / "export" / "model.safetensors").stat().st_size
    code, out, err = _run(folder, "export", str(run), "--overwrite", "--dtype", "bf16")
    assert code == 0 and "bf16" in out, out + err
    assert (run / "export" / "model.safetensors").stat().st_size < 0.7 * before
    assert sorted(run.glob(".export*")) == []


def test_a_run_goes_on_with_the_same_batches(folder: Path) -> None:
    """From its third step, whose weights the checkpoint has and not the model's folder."""
    code, out, err = _run(
        folder,
        *("train", *CHAT, "run.name=again", "model.path=llama", "zero=lossless", "train.steps=6", "train.lr=0.01"),
        *("resume=runs/llama/checkpoints/step_000003", "sample.at_end=false"),
    )
    assert code == 0, out + err
    whole, again = (
        {row["step"]: row for row in map(json.loads, (folder / "runs" / name / "metrics.jsonl").open()) if "lr" in row}
        for name in ("llama", "again")
    )
    assert [again[step]["loss"] for step in (4, 5, 6)] == [whole[step]["loss"] for step in (4, 5, 6)]
    assert again[6]["tokens"] == whole[6]["tokens"]
    assert not (folder / "runs" / "again" / "samples.jsonl").exists()


def test_what_is_learnt_of_an_example(folder: Path) -> None:
    _call(folder, checkpoints.check_examples, folder)


def test_plans_of_any_architecture(folder: Path) -> None:
    _call(folder, checkpoints.check_architectures, folder)


def test_packed_examples_do_not_see_each_other(folder: Path) -> None:
    _call(folder, checkpoints.check_packing, folder)


def test_what_does_not_fit_is_one_line_before_anything_runs(folder: Path) -> None:
    small = folder / "small"
    shutil.copytree(folder / "llama", small)
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "vocab_size": 200}))
    (folder / "empty").mkdir()
    lines = (folder / "chat.jsonl").read_text().splitlines(keepends=True)
    for name, line in (("torn", '{"messages": ['), ("other", '{"question": "?"}'), ("roles", '{"messages": ["hi"]}'),
        ("half", r'{"text": "a \ud83d b"}'), ("parts", '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}'),
    ):  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join([*lines[:6], line + "\n", *lines[6:]]))
    (folder / "few.jsonl").write_text("".join(lines[:5]))
    refused = {
        "model.path=small": "tokens, and the architecture 200 (vocab_size)",
        "model.path=missing": "model.path: cannot read",
        "model.path=empty": "model.path: cannot read",
        "model.path=llama model.seq_length=65": "model.seq_length: found 65, and the architecture takes at most 64",
        "model.config={model_type:lama}": "found 'lama', no causal language model of transformers; did you mean 'llama'?",
        "model.config={model_type:llama,hidden_size:x}": "model.config: ",
        "model.path=llama data.path=torn.jsonl": "torn.jsonl:7: not JSON",
        "model.path=llama data.path=other.jsonl": "other.jsonl:7: found keys question; possible: ",
        "model.path=llama data.path=roles.jsonl": "roles.jsonl:7: messages.0: expected role and content",
        "model.path=llama data.path=half.jsonl": "half.jsonl:7: not JSON",
        "model.path=llama data.path=parts.jsonl": "messages.0.content: found list, expected text or parts of text",
        "model.config={model_type:[llama]}": "no causal language model of transformers",
        "model.path=llama data.path=few.jsonl": "is too short: 5 examples make",
        "model.config={model_type:bloom,n_layer:1,n_head:2,hidden_size:32,vocab_size:300}": "data.packing: found true",
        "model.path=llama train.monitor=wandb": "pip install wandb",
    }
    try:
        import wandb  # noqa: F401

        del refused["model.path=llama train.monitor=wandb"]
    except ModuleNotFoundError:
        pass
    _call(folder, _refusals, folder, refused)


def _refusals(folder: Path, refused: dict[str, str]) -> int:
    """All in one process, since none of them starts ranks."""
    import contextlib
    import io

    from hzero.cli import main

    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    before = sorted((folder / "runs").iterdir())
    for overrides, message in refused.items():
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            code = main(["train", *CHAT, "run.name=refused", *overrides.split(" ")])
        error = errors.getvalue()
        assert code == 2 and message in error and error.count("\n") == 1, f"{overrides}: {error}"
    assert sorted((folder / "runs").iterdir()) == before
    return 0
