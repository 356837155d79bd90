"""The ranks of a command: reads the rank of this process from a launcher's variables, or starts the ranks on this machine.

`run_ranks` starts the ranks, watches them, and ends all of them when one fails. It imports slow modules once and then forks,
since eight imports of DeepSpeed on two cores would take a minute. Rank 0 writes to the terminal, and each other rank to its
``rank<r>.log``. A rank that fails sends the reason to its parent through a pipe, so a full disk hides nothing. The user reads
one error: the error of the rank that failed first.

`torch.distributed.launcher.api` is not used: after a failure it ends the other ranks by SIGTERM. A trainer saves on SIGTERM,
so that launcher kills the ranks only after 30 s. Its report has 40 lines.
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
import random
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from hzero.errors import ConfigError, PeerError, PlainError, printable, report, tell_peers
from hzero.files import regular
from hzero.tools.terminal import keep_streams

#: Exit statuses: after Ctrl-C, for invalid input, and for work that has saved and must be started again.
INTERRUPTED, REFUSED, UNFINISHED = 130, 2, os.EX_TEMPFAIL
#: Maximum number of ranks that a command starts on one machine.
MAX_RANKS = 256
#: Maximum seconds for ranks to save and end after Ctrl-C or SIGTERM. A second Ctrl-C ends them at once.
GRACE_S = 600.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_PR_SET_PDEATHSIG = 1
#: Maximum characters of a failure's text; a longer one is cut in the middle. It fits into a pipe, so a rank need not wait.
_TEXT = 10_000
#: Prefixes of variables of other launchers, which must not reach the ranks that are started here.
_OTHERS = ("TORCHELASTIC_", "SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID")


#: Message of a failed rank to its parent: whether it accepted its input, whether it timed out waiting for other ranks, seconds
#: of the monotonic clock, and a text. The smallest tuple is the cause.
Failure = tuple[bool, bool, float, str]


def _failure(error: BaseException) -> Failure:
    """The failure for the error that is being handled."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = printable(f"{error.strerror}: {os.fspath(error.filename)}")
    elif not isinstance(error, (ConfigError, PlainError)):
        text = traceback.format_exc().rstrip()
    if len(text) > _TEXT:
        text = f"{text[: _TEXT // 2]}\n...\n{text[-_TEXT // 2 :]}"
    waited = isinstance(error, PeerError) or getattr(error, "reported_elsewhere", False)
    return waited or not isinstance(error, ConfigError), waited, time.monotonic(), text


def run_ranks(
    work: Callable[[], int | None],
    count: int,
    *,
    logs: Path,
    threads: int = 1,
    imports: Sequence[str] = (),
    saves: bool = True,
) -> int:
    """Runs the ranks of a command on this machine to their end. None of them outlives this process.

    Args:
        work: Function of every rank; it may return an exit status. With an accelerator it must be picklable, since the
            accelerator's libraries do not survive a fork. If there are more ranks than accelerators, all run on CPUs.
        count: The number of ranks.
        logs: Folder for the output of all ranks but 0.
        threads: CPU threads of each rank.
        imports: Modules of the ranks that are slow to import.
        saves: Whether ranks save on SIGTERM. If not, failures after a signal are ignored: a rank has only lost its peers.

    Returns:
        0 if all ranks succeeded. 75 if they saved and must be started again. 2 for invalid input. 1 if a rank failed. 130 after
        Ctrl-C, or after SIGTERM before they could save.
    """
    logs.mkdir(parents=True, exist_ok=True)
    cuda, before = importlib.import_module("torch").cuda, dict(os.environ)
    spawns = cuda.is_available()
    context: Any = multiprocessing.get_context("spawn" if spawns else "fork")
    if not spawns:
        for name in imports:
            importlib.import_module(name)
        gc.freeze()  # garbage collection would copy the memory that the ranks share
    received: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: received.append(number)) for number in _SIGNALS}
    processes, pipes = list[BaseProcess](), list[Connection]()
    # Signals are blocked until a rank has set its handlers: the inherited handlers would swallow them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        _set_environment(count, threads)  # inherited by the ranks; torch reads some of it when it is imported
        if spawns and (devices := cuda.device_count()) < count:  # the ranks emulate a larger machine
            _say(f"hzero: {count} ranks run on CPUs, since this machine has {devices} GPU{'s' * (devices > 1)}")
            os.environ.update(CUDA_VISIBLE_DEVICES="-1", HIP_VISIBLE_DEVICES="-1", DS_ACCELERATOR="cpu")
        for rank in range(count):
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            sys.stdout.flush()
            sys.stderr.flush()
            ours, theirs = context.Pipe(duplex=False)
            log = logs / f"rank{rank}.log" if rank else None
            process = context.Process(target=_enter, args=(work, log, theirs, os.getpid()))
            process.start()  # before the next line: an unstarted process cannot be killed below
            processes.append(process)
            theirs.close()
            pipes.append(ours)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        _watch(processes, received)
        failures: dict[int, Failure] = {}
        for rank, pipe in enumerate(pipes):
            with contextlib.suppress(EOFError):  # the rank sent nothing
                if pipe.poll():
                    failures[rank] = pipe.recv()
        if not saves and set(received) - {signal.SIGUSR1}:
            return INTERRUPTED
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
    """Sets the environment of ranks on this machine, and removes the variables of other launchers."""
    for name in [name for name in os.environ if name.startswith(_OTHERS)]:
        del os.environ[name]
    values = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": free_port(), "OMP_NUM_THREADS": threads}
    os.environ.update({name: str(value) for name, value in values.items()}, MASTER_ADDR="127.0.0.1")


def _watch(processes: Sequence[BaseProcess], received: Sequence[int]) -> None:
    """Forwards signals until all ranks have ended, one has failed, or the running ranks must be killed."""
    passed, stops, deadline = 0, 0, math.inf
    # `exitcode` reaps a finished rank, whose process id may then be reused. So each round reads it once, here.
    while None in (codes := [process.exitcode for process in processes]):
        running = [process for process, code in zip(processes, codes) if code is None]
        if not stops and set(codes) - {None, 0, UNFINISHED}:
            time.sleep(1.0)  # other ranks with the same error may still send theirs
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
    """Prints why ranks have failed, and returns the exit status."""
    stopped = any(number != signal.SIGUSR1 for number in received)
    # Without SIGKILL: the ranks that this process kills are still running here.
    by_us = {INTERRUPTED, -signal.SIGTERM} if stopped else set()
    failed = [rank for rank, code in enumerate(codes) if code not in {None, 0, UNFINISHED} | by_us]
    # A killed rank sends nothing, and the errors of the other ranks only report its absence.
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
    """Main function of a rank's process."""
    os.setsid()  # Ctrl-C reaches only the parent, which forwards it
    die_with_parent()
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)
    atexit._clear()  # the parent's exit functions
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The job's time may end before training has set its handler. Nothing is lost then, so the status is "unfinished".
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(UNFINISHED))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    if log is not None:
        try:
            file = regular(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, 1)
            os.dup2(file, 2)
        except OSError as error:
            _say(f"hzero: warning: {printable(str(log))}: {error.strerror}; this rank writes to the terminal")
    keep_streams()
    renew_thread_pool()
    status = _work(work, lambda error: pipe.send(_failure(error)))
    atexit._run_exitfuncs()  # monitors flush their files
    _leave(status)


def run_launched(work: Callable[[], int | None]) -> NoReturn:
    """Runs the work of a rank that torchrun, srun or mpiexec has started, and ends the process.

    The exit status is the one that ``work`` returns, 2 for `ConfigError`, 130 for Ctrl-C, and 1 for another error.

    Args:
        work: See `run_ranks`.
    """

    def tell(error: BaseException) -> None:
        if not getattr(error, "reported_elsewhere", False):
            if isinstance(error, ConfigError):
                report(error)
            else:
                _say(f"hzero: rank {os.environ['RANK']}: {_failure(error)[-1]}")
        tell_peers(error)

    status = _work(work, tell)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        if status == UNFINISHED:
            distributed.barrier()  # launchers end all ranks after the first nonzero status
        distributed.destroy_process_group()
    sys.exit(status)  # runs the exit functions, which finalise MPI


def _work(work: Callable[[], int | None], tell: Callable[[BaseException], None]) -> int:
    """Runs the work and returns its status. On an error, calls ``tell`` with it and ends the process."""
    try:
        return work() or 0
    except SystemExit as left:
        if left.code in (None, 0, UNFINISHED):
            return int(left.code or 0)
        _leave(left.code if isinstance(left.code, int) else 1)
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the parent has closed the pipe
            tell(error)
        _leave(REFUSED if isinstance(error, ConfigError) else 1)


def _leave(status: int) -> NoReturn:
    """Ends the process at once, since destroying a process group with a dead member can take minutes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def free_port() -> int:
    """A TCP port of this machine that is currently free, and that Linux gives to no connection by itself."""
    # Others could take a port of the range of connections before this machine's ranks listen there.
    for port in [*random.SystemRandom().sample(range(16_384, 32_768), 100), 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise PlainError("found no free TCP port")


def die_with_parent() -> None:
    """Has Linux kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def renew_thread_pool() -> None:
    """Replaces the parent's pool of threads in a forked process, while the process has one thread.

    PyTorch replaces the pool at the first use, without a lock. If two threads use it at once, one of them fails with
    "Invalid thread pool!". Source: PyTorch's ``caffe2/utils/threadpool/pthreadpool-cpp.cc``.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


# ---- the variables of launchers ---------------------------------------------------------------------------------------------

# Torch, Accelerate and DeepSpeed read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which torchrun sets. `launched`
# sets them under srun and mpiexec too. One launcher may run inside another, such as torchrun inside srun: the outer one then
# starts a daemon on each node, and the inner one the ranks.

#: Default MASTER_PORT, from OLCF's guide for PyTorch on Frontier.
DEFAULT_PORT = 3442

# Rank, world size, index and count of the ranks on this host, the innermost launcher first. OMPI_*: Open MPI, "Environment
# variables set for MPI applications". PMI_*: MPICH's Hydra, with MPI_* Intel MPI, with PMI_LOCAL_* Cray's PMI. PALS_*: Cray's
# mpiexec.
_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)
# slurm.h: SLURM_INTERACTIVE_STEP, SLURM_BATCH_SCRIPT, SLURM_EXTERN_CONT and SLURM_PENDING_STEP. Their process is no rank,
# although it has a SLURM_PROCID.
_NO_RANKS = {"", "4294967290", "4294967291", "4294967292", "4294967293", "batch", "extern", "interactive"}
#: The first host of a list such as ``frontier[00001-00003,00010],login1``.
_HOST = re.compile(r"((?:[A-Za-z0-9._-]|\[[0-9]{1,18}(?:[-,][0-9]{1,18})*\])+)(?:,|$)")


def launched() -> bool:
    """Whether torchrun, srun or mpiexec has started this process as one of several ranks.

    If so, sets the variables that torch.distributed, Accelerate and DeepSpeed read.

    Raises:
        ConfigError: See `rank_variables`.
    """
    found = rank_variables()
    os.environ.update(found)
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        die_with_parent()  # SIGKILL may end torchrun's agent. Slurm and MPI clean up by themselves
    return bool(found)


def rank_variables(environ: Mapping[str, str] = os.environ, visible: int | None = None) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, and LOCAL_WORLD_SIZE if known; empty for a single process.

    Args:
        environ: The environment.
        visible: Number of devices that this process sees; None reads it from torch if it matters.

    Raises:
        ConfigError: A variable is not a number, two launchers contradict each other, the local index exceeds the visible
            devices, or no variable has the master address. The message names the variables.
    """
    sources, halves = [], []
    for names in _VARIABLES:
        rank, size, local, local_size = (_number(environ, name) for name in names)
        if names[0] == "SLURM_PROCID":
            if environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", "")) in _NO_RANKS:
                continue
            nodes = _number(environ, "SLURM_STEP_NUM_NODES")  # each of them has a task of the step
            local_size = size // nodes if size and nodes and size % nodes == 0 else None
        if rank is not None and size is not None:
            sources.append((rank, size, local, local_size, names))
        elif rank or (size or 1) > 1:
            halves.append(names)
    if not sources and halves:
        raise ConfigError(f"{halves[0][0]}, {halves[0][1]}: found one of them; expected both, or RANK and WORLD_SIZE")
    if not sources or sources[0][1] == 1:
        return {}
    rank, size, *_, names = sources[0]
    if rank >= size:
        raise ConfigError(f"{names[0]}: found {rank}, but {names[1]} is {size}")
    agreeing = [source for source in sources if source[:2] == (rank, size)]
    for outer_rank, outer_size, *_, outer in sources:
        # An outer launcher with fewer processes has started the daemons of the inner launcher.
        if (outer_rank, outer_size) != (rank, size) and outer_size >= size and not environ.get("TORCHELASTIC_RUN_ID"):
            raise ConfigError(
                f"{names[0]}={rank} of {names[1]}={size} and {outer[0]}={outer_rank} of {outer[1]}={outer_size} contradict "
                "each other; unset the variables of one of these launchers"
            )
    local = next((source[2] for source in agreeing if source[2] is not None), None)
    local_size = next((source[3] for source in agreeing if source[3] is not None), None)
    found = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": _device(_number(environ, "LOCAL_RANK"), local, visible)}
    found |= {"MASTER_PORT": _number(environ, "MASTER_PORT") or DEFAULT_PORT}
    found |= {"LOCAL_WORLD_SIZE": local_size} if local_size is not None else {}
    address = environ.get("MASTER_ADDR") or (
        "127.0.0.1" if size == local_size else _first_host(environ, agreeing[-1][4])
    )
    return {**{name: str(value) for name, value in found.items()}, "MASTER_ADDR": address}


def _device(given: int | None, local: int | None, visible: int | None) -> int:
    """Index among the visible devices: LOCAL_RANK, otherwise the launcher's index on the host."""
    local = local if given is None else given
    if local == 0:
        return 0
    if visible is None:
        import torch

        visible = torch.cuda.device_count()
    if visible == 1:
        return 0  # under --gpus-per-task=1, since DeepSpeed uses device(LOCAL_RANK)
    if visible and (local is None or local >= visible):
        raise ConfigError(f"LOCAL_RANK: found {local}; expected 0 to {visible - 1}, the visible devices")
    return local or 0


def _first_host(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    """The host of rank 0: of the first task of a Slurm step."""
    hosts = environ.get("SLURM_STEP_NODELIST", "") if names[0] == "SLURM_PROCID" else ""
    found = _HOST.match(hosts)
    if found is None or environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        raise ConfigError("MASTER_ADDR: missing; set it to the host of rank 0")
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", found[1])


def _number(environ: Mapping[str, str], variable: str) -> int | None:
    value = environ.get(variable)
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise ConfigError(f"{variable}: found {value[:40]!r}; expected a number")
    return int(value)
