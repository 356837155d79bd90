"""Ranks as threads of one process, with wires between them: for tests of index arithmetic on many ranks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from hzero.comm.lanes import Call, Chain, Lanes, Program
from hzero.comm.peers import Peers
from hzero.comm.watchdog import LaneHops
from hzero.program.shards import ShardPlan

_TIMEOUT_S = 20.0


class Wires:
    """The wires of one rank in a group of ranks.

    Args:
        own: Place of the rank in the group.
        size: Ranks of the group.
        boxes: Messages on their way in this group, by sender and receiver.

    Attributes:
        calls: Collectives that the rank has started.
    """

    library_sums = False

    def __init__(self, own: int, size: int, boxes: dict[tuple[int, int], queue.Queue]) -> None:
        self._own, self._size, self._boxes = own, size, boxes
        self.calls = 0

    def _swap(self, sent: dict[int, torch.Tensor], into: dict[int, torch.Tensor]) -> Any:
        self.calls += 1
        for target, part in sent.items():
            self._boxes[self._own, target].put(part.clone())

        def wait() -> None:
            for source, part in into.items():
                part.copy_(self._boxes[source, self._own].get(timeout=_TIMEOUT_S))

        return SimpleNamespace(wait=wait)

    def all_gather(self, output: torch.Tensor, message: torch.Tensor) -> Any:
        return self._swap(dict.fromkeys(range(self._size), message), dict(enumerate(output.view(self._size, -1))))

    def all_to_all(self, output: torch.Tensor, message: torch.Tensor) -> Any:
        rows = (dict(enumerate(whole.view(self._size, -1))) for whole in (message, output))
        return self._swap(*rows)

    def broadcast(self, message: torch.Tensor, root: int) -> Any:
        if self._own == root:
            return self._swap({peer: message for peer in range(self._size) if peer != root}, {})
        return self._swap({}, {root: message})


def boxes(size: int) -> dict[tuple[int, int], queue.Queue]:
    """The boxes of a group of so many ranks."""
    return {(source, target): queue.Queue() for source in range(size) for target in range(size)}


def peers(rank: int, groups: dict[Any, tuple[Any, list[int]]]) -> dict[Any, Peers]:
    """The peers of one rank, from wires and ranks of every lane."""
    return {
        lane: Peers(wires, ranks, ranks.index(rank), LaneHops(str(lane), ranks, _TIMEOUT_S))
        for lane, (wires, ranks) in groups.items()
    }


def peers_of(plan: ShardPlan, channel: str, groups: dict[Any, Any]) -> dict[Any, Peers]:
    """The peers of a plan's rank; ``groups``, which the ranks of a world share, keeps the boxes of their tier groups."""
    lanes: dict[Any, Any] = {}
    for tier in plan.grid.crossed:
        ranks = list(plan.tier_group(tier))
        shared = groups.setdefault((tier, tuple(ranks)), boxes(len(ranks)))
        lanes[channel, tier] = Wires(ranks.index(plan.rank), len(ranks), shared), ranks
    return peers(plan.rank, lanes)


def on_all(ranks: Sequence[Any], call: Callable[[Any], Any]) -> list[Any]:
    """What a function returns for every rank, each in a thread."""
    results: dict[int, Any] = {}

    def run(place: int) -> None:
        torch.set_grad_enabled(False)
        results[place] = call(ranks[place])

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_TIMEOUT_S)
    return [results[place] for place in range(len(ranks))]


class AtOnce(Lanes):
    """Lanes that run each chain to its end in `submit`, on the calling thread."""

    def submit(self, program: Program, call: Call, after: Sequence[Chain[Any]] = ()) -> Chain[Any]:
        chain = Chain[Any](program, call, after)
        for stage, hop in enumerate(program.hops):
            program.compute(chain, stage)
            chain.flight = hop.start(chain.value)
            hop.end(chain.flight)
        self._end(chain)
        return chain
