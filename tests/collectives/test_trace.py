"""The arithmetic of spans, and the file they are written to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hzero.collectives.trace import Span, Trace, step_shares
from hzero.collectives.wirelog import HopTimer, WireLog
from hzero.config import Tier


def _hop(tier: Tier, start: float, end: float) -> Span:
    return Span(f"weights {tier}", "a bucket", start, end, {"tier": tier, "codec": "int8", "bytes": 1000})


def test_shares_of_a_step_made_by_hand() -> None:
    spans = [
        Span("steps", "step", 0.0, 10.0, {}),
        Span("steps", "step", 10.0, 20.0, {}),
        _hop("node", 0.0, 8.0),
        _hop("node", 4.0, 8.0),  # a second in flight twice counts once
        _hop("gcd", 6.0, 12.0),
        Span("waiting for hops", "wait", 2.0, 4.0, {}),
        Span("waiting for hops", "wait", 11.0, 12.0, {}),
    ]
    first, second = step_shares(spans)
    node, gcd = first["node"], first["gcd"]
    assert (node.wire_s, node.behind_compute, node.behind_tiers) == (8.0, 0.75, 0.25)
    assert (gcd.wire_s, gcd.behind_compute, gcd.behind_tiers) == (4.0, 1.0, 0.5)
    assert second.keys() == {"gcd"} and second["gcd"].behind_compute == 0.5 and second["gcd"].behind_tiers == 0


class _Event:
    """An event of a device whose clock, in milliseconds, advances by one with every record."""

    clock = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = 0

    def record(self) -> None:
        _Event.clock += 1
        self.at = _Event.clock

    def synchronize(self) -> None:
        assert self.at

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return other.at - self.at


def test_on_a_device_spans_are_those_of_its_events(tmp_path: Path) -> None:
    """Two hops of a lane overlap there, and get a thread each."""
    device, log = torch.device("meta"), WireLog()
    with mock.patch("hzero.collectives.wirelog.torch.Event", _Event):
        trace = Trace(device, limit=3)  # its events are at 1 and 2 ms
        log.on_hop.append(trace.hop)
        first, second, third = (HopTimer(device) for _ in range(3))
        for timer in (first, second, third):
            timer.stop()
            log.add(
                role="weights", tier="node", codec="int8", elements=1, payload_bytes=8, wire_bytes=6000, raw_bytes=9,
                timer=timer, label="a bucket",
            )  # fmt: skip
        trace.begin("step")
        trace.end("step")
        trace.end("backward")  # was begun before the trace
        spans = [(span.track, round(span.start * 1e3), round(span.end * 1e3)) for span in trace.spans()]
        assert spans == [("weights node", 2, 5), ("weights node", 3, 6), ("weights node", 4, 7)]
        assert trace.dropped == 1
        trace.write(tmp_path / "trace.json", rank=5)
    content = json.loads((tmp_path / "trace.json").read_text())
    assert content["otherData"] == {"dropped": 1}
    names = [event["args"]["name"] for event in content["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["weights node", "weights node (2)", "weights node (3)"]
    hops = [event for event in content["traceEvents"] if event["ph"] == "X"]
    assert len({hop["tid"] for hop in hops}) == 3 and {hop["pid"] for hop in hops} == {5}
    assert hops[0]["args"] == {"tier": "node", "codec": "int8", "bytes": 6000, "GB/s": 0.002}
    assert hops[0]["name"] == "a bucket" and hops[0]["dur"] == pytest.approx(3000)


def test_hops_of_a_device_count_once_they_have_ended() -> None:
    """`seconds` takes those that have ended, in order; `entries` waits for all."""
    log, timers = WireLog(), [mock.Mock(hidden_s=0.25, **{"seconds.return_value": 2.0}) for _ in range(3)]
    for timer in timers:
        timer.ready.return_value = False
        log.add(
            role="weights",
            tier="node",
            codec="int8",
            elements=1,
            payload_bytes=2,
            wire_bytes=3,
            raw_bytes=4,
            timer=timer,
        )
    assert log.seconds() == 0.0
    timers[0].ready.return_value = timers[2].ready.return_value = True
    assert log.seconds() == 2.0
    (entry,) = log.entries()
    assert (entry.hops, entry.seconds, entry.hidden_seconds) == (3, 6.0, 0.75)


def test_what_a_processor_has_not_waited_for_is_hidden() -> None:
    for waited_s, hidden in ((5.0, True), (5.0 + 1e9, False)):
        timer = HopTimer(torch.device("cpu"), waited_s=5.0)
        timer.stop(waited_s)
        assert timer.hidden_s == (timer.seconds() if hidden else 0.0)
