"""A Dask cluster of processes of this host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from distributed import Client, LocalCluster


@contextlib.contextmanager
def cluster(workers: int | None = None) -> Iterator[Client]:
    """Starts a Dask cluster of workers with one thread each, and ends it.

    Args:
        workers: Number of workers. The default is one for each core.

    Yields:
        The client.
    """
    # Port 0: a busy port of the dashboard is no reason for a warning.
    with (
        LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=":0") as local,
        Client(local) as client,
    ):
        yield client
