"""Failures of ranks: what all of a group know of them before they make new wires."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from hzero.collectives.errors import HopError, MissingPeerError
from hzero.collectives.mpi_wires import shared_communicators
from hzero.config import TransportName
from hzero.validation import some


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
