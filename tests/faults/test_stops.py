"""A training that is stopped, or dies while it saves, loses nothing: plain loops under torchrun."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import hzero
from hzero import stop
from tests.faults.launch import run

#: Status of torchrun when its ranks end with another one than 0; it prints theirs.
FAILED = 1


def test_the_longest_save_decides_when_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the ends of the time that a short and a long save would need, the ranks stop."""
    now = [1000.0]
    monkeypatch.setattr(stop, "time", SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0]))
    control = SimpleNamespace(should_save=False, should_training_stop=False)
    ranks = hzero.StopAndSave(time_limit=2000, signals=())
    for step, save in ((10.0, 400.0), (10.0, 1.0)):
        now[0] += step
        ranks.on_step_end(None, SimpleNamespace(global_step=1), control)
        now[0] += save
        ranks.on_save(SimpleNamespace(), None, control)
    now[0] = 3000.0 - 300.0  # a save of 1 s would fit, one of 400 s does not
    assert not control.should_training_stop
    ranks.on_step_end(None, SimpleNamespace(global_step=2), control)
    assert control.should_training_stop and ranks.reason == "time"
    # Trainer saves without an evaluation, keeps that checkpoint, and ends with the status.
    assert control.should_save and not control.should_evaluate
    arguments = SimpleNamespace(load_best_model_at_end=True, save_total_limit=1)
    ranks.on_save(arguments, None, control)
    assert (arguments.load_best_model_at_end, arguments.save_total_limit) == (False, None)
    ranks.on_epoch_end(arguments, None, control)
    assert not control.should_save
    with pytest.raises(SystemExit, match="75"):
        ranks.on_train_end(arguments, None, control)


def _launch(way: str, folder: Path, status: int) -> str:
    run_folder = folder.with_name(way)
    for one in (folder, run_folder):
        one.mkdir(exist_ok=True)
    return run("stops.py", way, str(folder), folder=run_folder, ranks=3, status=status, timeout=200)


@pytest.mark.parametrize(("way", "step", "reason"), [("signals", 3, "SIGTERM"), ("time", 1, "time")])
def test_ranks_stop_after_the_same_step_and_save(way: str, step: int, reason: str, tmp_path: Path) -> None:
    """Signals reach some ranks only, at different moments of a step."""
    folder = tmp_path / "checkpoints"
    text = _launch(way, folder, FAILED)
    assert [(folder / f"end{rank}").read_text() for rank in range(3)] == [f"{step} {reason} SystemExit(75)"] * 3
    why = "the time is nearly over" if reason == "time" else reason
    assert text.count(f"hzero: {why}: the ranks stop after this step") == 1
    assert text.count(f"hzero: {why}: saved; exit status 75") == 1
    assert "exitcode  : 75" in text and "exitcode  : -" not in text, text
    assert hzero.newest_checkpoint(folder) == str(folder / f"global_step{step}")
    if way == "signals":
        text = _launch("no", folder, 0)
        assert text.index("goes on after step 3") < text.index("step 4") < text.index("trained")
        assert "\nstep 3\n" not in text


def test_the_end_of_an_earlier_job_is_ignored_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1000000000")
    assert stop._ends_at(None) is None and (stop._ends_at("1h") or 0) > time.time() + 3500
    said = capsys.readouterr().err.splitlines()
    soon = int(time.time()) + 60  # the earlier one counts
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(soon))
    assert stop._ends_at(None) == stop._ends_at("1h") == soon
    assert len(said) == 2 and said[0].startswith("hzero: warning: SLURM_JOB_END_TIME: found 1000000000, a time in"), (
        said
    )


def test_a_kill_during_a_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    text = _launch("killed", folder, FAILED)
    assert "step 2" in text and "step 3" not in text
    assert sorted(path.name for path in folder.glob("*global_step*")) == [".global_step2.partial", "global_step1"]
    text = _launch("no", folder, 0)
    assert text.index("goes on after step 1") < text.index("step 2") < text.index("trained")
