"""A run's folder: nothing is lost, whatever ends a run before it has begun."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from hzero.train import folder
from hzero.validation import ConfigError, PlainError

ROW = json.dumps({"kind": "step", "step": 1, "loss": 2.0}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one step, with a checkpoint and a file of the user's."""
    path = tmp_path / "run"
    (path / "logs").mkdir(parents=True)
    (path / "checkpoints" / "step_000001").mkdir(parents=True)
    for name, text in (
        (".hzero-run", "1"),
        ("config.yaml", "old"),
        ("metrics.jsonl", ROW),
        ("summary.json", "{}"),
        ("notes.txt", "mine"),
        ("logs/rank0.log", "old"),
        ("checkpoints/step_000001/complete.json", "old"),
    ):
        (path / name).write_text(text)
    return path


def _content(path: Path) -> dict[str, str]:
    files = [p for p in path.rglob("*") if p.is_file() and p.name != ".hzero-run"]
    return {str(p.relative_to(path)): p.read_text() for p in files}


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("killed", [True, False])
def test_undo_puts_back_what_was_there(run: Path, overwrite: bool, killed: bool) -> None:
    before = _content(run)
    with folder.lock(run):
        folder.create(run, "new", overwrite, None if overwrite else 1)
        (run / "logs" / "rank0.log").write_text("new")
        assert (run / "config.yaml").read_text() == "new" and not (run / "summary.json").exists()
        assert (run / "checkpoints").exists() != overwrite
        if not killed:
            folder.undo(run)
    if killed:  # and the next run, or the same again, comes by
        assert folder.holds_run(run)
        folder.lock(run).close()
    after = _content(run)
    logs = {"logs/failed/rank0.log": "new"} if overwrite else {"logs/rank0.log": "new"}
    assert after == {**before, **logs} and not folder.set_aside(run)


def test_overwriting_removes_what_runs_write_and_nothing_else(run: Path) -> None:
    with folder.lock(run):
        folder.create(run, "new", True, None)
        folder.begun(run)
    assert _content(run) == {"config.yaml": "new", "metrics.jsonl": "", "notes.txt": "mine"}


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).write_text("another tool's")
    for resume, overwrite in ((False, False), ("auto", False), (False, True)):
        with pytest.raises(ConfigError, match=r"holds config\.yaml, metrics\.jsonl that no run of hzero left"):
            folder.choose(str(tmp_path), resume, overwrite)


def test_undo_of_a_new_run_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new"
    with folder.lock(path):
        folder.create(path, "new", False, None)
        folder.undo(path)
    assert not path.exists()


def test_starting_anew_keeps_metrics_of_steps_without_a_checkpoint(run: Path) -> None:
    with folder.lock(run):
        for number in (1, 2):
            folder.create(run, "new", False, None)
            folder.begun(run)
            assert (run / "metrics.jsonl").read_text() == ""
            assert (run / f"metrics.{number}.jsonl").read_text() == ROW
            (run / "metrics.jsonl").write_text(ROW)


def _saved(path: Path, second: float | None, asked: str) -> Path:
    """A run that has saved at a time, in seconds, or never; its configuration asked for another folder."""
    for name, text in ((".hzero-run", "1"), ("config.yaml", f"run: {{dir: {asked}}}\n"), ("metrics.jsonl", ROW)):
        path.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    if second is not None:
        note = path / "checkpoints" / "step_000001" / "complete.json"
        note.parent.mkdir(parents=True)
        note.write_text("{}")
        os.utime(note, (second, second))
    return path


def test_resume_auto_takes_the_run_that_has_saved_last(tmp_path: Path) -> None:
    named = str(tmp_path / "gpt")
    assert folder.choose(named, "auto", False) == Path(named)
    _saved(tmp_path / "gpt", None, named)
    assert folder.choose(named, "auto", False) == Path(named)
    second = _saved(tmp_path / "gpt-2", 100, "runs/gpt")  # as `hzero train` found it from another folder
    assert folder.choose(named, "auto", False) == second
    _saved(tmp_path / "gpt-3", None, named)  # stopped before its first checkpoint
    _saved(tmp_path / "gpt-10", 300, str(tmp_path / "gpt-10"))  # another run of such a name
    (tmp_path / "gpt-5").mkdir()
    (tmp_path / "gpt-x").write_text("")
    assert folder.choose(named, "auto", False) == second
    assert folder.choose(str(second), "auto", False) == second
    assert folder.choose(named, "auto", False, fixed=True) == Path(named), "of a job, whose logs are there"
    _saved(tmp_path / "gpt", 200, named)  # resumed by its name since
    assert folder.choose(named, "auto", False) == Path(named)
    assert folder.choose(named, False, False) == tmp_path / "gpt-4"


def test_samples_of_steps_that_are_done_again_go(run: Path) -> None:
    first, later = (json.dumps({"step": step, "text": "é"}, ensure_ascii=False) + "\n" for step in (1, 2))
    (run / "samples.jsonl").write_text(first + later + first[:9], encoding="utf-8")
    with folder.lock(run):
        folder.create(run, "new", False, 1)
        assert (run / "samples.jsonl").read_text(encoding="utf-8") == first
        folder.undo(run)
    assert (run / "samples.jsonl").read_text(encoding="utf-8") == first + later + first[:9]


def test_a_folder_has_one_run_at_a_time(run: Path) -> None:
    with folder.lock(run), pytest.raises(ConfigError, match="a run is under way"):
        folder.lock(run)
    folder.lock(run).close()


def test_a_job_waits_for_the_lock_of_a_run_and_another_start_may_help(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may hold the lock for minutes after the node of the last job has died."""
    monkeypatch.setenv("HZERO_JOB", str(run))
    monkeypatch.setattr(folder, "_LOCK_WAIT_S", 0.01)
    with folder.lock(run), pytest.raises(PlainError, match="a run is under way"):
        folder.lock(run)
    monkeypatch.setattr(folder, "_LOCK_WAIT_S", 60)
    held = folder.lock(run)
    release = threading.Timer(0.1, held.close)
    release.start()
    folder.lock(run).close()
    release.join()
    monkeypatch.setattr(folder, "open", _full, raising=False)
    with pytest.raises(PlainError, match=r"cannot write .*No space left"):
        folder.lock(run)


def _full(path: Path, *mode: str, **more: str) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_numbers_are_json() -> None:
    assert folder.finite({"a": [float("nan"), 1.5], "b": (float("inf"), "x")}) == {"a": [None, 1.5], "b": [None, "x"]}
