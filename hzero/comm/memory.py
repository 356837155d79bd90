"""What a rank keeps between the runs of programs: buffers of messages, and residuals of lossy encodings."""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hzero.comm.lanes import DeviceStreams

#: Buffers of one size that a device has not passed yet before one of them is taken again, which serialises their programs.
_BEHIND = 4
#: Largest buffer that waits for another program where nothing else needs it. Memory that waits is missing in a layer's
#: activations, and to allocate a large buffer takes less time than to fill it.
_SMALL = 1 << 14

# ---- buffers ----------------------------------------------------------------------------------------------------------


class Floats(NamedTuple):
    """Tensors between two steps: their type and elements."""

    dtype: torch.dtype
    numels: list[int]

    @property
    def bytes(self) -> int:
        """Their memory."""
        return sum(self.numels) * self.dtype.itemsize


class Room:
    """A buffer of the `Arena`.

    Attributes:
        buffer: Its memory, uint8.
        event: On a device: recorded where it was last used.
    """

    def __init__(self, buffer: torch.Tensor, streams: DeviceStreams | None) -> None:
        self.buffer, self._streams = buffer, streams
        self.event: Any = None if streams is None else streams.event()
        self._wanted: Any = None
        self._view: Any = None

    def view(self, wanted: int | Floats) -> Any:
        """A message of so many bytes in it, or flat tensors, one after the other."""
        if self._wanted != wanted:
            self._wanted = wanted
            if isinstance(wanted, int):
                self._view = self.buffer[:wanted]
            else:
                self._view = list(self.buffer[: wanted.bytes].view(wanted.dtype).split(wanted.numels))
        return self._view

    def __del__(self) -> None:
        # Also of an engine that nobody has closed, and of a chain that has failed: its streams may still use the memory.
        if self._streams is not None:
            with contextlib.suppress(Exception):  # at the end of the process the device may be gone
                self._streams.used_by_all(self.buffer)


class Arena:
    """Memory of messages, which a run of a program takes step by step and leaves to the next run.

    What is left is used again at once on CPUs, where large buffers are not kept. On a device the stream that takes a buffer
    waits for the event of its last use; until some are `_BEHIND`, a buffer that the device has passed or a new one is taken
    instead, so that programs overlap. Before it makes a new one it frees large ones that the device has passed.

    Args:
        streams: Of the lanes; None on CPUs.
    """

    def __init__(self, streams: DeviceStreams | None) -> None:
        self._streams = streams
        self._free: list[Room] = []  # by size
        self._lock = threading.Lock()

    def take(self, wanted: int | Floats, device: torch.device) -> Room:
        """A buffer of at least so many bytes, or for such tensors, for the current stream."""
        size = wanted if isinstance(wanted, int) else wanted.bytes
        with self._lock:
            first = found = bisect.bisect_left(self._free, size, key=_size_of)
            end = bisect.bisect_right(self._free, 2 * size, key=_size_of)
            while found < end and self._streams is not None and not self._free[found].event.query():
                found += 1
            if found == end and end - first >= _BEHIND:
                found = first
            room = self._free.pop(found) if found < end else None
            if room is None and self._streams is not None:
                self._free = [one for one in self._free if _size_of(one) <= _SMALL or not one.event.query()]
        if room is None:
            return Room(torch.empty(size, dtype=torch.uint8, device=device), self._streams)
        if self._streams is not None:
            self._streams.wait(room.event)
        return room

    def give(self, room: Room) -> None:
        """Takes a buffer back that the current stream has used last."""
        if self._streams is not None:
            room.event.record(self._streams.device.current_stream())
        elif _size_of(room) > _SMALL:
            return
        with self._lock:
            bisect.insort(self._free, room, key=_size_of)


def _size_of(room: Room) -> int:
    return room.buffer.numel()


# ---- error feedback ---------------------------------------------------------------------------------------------------


@dataclass
class Residual:
    """What one tier has lost of one parameter until now.

    Attributes:
        values: The loss, bfloat16, flat; updated where it lies.
        scale: Loss scale of it.
    """

    values: torch.Tensor
    scale: float


class ErrorFeedback:
    """Residuals in bfloat16, one per tier and parameter (Seide et al. 2014; Karimireddy et al., arXiv 1901.09847).

    A residual is at most an encoding's error, and bfloat16 loses a 256th of that. It is kept once: an encoding reads it and
    overwrites it (as LoCo does, arXiv 2407.04480). A step that is skipped discards its gradients. Residuals that they have
    changed start at zero again, so such a step loses at most the error of one more encoding. Residuals start at zero.
    """

    def __init__(self) -> None:
        self._residuals: dict[tuple[str, int], Residual] = {}
        self._changed: dict[tuple[str, int], Residual] = {}  # since the last step that is done

    def of(
        self, name: str, keys: Sequence[int], tensors: Sequence[torch.Tensor], scale: float
    ) -> tuple[list[torch.Tensor], list[float]]:
        """The residuals to add to tensors before they are encoded, which the encoding overwrites with what it loses.

        Args:
            name: Of the residuals, such as the tier of the hop.
            keys: Of the tensors.
            tensors: Flat floating tensors.
            scale: Loss scale of ``tensors``, and so of the new residuals.

        Returns:
            Tensors of as many elements as ``tensors``, and the factors to multiply them by, which convert residuals of
            another scale.
        """
        residuals, factors = [], []
        for key, tensor in zip(keys, tensors):
            place = name, key
            kept = self._residuals.get(place)
            if kept is None or kept.values.numel() != tensor.numel():
                kept = self._residuals[place] = Residual(tensor.new_zeros(tensor.numel(), dtype=torch.bfloat16), scale)
            self._changed[place] = kept
            residuals.append(kept.values)
            factors.append(scale / kept.scale)
            kept.scale = scale
        return residuals, factors

    def commit(self) -> None:
        """The step is done: its residuals are added to the next gradients."""
        self._changed.clear()

    def discard(self) -> None:
        """Sets residuals to zero that gradients since the last `commit`, which were discarded, have changed."""
        for kept in self._changed.values():
            kept.values.zero_()
        self._changed.clear()

    @property
    def bytes(self) -> int:
        """Memory of the residuals on this rank."""
        return sum(kept.values.nbytes for kept in self._residuals.values())

    def clear(self) -> None:
        """Forgets all residuals: their weights have been replaced."""
        self._residuals.clear()
        self._changed.clear()
