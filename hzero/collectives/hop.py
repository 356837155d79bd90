"""One hop: a payload crosses a tier in that tier's codec.

A payload in codec ``exp`` has a fixed size, which some blocks do not fit. Where the host starts and ends hops, such a hop is
announced twice: a rank that has lost a block sends a message whose blocks are all marked as lost, so that every rank of
the tier group sees it, and then all send what they have once more, in codec ``none``.

Messages of codec ``mpc`` are cut on their way: what they need depends on the data. So before a hop the ranks of its tier group
tell each other what their records use, 8 bytes per record, and all send as much as the one that needs most.

Codecs ``exp`` and ``mpc`` give the bits of codec ``none`` in fewer bytes. What a reduction sums stays in codec ``none`` in
memory, and so in the type that codec ``none`` would send. A hop encodes it, moves it as any other payload, decodes it, and
sums it in float32 and in peer order, as a hop with codec ``none`` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch

from hzero.codecs import Codec, mpc
from hzero.collectives.checksum import Comparison
from hzero.collectives.errors import HopError
from hzero.collectives.pipeline import Hops, Pipeline
from hzero.collectives.transport import NOTHING_SENT, Ends, Pending, Transport, rounds, sum_of
from hzero.collectives.wires import Lane
from hzero.config import LOSSLESS, PLAIN, Algorithm, CodecConfig, Tier
from hzero.sharding.plan import Hop, ShardPlan

T = TypeVar("T")
#: A payload, uint8, and its codec.
Payload: TypeAlias = tuple[torch.Tensor, Codec]


@dataclass(frozen=True)
class Bucket:
    """Description of the tensors that a chain moves.

    Attributes:
        keys: One stable id per tensor (DeepSpeed's ``ds_id``), by which residuals are kept.
        chunks: Elements of one shard of each tensor: its size over the world, rounded up.
        dtype: Type of the decoded elements; also their type on the wire under codec ``none``.
        role: The kind of state; of a `Communicator`'s messages the operation.
        channel: First part of the names of its lanes; "" takes the role.
        name: Describes the tensors in messages; "" takes role and keys.
    """

    keys: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: torch.dtype
    role: str
    channel: str = ""
    name: str = ""

    @functools.cached_property
    def label(self) -> str:
        """Name of the bucket in an error message."""
        return self.name or f"{self.role} of {len(self.keys)} parameters (ids {self.keys[0]}..{self.keys[-1]})"

    def lane(self, tier: Tier) -> Lane:
        """The lane of its hops on a tier."""
        return self.channel or self.role, tier


def in_buckets(items: Iterable[tuple[T, int]], limit: int) -> Iterator[list[T]]:
    """Cuts ``(item, elements)`` pairs into lists of at most ``limit`` elements, at least one item each."""
    bucket: list[T] = []
    filled = 0
    for item, elements in items:
        if bucket and filled + elements > limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += elements
    if bucket:
        yield bucket


class Recodes(Protocol):
    """What collectives do with the payload of a hop."""

    pipeline: Pipeline

    @property
    def plan(self) -> ShardPlan:
        """The shard plan of this rank."""

    def received(self, pending: Pending, sent: torch.Tensor) -> torch.Tensor:
        """What a hop has received."""

    def compare(self, comparison: Comparison, message: torch.Tensor) -> None:
        """Compares checksums."""

    def transcode(
        self,
        bucket: Bucket,
        message: torch.Tensor,
        codec: Codec,
        target: CodecConfig,
        *,
        outer: int,
        rows: int,
        seed: int,
    ) -> Payload:
        """The message in the codec of ``target``, or in ``none`` where that would lose a block."""

    def counted(
        self, hop: Hop, bucket: Bucket, codec: Codec, message: torch.Tensor, elements: int, peers: float
    ) -> Ends:
        """Times a hop, and counts it in the wire log."""

    def keep_lost(self, blocks: torch.Tensor, what: str) -> None:
        """Keeps a number of lost blocks, to look at it when the device is past this point."""


def repeats(codec: CodecConfig, pipeline: Pipeline) -> bool:
    """Whether a hop takes place again where its codec has lost a block: the host must see what has arrived."""
    return codec.codec == "exp" and pipeline.streams is None


def marked(bucket: Bucket, message: torch.Tensor, codec: Codec, rows: int) -> torch.Tensor:
    """A message of ``rows`` shards in codec ``exp`` whose blocks are all marked as lost, where ``message`` is."""
    size = codec.message_bytes(bucket.chunks, rows, bucket.dtype.itemsize)
    return message.new_full((size,), 255)


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


def cut_of(
    tiered: Recodes,
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


def cross(
    tiered: Recodes,
    transport: Transport,
    hop: Hop,
    bucket: Bucket,
    payload: list[torch.Tensor],
    codec: Codec,
    move: Callable[..., Hops[torch.Tensor]],
    *,
    outer: int,
    rows: int,
    peers: float,
    seed: int = 0,
    algorithm: Algorithm = "library",
    parts: int = 1,
    root: int | None = None,
) -> Hops[Codec]:
    """Moves a payload over one tier, in the codec of the tier.

    Args:
        tiered: The collectives whose hop it is.
        transport: Its transport.
        hop: The hop.
        bucket: The tensors.
        payload: In a list, so that nobody keeps its memory: uint8 ``[outer][tensor][rows][record]``, whole as `encoded` makes
            it. What has arrived takes its place.
        codec: Codec of the payload.
        move: `Transport.gather` with its algorithm, `scatter` or `spread`.
        outer: Size of the payload's outer index.
        rows: Size of its inner index.
        peers: Messages that this rank receives from others, in messages of this size.
        seed: Seed of stochastic rounding where the payload is transcoded.
        algorithm: Of ``move``.
        parts: 1 where all peers get the same, or one for each of them.
        root: Coordinate of the peer that alone sends; None: all do.

    Yields:
        Each collective, once it is started.

    Returns:
        The codec of what has arrived: that of the tier, or ``none`` where a payload did not fit codec ``exp``.

    Raises:
        HopError: A message arrived changed, or a length is none that codec ``mpc`` writes.
    """
    wanted, records = Codec.from_config(hop.codec), outer * rows
    elements = records * sum(bucket.chunks)
    message, codec = tiered.transcode(bucket, payload.pop(), codec, hop.codec, outer=outer, rows=rows, seed=seed)
    cut = yield from cut_of(tiered, transport, hop, bucket, message, codec, records // parts, parts=parts, root=root)

    def moved(sent: torch.Tensor, codec: Codec, elements: int) -> Hops[torch.Tensor]:
        ends = tiered.counted(hop, bucket, codec, sent, elements, peers)
        what, to = f"{bucket.label} in codec {codec.name}", () if root is None else (root,)
        return move(bucket.lane(hop.tier), sent, *to, what, ends, tiered.received, tiered.compare)

    if wanted.name != "exp":
        message = cut.of(message)
        moving = moved(message, wanted, elements)
        del message  # the hop alone needs it
        payload.append(cut.whole((yield from moving)))
        return wanted
    first = message if codec.format == wanted.format else marked(bucket, message, wanted, records)
    arrived = yield from moved(first, wanted, elements)
    lost = wanted.lost(arrived, bucket.chunks, outer=outer * arrived.numel() // max(first.numel(), 1))
    if not repeats(hop.codec, tiered.pipeline):
        tiered.keep_lost(lost, f"{bucket.label} in codec exp on tier {hop.tier!r}")
    elif int(lost):
        message, codec = tiered.transcode(bucket, message, codec, PLAIN, outer=outer, rows=rows, seed=seed)
        payload.append((yield from moved(message, codec, 0)))  # its elements are counted already
        return codec
    else:
        for _ in range(rounds(algorithm, hop.size) * (1 + tiered.plan.checksum)):
            yield NOTHING_SENT
    payload.append(arrived)
    return wanted


def in_memory(hop: Hop) -> CodecConfig:
    """The codec of what a reduction has before and after a hop: with a lossless one on the wire ``none``."""
    return PLAIN if hop.codec.codec in LOSSLESS else hop.codec


def crossed(
    tiered: Recodes, transport: Transport, hop: Hop, bucket: Bucket, message: torch.Tensor, pieces: int, rows: int
) -> Hops[torch.Tensor]:
    """One hop of a reduction.

    Args:
        tiered: The collectives whose hop it is.
        transport: Its transport.
        hop: The hop.
        bucket: The tensors; with codec ``mpc`` one.
        message: uint8, in the codec `in_memory`: ``pieces`` pieces ``[tensor][rows / pieces][record]``, those for one peer one
            after the other.
        pieces: A multiple of the tier's size.
        rows: Shards of each tensor.

    Yields:
        Each collective, once it is started.

    Returns:
        uint8, in the same codec: the parts of all peers, or with a lossless codec their sum, rounded once to the bucket's type.

    Raises:
        HopError: As `cross`.
    """
    held = Codec.from_config(in_memory(hop))
    layout: dict[str, Any] = {"outer": pieces, "rows": rows // pieces, "seed": 0}
    on_wire = held.name == "none" and hop.codec.codec != "none"
    move = partial(transport.scatter, summed=bucket.dtype if hop.codec.codec == "none" else None)
    payload, size = [message], hop.size
    codec = yield from cross(
        tiered, transport, hop, bucket, payload, held, move, peers=1 - 1 / size, parts=size, **layout
    )
    if not on_wire:
        return payload.pop()
    parts, _ = tiered.transcode(bucket, payload.pop(), codec, PLAIN, **layout)
    return sum_of(parts.view(bucket.dtype).view(hop.size, -1)).view(torch.uint8)
