"""Messages from rank to rank, of one communicator and of several. Run by test_tiered.py on several ranks."""

from __future__ import annotations

import functools
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hzero.codecs.codec import Codec
from hzero.comm import Communicator, HopError, communicator
from hzero.topology.grid import Grid
from tests.comm.communicator_checks import SOME, _bits_equal, _communicator, _everyones
from tests.comm.faulty import FaultyRuntime
from tests.comm.tiered_checks import WORLD
from tests.rank_main import TRANSPORT, same_on_all_ranks


def check_messages_from_rank_to_rank_leave_what_all_ranks_hold_alike() -> None:
    """Where a message of two ranks is rounded stochastically, the others' next one is still rounded with the same seed."""
    stochastic = {"codec": "int8", "rounding": "stochastic"}
    codecs = {"inter_node": stochastic, "intra_node": {**stochastic, "codec": "int4"}}
    group = _communicator(SOME[0], codecs=codecs, gather=codecs)
    mine = torch.randn(999, generator=torch.Generator().manual_seed(dist.get_rank()))
    if dist.get_rank() == 0:
        group.send(mine, 1)
    elif dist.get_rank() == 1:
        group.recv(torch.empty(999), 0)
    assert same_on_all_ranks([group.all_reduce(mine), group.all_gather(mine), group.broadcast(mine, 0)])


def check_messages_from_rank_to_rank() -> None:
    """Around a ring both ways at once, several in flight, and between two ranks alone."""
    rank = dist.get_rank()
    after, before = (rank + 1) % WORLD, (rank - 1) % WORLD
    for config in ({}, {"checksum": True}, {"gather": "int8"}):
        group, everyone = _communicator(SOME[-1], **config), _everyones((3, 100), torch.bfloat16)
        like = torch.empty(3, 100, dtype=torch.bfloat16)
        sent = [group.send(everyone[rank] * k, to, async_op=True) for k in (1, 2) for to in (after, before)]
        for factor in (1, 2):
            for source in (before, after):
                got, want = group.recv(like, source), everyone[source] * factor
                if "gather" in config:
                    codec = Codec.from_config(group.config.gather.inter_node)
                    bound = codec.error_bound(float(want.abs().max()), torch.bfloat16)
                    assert 0 < float((got.float() - want.float()).abs().max()) <= bound
                else:
                    assert _bits_equal(got, want)
        assert [chain.wait() for chain in sent] == [None] * 4
        if rank == 0:
            group.send(everyone[0], 2)
        elif rank == 2:
            group.recv(like, 0)
        entries = {entry.role: entry for entry in group.wire_log.entries() if entry.role in ("send", "recv")}
        assert entries["recv"].wire_bytes > 0 and entries["send"].wire_bytes == 0


def check_a_message_that_does_not_come_leaves_the_group_as_it_was() -> None:
    if TRANSPORT == "mpi":
        pytest.skip("MPI is refused after an error")
    rank, like = dist.get_rank(), torch.full((8,), float(dist.get_rank()))
    make = functools.partial(Communicator, {"topology": "discover"}, role="late", grid=SOME[0])
    group = make(timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(HopError, match=r"recv of late in float32 \[8\] .* from rank 1 "):
            group.recv(like, 1)
        for again in (lambda: group.recv(like, 1), lambda: group.send(like, 1)):
            with pytest.raises(HopError):
                again()
    dist.barrier()
    fresh = make(timeout=timedelta(seconds=60))
    assert torch.equal(fresh.all_gather(like), torch.arange(float(WORLD)).repeat_interleave(8))
    if rank == 1:
        fresh.send(like, 0)
    elif rank == 0:
        assert torch.equal(fresh.recv(like, 1), torch.ones(8))


def check_checksums_of_broadcasts_and_messages_name_the_sender() -> None:
    rank = dist.get_rank()
    with mock.patch.object(communicator, "Runtime", FaultyRuntime):
        group = _communicator(Grid(WORLD, 1, 1), checksum=True)
    group._runtime.faults = ["flip"] if rank == 1 else []
    chain = group.broadcast(torch.ones(9), 3, async_op=True)
    other = group.send(torch.ones(9), 1, async_op=True) if rank == 0 else None
    if rank == 1:
        with pytest.raises(HopError, match=r"broadcast of broadcast of float32 .* changed from rank 3"):
            chain.wait()
        with pytest.raises(HopError, match=r"recv of float32 .* from rank 0 .* changed from rank 0"):
            group.recv(torch.ones(9), 0)
    else:
        chain.wait()
        if other is not None:
            other.wait()
