"""Runtime: executes the programs of buckets, one collective per tier with that tier's codec.

The tiers are those of MI250X machines in arXiv 2501.04266; hops that sum and quantise again follow ZeRO++
(arXiv 2306.10209).
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from hzero.codecs import mpc
from hzero.codecs.codec import Codec
from hzero.comm.bucket import Bucket
from hzero.comm.errors import HopError
from hzero.comm.feedback import ErrorFeedback
from hzero.comm.lanes import Chain, DeviceStreams, Hops, Lanes
from hzero.comm.transport import Pending, Transport
from hzero.comm.wirelog import HopCounts, HopTimer, WireLog
from hzero.comm.wires import Lane
from hzero.config import TIERS, Algorithm, CodecConfig, Tier
from hzero.plan.program import Cross, CrossCut, Decode, Encode, Kind, Order, Program, Recode, Step, Sum, Turn
from hzero.plan.shards import ShardPlan

T = TypeVar("T")

#: Blocks of a message that codec ``exp`` could not hold, int64 ``[]``, and a description of the message.
Lost: TypeAlias = tuple[torch.Tensor, str]
#: Comparisons of a device that have not been looked at yet, at most.
_UNREAD = 256
#: Buffers of one size that a device has not passed yet before one of them is taken again, which serialises their programs.
_BEHIND = 4
#: Bound programs that are kept.
_BOUND = 4096
#: Added to a seed for each tier; seeds have 31 bits.
_SALT, _SEED = 0x1E3779B1, 0x7FFFFFFF


class Room:
    """A buffer of the `Arena`.

    Attributes:
        buffer: Its memory, uint8.
        event: On a device: recorded where it was last used.
    """

    def __init__(self, buffer: torch.Tensor, event: Any) -> None:
        self.buffer, self.event = buffer, event
        self._view: tuple[Any, Any] = (None, None)

    def bytes(self, size: int) -> torch.Tensor:
        """A message of this size in it."""
        if self._view[0] != size:
            self._view = size, self.buffer[:size]
        view: torch.Tensor = self._view[1]
        return view

    def tensors(self, like: Floats) -> list[torch.Tensor]:
        """Flat tensors in it, one after the other."""
        if self._view[0] is not like:
            whole = self.buffer[: like.bytes].view(like.dtype)
            self._view = like, list(whole.split(like.numels))
        views: list[torch.Tensor] = self._view[1]
        return views


class Floats(NamedTuple):
    """Tensors between two steps: their type and elements."""

    dtype: torch.dtype
    numels: list[int]

    @property
    def bytes(self) -> int:
        """Their memory."""
        return sum(self.numels) * self.dtype.itemsize


class Arena:
    """Memory of messages, which a run of a program takes step by step and leaves to the next run.

    What is left is used again at once on CPUs. On a device the stream that takes a buffer waits for the event of its last
    use; until some are `_BEHIND`, a buffer that the device has passed or a new one is taken instead, so that programs overlap.

    Args:
        streams: Of the lanes; None on CPUs.
    """

    def __init__(self, streams: DeviceStreams | None) -> None:
        self._streams = streams
        self._free: list[Room] = []  # by size
        self._lock = threading.Lock()

    def take(self, size: int, device: torch.device) -> Room:
        """A buffer of at least ``size`` bytes, for the current stream."""
        with self._lock:
            first = found = bisect.bisect_left(self._free, size, key=_size_of)
            end = bisect.bisect_right(self._free, 2 * size, key=_size_of)
            while found < end and self._streams is not None and not self._free[found].event.query():
                found += 1
            if found == end and end - first >= _BEHIND:
                found = first
            room = self._free.pop(found) if found < end else None
        if room is None:
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
            return Room(buffer, None if self._streams is None else self._streams.event())
        if self._streams is not None:
            self._streams.wait(room.event)
        return room

    def give(self, room: Room) -> None:
        """Takes a buffer back that the current stream has used last."""
        if self._streams is not None:
            room.event.record(self._streams.device.current_stream())
        with self._lock:
            bisect.insort(self._free, room, key=_size_of)


def _size_of(room: Room) -> int:
    return room.buffer.numel()


class Collectives:
    """Gathers, reductions and moves that cross one tier at a time.

    All take a `Bucket`: several tensors, each cut into one shard per rank, which travel as one message. What a program lists
    is done step by step: tensors are encoded, the message crosses a tier, and is decoded, summed or encoded again. `bind`
    makes a program ready for a bucket. Its runs submit the collectives to the `Lanes`. The chains of several buckets
    overlap, since tiers use different links.

    Every rank decodes the bytes that all others decode, its own shards included, so all hold the same bits. Sums are made in
    float32, in the order of peers.

    Nothing here averages, accumulates or keeps a copy between calls, except the residuals of error feedback.

    Args:
        plan: The shard plan of this rank.
        transport: Its tier groups.
        wire_log: Counts every hop.
        feedback: Residuals of lossy gradient hops; None where no tier keeps one.
        lanes: Run the hops; None makes some.
        strict: Whether a block that codec ``exp`` could not hold is an error, as a changed message is; otherwise `lost` tells.

    Attributes:
        arena: Memory of messages.
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
        self.transport = transport
        self.arena = Arena(self.lanes.streams)
        if self.lanes.streams is not None and transport.unread is None:
            transport.unread = []
        self._lost: list[Lost] = []
        self._bound: dict[tuple[int, Bucket], Bound] = {}
        self._tables: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def beside(self, wire_log: WireLog) -> Collectives:
        """Collectives over the same lanes with a wire log of their own, and without error feedback."""
        return Collectives(self.plan, self.transport, wire_log, None, self.lanes)

    def bind(self, program: Program, bucket: Bucket) -> Bound:
        """A program, ready for a bucket; the same object for the same ones."""
        key = id(program), bucket
        bound = self._bound.get(key)
        if bound is None:
            if len(self._bound) >= _BOUND:  # of a program of changing sizes, such as messages of text
                self._bound.clear()
            bound = self._bound[key] = Bound(self, program, bucket)
        return bound

    def run(
        self, program: Program, bucket: Bucket, read: Callable[[], Any], then: Callable[[Any], T], **how: Any
    ) -> Chain[T]:
        """Starts a program; arguments as of `Bound.run`."""
        return self.bind(program, bucket).run(read, then, **how)

    def place(self, tier: Tier) -> int:
        """Coordinate of this rank on a tier."""
        place: int = getattr(self.plan.grid.coordinates(self.plan.rank), tier)
        return place

    def used(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, whose memory is kept until the current stream of an asynchronous device has passed this point."""
        if self.lanes.streams is not None:
            self.lanes.streams.used(tensor)
        return tensor

    def received(self, pending: Pending) -> torch.Tensor:
        """What a collective has brought.

        Its buffers belong to the stream of its lane, which does not wait for it. They are kept until the current stream, which
        does, is past this point.
        """
        arrived = pending.wait()
        if self.lanes.streams is not None:
            for buffer in (*pending.buffers, arrived):
                self.used(buffer)
            if self.transport.unread is not None and len(self.transport.unread) >= _UNREAD:
                self.verify()
        return arrived

    def send(
        self, lane: Lane, kind: Kind, message: torch.Tensor, what: str, algorithm: Algorithm = "library"
    ) -> Chain[torch.Tensor]:
        """Starts one collective of uint8 bytes that are no payload; the wire log does not count it. See `Transport.prepare`."""

        def hops() -> Hops[torch.Tensor]:
            yield None
            pending = self.transport.start(lane, kind, message, what, algorithm=algorithm)
            yield pending
            return self.received(pending)

        return self.lanes.submit(hops(), [lane], owner=self.transport)

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

    def add_decoded(
        self, program: Program, bucket: Bucket, message: torch.Tensor, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Adds the whole tensors that a gathered message holds to contiguous ones of ``bucket.dtype`` (`Codec.decoder`)."""
        order, codec = Order.of_hops(self.plan), Codec.from_config(program.codec)
        how: dict[str, Any] = {"sizes": order.sizes, "strides": order.strides, "outer": program.pieces, "add": True}
        decode = codec.decoder(bucket.chunks, bucket.dtype, message.device, **how)
        if order.table is None:
            decode(message, tensors)
            return
        rows, _ = self.table(order, message.device)
        added = [tensor.view(len(rows), -1)[rows] for tensor in tensors]
        decode(message, added)
        for tensor, found in zip(tensors, added):
            tensor.view(len(rows), -1)[rows] = found

    def table(self, order: Order, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Shard of every row, and row of every shard."""
        key = order.table, device
        if key not in self._tables:
            # Made on the host: other lanes' streams, which do not wait for this one's, read them too.
            rows = torch.tensor(order.table)
            self._tables[key] = rows.to(device), rows.argsort().to(device)
        return self._tables[key]

    # ---- what arrives changed, or incomplete --------------------------------------------------------------------

    def note(self, lost: Sequence[Lost]) -> None:
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
        unread = self.transport.unread
        if not unread or self.lanes.streams is None:
            return
        self.transport.unread = []
        self.lanes.streams.join()
        for comparison in unread:
            self.used(comparison.sent)
            self.used(comparison.arrived)
        sent, arrived = (torch.cat([getattr(one, side) for one in unread]) for side in ("sent", "arrived"))
        if not torch.equal(sent, arrived):
            for comparison in unread:
                comparison.check()


# ---- programs of one bucket -----------------------------------------------------------------------------------------


class _Local(NamedTuple):
    """A step without a collective.

    Attributes:
        run: Takes the value, the room for the result (None: it makes its own), a seed and a `Call`; returns the result.
        room: What the result needs: bytes of a message, tensors, or None where it is the caller's.
        salt: Added to seeds: each hop rounds by chance in its own way, and all ranks that hold copies in the same one.
    """

    run: Callable[[Any, Any, int, Call], Any]
    room: int | Floats | None
    salt: int = 0


class Call(NamedTuple):
    """What one run brings: arguments of `Bound.run`."""

    scale: float = 1.0
    into: Callable[[], Sequence[torch.Tensor] | None] = lambda: None
    lost: list[Lost] | None = None


class Bound:
    """A program of one bucket, ready to run again: layouts, descriptors, lanes, labels and counts are found once.

    A second run allocates only the tensors, or the message, that it leaves.

    Args:
        collectives: Run it.
        program: The steps.
        bucket: The tensors; ``bucket.dtype`` is the type of hops with codec ``none``.

    Attributes:
        lanes: Those of its hops.
    """

    def __init__(self, collectives: Collectives, program: Program, bucket: Bucket) -> None:
        self._own, self._program, self._bucket = collectives, program, bucket
        self.lanes = [bucket.lane(cross.tiers[0]) for cross in program.crossings]
        self._steps: list[_Local | _Hop | _Cut] = []
        self._given: torch.dtype | None = None  # type of what a run begins with

    def run(
        self,
        read: Callable[[], Any],
        then: Callable[[Any], T],
        *,
        seed: int = 0,
        own_seed: int | None = None,
        scale: float = 1.0,
        into: Callable[[], Sequence[torch.Tensor] | None] = lambda: None,
        after: Sequence[Chain[Any]] = (),
        patient: bool = False,
        lost: list[Lost] | None = None,
    ) -> Chain[T]:
        """Starts the program.

        Args:
            read: Gives what the first step takes: a uint8 message, or flat tensors whose missing elements count as zero.
            then: Makes the result of what the last step leaves: a uint8 message, or flat tensors.
            seed: Seed of stochastic rounding; where copies are encoded again it has to be the same on all ranks.
            own_seed: Seed of the first encoding; None takes the same.
            scale: Loss scale of gradients; residuals are converted to it.
            into: Tensors like the result, asked for when it has arrived: the last step adds sums to them, or writes what it
                decodes into them. None makes new ones.
            after: Chains that make what ``read`` reads.
            patient: Whether the hops make way for those of later programs, see `Lanes.submit`.
            lost: Takes what codec ``exp`` could not hold, for a chain that comes after this one to tell of: the hops of both
                are made on all ranks. None: this one does.

        Returns:
            A chain with the result of ``then``.
        """
        first = seed if own_seed is None else own_seed
        hops = self.hops(read, then, seed, first, Call(scale, into, lost))
        return self._own.lanes.submit(hops, self.lanes, after, owner=self._own.transport, patient=patient)

    def hops(self, read: Callable[[], Any], then: Callable[[Any], T], seed: int, own_seed: int, call: Call) -> Hops[T]:
        """The steps, as lanes run them."""
        value, arena = read(), self._own.arena
        del read  # it may hold what has been read
        first = value if isinstance(value, torch.Tensor) else value[0]
        if first.dtype is not self._given:
            self._steps, self._given, device = self._ready(first.dtype, first.device), first.dtype, first.device
        else:
            device = first.device
        del first
        if self._own.lanes.streams is not None and not isinstance(value, torch.Tensor):
            for tensor in value:
                self._own.used(tensor)
        room: Room | None = None  # where the value lies
        crossed, lost = False, list[Lost]()
        for step in self._steps:
            if isinstance(step, _Local):
                wanted = step.room
                into = None if wanted is None else arena.take(_bytes_of(wanted), device)
                out: Any = None
                if into is not None:
                    out = into.tensors(wanted) if isinstance(wanted, Floats) else into.bytes(wanted)  # type: ignore[arg-type]
                value = step.run(value, out, (seed if crossed else own_seed) + step.salt & _SEED, call)
            else:
                if not crossed:
                    yield None
                crossed = True
                value, into = yield from step.cross(value, room, lost)
                if into is room:
                    continue
            if room is not None:
                arena.give(room)
            room = into
        if not crossed:
            yield None
        if call.lost is None:
            self._own.note(lost)
        else:
            call.lost.extend(lost)
        result = then(value)
        if room is not None:
            arena.give(room)
        return result

    # ---- steps, made ready --------------------------------------------------------------------------------------

    def _ready(self, dtype: torch.dtype, device: torch.device) -> list[_Local | _Hop | _Cut]:
        """The steps for inputs of a type."""
        own, bucket, steps = self._own, self._bucket, self._program.steps
        ready: list[_Local | _Hop | _Cut] = []
        for index, step in enumerate(steps):
            if isinstance(step, Cross):
                what = f"{bucket.label} in codec {step.codec.codec}"
                made = _Cut if isinstance(step, CrossCut) else _Hop
                ready.append(made(own, bucket, step, what, device, last=step is steps[-1]))
                continue
            following = next((one for one in steps[index:] if isinstance(one, Cross)), None)
            salt = 0
            if index and following is not None:
                salt = (1 + TIERS.index(following.tiers[0])) * _SALT
            made_here = self._made(step, dtype, device)
            ready += [one._replace(salt=salt) for one in made_here[:-1]]
            last = made_here[-1]._replace(salt=salt)
            ready.append(last._replace(room=None) if step is steps[-1] else last)
            if isinstance(step, Sum) and step.target is None:
                dtype = torch.float32
            elif isinstance(step, Decode):
                dtype = bucket.dtype
        return ready

    def _made(self, step: Step, dtype: torch.dtype, device: torch.device) -> list[_Local]:
        """A step without a collective; of tensors of ``dtype``, if it takes some."""
        bucket, chunks = self._bucket, self._bucket.chunks
        if isinstance(step, Encode):
            return self._encoding(step, dtype, device)
        if isinstance(step, Recode):
            rows = step.pieces * step.rows
            return [
                self._decoding(Decode(step.source, Order.of_rows(rows), step.pieces), device),
                *self._encoding(Encode(step.target, Order.of_rows(rows), step.pieces), bucket.dtype, device),
            ]
        if isinstance(step, Decode):
            return [self._decoding(step, device)]
        if isinstance(step, Turn):
            shape = step.crossed, step.ranks, self._own.plan.grid.world_size // step.crossed // step.ranks, -1

            def turn(value: torch.Tensor, out: torch.Tensor, *_: Any) -> torch.Tensor:
                turned = value.view(shape).transpose(0, 1)
                out.view(turned.shape).copy_(turned)
                return out

            size = Codec.from_config(self._codec_before(step)).message_bytes(
                chunks, math.prod(shape[:3]), bucket.dtype.itemsize
            )
            return [_Local(turn, size)]
        assert isinstance(step, Sum), step
        codec = Codec.from_config(step.codec)
        how: dict[str, Any] = {"inner": step.rows, "dtype": bucket.dtype, "device": device}
        if step.target is not None:
            summing = codec.summer(step.peers, chunks, to=Codec.from_config(step.target), outer=step.pieces, **how)
            made = summing.bytes
            return [_Local(lambda value, out, seed, _: summing(value, out, seed), made)]
        new = codec.summer(step.peers, chunks, **how)
        onto = codec.summer(step.peers, chunks, add=True, **how)

        def summed(value: torch.Tensor, out: list[torch.Tensor] | None, _: int, call: Call) -> Sequence[torch.Tensor]:
            sums = call.into() if out is None else None
            return new(value, out) if sums is None else onto(value, sums)

        return [_Local(summed, Floats(torch.float32, [step.rows * chunk for chunk in chunks]))]

    def _codec_before(self, step: Step) -> CodecConfig:
        """The codec of the message that a step takes."""
        steps = self._program.steps
        return next(one.codec for one in steps[steps.index(step) :: -1] if isinstance(one, (Encode, Cross)))

    def _encoding(self, step: Encode, dtype: torch.dtype, device: torch.device) -> list[_Local]:
        own, bucket, order = self._own, self._bucket, step.order
        codec, feedback = Codec.from_config(step.codec), own.feedback
        made: list[_Local] = []
        encoded = bucket.dtype if codec.traits.exact else dtype
        if order.table is not None:
            made.append(_Local(partial(self._in_table, order), None))
        if encoded != dtype:
            made.append(_Local(_copied, Floats(encoded, [order.rows * chunk for chunk in bucket.chunks])))
        adds = "residuals" if feedback is not None and step.residual is not None else ""
        how: dict[str, Any] = {"sizes": order.sizes, "strides": order.strides, "outer": step.pieces, "adds": adds}
        encode = codec.encoder(bucket.chunks, encoded, device, **how)

        def plainly(tensors: Sequence[torch.Tensor], out: torch.Tensor | None, seed: int, _: Call) -> torch.Tensor:
            message: torch.Tensor = encode(tensors, out, seed)
            return message

        def with_residuals(
            tensors: Sequence[torch.Tensor], out: torch.Tensor | None, seed: int, call: Call
        ) -> torch.Tensor:
            assert feedback is not None and step.residual is not None
            residuals, factors = feedback.of(step.residual, bucket, tensors, call.scale)
            message: torch.Tensor = encode(tensors, out, seed, residuals, factors, residuals)
            return message

        made.append(_Local(with_residuals if adds else plainly, encode.bytes))
        return made

    def _in_table(self, order: Order, tensors: Sequence[torch.Tensor], *_: Any) -> list[torch.Tensor]:
        """Tensors whose shards lie in the order of a table's rows."""
        rows = self._own.table(order, tensors[0].device)[0]
        return [
            _padded(tensor, len(rows) * chunk).view(len(rows), chunk)[rows].view(-1)
            for tensor, chunk in zip(tensors, self._bucket.chunks)
        ]

    def _decoding(self, step: Decode, device: torch.device) -> _Local:
        order, bucket = step.order, self._bucket
        how: dict[str, Any] = {"sizes": order.sizes, "strides": order.strides, "outer": step.pieces}
        decode = Codec.from_config(step.codec).decoder(bucket.chunks, bucket.dtype, device, **how)
        rows = order.rows
        room = Floats(bucket.dtype, [rows * chunk for chunk in bucket.chunks])
        if order.table is None:
            return _Local(lambda message, out, _, call: decode(message, call.into() if out is None else out), room)

        def in_order(message: torch.Tensor, _: Any, __: int, call: Call) -> list[torch.Tensor]:
            places, into = self._own.table(order, device)[1], call.into()
            tensors = [tensor.view(rows, -1)[places].view(-1) for tensor in decode(message)]
            return tensors if into is None else [place.copy_(tensor) for place, tensor in zip(into, tensors)]

        return _Local(in_order, None)


class _Hop:
    """One collective of a bound program.

    Args:
        own: Runs it.
        bucket: The tensors.
        step: The collective.
        what: Describes the message.
        device: Where it lies.
        last: Whether what arrives is the caller's.
    """

    def __init__(
        self, own: Collectives, bucket: Bucket, step: Cross, what: str, device: torch.device, *, last: bool
    ) -> None:
        self._own, self._step, self._bucket, self._what, self._device = own, step, bucket, what, device
        self._lane, self._codec = bucket.lane(step.tiers[0]), Codec.from_config(step.codec)
        size = step.message_bytes(bucket.chunks, bucket.dtype.itemsize)
        self._counts, self._kept = self._counted(size), not last
        self._fallible = self._codec.traits.fallible and step.kind != "send"  # of which the receiver tells
        # A hop that the host starts and ends is timed by its clock, wherever its memory is.
        self._timed_on = device if own.lanes.streams is not None else torch.device("cpu")
        self._collective = own.transport.prepare(
            self._lane,
            step.kind,
            size,
            what,
            algorithm=step.algorithms.of(size),
            root=step.root,
            dtype=bucket.dtype,
        )

    def _counted(self, payload: int) -> HopCounts:
        step, bucket, peers = self._step, self._bucket, self._step.received
        if step.kind == "broadcast":
            peers = float(self._own.place(step.tiers[0]) != step.root)
        elements = step.rows * sum(bucket.chunks)
        raw = math.ceil(elements * bucket.dtype.itemsize * peers)
        key = bucket.role, step.tiers[0], self._codec.name
        return HopCounts(key, elements, payload, round(payload * peers), raw)

    def cross(
        self, message: torch.Tensor, room: Room | None, lost: list[Lost]
    ) -> Hops[tuple[torch.Tensor, Room | None]]:
        """Moves a message. ``lost`` gets the number of its blocks that the codec could not hold.

        Args:
            message: What is sent.
            room: Where it lies.
            lost: As above.

        Yields:
            The collective, once it is started.

        Returns:
            What has arrived, and where it lies.

        Raises:
            HopError: A message arrived changed.
        """
        own, size = self._own, self._collective.output_bytes
        into = own.arena.take(size, self._device) if size and self._kept else None
        timer = own.wire_log.timer(self._timed_on, own.lanes.waited_s)
        output = None if into is None else into.bytes(size)
        pending = self._collective.start(message, output, partial(self._end, timer), timer.ready)
        given = room is None or into is None or self._collective.checksum
        del message, output
        yield pending
        arrived = own.received(pending) if given else pending.wait()
        if self._fallible:
            lost.append((self._codec.lost(arrived, self._bucket.chunks, outer=self._step.pieces), self._bucket.label))
        return arrived, into if size else room

    def _end(self, timer: HopTimer) -> None:
        timer.stop(self._own.lanes.waited_s)
        self._own.wire_log.add(self._counts, timer)


class _Cut(_Hop):
    """A collective whose messages have no fixed size: their lengths are exchanged first, and the host waits for them."""

    def cross(
        self, message: torch.Tensor, room: Room | None, lost: list[Lost]
    ) -> Hops[tuple[torch.Tensor, Room | None]]:
        """As `_Hop.cross`.

        Raises:
            HopError: Also where a length is none that the codec writes.
        """
        own, step, bucket = self._own, self._step, self._bucket
        cut = self._exchanged(message)
        timer = own.wire_log.timer(self._timed_on, own.lanes.waited_s)
        sent = cut.of(message)
        self._counts = self._counted(sent.numel())
        algorithm = step.algorithms.of(step.message_bytes(bucket.chunks, bucket.dtype.itemsize))
        collective = own.transport.prepare(
            self._lane, step.kind, sent.numel(), self._what, algorithm=algorithm, root=step.root
        )
        pending = collective.start(sent, None, partial(self._end, timer), timer.ready)
        del message, sent
        yield pending
        return cut.whole(own.received(pending)), None

    def _exchanged(self, message: torch.Tensor) -> _Lengths:
        """Exchanges how much of a hop's records is used: 8 bytes per record."""
        own, step, bucket = self._own, self._step, self._bucket
        parts = step.ranks if step.kind == "all_to_all" else 1
        rows, place = step.rows // parts, own.place(step.tiers[0])
        sizes = [self._codec.message_bytes(bucket.chunks, 1, bucket.dtype.itemsize)] * rows
        lengths = message.new_zeros(8 * parts * rows)
        if step.kind not in ("broadcast", "receive") or step.root == place:
            lengths.copy_(mpc.lengths(message, sizes * parts).view(torch.uint8))
        kind: Kind = "all_gather" if step.kind == "all_to_all" else step.kind
        told = own.received(own.transport.start(self._lane, kind, lengths, f"{self._what} (lengths)", root=step.root))
        every = [
            [checked(part, sizes[0], bucket.label) for part in sender]
            for sender in told.view(torch.int64).view(-1, parts, rows)
        ]
        first = every[place if step.kind in ("all_gather", "all_to_all") else 0]
        arriving = [sender[place if parts > 1 else 0] for sender in every]
        return _Lengths(sizes, first, arriving, max(sum(part) for sender in every for part in sender))


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


class _Lengths(NamedTuple):
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


def _first(lost: Sequence[Lost]) -> str | None:
    """The first message with lost blocks, in words; the host waits."""
    for blocks, what in lost:
        if count := int(blocks):
            return (
                f"{what} in codec exp: {count} blocks of 32,768 numbers have more than 512 exponents outside of the windows of "
                "their lines, which the codec cannot hold"
            )
    return None


def _copied(tensors: Sequence[torch.Tensor], out: list[torch.Tensor], *_: Any) -> list[torch.Tensor]:
    """Tensors in another type; one without all of its shards is shorter."""
    made = [room[: tensor.numel()] for room, tensor in zip(out, tensors)]
    torch._foreach_copy_(made, list(tensors))
    return made


def _bytes_of(room: int | Floats) -> int:
    return room if isinstance(room, int) else room.bytes


def _padded(tensor: torch.Tensor, numel: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, numel - tensor.numel()))
