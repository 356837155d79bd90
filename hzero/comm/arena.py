"""Arena: buffers on a device that programs take step by step, and leave for the next run."""

from __future__ import annotations

import bisect
import contextlib
import operator
import threading
from typing import Any, NamedTuple

import torch

#: Number of busy buffers of one size at which the arena reuses one, although that serialises two programs.
_BEHIND = 4
#: Largest idle buffer, in bytes, that is kept when a new one is needed. Idle buffers take memory from activations.
_SMALL = 1 << 14
_SIZE = operator.attrgetter("size")


class FlatTensors(NamedTuple):
    """Tensors between two steps: their dtype and their numbers of elements."""

    dtype: torch.dtype
    numels: list[int]


class Room:
    """A buffer of the `Arena`.

    Attributes:
        buffer: Its memory, uint8.
        size: Its bytes.
        event: Recorded at its last use.
        wanted: The size or tensors of the last `Arena.take`.
        view: A message in the buffer, or flat tensors one after the other.
    """

    def __init__(self, buffer: torch.Tensor, streams: Any) -> None:
        self.buffer, self.size, self._streams = buffer, buffer.numel(), streams
        self.event: Any = streams.event()
        self.wanted: int | FlatTensors = -1
        self.view: Any = None

    def __del__(self) -> None:
        # Streams may still use the memory of an engine that was never closed, or of a chain that failed.
        with contextlib.suppress(Exception):  # at process exit the device may be gone
            self._streams.used_by_all(self.buffer)


class Arena:
    """Buffers for messages on a device.

    The stream that takes a buffer waits for the event of its last use. To let programs overlap, `take` prefers a buffer that the
    device has passed, or a new one, until `_BEHIND` buffers of that size are busy. Before it makes a new buffer, it frees large
    ones that the device has passed.

    Args:
        streams: The lanes of the device, `hzero.comm.lanes.StreamLanes`.
    """

    def __init__(self, streams: Any) -> None:
        self._streams = streams
        self._free: list[Room] = []  # by size
        self._lock = threading.Lock()

    def take(self, wanted: int | FlatTensors, device: torch.device) -> Room:
        """Returns a buffer of at least ``wanted`` bytes, or for these tensors, for use on the current stream."""
        size = wanted if isinstance(wanted, int) else sum(wanted.numels) * wanted.dtype.itemsize
        with self._lock:
            first = found = bisect.bisect_left(self._free, size, key=_SIZE)
            end = bisect.bisect_right(self._free, 2 * size, key=_SIZE)
            while found < end and not self._free[found].event.query():
                found += 1
            if found == end and end - first >= _BEHIND:
                found = first
            room = self._free.pop(found) if found < end else None
            if room is None:
                self._free = [one for one in self._free if one.size <= _SMALL or not one.event.query()]
        if room is None:
            room = Room(torch.empty(size, dtype=torch.uint8, device=device), self._streams)
        else:
            self._streams.wait(room.event)
        if room.wanted != wanted:
            if isinstance(wanted, int):
                room.view = room.buffer[:wanted]
            else:
                room.view = list(room.buffer[:size].view(wanted.dtype).split(wanted.numels))
            room.wanted = wanted
        return room

    def give(self, room: Room) -> None:
        """Takes back a buffer that the current stream has used last."""
        room.event.record(self._streams.device.current_stream())
        with self._lock:
            bisect.insort(self._free, room, key=_SIZE)
