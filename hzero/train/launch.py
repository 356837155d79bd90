"""Launcher: starts the ranks of a run on this machine, and ends all of them when one dies or the user says so."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

GRACE_S = 60.0
#: Exit statuses: after Ctrl-C, and for input that the ranks refuse.
INTERRUPTED, REFUSED = 130, 2


def free_port() -> int:
    """A TCP port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, world_size: int, port: int, threads: int) -> dict[str, str]:
    """What a rank on this machine finds in its environment."""
    from_outside = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "TORCHELASTIC_"))}
    return {
        **from_outside,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
    }


class Ranks:
    """The rank processes of one run.

    Args:
        command: What to run, the same for all ranks.
        environments: One a rank.
        logs: Folder for ``rank<r>.log``; rank 0's standard output goes to ours.
        started: File that rank 0 makes once training has started.
        start_timeout: Longest wait for it, in seconds.
        say: Takes a line for the user.
        stopping: What Ctrl-C does, for the user; None for what it does to a training.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        logs: Path,
        started: Path,
        start_timeout: float,
        say: Callable[[str], None] = lambda message: print(message, file=sys.stderr, flush=True),
        stopping: str | None = None,
    ) -> None:
        self._stopping = stopping
        self._command = list(command)
        self._environments = environments
        self._logs = logs
        self._started = started
        self._start_timeout = start_timeout
        self._say = say
        self._processes: list[subprocess.Popen[bytes]] = []
        self._interrupts = 0

    def run(self) -> int:
        """Runs the ranks to their end.

        Returns:
            0 where all ended well, 130 after an interruption, 2 where the ranks refused their input, 1 where a rank died
            or start-up took too long.
        """
        for stale in self._logs.glob("rank*"):
            stale.unlink()
        self._started.unlink(missing_ok=True)
        handlers = {s: signal.signal(s, self._interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            for rank, environment in enumerate(self._environments):
                if self._interrupts:
                    break
                with open(self._logs / f"rank{rank}.log", "wb") as log:
                    self._processes.append(
                        subprocess.Popen(
                            self._command,
                            env=dict(environment),
                            stdin=subprocess.DEVNULL,
                            stdout=None if rank == 0 else log,
                            stderr=log,
                            start_new_session=True,  # Ctrl-C reaches us alone, and we tell them
                        )
                    )
            if self._interrupts:  # one that was being started then was not told
                self._tell(signal.SIGTERM)
            return self._watch()
        finally:
            self._end_all()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _interrupt(self, number: int, frame: object) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            begun = self._started.exists()
            what = "the ranks finish their step and save (again to stop at once)" if begun else "training had not begun"
            self._say(f"stopping: {self._stopping or what}")
        self._tell(signal.SIGTERM if self._interrupts == 1 else signal.SIGKILL)

    def _tell(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _watch(self) -> int:
        begun = time.monotonic()
        deadline = begun + self._start_timeout
        interrupted_at: float | None = None
        while True:
            codes = [process.poll() for process in self._processes]
            failed = [rank for rank, code in enumerate(codes) if code]
            if self._interrupts:
                interrupted_at = interrupted_at or time.monotonic()
                if all(code is not None for code in codes):
                    raised = [rank for rank in failed if (codes[rank] or 0) > 0]
                    if raised:  # while it saved, as on a full disk
                        self._report(raised)
                    return INTERRUPTED
                if time.monotonic() > interrupted_at + GRACE_S:
                    self._say(f"ranks {_open(codes)} did not stop within {GRACE_S:.0f} s; ended")
                    return INTERRUPTED
            elif failed:
                time.sleep(1.0)  # others that failed for the same reason may still be writing theirs
                return self._report(failed)
            elif all(code == 0 for code in codes):
                return 0
            elif not self._started.exists() and time.monotonic() > deadline:
                self._say(
                    f"training has not started after {self._start_timeout:.0f} s (launcher.start_timeout_s); "
                    f"waited for rank 0 to build its engine. Logs: {self._logs}"
                )
                return 1
            time.sleep(0.05)

    def _report(self, failed: Sequence[int]) -> int:
        """Says why ranks failed; returns the exit status that this makes."""
        for path in sorted(self._logs.glob("rank*.refused")):
            self._say(f"hzero: error: {path.read_text(errors='replace').strip()}")
            return REFUSED
        tracebacks = sorted(self._logs.glob("rank*.traceback"), key=lambda path: path.stat().st_mtime_ns)
        codes = {rank: self._processes[rank].poll() for rank in failed}
        killed = [rank for rank in failed if (codes[rank] or 0) < 0]
        # A rank killed from outside leaves no traceback, and those of its peers only say that it is gone.
        if killed or not tracebacks:
            rank = (killed or list(failed))[0]
            log = self._logs / f"rank{rank}.log"
            tail = log.read_text(errors="replace").strip().splitlines()[-15:] if log.exists() else []
            self._say("\n".join([*tail, f"hzero: rank {rank} died: {_cause(codes[rank])}; all ranks are ended"]))
        else:
            text = tracebacks[0].read_text(errors="replace").rstrip()
            rank = int(tracebacks[0].stem[len("rank") :])
            self._say(f"{text}\nhzero: rank {rank} failed with the error above; all ranks are ended")
        self._say(f"hzero: logs of all ranks: {self._logs}")
        return 1

    def _end_all(self) -> None:
        self._tell(signal.SIGKILL)
        for process in self._processes:
            process.wait()


def _open(codes: Sequence[int | None]) -> list[int]:
    return [rank for rank, code in enumerate(codes) if code is None]


def _cause(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        memory = ", perhaps out of memory" if name == "SIGKILL" else ""
        return f"signal {name}{memory}"
    return f"exit status {code}"
