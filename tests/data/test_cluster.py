"""Workers on this host."""

from __future__ import annotations

import os

import psutil

from hzero.tools.data.cluster import workers


def sockets(_: object = None) -> tuple[int, list[str]]:
    """The id of this process, and its internet sockets."""
    return os.getpid(), [str(one) for one in psutil.Process().net_connections("inet")]


def test_local_workers_are_processes_without_ports() -> None:
    before = sockets()
    with workers(2) as executor:
        found = list(executor.map(sockets, range(8)))
        assert sockets() == before
    places = {pid for pid, _ in found}
    assert os.getpid() not in places and 1 <= len(places) <= 2
    assert not any(listed for _, listed in found), "other users could reach the workers"
