"""Peers: the ranks of each lane, what carries messages between them, and who is to blame if one does not come."""

from __future__ import annotations

import contextlib
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hzero.comm.watchdog import shared_watchdog
from hzero.comm.wires import STAGE, Lane, TorchWires, process_group, world_timeout
from hzero.config import TransportName
from hzero.plan.shards import ShardPlan
from hzero.validation import PeerError, PlainError, some

if TYPE_CHECKING:
    from hzero.comm.lanes import DeviceStreams


@dataclass
class LaneHops:
    """Hops of this rank on one lane, counted where they start and where they have been waited for.

    Attributes:
        name: Of the lane and its ranks, the same on all of them.
        ranks: Of the world.
        timeout_s: Longest wait for one hop.
        started: Hops that this rank has started; the same on all ranks once all have come.
        ended: Those that it has waited for. On a device a wait does not block, so this says little there.
        since: When the last one started.
        size: Its bytes.
        what: Describes it.
        passed: Says whether the device is past it; None: a wait says so.
    """

    name: str
    ranks: Sequence[int]
    timeout_s: float
    started: int = 0
    ended: int = 0
    since: float = 0.0
    size: int = 0
    what: Callable[[], str] = str
    passed: Callable[[], bool] | None = None

    def waited_s(self) -> float:
        """Seconds since the start of the last hop, or 0 if it has ended."""
        waited_s, waits = time.monotonic() - self.since, self.started > self.ended
        if self.passed is not None and not waits and waited_s > self.timeout_s / 2:  # earlier it may capture a graph
            with contextlib.suppress(RuntimeError):  # of a device that has failed
                waits = not self.passed()
        return waited_s if waits else 0.0


@dataclass
class Peers:
    """The ranks of a lane.

    Attributes:
        wires: What carries their messages: `TorchWires`, or `hzero.comm.mpi_wires.MpiWires` with the same methods.
        ranks: Of the world, in the order of coordinates.
        coordinate: That of this rank.
        hops: Counts the hops of the lane.
        messages: Messages with checksums so far, the same on all ranks.
    """

    wires: Any
    ranks: Sequence[int]
    coordinate: int
    hops: LaneHops
    messages: int = 0

    @classmethod
    def of(cls, lane: Lane, wires: Any, ranks: Sequence[int], timeout: timedelta) -> Peers:
        """The peers of a lane. All users of a lane in this process count its hops together."""
        name = f"{' '.join(lane)} {zlib.crc32(repr([*ranks]).encode())}"
        hops = shared_watchdog().lanes.setdefault(name, LaneHops(name, ranks, timeout.total_seconds()))
        return cls(wires, ranks, ranks.index(dist.get_rank()), hops)


def peers_of(
    plan: ShardPlan,
    timeout: timedelta | None = None,
    *,
    channels: Sequence[str] = (STAGE,),
    ranks: Sequence[int] | None = None,
    backend: str | None = None,
    streams: DeviceStreams | None = None,
) -> dict[Lane, Peers]:
    """The peers of this rank: for each channel one group of each tier, innermost first; none for a tier of size 1.

    Every rank makes only its own groups, so the number of calls and the memory do not depend on the size of the world.

    Args:
        plan: The shard plan of this rank; it says which transport.
        timeout: Longest wait for one hop; None takes the world's timeout.
        channels: Names of what has communicators of its own.
        ranks: Rank in the world of each rank of the plan; None where they are the same.
        backend: Of process groups; None takes the world's.
        streams: Order collectives on a device.
    """
    timeout, made = timeout or world_timeout(), dict[Lane, Peers]()
    for tier in plan.grid.crossed:
        members = [rank if ranks is None else ranks[rank] for rank in plan.tier_group(tier)]
        for channel in channels:
            lane = channel, tier
            wires = wires_of(plan.transport, lane, members, timeout, backend, streams)
            made[lane] = Peers.of(lane, wires, members, timeout)
    return made


def wires_of(
    transport: TransportName,
    lane: Lane,
    ranks: Sequence[int],
    timeout: timedelta,
    backend: str | None = None,
    streams: DeviceStreams | None = None,
) -> Any:
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
        from hzero.comm.mpi_wires import communicator_of

        return communicator_of(lane, ranks, timeout)
    group = process_group(lane, ranks, timeout, backend)
    strict = streams is not None and streams.order == "strict"
    return TorchWires(group, timeout, streams.collective if strict else None)  # type: ignore[union-attr]


def unused_name(name: str, failures: int, group: dist.ProcessGroup | None, ranks: Sequence[int]) -> str:
    """A name for new lanes, which ends with the most chains that have failed on a rank: none is used again after a failure.

    A rank that has failed alone may not have started a hop that its peers have, and its next one would be paired with it.
    Collective over the ranks.

    Args:
        name: How it begins.
        failures: Failed chains of this rank.
        group: Of the ranks.
        ranks: Of the world.

    Raises:
        HopError: A rank does not answer.
    """
    every = [failures] * len(ranks)
    try:
        dist.all_gather_object(every, failures, group=group)
    except RuntimeError as error:
        peers = some([str(rank) for rank in ranks], 8)
        what = f"hzero: rank {dist.get_rank()} wants to make new wires with ranks {peers}: "
        raise MissingPeerError.of(what, error) from error
    return f"{name} #{max(every)}" if any(every) else name


# ---- errors -----------------------------------------------------------------------------------------------------------


class HopError(PlainError):
    """A hop failed, or a message arrived changed. It names the collective, its payload, tier and ranks."""


class MissingPeerError(HopError, PeerError):
    """A collective failed or timed out since peers are gone or late. The message also says who did not come."""

    @classmethod
    def of(
        cls, what: str, error: Exception | None = None, lane: LaneHops | None = None, number: int = 0
    ) -> MissingPeerError:
        """The error of a collective that has failed.

        Args:
            what: The collective, how it ended, and a colon, before who is missing.
            error: What the library says of it.
            lane: As for `Watchdog.missing`.
            number: As for `Watchdog.missing`.
        """
        ranks, text = shared_watchdog().missing(lane, number)
        said = f" ({str(error).partition(chr(10))[0]})" if error is not None else ""
        return cls(f"{what}{text}{said}", ranks)


@contextlib.contextmanager
def blaming() -> Iterator[None]:
    """Turns an error of a collective outside hops, such as DeepSpeed's all-reduce of the norm, into one that names who.

    Raises:
        MissingPeerError: A collective failed or timed out.
    """
    try:
        yield
    except RuntimeError as error:
        of_group = isinstance(error, dist.DistError) or "/gloo/" in str(error)
        if isinstance(error, PeerError) or not of_group or dist.group.WORLD is None:
            raise
        frames = traceback.extract_tb(error.__traceback__)
        script = [frame for frame in frames if "/torch/" not in frame.filename and "/deepspeed/" not in frame.filename]
        place = f"{script[-1].filename}:{script[-1].lineno} {script[-1].name}"
        raise MissingPeerError.of(f"hzero: rank {dist.get_rank()}, a collective at {place}: ", error) from error
