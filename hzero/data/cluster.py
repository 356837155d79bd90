"""A Dask cluster: processes of this host, or the ranks of this job under mpiexec and srun."""

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

from distributed import Client, Scheduler, SchedulerPlugin, Status

from hzero.launch import die_with_parent, rank_variables
from hzero.validation import ConfigError, of_all_ranks


@contextlib.contextmanager
def cluster(workers: int | None = None) -> Iterator[Client]:
    """Starts a Dask cluster of workers with one thread each, and ends it.

    A single process starts workers on this host, and a worker that dies is started again. Under mpiexec or srun, rank 0 is
    the client, rank 1 the scheduler and every other rank a worker, with messages over MPI; a rank that dies ends the job.

    Args:
        workers: Number of workers. The default is one for each core, or for each rank but two.

    Yields:
        The client. A rank that is not the client's serves the cluster instead, and then raises ``SystemExit``.

    Raises:
        ConfigError: The ranks are too few, do not share one MPI job, or are not ``workers`` and two more.
    """
    variables = rank_variables()
    ranks = int(variables.get("WORLD_SIZE", 1))
    if ranks == 1:
        # Port 0: a busy port of the dashboard is no reason for a warning.
        with Client(n_workers=workers, threads_per_worker=1, dashboard_address=":0") as client:
            yield client
        return
    if "mpi4py.MPI" not in sys.modules:  # MPI would not survive a fork
        _go_on_in_a_child(f"rank {variables['RANK']} on {socket.gethostname()}")
    from dask_mpi import initialize

    from hzero.data.mpi import HOST, WORLD

    if WORLD.size != ranks or ranks < 3 or workers not in (None, ranks - 2):
        found = f"found {ranks} ranks of the launcher and {WORLD.size} of MPI for {workers or 'all'} workers"
        raise of_all_ranks(ConfigError(f"{found}; expected one rank for each worker and two more (srun: see --mpi)"))
    # Errors reach the client. Dask also logs as errors, with tracebacks, connections that the end of a cluster closes.
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    # dask-mpi makes the client of the second rank. Here it is rank 0, which reports errors at once.
    order = WORLD.Split(key=(1, 0, *range(2, ranks))[WORLD.rank])
    options = {"exit": False, "dashboard": False, "dashboard_address": ":0"}
    if not initialize(protocol="mpi", comm=order, worker_options={"name": f"rank {WORLD.rank} on {HOST}"}, **options):
        raise SystemExit(0)
    with Client() as client:
        try:
            client.register_plugin(_Deaths())
            client.wait_for_workers(ranks - 2, timeout=300)
            yield client
        finally:
            client.shutdown()


def _go_on_in_a_child(name: str) -> None:
    """Leaves the work to a child, whose death this process can name before the launcher ends the other ranks."""
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0 and code != -signal.SIGTERM:  # which launchers send
            print(f"hzero: {name} was ended by signal {-code}", file=sys.stderr, flush=True)
            time.sleep(1.0)  # until the launcher has the message
        os._exit(code % 256)
    die_with_parent()


class _Deaths(SchedulerPlugin):
    """Ends the job when a worker is gone: MPI would wait for its rank at the end, and a rank cannot be started again."""

    async def start(self, scheduler: Scheduler, worker: str = "") -> None:
        self.names = {address: one.name for address, one in scheduler.workers.items()}

    add_worker = start

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        if scheduler.status == Status.running:
            from hzero.data.mpi import end_job

            end_job(f"{self.names[worker]} is gone")
