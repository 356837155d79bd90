"""The order of collectives: over random schedules it is the same on all ranks of every communicator, and nobody waits for ever.

Ranks are threads with a pipeline each, and wires are simulated: a hop arrives some time after all ranks of its communicator
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

from hzero.collectives import pipeline
from hzero.collectives.errors import HopError
from hzero.collectives.pipeline import Chain, Pipeline, shared_pipeline
from hzero.collectives.streams import DeviceStreams, pipeline_of
from hzero.parsing import parse_config
from hzero.sharding.plan import ShardPlan
from hzero.topology import Grid
from hzero.validation import ConfigError

GRID = Grid(2, 2, 1)
SCHEDULES = 300
TIMEOUT_S = 20.0


class _Hop:
    """A collective on a simulated wire."""

    def __init__(self, wires: _Wires, key: Any, number: int, announced: bool) -> None:
        self._wires, self._key, self._number, self.announced = wires, key, number, announced
        self._due: int | None = None

    def arrived(self) -> bool:
        return self._wires.look(self)

    def announce(self, arrived: Callable[[], None]) -> None:
        self._wires.listen(self, arrived)


class _Wires:
    """All communicators of a world. What happens next is drawn from a generator.

    Attributes:
        started: For each communicator and rank the chains whose hops it started, in order.
    """

    def __init__(self, seed: int) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.started: dict[Any, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
        self._random = random.Random(seed)
        self._tick = 0
        self._listeners: list[tuple[_Hop, Callable[[], None]]] = []

    def start(self, rank: int, lane: Any, chain: Any) -> _Hop:
        with self.changed:
            key = (lane, tuple(GRID.tier_group(rank, lane[1])))
            mine = self.started[key][rank]
            mine.append(chain)
            hop = _Hop(self, key, len(mine), self._random.random() < 0.5)
            self._stir()
            return hop

    def look(self, hop: _Hop) -> bool:
        with self.changed:
            key = hop._key
            if any(len(self.started[key][rank]) < hop._number for rank in key[1]):
                return False
            if hop._due is None:
                hop._due = self._tick + self._random.randrange(4)
            self._stir()
            return self._tick >= hop._due

    def listen(self, hop: _Hop, arrived: Callable[[], None]) -> None:
        with self.changed:
            if hop.announced:
                self._listeners.append((hop, arrived))

    def _stir(self) -> None:
        """Time passes with everything that happens."""
        self._tick += 1
        self.changed.notify_all()
        for _, arrived in self._listeners:
            arrived()


def _run_rank(rank: int, seed: int, wires: _Wires, pipeline: Pipeline, preset: str) -> None:
    """Submits what an engine submits, the same on all ranks, and waits in an order of its own."""
    plan = ShardPlan.from_config(parse_config({"preset": preset}), GRID, rank)
    common, own = random.Random(seed), random.Random(seed * 100 + rank)
    hops = {
        "refresh": [("weights", hop.tier) for hop in plan.refresh_hops()],
        "fetch": [("weights", hop.tier) for hop in (plan.fetch_hops() if plan.resident else plan.gather_hops())],
        "micro": [("gradients", hop.tier) for hop in plan.micro_hops()],
        "boundary": [("gradients", hop.tier) for hop in plan.boundary_hops()],
    }

    def chain(kind: str, number: int, lanes: list[Any]) -> Any:
        yield None
        for lane in lanes:
            yield wires.start(rank, lane, (kind, number))
        if kind == "micro" and hops["boundary"]:
            crossing.append(pipeline.submit(chain("boundary", number, hops["boundary"]), hops["boundary"]))
        return number

    crossing: list[Chain[Any]] = []
    waiting: list[Chain[Any]] = []
    for number in range(common.randrange(4, 12)):
        kind = common.choice([kind for kind in ("refresh", "fetch", "micro") if hops[kind]])
        after = [c for c in waiting if common.random() < 0.3] if kind == "fetch" else []
        rounds = common.choice((1, 1, 3))  # of an all-gather between nodes
        lanes = [lane for lane in hops[kind] for _ in range(rounds if lane == ("weights", "node") else 1)]
        waiting.append(pipeline.submit(chain(kind, number, lanes), lanes, after))
        if own.random() < 0.3:
            pipeline.pump()
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
    pipeline.drain()


def _play(seed: int, kind: type[Pipeline], preset: str) -> list[str]:
    """One schedule. Returns what went wrong."""
    wires, wrong = _Wires(seed), []

    def run(rank: int) -> None:
        try:
            _run_rank(rank, seed, wires, kind(), preset)
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
        wrong = _play(seed, Pipeline, preset)
        assert not wrong, (seed, wrong)


class _ByHand:
    """A hop that arrives when the test says so."""

    announced = True

    def __init__(self) -> None:
        self._there = False

    def arrived(self) -> bool:
        return self._there

    def announce(self, arrived: Callable[[], None]) -> None:
        self._wake = arrived

    def arrive(self) -> None:
        self._there = True
        self._wake()


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
    pipeline = Pipeline()
    lanes: list[Any] = [("gradients", "gcd"), ("gradients", "node")]
    first: list[_ByHand] = []
    second: list[_ByHand] = []
    one, two = (pipeline.submit(_by_hand(hops, lanes, n), lanes) for n, hops in enumerate((first, second)))
    assert (len(first), len(second)) == (1, 0)
    first[0].arrive()
    assert _soon(lambda: (len(first), len(second)) == (2, 1))
    second[0].arrive()
    first[1].arrive()
    assert _soon(lambda: one.done and len(second) == 2)
    second[1].arrive()
    assert _soon(lambda: two.done) and (one.wait(), two.wait()) == (0, 1)


def test_nobody_takes_the_place_of_a_chain_that_failed_before_its_hop() -> None:
    """Its peers have started theirs, and would pair it with the next chain's; all its lanes fail until they are mended."""

    pipeline = Pipeline()
    lanes: list[Any] = [("gradients", "node")]
    hops: list[_ByHand] = []
    pipeline.submit(_failing(MemoryError("on this rank alone")), lanes)
    with pytest.raises(MemoryError):
        pipeline.submit(_by_hand(hops, lanes, 1), lanes).wait()
    assert not hops
    other: list[Any] = [("weights", "node")]
    pipeline.submit(_by_hand(hops, other, 1), other)
    hops[0].arrive()
    pipeline.mend(lanes)
    assert pipeline.failures == 2
    mended = pipeline.submit(_by_hand(hops, lanes, 2), lanes)
    hops[1].arrive()
    assert mended.wait() == 2


def test_an_interrupt_in_a_chain_is_an_error_of_that_chain() -> None:
    """Whoever waits for it would otherwise get None in place of its result."""
    pipeline = Pipeline()
    lanes: list[Any] = [("gradients", "node")]
    hops: list[_ByHand] = []
    with pytest.raises(KeyboardInterrupt):
        pipeline.submit(_failing(KeyboardInterrupt("pressed")), lanes)
    with pytest.raises(KeyboardInterrupt):
        pipeline.submit(_by_hand(hops, lanes, 2), lanes).wait()
    assert not hops


def test_rounds_of_a_hop_follow_each_other_on_their_lane() -> None:
    pipeline = Pipeline()
    node, gcd = ("weights", "node"), ("weights", "gcd")
    first: list[_ByHand] = []
    second: list[_ByHand] = []
    one = pipeline.submit(_by_hand(first, [node, node, node, gcd], 1), [node, node, node, gcd])
    two = pipeline.submit(_by_hand(second, [node, gcd], 2), [node, gcd])
    for started in (1, 2, 3):
        assert (len(first), len(second)) == (started, 0)
        first[-1].arrive()
        assert _soon(lambda want=started + 1: len(first) == want)
    assert _soon(lambda: len(second) == 1)  # the lane is free
    second[0].arrive()
    first[3].arrive()
    assert _soon(lambda: len(second) == 2)
    second[1].arrive()
    assert (one.wait(), two.wait()) == (1, 2)


def test_a_chain_that_fails_between_two_rounds_fails_those_behind_it() -> None:
    """Its peers go on with the next round, which nobody else may answer."""

    def breaks(hops: list[_ByHand]) -> Any:
        yield None
        hops.append(_ByHand())
        yield hops[-1]
        raise HopError("round 2")

    pipeline = Pipeline()
    node = ("weights", "node")
    hops: list[_ByHand] = []
    behind: list[_ByHand] = []
    failing = pipeline.submit(breaks(hops), [node, node, node])
    waiting = pipeline.submit(_by_hand(behind, [node], 1), [node])
    hops[0].arrive()
    for chain in (failing, waiting):
        with pytest.raises(HopError, match="round 2"):
            chain.wait()
    assert not behind and not pipeline._queues[node]


def test_a_chain_after_one_that_failed_fails_alike() -> None:
    pipeline = Pipeline()
    lanes: list[Any] = [("weights", "node")]
    failed = pipeline.submit(_failing(HopError("gone")), lanes)
    later = pipeline.submit(_by_hand([], lanes, 1), lanes, after=[failed])
    for chain in (failed, later):
        with pytest.raises(HopError, match="gone"):
            chain.wait()
    pipeline.drain()


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
    monkeypatch.setattr(pipeline, "_of_world", None)
    shared_pipeline(None if first is None else DeviceStreams(first))
    said = f"found a group of {device} beside hops of {'cpu' if first is None else 'cuda'}"
    with pytest.raises(ConfigError, match=said) if refused else contextlib.nullcontext():
        pipeline_of(device, "torch")
