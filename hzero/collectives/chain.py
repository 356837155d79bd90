"""Chain: the hops of one bucket, run in order behind one handle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Generic, TypeVar

from hzero.collectives.transport import Pending

T = TypeVar("T")

#: Yields each hop when it is started, is resumed when the hop has ended, and returns the chain's result.
Hops = Generator[Pending, None, T]


class Chain(Generic[T]):
    """Runs the hops of one bucket in order. The constructor starts the first hop.

    Args:
        hops: Generator that starts a hop, yields it, and continues with its output.
    """

    def __init__(self, hops: Hops[T]) -> None:
        self._hops = hops
        self._pending: Pending | None = None
        self._result: T | None = None
        self.done = False
        self._resume()

    def _resume(self) -> None:
        try:
            self._pending = next(self._hops)
        except StopIteration as stop:
            self._pending, self._result, self.done = None, stop.value, True

    def advance(self) -> None:
        """Waits for the hop under way and starts the next one. Does nothing where the chain is done."""
        if self._pending is not None:
            self._pending.wait()
            self._resume()

    def wait(self) -> T:
        """Runs the chain to its end and returns its result; may be called again."""
        while not self.done:
            self.advance()
        return self._result  # type: ignore[return-value]


def pipelined(starts: Iterable[Callable[[], Chain[T]]]) -> Iterator[T]:
    """Overlaps chains: hop k of a chain runs during hop k+1 of the chain before it.

    Tiers use different links, so many buckets take the time of the slowest tier, not the sum over tiers. Every rank
    starts and advances the same chains in the same order, so the ranks of a group enter their collectives alike.

    Args:
        starts: One function per bucket, which starts its chain. Each is called when the pipeline has room.

    Yields:
        The result of each chain, in the order of ``starts``.
    """
    running: deque[Chain[T]] = deque()
    for start in starts:
        for chain in running:
            chain.advance()
        running.append(start())
        while running and running[0].done:
            yield running.popleft().wait()
    while running:
        for chain in running:
            chain.advance()
        while running and running[0].done:
            yield running.popleft().wait()
