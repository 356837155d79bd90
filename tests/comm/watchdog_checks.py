"""Ranks that do not come, and what the others say. Run by test_watchdog.py on four ranks, and by test_mpi.py."""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from hzero.comm import HopError, WireLog, blaming, peers_of, shared_watchdog, watchdog
from hzero.config import Tier, parse_config
from hzero.errors import PeerError
from hzero.program.shards import ShardPlan
from hzero.topology.grid import Grid
from tests.comm.faulty import FaultyRuntime
from tests.rank_main import TRANSPORT, begin_anew

#: Faster than life: a rank is silent after 1.2 s, and the store has 1 s to answer.
watchdog.PERIOD_S, watchdog._ANSWER_S = 0.3, 1.0
TIMEOUT_S = 2.0


def _collectives(role: str) -> FaultyRuntime:
    """Lanes on which all pairs are connected. Pairs are [0, 1] and [2, 3] inside, [0, 2] and [1, 3] between nodes."""
    begin_anew()
    plan = ShardPlan.from_config(
        parse_config({"preset": "lossless", "transport": TRANSPORT}), Grid(2, 1, 2), dist.get_rank()
    )
    peers = peers_of(plan, timedelta(seconds=TIMEOUT_S), channels=[role])
    collectives = FaultyRuntime(plan, peers, WireLog(), timeout_s=TIMEOUT_S)
    for tier in ("intra_package", "inter_node"):
        _hop(collectives, tier)
    return collectives


def _hop(collectives: FaultyRuntime, tier: Tier, size: int = 16) -> None:
    (role, *_), *_ = collectives.peers
    gather = collectives.prepare((role, tier), "all_gather", size, "a test")
    gather.run(torch.zeros(size, dtype=torch.uint8))


def _pids() -> list[int]:
    """The processes of all ranks, which have written that they are after step 7."""
    shared_watchdog().step = 7
    time.sleep(3 * watchdog.PERIOD_S)
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return pids


def _named(error: pytest.ExceptionInfo[PeerError], culprit: int, pids: list[int], *parts: str) -> None:
    text = str(error.value)
    for part in (f"rank {culprit} (host {socket.gethostname()}, pid {pids[culprit]}, after step 7)", *parts):
        assert part in text, text
    assert tuple(error.value.ranks) == (culprit,), text


def check_a_frozen_rank_is_named_also_by_who_waits_for_one_that_waits_for_it() -> None:
    """Rank 3 is stopped. Rank 2 waits for it, rank 0 for rank 2; both warn at half time."""
    rank, collectives, store = dist.get_rank(), _collectives("frozen"), c10d._get_default_store()
    pids = _pids()
    started = time.monotonic()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank != 1:
        with mock.patch.object(sys, "stderr", io.StringIO()) as said:
            with pytest.raises(HopError) as error:
                _hop(collectives, "intra_package" if rank == 2 else "inter_node")
            while "warning" not in said.getvalue():  # of another thread
                time.sleep(0.01)
        assert time.monotonic() - started < TIMEOUT_S + 6
        _named(error, 3, pids, "all-gather of a test", "no sign of life for", "its last hop")
        assert rank == 2 or f"waited for rank 2 (host {socket.gethostname()}" in str(error.value), error.value
        warning = said.getvalue()
        assert warning.count("warning") == 1 and "no end after" in warning and "(host" in warning, warning
        store.set(f"named {rank}", "")
        if rank == 0:
            store.wait(["named 2"])
            os.kill(pids[3], signal.SIGCONT)


def check_a_rank_that_is_stuck_in_python_is_named() -> None:
    """Rank 1 is in its data loader: ranks 0 and 3 wait in hops, rank 2 in a collective outside hops."""
    rank, collectives, store = dist.get_rank(), _collectives("stuck"), c10d._get_default_store()
    group = dist.new_group([1, 2], timeout=timedelta(seconds=TIMEOUT_S))
    if rank in (1, 2):
        dist.all_reduce(torch.zeros(4), group=group)
    pids = _pids()
    if rank == 1:
        store.wait(["stuck 0", "stuck 2", "stuck 3"])
    else:
        with pytest.raises(PeerError) as error, blaming():
            if rank == 2:
                dist.all_reduce(torch.zeros(4), group=group)
            _hop(collectives, "intra_package" if rank == 0 else "inter_node")
        said = "watchdog_checks.py:" if rank == 2 else "at hop 1 instead of 2; its last hop: all-gather of a test"
        _named(error, 1, pids, said)
        assert rank != 2 or "a collective at" in str(error.value), error.value
        store.set(f"stuck {rank}", "")
    with pytest.raises(RuntimeError, match="of something else"), blaming():
        raise RuntimeError("of something else")


def check_ranks_that_send_messages_of_different_sizes_are_named() -> None:
    """Those of ranks 0 and 2 never arrive, since gloo would end the process that gets one of another size."""
    rank, collectives = dist.get_rank(), _collectives("sizes")
    pids = _pids()
    collectives.faults = [] if rank % 2 else ["drop"]
    with pytest.raises(HopError) as error:
        _hop(collectives, "intra_package", 16 if rank % 2 else 40)
    sizes = "whose message has 80 bytes instead of 32" if rank % 2 else "whose message has 32 bytes instead of 80"
    _named(error, rank ^ 1, pids, f"{sizes}: ranks disagree")


def check_a_frozen_rank_0_is_named_though_it_serves_the_store() -> None:
    """Last, since the group of the others has timed out."""
    rank, out = dist.get_rank(), Path(os.environ["HZERO_CHECKS_OUT"])
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    dist.all_reduce(torch.zeros(4), group=group)
    pids = _pids()
    shared_watchdog()._missing = -1, ((), "")
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    started = time.monotonic()
    with pytest.raises(PeerError) as error, blaming():
        dist.all_reduce(torch.zeros(4), group=group)
    assert time.monotonic() - started < TIMEOUT_S + 10
    assert tuple(error.value.ranks) == (0,), error.value
    assert "rank 0 or torchrun's agent: its store has not answered" in str(error.value), error.value
    (out / f"named{rank}").touch()
    if rank == 1:
        while not all((out / f"named{other}").exists() for other in (2, 3)):
            time.sleep(0.02)
        os.kill(pids[0], signal.SIGCONT)
