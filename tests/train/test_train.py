"""`hzero train` as a user runs it: its output, files and exit status, and how it resumes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hzero.config import UNCODED
from hzero.errors import ConfigError
from hzero.program.collectives import step_traffic
from hzero.tools import cli
from hzero.tools.experiment import compose
from hzero.tools.plan.scenario import Job
from hzero.tools.plan.sequence import exchanged
from tests.forks import Command, fork, join, torchrun
from tests.ranks import ROOT

if find_spec("datasets") is None:  # to import it takes a second of every process that collects tests
    pytest.skip("datasets is not installed", allow_module_level=True)

MODEL = ("hidden_size=32", "num_layers=2", "num_heads=2", "intermediate_size=64", "vocab_size=300", "seq_length=32")
FOUR = ("topology.nodes=2", "topology.packages_per_node=1", "topology.devices_per_package=2")
ONE = ("topology=single_node", "topology.devices_per_package=1")
STEPS = 6


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    status: int | None
    out: str
    err: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, in which all commands here run: they share what is cached."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "book.txt").write_text("".join((ROOT / "hzero" / name).read_text() for name in ("config.py", "files.py")))
    return folder


def overrides(*given: str) -> list[str]:
    """Overrides for runs of seconds."""
    model = () if any(one.startswith("model=") for one in given) else (f"model.{key}" for key in MODEL)
    small = ("data=text", "data.path=book.txt", "data.cache_dir=cache", "train.eval_batches=1")
    return [*small, *model, f"train.steps={STEPS}", "checkpoint.every=3", *given]


def _main(argv: list[str], mask: int) -> int:
    os.umask(mask)
    return cli.main(argv)


def train(place: Path, *given: str, mask: int = 0o022) -> Done:
    """Runs ``hzero train`` to its end, in a fork of a process that has imported everything."""
    files = [place / "out.txt", place / "err.txt"]
    for file in files:
        file.unlink(missing_ok=True)
    process = fork(_main, ["train", *overrides(*given)], mask, folder=place, env={}, out=files[0], err=files[1])
    join(process, 180)
    return Done(process.exitcode, *(file.read_text() for file in files))


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


@pytest.fixture(scope="module")
def first(place: Path) -> Done:
    """A run of 4 ranks under umask 027."""
    done = train(place, *FOUR, mask=0o027)
    assert done.status == 0, done.out + done.err
    return done


def test_what_it_prints(first: Done, place: Path) -> None:
    assert "hzero: fit on 2 nodes x 1 package x 2 devices; weights over the " in first.err
    assert [int(step) for step in re.findall(r"^step (\d+)/6  loss \d", first.out, re.MULTILINE)] == [1, 2, 3, 4, 5, 6]
    assert re.search(
        r"^received between nodes per step: [\d.]+ kB; ZeRO-3 would receive [\d.]+ kB$", first.out, re.MULTILINE
    )
    assert re.search(r"^tier +state +codec +received per step +ZeRO-3 \(computed\)$", first.out, re.MULTILINE)
    lines = [line for line in first.out.splitlines() if not line.startswith(("run folder: ", "training a tokenizer"))]
    assert all(len(line) <= 80 and "…" not in line for line in lines), [line for line in lines if len(line) > 80]


def test_losses_fall_and_bytes_are_the_plans(first: Done, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    (chosen,) = re.findall(r"hzero: fit on .*; weights over the (\w+), gradients over the (\w+)", first.err)
    shard = [f"zero.shard.{role}={scope}" for role, scope in zip(("weights", "gradients"), chosen)]
    experiment, found = compose(overrides(*FOUR, *shard)), summary(place / "runs" / "default")
    assert found["status"] == "finished" and found["steps"] == len(found["losses"]) == STEPS
    assert found["loss_last"] < found["loss_first"]
    assert experiment.plan is not None
    numels = experiment.architecture.numels
    planned = step_traffic(
        experiment.plan, experiment.grid, numels, itemsize=4, fetches=found["fetches_per_micro_step"]
    )
    want = {(row.tier, row.role): 4 * row.wire_bytes for row in planned if row.used and row.wire_bytes}
    got = {(row["tier"], row["role"]): row["received"] for row in found["bytes_per_step"]}
    assert got == pytest.approx(want, rel=1e-3)
    assert found["memory"]["optimizer"] >= 12 * sum(numels) / 4


def test_the_saved_model_is_the_evaluated_one(first: Done, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hzero.tools.data import corpus

    monkeypatch.chdir(place)
    folder = place / "runs" / "default" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    text = corpus.prepare(compose(overrides(*FOUR)), lambda line: pytest.fail(f"not in the cache: {line}"))
    ids = torch.tensor(text.evaluation["input_ids"])
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    assert loss == pytest.approx(summary(folder.parent)["eval_loss"], abs=2e-4)
    assert tokenizer.eos_token == "<|endoftext|>" and model.config.eos_token_id == tokenizer.eos_token_id
    written = model.generate(ids[:1, :8], max_new_tokens=4, do_sample=False)
    assert written.shape[1] > 8


def test_files_follow_the_umask(first: Done, place: Path) -> None:
    files = [path for path in (place / "runs" / "default").rglob("*") if not path.is_symlink()]
    modes = {path: path.stat().st_mode & 0o777 for path in files}
    assert not [str(path) for path, mode in modes.items() if mode & 0o027]
    assert modes[place / "runs" / "default" / "model" / "model.safetensors"] == 0o640
    assert modes[place / "runs" / "default" / "summary.json"] == 0o640


def test_a_resumed_run_equals_the_first_bit_by_bit(first: Done, place: Path) -> None:
    done = train(place, *FOUR, "resume=runs/default/checkpoint-3")
    assert done.status == 0, done.err
    assert summary(place / "runs" / "default-2")["losses"] == summary(place / "runs" / "default")["losses"]


def _refused(commands: Sequence[list[str]]) -> int:
    """Runs commands one after the other, and prints status and error of each as JSON."""
    answers = []
    for argv in commands:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            status = cli.main(["train", *argv])
        answers.append((status, err.getvalue()))
    print(json.dumps(answers))
    return 0


REFUSED = {
    "zero=[topo,mild]": r"zero: found \[topo,mild\]; expected one option",
    "train.steps": "train.steps: expected KEY=VALUE",
    "model.config.num_layer=1": "model.config: found key 'num_layer'; expected .*did you mean 'num_hidden_layers'",
    "model=hf": "model.path: found neither it nor model_type in model.config; expected one of them",
    "model=hf model.path=nowhere": "model.path: .*nowhere: cannot be read: .*; expected a folder with config.json",
    "model.num_heads=3": "model.config: The hidden size is not divisible by the number of attention heads",
    "model=gpt_neox_20b": "expected at most .*, the memory of this machine",
    "train.dtype=fp16": "train.dtype: found fp16",
    "trainer.report_too=wandb": "trainer: found key 'report_too'; expected .*did you mean 'report_to'",
    "trainer.report_to=nosuch": "trainer: nosuch is not supported, only ",
    "deepspeed.optimizer.type=adan": "deepspeed.optimizer.type: found 'adan'; expected .*did you mean 'adam'",
    "deepspeed.zero_optimization.stage=2": "deepspeed.zero_optimization.stage: found 2; expected 3",
    "data.path=nowhere": "data.path: found no such file or folder: 'nowhere'",
    "data.path=binary.txt": "data.path: binary.txt:1: found byte 0xff; expected UTF-8",
    "data.path=chat.jsonl": "data.path: chat.jsonl:1: found '{\"messages.*; expected a JSON object with",
    "resume=nowhere": "resume: found no complete checkpoint in .*nowhere",
    # Several keys, since AutoTP follows the plan of an architecture.
    "model=hf model.config={model_type:mixtral,vocab_size:1024,hidden_size:32,intermediate_size:32,num_hidden_layers:1,"
    "num_attention_heads:2,num_key_value_heads:2} topology.devices_per_package=2 deepspeed.tensor_parallel.autotp_size=2": (
        r"deepspeed.tensor_parallel.partition_config: HuggingFace tp_plan .*\['moe_tp_experts', 'packed_colwise'\]"
    ),
    "model=hf model.config={model_type:mixtral,vocab_size:1024,hidden_size:32,intermediate_size:32,num_hidden_layers:1,"
    "num_attention_heads:2,num_key_value_heads:2,num_local_experts:3} topology.devices_per_package=2 "
    "deepspeed.expert_parallel={enabled:true,autoep_size:2}": (
        "deepspeed.expert_parallel.autoep_size: found 2 for a model with 3 experts in a layer; expected a divisor"
    ),
}


def test_wrong_input_is_one_line_and_status_2(place: Path) -> None:
    (place / "binary.txt").write_bytes(b"\xff\xfe" * 40_000)
    (place / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 10)
    commands = [overrides(*ONE, *override.split(" ")) for override in REFUSED]
    commands[1] += ["--cfg", "job"]
    out, err = place / "refused.txt", place / "refused.err"
    process = fork(_refused, commands, folder=place, env={}, out=out, err=err)
    join(process, 180)
    answers = json.loads(out.read_text().splitlines()[-1])
    for (override, message), (status, said) in zip(REFUSED.items(), answers):
        assert status == 2, (override, said)
        assert re.search(f"^hzero: error: .*{message}", said) and said.count("\n") == 1, (override, said)


def test_another_model_and_another_text_are_refused(first: Done, place: Path) -> None:
    (place / "other.txt").write_text((ROOT / "hzero" / "autoload.py").read_text() * 4)
    for resume, override, message in (
        ("checkpoint-3", "model.num_heads=4", "model: found num_attention_heads 4; expected 2, as in .*checkpoint-3"),
        ("checkpoint-3", "data.path=other.txt", "data.path: other.txt gives another tokenizer than .*checkpoint-3"),
        ("", "train.steps=3", "train.steps: found 3; expected more than the 6 that .*checkpoint-6' has done"),
    ):
        done = train(place, *FOUR, f"resume=runs/default/{resume}", override)
        assert done.status == 2 and re.search(f"^hzero: error: {message}", done.err, re.MULTILINE), done.err
        assert done.err.count("error") == 1 and "Traceback" not in done.err


def test_a_multirun_of_stock_and_stage(place: Path) -> None:
    done = train(place, *ONE, "-m", "zero=stock,zero3", "run.name=sweep", "train.steps=2", "checkpoint.model=false")
    assert done.status == 0, done.out + done.err
    losses = [summary(place / "runs" / name)["losses"] for name in ("sweep-0-stock", "sweep-1-zero3")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert not (place / "runs" / "sweep-0-stock" / "model").exists()


def test_groups_that_share_samples(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor groups of AutoTP, and sequence groups: losses are those of half as many ranks without them."""
    keys = ("zero=zero3", "topology=single_node", "train.steps=2", "checkpoint.every=0", "checkpoint.model=false")
    split = ("topology.devices_per_package=4", "deepspeed.tensor_parallel.autotp_size=2")
    shared = ("topology.devices_per_package=4", "zero.sequence.parallel=2", "zero.sequence.chunk=5")
    for name, ranks in (("whole", ("topology.devices_per_package=2",)), ("split", split), ("shared", shared)):
        done = train(place, *keys, *ranks, f"run.name={name}")
        assert done.status == 0, done.out + done.err
    whole, *groups = (summary(place / "runs" / name) for name in ("whole", "split", "shared"))
    for found in groups:
        assert found["losses"] == pytest.approx(whole["losses"], rel=1e-5)
        assert found["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-5)
    received = [sum(row["received"] for row in groups[0][key]) for key in ("bytes_per_step", "zero3_bytes_per_step")]
    assert received[0] == pytest.approx(received[1], rel=1e-3)
    monkeypatch.chdir(place)
    experiment = compose(overrides(*keys, *shared))
    exchanges = exchanged(Job.of(experiment, ConfigError("no profile")), experiment.grid, UNCODED)
    sent = {row["tier"]: row["received"] for row in groups[1]["bytes_per_step"] if row["role"] == "sequence"}
    assert sent == {tier: 4 * size for tier, size in exchanges.items()}


def test_a_stopped_run_goes_on(place: Path) -> None:
    """SIGUSR1, as a batch system sends it before the time is over."""
    given = ("run.name=stopped", "resume=auto", "checkpoint.every=0", *ONE)
    command = ["train", *overrides(*given, "train.steps=100000")]
    with Command(command, place, place / "stop", {}) as running:
        deadline = time.monotonic() + 120
        while (
            "step 1/" not in (running.out.read_text() if running.out.exists() else "") and time.monotonic() < deadline
        ):
            assert running.poll() is None, running.err.read_text()
            time.sleep(0.2)
        running.send_signal(signal.SIGUSR1)
        status, _, errors = running.finish(120)
    assert status == 75, errors
    before = summary(place / "runs" / "stopped")
    assert before["status"] == "stopped" and before["steps"] >= 1 and before["eval_loss"] is None
    for steps in (0, 2):  # without a step, evaluation and model are left
        done = train(place, *given, f"train.steps={before['steps'] + steps}")
        assert done.status == 0, done.out + done.err
        after = summary(place / "runs" / "stopped")
        assert after["status"] == "finished" and after["steps_here"] == steps and after["eval_loss"]
        assert after["losses"][: before["steps"]] == before["losses"]


def test_ranks_of_torchrun(place: Path) -> None:
    """As ``torchrun -m hzero train``, which runs this file. The ranks find out where they sit."""
    files = place / "torchrun.out", place / "torchrun.err"
    command = ["--standalone", "--nproc-per-node=2", str(ROOT / "hzero" / "__main__.py"), "train"]
    command += overrides("topology=auto", "run.name=torchrun", "train.steps=2")
    process = fork(torchrun, *command, folder=place, env={"OMP_NUM_THREADS": "1"}, out=files[0], err=files[1])
    join(process, 180)
    out, err = (file.read_text() for file in files)
    assert process.exitcode == 0, out + err
    assert out.count("received per step: ") == 1 and err.count("hzero: fit on 1 node") == 1, out + err
    assert summary(place / "runs" / "torchrun")["world_size"] == 2


def test_a_models_folder(place: Path) -> None:
    """Its weights are used, its code is not run, and weights that the architecture lacks are refused unless allowed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.deepspeed.checkpoint_checks import Planted

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=300, num_hidden_layers=3, max_position_embeddings=64, **shape)
    folder = place / "llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    ran = place / "code ran"
    (folder / "modeling_own.py").write_text(f"open({str(ran)!r}, 'w')\n")
    with open(folder / "pytorch_model.bin", "wb") as file:
        pickle.dump(Planted(ran), file)
    written = json.loads((folder / "config.json").read_text())
    own = {"auto_map": {"AutoConfig": "modeling_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}}
    (folder / "config.json").write_text(json.dumps({**written, **own}))
    (folder / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.9}')
    given = ("model=hf", "model.path=llama", "model.seq_length=32", "train.steps=1", "run.name=llama", *ONE)
    layers = "model.config={num_hidden_layers: 1}"
    done = train(place, *given, layers)
    assert done.status == 2 and "has more than the architecture: 18 weights" in done.err, done.err
    assert "model.allow_other_weights=true" in done.err and "Traceback" not in done.err
    done = train(place, *given, layers, "model.allow_other_weights=true")
    assert done.status == 0, done.out + done.err
    done = train(place, *given)
    assert done.status == 0, done.out + done.err
    (folder / "vocab.json").write_text('{"<unk>": 0, "a</w>": 1}')
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "CTRLTokenizer"}')
    done = train(place, *given)
    assert done.status == 2 and "found CTRLTokenizer in" in done.err and done.err.count("\n") == 1, done.err
    (folder / "tokenizer.json").mkdir()
    done = train(place, *given)
    assert done.status == 2 and "expected a tokenizer.json" in done.err, done.err
    (folder / "tokenizer.json").rmdir()
    (folder / "vocab.json").unlink()
    (folder / "model.safetensors").unlink()
    done = train(place, *given)
    assert done.status == 2 and "model.path: cannot load the weights" in done.err and "Traceback" not in done.err
    assert not ran.exists()
