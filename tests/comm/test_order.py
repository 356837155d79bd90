"""The order of collectives: over random schedules it is the same on all ranks of every communicator, and nobody waits for ever.

Ranks are threads with lanes of their own, and wires are simulated: a hop arrives some time after all ranks of its communicator
have started their hop of the same number.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hzero.comm import lanes as module
from hzero.comm.errors import HopError
from hzero.comm.lanes import Chain, DeviceStreams, Lanes, lanes_of, shared_lanes
from hzero.parsing import parse_config
from hzero.plan.shards import ShardPlan
from hzero.topology import Grid
from hzero.validation import ConfigError

GRID = Grid(2, 2, 1)
SCHEDULES = 300
TIMEOUT_S = 20.0


class _Hop:
    """A collective on a simulated wire."""

    def __init__(self, wires: _Wires, key: Any, number: int) -> None:
        self._wires, self._key, self._number = wires, key, number
        self._due: int | None = None

    def end(self) -> None:
        while not self._wires.look(self):
            time.sleep(0)


class _Wires:
    """All communicators of a world. What happens next is drawn from a generator.

    Attributes:
        started: For each communicator and rank the chains whose hops it started, in order.
    """

    def __init__(self, seed: int) -> None:
        self.started: dict[Any, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._tick = 0  # time passes with everything that happens

    def start(self, rank: int, lane: Any, chain: Any) -> _Hop:
        with self._lock:
            self._tick += 1
            key = (lane, tuple(GRID.tier_group(rank, lane[1])))
            mine = self.started[key][rank]
            mine.append(chain)
            return _Hop(self, key, len(mine))

    def look(self, hop: _Hop) -> bool:
        with self._lock:
            self._tick += 1
            key = hop._key
            if any(len(self.started[key][rank]) < hop._number for rank in key[1]):
                return False
            if hop._due is None:
                hop._due = self._tick + self._random.randrange(4)
            return self._tick >= hop._due


def _run_rank(rank: int, seed: int, wires: _Wires, lanes: Lanes, preset: str) -> None:
    """Submits what an engine submits, the same on all ranks, and waits in an order of its own."""
    plan = ShardPlan.from_config(parse_config({"preset": preset}), GRID, rank)
    common, own = random.Random(seed), random.Random(seed * 100 + rank)
    hops = {
        "refresh": [("weights", hop.tier) for hop in plan.refresh_hops()],
        "fetch": [("weights", hop.tier) for hop in (plan.fetch_hops() if plan.resident else plan.gather_hops())],
        "micro": [("gradients", hop.tier) for hop in plan.micro_hops()],
        "boundary": [("gradients", hop.tier) for hop in plan.boundary_hops()],
    }

    def chain(kind: str, number: int, used: list[Any]) -> Any:
        yield None
        for lane in used:
            yield wires.start(rank, lane, (kind, number))
        if kind == "micro" and hops["boundary"]:
            crossing.append(lanes.submit(chain("boundary", number, hops["boundary"]), hops["boundary"]))
        return number

    crossing: list[Chain[Any]] = []
    waiting: list[Chain[Any]] = []
    for number in range(common.randrange(4, 12)):
        kind = common.choice([kind for kind in ("refresh", "fetch", "micro") if hops[kind]])
        after = [c for c in waiting if common.random() < 0.3] if kind == "fetch" else []
        rounds = common.choice((1, 1, 3))  # of an all-gather between nodes
        used = [lane for lane in hops[kind] for _ in range(rounds if lane == ("weights", "node") else 1)]
        waiting.append(lanes.submit(chain(kind, number, used), used, after))
        if own.random() < 0.3:
            time.sleep(0)
        if common.random() < 0.3:  # a module needs some of what is in flight
            needed = [c for c in waiting if common.random() < 0.6]
            own.shuffle(needed)
            for each in needed:
                each.wait()
    own.shuffle(waiting)
    for each in waiting:
        each.wait()
    for each in crossing:
        each.wait()
    lanes.drain()


def _play(seed: int, preset: str) -> list[str]:
    """One schedule. Returns what went wrong."""
    wires, wrong = _Wires(seed), []

    def run(rank: int) -> None:
        try:
            _run_rank(rank, seed, wires, Lanes(), preset)
        except BaseException as error:
            wrong.append(f"rank {rank}: {error!r}")

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(GRID.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    wrong += [f"rank {rank} waits for ever" for rank, thread in enumerate(threads) if thread.is_alive()]
    for key, ranks in wires.started.items():
        if len({tuple(chains) for chains in ranks.values()}) > 1:
            wrong.append(f"{key}: {dict(ranks)}")
        for chains in ranks.values():
            hops = [chain for chain, _ in itertools.groupby(chains)]
            if len(hops) > len(set(hops)):
                wrong.append(f"{key}: between the rounds of a hop another one started: {chains}")
    return wrong


@pytest.mark.parametrize("preset", ["topo", "zero3"])
def test_order_of_collectives(preset: str) -> None:
    for seed in range(SCHEDULES // 2):
        wrong = _play(seed, preset)
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


def _by_hand(hops: list[_ByHand], lanes: list[Any], result: Any) -> Any:
    yield None
    for _ in lanes:
        hops.append(_ByHand())
        yield hops[-1]
    return result


def _failing(error: BaseException) -> Any:
    yield None
    raise error


def _soon(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + TIMEOUT_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


def test_hops_start_while_nobody_waits_and_one_at_a_time_on_a_lane() -> None:
    lanes = Lanes()
    used: list[Any] = [("gradients", "gcd"), ("gradients", "node")]
    first, second = _Started(), _Started()
    one, two = (lanes.submit(_by_hand(hops, used, n), used) for n, hops in enumerate((first, second)))
    assert _soon(lambda: len(first) == 1) and not second
    first.arrive(0)
    assert _soon(lambda: (len(first), len(second)) == (2, 1))
    second.arrive(0)
    first.arrive(1)
    assert _soon(lambda: one.done and len(second) == 2)
    second.arrive(1)
    assert _soon(lambda: two.done) and (one.wait(), two.wait()) == (0, 1)


def test_nobody_takes_the_place_of_a_chain_that_failed_before_its_hop() -> None:
    """Its peers have started theirs, and would pair it with the next chain's; all its lanes fail until they are mended."""

    lanes = Lanes()
    used: list[Any] = [("gradients", "node")]
    hops = _Started()
    lanes.submit(_failing(MemoryError("on this rank alone")), used)
    with pytest.raises(MemoryError):
        lanes.submit(_by_hand(hops, used, 1), used).wait()
    assert not hops
    other: list[Any] = [("weights", "node")]
    lanes.submit(_by_hand(hops, other, 1), other)
    hops.arrive(0)
    lanes.mend(used)
    assert lanes.failures == 2
    mended = lanes.submit(_by_hand(hops, used, 2), used)
    hops.arrive(1)
    assert mended.wait() == 2


def test_an_interrupt_while_inputs_are_read_is_an_error_of_the_chain_too() -> None:
    """Its peers have started its hops, which no other chain may take."""

    def interrupted() -> Any:
        raise KeyboardInterrupt("pressed")
        yield

    lanes = Lanes()
    used: list[Any] = [("gradients", "node")]
    hops = _Started()
    with pytest.raises(KeyboardInterrupt):
        lanes.submit(interrupted(), used)
    with pytest.raises(KeyboardInterrupt):
        lanes.submit(_by_hand(hops, used, 2), used).wait()
    assert not hops


def test_rounds_of_a_hop_follow_each_other_on_their_lane() -> None:
    lanes = Lanes()
    node, gcd = ("weights", "node"), ("weights", "gcd")
    first, second = _Started(), _Started()
    one = lanes.submit(_by_hand(first, [node, node, node, gcd], 1), [node, node, node, gcd])
    two = lanes.submit(_by_hand(second, [node, gcd], 2), [node, gcd])
    for number in range(3):
        assert _soon(lambda want=number + 1: len(first) == want) and not second
        first.arrive(number)
    second.arrive(0)  # the lane is free
    first.arrive(3)
    second.arrive(1)
    assert (one.wait(), two.wait()) == (1, 2)


def test_a_chain_that_fails_between_two_rounds_fails_those_behind_it() -> None:
    """Its peers go on with the next round, which nobody else may answer."""

    def breaks(hops: list[_ByHand]) -> Any:
        yield None
        hops.append(_ByHand())
        yield hops[-1]
        raise HopError("round 2")

    lanes = Lanes()
    node = ("weights", "node")
    hops, behind = _Started(), _Started()
    failing = lanes.submit(breaks(hops), [node, node, node])
    waiting = lanes.submit(_by_hand(behind, [node], 1), [node])
    hops.arrive(0)
    for chain in (failing, waiting):
        with pytest.raises(HopError, match="round 2"):
            chain.wait()
    assert not behind


def test_a_chain_after_one_that_failed_fails_alike() -> None:
    lanes = Lanes()
    used: list[Any] = [("weights", "node")]
    failed = lanes.submit(_failing(HopError("gone")), used)
    later = lanes.submit(_by_hand([], used, 1), used, after=[failed])
    for chain in (failed, later):
        with pytest.raises(HopError, match="gone"):
            chain.wait()
    lanes.drain()


@pytest.mark.parametrize(
    ("first", "device", "refused"),
    [
        (None, "cpu", False),
        (None, "cuda", True),
        (torch.cuda, "cpu", True),
        (torch.cuda, "cuda", False),
        (SimpleNamespace(_name="cuda"), "cpu", True),
        (SimpleNamespace(_name="cuda"), "cuda", False),
    ],
)
def test_one_process_has_hops_of_processors_or_of_a_gpu(
    first: Any, device: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_of_world", None)
    shared_lanes(None if first is None else DeviceStreams(first))
    said = f"found a group of {device} beside hops of {'cpu' if first is None else 'cuda'}"
    with pytest.raises(ConfigError, match=said) if refused else contextlib.nullcontext():
        lanes_of(device, "torch")
