"""Workers: processes of this host, or a Dask cluster of the ranks of this job under mpiexec and srun."""

import contextlib
import logging
import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

import dask
from dask.system import CPU_COUNT
from distributed import Client, Scheduler, SchedulerPlugin, Status

from hzero.errors import ConfigError, of_all_ranks
from hzero.tools.launch import die_with_parent, rank_variables


@contextlib.contextmanager
def workers(count: int | None = None) -> Iterator[Executor]:
    """Starts workers with one thread each, and ends them.

    A single process starts workers on this host. They share pipes with it and open no port, which every user of the host could
    reach. Under mpiexec or srun, the workers are ranks, see `cluster`.

    Args:
        count: Number of workers. The default is one for each core, or for each rank but two.

    Yields:
        The executor. A rank that is not the client's serves the cluster instead, and then raises ``SystemExit``.

    Raises:
        ConfigError: See `cluster`.
    """
    if rank_variables():
        with cluster(count) as client:
            yield client.get_executor(pure=False)
        return
    pool = ProcessPoolExecutor(count or CPU_COUNT, multiprocessing.get_context("spawn"), _begin)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Lets a worker end with its parent, and silently upon Ctrl-C, which reaches both."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def cluster(workers: int | None = None) -> Iterator[Client]:
    """Makes a Dask cluster of the ranks of this job, and ends it.

    Rank 0 is the client, rank 1 the scheduler and every other rank a worker with one thread. Messages travel over MPI. A rank
    that dies ends the job.

    Args:
        workers: Number of workers. The default is one for each rank but two.

    Yields:
        The client. A rank that is not the client's serves the cluster instead, and then raises ``SystemExit``.

    Raises:
        ConfigError: The ranks are too few, do not share one MPI job, or are not ``workers`` and two more.
    """
    variables = rank_variables()
    ranks = int(variables.get("WORLD_SIZE", 1))
    from dask_mpi import initialize

    from hzero.tools.data.mpi import HOST, WORLD

    if WORLD.size != ranks or ranks < 3 or workers not in (None, ranks - 2):
        found = f"found {ranks} ranks of the launcher and {WORLD.size} of MPI for {workers or 'all'} workers"
        raise of_all_ranks(ConfigError(f"{found}; expected one rank for each worker and two more (srun: see --mpi)"))
    # Errors reach the client. Dask also logs as errors, with tracebacks, connections that the end of a cluster closes.
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    # dask-mpi makes the client of the second rank. Here it is rank 0, which reports errors at once.
    order = WORLD.Split(key=(1, 0, *range(2, ranks))[WORLD.rank])
    # Dask cannot do without its HTTP servers. These have no pages, and no other host reaches them.
    dask.config.set({f"distributed.{one}.http.routes": [] for one in ("scheduler", "worker")})
    local = {"dashboard_address": "127.0.0.1:0"}
    worker = {"name": f"rank {WORLD.rank} on {HOST}", **local}
    if not initialize(protocol="mpi", comm=order, worker_options=worker, exit=False, dashboard=False, **local):
        raise SystemExit(0)
    with Client() as client:
        try:
            client.register_plugin(_Deaths())
            client.wait_for_workers(ranks - 2, timeout=300)
            yield client
        finally:
            client.shutdown()


class _Deaths(SchedulerPlugin):
    """Ends the job when a worker is gone: MPI would wait for its rank at the end, and a rank cannot be started again."""

    async def start(self, scheduler: Scheduler, worker: str = "") -> None:
        self.names = {address: one.name for address, one in scheduler.workers.items()}

    add_worker = start

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: Any) -> None:
        if scheduler.status == Status.running:
            from hzero.tools.data.mpi import end_job

            end_job(f"{self.names[worker]} is gone")
