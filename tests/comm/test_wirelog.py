"""What the wire log counts, and when."""

from __future__ import annotations

from unittest import mock

from hzero.comm.wirelog import WireEntry, WireLog


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
