"""Cut messages: those of codec ``mpc`` on their way, without what their records leave unused.

Messages have a fixed size everywhere else, so all ranks know it. What codec ``mpc`` needs depends on the data; so before a
hop the ranks of its tier group tell each other what their records use, 8 bytes per record, and all send as much as the one
that needs most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from hzero.codecs import Codec, mpc
from hzero.collectives.bucket import Bucket
from hzero.collectives.checksum import Comparison
from hzero.collectives.errors import HopError
from hzero.collectives.pipeline import Hops
from hzero.collectives.transport import Pending, Transport
from hzero.config import CodecConfig
from hzero.sharding.plan import Hop, ShardPlan


def exchanges(config: CodecConfig) -> int:
    """Number of messages before each one of a codec: 1 where its length has to be told."""
    return int(config.codec == "mpc")


def checked(lengths: torch.Tensor, size: int, what: str) -> list[int]:
    """Lengths of records from their bytes; the host waits for them.

    Args:
        lengths: uint8 or int64, 8 bytes for each record.
        size: Bytes of a whole record.
        what: Describes the message.

    Raises:
        HopError: One is none that codec ``mpc`` writes.
    """
    found: list[int] = lengths.view(torch.int64).tolist()
    for length in found:
        if not 0 < length <= size or length % 16:
            raise HopError(
                f"hzero: {what} in codec mpc: found a record of {length} bytes, expected a multiple of 16 to {size}"
            )
    return found


class Cut(NamedTuple):
    """What the messages of one hop use. Its parts are messages to, or from, one peer each, alike but for the data.

    Attributes:
        sizes: Bytes of each record of a part.
        own: Bytes that each record uses, of each part that this rank sends.
        arriving: The same of each part that it receives.
        length: Bytes of every part on the wire.
    """

    sizes: Sequence[int] = ()
    own: Sequence[Sequence[int]] = ()
    arriving: Sequence[Sequence[int]] = ()
    length: int = 0

    def of(self, message: torch.Tensor) -> torch.Tensor:
        """What is sent: a message of as many bytes on all ranks; with other codecs the message itself."""
        if not self.sizes:
            return message
        parts = message.new_zeros(len(self.own), self.length)
        for part, whole, used in zip(parts, message.view(len(self.own), -1), self.own):
            part[: sum(used)] = mpc.cut(whole, self.sizes, used)
        return parts.view(-1)

    def whole(self, arrived: torch.Tensor) -> torch.Tensor:
        """The message that has arrived, its records of their sizes."""
        if not self.sizes:
            return arrived
        parts = arrived.view(len(self.arriving), self.length)
        return torch.cat([mpc.whole(part, self.sizes, used) for part, used in zip(parts, self.arriving)])


class Waits(Protocol):
    """What collectives do with a hop that is under way."""

    @property
    def plan(self) -> ShardPlan:
        """The shard plan of this rank."""

    def received(self, pending: Pending, sent: torch.Tensor) -> torch.Tensor:
        """What a hop has received."""

    def compare(self, comparison: Comparison, message: torch.Tensor) -> None:
        """Compares checksums."""


def cut_of(
    tiered: Waits,
    transport: Transport,
    hop: Hop,
    bucket: Bucket,
    message: torch.Tensor,
    codec: Codec,
    rows: int,
    *,
    parts: int = 1,
    root: int | None = None,
) -> Hops[Cut]:
    """Exchanges what the records of a hop's messages use, if its codec is ``mpc``; the host waits for it on a device too.

    Args:
        tiered: The collectives whose hop it is.
        transport: Its transport.
        hop: The hop.
        bucket: Of one tensor.
        message: uint8, of ``parts`` parts.
        codec: Codec of the message.
        rows: Records of a part.
        parts: 1 where all peers get the same, or one for each of them.
        root: Coordinate of the peer that alone sends; None: all do.

    Yields:
        The exchange, once it is started.

    Raises:
        HopError: A length is none that the codec writes.
    """
    if not exchanges(hop.codec):
        return Cut()
    sizes = [codec.message_bytes(bucket.chunks, 1, bucket.dtype.itemsize)] * rows
    place = getattr(tiered.plan.grid.coordinates(tiered.plan.rank), hop.tier)
    what = f"{bucket.label} in codec mpc (lengths)"
    lengths = message.new_zeros(8 * parts * rows)
    if root in (None, place):
        lengths.copy_(mpc.lengths(message, sizes * parts).view(torch.uint8))
    how: dict[str, Any] = {"received": tiered.received, "compare": tiered.compare}
    lane = bucket.lane(hop.tier)
    if root is None:
        told = yield from transport.gather("library", lane, lengths, what, **how)
    else:
        told = yield from transport.spread(lane, lengths, root, what, **how)
    every = [
        [checked(part, sizes[0], bucket.label) for part in sender]
        for sender in told.view(torch.int64).view(-1, parts, rows)
    ]
    length = max(sum(part) for sender in every for part in sender)
    arriving = [sender[place if parts > 1 else 0] for sender in every]
    return Cut(sizes, every[0 if root is not None else place], arriving, length)
