"""Transport: the wires of each lane, and the collectives that hops are made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch.profiler import record_function

from hzero.comm.checksum import CHECKSUM_BYTES, Comparison, signed, verified
from hzero.comm.lanes import DeviceStreams
from hzero.comm.watchdog import DisagreementError, HopError, LaneHops, MissingPeerError, shared_watchdog
from hzero.comm.wires import STAGE, Lane, TorchWires, Work, shared_groups, world_timeout
from hzero.config import Algorithm, TransportName
from hzero.plan.program import Kind
from hzero.plan.shards import ShardPlan
from hzero.validation import some

if TYPE_CHECKING:
    from hzero.comm.mpi_wires import MpiWires

#: What carries the messages of one group of ranks.
Wires: TypeAlias = "TorchWires | MpiWires"


class Pending:
    """A collective under way.

    Args:
        work: What is under way.
        buffers: What it reads and fills, the output last.
        what: Describes it, for errors.
        lane: The hops of its lane.
        done: Called when it has been waited for.
        then: Makes what `wait` returns of the output.
        passed: Asks whether the device is past it, once it has been waited for.
    """

    def __init__(
        self,
        work: Work,
        buffers: Sequence[torch.Tensor],
        what: Callable[[], str],
        lane: LaneHops | None = None,
        done: Callable[[], None] = lambda: None,
        then: Callable[[torch.Tensor], torch.Tensor] = lambda output: output,
        passed: Callable[[], bool] = lambda: True,
    ) -> None:
        self.buffers = buffers
        self._work: Work | None = work
        self._what, self._lane, self._done, self._then = what, lane, done, then
        self._number = lane.start(what, buffers[-1].nbytes, passed) if lane is not None else 0
        self._started = time.monotonic()

    def __str__(self) -> str:
        return self._what()

    def end(self) -> None:
        """Waits for the collective; on a device the current stream does.

        Raises:
            HopError: The collective failed, a peer is gone or the group's timeout passed.
        """
        if self._work is None:
            return
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
        self._done()

    def wait(self) -> torch.Tensor:
        """Waits as `end` does, and returns what has arrived."""
        self.end()
        return self._then(self.buffers[-1])


def wires_of(
    transport: TransportName,
    lane: Lane,
    ranks: Sequence[int],
    timeout: timedelta,
    backend: str | None = None,
    streams: DeviceStreams | None = None,
) -> Wires:
    """The wires of a lane between ranks of the world, in this order; made at the first call. All its ranks must call alike.

    Args:
        transport: ``torch`` makes a process group, ``mpi`` a communicator of MPI.
        lane: What they are for.
        ranks: Of the world.
        timeout: Longest wait for one collective.
        backend: Of a process group; None takes the world's.
        streams: Order collectives on a device.

    Raises:
        ConfigError: MPI cannot be used.
        MissingPeerError: Not all ranks have come to make a communicator of MPI.
    """
    if transport == "mpi":
        from hzero.comm.mpi_wires import shared_communicators

        return shared_communicators.get(lane, ranks, timeout)
    group = shared_groups.get(lane, list(ranks), timeout, backend)
    return TorchWires(group, timeout) if streams is None else TorchWires(group, timeout, streams.collective)


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
            told = torch.empty(8 * len(ranks), dtype=torch.uint8)
            wires = wires_of(transport, ("failures", "node"), ranks, timeout)
            wires.all_gather(told, torch.tensor([own]).view(torch.uint8)).wait()
            return int(told.view(torch.int64).max())
        every = [own] * len(ranks)
        dist.all_gather_object(every, own, group=group)
        return max(every)
    except HopError:
        raise
    except RuntimeError as error:
        peers = some([str(rank) for rank in ranks], 8)
        what = f"hzero: rank {dist.get_rank()} wants to make new wires with ranks {peers}: "
        raise MissingPeerError.of(what, error) from error


class _Group:
    """The ranks of a lane.

    Attributes:
        wires: Their wires.
        ranks: Of the world, in the order of coordinates.
        own: Coordinate of this rank.
        lane: The hops of the lane.
        messages: Messages so far, the same on all ranks.
    """

    def __init__(self, wires: Wires, ranks: Sequence[int], own: int, lane: LaneHops) -> None:
        self.wires, self.ranks, self.own, self.lane, self.messages = wires, ranks, own, lane, 0


class Transport:
    """Tier groups over torch.distributed or MPI, and collectives on them.

    Every rank makes only its own groups: for each channel one of each tier, innermost first, and for a tier of size 1
    none. The number of calls and the memory do not depend on the size of the world.

    Args:
        plan: The shard plan of this rank; it says which transport.
        timeout: Longest wait for one hop; None takes the world's timeout.
        channels: Names of what has communicators of its own.
        streams: Order collectives on a device.
        ranks: Rank in the world of each rank of the plan; None where they are the same.
        backend: Of process groups; None takes the world's.
        sums: Whether sums with codec ``none`` may be the library's, in its order and in the type of the elements. Otherwise
            they are made here, in float32 and in peer order, and rounded once.

    Attributes:
        unread: Checksums that nobody has compared, on an asynchronous device, where that would make the host wait. None: each
            is compared when it arrives.
    """

    def __init__(
        self,
        plan: ShardPlan,
        timeout: timedelta | None = None,
        *,
        channels: Sequence[str] = (STAGE,),
        streams: DeviceStreams | None = None,
        ranks: Sequence[int] | None = None,
        backend: str | None = None,
        sums: bool = True,
    ) -> None:
        self._timeout = timeout or world_timeout()
        self._everyone = ranks if ranks is not None else range(plan.grid.world_size)
        self._rank = self._everyone[plan.rank]
        self._checksum, self._sums = plan.checksum, sums
        self.unread: list[Comparison] | None = None
        self._groups: dict[Lane, _Group] = {}
        for tier in plan.grid.crossed:
            members = [self._everyone[rank] for rank in plan.tier_group(tier)]
            for channel in channels:
                lane = channel, tier
                wires = wires_of(plan.transport, lane, members, self._timeout, backend, streams)
                self._groups[lane] = self._group(lane, wires, members)

    def _group(self, lane: Lane, wires: Wires, ranks: Sequence[int]) -> _Group:
        hops = shared_watchdog().lane(lane, ranks, self._timeout.total_seconds())
        return _Group(wires, ranks, ranks.index(self._rank), hops)

    def direction(self, lane: Lane, wires: Wires, source: int, target: int) -> None:
        """Makes a lane of messages from one rank of the plan to another: each direction has its own.

        In a ring every rank sends before it receives.
        """
        if lane not in self._groups:
            self._groups[lane] = self._group(lane, wires, [self._everyone[source], self._everyone[target]])

    def prepare(self, lane: Lane, kind: Kind, size: int, what: str, **how: Any) -> Collective:
        """A collective over the ranks of a lane, to be started any number of times; arguments as of `Collective`."""
        return Collective(self, lane, kind, size, what, **how)

    def start(self, lane: Lane, kind: Kind, message: torch.Tensor, what: str, **how: Any) -> Pending:
        """A collective that is made once; arguments as of `prepare`, ``message`` as of `Collective.start`."""
        return self.prepare(lane, kind, message.nbytes, what, **how).start(message)


class Collective:
    """A collective over the k ranks of a lane, with all that does not change from one start to the next.

    ``all_gather`` brings uint8 ``[b]`` of every rank to ``[k * b]``, in the order of coordinates. ``all_to_all`` sends part i
    of ``[k * b]`` to rank i, and part i of what arrives is of rank i. ``reduce_scatter`` leaves the sum of all ranks' parts
    for this rank, ``[b]``. ``broadcast`` fills ``[b]`` with that of one rank, ``send`` and ``receive`` with that of a peer.

    With checksums each part is followed by 16 bytes. Then sums are made here, in float32, since a library that sums on its
    way has no message to check. On gloo and MPI they are always made here (`TorchWires.library_sums` is False).

    Of an all-gather ``library`` is the library's algorithm: a ring in NCCL and RCCL for most sizes, whose latency grows
    with k. ``doubling`` is that of Bruck et al. (IEEE TPDS 8(11), 1997), recursive doubling for any k: every round doubles
    the messages that a rank holds, so ceil(log2 k) rounds do. ``pairs`` is one round, in which every rank sends its message
    to each peer. PCCL (arXiv 2504.18658) measures on Frontier where rings lose by latency.

    Args:
        transport: Has the lane.
        lane: The lane.
        kind: The collective, the same on all ranks.
        size: Bytes of the message.
        what: Describes the message, for errors.
        algorithm: Of an all-gather, the same on all ranks.
        root: Coordinate of the rank that broadcasts; rank of the group that sends or receives.
        dtype: Type of the elements that are summed.

    Attributes:
        output_bytes: Bytes of the buffer that it fills; 0 where it fills the message itself.
        checksum: Whether its messages have checksums.
    """

    def __init__(
        self,
        transport: Transport,
        lane: Lane,
        kind: Kind,
        size: int,
        what: str,
        *,
        algorithm: Algorithm = "library",
        root: int = 0,
        dtype: torch.dtype = torch.uint8,
    ) -> None:
        self._transport, self._group = transport, transport._groups[lane]
        self._lane, self._kind, self._size, self._what = lane, kind, size, what
        self._algorithm, self._root, self._dtype = algorithm, root, dtype
        self.checksum = transport._checksum
        self._label = f"hzero: {kind} {lane[1]}: {what}"
        ranks = len(self._group.ranks)
        self._parts = ranks if kind in ("all_to_all", "reduce_scatter") else 1
        self._sums = kind == "reduce_scatter"
        library_sums = self._group.wires.library_sums and transport._sums and not self.checksum
        self._library_sums = self._sums and library_sums
        in_flight = size + (CHECKSUM_BYTES * self._parts if self.checksum else 0)
        self.output_bytes = in_flight
        if kind == "all_gather":
            self.output_bytes = in_flight * ranks
        elif kind in ("broadcast", "send", "receive"):
            self.output_bytes = 0
        elif self._library_sums:
            self.output_bytes = size // ranks

    def __str__(self) -> str:
        ranks, own, what = self._group.ranks, self._group.own, self._what
        if self._kind in ("send", "receive"):
            way = f"{'to' if self._kind == 'send' else 'from'} rank {ranks[1 - own]}"
            return f"hzero: {what} {way} (rank {ranks[own]}, {self._size:,} bytes)"
        shown = str(ranks) if len(ranks) <= 16 else f"[{ranks[0]}, {ranks[1]}, ... {len(ranks)} ranks]"
        where = f"on tier {self._lane[1]!r} (rank {ranks[own]} among {shown}, {self._size:,} bytes)"
        return f"hzero: {self._kind.replace('_', '-')} of {what} {where}"

    def start(
        self,
        message: torch.Tensor,
        output: torch.Tensor | None = None,
        done: Callable[[], None] = lambda: None,
        passed: Callable[[], bool] = lambda: True,
    ) -> Pending:
        """Starts the collective.

        Args:
            message: uint8, contiguous; of a rank that only receives, what is filled.
            output: uint8 ``[output_bytes]``, which belongs to the collective until its result has been read; None makes one.
            done: Called when the collective has been waited for.
            passed: As for `Pending`.

        Returns:
            The collective; of several rounds the last one, once the others have ended.

        Raises:
            HopError: It cannot be started, since peers are gone.
        """
        group = self._group
        if output is None and self.output_bytes:
            output = message.new_empty(self.output_bytes)
        then: Callable[[torch.Tensor], torch.Tensor] = lambda output: output  # noqa: E731
        try:
            with record_function(self._label):
                if self.checksum:
                    group.messages += 1
                    message = signed(message, self._parts, group.messages, group.own)
                    then = partial(self._verified, group.messages)
                elif self._sums and not self._library_sums:
                    then = self._summed
                output = message if output is None else output
                buffers: tuple[torch.Tensor, ...] = message, output
                if self._algorithm == "doubling" and self._kind == "all_gather":
                    work, held = self._doubling(message, output)
                    buffers, arrived = (held,), then
                    then = lambda held: arrived(held.roll(group.own, 0).view(-1))  # noqa: E731
                else:
                    work = self._work(message, output)
                return Pending(work, buffers, self.__str__, group.lane, done, then, passed)
        except HopError:  # of a round
            raise
        except RuntimeError as error:  # gloo has closed the pair, after a message that did not come
            raise MissingPeerError.of(f"{self} cannot start: ", error) from error

    def _work(self, message: torch.Tensor, output: torch.Tensor) -> Work:
        wires, kind = self._group.wires, self._kind
        if kind == "broadcast":
            return wires.broadcast(output, self._root)
        if kind in ("send", "receive"):
            return wires.message(output, self._root, sends=kind == "send")
        if self._library_sums:
            return wires.reduce_scatter(output.view(self._dtype), message.view(self._dtype))  # type: ignore[union-attr]
        if kind != "all_gather":
            return wires.all_to_all(output, message)
        if self._algorithm == "pairs":
            return wires.all_to_all(output, message.repeat(len(self._group.ranks)))
        return wires.all_gather(output, message)

    def _doubling(self, message: torch.Tensor, output: torch.Tensor) -> tuple[Work, torch.Tensor]:
        """Makes all rounds but the last one, which it starts. Rank i then holds the messages of i, i + 1, .. (modulo k).

        It has those of the ranks i to i + distance - 1 in the first rows of what it holds. In a round it sends them, or as many
        as are missing, to rank i - distance, and receives as many from rank i + distance in the rows that follow.
        """
        group, ranks = self._group, len(self._group.ranks)
        held = output.view(ranks, -1)
        held[0] = message
        distance = 1
        while True:
            rows = min(distance, ranks - distance)
            sent, received = held[:rows].view(-1), held[distance : distance + rows].view(-1)
            peers = (group.own + distance) % ranks, (group.own - distance) % ranks
            work = group.wires.exchange(received, sent, *peers)
            if 2 * distance >= ranks:
                return work, held
            Pending(work, (held,), self.__str__, group.lane).end()
            distance *= 2

    def _summed(self, output: torch.Tensor) -> torch.Tensor:
        """The sum of ``[k][n]`` over ``k`` in float32, rounded once to the type of the elements, which are overwritten."""
        first, *others = output.view(self._dtype).view(len(self._group.ranks), -1)
        if len(others) == 1:  # one addition rounds once in any type
            return first.add_(others[0]).view(torch.uint8)
        total = first.to(torch.float32)
        for other in others:
            total.add_(other)
        return first.copy_(total).view(torch.uint8)

    def _verified(self, number: int, output: torch.Tensor) -> torch.Tensor:
        """What has arrived, without checksums, and summed; they are compared, or kept to be."""
        group, unread = self._group, self._transport.unread
        alone = {"broadcast": self._root, "send": group.own, "receive": 1 - group.own}.get(self._kind)
        senders = list(range(len(group.ranks))) if alone is None else [alone]
        receiver = group.own if self._parts > 1 else 0
        message, comparison = verified(output.view(-1), senders, number, receiver, group.ranks, self.__str__)
        if unread is None:
            comparison.check()
        else:
            unread.append(comparison)
        return self._summed(message) if self._sums else message
