"""The main job as a user runs it: killed, interrupted, resumed bit for bit. Small: 4 ranks, a model of 40,000 parameters."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hzero.train.folder import lock
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


def _start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "hzero", "train", *SMALL, *overrides],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(process: subprocess.Popen[str], timeout: float = 150) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def _losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "step"}


def _ranks(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in children.read_text().split()]


def _wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (run / "metrics.jsonl").exists() and max(_losses(run), default=0) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached: {process.communicate()}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and one uninterrupted run, codec none."""
    path = tmp_path_factory.mktemp("job with a space")
    lines = [
        f"the {i % 17} quick brown foxes jump over {i % 5} lazy dogs, {i * 7919 % 1000} times\n" for i in range(4000)
    ]
    (path / "book.txt").write_text("".join(lines))
    code, out, err = _finish(_start(path, "zero=lossless", "run.name=whole"))
    assert code == 0, out + err
    return path


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
def test_killed_ranks_and_torn_checkpoints_change_nothing(folder: Path) -> None:
    """Kills rank 2, then rank 0, then tears a checkpoint: what is resumed continues bit for bit."""
    run, job = folder / "runs" / "killed", ("zero=lossless", "run.name=killed")
    for victim, step in ((2, 5), (0, 9)):
        process = _start(folder, *job, "resume=auto")
        _wait_for_step(run, step, process)
        ranks = _ranks(process)
        assert len(ranks) == 4
        os.kill(ranks[victim], signal.SIGKILL)
        code, out, err = _finish(process, timeout=60)
        assert code == 1 and f"rank {victim} died: signal SIGKILL" in err, out + err
        assert all(not Path(f"/proc/{pid}").exists() for pid in ranks), "a rank was left behind"
        assert max(_losses(run)) >= step
    newest, before = sorted((run / "checkpoints").glob("step_*"))[::-1][:2]
    assert (newest / "complete.json").exists() and newest.name == "step_000008"
    next(newest.glob("zero_pp_rank_1_*")).write_bytes(b"torn")
    code, out, err = _finish(_start(folder, *job, "resume=auto"))
    assert code == 0 and "is torn" in err and f"going on after step {int(before.name[5:])}" in out, out + err
    assert _losses(run) == _losses(folder / "runs" / "whole")


def test_checkpoints_that_cannot_serve_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    whole = folder / "runs" / "whole"
    torn = tmp_path / "torn"
    shutil.copytree(whole, torn)
    for checkpoint in (torn / "checkpoints").glob("step_*"):
        next(checkpoint.glob("zero_pp_rank_0_*")).unlink()
    metrics = (torn / "metrics.jsonl").read_bytes()
    cases = {
        (f"resume={whole}", "model.num_layers=3", "train.steps=20"): "a model of another shape",
        (f"resume={whole}", "train.seed=1", "train.steps=20"): "train.seed=0, not 1",
        (f"resume={whole}",): "train.steps: found 12, but the run has 12 steps already",
        (f"resume={torn}/checkpoints/step_000012", "train.steps=20"): "is torn",
        (
            "resume=auto",
            f"run.dir={torn}",
            "train.steps=20",
        ): "and there is no other; run.overwrite=true in place of resume",
    }
    for overrides, message in cases.items():
        code, out, err = _finish(_start(folder, "zero=lossless", "run.name=refused", *overrides))
        errors = [line for line in err.splitlines() if "warning" not in line]
        assert code == 2 and len(errors) == 1 and message in errors[0], out + err
    assert not (folder / "runs" / "refused").exists()
    assert (torn / "metrics.jsonl").read_bytes() == metrics
    with lock(whole):
        code, _, err = _finish(_start(folder, "zero=lossless", "run.name=whole", "resume=auto", "train.steps=20"))
    assert code == 2 and f"a run is under way in 'runs/whole' (process {os.getpid()})" in err, err


@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_ctrl_c_saves_and_resume_goes_on(folder: Path) -> None:
    run = folder / "runs" / "stopped"
    process = _start(folder, "zero=lossless", "run.name=stopped", "checkpoint.every=0")
    _wait_for_step(run, 3, process)
    ranks = _ranks(process)
    process.send_signal(signal.SIGINT)
    code, out, err = _finish(process, timeout=60)
    assert code == 130 and "stopping" in err and "resume=auto run.dir=runs/stopped" in out, out + err
    assert all(not Path(f"/proc/{pid}").exists() for pid in ranks)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "interrupted" and summary["steps"] == max(_losses(run))
    code, out, err = _finish(_start(folder, "zero=lossless", "run.name=stopped", "resume=auto"))
    assert code == 0, out + err
    assert _losses(run) == _losses(folder / "runs" / "whole")


def test_a_run_stopped_after_its_last_step_is_evaluated_and_summed_up(folder: Path) -> None:
    whole, run = folder / "runs" / "whole", folder / "runs" / "late"
    shutil.copytree(whole, run)
    (run / "summary.json").unlink()
    code, out, err = _finish(_start(folder, "zero=lossless", "run.name=late", "resume=auto"))
    assert code == 0, out + err
    late, expected = (json.loads((path / "summary.json").read_text()) for path in (run, whole))
    assert late["status"] == "finished" and late["steps"] == 12 and late["steps_here"] == 0
    assert late["eval"] == expected["eval"] and late["loss_last"] == expected["loss_last"]
    code, _, err = _finish(_start(folder, "zero=lossless", "run.name=late", "resume=auto"))
    assert code == 2 and "train.steps: found 12, but the run has 12 steps already" in err, err


def test_a_failing_rank_shows_its_traceback_once(folder: Path) -> None:
    code, _, err = _finish(_start(folder, "run.name=bad", "+deepspeed.optimizer.type=Nope"))
    assert code == 1 and err.count("Traceback") == 1, err
    assert "Nope" in err and "all ranks are ended" in err


def test_what_the_ranks_refuse_is_one_line_and_undone(folder: Path) -> None:
    def content() -> dict[str, bytes]:
        files = ("metrics.jsonl", "summary.json", "config.yaml", "checkpoints/latest")
        return {name: (folder / "runs" / "whole" / name).read_bytes() for name in files}

    refused, kept = "+deepspeed.zero_optimization.reduce_scatter=false", content()
    for overrides in (("run.name=new",), ("run.name=whole", "run.overwrite=true")):
        code, _, err = _finish(_start(folder, *overrides, refused))
        assert code == 2 and err.count("\n") == 1, err
        assert err.startswith("hzero: error: zero_optimization.reduce_scatter: found False"), err
    assert not (folder / "runs" / "new").exists()
    assert content() == kept


def test_stock_zero3_gives_the_same_losses_to_a_reader_who_leaves(folder: Path) -> None:
    process = _start(folder, "zero=stock", "run.name=stock", "checkpoint.every=0")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()  # as `hzero train | head -1`
    assert process.wait(timeout=150) == 0, process.stderr.read() if process.stderr else ""
    whole = _losses(folder / "runs" / "whole")
    for step, loss in _losses(folder / "runs" / "stock").items():
        assert loss == pytest.approx(whole[step], rel=1e-5)


def test_a_second_run_does_not_touch_the_first(folder: Path) -> None:
    before = (folder / "runs" / "whole" / "metrics.jsonl").read_bytes()
    code, out, err = _finish(
        _start(folder, "zero=zeropp", "run.name=whole", "train.steps=2", "checkpoint.every=0", "model.zero_init=true")
    )
    assert code == 0 and "whole-2" in out, out + err
    assert (folder / "runs" / "whole" / "metrics.jsonl").read_bytes() == before
    # Weights that zero.Init made in shards start like those made whole.
    losses = _losses(folder / "runs" / "whole-2")
    assert losses[1] == pytest.approx(_losses(folder / "runs" / "whole")[1], rel=0.02)
