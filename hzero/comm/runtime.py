"""Runtime: executes the programs of buckets, one collective per tier with that tier's codec.

The tiers are those of MI250X machines in arXiv 2501.04266; hops that sum and quantise again follow ZeRO++
(arXiv 2306.10209).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from hzero.codecs import mpc
from hzero.codecs.codec import Codec
from hzero.comm.bucket import Bucket
from hzero.comm.checksum import Comparison
from hzero.comm.errors import HopError
from hzero.comm.feedback import ErrorFeedback
from hzero.comm.lanes import Chain, Hops, Lanes
from hzero.comm.transport import Pending, Transport, sum_of
from hzero.comm.wirelog import HopTimer, WireLog
from hzero.comm.wires import Lane
from hzero.config import Algorithm, CodecConfig
from hzero.plan.program import Cross, Decode, Encode, Kind, Order, Program, Recode, Step, Sum, Turn
from hzero.plan.shards import ShardPlan

T = TypeVar("T")

#: Blocks of a message that codec ``exp`` could not hold, int64 ``[]``, and a description of the message.
_Lost: TypeAlias = tuple[torch.Tensor, str]
#: Comparisons of a device that have not been looked at yet, at most.
_UNREAD = 256


class Collectives:
    """Gathers, reductions and moves that cross one tier at a time.

    All take a `Bucket`: several tensors, each cut into one shard per rank, which travel as one message. What a program lists
    is done step by step: tensors are encoded, the message crosses a tier, and is decoded, summed or encoded again. `run`
    submits the collectives to the `Lanes` and returns a `Chain`. The chains of several buckets overlap, since tiers use
    different links.

    Every rank decodes the bytes that all others decode, its own shards included, so all hold the same bits. Sums are made in
    float32, in the order of peers.

    A chain needs the message that it sends and the one that it receives. Nothing here averages, accumulates or keeps a copy
    between calls, except the residuals of error feedback.

    Args:
        plan: The shard plan of this rank.
        transport: Its tier groups.
        wire_log: Counts every hop.
        feedback: Residuals of lossy gradient hops; None where no tier keeps one.
        lanes: Run the hops; None makes some.
        strict: Whether a block that codec ``exp`` could not hold is an error, as a changed message is; otherwise `lost` tells.
    """

    def __init__(
        self,
        plan: ShardPlan,
        transport: Transport,
        wire_log: WireLog,
        feedback: ErrorFeedback | None = None,
        lanes: Lanes | None = None,
        *,
        strict: bool = False,
    ) -> None:
        self._strict = strict
        self.plan, self.wire_log, self.feedback = plan, wire_log, feedback
        self.lanes = lanes or Lanes()
        self._transport = transport
        self._unread: list[Comparison] = []
        self._lost: list[_Lost] = []
        self._tables: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def beside(self, wire_log: WireLog) -> Collectives:
        """Collectives over the same lanes with a wire log of their own, and without error feedback."""
        return Collectives(self.plan, self._transport, wire_log, None, self.lanes)

    def run(
        self,
        program: Program,
        bucket: Bucket,
        read: Callable[[], Any],
        then: Callable[[Any], T],
        *,
        seed: int = 0,
        own_seed: int | None = None,
        scale: float = 1.0,
        into: Callable[[], Sequence[torch.Tensor] | None] = lambda: None,
        after: Sequence[Chain[Any]] = (),
    ) -> Chain[T]:
        """Starts a program.

        Args:
            program: The steps.
            bucket: The tensors; ``bucket.dtype`` is the type of hops with codec ``none``.
            read: Gives what the first step takes: a uint8 message, or flat tensors whose missing elements count as zero.
            then: Makes the result of what the last step leaves: a uint8 message, or flat tensors.
            seed: Seed of stochastic rounding; where copies are encoded again it has to be the same on all ranks.
            own_seed: Seed of the first encoding; None takes the same.
            scale: Loss scale of gradients; residuals are converted to it.
            into: Float32 tensors like the result, to which the last sum adds what it receives, asked for when it has arrived;
                None makes new ones.
            after: Chains that make what ``read`` reads.

        Returns:
            A chain with the result of ``then``.
        """
        first = seed if own_seed is None else own_seed
        hops = self._hops(program, bucket, read, then, seed, first, scale, into)
        return self.lanes.submit(hops, [bucket.lane(cross.tiers[0]) for cross in program.crossings], after)

    def _hops(
        self,
        program: Program,
        bucket: Bucket,
        read: Callable[[], Any],
        then: Callable[[Any], T],
        seed: int,
        own_seed: int,
        scale: float,
        into: Callable[[], Sequence[torch.Tensor] | None],
    ) -> Hops[T]:
        value, crossed, lost = read(), False, list[_Lost]()
        del read  # it may hold what has been read
        if not program.steps:
            value = [self.used(tensor) for tensor in value]
        for step in program.steps:
            if isinstance(step, Cross):
                if not crossed:
                    yield None
                crossed = True
                value = yield from self._cross(step, bucket, value, lost)
            elif isinstance(step, Sum) and step.target is None:
                codec = Codec.from_config(step.codec)
                added = into() if step is program.steps[-1] else None
                value = codec.decode_sum(
                    value, step.peers, bucket.chunks, inner=step.rows, dtype=bucket.dtype, into=added
                )
            else:
                value = self._local(step, bucket, value, seed if crossed else own_seed, scale)
        if not crossed:
            yield None
        self._note(lost)
        return then(value)

    # ---- steps --------------------------------------------------------------------------------------------------

    def _local(self, step: Step, bucket: Bucket, value: Any, seed: int, scale: float) -> Any:
        if isinstance(step, Encode):
            return self._encode(step, bucket, value, seed, scale)
        if isinstance(step, Recode):
            how: dict[str, Any] = {"pieces": step.pieces, "rows": step.rows, "seed": seed}
            return self.recode(bucket, value, step.source, step.target, **how)
        if isinstance(step, Turn):
            rest = self.plan.grid.world_size // step.crossed // step.ranks
            return value.view(step.crossed, step.ranks, rest, -1).transpose(0, 1).contiguous().view(-1)
        codec = Codec.from_config(step.codec)
        if isinstance(step, Decode):
            return self._decode(step, bucket, codec, value)
        assert isinstance(step, Sum) and step.target is not None, step
        if codec.exact:  # rounded once to the type of the elements, as a library's sum is
            return sum_of(value.view(bucket.dtype).view(step.peers, -1)).view(torch.uint8)
        return codec.decode_sum_encode(
            value,
            step.peers,
            bucket.chunks,
            inner=step.rows,
            dtype=bucket.dtype,
            to=Codec.from_config(step.target),
            outer=step.pieces,
            seed=seed,
        )

    def _encode(
        self, step: Encode, bucket: Bucket, tensors: Sequence[torch.Tensor], seed: int, scale: float
    ) -> torch.Tensor:
        codec, order = Codec.from_config(step.codec), step.order
        tensors = [self.used(tensor) for tensor in tensors]
        if order.table is not None:
            rows, _ = self._table(order, tensors[0].device)
            tensors = [
                _padded(tensor, len(rows) * chunk).view(len(rows), chunk)[rows].view(-1)
                for tensor, chunk in zip(tensors, bucket.chunks)
            ]
        if codec.exact:
            tensors = [tensor.to(bucket.dtype) for tensor in tensors]
        layout: dict[str, Any] = {"sizes": order.sizes, "strides": order.strides, "outer": step.pieces, "seed": seed}
        if self.feedback is None or step.residual is None:
            return codec.encode(tensors, bucket.chunks, **layout)
        residuals, factors = self.feedback.of(step.residual, bucket, tensors, scale)
        message, left = codec.encode_feedback(tensors, residuals, factors, bucket.chunks, **layout)
        self.feedback.keep(step.residual, bucket, left, scale)
        return message

    def recode(
        self,
        bucket: Bucket,
        message: torch.Tensor,
        source: CodecConfig,
        target: CodecConfig,
        *,
        pieces: int,
        rows: int,
        seed: int,
    ) -> torch.Tensor:
        """A message ``[pieces][tensor][rows][record]`` in another codec; ``seed`` is the same on all ranks that hold copies."""
        decoded = Codec.from_config(source).decode(message, bucket.chunks, dtype=bucket.dtype, outer=pieces)
        sizes = (pieces * rows,)
        return Codec.from_config(target).encode(
            decoded, bucket.chunks, sizes=sizes, strides=(1,), outer=pieces, seed=seed
        )

    def _decode(self, step: Decode, bucket: Bucket, codec: Codec, message: torch.Tensor) -> list[torch.Tensor]:
        order = step.order
        how: dict[str, Any] = {"sizes": order.sizes, "strides": order.strides, "outer": step.pieces}
        tensors = codec.decode(message, bucket.chunks, dtype=bucket.dtype, **how)
        if order.table is None:
            return tensors
        _, places = self._table(order, message.device)
        return [tensor.view(len(places), -1)[places].view(-1) for tensor in tensors]

    def add_decoded(
        self, program: Program, bucket: Bucket, message: torch.Tensor, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Adds the whole tensors that a gathered message holds to contiguous ones of ``bucket.dtype`` (`Codec.decode_onto`)."""
        order, codec = Order.of_hops(self.plan), Codec.from_config(program.codec)
        how: dict[str, Any] = {"sizes": order.sizes, "strides": order.strides, "outer": program.pieces}
        if order.table is None:
            codec.decode_onto(message, tensors, bucket.chunks, **how)
            return
        rows, _ = self._table(order, message.device)
        added = [tensor.view(len(rows), -1)[rows] for tensor in tensors]
        codec.decode_onto(message, added, bucket.chunks, **how)
        for tensor, found in zip(tensors, added):
            tensor.view(len(rows), -1)[rows] = found

    def _table(self, order: Order, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Shard of every row, and row of every shard."""
        key = order.table, device
        if key not in self._tables:
            # Made on the host: other lanes' streams, which do not wait for this one's, read them too.
            rows = torch.tensor(order.table)
            self._tables[key] = rows.to(device), rows.argsort().to(device)
        return self._tables[key]

    # ---- one hop ------------------------------------------------------------------------------------------------

    def _cross(self, step: Cross, bucket: Bucket, message: torch.Tensor, lost: list[_Lost]) -> Hops[torch.Tensor]:
        """Moves a message over one tier. ``lost`` gets the number of its blocks that the codec could not hold.

        Yields:
            The collective, once it is started.

        Raises:
            HopError: A message arrived changed, or a length is none that codec ``mpc`` writes.
        """
        codec, lane = Codec.from_config(step.codec), bucket.lane(step.tiers[0])
        cut = self._cut(step, bucket, lane, codec, message) if codec.variable else None
        if cut is not None:
            message = cut.of(message)
        timer = self._timer(message)
        pending = self._transport.start(
            lane,
            step.kind,
            message,
            f"{bucket.label} in codec {codec.name}",
            self._counts(step, bucket, codec, message.numel(), timer),
            algorithm=step.algorithms.of(step.message_bytes(bucket.chunks, bucket.dtype.itemsize)),
            root=step.root,
            dtype=bucket.dtype,
            compare=self._compare,
            passed=timer.ready,
        )
        del message
        yield pending
        arrived = self.received(pending)
        if codec.fallible:
            lost.append((codec.lost(arrived, bucket.chunks, outer=step.pieces), bucket.label))
        return arrived if cut is None else cut.whole(arrived)

    def _timer(self, message: torch.Tensor) -> HopTimer:
        """A timer of a hop from now on. One that the host starts and ends is timed by its clock, wherever its memory is."""
        device = message.device if self.lanes.streams is not None else torch.device("cpu")
        return HopTimer(device, self.lanes.waited_s)

    def _counts(self, step: Cross, bucket: Bucket, codec: Codec, payload: int, timer: HopTimer) -> Callable[[], None]:
        """Counts a hop in the wire log, when it is called behind the hop."""
        elements, peers = step.rows * sum(bucket.chunks), step.received
        if step.kind == "broadcast":
            peers = float(self._place(step) != step.root)

        def done() -> None:
            timer.stop(self.lanes.waited_s)
            self.wire_log.add(
                role=bucket.role,
                tier=step.tiers[0],
                codec=codec.name,
                elements=elements,
                payload_bytes=payload,
                wire_bytes=round(payload * peers),
                raw_bytes=math.ceil(elements * bucket.dtype.itemsize * peers),
                timer=timer,
            )

        return done

    def _place(self, step: Cross) -> int:
        """Coordinate of this rank on the tier of a hop."""
        place: int = getattr(self.plan.grid.coordinates(self.plan.rank), step.tiers[0])
        return place

    def received(self, pending: Pending) -> torch.Tensor:
        """What a collective has brought.

        Its buffers belong to the stream of its lane, which does not wait for it. They are kept until the current stream, which
        does, is past this point.
        """
        arrived = pending.wait()
        for buffer in (*pending.buffers, arrived):
            self.used(buffer)
        return arrived

    def used(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, whose memory is kept until the current stream of an asynchronous device has passed this point."""
        if self.lanes.streams is not None:
            self.lanes.streams.used(tensor)
        return tensor

    def send(
        self, lane: Lane, kind: Kind, message: torch.Tensor, what: str, algorithm: Algorithm = "library"
    ) -> Chain[torch.Tensor]:
        """Starts one collective of uint8 bytes that are no payload; the wire log does not count it. See `Transport.start`."""

        def hops() -> Hops[torch.Tensor]:
            yield None
            pending = self._transport.start(lane, kind, message, what, algorithm=algorithm, compare=self._compare)
            yield pending
            return self.received(pending)

        return self.lanes.submit(hops(), [lane])

    # ---- messages of no fixed size ------------------------------------------------------------------------------

    def _cut(self, step: Cross, bucket: Bucket, lane: Lane, codec: Codec, message: torch.Tensor) -> Cut:
        """Exchanges how much of a hop's records is used: 8 bytes per record. The host waits for it on a device too.

        Raises:
            HopError: A length is none that the codec writes.
        """
        parts = step.ranks if step.kind == "all_to_all" else 1
        rows, place = step.rows // parts, self._place(step)
        sizes = [codec.message_bytes(bucket.chunks, 1, bucket.dtype.itemsize)] * rows
        lengths = message.new_zeros(8 * parts * rows)
        if step.kind not in ("broadcast", "receive") or step.root == place:
            lengths.copy_(mpc.lengths(message, sizes * parts).view(torch.uint8))
        kind: Kind = "all_gather" if step.kind == "all_to_all" else step.kind
        what = f"{bucket.label} in codec {codec.name} (lengths)"
        told = self.received(self._transport.start(lane, kind, lengths, what, root=step.root, compare=self._compare))
        every = [
            [checked(part, sizes[0], bucket.label) for part in sender]
            for sender in told.view(torch.int64).view(-1, parts, rows)
        ]
        own = every[place if step.kind in ("all_gather", "all_to_all") else 0]
        arriving = [sender[place if parts > 1 else 0] for sender in every]
        return Cut(sizes, own, arriving, max(sum(part) for sender in every for part in sender))

    # ---- what arrives changed, or incomplete --------------------------------------------------------------------

    def _compare(self, comparison: Comparison, message: torch.Tensor) -> None:
        """Compares checksums: at once, or on an asynchronous device, where that would make the host wait, in `verify`."""
        if self.lanes.streams is None:
            comparison.check()
            return
        self._unread.append(comparison)
        if len(self._unread) >= _UNREAD:
            self.verify()

    def _note(self, lost: Sequence[_Lost]) -> None:
        """At the end of a chain, whose hops all ranks have made: an error with `strict` on CPUs, or kept for `lost`."""
        if self._strict and self.lanes.streams is None:
            self._refuse(_first(lost))
            return
        self._lost += lost
        if len(self._lost) > _UNREAD:  # one of the older ones tells as much
            self._lost = [max(self._lost, key=lambda one: int(one[0]))]

    def lost(self) -> str | None:
        """Which message since the last call had blocks that codec ``exp`` could not hold; waits for the device."""
        lost, self._lost = self._lost, []
        if lost and self.lanes.streams is not None:
            self.lanes.streams.join()
        return _first([(self.used(blocks), what) for blocks, what in lost])

    @staticmethod
    def _refuse(what: str | None) -> None:
        if what is not None:
            raise HopError(f"hzero: {what}; expected codec none, bf16 or int8 on this tier")

    def verify(self) -> None:
        """On an asynchronous device: waits for all that has arrived until now, and looks whether it has arrived whole.

        Raises:
            HopError: A message arrived changed, or with `strict` has blocks that codec ``exp`` could not hold.
        """
        if self._strict:
            self._refuse(self.lost())
        unread, self._unread = self._unread, []
        if unread and self.lanes.streams is not None:
            self.lanes.streams.join()
        if not unread:
            return
        for comparison in unread:
            self.used(comparison.sent)
            self.used(comparison.arrived)
        sent, arrived = (torch.cat([getattr(one, side) for one in unread]) for side in ("sent", "arrived"))
        if not torch.equal(sent, arrived):
            for comparison in unread:
                comparison.check()


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

    sizes: Sequence[int]
    own: Sequence[Sequence[int]]
    arriving: Sequence[Sequence[int]]
    length: int

    def of(self, message: torch.Tensor) -> torch.Tensor:
        """What is sent: a message of as many bytes on all ranks."""
        parts = message.new_zeros(len(self.own), self.length)
        for part, whole, used in zip(parts, message.view(len(self.own), -1), self.own):
            part[: sum(used)] = mpc.cut(whole, self.sizes, used)
        return parts.view(-1)

    def whole(self, arrived: torch.Tensor) -> torch.Tensor:
        """The message that has arrived, its records of their sizes."""
        parts = arrived.view(len(self.arriving), self.length)
        return torch.cat([mpc.whole(part, self.sizes, used) for part, used in zip(parts, self.arriving)])


def _first(lost: Sequence[_Lost]) -> str | None:
    """The first message with lost blocks, in words; the host waits."""
    for blocks, what in lost:
        if count := int(blocks):
            return (
                f"{what} in codec exp: {count} blocks of 32,768 numbers have more than 512 exponents outside of the windows of "
                "their lines, which the codec cannot hold"
            )
    return None


def _padded(tensor: torch.Tensor, numel: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, numel - tensor.numel()))
