"""Starts the ranks of a command on this machine, watches them, and ends all of them when one fails.

The command imports slow modules once and then forks, since eight imports of DeepSpeed on two cores would take a minute. Rank 0
writes to the terminal, and each other rank to its ``rank<r>.log``. A rank that fails sends the reason to its parent through a
pipe, so a full disk hides nothing. The user reads one error: the error of the rank that failed first.

This is not `torch.distributed.launcher.api`, which ends the other ranks by SIGTERM after a failure. A trainer saves upon SIGTERM,
so 30 s pass until that launcher kills the ranks. Its report has 40 lines.
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
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from hzero.terminal import keep_streams
from hzero.validation import ConfigError, PeerError, PlainError, printable, report, tell_peers

#: Exit statuses: after Ctrl-C, for input that is refused, and for work that has saved and is to be started again (EX_TEMPFAIL of
#: sysexits.h).
INTERRUPTED, REFUSED, UNFINISHED = 130, 2, 75
#: Longest time that ranks may take to save and end after Ctrl-C or SIGTERM, in seconds. A second Ctrl-C ends them at once.
GRACE_S = 600.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1
#: Longest text of a failure, in characters: a traceback is cut in the middle. A pipe has room for it, so a rank need not wait.
_TEXT = 10_000
#: Variables of other launchers, which ranks that are started here must not take for theirs.
_OTHERS = ("TORCHELASTIC_", "SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID")


#: The message of a failed rank to its parent: whether it accepted its input, whether it waited in vain for other ranks, seconds
#: of this machine's monotonic clock, and a text for the user. The smallest one is the cause.
Failure = tuple[bool, bool, float, str]


def _failure(error: BaseException) -> Failure:
    """The failure for an error that is being handled."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = printable(f"{error.strerror}: {os.fspath(error.filename)}")
    elif not isinstance(error, (ConfigError, PlainError)):
        text = traceback.format_exc().rstrip()
    if len(text) > _TEXT:
        text = f"{text[: _TEXT // 2]}\n...\n{text[-_TEXT // 2 :]}"
    waited = isinstance(error, PeerError) or getattr(error, "elsewhere", False)
    return waited or not isinstance(error, ConfigError), waited, time.monotonic(), text


def run_ranks(
    work: Callable[[], int | None],
    count: int,
    *,
    logs: Path,
    threads: int = 1,
    imports: Sequence[str] = (),
) -> int:
    """Runs the ranks of a command on this machine to their end. None of them outlives this process.

    Args:
        work: What every rank does; it may return an exit status. With an accelerator it has to be picklable, since the
            accelerator's libraries do not survive a fork. If there are more ranks than accelerators, all run on CPUs.
        count: The number of ranks.
        logs: Folder for the output of all ranks but 0.
        threads: CPU threads of each rank.
        imports: Modules that ranks need and that take long to import.

    Returns:
        0 if all ranks ended well, 75 if they saved and are to be started again, 2 if they refused their input, 130 after Ctrl-C
        (or SIGTERM before they could save), and 1 if a rank failed.
    """
    logs.mkdir(parents=True, exist_ok=True)
    cuda, before = importlib.import_module("torch").cuda, dict(os.environ)
    spawns = cuda.is_available()
    context: Any = multiprocessing.get_context("spawn" if spawns else "fork")
    if not spawns:
        for name in imports:
            importlib.import_module(name)
        gc.freeze()  # or collections would copy the memory that the ranks share
    received: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: received.append(number)) for number in _SIGNALS}
    processes, pipes = list[BaseProcess](), list[Connection]()
    # A signal that comes before a rank has handlers of its own waits: ours would swallow it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        _set_environment(count, threads)  # the ranks inherit it; spawned ones read some when they load torch
        if spawns and (devices := cuda.device_count()) < count:  # the ranks stand for a larger machine
            _say(f"hzero: {count} ranks run on CPUs, since this machine has {devices} GPU{'s' * (devices > 1)}")
            os.environ.update(CUDA_VISIBLE_DEVICES="-1", HIP_VISIBLE_DEVICES="-1", DS_ACCELERATOR="cpu")
        for rank in range(count):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            sys.stdout.flush()
            sys.stderr.flush()
            ours, theirs = context.Pipe(duplex=False)
            log = logs / f"rank{rank}.log" if rank else None
            process = context.Process(target=_enter, args=(work, log, theirs, os.getpid()))
            process.start()  # a process that has not started cannot be killed below
            processes.append(process)
            theirs.close()
            pipes.append(ours)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        _watch(processes, received)
        failures: dict[int, Failure] = {}
        for rank, pipe in enumerate(pipes):
            with contextlib.suppress(EOFError):  # it sent nothing
                if pipe.poll():
                    failures[rank] = pipe.recv()
        return _conclude([process.exitcode for process in processes], failures, received, logs)
    finally:
        for process in processes:
            process.kill()
            process.join()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(before)


def _set_environment(count: int, threads: int) -> None:
    """Makes this process' environment that of ranks on this machine, without the variables of other launchers."""
    for name in [name for name in os.environ if name.startswith(_OTHERS)]:
        del os.environ[name]
    values = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": free_port(), "OMP_NUM_THREADS": threads}
    os.environ.update({name: str(value) for name, value in values.items()}, MASTER_ADDR="127.0.0.1")


def _watch(processes: Sequence[BaseProcess], received: Sequence[int]) -> None:
    """Passes signals on until all ranks have ended, one has failed, or those that run are to be killed."""
    passed, stops, deadline = 0, 0, math.inf
    # `exitcode` reaps a rank that has ended, and its number may become another process's. So a round reads it only here.
    while None in (codes := [process.exitcode for process in processes]):
        running = [process for process, code in zip(processes, codes) if code is None]
        if not stops and set(codes) - {None, 0, UNFINISHED}:
            time.sleep(1.0)  # others that failed for the same reason may still be telling theirs
            return
        for number in received[passed:]:
            passed += 1
            if number != signal.SIGUSR1:
                stops += 1
                if stops > 1:
                    return
                deadline, number = time.monotonic() + GRACE_S, signal.SIGTERM
                _say("hzero: stopping the ranks, which save if they train (Ctrl-C again ends them at once)")
            for process in running:
                os.kill(process.pid or 0, number)
        if time.monotonic() > deadline:
            _say(f"hzero: {len(running)} ranks have not stopped within {GRACE_S:.0f} s and are killed")
            return
        time.sleep(0.05)


def _conclude(codes: Sequence[int | None], failures: dict[int, Failure], received: Sequence[int], logs: Path) -> int:
    """Tells the user why ranks have failed, and returns the exit status."""
    stopped = any(number != signal.SIGUSR1 for number in received)
    # No SIGKILL: ranks that we kill are still running here.
    by_us = {INTERRUPTED, -signal.SIGTERM} if stopped else set()
    failed = [rank for rank, code in enumerate(codes) if code not in {None, 0, UNFINISHED} | by_us]
    # A killed rank sends nothing, and the errors of the others only say that it is gone.
    killed = [rank for rank in failed if (codes[rank] or 0) < 0]
    cause = min(failures, key=lambda rank: failures[rank], default=-1) if failed else -1
    if cause >= 0 and not failures[cause][0]:
        _say(f"hzero: error: {failures[cause][-1]}")
        status = REFUSED
    elif failed:
        if killed or cause < 0:
            rank = (killed or failed)[0]
            code = codes[rank] or 0
            end = f"exit status {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
            end += ", perhaps out of memory" if code == -signal.SIGKILL else ""
            _say(f"hzero: rank {rank} died: {end}; all ranks are ended")
        else:
            _say(f"{failures[cause][-1]}\nhzero: rank {cause} failed; all ranks are ended")
        _say(f"hzero: logs of all ranks but 0: {logs}")
        status = 1
    elif set(codes) - {0, UNFINISHED}:
        status = INTERRUPTED
    else:
        status = UNFINISHED if UNFINISHED in codes else 0
    return INTERRUPTED if signal.SIGINT in received else status


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _enter(work: Callable[[], int | None], log: Path | None, pipe: Connection, parent: int) -> NoReturn:
    """The life of a rank."""
    os.setsid()  # Ctrl-C reaches only the parent, which passes it on
    die_with_parent()
    if os.getppid() != parent:  # it ended before this process asked to end with it
        os._exit(1)
    atexit._clear()  # what the parent does at its end
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The end of a job that comes before training has a handler of its own: nothing is lost, so it is no failure.
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(UNFINISHED))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    if log is not None:
        with contextlib.suppress(OSError):  # a full disk: the output goes to the terminal
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(file, 1)
            os.dup2(file, 2)
    keep_streams()
    renew_thread_pool()
    status = _work(work, lambda error: pipe.send(_failure(error)))
    atexit._run_exitfuncs()  # monitors write what they have
    _leave(status)


def run_launched(work: Callable[[], int | None]) -> NoReturn:
    """Runs the work of a rank that torchrun, srun or mpiexec has started, and ends the process.

    The exit status is the one that ``work`` returns, 2 for `ConfigError`, 130 for Ctrl-C, and 1 for another error.

    Args:
        work: As of `run_ranks`.
    """

    def tell(error: BaseException) -> None:
        if not getattr(error, "elsewhere", False):
            if isinstance(error, ConfigError):
                report(error)
            else:
                _say(f"hzero: rank {os.environ['RANK']}: {_failure(error)[-1]}")
        tell_peers(error)

    status = _work(work, tell)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        if status == UNFINISHED:
            distributed.barrier()  # launchers end all ranks with the first that has a status
        distributed.destroy_process_group()
    sys.exit(status)  # MPI has to be finalised


def _work(work: Callable[[], int | None], tell: Callable[[BaseException], None]) -> int:
    """Does the work and returns its status. If it fails, calls ``tell`` with the error and ends the process."""
    try:
        return work() or 0
    except SystemExit as left:
        if left.code in (None, 0, UNFINISHED):
            return int(left.code or 0)
        _leave(left.code if isinstance(left.code, int) else 1)
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    except BaseException as error:
        with contextlib.suppress(OSError):  # nothing reads the pipe
            tell(error)
        _leave(REFUSED if isinstance(error, ConfigError) else 1)


def _leave(status: int) -> NoReturn:
    """Ends the process at once: a process group with a dead member can take minutes to be torn down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def free_port() -> int:
    """A TCP port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def die_with_parent() -> None:
    """Asks Linux to kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def renew_thread_pool() -> None:
    """Gives a forked process a pool of ``OMP_NUM_THREADS`` threads of its own, while it has one thread.

    PyTorch replaces the parent's pool at the first use, without a lock: of two threads that come at once, one finds no pool
    ("Invalid thread pool!"). Source: PyTorch's ``caffe2/utils/threadpool/pthreadpool-cpp.cc``.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
