"""Starts the ranks of a command on this machine, watches them, and ends all of them when one fails.

The command imports what takes long once, and forks: eight imports of DeepSpeed on two cores would take a minute. Rank 0 has the
terminal; the output of the others goes to ``rank<r>.log``. A rank tells its parent through a pipe why it fails, so a full disk
hides nothing, and the user reads one error: that of the rank that failed first, not of those that waited for it.

This is not `torch.distributed.launcher.api`. After a failure it ends the other ranks by SIGTERM, upon which a trainer saves: 30 s
pass until it kills them. It reports the failed rank with the lowest number in place of the first, in 40 lines.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

from hzero.files import FULL
from hzero.terminal import keep_streams
from hzero.validation import WAIT_S, ConfigError, PeerError, PlainError

#: Exit statuses: after Ctrl-C, for input that is refused, and for work that has saved and is to be started again (EX_TEMPFAIL of
#: sysexits.h).
INTERRUPTED, REFUSED, UNFINISHED = 130, 2, 75
#: Longest time that ranks may take to save and end after Ctrl-C or SIGTERM, in seconds. A second Ctrl-C ends them at once.
GRACE_S = 600.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1
#: Longest text of a failure, in characters: a traceback is cut in the middle.
_TEXT = 10_000
#: Variables of other launchers, which ranks that are started here must not take for theirs.
_OTHERS = ("TORCHELASTIC_", "SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID")


class Failure(NamedTuple):
    """Why a rank fails, as it tells its parent.

    Attributes:
        kind: It refused its input, failed, or waited for other ranks in vain.
        text: For the user.
        time: Seconds of this machine's monotonic clock.
        blames: The ranks that it waited for, where they are known.
    """

    kind: Literal["refused", "failed", "waited"]
    text: str
    time: float
    blames: tuple[int, ...]

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The failure for an error that is being handled."""
        text, blames = str(error), error.ranks if isinstance(error, PeerError) else ()
        if isinstance(error, OSError) and error.errno in FULL and error.filename is not None:
            text = f"{error.strerror}: {os.fspath(error.filename)}"
        elif not isinstance(error, (ConfigError, PlainError)):
            text = traceback.format_exc().rstrip()
        if len(text) > _TEXT:
            text = f"{text[: _TEXT // 2]}\n...\n{text[-_TEXT // 2 :]}"
        kind: Literal["refused", "failed", "waited"] = "refused" if isinstance(error, ConfigError) else "failed"
        if isinstance(error, PeerError) or getattr(error, "elsewhere", False):  # another rank says more
            kind = "waited"
        return cls(kind, text, time.monotonic(), blames)


@dataclass
class _Rank:
    number: int
    process: BaseProcess
    pipe: connection.Connection
    log: Path
    failure: Failure | None = None

    def listen(self) -> None:
        """Takes the rank's failure, if it has told one."""
        with contextlib.suppress(EOFError, OSError):
            while self.failure is None and self.pipe.poll():
                self.failure = self.pipe.recv()

    def stopped(self) -> bool:
        """Whether a signal (SIGSTOP) keeps the process from running."""
        with contextlib.suppress(OSError):  # no Linux, or it has just ended
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        return False


def run_ranks(
    work: Callable[[], int | None],
    count: int,
    *,
    logs: Path,
    threads: int = 1,
    imports: Sequence[str] = (),
    more: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> int:
    """Runs the ranks of a command on this machine to their end. None of them outlives this process.

    Args:
        work: What every rank does; it may return an exit status. With an accelerator it has to be picklable, since the
            accelerator's libraries do not survive a fork.
        count: The number of ranks.
        logs: Folder for the output of all ranks but 0.
        threads: CPU threads of each rank.
        imports: Modules that ranks need and that take long to import.
        more: Variables of a rank on top of `rank_environment`.

    Returns:
        0 if all ranks ended well, 75 if they saved and are to be started again, 2 if they refused their input, 130 after Ctrl-C
        (or SIGTERM before they could save), and 1 if a rank failed.
    """
    logs.mkdir(parents=True, exist_ok=True)
    for stale in logs.glob("rank*.log"):
        stale.unlink()
    if importlib.import_module("torch").cuda.is_available():
        context = multiprocessing.get_context("spawn")
        os.environ["OMP_NUM_THREADS"] = str(threads)  # read when the new process loads the library
    else:
        context = multiprocessing.get_context("fork")  # type: ignore[assignment]
        for name in imports:
            importlib.import_module(name)
        gc.freeze()  # or collections would copy the memory that the ranks share
    received: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: received.append(number)) for number in _SIGNALS}
    port, ranks = free_port(), list[_Rank]()
    # A signal that comes before a rank has handlers of its own waits: ours would swallow it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        for rank in range(count):
            sys.stdout.flush()
            sys.stderr.flush()
            ours, theirs = context.Pipe(duplex=False)
            environment = {**rank_environment(rank, count, port, threads), **more(rank)}
            log = logs / f"rank{rank}.log"
            process = context.Process(target=_enter, args=(work, rank, environment, log, theirs, os.getpid()))
            process.start()
            theirs.close()
            ranks.append(_Rank(rank, process, ours, log))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        _watch(ranks, received)
        return _conclude(ranks, received)
    finally:
        for each in ranks:
            each.process.kill()
        for each in ranks:
            each.process.join()
            each.pipe.close()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _watch(ranks: Sequence[_Rank], received: Sequence[int]) -> None:
    """Passes signals on until all ranks have ended, or one has failed."""
    passed, stops, deadline = 0, 0, math.inf
    while running := [rank for rank in ranks if rank.process.exitcode is None]:
        if not stops and any(rank.process.exitcode not in (None, 0, UNFINISHED) for rank in ranks):
            time.sleep(1.0)  # others that failed for the same reason may still be telling theirs
            break
        for number in received[passed:]:
            passed += 1
            if number != signal.SIGUSR1:
                stops += 1
                deadline = time.monotonic() + GRACE_S
                number = signal.SIGTERM if stops == 1 else signal.SIGKILL
                if stops == 1:
                    _say("hzero: stopping the ranks, which save if they train (Ctrl-C again ends them at once)")
            for rank in running:
                os.kill(rank.process.pid or 0, number)  # not reaped yet, so the number is still the rank's
        if time.monotonic() > deadline:
            numbers = [rank.number for rank in running]
            _say(f"hzero: ranks {numbers} have not stopped within {GRACE_S:.0f} s and are killed")
            return
        for rank in ranks:
            rank.listen()
        time.sleep(0.05)  # a sentinel of multiprocessing would end with an exec


def _conclude(ranks: Sequence[_Rank], received: Sequence[int]) -> int:
    """Tells the user why ranks have failed, and returns the exit status."""
    for rank in ranks:
        rank.listen()
    codes = {rank.number: rank.process.exitcode for rank in ranks}
    failed = [number for number, code in codes.items() if code not in (None, 0, UNFINISHED)]
    if any(number != signal.SIGUSR1 for number in received):
        # Those that our signal has ended have not failed. Others may have, as on a disk that is full.
        raised = [number for number in failed if (codes[number] or 0) > 0 and codes[number] != INTERRUPTED]
        status = _report(ranks, raised) if raised else 0
        if signal.SIGINT in received or (not status and set(codes.values()) - {0, UNFINISHED}):
            return INTERRUPTED
    else:
        status = _report(ranks, failed) if failed else 0
    return status or (UNFINISHED if UNFINISHED in codes.values() else 0)


def _report(ranks: Sequence[_Rank], failed: Sequence[int]) -> int:
    told = {rank.number: rank.failure for rank in ranks if rank.failure is not None}
    told = dict(sorted(told.items(), key=lambda item: item[1].time))
    for failure in told.values():
        if failure.kind == "refused":
            _say(f"hzero: error: {failure.text}")
            return REFUSED
    stopped = [rank.number for rank in ranks if rank.stopped()]
    others = f"; stopped (SIGSTOP): ranks {stopped}" if stopped else ""
    killed = [number for number in failed if (ranks[number].process.exitcode or 0) < 0]
    causes = [number for number, failure in told.items() if failure.kind == "failed"]
    # A rank that is killed tells nothing, and the errors of the others only say that it is gone. So a rank that waited for others
    # is to blame only if there is no other cause.
    if killed or not told:
        number = (killed or list(failed))[0]
        code = ranks[number].process.exitcode or 0
        cause = f"exit status {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        cause += ", perhaps out of memory" if code == -signal.SIGKILL else ""
        lines = [*_tail(ranks[number].log), f"hzero: rank {number} died: {cause}{others}; all ranks are ended"]
        _say("\n".join(lines))
    elif causes:
        _say(f"{told[causes[0]].text}\nhzero: rank {causes[0]} failed; all ranks are ended")
    else:
        number, failure = min(told.items(), key=lambda item: not item[1].blames)  # who names somebody knows more
        missing = ", ".join(map(str, failure.blames or stopped))
        end = f"rank {missing} did not come" if missing else f"rank {number} waited in vain"
        _say(f"{failure.text}\nhzero: {end}{others}; all ranks are ended")
    _say(f"hzero: logs of the other ranks: {ranks[0].log.parent}")
    return 1


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _tail(log: Path) -> list[str]:
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TEXT))
        return file.read().decode(errors="replace").splitlines()[-15:]
    return []


def _enter(
    work: Callable[[], int | None],
    rank: int,
    environment: dict[str, str],
    log: Path,
    pipe: connection.Connection,
    parent: int,
) -> NoReturn:
    """The life of a rank."""
    os.setsid()  # Ctrl-C reaches the parent alone, which tells the ranks
    die_with_parent()
    if os.getppid() != parent:  # it ended before this process asked to end with it
        os._exit(1)
    atexit._clear()  # what the parent does at its end
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The end of a job that comes before training has a handler of its own: nothing is lost, so it is no failure.
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(UNFINISHED))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.environ.clear()
    os.environ.update(environment)
    with contextlib.suppress(OSError):  # a full disk: the output goes to the terminal
        if rank:
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(file, 1)
            os.dup2(file, 2)
    keep_streams()
    with contextlib.suppress(AttributeError):  # another object in place of the stream
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    renew_thread_pool()
    status = _work(work, lambda error: pipe.send(Failure.of(error)))
    atexit._run_exitfuncs()  # monitors write what they have
    _leave(status)


def run_launched(work: Callable[[], int | None]) -> NoReturn:
    """Runs the work of a rank that torchrun, srun or mpiexec has started, and ends the process.

    The exit status is the one that ``work`` returns, 2 for `ConfigError`, 130 for Ctrl-C, and 1 for another error.

    Args:
        work: As of `run_ranks`.
    """
    rank = int(os.environ.get("RANK", "0"))

    def tell(error: BaseException) -> None:
        if getattr(error, "elsewhere", False):
            return
        if rank and isinstance(error, ConfigError):
            time.sleep(WAIT_S)  # if rank 0 reports the same, its launcher ends all others
        prefix = "hzero: error: " if isinstance(error, ConfigError) else ""
        print(f"{prefix}{f'rank {rank}: ' if rank else ''}{Failure.of(error).text}", file=sys.stderr, flush=True)

    status = _work(work, tell)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        if status == UNFINISHED:
            distributed.barrier()  # launchers end all ranks with the first that has a status
        distributed.destroy_process_group()
    sys.exit(status)  # MPI has to be finalised


def _work(work: Callable[[], int | None], tell: Callable[[BaseException], None]) -> int:
    """Does the work and returns its status. If it fails, tells why and ends the process."""
    try:
        return work() or 0
    except SystemExit as left:
        if left.code in (None, 0, UNFINISHED):
            return int(left.code or 0)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
        _leave(left.code if isinstance(left.code, int) else 1)
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    except BaseException as error:
        with contextlib.suppress(OSError):  # nobody listens
            tell(error)
        _leave(REFUSED if isinstance(error, ConfigError) else 1)


def _leave(status: int) -> NoReturn:
    """Ends the process at once: a process group with a dead member can take minutes to be torn down."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def rank_environment(rank: int, count: int, port: int, threads: int = 1) -> dict[str, str]:
    """The environment of a rank on this machine: ours without the variables of other launchers, and its own on top."""
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith(_OTHERS)},
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
    }


def free_port() -> int:
    """A TCP port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def die_with_parent() -> None:
    """Asks Linux to kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_parent() -> None:
    """Ends this process when its parent, the agent or daemon of a launcher, ends: SIGKILL may have ended it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        with contextlib.suppress(OSError):
            text = f"hzero: rank {os.environ.get('RANK', '?')} ends, since the process that started it ({parent}) is gone\n"
            os.write(2, text.encode())
        os._exit(1)

    threading.Thread(target=watch, name="hzero parent", daemon=True).start()


def renew_thread_pool() -> None:
    """Gives a forked process a pool of ``OMP_NUM_THREADS`` threads of its own, while it has one thread.

    PyTorch replaces the parent's pool at the first use, without a lock: of two threads that come at once, one finds no pool
    ("Invalid thread pool!"). Source: PyTorch's ``caffe2/utils/threadpool/pthreadpool-cpp.cc``.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
