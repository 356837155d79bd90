"""Wire log: bytes and time of every hop by role and tier, counted without synchronising the device."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hzero.config import CodecName, Tier


@dataclass
class WireEntry:
    """Totals of all hops of one role on one tier with one codec, on this rank.

    Attributes:
        role: Kind of state; for messages of a `Communicator`, the operation.
        tier: Tier of the hops.
        codec: Codec of the messages.
        hops: Number of collectives.
        elements: Elements of this rank's messages. If only one rank sends, its peers count the elements that they receive.
        payload_bytes: Bytes of these messages, including scales and record padding.
        wire_bytes: Bytes that this rank received from its peers.
        raw_bytes: ``wire_bytes`` if the codec were ``none``.
        seconds: Time between start and end of the hops. Hops may overlap, so the sum can exceed the wall time.
    """

    role: str
    tier: Tier
    codec: CodecName
    hops: int = 0
    elements: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    raw_bytes: int = 0
    seconds: float = 0.0


_COUNTS = [field.name for field in dataclasses.fields(WireEntry) if field.default == 0]


class HopTimer:
    """Time of one hop: by device events on a device, by the host clock on CPU.

    Args:
        device: Device of the message.
        spare: Idle pairs of events. The timer takes one, and returns it after the events have been read.
    """

    def __init__(self, device: torch.device, spare: list[tuple[torch.Event, torch.Event]] | None = None) -> None:
        self._spare = [] if spare is None else spare
        self._events: tuple[torch.Event, torch.Event] | None = None
        self._started = time.perf_counter()
        self._elapsed: float | None = None
        if device.type != "cpu":
            timed = lambda: torch.Event(device, enable_timing=True)  # noqa: E731
            self._events = self._spare.pop() if self._spare else (timed(), timed())
            self._events[0].record()

    def stop(self) -> None:
        """Marks the end of the hop, once; on a device with an event, without waiting."""
        if self._events is not None:
            self._events[1].record()
        elif self._elapsed is None:
            self._elapsed = time.perf_counter() - self._started

    def ready(self) -> bool:
        """Whether `seconds` can be read without waiting for the device."""
        events = self._events
        return self._elapsed is not None or (events is not None and events[1].query())

    def seconds(self) -> float:
        """Elapsed seconds. Waits for the device if the hop has not ended."""
        if self._events is not None:
            self._events[1].synchronize()
            self._elapsed = self._events[0].elapsed_time(self._events[1]) / 1e3
            self._spare.append(self._events)
            self._events = None
        return self._elapsed or 0.0


class WireLog:
    """Counts every hop of one stage. Reading totals may synchronise the device; counting never does.

    Attributes:
        spare: Idle events of timers; see `HopTimer`.
    """

    def __init__(self) -> None:
        self._totals: dict[tuple[Any, ...], WireEntry] = {}
        self._running: deque[tuple[WireEntry, HopTimer]] = deque()
        self.spare: list[tuple[torch.Event, torch.Event]] = []
        self._lock = threading.Lock()  # hops may end on other threads

    def total(self, lane: Sequence[str], counts: WireEntry) -> WireEntry:
        """Returns the live totals for hops like ``counts`` on a lane. Its user adds to them; a lane ends one hop at a time."""
        key = counts.role, counts.tier, counts.codec
        with self._lock:
            return self._totals.setdefault((*key, *lane), WireEntry(*key))

    def time(self, total: WireEntry, timer: HopTimer) -> None:
        """Stops the timer of a completed hop, and adds its time once it can be read."""
        timer.stop()
        with self._lock:
            self._running.append((total, timer))
            self._read_timers(wait=False)

    def _read_timers(self, *, wait: bool) -> None:
        """Adds the times of ended hops, in order; with ``wait``, the times of all hops."""
        while self._running and (wait or self._running[0][1].ready()):
            total, timer = self._running.popleft()
            total.seconds += timer.seconds()

    def entries(self) -> list[WireEntry]:
        """Totals since the last `reset`, sorted by role, tier and codec; copies that are safe to keep."""
        found: dict[tuple[Any, ...], WireEntry] = {}
        with self._lock:
            self._read_timers(wait=True)
            for (role, tier, codec, *_), total in sorted(self._totals.items()):
                entry = found.setdefault((role, tier, codec), WireEntry(role, tier, codec))
                for name in _COUNTS:
                    setattr(entry, name, getattr(entry, name) + getattr(total, name))
        return [entry for entry in found.values() if entry.hops]

    def as_dicts(self) -> list[dict[str, Any]]:
        """`entries` as plain dictionaries, for JSON."""
        return [dataclasses.asdict(entry) for entry in self.entries()]

    def wire_bytes(self, tier: Tier | None = None, role: str | None = None) -> int:
        """Bytes that this rank received: on one tier, for one role, or in total."""
        with self._lock:
            return sum(
                entry.wire_bytes
                for entry in self._totals.values()
                if tier in (None, entry.tier) and role in (None, entry.role)
            )

    def reset(self) -> None:
        """Sets all counts to zero."""
        with self._lock:
            self._running.clear()
            for total in self._totals.values():  # hops keep their totals
                for name in _COUNTS:
                    setattr(total, name, 0)
