"""Transport: wires for each role and tier, and the collectives that hops are made of."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.profiler import record_function

from hzero.collectives.checksum import Comparison, addressed, checksums
from hzero.collectives.errors import DisagreementError, HopError, MissingPeerError
from hzero.collectives.mpi_wires import shared_communicators
from hzero.collectives.process_groups import shared_groups, world_timeout
from hzero.collectives.watchdog import shared_watchdog
from hzero.collectives.wires import Lane, LaneHops, TorchWires, Wires, Work
from hzero.config import ROLES, TIERS, Algorithm, Tier, TransportName
from hzero.sharding.plan import ShardPlan
from hzero.validation import some

Collective: TypeAlias = Literal["all_gather", "all_to_all", "reduce_scatter", "exchange", "broadcast"]


class Ends(NamedTuple):
    """What a collective calls.

    Attributes:
        done: When it has been waited for.
        arrived: When it has ended, on any thread, where the backend announces that.
        passed: To ask whether the device is past it, once it has been waited for.
    """

    done: Callable[[], None] = lambda: None
    arrived: Callable[[], None] = lambda: None
    passed: Callable[[], bool] = lambda: True


_NOTHING = Ends()


class Pending:
    """A collective under way.

    Args:
        work: What is under way.
        output: What the collective fills.
        what: Describes it, for errors.
        ends: What it calls.
        then: Makes what `wait` returns of ``output``.
        lane: The hops of its lane.
    """

    def __init__(
        self,
        work: Work | None,
        output: torch.Tensor,
        what: Callable[[], str],
        ends: Ends = _NOTHING,
        then: Callable[[torch.Tensor], torch.Tensor] | None = None,
        lane: LaneHops | None = None,
    ) -> None:
        self._lane = lane
        self._number = lane.start(what, output.nbytes, ends.passed) if lane is not None else 0
        self._work = work
        self._output = output
        self._what = what
        self._ends = ends
        self._then = then
        self._started = time.monotonic()
        self._future: Any = None

    def __str__(self) -> str:
        return self._what()

    def arrived(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        if self._work is None:
            return True
        # gloo completes the future, which wakes whoever waits, before the work.
        return self._future.done() if self._future is not None else self._work.is_completed()

    def announce(self, arrived: Callable[[], None]) -> None:
        """Asks the backend to call ``arrived`` when the collective has ended; see `announced`."""
        if self._work is None:
            return
        try:
            self._future = self._work.get_future()
        except RuntimeError:  # not every kind of work has one
            return

        def ended(_: Any) -> None:
            self._ends.arrived()
            arrived()

        self._future.add_done_callback(ended)

    @property
    def announced(self) -> bool:
        """Whether the backend announces the end of the collective."""
        return self._future is not None

    def wait(self) -> torch.Tensor:
        """Waits for the collective.

        Returns:
            Its output, which the current stream may read.

        Raises:
            HopError: The collective failed, a peer is gone or the group's timeout passed.
        """
        if self._work is not None:
            try:
                self._work.wait()
            except DisagreementError as error:
                raise HopError(f"{self._what()} failed: {error}") from error
            except RuntimeError as error:
                failed = f"{self._what()} failed after {time.monotonic() - self._started:.1f} s: "
                raise MissingPeerError.of(failed, error, self._lane, self._number) from error
            self._work = None
            if self._lane is not None:
                self._lane.ended += 1
            self._ends.done()
            if self._then is not None:
                self._output = self._then(self._output)
        return self._output


#: In place of a collective that a chain has announced and does not need.
NOTHING_SENT = Pending(None, torch.empty(0), str)


def take(pending: Pending, sent: torch.Tensor) -> torch.Tensor:
    """Waits for a collective that sends from the buffer ``sent``, and returns what it has received."""
    return pending.wait()


#: Takes a comparison, and the message that it is of.
Compare: TypeAlias = Callable[[Comparison, torch.Tensor], None]


def _check(comparison: Comparison, message: torch.Tensor) -> None:
    comparison.check()


def sum_of(parts: torch.Tensor) -> torch.Tensor:
    """The sum of ``[k][n]`` over ``k`` in float32, rounded once to the type of ``parts``, which is overwritten."""
    first, *others = parts
    if len(others) == 1:  # one addition rounds once in any type
        return first.add_(others[0])
    total = first.to(torch.float32)
    for other in others:
        total.add_(other)
    return total.to(parts.dtype)


def rounds(algorithm: Algorithm, ranks: int) -> int:
    """Number of collectives, one after the other, of an all-gather over so many ranks."""
    return (ranks - 1).bit_length() if algorithm == "doubling" else 1


def wires_of(
    transport: TransportName, lane: Lane, ranks: list[int], timeout: timedelta, backend: str | None = None
) -> Wires:
    """The wires of a lane between ranks of the world, in this order; made at the first call. All its ranks must call alike.

    Args:
        transport: ``torch`` makes a process group, ``mpi`` a communicator of MPI.
        lane: What they are for.
        ranks: Of the world.
        timeout: Longest wait for one collective.
        backend: Of a process group; None takes the world's.

    Raises:
        ConfigError: MPI cannot be used.
        MissingPeerError: Not all ranks have come to make a communicator of MPI.
    """
    if transport == "mpi":
        return shared_communicators.get(lane, ranks, timeout)
    return TorchWires(shared_groups.get(lane, ranks, timeout, backend), timeout)


def most_failures(
    own: int, transport: TransportName, group: dist.ProcessGroup | None, ranks: Sequence[int], timeout: timedelta
) -> int:
    """The largest number of failed chains of a rank, by which new lanes are named: none is used again after a failure.

    A rank that has failed alone may not have started a hop that its peers have, and its next one would be paired with it.
    Collective over the ranks.

    Args:
        own: That of this rank.
        transport: ``torch`` asks on the group, ``mpi`` on a communicator of its own.
        group: Of the ranks.
        ranks: Of the world.
        timeout: Longest wait for all ranks over MPI; a group has its own.

    Raises:
        ConfigError: MPI cannot make new communicators.
        HopError: A rank does not answer.
    """
    try:
        if transport == "mpi":
            wires = shared_communicators.get(("failures", "node"), ranks, timeout)
            told = torch.empty(8 * len(ranks), dtype=torch.uint8)
            wires.all_gather(told, torch.tensor([own]).view(torch.uint8)).wait()
            return int(told.view(torch.int64).max())
        every = [own] * len(ranks)
        dist.all_gather_object(every, own, group=group)
        return max(every)
    except HopError:
        raise
    except RuntimeError as error:
        peers = some([str(rank) for rank in ranks], 8)
        raise MissingPeerError.of(
            f"hzero: rank {dist.get_rank()} wants to make new wires with ranks {peers}: ", error
        ) from error


class Transport:
    """Tier groups over torch.distributed or MPI, and collectives on them.

    Every rank makes only its own groups: for each channel one of each tier, innermost first; a tier of size 1 has
    none. The number of calls and the memory do not depend on the size of the world.

    Args:
        plan: The shard plan of this rank; it says which transport.
        timeout: Longest wait for one hop; None takes the world's timeout.
        channels: Names of what has communicators of its own.
        ranks: Rank in the world of each rank of the plan; None where they are the same.
        backend: Of process groups; None takes the world's.
        failures: Number of failed chains, see `most_failures`; the same on all ranks.
        sums: Whether sums with codec ``none`` may be the library's, in its order and in the type of the elements. Otherwise
            they are made here, in float32 and in peer order, and rounded once.
    """

    def __init__(
        self,
        plan: ShardPlan,
        timeout: timedelta | None = None,
        *,
        channels: Sequence[str] = ROLES,
        ranks: Sequence[int] | None = None,
        backend: str | None = None,
        failures: int = 0,
        sums: bool = True,
    ) -> None:
        timeout = timeout or world_timeout()
        self._wires: dict[Lane, Wires] = {}
        self._ranks: dict[Tier, list[int]] = {}
        self._hops: dict[Lane, LaneHops] = {}
        everyone = ranks if ranks is not None else range(plan.grid.world_size)
        self._rank = everyone[plan.rank]
        self._checksum = plan.checksum
        self._sums = sums
        self._messages: defaultdict[Lane, int] = defaultdict(int)
        for tier in TIERS:
            if plan.grid.size(tier) == 1:
                continue
            self._ranks[tier] = [everyone[rank] for rank in plan.tier_group(tier)]
            for channel in channels:
                lane = channel, tier
                named = (f"{channel} #{failures}" if failures else channel), tier
                self._wires[lane] = wires_of(plan.transport, named, self._ranks[tier], timeout, backend)
                self._hops[lane] = shared_watchdog().lane(named, self._ranks[tier], timeout.total_seconds())

    @property
    def lanes(self) -> list[Lane]:
        """Its lanes."""
        return list(self._wires)

    def all_gather(self, lane: Lane, message: torch.Tensor, what: str, ends: Ends = _NOTHING) -> Pending:
        """Starts an all-gather: uint8 ``[b]`` from every rank of the tier group to ``[k * b]``, coordinate order."""
        output = message.new_empty(message.numel() * len(self._ranks[lane[1]]))
        start = partial(self._wires[lane].all_gather, output, message)
        return self._start(start, output, "all_gather", lane, what, output.nbytes, ends)

    def all_to_all(self, lane: Lane, message: torch.Tensor, what: str, ends: Ends = _NOTHING) -> Pending:
        """Starts an all-to-all: part i of uint8 ``[k * b]`` goes to peer i; the output holds one part from each peer."""
        output = torch.empty_like(message)
        start = partial(self._wires[lane].all_to_all, output, message)
        return self._start(start, output, "all_to_all", lane, what, output.nbytes, ends)

    def reduce_scatter(self, lane: Lane, elements: torch.Tensor, what: str, ends: Ends = _NOTHING) -> Pending:
        """Starts a summing reduce-scatter: floating ``[k * n]`` to ``[n]``, the sum of all ranks' parts for this rank.

        On gloo and MPI it is an all-to-all and a sum on arrival (`Wires.own_sums`).
        """
        wires, size = self._wires[lane], elements.numel() // len(self._ranks[lane[1]])
        if not wires.own_sums:
            parts = torch.empty_like(elements)
            start = partial(wires.all_to_all, parts.view(torch.uint8), elements.view(torch.uint8))
            then = lambda arrived: sum_of(arrived.view(-1, size))  # noqa: E731
            return self._start(start, parts, "reduce_scatter", lane, what, elements.nbytes, ends, then)
        output = elements.new_empty(size)
        start = partial(wires.reduce_scatter, output, elements)
        return self._start(start, output, "reduce_scatter", lane, what, elements.nbytes, ends)

    def exchange(self, lane: Lane, held: torch.Tensor, distance: int, what: str, ends: Ends = _NOTHING) -> Pending:
        """Starts a round of the algorithm ``doubling``.

        Rank i holds the messages of the ranks i, i + 1, .. i + distance - 1 (modulo k) in the first rows of ``held``,
        uint8 ``[k][b]``. It sends them, or as many as are missing, to rank i - distance, and receives as many from rank
        i + distance in the rows that follow.
        """
        ranks = len(self._ranks[lane[1]])
        own, rows = self._ranks[lane[1]].index(self._rank), min(distance, ranks - distance)
        sent, received = held[:rows].view(-1), held[distance : distance + rows].view(-1)
        source, target = (own + distance) % ranks, (own - distance) % ranks
        start = partial(self._wires[lane].exchange, received, sent, source, target)
        return self._start(start, held, "exchange", lane, what, sent.nbytes, ends)

    def broadcast(self, lane: Lane, message: torch.Tensor, root: int, what: str, ends: Ends = _NOTHING) -> Pending:
        """Starts a broadcast of uint8 ``[b]`` from the rank at coordinate ``root`` of the tier group, into all others'."""
        start = partial(self._wires[lane].broadcast, message, root)
        return self._start(start, message, "broadcast", lane, what, message.nbytes, ends)

    def gather(
        self,
        algorithm: Algorithm,
        lane: Lane,
        message: torch.Tensor,
        what: str,
        ends: Ends = _NOTHING,
        received: Callable[[Pending, torch.Tensor], torch.Tensor] = take,
        compare: Compare = _check,
    ) -> Generator[Pending, None, torch.Tensor]:
        """An all-gather as `all_gather`, by an algorithm; all give the same bytes.

        ``library`` is the library's: a ring in NCCL and RCCL for most sizes, whose latency grows with k. ``doubling`` is
        that of Bruck et al. (IEEE TPDS 8(11), 1997), recursive doubling for any k: every round doubles the messages that
        a rank holds, so ceil(log2 k) rounds do. ``pairs`` is one round, in which every rank sends its message to each
        peer. PCCL (arXiv 2504.18658) measures on Frontier where rings lose by latency. In all of them a rank receives
        k - 1 messages.

        With checksums, those of the messages follow by the same algorithm. ``doubling`` checks at its end: a message that
        changes on its way over other ranks is told from its first sender.

        Args:
            algorithm: The same on all ranks of the group.
            lane: Role and tier.
            message: uint8 ``[b]``.
            what: Describes the message, for errors.
            ends: Of the last round, without those of checksums.
            received: Waits for a round; its second argument is the buffer that the round sends from.
            compare: Takes the checksums, and the message for the current stream.

        Yields:
            Each round once it is started, `rounds` in all, and as many for checksums. Is resumed when the round has
            arrived.

        Returns:
            uint8 ``[k * b]``, coordinate order.

        Raises:
            HopError: By ``compare``.
        """
        if not self._checksum:
            return (yield from self._gather(algorithm, lane, message, what, ends, received))
        ranks = self._ranks[lane[1]]
        number = self._next(lane)
        sums = addressed(checksums(message, 1), number, ranks.index(self._rank), 0).view(-1).view(torch.uint8)
        gathered = yield from self._gather(algorithm, lane, message, what, ends, received)
        sent = yield from self._gather(algorithm, lane, sums, f"{what} (checksums)", _NOTHING, received)
        arrived = addressed(checksums(gathered, len(ranks)), number, None, 0)
        described = partial(self._describe, "all_gather", lane, what, gathered.nbytes)
        compare(Comparison(sent.view(torch.int64).view(-1, 2), arrived, ranks, number, described), gathered)
        return gathered

    def _gather(
        self,
        algorithm: Algorithm,
        lane: Lane,
        message: torch.Tensor,
        what: str,
        ends: Ends,
        received: Callable[[Pending, torch.Tensor], torch.Tensor],
    ) -> Generator[Pending, None, torch.Tensor]:
        """The rounds of one message."""
        ranks = self._ranks[lane[1]]
        if algorithm != "doubling":
            pairs = algorithm == "pairs"
            sent = message.repeat(len(ranks)) if pairs else message
            pending = (self.all_to_all if pairs else self.all_gather)(lane, sent, what, ends)
            yield pending
            return received(pending, sent)
        held = message.new_empty(len(ranks), message.numel())
        held[0] = message
        last = rounds(algorithm, len(ranks)) - 1
        for number in range(last + 1):
            pending = self.exchange(lane, held, 1 << number, what, ends if number == last else _NOTHING)
            yield pending
            received(pending, held)
        return held.roll(ranks.index(self._rank), 0).view(-1)

    def scatter(
        self,
        lane: Lane,
        message: torch.Tensor,
        what: str,
        ends: Ends = _NOTHING,
        received: Callable[[Pending, torch.Tensor], torch.Tensor] = take,
        compare: Compare = _check,
        *,
        summed: torch.dtype | None = None,
    ) -> Generator[Pending, None, torch.Tensor]:
        """A hop of a reduction: part i of a message goes to peer i.

        With checksums, those of the parts follow in a second all-to-all; and sums are made here, in float32, since a
        library that sums on its way has no message to check.

        Args:
            lane: Role and tier.
            message: uint8 ``[k * b]``.
            what: Describes it, for errors.
            ends: Of the payload's collective.
            received: As for `gather`.
            compare: As for `gather`.
            summed: Type of the elements if the parts are to be summed, as by `reduce_scatter`.

        Yields:
            The collective once it is started; with checksums also the second one.

        Returns:
            uint8 ``[k * b]``, the parts of all peers; or their sum, ``[b]``.

        Raises:
            HopError: By ``compare``.
        """
        if summed is not None and self._sums and not self._checksum:
            pending = self.reduce_scatter(lane, message.view(summed), what, ends)
            yield pending
            return received(pending, message).view(torch.uint8)
        ranks = self._ranks[lane[1]]
        own, number = ranks.index(self._rank), self._next(lane)
        if self._checksum:
            sums = addressed(checksums(message, len(ranks)), number, own, None).view(-1).view(torch.uint8)
        pending = self.all_to_all(lane, message, what, ends)
        yield pending
        parts = received(pending, message)
        if self._checksum:
            pending = self.all_to_all(lane, sums, f"{what} (checksums)")
            yield pending
            sent = received(pending, sums).view(torch.int64).view(-1, 2)
            arrived = addressed(checksums(parts, len(ranks)), number, None, own)
            described = partial(self._describe, "all_to_all", lane, what, parts.nbytes)
            compare(Comparison(sent, arrived, ranks, number, described), parts)
        if summed is None:
            return parts
        elements = parts.view(summed)
        return sum_of(elements.view(len(ranks), elements.numel() // len(ranks))).view(torch.uint8)

    def spread(
        self,
        lane: Lane,
        message: torch.Tensor,
        root: int,
        what: str,
        ends: Ends = _NOTHING,
        received: Callable[[Pending, torch.Tensor], torch.Tensor] = take,
        compare: Compare = _check,
    ) -> Generator[Pending, None, torch.Tensor]:
        """A hop of a broadcast: the message at coordinate ``root`` goes to all peers. With checksums its own follows.

        Args, yields and raises as `scatter`; ``message`` is uint8 ``[b]``, filled on all ranks but the root.
        """
        pending = self.broadcast(lane, message, root, what, ends)
        yield pending
        message = received(pending, message)
        if self._checksum:
            number, ranks = self._next(lane), self._ranks[lane[1]]
            arrived = addressed(checksums(message, 1), number, root, 0)
            pending = self.broadcast(lane, arrived.clone().view(-1).view(torch.uint8), root, f"{what} (checksums)")
            yield pending
            sent = received(pending, message).view(torch.int64).view(-1, 2)
            described = partial(self._describe, "broadcast", lane, what, message.nbytes)
            compare(Comparison(sent, arrived, [ranks[root]], number, described), message)
        return message

    def _next(self, lane: Lane) -> int:
        """The number of the next message of a lane, the same on all its ranks."""
        self._messages[lane] += 1
        return self._messages[lane]

    def _start(
        self,
        start: Callable[[], Work],
        output: torch.Tensor,
        kind: Collective,
        lane: Lane,
        what: str,
        size: int,
        ends: Ends,
        then: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Pending:
        described = partial(self._describe, kind, lane, what, size)
        with record_function(f"hzero: {kind} {lane[1]}: {what}"):
            work = start()
        return Pending(work, output, described, ends, then, self._hops[lane])

    def _describe(self, kind: Collective, lane: Lane, what: str, size: int) -> str:
        tier = lane[1]
        ranks = self._ranks[tier]
        shown = str(ranks) if len(ranks) <= 16 else f"[{ranks[0]}, {ranks[1]}, ... {len(ranks)} ranks]"
        return f"hzero: {kind.replace('_', '-')} of {what} on tier {tier!r} (rank {self._rank} among {shown}, {size:,} bytes)"
