"""The order of collectives: over random schedules it is the same on all ranks of every communicator, and nobody waits for ever.

Ranks are threads with lanes of their own, and wires are simulated: a hop arrives some time after all ranks of its communicator
have started their hop of the same number.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hzero.comm import HopError
from hzero.comm import lanes as module
from hzero.comm.lanes import Call, Chain, Lanes, ThreadLanes, shared_lanes
from hzero.comm.wires import STAGE
from hzero.config import CollectiveOrder, parse_config
from hzero.errors import ConfigError
from hzero.program.shards import ShardPlan
from hzero.topology import Grid

GRID = Grid(2, 2, 2)
#: Of each preset and order; ``HZERO_SCHEDULES=1000`` for a long run.
SCHEDULES = int(os.environ.get("HZERO_SCHEDULES", "27"))
TIMEOUT_S = 20.0


class _Flight:
    """A collective on a simulated wire."""

    def __init__(self, wires: _Wires, key: Any, rank: int, number: int) -> None:
        self._wires, self._key, self._rank, self._number = wires, key, rank, number
        self._due: int | None = None

    def end(self) -> None:
        while not self._wires.look(self):
            time.sleep(0)


class _Hop:
    """A prepared hop whose flights a function starts."""

    room, checksum = 0, False

    def __init__(self, lane: Any, start: Callable[[], Any]) -> None:
        self.lane, self._start = lane, start

    def start(self, message: Any, output: Any = None) -> Any:
        return self._start()

    def end(self, flight: Any) -> None:
        flight.end()


class _Program:
    """A program of such hops, whose steps between them are functions."""

    def __init__(self, hops: Sequence[_Hop], *steps: Callable[[], Any]) -> None:
        self.hops, self._steps = hops, steps

    def compute(self, chain: Chain[Any], stage: int) -> None:
        chain.after = ()
        steps = [lambda: None] * (len(self.hops) + 1 - len(self._steps)) + [*self._steps]
        chain.value = steps[stage]()


_CALL = Call(read=lambda *_: None)


class _Wires:
    """All communicators of a world. What happens next is drawn from a generator.

    Attributes:
        started: For each communicator and rank the chains whose hops it started, in order.
        most: Hops that a rank had under way, at most.
    """

    def __init__(self, seed: int) -> None:
        self.started: dict[Any, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
        self.most = 0
        self._under_way: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._tick = 0  # time passes with everything that happens

    def start(self, rank: int, lane: Any, chain: Any) -> _Flight:
        with self._lock:
            self._tick += 1
            key = (lane, tuple(GRID.tier_group(rank, lane[1])))
            mine = self.started[key][rank]
            mine.append(chain)
            self._under_way[rank] += 1
            self.most = max(self.most, self._under_way[rank])
            return _Flight(self, key, rank, len(mine))

    def look(self, hop: _Flight) -> bool:
        with self._lock:
            self._tick += 1
            key = hop._key
            if any(len(self.started[key][rank]) < hop._number for rank in key[1]):
                return False
            if hop._due is None:
                hop._due = self._tick + self._random.randrange(4)
            self._under_way[hop._rank] -= self._tick >= hop._due
            return self._tick >= hop._due


def wait_all(chains: Sequence[Chain[Any]]) -> None:
    for chain in chains:
        chain.wait()


def _run_rank(rank: int, seed: int, wires: _Wires, lanes: Lanes, preset: str, apart: bool) -> None:
    """Submits what an engine submits, the same on all ranks, and waits for gathers in an order of its own.

    Roles may have lanes ``apart``, as of an engine on CPUs.
    """
    plan = ShardPlan.from_config(parse_config({"preset": preset}), GRID, rank)
    common, own = random.Random(seed), random.Random(seed * 100 + rank)
    fetches = plan.unshard_hops() if plan.keeps_copies else plan.gather_hops()
    every = {
        "refresh": plan.refresh_hops(),
        "fetch": fetches,
        "micro": plan.micro_hops(),
        "boundary": plan.boundary_hops(),
    }
    roles = {"micro": "gradients", "boundary": "gradients"} if apart else dict.fromkeys(every, STAGE)
    hops = {kind: [(roles.get(kind, "weights"), hop.tier) for hop in some] for kind, some in every.items()}
    numbers = itertools.count()

    def submit(kind: str, after: Sequence[Chain[Any]] = ()) -> Chain[Any]:
        number = next(numbers)

        every = [_Hop(lane, lambda lane=lane: wires.start(rank, lane, (kind, number))) for lane in hops[kind]]
        return lanes.submit(_Program(every, lambda: number), _CALL, after)

    gathers: list[Chain[Any]] = []
    reducing: list[Chain[Any]] = []
    for _ in range(common.randrange(4, 16)):
        kind = common.choice([kind for kind in ("refresh", "fetch", "micro") if hops[kind]])
        if kind != "micro":
            gathers.append(submit(kind, [c for c in gathers if common.random() < 0.3] if kind == "fetch" else []))
        else:
            reducing.append(submit("micro"))
            if hops["boundary"] and common.random() < 0.5:
                reducing.append(submit("boundary", [reducing[-1]]))
            if len(reducing) > common.choice((2, 8)):
                wait_all(reducing[: len(reducing) // 2])
        if own.random() < 0.3:
            time.sleep(0)
        if common.random() < 0.3:  # a module needs some of what is in flight
            needed = [c for c in gathers if common.random() < 0.6]
            own.shuffle(needed)
            wait_all(needed)
        if common.random() < 0.1:
            lanes.drain()
    own.shuffle(gathers)
    wait_all(gathers + reducing)
    lanes.drain()


def _play(seed: int, preset: str, order: CollectiveOrder, apart: bool) -> list[str]:
    """One schedule. Returns what went wrong."""
    wires, wrong = _Wires(seed), []

    def run(rank: int) -> None:
        lanes = ThreadLanes(order=order)
        try:
            _run_rank(rank, seed, wires, lanes, preset, apart)
        except BaseException as error:
            wrong.append(f"rank {rank}: {error!r}")
        lanes.end(0)  # or threads of many schedules would add up

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(GRID.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    wrong += [f"rank {rank} waits for ever" for rank, thread in enumerate(threads) if thread.is_alive()]
    for key, ranks in wires.started.items():
        if len({tuple(chains) for chains in ranks.values()}) > 1:
            wrong.append(f"{key}: {dict(ranks)}")
    if order == "strict" and wires.most > 1:
        wrong.append(f"{wires.most} hops under way")
    return wrong


@pytest.mark.parametrize(("order", "apart"), [("lanes", True), ("lanes", False), ("strict", False)])
@pytest.mark.parametrize("preset", ["topo", "zero3", "hpz"])
def test_order_of_collectives(preset: str, order: CollectiveOrder, apart: bool) -> None:
    for seed in range(SCHEDULES):
        wrong = _play(seed, preset, order, apart)
        assert not wrong, (seed, wrong)


class _ByHand:
    """A hop that arrives when the test says so."""

    def __init__(self) -> None:
        self._there = threading.Event()

    def end(self) -> None:
        assert self._there.wait(TIMEOUT_S)

    def arrive(self) -> None:
        self._there.set()


class _Started(list[_ByHand]):
    """The hops of a chain that have been started."""

    def arrive(self, number: int) -> None:
        assert _soon(lambda: len(self) > number)
        self[number].arrive()


def _by_hand(hops: list[_ByHand], lanes: list[Any], *steps: Any) -> _Program:
    """A program whose hops arrive by hand; ``steps``: the result, or the last steps."""

    def start() -> _ByHand:
        hops.append(_ByHand())
        return hops[-1]

    called = [step if callable(step) else lambda step=step: step for step in steps]
    return _Program([_Hop(lane, start) for lane in lanes], *called)


def _raises(error: BaseException) -> Callable[[], Any]:
    def step() -> None:
        raise error

    return step


def _soon(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + TIMEOUT_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_nobody_takes_the_place_of_a_chain_that_failed_before_its_hop(error: type[BaseException]) -> None:
    """Its peers have started theirs, and would pair it with the next chain's; all chains on its lanes fail."""

    lanes = ThreadLanes()
    used: list[Any] = [("gradients", "inter_node")]
    hops = _Started()
    failing = _raises(error("on this rank alone"))
    if error is KeyboardInterrupt:  # while inputs are read
        with pytest.raises(error):
            lanes.submit(_by_hand([], used, failing, None), _CALL)
    else:
        lanes.submit(_Program([_Hop(used[0], failing)]), _CALL)
    with pytest.raises(error):
        lanes.submit(_by_hand(hops, used, 1), _CALL).wait()
    assert not hops
    other: list[Any] = [("weights", "inter_node")]
    lanes.submit(_by_hand(hops, other, 1), _CALL)
    hops.arrive(0)
    assert lanes.failures == 2


def test_a_chain_after_one_that_failed_fails_alike() -> None:
    lanes = ThreadLanes()
    used: list[Any] = [("weights", "inter_node")]
    failed = lanes.submit(_Program([_Hop(used[0], _raises(HopError("gone")))]), _CALL)
    later = lanes.submit(_by_hand([], used, 1), _CALL, after=[failed])
    for chain in (failed, later):
        with pytest.raises(HopError, match="gone"):
            chain.wait()
    lanes.drain()


_GPU, _ACCELERATOR = torch.cuda, SimpleNamespace(_name="cuda", current_device=lambda: 0)


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ((None,), (None,), ""),
        ((None,), (_GPU,), "cuda over torch and of cpu"),
        ((_GPU,), (None,), "cpu and of cuda over torch"),
        ((_GPU,), (_ACCELERATOR,), ""),
        ((_ACCELERATOR, "mpi"), (_GPU,), "cuda over torch and of cuda over mpi"),
        ((_ACCELERATOR, "torch", "strict"), (_GPU,), ""),
        ((None, "torch", "strict"), (None, "mpi", "lanes"), "order: found 'lanes'; expected 'strict'"),
    ],
)
def test_one_process_has_hops_of_one_kind_and_order(
    first: Any, second: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_of_world", None)
    lanes = shared_lanes(*first)
    with pytest.raises(ConfigError, match=found) if found else contextlib.nullcontext():
        assert shared_lanes(*second) is lanes
