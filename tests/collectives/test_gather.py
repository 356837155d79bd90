"""All-gathers by rounds, on simulated ranks: coordinate order for any number of ranks and bytes, in as few rounds as promised."""

from __future__ import annotations

import math
import types
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from hzero.collectives.transport import Transport, rounds
from hzero.collectives.wires import TorchWires

LANE: Any = ("weights", "node")
#: Of an all-to-all: what is received and sent, and the bytes from and to every rank.
Call = tuple[torch.Tensor, torch.Tensor, list[int], list[int]]


def _transport(rank: int, ranks: list[int]) -> Transport:
    transport = Transport.__new__(Transport)
    transport._rank, transport._ranks = rank, {"node": ranks}
    transport._wires = {LANE: TorchWires(mock.Mock(), timedelta(seconds=1))}
    transport._checksum = False
    transport._hops = mock.MagicMock()
    return transport


def _deliver(calls: list[Call]) -> None:
    """What an all-to-all with split sizes does, for all ranks at once."""
    sent = [part.split(sends) for _, part, _, sends in calls]
    for own, (output, _, receives, _) in enumerate(calls):
        arrived = [parts[own] for parts in sent]
        assert [part.numel() for part in arrived] == receives
        output.copy_(torch.cat(arrived))


def _result(gather: Any) -> torch.Tensor:
    with pytest.raises(StopIteration) as stop:
        next(gather)
    return stop.value.value


@settings(max_examples=40)
@given(st.integers(2, 20), st.integers(0, 3), st.randoms(use_true_random=False))
def test_doubling_gives_coordinate_order_in_the_fewest_rounds(size: int, count: int, random: Any) -> None:
    ranks = random.sample(range(1000), size)  # a tier group in no order
    messages = [torch.tensor([random.randrange(256) for _ in range(count)], dtype=torch.uint8) for _ in ranks]
    calls: list[Call] = []

    def start(output: torch.Tensor, sent: torch.Tensor, receives: list[int], sends: list[int], **_: Any) -> Any:
        calls.append((output, sent, receives, sends))
        return types.SimpleNamespace(wait=lambda: None)

    with (
        mock.patch.object(dist, "all_to_all_single", start),
        mock.patch.object(dist, "get_world_size", return_value=size),
    ):
        gathers = [
            _transport(rank, ranks).gather("doubling", LANE, message, "a message")
            for rank, message in zip(ranks, messages)
        ]
        received = 0
        for _ in range(rounds("doubling", size)):
            calls.clear()
            for gather in gathers:
                next(gather)
            _deliver(calls)
            received += calls[0][0].numel()
            assert max(sum(map(bool, sends)) for *_, sends in calls) <= 1  # to one peer a round
        results = [_result(gather) for gather in gathers]
    assert rounds("doubling", size) == math.ceil(math.log2(size)) and received == (size - 1) * count
    assert all(torch.equal(result, torch.cat(messages)) for result in results)
