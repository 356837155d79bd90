"""Blocks that codec exp cannot hold. Run by test_tiered.py on several ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hzero.comm import Communicator, HopError, Lanes, communicator
from tests.comm.communicator_checks import SOME, _bits_equal, _communicator
from tests.comm.tiered_checks import WORLD
from tests.rank_main import TRANSPORT


def _enqueued() -> Any:
    """Streams of a device on which everything has happened as soon as it is asked for."""
    return mock.MagicMock(
        **{"on.return_value": contextlib.nullcontext()}, collective=lambda start: start(async_op=True)
    )


def check_blocks_that_codec_exp_cannot_hold_are_an_error() -> None:
    """On every rank that has received one: of the operation, or where hops are enqueued in `verify`. The lanes stay in step."""
    rank, words = dist.get_rank(), torch.randint(0, 1 << 14, (WORLD, 1700)).to(torch.int16).view(torch.bfloat16)
    operations: dict[str, Callable[[Communicator, torch.Tensor], object]] = {
        "all_gather": lambda group, tensor: group.all_gather(tensor),
        "all_to_all": lambda group, tensor: group.all_to_all(tensor),
        "all_reduce": lambda group, tensor: group.all_reduce(tensor),
        "broadcast": lambda group, tensor: group.broadcast(tensor, 1),
        "send": lambda group, tensor: _from_rank_0_to_1(group, tensor),
    }
    says = pytest.raises(HopError, match="blocks of 32,768 numbers have more than 512")
    for tensor, fits in ((torch.full((WORLD, 1700), 1.5).bfloat16(), True), (words, False)):
        for name, operation in operations.items():
            fails = not fits and (name != "send" or rank == 1)
            if TRANSPORT != "mpi":
                with mock.patch.object(communicator, "shared_lanes", return_value=Lanes(_enqueued())):
                    group = _communicator(SOME[0], codecs="exp")
                operation(group, tensor)
                with says if fails else contextlib.nullcontext():
                    group.verify()
            group = _communicator(SOME[0], codecs="exp", checksum=name == "all_gather")
            with says if fails else contextlib.nullcontext():
                operation(group, tensor)
            assert _bits_equal(group.all_gather(tensor[0] * 0), (tensor[0] * 0).repeat(WORLD))


def _from_rank_0_to_1(group: Communicator, tensor: torch.Tensor) -> None:
    if dist.get_rank() == 0:
        group.send(tensor, 1)
    elif dist.get_rank() == 1:
        group.recv(tensor, 0)
