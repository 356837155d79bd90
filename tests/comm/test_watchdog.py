"""The watchdog: on four ranks, some of which are frozen or stuck, and on records of a test."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from hzero.comm.watchdog import WRITES_PER_S, LaneHops, Watchdog, _judged
from hzero.errors import PeerError
from tests.ranks import on_ranks

test_on_ranks = on_ranks({4: ("tests.comm.watchdog_checks",)}, timeout=120)


def _record(rank: int, started: int = 4, size: int = 32, **changes: Any) -> dict[str, Any]:
    return {
        "who": f"rank {rank}",
        "last": "; its last hop: x",
        "time": 0.0,
        "hops": {"lane": [started, size]},
        "waits": True,
        "missing": None,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "silent", "blamed", "said"),
    [
        ({}, set(), [], ""),
        ({1: _record(1, 3)}, set(), [1], "rank 1, at hop 3 instead of 4; its last hop: x"),
        ({1: _record(1, 3), 2: _record(2, 1, waits=False)}, set(), [2], "rank 2, at hop 1 instead of 4"),
        ({2: _record(2, 3, missing=[[], ""])}, set(), [], ""),
        ({2: _record(2, 3, missing=[[7], "waited for rank 7"])}, set(), [7], "rank 2, which has waited for rank 7"),
        ({2: _record(2, 3, waits=False)}, {3}, [3], "frozen or gone; its last hop: x"),
        ({3: _record(3, 3, missing=[[7], "waited for rank 7"])}, {3}, [7], "rank 3, which has waited for rank 7"),
        ({2: None, 3: _record(3, 3)}, {2}, [2], "rank 2, which has never said where it is"),
        ({3: _record(3, size=48)}, {2}, [3], "rank 3, whose message has 48 bytes instead of 32: ranks disagree"),
        ({3: _record(3, 5, size=48)}, set(), [], ""),
    ],
)
def test_who_is_to_blame(changes: dict[int, Any], silent: set[int], blamed: list[int], said: str) -> None:
    """A killed rank before one that is busy, and at last one that waits itself; who has come is never named."""
    lane = LaneHops("lane", range(4), 60, started=4, size=32)
    records = {rank: _record(rank) for rank in (1, 2, 3)} | changes
    answers = [_judged(records, silent, lane, 4, last) for last in (False, True)]
    found, text = next((answer for answer in answers if answer[0]), answers[1])
    assert found == blamed and said in text


def test_large_worlds_write_and_read_little() -> None:
    asked: list[int] = []

    class Store:
        def set(self, key: str, value: str) -> None:
            pass

        def compare_set(self, key: str, before: str, value: str) -> bytes:
            asked.append(int(key.rpartition(" ")[2])) if "rank" in key else None
            return b"null"

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return [b"null"] * len(keys)

    one = Watchdog(75_260, 75_264, Store)
    assert 75_264 / one.period_s == WRITES_PER_S
    one.period_s = 0.01
    found, text = one.missing()
    assert asked == [75_261, 75_262, 75_263, *range(61)] and found == sorted(asked)
    assert text.endswith("which has never said where it is and 56 more")
    one.stop()


@pytest.mark.parametrize("error", [PeerError("rank 3 is gone"), RuntimeError("[/gloo/pair.cc] closed")])
def test_a_rank_that_fails_because_a_peer_is_gone_names_the_peer(error: Exception) -> None:
    """It reports the peer before it ends, since others may fail only then. The named rank ignores the report."""
    store = dist.HashStore()
    ranks = [Watchdog(rank, 4, lambda: dist.PrefixStore("test", store)) for rank in range(4)]
    ranks[1]._missing = 0, ((3,), "waited for rank 3 (gone)")
    other = RuntimeError("while it saves")
    other.__cause__ = error
    ranks[1].tell(other)
    for one in ranks:
        one._write()
        one.stop()
    assert [one._error for one in ranks] == [[[3], "rank 3 (gone)"]] * 3 + [None]
