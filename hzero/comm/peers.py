"""Peers: the ranks of each lane, their transport, and the error that names a rank that does not arrive."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hzero.codecs.formats import PAYLOAD_FORMAT
from hzero.comm.lanes import Lanes
from hzero.comm.watchdog import LaneHops, MissingPeerError, shared_watchdog
from hzero.comm.wires import STAGE, Lane, TorchWires, Wires, process_group, world_timeout
from hzero.config import TransportName
from hzero.errors import ConfigError, of_every_rank, some
from hzero.program.shards import ShardPlan

#: Key of the payload format among the settings that ranks compare.
_FORMAT = "payload format"


@dataclass
class Peers:
    """The ranks of a lane.

    Attributes:
        wires: Transport of their messages: `TorchWires` or `hzero.comm.mpi_wires.MpiWires`.
        ranks: World ranks in the order of coordinates.
        coordinate: Coordinate of this rank.
        hops: Counts the hops of the lane.
        messages: Messages with checksums so far, the same on all ranks.
    """

    wires: Wires
    ranks: Sequence[int]
    coordinate: int
    hops: LaneHops
    messages: int = 0

    @classmethod
    def of(cls, lane: Lane, wires: Wires, ranks: Sequence[int], timeout: timedelta) -> Peers:
        """Returns the peers of a lane. All users of a lane in this process share its hop counts."""
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
    lanes: Lanes | None = None,
) -> dict[Lane, Peers]:
    """Returns the peers of this rank: for each channel, one group per tier, innermost first; none for a tier of size 1.

    Every rank makes only its groups. The number of calls and the memory do not depend on the world size.

    Args:
        plan: The shard plan of this rank, which also sets the transport.
        timeout: Maximum wait for one hop; None uses the world's timeout.
        channels: Names with separate communicators.
        ranks: World rank of each rank of the plan; None if they are the same.
        backend: Backend of process groups; None uses the world's.
        lanes: Lanes of the hops, which order collectives on a device; None: threads.
    """
    timeout, made = timeout or world_timeout(), dict[Lane, Peers]()
    for tier in plan.grid.crossed:
        members = [rank if ranks is None else ranks[rank] for rank in plan.tier_group(tier)]
        for channel in channels:
            lane = channel, tier
            wires = wires_of(plan.transport, lane, members, timeout, backend, lanes)
            made[lane] = Peers.of(lane, wires, members, timeout)
    return made


def wires_of(
    transport: TransportName,
    lane: Lane,
    ranks: Sequence[int],
    timeout: timedelta,
    backend: str | None = None,
    lanes: Lanes | None = None,
) -> Wires:
    """Returns the wires of a lane for ``ranks``, in this order; made at the first call. All its ranks must make the same call.

    Args:
        transport: ``torch`` makes a process group, ``mpi`` an MPI communicator.
        lane: Name of the communicator.
        ranks: World ranks.
        timeout: Maximum wait for one collective.
        backend: Backend of a process group; None uses the world's.
        lanes: Lanes of the hops, which order collectives on a device; None: threads.

    Raises:
        ConfigError: MPI cannot be used.
        MissingPeerError: Not all ranks arrived to make an MPI communicator.
    """
    if transport == "mpi":
        from hzero.comm.mpi_wires import communicator_of

        return communicator_of(lane, ranks, timeout)
    group = process_group(lane, ranks, timeout, backend)
    on_threads = lanes is None or lanes.device is None
    return TorchWires(group, timeout, None if lanes is None else lanes.in_order, in_pairs=on_threads)


def unused_name(
    name: str, failures: int, group: dist.ProcessGroup | None, ranks: Sequence[int], settings: Mapping[str, Any]
) -> str:
    """Returns a name for new lanes that is not reused after a failure: it ends with the largest failure count of a rank.

    If one rank failed alone, its peers may have started a hop that it has not. On the same lane, its next hop would be paired
    with that one. The ranks also compare their payload formats and settings here, before the first message: with other settings,
    messages of equal size can have another meaning. Collective over the ranks.

    Args:
        name: Prefix of the name.
        failures: Number of failed chains on this rank.
        group: Process group of the ranks.
        ranks: World ranks.
        settings: The user's settings of the lanes by key, also nested.

    Raises:
        ConfigError: A rank has another payload format or other settings.
        HopError: A rank does not respond.
    """
    own = {_FORMAT: str(PAYLOAD_FORMAT), **dict(_flat("", settings))}
    try:  # first few bytes, since there may be many ranks
        every = of_every_rank((failures, hashlib.sha256(repr(own).encode()).digest()), group)
        if len({digest for _, digest in every}) > 1:
            _refuse_difference(ranks, of_every_rank(own, group))
    except RuntimeError as error:
        peers = some([str(rank) for rank in ranks], 8)
        what = f"hzero: rank {dist.get_rank()} wants to make new wires with ranks {peers}: "
        raise MissingPeerError.of(what, error) from error
    most = max(every)[0]
    return f"{name} #{most}" if most else name


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        name = f"{prefix}.{key}".removeprefix(".")
        yield from _flat(name, value) if isinstance(value, Mapping) else [(name, repr(value))]


def _refuse_difference(ranks: Sequence[int], every: Sequence[Mapping[str, str]]) -> None:
    """Raises `ConfigError` with the first key whose values differ; the same on all ranks."""
    for key in dict.fromkeys(key for one in every for key in one):
        expected, *_ = values = [one.get(key, "none") for one in every]
        if found := [f"{value} on rank {rank}" for value, rank in zip(values, ranks) if value != expected]:
            advice = ": install the same hzero on all ranks" if key == _FORMAT else ""
            raise ConfigError(f"{key}: found {some(found, 8)}; expected {expected}, as on rank {ranks[0]}{advice}")
