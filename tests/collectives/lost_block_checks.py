"""Blocks that codec exp cannot hold. Run by test_tiered.py on several ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hzero.collectives import Communicator, HopError, Pipeline, communicator
from hzero.topology.grid import Grid
from tests.collectives.communicator_checks import SOME, _bits_equal, _communicator
from tests.collectives.tiered_checks import WORLD
from tests.rank_main import TRANSPORT


class _Enqueued:
    """Streams of a device on which everything has happened as soon as it is asked for."""

    def on(self, _: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def event(self) -> None:
        pass

    def wait(self, _: Any) -> None:
        pass

    used = wait


def check_blocks_that_codec_exp_cannot_hold_are_an_error_where_hops_are_enqueued() -> None:
    """In `verify`, which looks at all that has arrived, on every rank that has such a block."""
    if TRANSPORT == "mpi":
        pytest.skip("of streams")
    rank, words = dist.get_rank(), torch.randint(0, 1 << 14, (WORLD, 1700)).to(torch.int16).view(torch.bfloat16)
    for tensor, fits in ((torch.full((WORLD, 1700), 1.5).bfloat16(), True), (words, False)):
        for name in ("all_gather", "all_to_all", "all_reduce", "broadcast", "send"):
            with mock.patch.object(communicator, "pipeline_of", return_value=Pipeline(_Enqueued())):
                group = _communicator(SOME[0], codecs="exp")
            if name == "broadcast":
                group.broadcast(tensor, 1)
            elif name != "send":
                getattr(group, name)(tensor)
            elif rank in (0, 1):
                group.send(tensor, 1) if rank == 0 else group.recv(tensor, 0)
            if fits or (name == "send" and rank != 1):
                group.verify()
                continue
            with pytest.raises(HopError, match="blocks of 32,768 numbers have more than 512"):
                group.verify()


def check_blocks_that_codec_exp_cannot_hold_travel_without_a_codec() -> None:
    """Random words on some ranks, in some parts: every operation gives the bits of codec none, and the wire log has both."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    every = torch.randint(0, 1 << 14, (WORLD, WORLD, 1700), generator=generator).to(torch.int16).view(torch.bfloat16)
    every[0], every[2, 1:], every[3:, :-1] = 1.5, -2.0, 0.25
    operations: dict[str, Callable[[Communicator], torch.Tensor]] = {
        "all_gather": lambda group: group.all_gather(every[rank]),
        "all_to_all": lambda group: group.all_to_all(every[rank]),
        "reduce_scatter": lambda group: group.reduce_scatter(every[rank]),
        "all_reduce": lambda group: group.all_reduce(every[rank]),
        "broadcast": lambda group: group.broadcast(every[1], 1),
    }
    doubling = {"algorithm": "doubling", "below_bytes": 1 << 20}
    for grid, checksum, algorithm in ((SOME[0], False, {}), (Grid(WORLD, 1, 1), True, doubling)):
        for name, operation in operations.items():
            plain = operation(_communicator(grid))
            for codecs in ("exp", {"gpu": "exp", "node": "exp"}):
                group = _communicator(grid, codecs=codecs, checksum=checksum, node_all_gather=algorithm)
                assert _bits_equal(operation(group), plain), (name, grid, codecs)
                sent = {entry.codec for entry in group.wire_log.entries()}
                assert sent <= {"exp", "none"} and (codecs != "exp" or len(sent) == 2), (name, grid, sent)
                group.all_gather(every[0, 0])  # the lanes are in step
    for checksum in (False, True):
        group = _communicator(SOME[0], codecs="exp", checksum=checksum)
        for part in (every[1], every[0]):  # one that does not fit, and one that does
            if rank == 0:
                group.send(part, WORLD - 1)
            elif rank == WORLD - 1:
                assert _bits_equal(group.recv(part, 0), part)
        if rank in (0, WORLD - 1):
            entries = group.wire_log.entries()
            assert {entry.codec for entry in entries} == {"exp", "none"}
            assert sum(entry.elements for entry in entries) == 2 * every[0].numel()  # the repeat counts none anew
            assert sum(entry.raw_bytes for entry in entries) == (2 * every[0].nbytes if rank else 0)
