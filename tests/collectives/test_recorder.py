"""The flight recorder: on four ranks, some of which are frozen or stuck, and on records that a test writes."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from hzero.collectives import record, recorder
from hzero.collectives.record import Record
from hzero.collectives.recorder import Recorder
from tests.ranks import Outcome, collect, conclude, launch, selected

CHECKS = ("tests.collectives.recorder_checks",)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    return launch(CHECKS, 4, selected(request), timeout=120)


@pytest.mark.parametrize("check", collect(*CHECKS))
def test_on_ranks(outcomes: dict[str, Outcome], check: str) -> None:
    conclude(outcomes[check])


def test_the_last_hop_is_the_one_under_way_of_those_that_one_look_has_found() -> None:
    lanes = {"sums gcd": (2, 2, "an all-to-all", 3.0), "messages gcd": (1, 0, "a send", 3.0), "old": (1, 0, "old", 9.0)}
    assert "its last hop: a send," in Record(0, "h", 1, "cpu", lanes=lanes).last_hop()


class _World:
    """Records of other ranks, which live on while this rank looks, or not."""

    def __init__(self, world_size: int, connect: Any = None) -> None:
        self.store = dist.HashStore()
        self.recorder = Recorder(
            0, world_size, connect or (lambda: self.store), timeout_s=60, store_at="at x", store_rank=0
        )
        self.recorder.hops(("weights", "node"), 60, lambda rank: range(world_size))
        self.alive: list[Record] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live)
        self._thread.start()

    def rank(self, rank: int, *, alive: bool = True, started: int = 4, **values: Any) -> None:
        lanes = {"weights node": (started, started - 1, "an all-gather", 9.0)}
        record = Record(rank, "h", 100 + rank, "cpu", beat=1, lanes=lanes, **values)
        self._write(record)
        if alive:
            self.alive.append(record)

    def _write(self, record: Record) -> None:
        self.store.set(f"hzero recorder {record.rank}", json.dumps(dataclasses.asdict(record)))

    def _live(self) -> None:
        while not self._ended.wait(0.02):
            for one in list(self.alive):
                one.beat += 1
                self._write(one)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self.recorder.stop()


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(recorder, "PERIOD_S", 0.05)
    monkeypatch.setattr(recorder, "_ANSWER_S", 0.3)
    made: list[_World] = []

    def make(*arguments: Any) -> _World:
        made.append(_World(*arguments))
        return made[-1]

    yield make
    for world in made:
        world.close()


def test_who_is_to_blame(worlds: Any) -> None:
    """A killed rank before one that is busy, a busy one before those that wait; who has come is never named."""
    lane = ("weights", "node")
    world = worlds(6)
    for rank in (1, 2, 3, 4, 5):
        world.rank(rank, started=3 if rank == 2 else 4, doing="hop", waits=["weights node"])
    found = world.recorder._find(lane, 3)
    assert found.ranks == () and "none of the 5 ranks that it asked is missing" in found.text
    found = world.recorder._find(lane, 4)
    assert found.ranks == (2,) and "which waits itself" in found.text
    world.alive.remove(next(record for record in world.alive if record.rank == 3))
    world.rank(3, started=3, doing="code", place="loader.py:3 read")
    found = world.recorder._find(lane, 4)
    assert found.ranks == (3,) and "pid 103" in found.text and "in loader.py:3 read" in found.text
    world.rank(4, alive=False, time=0.0)
    world.alive = [record for record in world.alive if record.rank != 4]
    assert world.recorder._find(lane, 4).ranks == (4,)
    # Who has given up itself was not late: it says whom it waited for.
    world.alive = [record for record in world.alive if record.rank != 5]
    world.rank(5, alive=False, blames=[4])
    assert world.recorder._find(lane, 4).ranks == (4,)


def test_large_worlds_write_and_read_little(worlds: Any) -> None:
    world = worlds(75_264)
    assert 75_264 / world.recorder.period_s == recorder.WRITES_PER_S
    assert world.recorder._peers(75_260, ("weights", "node"))[:6] == [75_261, 75_262, 75_263, 0, 1, 2]
    assert len(world.recorder._peers(0, None)) == 64


def test_a_store_that_does_not_answer_is_rank_0s_fault(worlds: Any) -> None:
    """The question ends in time, whatever the store does."""
    answer = threading.Event()

    class Frozen:
        def __getattr__(self, name: str) -> Any:
            return self._call

        def _call(self, *arguments: Any) -> None:
            answer.wait(30)
            raise RuntimeError("gone")

    world = worlds(2, Frozen)
    found = world.recorder.missing(("weights", "node"), 1)
    assert found.ranks == (0,) and "waited for rank 0: the store that it serves, at x, has not answered" in found.text
    answer.set()


STANDARD, TORCH = f"{record._STANDARD}threading.py", f"{record._TORCH}nn/x.py"
HOPS, REDUCE = f"{record._HOPS}pipeline.py", f"{record._COLLECTIVES[0]}c10d.py"


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["/home/u/train.py"], ("code", "/home/u/train.py:1 f")),
        ([STANDARD, TORCH, "/home/u/train.py", "/home/u/main.py"], ("code", "/home/u/train.py:1 f")),
        ([STANDARD, REDUCE, "/home/u/train.py"], ("collective", "/home/u/train.py:1 f")),
        ([REDUCE, HOPS, REDUCE, TORCH, "/home/u/train.py"], ("hop", "/home/u/train.py:1 f")),
        ([f"{record._STANDARD}site-packages/client/trainer.py", "/home/u/train.py"], None),
        ([STANDARD, TORCH], ("code", f"{STANDARD}:1 f")),
        ([], ("code", "")),
    ],
)
def test_the_place_of_a_thread_is_the_innermost_that_its_user_wrote(paths: list[str], found: Any) -> None:
    frames = [(path, line, "f") for line, path in enumerate(paths, 1)]
    got = record.where((path, 1, name) for path, _, name in frames)
    assert got == (found or ("code", f"{paths[0]}:1 f"))


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_frames_are_read(monkeypatch: pytest.MonkeyPatch, collects: bool) -> None:
    """Finalizers would let the main thread run on, and its frames end under the reader, which crashed with Python 3.11."""
    seen, place = [], record._place

    def observed(frame: Any) -> Any:
        seen.append(gc.isenabled())
        return place(frame)

    monkeypatch.setattr(record, "_place", observed)
    main = record.main_thread()
    try:
        gc.enable() if collects else gc.disable()
        with ThreadPoolExecutor() as pool:
            assert pool.submit(record.frames_of, main).result()
        assert gc.isenabled() == collects
    finally:
        gc.enable()
    assert len(seen) > 10
    assert not any(seen)


def test_frames_are_read_while_threads_of_others_come_and_go() -> None:
    """Threads of C++, such as gloo's, enter the interpreter without its lock; faulthandler crashes beside them."""
    main = record.main_thread()
    until = time.monotonic() + 1.0
    enter = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)
    start = ctypes.CDLL(None).pthread_create
    join = ctypes.CDLL(None).pthread_join
    join.argtypes = (ctypes.c_ulong, ctypes.c_void_p)

    def come_and_go() -> None:
        while time.monotonic() < until:
            thread = ctypes.c_ulong()
            assert start(ctypes.byref(thread), None, enter, None) == 0
            join(thread.value, None)

    def deep(depth: int) -> int:
        return deep(depth - 1) if depth else sum(x for x in range(3))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with contextlib.ExitStack() as stack:
        stack.callback(sys.setswitchinterval, interval)
        pool = stack.enter_context(ThreadPoolExecutor())
        others = [pool.submit(come_and_go) for _ in range(3)]
        reader = pool.submit(
            lambda: [len(record.frames_of(main)) for _ in iter(lambda: time.monotonic() < until, False)]
        )
        while time.monotonic() < until:
            deep(30)
        for other in others:
            other.result()
    assert len(reader.result()) > 10
    assert min(reader.result()) > 0
