"""Trace: when this rank's hops, waits and parts of steps ran, as shares per step and as a file that Perfetto opens."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hzero.collectives.wirelog import HopTimer
from hzero.config import DIMENSIONS, ROLES, TIERS, CodecName, Tier
from hzero.files import replacing

#: Start and end in seconds.
Interval = tuple[float, float]
#: Maximum number of spans that a trace keeps: some fifty steps of a model of 20B parameters.
LIMIT = 50_000
_STEPS, _COMPUTE, _WAITING = "steps", "compute", "waiting for hops"
_TRACK_OF = {"step": _STEPS, "forward": _COMPUTE, "backward": _COMPUTE, "optimizer": _COMPUTE, "wait": _WAITING}
_TRACKS = (_STEPS, _COMPUTE, _WAITING, *(f"{role} {tier}" for role in (*ROLES, *DIMENSIONS) for tier in TIERS))


class Span(NamedTuple):
    """A stretch of time on one track.

    Attributes:
        track: Role and tier of a hop, ``steps``, ``compute`` (forward, backward, optimizer) or ``waiting for hops``.
        name: What ran; of a hop the label of its bucket.
        start: Seconds after the start of the trace.
        end: Likewise.
        details: Of a hop: ``tier``, ``codec`` and ``bytes`` received.
    """

    track: str
    name: str
    start: float
    end: float
    details: dict[str, Any]


@dataclass(frozen=True)
class TierShares:
    """Shares of the time in which a tier had a hop in flight. A second can be hidden behind both.

    Attributes:
        wire_s: That time in seconds, each second counted once.
        behind_compute: Share in which this rank waited for no hop.
        behind_tiers: Share in which another tier had a hop in flight too.
    """

    wire_s: float
    behind_compute: float
    behind_tiers: float


class Trace:
    """Keeps the spans of this rank. On a device a span is two events, and nothing waits before the spans are read.

    Args:
        device: Device of the messages.
        limit: Maximum number of spans; later ones are counted and dropped.

    Attributes:
        dropped: Number of spans beyond ``limit``.
    """

    def __init__(self, device: torch.device, limit: int = LIMIT) -> None:
        self.dropped = 0
        self._device, self._limit = device, limit
        self._kept: list[tuple[str, str, HopTimer, dict[str, Any]]] = []
        self._open: dict[str, HopTimer] = {}
        self._origin = HopTimer(device)
        self._origin.stop()
        self._origin.seconds()  # on a device the host's clock is read when the first event is over
        self._epoch = time.time()

    def hop(self, role: str, tier: Tier, codec: CodecName, wire_bytes: int, label: str, timer: HopTimer) -> None:
        """Keeps a hop that has ended."""
        self._keep(f"{role} {tier}", label, timer, {"tier": tier, "codec": codec, "bytes": wire_bytes})

    def begin(self, part: str) -> None:
        """Begins ``step``, ``forward``, ``backward``, ``optimizer`` or ``wait``; on a device when its stream is here."""
        self._open[part] = HopTimer(self._device)

    def end(self, part: str) -> None:
        """Ends what `begin` began; nothing if the trace was started in between."""
        timer = self._open.pop(part, None)
        if timer is not None:
            timer.stop()
            self._keep(_TRACK_OF[part], part, timer, {})

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this rank waits for a hop."""
        self.begin("wait")
        try:
            yield
        finally:
            self.end("wait")

    def _keep(self, track: str, name: str, timer: HopTimer, details: dict[str, Any]) -> None:
        if len(self._kept) < self._limit:
            self._kept.append((track, name, timer, details))
        else:
            self.dropped += 1

    def spans(self) -> list[Span]:
        """All spans that have ended, by start. Waits for the device."""
        kept = [Span(track, name, *timer.since(self._origin), details) for track, name, timer, details in self._kept]
        return sorted(kept, key=lambda span: (span.start, span.end))

    def shares(self) -> list[dict[Tier, TierShares]]:
        """For each step that has ended: the shares of every tier that had hops. Waits for the device."""
        return step_shares(self.spans())

    def write(self, path: str | os.PathLike[str], rank: int) -> None:
        """Writes the spans as Chrome trace events, whole or not at all; compressed where the name ends in ``.gz``.

        The rank is a process. Each track is a thread, and a second one where its spans overlap, as on a device, whose
        lanes take the next hop before the last one has arrived. Times are microseconds of the day (UTC) on which the
        trace began, by this host's clock, so that the files of several ranks fit together.
        """
        began = self._epoch % 86_400  # of 1970 they would not fit a float to the nanosecond
        threads: dict[str, int] = {}
        ends: dict[str, float] = {}
        events: list[dict[str, Any]] = []
        for span in self.spans():
            row, number = span.track, 1
            while ends.get(row, span.start) > span.start:
                number += 1
                row = f"{span.track} ({number})"
            ends[row] = span.end
            tid = threads.setdefault(row, 100 * _TRACKS.index(span.track) + number)
            seconds, details = span.end - span.start, dict(span.details)
            if "bytes" in details and seconds > 0:
                details["GB/s"] = round(details["bytes"] / seconds / 1e9, 3)
            start, end = (round((began + at) * 1e6, 3) for at in (span.start, span.end))
            event = {"ph": "X", "name": span.name, "pid": rank, "tid": tid, "args": details}
            events.append({**event, "ts": start, "dur": round(end - start, 3)})
        names = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}]
        for row, tid in threads.items():
            names.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": row}})
            names.append({"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": tid, "args": {"sort_index": tid}})
        content = {"traceEvents": [*names, *events], "displayTimeUnit": "ms", "otherData": {"dropped": self.dropped}}
        text = json.dumps(content).encode()
        with replacing(path, "wb") as file:
            file.write(gzip.compress(text) if str(path).endswith(".gz") else text)


def step_shares(spans: Iterable[Span]) -> list[dict[Tier, TierShares]]:
    """For each step among the spans, in order: the shares of every tier that had hops in it."""
    spans = list(spans)
    waits = union((s.start, s.end) for s in spans if s.track == _WAITING)
    wires: dict[Tier, list[Interval]] = {
        tier: union((s.start, s.end) for s in spans if s.details.get("tier") == tier) for tier in TIERS
    }
    found: list[dict[Tier, TierShares]] = [{} for span in spans if span.track == _STEPS]
    for tier, wire in wires.items():
        others = union(interval for other in TIERS if other != tier for interval in wires[other])
        waited, shared = overlap(wire, waits), overlap(wire, others)
        for shares, step in zip(found, (s for s in spans if s.track == _STEPS)):
            seconds, *parts = (length(overlap(spent, [(step.start, step.end)])) for spent in (wire, waited, shared))
            if seconds > 0:
                shares[tier] = TierShares(seconds, max(1 - parts[0] / seconds, 0.0), min(parts[1] / seconds, 1.0))
    return found


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def overlap(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """The time that lies in both; arguments and result as `union` returns them."""
    both, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            both.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return both


def length(intervals: Iterable[Interval]) -> float:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)
