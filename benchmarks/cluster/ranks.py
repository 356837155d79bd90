"""Ranks of a command, each in its own namespace of an emulated cluster."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cluster import namespace
from benchmarks.cluster.layout import INTERFACE
from benchmarks.cluster.shape import Cluster
from hzero.launcher import INTERRUPTED, Ranks, rank_environment
from hzero.validation import ConfigError

#: Where rank 0 listens. Its namespace is new, so every port of it is free.
PORT = 29500


def rank_environment_on(cluster: Cluster, rank: int, port: int = PORT, threads: int = 1) -> dict[str, str]:
    """What a rank of an emulated cluster finds in its environment.

    On top of `hzero.launcher.rank_environment`: its number and the number of ranks on its node, rank 0's address
    there, the interface for gloo, and HZERO_CLUSTER_NAMESPACE, the namespace that it has to enter before anything else
    (`benchmarks.cluster.namespace.enter`).

    Args:
        cluster: As set up.
        rank: Whose.
        port: Where rank 0 listens.
        threads: Of one rank's computations.
    """
    return {
        **rank_environment(rank, cluster.world_size, port, threads),
        "LOCAL_RANK": str(rank % cluster.ranks_per_node),
        "LOCAL_WORLD_SIZE": str(cluster.ranks_per_node),
        "MASTER_ADDR": cluster.address(0),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        namespace.VARIABLE: cluster.namespace(rank),
    }


def command_inside(command: Sequence[str]) -> list[str]:
    """A command that enters the namespace of `rank_environment_on` and becomes ``command``."""
    return [sys.executable, str(Path(namespace.__file__).resolve()), "-", *command]


def run_ranks(cluster: Cluster, command: Sequence[str]) -> int:
    """Runs a command once a rank on a cluster that is set up, to its end.

    Rank 0's standard output goes to ours; everything else goes to a file a rank in a temporary folder, which is kept where
    the run does not end well.

    Returns:
        0 where all ended well, 130 after Ctrl-C or SIGTERM, 1 where a rank failed, which ends all others.

    Raises:
        ConfigError: There is no such command.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(f"COMMAND: no program {command[0]!r}")
    logs = Path(tempfile.mkdtemp(prefix="hzero-cluster-"))
    ranks = Ranks(
        command_inside(command),
        [rank_environment_on(cluster, rank) for rank in range(cluster.world_size)],
        logs,
    )
    status = ranks.run()
    if status == 0:
        shutil.rmtree(logs, ignore_errors=True)
    elif status == INTERRUPTED:  # after a failure it has been said
        print(f"output of all ranks: {logs}", file=sys.stderr)
    return status
