"""What the wire log counts, and when."""

from __future__ import annotations

from unittest import mock

import torch

from hzero.comm.wirelog import HopCounts, HopTimer, WireLog


def test_hops_of_a_device_count_once_they_have_ended() -> None:
    """`seconds` takes those that have ended, in order; `entries` waits for all."""
    log, timers = WireLog(), [mock.Mock(hidden_s=0.25, **{"seconds.return_value": 2.0}) for _ in range(3)]
    for timer in timers:
        timer.ready.return_value = False
        log.add(HopCounts(("weights", "node", "int8"), 1, 2, 3, 4), timer)
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
