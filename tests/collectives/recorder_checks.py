"""Ranks that do not come, and what the others say. Run by test_recorder.py on four ranks."""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from hzero.collectives import HopError, Transport, blaming, recorder, shared_recorder
from hzero.config import Role, Tier
from hzero.parsing import parse_config
from hzero.sharding.plan import ShardPlan
from hzero.topology.grid import Grid
from hzero.validation import PeerError
from tests.rank_main import TRANSPORT, begin_anew

#: Faster than life: a rank is silent after 1.2 s, and the store has 1 s to answer.
recorder.PERIOD_S, recorder._ANSWER_S = 0.3, 1.0
TIMEOUT_S = 2.0


def _hops(role: Role) -> Callable[[Tier], object]:
    """Starts and waits for an all-gather on a tier; all pairs are connected. Node groups are [0, 2] and [1, 3]."""
    begin_anew()
    plan = ShardPlan.from_config(
        parse_config({"preset": "lossless", "transport": TRANSPORT}), Grid(2, 1, 2), dist.get_rank()
    )
    transport = Transport(plan, timedelta(seconds=TIMEOUT_S))
    message = torch.zeros(16, dtype=torch.uint8)

    def hop(tier: Tier) -> torch.Tensor:
        return transport.all_gather((role, tier), message, "a test").wait()

    for tier in ("gcd", "node"):
        hop(tier)
    return hop


def _next_batch(key: str) -> None:
    """Stands for a data loader that gives nothing until the others have said so."""
    c10d._get_default_store().wait([key])


def _named(error: pytest.ExceptionInfo[PeerError], culprit: int, pids: list[int], *parts: str) -> None:
    text = str(error.value)
    for part in (f"rank {culprit} (host {socket.gethostname()}, pid {pids[culprit]}, cpu, after step 7", *parts):
        assert part in text, text
    assert error.value.ranks == (culprit,), text


def _pids() -> list[int]:
    """The processes of all ranks, which have written that they are after step 7."""
    own = shared_recorder()
    own.step, beat = 7, own._record.beat
    while own._record.beat < beat + 2:
        time.sleep(0.01)
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return pids


def check_a_frozen_rank_is_named_also_by_who_waits_for_one_that_waits_for_it() -> None:
    """Rank 3 is stopped. Rank 2 waits for it, rank 0 for rank 2; both warn at half time."""
    rank, hop, store = dist.get_rank(), _hops("weights"), c10d._get_default_store()
    pids = _pids()
    started = time.monotonic()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        with mock.patch.object(sys, "stderr", io.StringIO()) as said:
            with pytest.raises(HopError) as error:
                hop("gcd" if rank == 2 else "node")
            while "warning" not in said.getvalue():  # of another thread
                time.sleep(0.01)
        assert time.monotonic() - started < TIMEOUT_S + 5
        _named(error, 3, pids, "all-gather of a test", "no sign of life for", "its last hop")
        warning = said.getvalue()
        assert warning.count("warning") == 1 and "rank 3 (host" in warning and "no end after" in warning, warning
        store.set(f"named {rank}", "")
        if rank == 0:
            store.wait([f"named {other}" for other in range(3)])
            os.kill(pids[3], signal.SIGCONT)


def check_a_rank_that_is_stuck_in_python_is_named_with_the_place() -> None:
    """Rank 1 is in its data loader: ranks 0 and 3 wait in hops, rank 2 in a collective outside hops."""
    rank, hop, store = dist.get_rank(), _hops("gradients"), c10d._get_default_store()
    group = dist.new_group([1, 2], timeout=timedelta(seconds=TIMEOUT_S))
    if rank in (1, 2):
        dist.all_reduce(torch.zeros(4), group=group)
    pids = _pids()
    if rank == 1:
        for other in (0, 2, 3):
            _next_batch(f"stuck {other}")
    else:
        with pytest.raises(PeerError) as error, blaming():
            if rank == 2:
                dist.all_reduce(torch.zeros(4), group=group)
            hop("gcd" if rank == 0 else "node")
        _named(error, 1, pids, "recorder_checks.py:", " _next_batch for")
        assert rank != 2 or ("a collective at" in str(error.value) and " check_a_rank" in str(error.value)), error.value
        store.set(f"stuck {rank}", "")
    with pytest.raises(RuntimeError, match="of something else"), blaming():
        raise RuntimeError("of something else")


def check_a_frozen_rank_0_is_named_though_it_serves_the_store() -> None:
    """Last, since the group of the others has timed out."""
    rank, out = dist.get_rank(), Path(os.environ["HZERO_CHECKS_OUT"])
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    dist.all_reduce(torch.zeros(4), group=group)
    pids = _pids()
    shared_recorder()._verdict = None
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    started = time.monotonic()
    with pytest.raises(PeerError) as error, blaming():
        dist.all_reduce(torch.zeros(4), group=group)
    assert time.monotonic() - started < TIMEOUT_S + 5
    assert error.value.ranks == (0,) and f"pid {pids[0]}" in str(error.value), error.value
    assert "the store that it serves" in str(error.value) and "has not answered" in str(error.value)
    (out / f"named{rank}").touch()
    if rank == 1:
        while not all((out / f"named{other}").exists() for other in (2, 3)):
            time.sleep(0.02)
        os.kill(pids[0], signal.SIGCONT)
