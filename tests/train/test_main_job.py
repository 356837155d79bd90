"""The main job as a user runs it: killed, interrupted, resumed bit for bit. Small: 4 ranks, a model of 40,000 parameters."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hzero.cli import main
from hzero.train import digests
from hzero.train.folder import lock
from tests.forks import Command, fork, join
from tests.ranks import ROOT

SMALL = [
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.intermediate_size=64",
    "model.seq_length=32",
    "model.vocab_size=300",
    "topology.gcds_per_gpu=1",
    "train.steps=12",
    "train.warmup_steps=2",
    "checkpoint.every=4",
    "train.timeout_s=60",
    "data.path=book.txt",
]
#: The same on two ranks, for what does not depend on the grid.
PAIR = ("topology.gpus_per_node=1",)


def _start(folder: Path, *overrides: str) -> Command:
    output = folder / f"output{len(list(folder.glob('output*')))}"
    return Command(["train", *SMALL, *overrides], folder, output, {"XDG_CACHE_HOME": str(folder / "cache")})


def _losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}


def _status(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "status.json").read_text())
    return found


def _ranks(process: Command) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in children.read_text().split()]


def _wait_for_step(run: Path, step: int, process: Command) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "logs" / "started").exists() and max(_losses(run), default=0) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {process.finish()}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and one uninterrupted run, codec none."""
    path = tmp_path_factory.mktemp("job with a space")
    lines = [
        f"the {i % 17} quick brown foxes jump over {i % 5} lazy dogs, {i * 7919 % 1000} times\n" for i in range(4000)
    ]
    (path / "book.txt").write_text("".join(lines))
    code, out, err = _start(path, "zero=lossless", "run.name=whole", "trace.steps=[3,4]").finish()
    assert code == 0, out + err
    return path


def test_traced_steps_are_in_file_metrics_and_summary(folder: Path) -> None:
    run = folder / "runs" / "whole"
    events = json.loads(gzip.decompress((run / "trace-rank0.json.gz").read_bytes()))["traceEvents"]
    assert [event["name"] for event in events if event["name"] in ("step", "optimizer")] == ["step", "optimizer"] * 2
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    traced = [row for row in rows if row["kind"] == "trace"]
    assert [row["step"] for row in traced] == [3, 4] and traced[0]["tiers"].keys() == {"gpu", "node"}
    node = json.loads((run / "summary.json").read_text())["traced"]["node"]
    assert node["wire_s"] == pytest.approx(sum(row["tiers"]["node"]["wire_s"] for row in traced) / 2)


def test_an_uninterrupted_run_leaves_what_it_says(folder: Path) -> None:
    run = folder / "runs" / "whole"
    losses = _losses(run)
    assert list(losses) == list(range(1, 13)) and losses[12] < losses[1] - 0.3
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["zero3"]["computed"] and summary["preset"] == "lossless"
    assert {row["tier"] for row in summary["traffic"]} == {"gpu", "node"}
    assert summary["eval"]["loss_decoded"] == pytest.approx(summary["eval"]["loss_exact"], rel=1e-6)
    assert (run / "config.yaml").exists() and (run / "checkpoints" / "latest").read_text() == "step_000012"
    assert len(list((run / "checkpoints").glob("step_*"))) == 2  # checkpoint.keep


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_what_a_run_leaves_is_its_users_alone(folder: Path) -> None:
    left = [*(folder / "runs" / "whole").rglob("*"), *(folder / "cache" / "hzero").rglob("*")]
    assert len(left) > 20
    assert [path for path in [folder / "cache" / "hzero", *left] if path.stat().st_mode & 0o077] == []


def test_a_run_that_is_killed_interrupted_and_torn_goes_on_bit_for_bit(folder: Path) -> None:
    run, job = folder / "runs" / "stopped", ("zero=lossless", "run.name=stopped", "resume=auto")
    process = _start(folder, *job)
    _wait_for_step(run, 1, process)
    assert _status(run)["state"] in ("running", "saving")
    os.kill(_ranks(process)[1], signal.SIGUSR1)  # all ranks stop after the same step
    code, out, err = process.finish(timeout=120)
    assert code == 75 and "stopped in time for the end of the job after step" in out, out + err
    assert _status(run)["state"] == "timed out" and _status(run)["step"] == max(_losses(run)) < 12

    (run / "logs" / "started").unlink()
    process = _start(folder, *job)
    _wait_for_step(run, 5, process)
    ranks = _ranks(process)
    assert len(ranks) == 4
    os.kill(ranks[2], signal.SIGKILL)
    code, out, err = process.finish(timeout=120)
    assert code == 1 and "rank 2 died: signal SIGKILL" in err, out + err
    assert all(not Path(f"/proc/{pid}").exists() for pid in ranks), "a rank was left behind"
    assert _status(run)["state"] == "failed" and "rank 2 died: signal SIGKILL" in _status(run)["reason"]

    (run / "logs" / "started").unlink()  # else metrics of the killed run would be taken for the next one's
    process = _start(folder, *job)
    _wait_for_step(run, 5, process)
    ranks = _ranks(process)
    process.send_signal(signal.SIGINT)
    code, out, err = process.finish(timeout=120)
    assert code == 130 and "stopping: the ranks finish their step" in err, out + err
    assert "going on after step" in out and "resume=auto run.dir=runs/stopped" in out, out
    assert all(not Path(f"/proc/{pid}").exists() for pid in ranks)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "interrupted" and summary["steps"] == max(_losses(run))

    newest, before, *_ = sorted((run / "checkpoints").glob("step_*"))[::-1]
    assert (newest / "complete.json").exists() and newest.name == f"step_{summary['steps']:06d}"
    damaged = newest / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1  # a bit of a weight or of the optimizer's state
    damaged.write_bytes(content)
    code, out, err = _start(folder, *job).finish()
    assert (
        code == 0
        and f"is torn: {damaged.name} is not what was written" in err
        and f"going on after step {int(before.name[5:])}" in out
    ), out + err
    assert _losses(run) == _losses(folder / "runs" / "whole")
    jobs = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert [job["state"] for job in jobs] == ["timed out", "failed", "interrupted", "done"]
    assert [job["from"] for job in jobs[1:3]] == [jobs[0]["step"], jobs[2]["from"]] and jobs[3]["step"] == 12


def test_a_run_goes_on_with_other_ranks_and_another_preset_and_back(folder: Path) -> None:
    """From two nodes to one, where a step takes two micro-steps, and from hzero to stock ZeRO-3; then the reverse.

    The first job has so little time that it stops after a step.
    """
    whole, run, job = folder / "runs" / "whole", folder / "runs" / "moved", ("run.name=moved",)
    start = f"resume='{whole}/checkpoints/step_000008'"
    code, out, err = _start(folder, *job, "zero=stock", "topology.nodes=1", "train.time_limit=1s", start).finish()
    assert code == 75 and "step_000008 of 4 ranks goes on with 2" in out, out + err
    assert "train.grad_accumulation=2 in place of 1: the checkpoint's steps have 8 sequences" in out
    assert "from 4 to 2 ranks: " in out
    assert _status(run)["state"] == "timed out" and list(_losses(run)) == [9]
    code, out, err = _start(folder, *job, "zero=lossless", "resume=auto").finish()
    assert code == 0 and "step_000009 of 2 ranks goes on with 4" in out, out + err
    expected = {step: loss for step, loss in _losses(whole).items() if step > 8}
    assert _losses(run) == pytest.approx(expected, rel=1e-5)
    assert [json.loads(line)["ranks"] for line in (run / "history.jsonl").read_text().splitlines()] == [2, 4]


def test_checkpoints_that_cannot_serve_are_refused_in_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))

    def refusal(*overrides: str) -> str:
        assert main(["train", *SMALL, "zero=lossless", *overrides]) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if "warning" not in line]
        assert len(errors) == 1, errors
        return errors[0]

    whole = folder / "runs" / "whole"
    torn = tmp_path / "torn"
    shutil.copytree(whole, torn)
    for checkpoint in (torn / "checkpoints").glob("step_*"):
        next(checkpoint.glob("zero_pp_rank_0_*")).unlink()
    metrics = (torn / "metrics.jsonl").read_bytes()
    planted, made = tmp_path / "planted", tmp_path / "made"
    shutil.copytree(whole, planted)
    for checkpoint in (planted / "checkpoints").glob("step_*"):
        _plant(checkpoint, "zero_pp_rank_1_mp_rank_00_optim_states.pt", f"touch '{made}'")
    cases = {
        (f"resume={whole}", "model.num_layers=3", "train.steps=20"): "a model of another shape",
        (f"resume={whole}", "train.seed=1", "train.steps=20"): "train.seed=0, not 1",
        (
            f"resume={whole}",
            "topology.nodes=3",
            "train.steps=20",
        ): "which 6 ranks with train.micro_batch=2 cannot do; possible: 1, 2, 4 ranks",
        (f"resume={whole}",): "train.steps: found 12, but the run has 12 steps already",
        (f"resume={torn}/checkpoints/step_000012", "train.steps=20"): "is torn",
        (
            f"resume={planted}",
            "train.steps=20",
        ): "zero_pp_rank_1_mp_rank_00_optim_states.pt' needs posix.system, which is no tensor and could run code",
        (
            "resume=auto",
            f"run.dir={torn}",
            "train.steps=20",
        ): "and there is no other; run.overwrite=true instead of resume",
        ("resume=auto", "run.name=whole"): "train.steps: found 12, but the run has 12 steps already",
    }
    for overrides, message in cases.items():
        assert message in refusal("run.name=refused", *overrides)
    assert not (folder / "runs" / "refused").exists()
    assert (torn / "metrics.jsonl").read_bytes() == metrics
    assert main(["export", str(planted)]) == 2
    assert "needs posix.system" in (error := capsys.readouterr().err) and "--trust loads it all the same" in error
    assert not made.exists(), "a planted file has run a command"
    with lock(whole):
        error = refusal("run.name=whole", "resume=auto", "train.steps=20")
    assert f"a run is under way in 'runs/whole' (process {os.getpid()})" in error


def _plant(checkpoint: Path, name: str, command: str) -> None:
    """Puts a file that runs a command into a checkpoint, as whoever may write its note could."""
    import torch

    class Command:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (command,)

    torch.save({"optimizer_state_dict": Command()}, checkpoint / name)
    note = json.loads((checkpoint / "complete.json").read_text())
    del note[digests.SEAL]
    note["files"][name] = (checkpoint / name).stat().st_size
    note[digests.HASHES][name] = digests.of_file(checkpoint / name)
    (checkpoint / "complete.json").write_text(json.dumps(digests.sealed(note)))


def _with_small_files(arguments: list[str]) -> int:
    """``hzero`` where no file may grow beyond 150 kB, less than a rank's optimizer states: a disk that is full, without root."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
    return main(arguments)


def test_a_run_that_cannot_save_goes_on_and_then_stops_with_the_reason(folder: Path) -> None:
    arguments = ["train", *SMALL, *PAIR, "run.name=full", "checkpoint.every=2", "checkpoint.max_failures=2"]
    out, err = folder / "full.out", folder / "full.err"
    env = {"XDG_CACHE_HOME": str(folder / "cache")}
    process = fork(_with_small_files, arguments, folder=folder, env=env, out=out, err=err)
    join(process, 300)
    assert process.exitcode == 1, err.read_text()
    failed = r"the checkpoint of step {} could not be saved: .*optim_states\.pt: File too large \(rank 0\) and 1 other ranks; {}"
    assert len(re.findall(f"warning: {failed.format(2, 'training goes on')}", out.read_text())) == 1
    assert len(re.findall(failed.format(4, "2 saves in a row have failed"), err.read_text())) == 1
    assert "Traceback" not in err.read_text()
    # Training went on while the file was written that turned out to be too large.
    assert 4 <= max(_losses(folder / "runs" / "full")) <= 6 and not list((folder / "runs" / "full").rglob("step_*"))


def test_a_run_stopped_after_its_last_step_is_evaluated_and_summed_up(folder: Path) -> None:
    """A run of two ranks, whose weights zero.Init makes in shards; they start like those made whole."""
    job = (*PAIR, "zero=zeropp", "run.name=pair", "model.zero_init=true", "train.steps=2")
    run = folder / "runs" / "pair"
    code, out, err = _start(folder, *job).finish()
    assert code == 0, out + err
    assert _losses(run)[1] == pytest.approx(_losses(folder / "runs" / "whole")[1], rel=0.02)
    expected = json.loads((run / "summary.json").read_text())
    (run / "summary.json").unlink()
    code, out, err = _start(folder, *job, "resume=auto").finish()
    assert code == 0, out + err
    late = json.loads((run / "summary.json").read_text())
    assert late["status"] == "finished" and late["steps"] == 2 and late["steps_here"] == 0
    assert late["eval"] == expected["eval"] and late["loss_last"] == expected["loss_last"]


def test_a_failing_rank_shows_its_traceback_once(folder: Path) -> None:
    code, _, err = _start(folder, *PAIR, "run.name=bad", "+deepspeed.optimizer.type=Nope").finish()
    assert code == 1 and err.count("Traceback") == 1, err
    assert "Nope" in err and "all ranks are ended" in err


def test_what_the_ranks_refuse_is_one_line_and_undone(folder: Path) -> None:
    def content() -> dict[str, bytes]:
        files = ("metrics.jsonl", "summary.json", "config.yaml", "checkpoints/latest")
        return {name: (folder / "runs" / "whole" / name).read_bytes() for name in files}

    kept = content()
    overrides = ("run.name=whole", "run.overwrite=true", "+deepspeed.zero_optimization.reduce_scatter=false")
    code, _, err = _start(folder, *PAIR, *overrides).finish()
    assert code == 2 and err.count("\n") == 1, err
    assert err.startswith("hzero: error: zero_optimization.reduce_scatter: found False"), err
    assert content() == kept


def test_stock_zero3_gives_the_same_losses_in_a_folder_of_its_own_to_a_reader_who_leaves(folder: Path) -> None:
    before = (folder / "runs" / "whole" / "metrics.jsonl").read_bytes()
    process = subprocess.Popen(
        [sys.executable, "-m", "hzero", "train", *SMALL, "zero=stock", "run.name=whole", "checkpoint.every=0"],
        cwd=folder,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()  # as `hzero train | head -1`
    assert process.wait(timeout=300) == 0, process.stderr.read() if process.stderr else ""
    whole = _losses(folder / "runs" / "whole")
    stock = _losses(folder / "runs" / "whole-2")
    assert list(stock) == list(whole) and list(stock.values()) == pytest.approx(list(whole.values()), rel=1e-5)
    assert (folder / "runs" / "whole" / "metrics.jsonl").read_bytes() == before


def test_a_run_that_diverges_fails_and_keeps_its_last_good_checkpoint(folder: Path) -> None:
    run, job = folder / "runs" / "diverging", ("run.name=diverging", "checkpoint.keep=1", *PAIR)
    code, out, err = _start(folder, *job, "train.steps=4").finish()
    assert code == 0, out + err
    hot = ("train.lr=1e30", "train.grad_clip=0", "train.guard=3", "checkpoint.every=1", "resume=auto")
    code, out, err = _start(folder, *job, *hot).finish()
    assert code == 1 and "warning: step 6: the loss is nan and the optimizer discarded the step" in out + err
    assert "step 8: hzero: the norm of the gradients is not finite in 3 steps in a row (guard: 3)" in err
    assert "Not finite in the gradients of" in err and "gradients int4 on" in err
    code, out, err = _start(folder, *job, *hot, "train.guard=9", "train.steps=6").finish()
    assert code == 1 and "the loss of the last evaluation is nan: the weights are spoilt" in err
    code, out, err = _start(folder, *job, "train.steps=5", "resume=auto").finish()
    assert code == 0 and "the steps around it were not finite; skipped" in err and "going on after step 4" in out
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
