"""Runtime: executes the programs of buckets, one collective per tier with that tier's codec.

The tiers are those of MI250X machines in arXiv 2501.04266; hops that sum and quantise again follow ZeRO++
(arXiv 2306.10209).
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from hzero.codecs.codec import Codec
from hzero.comm.lanes import Chain, DeviceStreams, Hops, Lanes
from hzero.comm.transport import Collective, Pending, Transport
from hzero.comm.watchdog import HopError
from hzero.comm.wirelog import HopTimer, WireEntry, WireLog
from hzero.comm.wires import STAGE, Lane
from hzero.config import TIERS, Tier
from hzero.plan.program import Cross, Decode, Encode, Kind, Order, Program, Step, Sum, Turn
from hzero.plan.shards import ShardPlan

T = TypeVar("T")

#: Blocks of a message that its codec could not hold, int64 ``[]``, and descriptions of the message and of such blocks.
Lost: TypeAlias = tuple[torch.Tensor, str, str]
#: Comparisons of a device that have not been looked at yet, at most.
_UNREAD = 256
#: Buffers of one size that a device has not passed yet before one of them is taken again, which serialises their programs.
_BEHIND = 4
#: Largest buffer that waits for another program where nothing else needs it. Memory that waits is missing in a layer's
#: activations, and to allocate a large buffer takes less time than to fill it.
_SMALL = 1 << 14
#: Bound programs that are kept.
_BOUND = 4096
#: Added to a seed for each tier; seeds have 31 bits.
_SALT, _SEED = 0x1E3779B1, 0x7FFFFFFF


@dataclass(frozen=True)
class Bucket:
    """Description of the tensors that a chain moves.

    Attributes:
        keys: One stable id per tensor (DeepSpeed's ``ds_id``), by which residuals are kept.
        chunks: Elements of one shard of each tensor: its size over the world, rounded up.
        dtype: Type of the decoded elements; also their type on the wire under codec ``none``.
        role: The kind of state; of a `Communicator`'s messages the operation.
        channel: First part of the names of its lanes.
        direction: Last part, of a message from rank to rank; "" for none.
        name: Describes the tensors in messages; "" takes role and keys.
    """

    keys: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: torch.dtype
    role: str
    channel: str = STAGE
    direction: str = ""
    name: str = ""

    @functools.cached_property
    def label(self) -> str:
        """Name of the bucket in an error message."""
        return self.name or f"{self.role} of {len(self.keys)} parameters (ids {self.keys[0]}..{self.keys[-1]})"


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


# ---- error feedback --------------------------------------------------------------------------------------------------


@dataclass
class Residual:
    """What one tier has lost of one parameter until now.

    Attributes:
        values: The loss, bfloat16, flat; updated where it lies.
        scale: Loss scale of it.
    """

    values: torch.Tensor
    scale: float


class ErrorFeedback:
    """Residuals in bfloat16, one per tier and parameter (Seide et al. 2014; Karimireddy et al., arXiv 1901.09847).

    A residual is at most an encoding's error, and bfloat16 loses a 256th of that. It is kept once: an encoding reads it and
    overwrites it (as LoCo does, arXiv 2407.04480). A step that is skipped discards its gradients. Residuals that they have
    changed start at zero again, so such a step loses at most the error of one more encoding. Residuals start at zero.
    """

    def __init__(self) -> None:
        self._residuals: dict[tuple[str, int], Residual] = {}
        self._changed: dict[tuple[str, int], Residual] = {}  # since the last step that is done

    def of(
        self, name: str, keys: Sequence[int], tensors: Sequence[torch.Tensor], scale: float
    ) -> tuple[list[torch.Tensor], list[float]]:
        """The residuals to add to tensors before they are encoded, which the encoding overwrites with what it loses.

        Args:
            name: Of the residuals, such as the tier of the hop.
            keys: Of the tensors.
            tensors: Flat floating tensors.
            scale: Loss scale of ``tensors``, and so of the new residuals.

        Returns:
            Tensors of as many elements as ``tensors``, and the factors to multiply them by, which convert residuals of
            another scale.
        """
        residuals, factors = [], []
        for key, tensor in zip(keys, tensors):
            place = name, key
            kept = self._residuals.get(place)
            if kept is None or kept.values.numel() != tensor.numel():
                kept = self._residuals[place] = Residual(tensor.new_zeros(tensor.numel(), dtype=torch.bfloat16), scale)
            self._changed[place] = kept
            residuals.append(kept.values)
            factors.append(scale / kept.scale)
            kept.scale = scale
        return residuals, factors

    def commit(self) -> None:
        """The step is done: its residuals are added to the next gradients."""
        self._changed.clear()

    def discard(self) -> None:
        """Sets residuals to zero that gradients since the last `commit`, which were discarded, have changed."""
        for kept in self._changed.values():
            kept.values.zero_()
        self._changed.clear()

    @property
    def bytes(self) -> int:
        """Memory of the residuals on this rank."""
        return sum(kept.values.nbytes for kept in self._residuals.values())

    def clear(self) -> None:
        """Forgets all residuals: their weights have been replaced."""
        self._residuals.clear()
        self._changed.clear()


# ---- memory of messages -----------------------------------------------------------------------------------------------


class Floats(NamedTuple):
    """Tensors between two steps: their type and elements."""

    dtype: torch.dtype
    numels: list[int]

    @property
    def bytes(self) -> int:
        """Their memory."""
        return sum(self.numels) * self.dtype.itemsize


class Room:
    """A buffer of the `Arena`.

    Attributes:
        buffer: Its memory, uint8.
        event: On a device: recorded where it was last used.
    """

    def __init__(self, buffer: torch.Tensor, streams: DeviceStreams | None) -> None:
        self.buffer, self._streams = buffer, streams
        self.event: Any = None if streams is None else streams.event()
        self._wanted: Any = None
        self._view: Any = None

    def view(self, wanted: int | Floats) -> Any:
        """A message of so many bytes in it, or flat tensors, one after the other."""
        if self._wanted != wanted:
            self._wanted = wanted
            if isinstance(wanted, int):
                self._view = self.buffer[:wanted]
            else:
                self._view = list(self.buffer[: wanted.bytes].view(wanted.dtype).split(wanted.numels))
        return self._view

    def __del__(self) -> None:
        # Also of an engine that nobody has closed, and of a chain that has failed: its streams may still use the memory.
        if self._streams is not None:
            with contextlib.suppress(Exception):  # at the end of the process the device may be gone
                self._streams.used_by_all(self.buffer)


class Arena:
    """Memory of messages, which a run of a program takes step by step and leaves to the next run.

    What is left is used again at once on CPUs, where large buffers are not kept. On a device the stream that takes a buffer
    waits for the event of its last use; until some are `_BEHIND`, a buffer that the device has passed or a new one is taken
    instead, so that programs overlap. Before it makes a new one it frees large ones that the device has passed.

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
            if room is None and self._streams is not None:
                self._free = [one for one in self._free if _size_of(one) <= _SMALL or not one.event.query()]
        if room is None:
            return Room(torch.empty(size, dtype=torch.uint8, device=device), self._streams)
        if self._streams is not None:
            self._streams.wait(room.event)
        return room

    def give(self, room: Room) -> None:
        """Takes a buffer back that the current stream has used last."""
        if self._streams is not None:
            room.event.record(self._streams.device.current_stream())
        elif _size_of(room) > _SMALL:
            return
        with self._lock:
            bisect.insort(self._free, room, key=_size_of)


def _size_of(room: Room) -> int:
    return room.buffer.numel()


# ---- collectives --------------------------------------------------------------------------------------------------------


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
        roles: The channel of each role of buckets; None: the bucket says it.
    """

    def __init__(
        self,
        plan: ShardPlan,
        transport: Transport,
        wire_log: WireLog,
        feedback: ErrorFeedback | None = None,
        lanes: Lanes | None = None,
        roles: Mapping[str, str] | None = None,
    ) -> None:
        self.plan, self.wire_log, self.feedback = plan, wire_log, feedback
        self.lanes = lanes or Lanes()
        self.transport, self._roles = transport, roles or {}
        self.arena = Arena(self.lanes.streams)
        if self.lanes.streams is not None and transport.unread is None:
            transport.unread = []
        self._lost: list[Lost] = []
        self._bound: dict[tuple[int, Bucket], Bound] = {}
        self._tables: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

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

    def lane(self, bucket: Bucket, tier: Tier) -> Lane:
        """The lane of a bucket's hops on a tier."""
        channel = self._roles.get(bucket.role, bucket.channel)
        return (channel, tier, bucket.direction) if bucket.direction else (channel, tier)

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
        """Keeps the counts of a chain for `lost`."""
        self._lost += lost
        if len(self._lost) > _UNREAD:  # one of the older ones tells as much
            self._lost = [max(self._lost, key=lambda one: int(one[0]))]

    def lost(self) -> str | None:
        """Which message since the last call had blocks that its codec could not hold; waits for the device."""
        lost, self._lost = self._lost, []
        if lost and self.lanes.streams is not None:
            self.lanes.streams.join()
        return first_lost([(self.used(blocks), what, why) for blocks, what, why in lost])

    def verify(self) -> None:
        """On an asynchronous device: waits for all that has arrived until now, and looks whether it has arrived whole.

        Raises:
            HopError: A message arrived changed.
        """
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


def first_lost(lost: Sequence[Lost]) -> str | None:
    """The first message with lost blocks, in words; the host waits."""
    for blocks, what, why in lost:
        if count := int(blocks):
            return f"{what}: {count} {why}"
    return None


# ---- programs of one bucket -----------------------------------------------------------------------------------------


class Call(NamedTuple):
    """What one run brings: arguments of `Bound.run`."""

    scale: float = 1.0
    into: Callable[[], Sequence[torch.Tensor] | None] = lambda: None
    lost: list[Lost] | None = None


class _Local(NamedTuple):
    """A step without a collective.

    Attributes:
        run: Takes the value, the room for the result (None: the caller's, or it makes its own), a seed and a `Call`; returns the
            result.
        room: What the result needs: bytes of a message, tensors, or None.
        salt: Added to seeds: each hop rounds by chance in its own way, and all ranks that hold copies in the same one.
    """

    run: Callable[[Any, Any, int, Call], Any]
    room: int | Floats | None
    salt: int = 0


class Bound:
    """A program of one bucket, ready to run again: layouts, descriptors, lanes, labels and counts are found once.

    A second run allocates only the tensors, or the message, that it leaves, and large messages on CPUs.

    Args:
        collectives: Run it.
        program: The steps.
        bucket: The tensors; ``bucket.dtype`` is the type of hops with codec ``none``.

    Attributes:
        lanes: Those of its hops.
    """

    def __init__(self, collectives: Collectives, program: Program, bucket: Bucket) -> None:
        self._own, self._program, self._bucket = collectives, program, bucket
        self.lanes = [collectives.lane(bucket, cross.tiers[0]) for cross in program.crossings]
        self._steps: tuple[torch.dtype | None, list[_Local | _Hop]] = None, []  # for the type of what a run begins with

    def run(
        self,
        read: Callable[[], Any],
        then: Callable[[Any], T],
        *,
        seed: int = 0,
        own_seed: int | None = None,
        after: Sequence[Chain[Any]] = (),
        patient: bool = False,
        **call: Any,
    ) -> Chain[T]:
        """Starts the program.

        Args:
            read: Gives what the first step takes: a uint8 message, or flat tensors whose missing elements count as zero.
            then: Makes the result of what the last step leaves: a uint8 message, or flat tensors.
            seed: Seed of stochastic rounding; where copies are encoded again it has to be the same on all ranks.
            own_seed: Seed of the first encoding; None takes the same.
            after: Chains that make what ``read`` reads.
            patient: Whether the hops make way for those of later programs, see `Lanes.submit`.
            call: ``scale``: loss scale of gradients; residuals are converted to it. ``into``: called when everything has
                arrived, gives the tensors, like the result, that the last step writes, or adds to if it is a sum or a `Decode`
                that adds; if it gives None, new ones are made. ``lost``: takes the blocks that a codec could not hold, which
                otherwise `Collectives.lost` tells of.

        Returns:
            A chain with the result of ``then``.
        """
        hops = self.hops(read, then, seed, seed if own_seed is None else own_seed, Call(**call))
        return self._own.lanes.submit(hops, self.lanes, after, owner=self._own.transport, patient=patient)

    def hops(self, read: Callable[[], Any], then: Callable[[Any], T], seed: int, own_seed: int, call: Call) -> Hops[T]:
        """The steps, as lanes run them."""
        value, arena = read(), self._own.arena
        del read  # it may hold what has been read
        tensors = [value] if isinstance(value, torch.Tensor) else value
        dtype, device = tensors[0].dtype, tensors[0].device
        given, steps = self._steps
        if given is not dtype:  # other threads may run it too
            steps = self._ready(dtype, device)
            self._steps = dtype, steps
        if tensors is value:
            list(map(self._own.used, tensors))
        del tensors
        room: Room | None = None  # where the value lies
        crossed, lost = False, list[Lost]()
        for step in steps:
            if isinstance(step, _Local):
                into = None if step.room is None else arena.take(_bytes_of(step.room), device)
                out = None if into is None else into.view(step.room)  # type: ignore[arg-type]
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

    def _ready(self, dtype: torch.dtype, device: torch.device) -> list[_Local | _Hop]:
        """The steps for inputs of a type."""
        steps, ready = self._program.steps, list[_Local | _Hop]()
        for index, step in enumerate(steps):
            last = index + 1 == len(steps)
            if isinstance(step, Cross):
                made = _Hop if step.codec.traits.fixed else _Cut
                ready.append(made(self._own, self._bucket, step, device, last=last))
                continue
            following = next((one for one in steps[index:] if isinstance(one, Cross)), None)
            salt = (1 + TIERS.index(following.tiers[0])) * _SALT if index and following is not None else 0
            local = [one._replace(salt=salt) for one in self._made(step, dtype, device)]
            if last:  # what it leaves is the caller's
                local[-1] = local[-1]._replace(room=None)
            ready += local
            if isinstance(step, Sum) and step.target is None:
                dtype = torch.float32
            elif isinstance(step, Decode):
                dtype = self._bucket.dtype
        return ready

    def _made(self, step: Step, dtype: torch.dtype, device: torch.device) -> list[_Local]:
        """A step without a collective; of tensors of ``dtype``, if it takes some."""
        if isinstance(step, Encode):
            return self._encoding(step, dtype, device)
        if isinstance(step, Decode):
            return [self._decoding(step, device)]
        if isinstance(step, Turn):
            return [self._turning(step)]
        assert isinstance(step, Sum), step
        return [self._summing(step, device)]

    def _encoding(self, step: Encode, dtype: torch.dtype, device: torch.device) -> list[_Local]:
        own, bucket, order = self._own, self._bucket, step.order
        codec, feedback, residual = Codec.from_config(step.codec), own.feedback, step.residual
        made: list[_Local] = []
        encoded = bucket.dtype if codec.traits.exact else dtype
        if order.table is not None:
            made.append(_Local(partial(self._in_table, order), None))
        if encoded != dtype:
            made.append(_Local(_copied, Floats(encoded, [order.rows * chunk for chunk in bucket.chunks])))
        adds = "residuals" if feedback is not None and residual is not None else ""
        how: dict[str, Any] = {"sizes": order.sizes, "strides": order.strides, "outer": step.pieces, "adds": adds}
        encode = codec.encoder(bucket.chunks, encoded, device, **how)

        def run(tensors: Sequence[torch.Tensor], out: torch.Tensor | None, seed: int, call: Call) -> Any:
            if feedback is None or residual is None:
                return encode(tensors, out, seed)
            residuals, factors = feedback.of(residual, bucket.keys, tensors, call.scale)
            return encode(tensors, out, seed, residuals, factors, residuals)

        return [*made, _Local(run, encode.bytes)]

    def _in_table(self, order: Order, tensors: Sequence[torch.Tensor], *_: Any) -> list[torch.Tensor]:
        """Tensors whose shards lie in the order of a table's rows."""
        rows = self._own.table(order, tensors[0].device)[0]
        padded = (
            torch.nn.functional.pad(tensor, (0, len(rows) * chunk - tensor.numel()))
            for tensor, chunk in zip(tensors, self._bucket.chunks)
        )
        return [tensor.view(len(rows), -1)[rows].view(-1) for tensor in padded]

    def _decoding(self, step: Decode, device: torch.device) -> _Local:
        own, bucket, order = self._own, self._bucket, step.order
        how: dict[str, Any] = {"sizes": order.sizes, "strides": order.strides, "outer": step.pieces, "add": step.add}
        decode = Codec.from_config(step.codec).decoder(bucket.chunks, bucket.dtype, device, **how)
        room = Floats(bucket.dtype, [order.rows * chunk for chunk in bucket.chunks])
        if order.table is None:
            return _Local(lambda message, out, _, call: decode(message, call.into() if out is None else out), room)

        def in_order(message: torch.Tensor, _: Any, __: int, call: Call) -> Sequence[torch.Tensor]:
            shards, rows = own.table(order, device)
            into, held = call.into(), None
            if step.add:
                assert into is not None, "there is nothing to add to"
                held = [tensor.view(order.rows, -1)[shards].view(-1) for tensor in into]
            whole = [tensor.view(order.rows, -1)[rows].view(-1) for tensor in decode(message, held)]
            return whole if into is None else [place.view(-1).copy_(one) for place, one in zip(into, whole)]

        return _Local(in_order, None)

    def _turning(self, step: Turn) -> _Local:
        world = self._own.plan.grid.world_size
        shape = step.crossed, step.ranks, world // step.crossed // step.ranks, -1

        def turn(value: torch.Tensor, out: torch.Tensor, *_: Any) -> torch.Tensor:
            turned = value.view(shape).transpose(0, 1)
            out.view(turned.shape).copy_(turned)
            return out

        return _Local(turn, step.codec.format.message_bytes(self._bucket.chunks, world, self._bucket.dtype.itemsize))

    def _summing(self, step: Sum, device: torch.device) -> _Local:
        codec, chunks = Codec.from_config(step.codec), self._bucket.chunks
        how: dict[str, Any] = {"inner": step.rows, "dtype": self._bucket.dtype, "device": device}
        if step.target is not None:
            encode = codec.summer(step.peers, chunks, to=Codec.from_config(step.target), outer=step.pieces, **how)
            return _Local(lambda value, out, seed, _: encode(value, out, seed), encode.bytes)
        new = codec.summer(step.peers, chunks, **how)
        onto = codec.summer(step.peers, chunks, add=True, **how)

        def run(value: torch.Tensor, out: list[torch.Tensor] | None, _: int, call: Call) -> Sequence[torch.Tensor]:
            sums = call.into() if out is None else None
            return new(value, out) if sums is None else onto(value, sums)

        return _Local(run, Floats(torch.float32, [step.rows * chunk for chunk in chunks]))


class _Hop:
    """One collective of a bound program.

    Args:
        own: Runs it.
        bucket: The tensors.
        step: The collective.
        device: Where the message lies.
        last: Whether what arrives is the caller's.
    """

    def __init__(self, own: Collectives, bucket: Bucket, step: Cross, device: torch.device, *, last: bool) -> None:
        self._own, self._step, self._bucket, self._device = own, step, bucket, device
        self._lane, self._codec = own.lane(bucket, step.tiers[0]), Codec.from_config(step.codec)
        self._what = f"{bucket.label} in codec {step.codec.codec}"
        self._size, self._kept = step.message_bytes(bucket.chunks, bucket.dtype.itemsize), not last
        self._counts = self._counted(self._size)
        self._fallible = bool(self._codec.traits.lost) and step.kind != "send"  # of which the receiver tells
        # A hop that the host starts and ends is timed by its clock, wherever its memory is.
        self._timed_on = device if own.lanes.streams is not None else torch.device("cpu")
        self._collective = self._prepared(step.kind, self._size, self._what)

    def _prepared(self, kind: Kind, size: int, what: str) -> Collective:
        step = self._step
        how: dict[str, Any] = {"algorithm": step.algorithms.of(self._size), "root": step.root}
        return self._own.transport.prepare(self._lane, kind, size, what, dtype=self._bucket.dtype, **how)

    def _counted(self, payload: int) -> WireEntry:
        step, bucket, peers = self._step, self._bucket, self._step.received
        if step.kind == "broadcast":
            peers = float(self._own.place(step.tiers[0]) != step.root)
        elements = step.rows * sum(bucket.chunks)
        raw = math.ceil(elements * bucket.dtype.itemsize * peers)
        return WireEntry(
            bucket.role, step.tiers[0], self._codec.name, 1, elements, payload, round(payload * peers), raw
        )

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
        pending = self._started(self._collective, message, None if into is None else into.view(size))
        given = room is None or into is None or self._collective.checksum
        del message
        yield pending
        arrived = own.received(pending) if given else pending.wait()
        if self._fallible:
            blocks = self._codec.lost(arrived, self._bucket.chunks, outer=self._step.pieces)
            lost.append((blocks, self._what, self._codec.traits.lost))
        return arrived, into if size else room

    def _started(self, collective: Collective, message: torch.Tensor, output: torch.Tensor | None = None) -> Pending:
        timer = self._own.wire_log.timer(self._timed_on)
        return collective.start(message, output, partial(self._end, timer), timer.ready)

    def _end(self, timer: HopTimer) -> None:
        timer.stop()
        self._own.wire_log.add(self._counts, timer)


class _Cut(_Hop):
    """A collective of messages without a fixed size: the largest number of bytes is exchanged first, and the host waits."""

    def cross(
        self, message: torch.Tensor, room: Room | None, lost: list[Lost]
    ) -> Hops[tuple[torch.Tensor, Room | None]]:
        """As `_Hop.cross`.

        Raises:
            HopError: Also for bytes that the codec does not write.
        """
        own, step, every = self._own, self._step, self._step.kind == "all_to_all"
        parts, senders = step.ranks if every else 1, step.ranks if every or step.kind == "all_gather" else 1
        rows, row = step.rows // parts, self._size // step.rows
        used: list[torch.Tensor] = []
        receives = step.kind == "broadcast" and step.root != own.place(step.tiers[0])
        if step.kind != "receive" and not receives:
            used = self._codec.cut(message, parts, row)
        told = torch.tensor([max((part.numel() for part in used), default=0)]).to(self._device).view(torch.uint8)
        asking = self._prepared("all_gather" if every else step.kind, told.numel(), f"{self._what} (lengths)")
        length = int(own.received(asking.start(told)).view(torch.int64).max())
        sent = message.new_zeros(parts, length)
        for place, part in zip(sent, used):
            place[: part.numel()] = part
        self._counts = self._counted(sent.numel())
        pending = self._started(self._prepared(step.kind, sent.numel(), self._what), sent.view(-1))
        del message, sent, used
        yield pending
        try:
            return self._codec.whole(own.received(pending), senders, rows, row), None
        except ValueError as error:
            raise HopError(f"hzero: {self._what}: {error}") from error


def _copied(tensors: Sequence[torch.Tensor], out: list[torch.Tensor], *_: Any) -> list[torch.Tensor]:
    """Tensors in another type; one without all of its shards is shorter."""
    made = [room[: tensor.numel()] for room, tensor in zip(out, tensors)]
    torch._foreach_copy_(made, list(tensors))
    return made


def _bytes_of(room: int | Floats) -> int:
    return room if isinstance(room, int) else room.bytes
