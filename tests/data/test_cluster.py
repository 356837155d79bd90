"""Clusters of Dask on this host and on ranks of MPI."""

from __future__ import annotations

import os

from hzero.data.cluster import cluster


def test_local_workers_are_processes() -> None:
    with cluster(2) as client:
        places = client.gather(client.map(lambda _: os.getpid(), range(8), pure=False))
    assert os.getpid() not in places and 1 <= len(set(places)) <= 2
