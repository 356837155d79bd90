"""A training that is stopped, or dies while it saves, loses nothing: plain loops under torchrun."""

from __future__ import annotations

import time
from importlib.util import find_spec
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


def _launch(way: str, folder: Path, status: int) -> str:
    run_folder = folder.with_name(way)
    for one in (folder, run_folder):
        one.mkdir(exist_ok=True)
    return run("stops.py", way, str(folder), folder=run_folder, ranks=3, status=status, timeout=200)


@pytest.mark.parametrize(
    ("way", "step", "reason"), [("signals", 3, "SIGTERM"), ("time", 1, "time"), ("slurm", 1, "time")]
)
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


def test_a_full_disk_on_one_rank_is_one_line_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    text = _launch("full", folder, FAILED)
    line = f"hzero: error: '{folder}/global_step2' could not be saved: "
    assert text.count("could not be saved") == 1 and line in text, text
    assert (
        "File too large (rank 1); earlier checkpoints are unchanged" in text and "Traceback" not in text.split(line)[0]
    )
    assert [path.name for path in folder.glob("*global_step*")] == ["global_step1"]
    assert "goes on after step 1" in _launch("no", folder, 0)


@pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed; the extra `clients` has it"
)
def test_trainer_stops_in_its_third_step_and_keeps_that_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    folder = tmp_path / "output"
    text = run("stops_trainer.py", str(folder), folder=tmp_path / "first", ranks=2, status=FAILED, timeout=200)
    assert "hzero: SIGUSR1: the ranks stop after step 3" in text and "saved; exit status 75" in text
    assert text.count("exitcode  : 75") == 1 and "after train" not in text, text
    assert text.index("evaluated after 2") < text.index("training ends after 3") and "evaluated after 3" not in text
    assert hzero.newest_checkpoint(folder) == str(folder / "checkpoint-3")
    text = run("stops_trainer.py", str(folder), "resume", folder=tmp_path / "second", ranks=2, timeout=200)
    assert text.index("evaluated after 4") < text.index("training ends after 6") < text.index("after train")
    assert "evaluated after 2" not in text
