"""Tiered all-gather and reduce-scatter: one hop per tier, one message per hop, each with its tier's codec.

The tiers are those of MI250X machines in arXiv 2501.04266; hops that sum and quantise again follow ZeRO++
(arXiv 2306.10209). Messages have the layout ``[outer][tensor][inner][record]`` (docs/payload_format.md).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from hzero.codecs import Codec
from hzero.collectives.checksum import Comparison
from hzero.collectives.errors import HopError
from hzero.collectives.feedback import ErrorFeedback
from hzero.collectives.hop import Bucket, Payload, cross, crossed, exchanges, in_memory, repeats
from hzero.collectives.pipeline import Chain, Hops, Pipeline
from hzero.collectives.transport import Ends, Lane, Pending, Transport, rounds
from hzero.collectives.wirelog import HopTimer, WireLog
from hzero.config import NET_TIERS, PLAIN, Algorithm, CodecConfig
from hzero.sharding.plan import Hop, ShardPlan

T = TypeVar("T")

#: Hops of an asynchronous device whose checksums, or lost blocks, have not been looked at yet, at most.
_UNREAD = 256


class TieredCollectives:
    """All-gathers and reduce-scatters that cross one tier at a time.

    Both take a `Bucket`: several tensors, each cut into one shard per rank, which travel as one message. A hop is one
    collective in one tier group, with the tier's codec. `gather` and `reduce` submit the hops to the `Pipeline` and
    return a `Chain`. The chains of several buckets overlap, since tiers use different links.

    A gather crosses the tiers outermost first: node, gpu, gcd. A rank encodes its shards once. A hop all-gathers the
    payloads, and where the next tier has the same codec it passes them on unchanged; otherwise the rank decodes them
    and encodes them again (transcodes), with the same seed on all ranks. So all ranks decode the same bytes and hold
    the same bits. `decode_gathered` writes the tensors in shard order, whatever the order of ranks.

    A reduce crosses the tiers innermost first, as gcd, gpu, node. A hop with codec ``none`` is a plain reduce-scatter in
    the communication type. A hop with any other codec is an all-to-all: each rank receives one encoded message per
    peer, decodes them, sums them in float32 in peer order, and encodes the sums for the next hop. Each hop leaves a
    rank with its size-th part of the rows, so the tier with the most bytes to move is the innermost. Where a tier
    keeps error feedback, the loss of its encoding is added to the next gradients of the same tensors.

    A chain needs the message that it sends and the one that it receives; a gather ends with whole tensors, a lossy
    reduce stages its sums in float32. Nothing here averages, accumulates or keeps a copy between calls, except the
    residuals of error feedback: `hzero.zero` decides what to gather, what to keep resident, and when to reduce.

    Args:
        plan: The shard plan of this rank.
        transport: Its tier groups.
        wire_log: Counts every hop.
        feedback: Residuals of lossy gradient hops; None where no tier keeps one.
        pipeline: Runs the hops; None makes one.
    """

    def __init__(
        self,
        plan: ShardPlan,
        transport: Transport,
        wire_log: WireLog,
        feedback: ErrorFeedback | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        self.plan = plan
        self.wire_log = wire_log
        self.feedback = feedback
        self.pipeline = pipeline or Pipeline()
        self._transport = transport
        self._unread: list[tuple[Any, Comparison]] = []
        self._lost: list[tuple[Any, torch.Tensor, str]] = []
        self._messages = 1 + plan.checksum  # of a hop: the payload's, and that of the checksums
        self._row_orders: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def beside(self, wire_log: WireLog) -> TieredCollectives:
        """Collectives over the same lanes with a wire log of their own, and without error feedback."""
        return TieredCollectives(self.plan, self._transport, wire_log, None, self.pipeline)

    # ---- gather ------------------------------------------------------------------------------------------------

    def gather(
        self,
        hops: Sequence[Hop],
        bucket: Bucket,
        payload: Callable[[], Payload],
        then: Callable[[torch.Tensor, Codec, int], T],
        *,
        rows: int = 1,
        seed: int = 0,
        after: Sequence[Chain[Any]] = (),
    ) -> Chain[T]:
        """Submits a tiered all-gather of payloads.

        Args:
            hops: Tiers to cross, outermost first.
            bucket: The tensors.
            payload: Makes the uint8 payload of this rank, ``[tensor][rows][record]``, and its codec, as `encoded` does.
            then: Makes the result, of the gathered payload ``[outer][tensor][rows][record]``, whose outermost index is
                that of the last hop, the payload's codec, and ``outer``.
            rows: Shards of every tensor that this rank holds.
            seed: Seed of stochastic rounding where a hop transcodes. Must be the same on all ranks.
            after: Chains that make what ``payload`` reads.

        Returns:
            A chain with the result of ``then``.
        """
        algorithms = self._algorithms(hops, bucket, rows)
        lanes = [lane for hop, one in zip(hops, algorithms) for lane in self.steps(hop, bucket, one)]
        chain = self._gather(hops, algorithms, bucket, payload, then, rows, seed)
        return self.pipeline.submit(chain, lanes, after)

    def _algorithms(self, hops: Sequence[Hop], bucket: Bucket, rows: int) -> list[Algorithm]:
        """The algorithm of each hop of a gather, by the bytes of its message: the same on all ranks."""
        if self.plan.node_all_gather.algorithm == "library":
            return ["library"] * len(hops)
        found: list[Algorithm] = []
        for hop in hops:
            size = Codec.from_config(hop.codec).message_bytes(bucket.chunks, rows, bucket.dtype.itemsize)
            found.append(self.plan.node_all_gather.of(size) if hop.tier in NET_TIERS else "library")
            rows *= hop.size
        return found

    def used(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, whose memory is kept until the current stream of an asynchronous device has passed this point."""
        if self.pipeline.streams is not None:
            self.pipeline.streams.used(tensor)
        return tensor

    def received(self, pending: Pending, sent: torch.Tensor) -> torch.Tensor:
        """What a hop has received.

        Both buffers belong to the stream of the hop's lane, which does not wait for the hop. They are kept until the
        current stream, which does, is past this point.
        """
        received = pending.wait()
        self.used(sent)
        return self.used(received)

    def steps(self, hop: Hop, bucket: Bucket, algorithm: Algorithm = "library") -> list[Lane]:
        """The lane of a hop, once for each collective."""
        times = rounds(algorithm, hop.size) * (1 + repeats(hop.codec, self.pipeline)) + exchanges(hop.codec)
        return [bucket.lane(hop.tier)] * (times * self._messages)

    def compare(self, comparison: Comparison, message: torch.Tensor) -> None:
        """Compares checksums: at once, or on an asynchronous device, where that would make the host wait, in `verify`."""
        self.used(message)  # until now only the stream of its lane has waited for it
        if self.pipeline.streams is None:
            comparison.check()
            return
        self._unread.append((self.pipeline.streams.event(), comparison))
        if len(self._unread) >= _UNREAD:
            self.verify()

    def verify(self) -> None:
        """On an asynchronous device: checks what has arrived by all hops until now, and waits for them.

        Raises:
            HopError: A message arrived changed, or has blocks that codec ``exp`` could not hold.
        """
        unread, lost, streams = self._unread, self._lost, self.pipeline.streams
        self._unread, self._lost = [], []
        if streams is None:
            return
        for event, blocks, what in lost:  # the same on all ranks that have the message
            streams.wait(event)
            if count := int(self.used(blocks)):
                raise HopError(
                    f"hzero: {what}: {count} blocks of 32,768 numbers have more than 512 exponents outside of the windows of "
                    "their lines, which codec exp cannot hold; possible on this tier: codec none, bf16 or int8"
                )
        if not unread:
            return
        for event, comparison in unread:
            streams.wait(event)
            self.used(comparison.sent)
            self.used(comparison.arrived)
        sent, arrived = (torch.cat([getattr(one, side) for _, one in unread]) for side in ("sent", "arrived"))
        if not torch.equal(sent, arrived):
            for _, comparison in unread:
                comparison.check()

    def _gather(
        self,
        hops: Sequence[Hop],
        algorithms: Sequence[Algorithm],
        bucket: Bucket,
        payload: Callable[[], Payload],
        then: Callable[[torch.Tensor, Codec, int], T],
        rows: int,
        seed: int,
    ) -> Hops[T]:
        outer, (*held, codec) = 1, payload()  # in a list: what moves the message lets go of it
        yield None
        for hop, algorithm in zip(hops, algorithms):
            move = partial(self._transport.gather, algorithm)
            layout: dict[str, Any] = {"outer": outer, "rows": rows, "seed": seed, "peers": hop.size - 1}
            codec = yield from cross(
                self, self._transport, hop, bucket, held, codec, move, algorithm=algorithm, **layout
            )
            outer *= hop.size
        return then(held.pop(), codec, outer)

    def keep_lost(self, blocks: torch.Tensor, what: str) -> None:
        """Keeps a number of lost blocks for `verify`: on an asynchronous device, where a look would make the host wait."""
        assert self.pipeline.streams is not None
        self._lost.append((self.pipeline.streams.event(), blocks, what))
        if len(self._lost) >= _UNREAD:
            self.verify()

    def encoded(self, bucket: Bucket, codec: Codec, encode: Callable[[Codec], torch.Tensor], outer: int = 1) -> Payload:
        """A new payload and its codec: ``codec``, or ``none`` where that would lose a block; on a device `verify` finds it.

        ``encode`` makes the uint8 payload ``[outer][tensor][rows][record]`` in a codec.
        """
        message = encode(codec)
        seen = codec.name == "exp" and self.pipeline.streams is None
        if seen and int(codec.lost(message, bucket.chunks, outer=outer)):
            codec = Codec.from_config(PLAIN)
            message = encode(codec)
        return message, codec

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
        """The message in the codec of ``target``: unchanged where it has that codec, else decoded and encoded again (`encoded`).

        Args:
            bucket: The tensors.
            message: uint8 payload ``[outer][tensor][rows][record]``.
            codec: Codec of ``message``.
            target: Settings of the wanted codec.
            outer: Size of the message's outer index; kept.
            rows: Size of its inner index; kept.
            seed: Seed of stochastic rounding; the same on all ranks, so that copies stay bit-identical.

        Returns:
            The payload and its codec.
        """
        wanted = Codec.from_config(target)
        if wanted.format == codec.format:
            return message, codec
        decoded = codec.decode(message, bucket.chunks, dtype=bucket.dtype, outer=outer)
        layout: dict[str, Any] = {"sizes": [outer * rows], "strides": [1], "outer": outer, "seed": seed}
        return self.encoded(bucket, wanted, lambda to: to.encode(decoded, bucket.chunks, **layout), outer)

    def decode_gathered(self, bucket: Bucket, message: torch.Tensor, codec: Codec, outer: int) -> list[torch.Tensor]:
        """Whole tensors in shard order from a payload gathered over the world.

        Args:
            bucket: The tensors.
            message: uint8 payload over all shards, rows in hop order.
            codec: Codec of ``message``.
            outer: Size of its outer index.

        Returns:
            One flat tensor of ``bucket.dtype`` each, ``[world * chunk]``; zero beyond the tensor's size.
        """
        if not self.plan.grid.regular:
            rows = codec.decode(message, bucket.chunks, dtype=bucket.dtype, outer=outer)
            _, places = self._row_order(message.device)
            return [tensor.view(len(places), -1)[places].view(-1) for tensor in rows]
        return codec.decode(
            message,
            bucket.chunks,
            dtype=bucket.dtype,
            sizes=self.plan.hop_sizes,
            strides=self.plan.hop_strides,
            outer=outer,
        )

    def decode_gathered_onto(
        self, bucket: Bucket, message: torch.Tensor, codec: Codec, outer: int, tensors: Sequence[torch.Tensor]
    ) -> None:
        """`decode_gathered`, added to the contiguous tensors of ``bucket.dtype`` by `Codec.decode_onto`."""
        if self.plan.grid.regular:
            sizes, strides = self.plan.hop_sizes, self.plan.hop_strides
            codec.decode_onto(message, tensors, bucket.chunks, sizes=sizes, strides=strides, outer=outer)
            return
        order, _ = self._row_order(message.device)
        rows = [tensor.view(len(order), -1)[order] for tensor in tensors]
        codec.decode_onto(message, rows, bucket.chunks, sizes=(len(order),), outer=outer)
        for tensor, found in zip(tensors, rows):
            tensor.view(len(order), -1)[order] = found

    # ---- reduce ------------------------------------------------------------------------------------------------

    def reduce(
        self,
        hops: Sequence[Hop],
        bucket: Bucket,
        tensors: Sequence[torch.Tensor],
        *,
        rows: int,
        shard_order: bool,
        seed: int = 0,
        scale: float = 1.0,
        into: Callable[[], Sequence[torch.Tensor] | None] = lambda: None,
        then: Callable[[list[torch.Tensor]], T] = lambda shards: shards,  # type: ignore[assignment,return-value]
    ) -> Chain[T]:
        """Submits a tiered reduce-scatter (sum).

        Args:
            hops: Tiers to cross, innermost first.
            bucket: The tensors; ``bucket.dtype`` is the communication type of hops with codec ``none``.
            tensors: Flat floating tensors of up to ``rows * chunk`` elements each; missing elements count as zero.
            rows: Shards that each tensor holds: the world size for whole gradients, fewer for partial sums.
            shard_order: Whether the shards of ``tensors`` are in shard order, as in whole gradients, or in hop order,
                as in the results of earlier hops.
            seed: Seed of stochastic rounding.
            scale: Loss scale of these gradients; residuals are converted to it.
            into: Float32 tensors like the result, to which the last hop adds what it receives, asked for when it has
                arrived; None makes new ones.
            then: Makes the result, of one flat tensor each, ``[rows / product of hop sizes * chunk]``, in hop order:
                float32, or without hops ``tensors`` as they are.

        Returns:
            A chain with the result of ``then``.
        """
        return self.pipeline.submit(
            self._reduce(hops, bucket, tensors, rows, shard_order, seed, scale, into, then),
            [lane for hop in hops for lane in self.steps(hop, bucket)],
        )

    def _reduce(
        self,
        hops: Sequence[Hop],
        bucket: Bucket,
        tensors: Sequence[torch.Tensor],
        rows: int,
        shard_order: bool,
        seed: int,
        scale: float,
        into: Callable[[], Sequence[torch.Tensor] | None],
        then: Callable[[list[torch.Tensor]], T],
    ) -> Hops[T]:
        chunks = bucket.chunks
        tensors = [self.used(tensor) for tensor in tensors]
        sizes: Sequence[int] = (rows,)
        strides: Sequence[int] = (1,)
        if shard_order and self.plan.grid.regular:
            sizes, strides = self.plan.hop_sizes, self.plan.hop_strides
        elif shard_order:
            tensors = [self._in_hop_order(tensor, chunk) for tensor, chunk in zip(tensors, chunks)]
        message: torch.Tensor | None = None
        if not hops:
            yield None
        for index, hop in enumerate(hops):
            codec = Codec.from_config(in_memory(hop))
            inner, pieces = rows // hop.size, self._pieces(hops[index:])
            if message is None:
                if codec.name == "none":
                    tensors = [tensor.to(bucket.dtype) for tensor in tensors]
                if self.feedback is not None and self._keeps_residual(hop):
                    residuals, factors = self.feedback.of(hop.tier, bucket, tensors, scale)
                    message, left = codec.encode_feedback(
                        tensors, residuals, factors, chunks, sizes=sizes, strides=strides, outer=pieces, seed=seed
                    )
                    self.feedback.keep(hop.tier, bucket, left, scale)
                else:
                    message = codec.encode(tensors, chunks, sizes=sizes, strides=strides, outer=pieces, seed=seed)
            tensors = ()  # read: their memory may go
            if index == 0:
                yield None
            received = yield from crossed(self, self._transport, hop, bucket, message, pieces, rows)
            message = None
            peers = 1 if codec.name == "none" else hop.size
            following = hops[index + 1] if index + 1 < len(hops) else None
            if following is None:
                tensors = codec.decode_sum(received, peers, chunks, inner=inner, dtype=bucket.dtype, into=into())
            elif codec.name == "none" and in_memory(following) is PLAIN:
                message = received
            elif codec.name == "none":
                tensors = codec.decode(received, chunks, dtype=bucket.dtype)
            elif in_memory(following) is not PLAIN and not self._keeps_residual(following):
                message = codec.decode_sum_encode(
                    received,
                    peers,
                    chunks,
                    inner=inner,
                    dtype=bucket.dtype,
                    to=Codec.from_config(following.codec),
                    outer=following.size,
                    seed=seed,
                )
            else:
                tensors = codec.decode_sum(received, peers, chunks, inner=inner, dtype=bucket.dtype)
            rows, sizes, strides = inner, (inner,), (1,)
            del received  # its memory may go
        return then(list(tensors))

    @staticmethod
    def _pieces(hops: Sequence[Hop]) -> int:
        """Number of pieces to encode a message in for the first of ``hops``.

        While successive hops have messages in codec none, sums are passed on unchanged: the pieces of all those hops are
        laid out at once.
        """
        exact = itertools.takewhile(lambda hop: in_memory(hop) is PLAIN, hops)
        return math.prod([hop.size for hop in exact] or [hops[0].size])

    def _keeps_residual(self, hop: Hop) -> bool:
        return self.feedback is not None and hop.tier in self.plan.error_feedback and in_memory(hop) is not PLAIN

    # ---- ranks in no regular order ----------------------------------------------------------------------------

    def _row_order(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Shard of every row of hop order, and row of every shard."""
        if device not in self._row_orders:
            # Made on the host: other lanes' streams, which do not wait for this one's, read them too.
            order = torch.tensor(self.plan.row_order())
            self._row_orders[device] = order.to(device), order.argsort().to(device)
        return self._row_orders[device]

    def _in_hop_order(self, tensor: torch.Tensor, chunk: int) -> torch.Tensor:
        order, _ = self._row_order(tensor.device)
        padded = torch.nn.functional.pad(tensor, (0, len(order) * chunk - tensor.numel()))
        return padded.view(len(order), chunk)[order].view(-1)

    def send(self, lane: Lane, message: torch.Tensor, what: str, algorithm: Algorithm) -> Chain[torch.Tensor]:
        """Submits one hop of bytes that are no payload; the wire log does not count it.

        Args:
            lane: Of weights for an all-gather, of gradients for an all-to-all.
            message: uint8, ``[b]`` or ``[k * b]``.
            what: Describes it, for errors.
            algorithm: Of an all-gather.

        Returns:
            A chain with uint8 ``[k * b]``, by peer.
        """

        def hops() -> Hops[torch.Tensor]:
            yield None
            if lane[0] == "weights":
                return (
                    yield from self._transport.gather(
                        algorithm, lane, message, what, received=self.received, compare=self.compare
                    )
                )
            return (
                yield from self._transport.scatter(lane, message, what, received=self.received, compare=self.compare)
            )

        count = rounds(algorithm if lane[0] == "weights" else "library", self.plan.grid.size(lane[1]))
        return self.pipeline.submit(hops(), [lane] * (count * self._messages))

    # ---- one hop -----------------------------------------------------------------------------------------------

    def counted(
        self, hop: Hop, bucket: Bucket, codec: Codec, message: torch.Tensor, elements: int, peers: float
    ) -> Ends:
        """Times a hop from now on, until it has arrived, and counts it when it has been waited for.

        Args:
            hop: The hop.
            bucket: The tensors.
            codec: Of the message.
            message: What is sent.
            elements: Its elements.
            peers: Messages of its size that this rank receives from others.
        """
        # A hop that the host starts and ends is timed by its clock, whatever memory it is in.
        device = message.device if self.pipeline.streams is not None else torch.device("cpu")
        timer = HopTimer(device, self.pipeline.waited_s)
        payload = message.numel()

        def arrived() -> None:
            timer.stop(self.pipeline.waited_s)

        def done() -> None:
            arrived()
            self.wire_log.add(
                role=bucket.role,
                tier=hop.tier,
                codec=codec.name,
                elements=elements,
                payload_bytes=payload,
                wire_bytes=round(payload * peers),
                raw_bytes=math.ceil(elements * bucket.dtype.itemsize * peers),
                timer=timer,
            )

        return Ends(done, arrived, timer.ready)
