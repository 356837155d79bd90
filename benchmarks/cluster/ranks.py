"""Ranks of a benchmark in the namespaces of an emulated cluster."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.cluster import namespace
from benchmarks.cluster.layout import INTERFACE
from benchmarks.cluster.shape import Cluster
from hzero.errors import ConfigError
from hzero.tools import launch


def environment_on(cluster: Cluster, rank: int) -> dict[str, str]:
    """Variables of a rank on an emulated cluster: its place, gloo's interface, and the namespace that the rank enters."""
    return {
        "LOCAL_RANK": str(rank % cluster.ranks_per_node),
        "LOCAL_WORLD_SIZE": str(cluster.ranks_per_node),
        "MASTER_ADDR": cluster.address(0),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        namespace.VARIABLE: cluster.namespace(rank),
    }


def run_ranks(cluster: Cluster, work: Callable[[], None], logs: Path, threads: int = 1) -> int:
    """Runs the ranks of a cluster that is set up, as `hzero.tools.launch.run_ranks` does, each in its namespace."""
    inside = functools.partial(_inside, cluster, work)
    return launch.run_ranks(inside, cluster.world_size, logs=logs, threads=threads, saves=False)


def _inside(cluster: Cluster, work: Callable[[], None]) -> None:
    os.environ.update(environment_on(cluster, int(os.environ["RANK"])))
    namespace.enter(os.environ[namespace.VARIABLE])
    work()


def run_command(cluster: Cluster, command: Sequence[str]) -> int:
    """Runs a command on every rank of a cluster that is set up; returns 0, or 1 if a rank failed.

    Raises:
        ConfigError: There is no such command.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(f"COMMAND: no program {command[0]!r}")
    logs = Path(tempfile.mkdtemp(prefix="hzero-cluster-"))
    status = run_ranks(cluster, functools.partial(os.execvp, command[0], list(command)), logs)
    if status == 0:
        shutil.rmtree(logs, ignore_errors=True)
    return status
