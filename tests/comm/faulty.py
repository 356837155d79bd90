"""Collectives with faults where messages arrive, drawn from a seed: for tests of what notices them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias
from unittest import mock

import torch

from hzero.comm import Runtime
from hzero.comm.runtime import HopInFlight, PreparedHop
from hzero.comm.wires import Lane
from hzero.program.program import Kind

#: What happens to a message: it arrives late or never, or in its place the former one of the lane, or with zeros from some
#: byte on, or with one bit changed.
Fault: TypeAlias = Literal["delay", "drop", "duplicate", "truncate", "flip"]
CORRUPTIONS: tuple[Fault, ...] = ("duplicate", "truncate", "flip")
#: Longest delay, in seconds.
_DELAY_S = 0.002


class FaultyRuntime(Runtime):
    """Collectives whose messages arrive with faults, at this rank alone.

    Args:
        arguments: As for `Runtime`.
        seed: What happens to which message; give ranks seeds of their own to have faults at one of them.
        timeout_s: Time after which a message that is dropped fails.
        rest: As for `Runtime`.

    Attributes:
        faults: Kinds to draw from; none at first.
        chance: Probability of a fault of a message.
        spares: Whether messages with this description arrive unharmed.
        done: Faults that have changed, delayed or dropped something.
    """

    def __init__(self, *arguments: Any, seed: int = 0, timeout_s: float = 60.0, **rest: Any) -> None:
        super().__init__(*arguments, **rest)
        self.faults: Collection[Fault] = ()
        self.chance, self._timeout_s = 1.0, timeout_s
        self.spares: Callable[[Lane, str], bool] = lambda lane, what: False
        self.done: list[Fault] = []
        self._draw = random.Random(seed)
        self._former: dict[tuple[Lane, int], torch.Tensor] = {}

    def prepare(self, lane: Lane, kind: Kind, size: int, what: str, **how: Any) -> PreparedHop:
        """With faults in what arrives."""
        made = super().prepare(lane, kind, size, what, **how)
        start = made.start

        def started(message: torch.Tensor, output: torch.Tensor | None = None) -> HopInFlight:
            fault = None
            if self.faults and not self.spares(lane, what) and self._draw.random() < self.chance:
                fault = self._draw.choice(sorted(self.faults))
            if fault == "drop":
                self.done.append(fault)
                with mock.patch.object(made, "_start", return_value=_Dropped(self._timeout_s)):
                    return start(message, output)
            flight = start(message, output)

            def arrive() -> None:
                """The work's wait, then the fault, before anybody looks."""
                flight.work.wait()
                arriving = flight.output
                if how.get("algorithm") == "doubling":  # the rows behind those that this rank had
                    rows = arriving.view(len(made.peers.ranks), -1)
                    arriving = rows[1 << (len(rows) - 1).bit_length() - 1 :]
                self._harm(fault, lane, arriving)

            return flight._replace(work=SimpleNamespace(wait=arrive))

        made.start = started  # type: ignore[method-assign]
        return made

    def _harm(self, fault: Fault | None, lane: Lane, output: torch.Tensor) -> None:
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
            self.done.append(fault)


class _Dropped:
    """A collective that this rank never takes part in."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ends = time.monotonic() + timeout_s

    def wait(self) -> None:
        threading.Event().wait(max(self._ends - time.monotonic(), 0))
        raise RuntimeError(f"no message after {self._timeout_s:g} s")
