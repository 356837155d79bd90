"""Ranks of a benchmark: forked processes, in namespaces of an emulated cluster or all on this machine, that end together."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.context
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.cluster import namespace
from benchmarks.cluster.layout import INTERFACE
from benchmarks.cluster.shape import Cluster
from hzero.validation import ConfigError

#: Port of rank 0 on a cluster. Its namespace is new, so every port is free.
PORT = 29500
#: Lines of a failed rank's log that are shown.
SHOWN = 20
_PR_SET_PDEATHSIG = 1


def environment(rank: int, world_size: int, port: int, threads: int = 1) -> dict[str, str]:
    """Environment of a rank on this machine: the current one, without variables of launchers, and the rank's variables."""
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


def environments(world_size: int, threads: int = 1) -> list[dict[str, str]]:
    """Environments of all ranks on this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(probe.getsockname()[1])
    return [environment(rank, world_size, port, threads) for rank in range(world_size)]


def environment_on(cluster: Cluster, rank: int, port: int = PORT, threads: int = 1) -> dict[str, str]:
    """Environment of a rank on an emulated cluster: also gloo's interface, and the namespace that the rank enters."""
    return {
        **environment(rank, cluster.world_size, port, threads),
        "LOCAL_RANK": str(rank % cluster.ranks_per_node),
        "LOCAL_WORLD_SIZE": str(cluster.ranks_per_node),
        "MASTER_ADDR": cluster.address(0),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        namespace.VARIABLE: cluster.namespace(rank),
    }


def run_ranks(work: Callable[[], None], environments: Sequence[Mapping[str, str]], logs: Path) -> int:
    """Forks a process for each environment, which does the work, and waits for all of them.

    Modules that the caller has imported are there already, which saves every rank seconds. Rank 0's standard output is
    the caller's; everything else goes to ``rank<r>.log``. No rank outlives this call or this process.

    Args:
        work: What each rank does.
        environments: One per rank.
        logs: Folder of the logs, which exists.

    Returns:
        0, or 1 if a rank failed; the others are killed then, and the end of its log is shown.
    """
    context = multiprocessing.get_context("fork")
    processes: list[multiprocessing.context.ForkProcess] = []
    try:
        for rank, variables in enumerate(environments):
            process = context.Process(target=_become, args=(work, rank, variables, logs / f"rank{rank}.log"))
            process.start()
            processes.append(process)
        while any(process.exitcode is None for process in processes) and not any(p.exitcode for p in processes):
            time.sleep(0.05)  # a sentinel of multiprocessing ends with an exec
        for rank, process in enumerate(processes):
            if process.exitcode:
                _report(rank, process.exitcode, logs)
                return 1
        return 0
    finally:
        for process in processes:
            process.kill()
            process.join()


def run_command(cluster: Cluster, command: Sequence[str]) -> int:
    """Runs a command on every rank of a cluster that is set up; returns 0, or 1 if a rank failed.

    Raises:
        ConfigError: There is no such command.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(f"COMMAND: no program {command[0]!r}")
    logs = Path(tempfile.mkdtemp(prefix="hzero-cluster-"))
    everyone = [environment_on(cluster, rank) for rank in range(cluster.world_size)]
    status = run_ranks(lambda: os.execvpe(command[0], list(command), os.environ), everyone, logs)
    if status == 0:
        shutil.rmtree(logs, ignore_errors=True)
    return status


def _become(work: Callable[[], None], rank: int, variables: Mapping[str, str], log: Path) -> None:
    status = 1
    try:
        os.setsid()  # Ctrl-C reaches the parent only, which ends all ranks
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for stream in (2, 1) if rank else (2,):
            os.dup2(output, stream)
        os.environ.clear()
        os.environ.update(variables)
        if name := variables.get(namespace.VARIABLE):
            namespace.enter(name)
        work()
        sys.stdout.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)  # a process group with a dead member takes minutes to be torn down


def _report(rank: int, code: int, logs: Path) -> None:
    for line in (logs / f"rank{rank}.log").read_text(errors="replace").splitlines()[-SHOWN:]:
        print(line, file=sys.stderr)
    cause = f"exit status {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
    print(f"rank {rank} died: {cause}; all ranks are killed. Logs of all ranks: {logs}", file=sys.stderr, flush=True)
