"""Launcher: starts the ranks of a command on this machine, watches them, and ends all of them when one fails.

The parent calls `Ranks.run`; a rank that it has started calls `run_rank`. A rank has two pipes to the parent: one for its
output, one for the reason why it ends. So a full disk hides neither: the parent keeps the last lines and the reasons, and
also writes them into a folder of logs where it can: ``rank<r>.log`` the output, ``rank<r>.refused`` the input that a rank
refused, ``rank<r>.traceback`` its error. Rank 0 makes `STARTED` there when the work begins.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hzero.reasons import REASONS, PlainError, RankPipes, Reason
from hzero.validation import ConfigError

#: How long ranks may take to stop after Ctrl-C, in seconds.
GRACE_S = 60.0
#: Exit statuses: after Ctrl-C, for input that the ranks refuse, and for work that has saved what it did and is to be started
#: again (EX_TEMPFAIL of sysexits.h).
INTERRUPTED, REFUSED, UNFINISHED = 130, 2, 75
#: File in the folder of logs that rank 0 makes when the work begins.
STARTED = "started"
_PR_SET_PDEATHSIG = 1
#: Variables of torchrun's agents, srun's and the MPI launchers' daemons.
_SUPERVISED = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PALS_RANKID")

T = TypeVar("T")


def free_port() -> int:
    """A TCP port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def rank_environment(rank: int, world_size: int, port: int, threads: int) -> dict[str, str]:
    """The environment of a rank on this machine: ours without the variables of other launchers, and its own on top."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "TORCHELASTIC_"))}
    return {
        **ours,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
    }


def local_ranks(world_size: int, threads: int = 1, more: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """The environments of all ranks of a world on this machine, each with the variables ``more`` as well."""
    port = free_port()
    return [{**rank_environment(rank, world_size, port, threads), **(more or {})} for rank in range(world_size)]


def die_with_parent() -> None:
    """Asks Linux to kill this process when the thread that started it ends. For ``preexec_fn``; it outlives an exec."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def renew_thread_pool() -> None:
    """Gives a forked process a pool of ``OMP_NUM_THREADS`` threads of its own, while it has one thread.

    PyTorch replaces the parent's pool at the first use, without a lock: of two threads of a transport that come at once, one
    finds no pool ("Invalid thread pool!"). Source: PyTorch's ``caffe2/utils/threadpool/pthreadpool-cpp.cc``.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


class _Fork:
    """A forked rank, with the part of the interface of `subprocess.Popen` that `Ranks` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.01)


class Ranks:
    """The rank processes of one command. None of them outlives this process.

    Args:
        command: The command, the same for all ranks.
        environments: One environment per rank.
        logs: The folder of logs. Rank 0's standard output goes to ours instead.
        imports: Modules that take long to import, for a ``command`` of the form ``python -m MODULE ...``. Without an
            accelerator this process imports them and then forks the ranks, which saves each rank 6 to 9 s of a core.
            Libraries of accelerators do not survive a fork.
        start_timeout: How long rank 0 may take to make `STARTED`, in seconds.
        timeout_key: The key or option that sets ``start_timeout``, for the message.
        stopping: What Ctrl-C does, for the message.
        stopping_early: The same before `STARTED` is there.
        passed_on: Signals that the ranks get as well, once `STARTED` is there.
        say: Takes a line for the user.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        logs: Path,
        *,
        imports: Sequence[str] = (),
        start_timeout: float = math.inf,
        timeout_key: str = "",
        stopping: str = "the ranks are told to end (again to end them at once)",
        stopping_early: str | None = None,
        passed_on: Sequence[int] = (),
        say: Callable[[str], None] = lambda message: print(message, file=sys.stderr, flush=True),
    ) -> None:
        self._command = list(command)
        self._environments = environments
        self._logs = logs
        self._imports = imports
        self._started = logs / STARTED
        self._start_timeout, self._timeout_key = start_timeout, timeout_key
        self._stopping, self._stopping_early = stopping, stopping_early or stopping
        self._passed_on, self._received = passed_on, list[int]()
        self._say = say
        self._processes: list[subprocess.Popen[bytes] | _Fork] = []
        self._pipes: list[RankPipes] = []
        self._interrupts = 0

    def run(self) -> int:
        """Runs the ranks to their end.

        Returns:
            0 if all ended well, 75 if they are not finished and have not failed, 130 after an interruption, 2 if the ranks
            refused their input, 1 if a rank failed or the start took too long.
        """
        for stale in (*self._logs.glob("rank*"), self._started):
            with contextlib.suppress(OSError):
                stale.unlink()
        handlers: dict[int, Any] = {s: signal.signal(s, self._interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
        handlers |= {s: signal.signal(s, lambda number, frame: self._received.append(number)) for s in self._passed_on}
        try:
            self._start()
            if self._interrupts:  # one that was being started then was not told
                self._tell(signal.SIGTERM)
            return self._watch()
        finally:
            self._tell(signal.SIGKILL)
            for process in self._processes:
                process.wait()
            for pipes in self._pipes:
                pipes.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _start(self) -> None:
        fork = bool(self._imports) and not importlib.import_module("torch").cuda.is_available()
        for name in self._imports if fork else ():
            importlib.import_module(name)
        for rank, environment in enumerate(self._environments):
            if self._interrupts:
                break
            pipes = RankPipes(self._logs, rank)
            self._pipes.append(pipes)
            start = self._fork if fork else self._spawn
            try:
                self._processes.append(start(rank, {**environment, REASONS: str(pipes.reasons)}, pipes))
            finally:
                pipes.started()

    def _spawn(self, rank: int, environment: dict[str, str], pipes: RankPipes) -> subprocess.Popen[bytes]:
        if self._command[1:2] == ["-m"] and not {"", os.getcwd()} & set(sys.path):
            # Or Python would look for modules in the current folder first, where others may have put some.
            environment["PYTHONSAFEPATH"] = "1"
        return subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else pipes.output,
            stderr=pipes.output,
            pass_fds=(pipes.reasons,),
            start_new_session=True,  # Ctrl-C reaches us alone, and we tell them
            preexec_fn=die_with_parent,
        )

    def _fork(self, rank: int, environment: dict[str, str], pipes: RankPipes) -> _Fork:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        # A signal that comes before the rank has handlers of its own waits: ours would swallow it.
        handled = (signal.SIGINT, signal.SIGTERM, *self._passed_on)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        if pid := os.fork():
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return _Fork(pid)
        # From here on this process is the rank.
        try:
            os.setsid()
            die_with_parent()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in handled[1:]:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), 0)
            os.dup2(pipes.output, 2)
            if rank:
                os.dup2(pipes.output, 1)
            if os.getppid() == parent:  # else it ended before this process asked to end with it
                gc.freeze()  # or collections would copy the memory that the ranks share
                os.environ.clear()
                os.environ.update(environment)
                renew_thread_pool()
                sys.argv = self._command[2:]
                runpy.run_module(self._command[2], run_name="__main__", alter_sys=True)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # a rank that has done its work has ended in `run_rank`

    def _interrupt(self, number: int, frame: object) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self._say(f"stopping: {self._stopping if self._started.exists() else self._stopping_early}")
        self._tell(signal.SIGTERM if self._interrupts == 1 else signal.SIGKILL)

    def _tell(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def _watch(self) -> int:
        deadline = time.monotonic() + self._start_timeout
        interrupted_at: float | None = None
        while True:
            if self._received and self._started.exists():
                self._tell(self._received.pop(0))
            codes = [process.poll() for process in self._processes]
            failed = [rank for rank, code in enumerate(codes) if code not in (None, 0, UNFINISHED)]
            running = [rank for rank, code in enumerate(codes) if code is None]
            if self._interrupts:
                interrupted_at = interrupted_at or time.monotonic()
                if not running:
                    raised = [rank for rank in failed if (codes[rank] or 0) > 0]
                    if raised:  # while it saved, as on a full disk
                        self._report(raised)
                    return INTERRUPTED
                if time.monotonic() > interrupted_at + GRACE_S:
                    self._say(f"ranks {running} did not stop within {GRACE_S:.0f} s and are killed")
                    return INTERRUPTED
            elif failed:
                self._read(1.0)  # others that failed for the same reason may still be writing theirs
                return self._report(failed)
            elif not running:
                return UNFINISHED if UNFINISHED in codes else 0
            elif not self._started.exists() and time.monotonic() > deadline:
                stopped = self._stopped()
                why = f"; stopped (SIGSTOP): ranks {stopped}" if stopped else ""
                self._say(
                    f"rank 0 has not started its work within {self._start_timeout:.0f} s ({self._timeout_key}){why}; all ranks "
                    f"are ended. Logs: {self._logs}"
                )
                return 1
            self._read(0.05)

    def _read(self, seconds: float) -> None:
        """Takes what comes from the ranks for some time."""
        until = time.monotonic() + seconds
        ends = {end: pipes for pipes in self._pipes for end in pipes.ends}
        while (left := until - time.monotonic()) > 0:
            ready = select.poll()
            for end in ends:
                ready.register(end, select.POLLIN)
            for end, event in ready.poll(left * 1000):
                ends[end].read()
                if not event & select.POLLIN:  # closed by the rank: poll would not wait
                    ends.pop(end)

    def _stopped(self) -> list[int]:
        return [rank for rank, process in enumerate(self._processes) if _is_stopped(process.pid)]

    def _report(self, failed: Sequence[int]) -> int:
        """Says why ranks failed; returns the exit status that this makes."""
        for pipes in self._pipes:
            pipes.read()
        reasons = {rank: pipes.reason for rank, pipes in enumerate(self._pipes) if pipes.reason is not None}
        first = sorted(reasons, key=lambda rank: reasons[rank].time)
        for rank in first:
            if reasons[rank].kind == "refused":
                self._say(f"hzero: error: {reasons[rank].text}")
                return REFUSED
        codes = {rank: self._processes[rank].poll() or 0 for rank in failed}
        killed = [rank for rank in failed if codes[rank] < 0]
        causes = [rank for rank in first if reasons[rank].kind == "failed"]
        waited = sorted(first, key=lambda rank: not reasons[rank].blames)  # who names somebody knows more
        stopped = self._stopped()
        # A rank killed or stopped from outside leaves no reason, and those of the other ranks only say that it is gone. So a
        # rank that waited for others is to blame only where no other is.
        if killed or not reasons:
            rank = (killed or list(failed))[0]
            others = f"; stopped (SIGSTOP): ranks {stopped}" if stopped else ""
            end = f"hzero: rank {rank} died: {_cause(codes[rank])}{others}; all ranks are ended"
            self._say("\n".join([*self._pipes[rank].tail(), end]))
        elif causes:
            self._say(f"{reasons[causes[0]].text.rstrip()}\nhzero: rank {causes[0]} failed; all ranks are ended")
        else:
            reason = reasons[waited[0]]
            named = ", ".join(str(rank) for rank in reason.blames)
            named = named or ", ".join(str(rank) for rank in stopped)
            end = f"rank {named} did not come" if named else f"rank {waited[0]} waited in vain"
            if stopped:
                end += f"; stopped (SIGSTOP): ranks {stopped}"
            self._say(f"{reason.text.rstrip()}\nhzero: {end}; all ranks are ended")
        self._say(f"hzero: logs of all ranks: {self._logs}")
        return 1


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):  # no Linux, or it has just ended
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    name = signal.Signals(-code).name
    return f"signal {name}{', perhaps out of memory' if name == 'SIGKILL' else ''}"


def run_rank(work: Callable[[], int | None]) -> NoReturn:
    """Does the work of a rank that `Ranks` has started, and ends the process. If the work fails, the parent is told why.

    Args:
        work: The work. It may return an exit status.
    """
    sys.stdout = PatientStream(sys.stdout)  # type: ignore[assignment]
    reasons = int(os.environ.pop(REASONS, -1))
    if reasons >= 0:
        os.set_inheritable(reasons, False)
    try:
        status = work()
    except BaseException as error:
        said = json.dumps(Reason.of(error)).encode() + b"\n"
        with contextlib.suppress(OSError):  # the parent is gone
            os.write(reasons, said)
        with contextlib.suppress(OSError):
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)  # a process group with a dead member can take minutes to be torn down
    sys.stdout.flush()
    os._exit(status or 0)


def end_with_parent() -> None:
    """Ends this process when its parent ends, if that is a launcher's agent or daemon: SIGKILL may have ended it.

    A shell is none: what it has started with ``nohup`` may outlive it. `die_with_parent` is for processes that we start
    ourselves: it ends those that a thread has started with the thread.
    """
    if not any(name in os.environ for name in _SUPERVISED):
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        with contextlib.suppress(OSError):
            text = f"hzero: rank {os.environ.get('RANK', '?')} ends, since the process that started it ({parent}) is gone\n"
            os.write(2, text.encode())
        os._exit(1)

    threading.Thread(target=watch, name="hzero parent", daemon=True).start()


def on_rank_0(function: Callable[[], T], group: Any = None) -> T:
    """Calls a function on rank 0 and returns its result on all ranks. Collective.

    Raises:
        ConfigError: The function raised one. All ranks raise it, those other than rank 0 with ``elsewhere`` set.
        PlainError: The function raised another error, which rank 0 raises itself. It has ``elsewhere`` set.
    """
    import torch.distributed as dist

    answer: list[Any] = [None, None, None]
    raised: Exception | None = None
    if dist.get_rank() == 0:
        try:
            answer[0] = function()
        except Exception as error:  # the others would wait for it
            raised, text = error, str(error)
            if not isinstance(error, (ConfigError, PlainError)):
                text = f"rank 0 failed: {type(error).__name__}: {text}"
            answer[1:] = text, isinstance(error, ConfigError)
    dist.broadcast_object_list(answer, 0, group=group)
    if raised is not None:
        raise raised
    if answer[1] is not None:
        raise (ConfigError if answer[2] else PlainError).of_rank_0(answer[1])
    return answer[0]  # type: ignore[no-any-return]


class PatientStream:
    """Standard output that outlives its reader: ``hzero train | head`` must not end the training."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes; to nowhere once the reader is gone."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flushes, with the same patience."""
        self._try(lambda: self._stream.flush())

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except BrokenPipeError:
            self._stream = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
