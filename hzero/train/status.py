"""The state of a run, in ``status.json``, and one line for each of its jobs, in ``history.jsonl``.

One process writes at a time: the command that prepares the run and outlives its ranks, or rank 0 where another launcher has
started the ranks. Files are replaced whole, so who reads them sees the old state or the new; on a full disk they are
overwritten.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

from hzero.files import FULL, read_small, replacing
from hzero.train.folder import HISTORY, STATUS, may_write

State = Literal["pending", "running", "saving", "timed out", "interrupted", "failed", "done"]
#: States of a job that has not ended.
ALIVE = ("pending", "running", "saving")
#: Variables that hold the number of a batch system's job.
_JOBS = ("SLURM_JOB_ID", "FLUX_JOB_ID", "PBS_JOBID")
#: Seconds between two writes of the same state.
_EVERY_S = 10.0


def now() -> str:
    """The time, to the second."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def read(run_dir: Path) -> dict[str, Any]:
    """What ``status.json`` says; empty if there is none, or none that was written here."""
    try:
        found = json.loads(read_small(run_dir / STATUS, 1 << 20))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("state"), str) else {}


def begin(run_dir: Path, *, step: int, steps: int, ranks: int) -> None:
    """A job of the run has begun to prepare itself: ``pending``. Raises `OSError` if it cannot be written.

    Args:
        run_dir: The run's folder.
        step: Optimizer steps done before.
        steps: Steps of the whole run.
        ranks: Ranks of the job.
    """
    job = next((os.environ[name] for name in _JOBS if name in os.environ), None)
    host = {"job": job, "host": socket.gethostname(), "process": os.getpid(), "ranks": ranks}
    _write(
        run_dir,
        {"state": "pending", "since": now(), "step": step, "steps": steps, "from": step, "began": now(), **host},
    )


def end(run_dir: Path, state: State, reason: str | None = None, found: dict[str, Any] | None = None) -> None:
    """A job has ended: notes it, and adds its line to the history. Does nothing if its end is noted already.

    Args:
        run_dir: The run's folder.
        state: How it has ended.
        reason: Why, if it did not come to its end.
        found: What to write instead of what ``status.json`` says.

    Raises:
        OSError: The files cannot be written.
    """
    found = found or read(run_dir)
    if found.get("state") not in ALIVE:
        return
    ended = {**found, "state": state, "since": now(), "reason": reason}
    _write(run_dir, ended)
    line = {name: ended.get(name) for name in ("job", "host", "ranks", "from", "step", "began")}
    text = json.dumps({**line, "ended": ended["since"], "state": state, "reason": reason}) + "\n"
    with open(run_dir / HISTORY, "a", encoding="utf-8") as file:
        file.write(text)


def end_lost(run_dir: Path) -> None:
    """Notes the end of a job that has left no word, as after a SIGKILL of all its processes. The caller holds the lock."""
    if (found := read(run_dir)).get("state") in ALIVE:
        end(run_dir, "failed", f"ended without a word after step {found.get('step')}; nothing was noted later")


class Status:
    """Keeps ``status.json`` up to date while a run trains.

    Args:
        run_dir: The run's folder.
        warn: Takes a line where it cannot be written; training goes on.
    """

    def __init__(self, run_dir: Path, warn: Callable[[str], None]) -> None:
        self._run_dir, self._warn = run_dir, warn
        self._found, self._written = read(run_dir), -_EVERY_S

    @property
    def state(self) -> State:
        """The state noted last."""
        return cast(State, self._found["state"])

    def set(self, state: State, step: int, **more: Any) -> None:
        """Notes the state and the steps done: at once where the state has changed, else every ten seconds."""
        changed = self._found.get("state") != state
        if changed:
            self._found |= {"state": state, "since": now()}
        changed = changed or any(self._found.get(name) != value for name, value in more.items())
        self._found |= {"step": step, **more}
        if changed or time.monotonic() - self._written >= _EVERY_S:
            self._written = time.monotonic()
            with may_write(self._run_dir, self._warn):
                _write(self._run_dir, self._found)

    def end(self, state: State, step: int, reason: str | None = None) -> None:
        """Notes how the job has ended."""
        self._found["step"] = step
        with may_write(self._run_dir, self._warn):
            end(self._run_dir, state, reason, self._found)


def _write(run_dir: Path, content: dict[str, Any]) -> None:
    text = json.dumps({**content, "updated": now()}, indent=1)
    try:
        with replacing(run_dir / STATUS, durable=False) as file:
            file.write(text)
    except OSError as error:
        if error.errno not in FULL or not _overwritten(run_dir / STATUS, text.encode()):
            raise


def _overwritten(path: Path, text: bytes) -> bool:
    """Writes into the room that a file has, since a full disk has none for another: it is then that the status is asked for.

    Returns:
        Whether there was enough. Else the file is as it was.
    """
    with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:
        if len(text) <= os.fstat(file.fileno()).st_blocks * 512:
            file.write(text)
            file.truncate()
            return True
    return False
