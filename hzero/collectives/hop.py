"""One hop: a payload crosses a tier in that tier's codec.

A payload in codec ``exp`` has a fixed size, which some blocks do not fit. Where the host starts and ends hops, such a hop is
announced twice: a rank that has lost a block sends a message whose blocks are all marked as lost, so that every rank of
the tier group sees it, and then all send what they have once more, in codec ``none``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

from hzero.codecs import Codec
from hzero.collectives.bucket import Bucket
from hzero.collectives.cut import Waits, cut_of
from hzero.collectives.pipeline import Hops, Pipeline
from hzero.collectives.transport import NOTHING_SENT, Ends, Transport, rounds
from hzero.config import PLAIN, Algorithm, CodecConfig
from hzero.sharding.plan import Hop

#: A payload, uint8, and its codec.
Payload: TypeAlias = tuple[torch.Tensor, Codec]


class Recodes(Waits, Protocol):
    """What collectives do with the payload of a hop."""

    pipeline: Pipeline

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
