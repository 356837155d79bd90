"""When a run stops in time for the end of its job, and what its status file and history tell, without ranks."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import NoReturn

import pytest

from hzero.train import folder, runs, status, stragglers
from hzero.train.stop import TIME_SIGNAL, Stop, ends_at
from hzero.validation import seconds_of


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        *[("2h", 7200), ("1h30m", 5400), ("45s", 45), ("1.5h", 5400), ("1d", 86400), (90, 90), ("90", 90), (0.5, 0.5)],
        *[("1:30:00", 5400), ("1:30", 90), ("1-12", 129600), ("1-0:30", 88200)],
    ],
)
def test_durations(given: str | float, seconds: float) -> None:
    assert seconds_of(given) == seconds


@pytest.mark.parametrize(
    "given", ["", "2 hours", "h", "-3", 0, "0h", "nan", "inf", "2h30", "1.2.3h", True, "0:00", "1:2:3:4"]
)
def test_what_is_no_duration_is_refused(given: str | float) -> None:
    with pytest.raises(ValueError, match="possible: a duration such as 2h, 1h30m, 1:30:00 or 45s, or seconds"):
        seconds_of(given)


def test_a_job_ends_at_the_first_of_its_limits() -> None:
    assert ends_at(None, 100.0, {}) is None
    assert ends_at(60.0, 100.0, {}) == 160.0
    assert ends_at(60.0, 100.0, {"SLURM_JOB_END_TIME": "130"}) == 130.0
    assert ends_at(None, 100.0, {"SLURM_JOB_END_TIME": "130"}) == 130.0
    assert ends_at(None, 100.0, {"SLURM_JOB_END_TIME": "Unknown"}) is None


def test_a_run_stops_while_a_step_and_a_save_still_fit() -> None:
    stop = Stop()
    assert not stop.is_due(1e9)
    stop.stepped(60.0)
    assert stop.margin_s(10.0) == 1.5 * 70 + 5  # nothing else is known yet
    stop.stepped(4.0)
    stop.stepped(2.0)
    assert stop.margin_s(10.0) == 1.5 * 14 + 5, "the first step is no measure of the others"
    stop.ends_at = time.time() + 27
    assert not stop.is_due(10.0) and stop.is_due(12.0)


def test_signals_are_told_apart() -> None:
    before = {number: signal.getsignal(number) for number in (TIME_SIGNAL, signal.SIGTERM)}
    try:
        stop = Stop()
        for number in before:
            stop.remember(number)
        os.kill(os.getpid(), TIME_SIGNAL)
        assert stop.timed and not stop.asked
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(run: Path) -> tuple[dict[str, object], list[dict[str, object]]]:
    lines = (run / folder.HISTORY).read_text().splitlines() if (run / folder.HISTORY).exists() else []
    return status.read(run), [json.loads(line) for line in lines]


def test_a_job_leaves_its_state_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    status.begin(tmp_path, step=4, steps=12, ranks=8)
    assert _read(tmp_path)[0]["state"] == "pending"
    warned: list[str] = []
    kept = status.Status(tmp_path, warned.append)
    kept.set("running", 4)
    kept.set("running", 5)  # ten seconds are not over
    assert _read(tmp_path)[0]["step"] == 4
    kept.set("saving", 6)
    assert _read(tmp_path)[0]["step"] == 6
    kept.end("timed out", 7)
    status.end(tmp_path, "failed", "the command notes nothing twice")
    found, jobs = _read(tmp_path)
    assert found["state"] == "timed out" and found["step"] == 7 and found["job"] == "4711"
    assert [(job["job"], job["from"], job["step"], job["state"], job["ranks"]) for job in jobs] == [
        ("4711", 4, 7, "timed out", 8)
    ]
    assert not warned and sorted(os.listdir(tmp_path)) == [folder.HISTORY, folder.STATUS]


def test_a_job_that_left_no_word_is_noted_by_the_next(tmp_path: Path) -> None:
    status.end_lost(tmp_path)  # a run of an earlier release
    assert not list(tmp_path.iterdir())
    status.begin(tmp_path, step=0, steps=12, ranks=8)
    status.Status(tmp_path, print).set("running", 3)
    status.end_lost(tmp_path)
    status.end_lost(tmp_path)
    found, jobs = _read(tmp_path)
    assert found["state"] == "failed" and len(jobs) == 1
    assert jobs[0]["reason"] == "ended without a word after step 3; nothing was noted later"


def test_a_status_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    warned: list[str] = []
    kept = status.Status(tmp_path / "gone", warned.append)
    kept.set("running", 1)
    kept.end("done", 2)
    assert len(warned) == 2 and all("cannot write" in line and "gone" in line for line in warned)


def test_a_full_disk_has_room_for_the_status_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status.begin(tmp_path, step=0, steps=12, ranks=8)
    warned: list[str] = []
    kept = status.Status(tmp_path, warned.append)
    kept.set("saving", 4, stragglers=["x" * 2000])

    def full(*arguments: object, **more: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / folder.STATUS))

    monkeypatch.setattr(status, "replacing", full)
    kept.set("running", 5, stragglers=[])
    assert (status.read(tmp_path)["state"], status.read(tmp_path)["stragglers"]) == ("running", []) and not warned
    kept.set("saving", 6, stragglers=["x" * 100_000])
    assert status.read(tmp_path)["step"] == 5 and "No space left on device" in warned[0]
    kept.end("failed", 6, "the disk is full")  # too long still: the next job notes that this one has ended
    assert status.read(tmp_path)["state"] == "running" and len(warned) == 2


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"state": 3}', "[" * 100_000])
def test_a_damaged_status_says_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / folder.STATUS).write_text(content)
    assert status.read(tmp_path) == {}


def test_runs_are_shown_with_their_state(tmp_path: Path) -> None:
    (tmp_path / folder.CONFIG).touch()
    (tmp_path / folder.METRICS).touch()
    with folder.lock(tmp_path):
        status.begin(tmp_path, step=0, steps=12, ranks=8)
        assert runs.state_of(tmp_path, {}) == "pending"
        status.Status(tmp_path, print).set("saving", 3)
        assert runs.state_of(tmp_path, {}) == "saving"
    assert runs.state_of(tmp_path, {}) == "dead"
    status.end_lost(tmp_path)
    assert runs.state_of(tmp_path, {}) == "failed"
    assert runs.state_of(tmp_path, {"status": "timed out"}) == "timed out"


def test_the_rank_that_waits_least_is_named_with_its_node() -> None:
    hosts = [f"node{rank // 4}" for rank in range(12)]
    waits = [0.30] * 12
    assert stragglers.slow(hosts, [1.0] * 12, waits) == []
    waits[6], waits[7], waits[1] = 0.05, 0.15, 0.25  # 0.05 s of a step of 1 s are no reason to name anybody
    found = stragglers.slow(hosts, [1.0] * 12, waits)
    assert found == [{"host": "node1", "ranks": [6, 7], "lag_s": 0.25, "step_s": 1.0}]
    assert stragglers.described(found[0]).startswith(
        "rank 6, 7 on node1 is slow: the others wait for it 0.25 s of every step"
    )
    waits[11] = 0.0
    assert [row["host"] for row in stragglers.slow(hosts, [1.0] * 12, waits)] == ["node2", "node1"]


def test_stragglers_are_noted_at_once(tmp_path: Path) -> None:
    status.begin(tmp_path, step=0, steps=12, ranks=8)
    kept = status.Status(tmp_path, print)
    kept.set("running", 1)
    kept.set(kept.state, 2, stragglers=[{"host": "a"}])
    assert status.read(tmp_path)["stragglers"] == [{"host": "a"}] and status.read(tmp_path)["step"] == 2
    kept.set(kept.state, 3, stragglers=[{"host": "a"}])
    assert status.read(tmp_path)["step"] == 2
