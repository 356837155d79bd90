"""A transport with faults where messages arrive, drawn from a seed: for tests of what notices them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch

from hzero.collectives import Transport
from hzero.collectives.transport import Ends, Lane, Pending
from hzero.sharding.plan import ShardPlan

#: What happens to a message: it arrives late or never, or in its place the former one of the lane, or with zeros from some
#: byte on, or with one bit changed.
Fault: TypeAlias = Literal["delay", "drop", "duplicate", "truncate", "flip"]
CORRUPTIONS: tuple[Fault, ...] = ("duplicate", "truncate", "flip")
FAULTS: tuple[Fault, ...] = get_args(Fault)
#: Longest delay, in seconds.
_DELAY_S = 0.002
_NOTHING = Ends()


class Done(NamedTuple):
    """A fault that has happened.

    Attributes:
        fault: Its kind.
        lane: Of the message.
        what: Of the message.
    """

    fault: Fault
    lane: Lane
    what: str


class FaultyTransport(Transport):
    """A transport on which messages arrive with faults, at this rank alone.

    Args:
        plan: The shard plan of this rank.
        timeout: As for a transport; a message that is dropped fails after it.
        ranks: As for a transport.
        seed: What happens to which message; give ranks seeds of their own to have faults at one of them.

    Attributes:
        faults: Kinds to draw from; none at first.
        chance: Probability of a fault of a message.
        spares: Whether messages with this description arrive unharmed.
        done: Faults that have changed, delayed or dropped something.
    """

    def __init__(self, plan: ShardPlan, timeout: timedelta | None = None, *, seed: int = 0, **rest: Any) -> None:
        super().__init__(plan, timeout, **rest)
        self.faults: Collection[Fault] = ()
        self.chance = 1.0
        self.spares: Callable[[Lane, str], bool] = lambda lane, what: False
        self.done: list[Done] = []
        self._draw = random.Random(seed)
        self._timeout_s = timeout.total_seconds() if timeout else 60.0
        self._former: dict[tuple[Lane, int], torch.Tensor] = {}

    def all_gather(self, lane: Lane, message: torch.Tensor, what: str, ends: Ends = _NOTHING) -> Pending:
        """With faults in what arrives."""
        return self._faulty(super().all_gather, lane, message, what, ends)

    def all_to_all(self, lane: Lane, message: torch.Tensor, what: str, ends: Ends = _NOTHING) -> Pending:
        """With faults in what arrives."""
        return self._faulty(super().all_to_all, lane, message, what, ends)

    def reduce_scatter(self, lane: Lane, elements: torch.Tensor, what: str, ends: Ends = _NOTHING) -> Pending:
        """With faults in what arrives."""
        return self._faulty(super().reduce_scatter, lane, elements, what, ends)

    def exchange(self, lane: Lane, held: torch.Tensor, distance: int, what: str, ends: Ends = _NOTHING) -> Pending:
        """With faults in what arrives: the rows behind those that this rank had."""
        start = super().exchange
        arriving = held[distance : distance + min(distance, len(held) - distance)]
        return self._faulty(lambda *_: start(lane, held, distance, what, ends), lane, held, what, ends, arriving)

    def _faulty(
        self,
        start: Callable[..., Pending],
        lane: Lane,
        message: torch.Tensor,
        what: str,
        ends: Ends,
        arriving: torch.Tensor | None = None,
    ) -> Pending:
        fault = None
        if self.faults and not self.spares(lane, what) and self._draw.random() < self.chance:
            fault = self._draw.choice(sorted(self.faults))
        if fault == "drop":
            self.done.append(Done(fault, lane, what))
            described = f"hzero: {what} on tier {lane[1]!r} of {lane[0]}"
            work, lost = _Dropped(self._timeout_s), self._hops[lane]
            return Pending(work, message, lambda: described, ends, lane=lost)  # type: ignore[arg-type]
        pending = start(lane, message, what, ends)
        wait, told = pending._work.wait, []

        def arrive() -> None:
            """The work's wait, then the fault, before anybody looks."""
            wait()
            if not told:
                told.append(True)
                self._harm(fault, lane, what, pending._output if arriving is None else arriving)

        pending._work = _Arrives(pending._work, arrive)  # type: ignore[assignment]
        return pending

    def _harm(self, fault: Fault | None, lane: Lane, what: str, output: torch.Tensor) -> None:
        message = output.reshape(-1).view(torch.uint8)  # the same memory: outputs are contiguous
        was, key = message.clone(), (lane, message.numel())
        if fault == "delay":
            time.sleep(self._draw.uniform(0, _DELAY_S))
        elif fault == "flip" and len(message):
            message[self._draw.randrange(len(message))] ^= 1 << self._draw.randrange(8)
        elif fault == "truncate":
            message[self._draw.randrange(max(len(message), 1)) :] = 0
        elif fault == "duplicate" and key in self._former:
            message.copy_(self._former[key])
        self._former[key] = was
        if fault == "delay" or not torch.equal(message, was):
            assert fault is not None
            self.done.append(Done(fault, lane, what))


class _Arrives:
    """The work of a collective, with another wait."""

    def __init__(self, work: Any, wait: Callable[[], None]) -> None:
        self._work = work
        self.wait = wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Dropped:
    """A collective that this rank never takes part in."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ends = time.monotonic() + timeout_s

    def is_completed(self) -> bool:
        return time.monotonic() >= self._ends

    def get_future(self) -> Any:
        raise RuntimeError("a message that never arrives has no future")

    def wait(self) -> None:
        threading.Event().wait(max(self._ends - time.monotonic(), 0))
        raise RuntimeError(f"no message after {self._timeout_s:g} s")
