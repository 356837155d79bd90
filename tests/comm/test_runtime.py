"""Programs, their buffers and the wire log: what runs once for many tensors, and what is kept and counted."""

from __future__ import annotations

import contextlib
import gc
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hzero.codecs import backends
from hzero.comm import in_buckets
from hzero.comm.arena import Arena
from hzero.comm.lanes import StreamLanes
from hzero.comm.wirelog import WireEntry, WireLog
from hzero.comm.wires import STAGE
from tests.kernels.launches import launches


def _device() -> Any:
    """A device whose streams and events do nothing."""
    return mock.Mock(stream=lambda _: contextlib.nullcontext(), Stream=lambda priority: mock.Mock())


@pytest.mark.parametrize(("preset", "gather", "micro"), [("lossless", 1, 2), ("zero3", 2, 2), ("topo", 1, 3)])
def test_a_bucket_starts_one_kernel_a_step_whatever_its_tensors(preset: str, gather: int, micro: int) -> None:
    """As `python -m tests.kernels.launches` prints; torch would start one or two for each of the twelve tensors."""
    if backends.choice("cpu").name != "host":
        pytest.skip("the host library is not built")
    found = launches(preset)
    for started in found.values():
        del started["page faults"]  # of the machine, not of the program
    assert (found["gather"].total(), found["micro"].total()) == (gather, micro), found
    assert found["refresh"].total() <= 1 and found["boundary"].total() + found["outermost"].total() <= 2, found


def test_streams_keep_buffers_that_an_engine_has_left() -> None:
    """An engine that is dropped without an end, or a chain that fails: what they used may still be under way on any stream."""
    gc.collect()  # arenas of other tests
    kept: list[tuple[int, Any]] = []
    streams = StreamLanes(_device())
    for tier in ("intra_package", "inter_node"):
        streams.on((STAGE, tier))
    arena, cpu = Arena(streams), torch.device("cpu")
    rooms = [arena.take(size, cpu) for size in (100, 1 << 20)]
    arena.give(rooms.pop())
    with mock.patch.object(torch.Tensor, "record_stream", lambda buffer, of: kept.append((buffer.numel(), of))):
        del arena, rooms
        gc.collect()
    assert len(kept) == 4
    assert set(kept) == {(size, of) for size in (100, 1 << 20) for of in streams._streams.values()}


def test_hops_of_a_device_count_once_they_have_ended() -> None:
    """Adding one takes the times of those that have ended, in order; `entries` waits for all."""
    log = WireLog()
    total = log.total(("stage", "inter_node"), WireEntry("weights", "inter_node", "int8"))
    timers = [mock.Mock(**{"seconds.return_value": 2.0}) for _ in range(3)]
    for timer in timers:
        timer.ready.return_value = False
        total.hops += 1
        log.time(total, timer)
    timers[0].ready.return_value = timers[2].ready.return_value = True
    timers.append(mock.Mock(**{"seconds.return_value": 2.0, "ready.return_value": False}))
    total.hops += 1
    log.time(total, timers[3])
    assert [timer.seconds.called for timer in timers] == [True, False, False, False]
    (entry,) = log.entries()
    assert (entry.hops, entry.seconds) == (4, 8.0)


@given(st.lists(st.integers(0, 20)), st.integers(1, 40))
def test_buckets_are_as_full_as_the_limit_allows(sizes: list[int], limit: int) -> None:
    items = list(enumerate(sizes))
    buckets = list(in_buckets(((item, item[1]) for item in items), limit))
    assert [item for bucket in buckets for item in bucket] == items
    filled = [sum(size for _, size in bucket) for bucket in buckets]
    assert all(total <= limit or len(bucket) == 1 for total, bucket in zip(filled, buckets))
    assert all(total + following[0][1] > limit for total, following in zip(filled, buckets[1:]))
