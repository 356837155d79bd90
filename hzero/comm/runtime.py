"""Runtime: executes the programs of buckets, one collective per tier with that tier's codec.

The tiers follow arXiv 2501.04266 on MI250X machines. Hops that sum and quantise again follow ZeRO++ (arXiv 2306.10209).
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
import operator
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch.profiler import record_function

from hzero.codecs.codec import Codec, Recoder, checksums
from hzero.codecs.formats import CHECKSUM_BYTES, RecordFormat, Rows
from hzero.codecs.reference import Adds, module_of
from hzero.comm.checksum import Arrived, Comparison, addressed, addresses
from hzero.comm.lanes import Chain, DeviceStreams, Lanes, Steps
from hzero.comm.peers import Peers
from hzero.comm.watchdog import HopError, MissingPeerError
from hzero.comm.wirelog import HopTimer, WireEntry, WireLog
from hzero.comm.wires import STAGE, DisagreementError, Lane, Work
from hzero.config import PLAIN, TIERS, Algorithm, Tier
from hzero.program.program import Cross, Decode, Encode, Kind, Program, Sum, Turn
from hzero.program.shards import ShardPlan

T = TypeVar("T")
#: Computes the result of a run from the output of its last step; None returns that output.
Then: TypeAlias = Callable[[Any], Any] | None

#: Maximum number of checksum comparisons that wait on a device.
_UNREAD = 256
#: Number of bound programs in the cache. Messages of changing size, such as text, need one for each size.
_BOUND = 4096
#: Number of busy buffers of one size at which the arena reuses one, although that serialises two programs.
_BEHIND = 4
#: Largest idle buffer, in bytes, that CPU keeps, and that a device keeps when it needs a new one. Idle buffers take
#: memory from activations, and allocating a large one costs less than filling it.
_SMALL = 1 << 14
_SIZE = operator.attrgetter("size")
#: Added to a seed for each tier; seeds have 31 bits.
_SALT, _SEED = 0x1E3779B1, 0x7FFFFFFF


@dataclass(frozen=True)
class Bucket:
    """Description of the tensors that a chain moves.

    Attributes:
        keys: One stable number per tensor; residuals are stored by key.
        chunks: Elements of one shard of each tensor: its size divided by the world size, rounded up.
        dtype: Dtype of the decoded elements; also their dtype on the wire with codec ``none``.
        role: The kind of state; for messages of a `Communicator`, the operation.
        channel: First part of the lane names.
        direction: Last part of the lane name of a point-to-point message; otherwise "".
        name: Description of the tensors for messages; "" uses role and keys.
        owned: Elements of this rank's shard of each tensor, without padding; only for parameters.
    """

    keys: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: torch.dtype
    role: str
    channel: str = STAGE
    direction: str = ""
    name: str = ""
    owned: tuple[int, ...] = ()

    @functools.cached_property
    def label(self) -> str:
        """Name of the bucket in an error message."""
        return self.name or f"{self.role} of {len(self.keys)} parameters (ids {self.keys[0]}..{self.keys[-1]})"


def seed_of(count: int, rank: int = 0) -> int:
    """Returns the seed of a run. Pass ``rank`` where ranks must round differently, so that the errors of a sum do not add up."""
    return (count * 1_000_003 + rank) & _SEED


def in_buckets(items: Iterable[tuple[T, int]], limit: int) -> Iterator[list[T]]:
    """Groups ``(item, elements)`` pairs into lists of at most ``limit`` elements, with at least one item each."""
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


# ---- collectives --------------------------------------------------------------------------------------------------------


class Collectives:
    """Gathers, reductions and moves that cross one tier at a time.

    Every operation uses a `Bucket`: several tensors, each cut into one shard per rank, that travel in one message. A program
    lists the steps: encode the tensors, send the message over a tier, then decode, sum or encode again. `bind` prepares a
    program for a bucket. Each run submits its collectives to the `Lanes`. Chains of several buckets overlap, since tiers use
    different links.

    Every rank decodes the same bytes, including its shards, so all ranks get the same bits. Sums are computed in float32, in the
    order of peers.

    This class does not average, accumulate or keep copies between calls. It keeps only the residuals of error feedback.

    Args:
        plan: The shard plan of this rank.
        peers: The ranks of every lane, see `hzero.comm.peers.peers_of`.
        wire_log: Counts every hop of a program.
        lanes: Lanes that run the hops; None makes new ones.
        roles: First part of the lane names for a bucket's channel and role. A missing pair uses the channel.
        library_sums: Whether the library may compute sums with codec ``none``, in its order and in the dtype of the elements.
            Otherwise this class computes them in float32, in the order of peers, and rounds once.
    """

    def __init__(
        self,
        plan: ShardPlan,
        peers: dict[Lane, Peers],
        wire_log: WireLog,
        lanes: Lanes | None = None,
        roles: Mapping[tuple[str, str], str] | None = None,
        library_sums: bool = True,
    ) -> None:
        self.plan, self.peers, self.wire_log = plan, peers, wire_log
        self.lanes, self.library_sums = lanes or Lanes(), library_sums
        self.feedback = ErrorFeedback()
        self.arena = Arena(self.lanes.streams)
        self._roles = roles or {}
        #: Prepares a program for a bucket; the same arguments return the same object.
        self.bind: Callable[[Program, Bucket], BoundProgram] = functools.lru_cache(_BOUND)(partial(BoundProgram, self))
        self._unread: list[Comparison] = []

    def prepare(self, lane: Lane, kind: Kind, size: int, what: str, **how: Any) -> Collective:
        """Returns a collective over the ranks of a lane, which can start any number of times; arguments as in `Collective`."""
        return Collective(self, lane, kind, size, what, **how)

    def of_step(self, step: Cross, bucket: Bucket, size: int, **how: Any) -> Collective:
        """Returns the collective of a program step, for a message of ``size`` bytes. The wire log counts it."""
        tier = step.tiers[0]
        peers = float(self.receives(step)) if step.kind == "broadcast" else step.received
        elements = step.rows * sum(bucket.chunks)
        arriving, raw = round(size * peers), math.ceil(elements * bucket.dtype.itemsize * peers)
        if step.uneven is not None:
            row = step.codec.format.message_bytes(bucket.chunks, 1, bucket.dtype.itemsize)
            how["uneven"] = [[rows * row for rows in side] for side in step.uneven]
            received = sum(step.uneven[1])
            arriving, raw = received * row, received * sum(bucket.chunks) * bucket.dtype.itemsize
        counts = WireEntry(bucket.role, tier, step.codec.codec, 1, elements, size, arriving, raw)
        how |= {"algorithm": step.algorithms.of(size), "root": step.root, "counts": counts}
        what = f"{bucket.label} in codec {step.codec.codec}"
        return self.prepare(self.lane(bucket, tier), step.kind, size, what, dtype=bucket.dtype, **how)

    def receives(self, step: Cross) -> bool:
        """Whether this rank only receives in a step."""
        coordinate = getattr(self.plan.grid.coordinates(self.plan.rank), step.tiers[0])
        return step.kind == "receive" or (step.kind == "broadcast" and step.root != coordinate)

    def lane(self, bucket: Bucket, tier: Tier) -> Lane:
        """Returns the lane of a bucket's hops on a tier."""
        channel = self._roles.get((bucket.channel, bucket.role), bucket.channel)
        return (channel, tier, bucket.direction) if bucket.direction else (channel, tier)

    def used(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor``. On a device, keeps its memory until the current stream has passed this point."""
        if self.lanes.streams is not None:
            self.lanes.streams.used(tensor)
        return tensor

    # ---- checksums --------------------------------------------------------------------------------------------

    def compare(self, comparison: Comparison) -> None:
        """Compares checksums: immediately, or in `verify` on an asynchronous device, where the host would have to wait."""
        if self.lanes.streams is None:
            comparison.check()
            return
        self._unread.append(comparison)
        if len(self._unread) >= _UNREAD:
            self.verify()

    def verify(self) -> None:
        """On an asynchronous device: waits for all messages so far, and compares their checksums.

        Raises:
            HopError: A message arrived corrupted.
        """
        unread, self._unread = self._unread, []
        if not unread or self.lanes.streams is None:
            return
        self.lanes.streams.join()
        for comparison in unread:
            self.used(comparison.sent)
            self.used(comparison.arrived)
        sent, arrived = (torch.cat([getattr(one, side) for one in unread]) for side in ("sent", "arrived"))
        if not torch.equal(sent, arrived):
            for comparison in unread:
                comparison.check()


# ---- programs of one bucket -----------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """One step of a bound program, with or without a collective.

    Attributes:
        room: Arena space for the result: bytes of a message, tensors, or None.
        run: Without a collective: receives the value, the space for the result (None: it makes its own) and the arguments that
            ``takes`` selects; returns the result.
        takes: 1: ``run`` receives a seed; 2: a seed and the loss scale.
        salt: Added to seeds. Each hop then rounds differently, and all ranks with the same copy round in the same way.
        last: Whether the result belongs to the caller.
        collective: Receives the value and writes its result into the space.
        in_place: Whether the result overwrites the message.
    """

    room: int | FlatTensors | None
    run: Callable[..., Any] = id
    takes: int = 0
    salt: int = 0
    last: bool = False
    collective: Collective | _UnsizedCollective | None = None
    in_place: bool = False


class BoundProgram:
    """A program prepared for one bucket: layouts, descriptors, lanes, labels and counts are computed once.

    A second run allocates only the tensors or the message that it returns, and large messages on CPU.

    Args:
        collectives: The collectives that run the program.
        program: The steps.
        bucket: The tensors; ``bucket.dtype`` is the dtype of hops with codec ``none``.

    Attributes:
        bucket: As given.
        lanes: Lanes of the program's hops.
    """

    def __init__(self, collectives: Collectives, program: Program, bucket: Bucket) -> None:
        self._collectives, self._program, self.bucket = collectives, program, bucket
        self.lanes = [collectives.lane(bucket, cross.tiers[0]) for cross in program.crossings]
        self._ready: tuple[Any, list[_Step]] = None, []  # steps for the last dtype and device of inputs

    def run(
        self, read: Callable[[], Any], then: Then = None, *, after: Sequence[Chain[Any]] = (), **how: Any
    ) -> Chain[Any]:
        """Starts the program.

        Args:
            read: Returns the input of the first step: a uint8 message, or flat tensors whose missing elements count as zero.
            then: Computes the result from the output of the last step: a uint8 message, or flat tensors. None returns that
                output.
            after: Chains that compute the tensors that ``read`` reads.
            how: Other arguments of `steps`.

        Returns:
            A chain with the result of ``then``.
        """
        return self._collectives.lanes.submit(self.steps(read, then, **how), self.lanes, after)

    def steps(
        self,
        read: Callable[[], Any],
        then: Then = None,
        *,
        seed: int = 0,
        first_seed: int | None = None,
        scale: float = 1.0,
        into: Callable[[], Sequence[torch.Tensor] | None] | None = None,
    ) -> Steps[Any]:
        """Runs the steps as a generator that `Lanes` resume. A buffer returns to the arena once the next step has read it.

        Args:
            read: As in `run`.
            then: As in `run`.
            seed: Seed of stochastic rounding. It must be the same on all ranks if copies are encoded again.
            first_seed: Seed of encodings before the first hop; None uses ``seed``.
            scale: Loss scale of gradients; residuals are converted to it.
            into: Called when everything has arrived. Returns the tensors that the last step writes, or adds to if it is a sum or
                an adding `Decode`. They have the shapes of the result. If it is or returns None, the step makes new ones.
        """
        value, arena, streams = read(), self._collectives.arena, self._collectives.lanes.streams
        del read  # it may keep the input alive
        first = value if isinstance(value, torch.Tensor) else value[0]
        dtype, device = first.dtype, first.device
        ready, steps = self._ready  # read once: lanes change it
        if ready != (dtype, device):
            steps = self._prepared(dtype, device)
            self._ready = (dtype, device), steps
        if streams is not None:
            for tensor in [value] if first is value else value:
                streams.used(tensor)
        del first
        current = seed if first_seed is None else first_seed
        held: Room | None = None  # buffer of the value
        crossed = False
        for step in steps:
            if step.collective is not None and not crossed:
                yield  # the inputs have been read
                crossed, current = True, seed
            room = None if step.room is None else arena.take(step.room, device)
            out = None if room is None else room.view
            if step.collective is not None:
                pending = step.collective.start(value, out)
                yield  # the lane may compute the result of an earlier chain
                pending.end()
                if streams is None:
                    yield  # the lane may start the hop of a later chain
                value = pending.wait(kept=held is not None and room is not None)
                del pending  # frees the message
                if step.in_place:
                    continue
            else:
                if step.last and into is not None:
                    out = into()
                value = step.run(value, out, *((current + step.salt) & _SEED, scale)[: step.takes])
            if held is not None:
                arena.give(held)
            held = room
        if not crossed:
            yield
        result = value if then is None else then(value)
        if held is not None:
            arena.give(held)
        return result

    # ---- steps, made ready --------------------------------------------------------------------------------------

    def _prepared(self, dtype: torch.dtype, device: torch.device) -> list[_Step]:
        """Returns the steps for inputs of a dtype."""
        steps, ready = self._program.steps, list[_Step]()
        checked = self._program.checked if self._collectives.plan.checksum else lambda _: (0, 0)
        makers: dict[Any, Callable[..., list[_Step]]] = {
            Encode: self._encoding,
            Turn: self._turning,
            Cross: self._crossing,
            Sum: self._summing,
            Decode: self._decoding,
        }
        for index, step in enumerate(steps):
            last = index + 1 == len(steps)
            following = next((one for one in steps[index:] if isinstance(one, Cross)), None)
            salt = (1 + TIERS.index(following.tiers[0])) * _SALT if index and following is not None else 0
            crosses = isinstance(step, Cross)
            parts = checked(index) if crosses else (checked(index - 1)[1], checked(index + 1)[0])
            made = [one._replace(salt=salt) for one in makers[type(step)](step, dtype, device, parts)]
            if parts[0] and not crosses:
                made[0] = made[0]._replace(run=partial(_compared, made[0].run))
            if last:
                made[-1] = made[-1]._replace(room=None, last=True)
            ready += made
            if isinstance(step, Sum) and step.target is None:
                dtype = torch.float32
            elif isinstance(step, Decode):
                dtype = self.bucket.dtype
        return ready

    def _floats(self, dtype: torch.dtype, rows: int) -> FlatTensors:
        return FlatTensors(dtype, [rows * chunk for chunk in self.bucket.chunks])

    def _encoding(self, step: Encode, dtype: torch.dtype, device: torch.device, parts: tuple[int, int]) -> list[_Step]:
        bucket, order, feedback, residual = self.bucket, step.order, self._collectives.feedback, step.residual
        codec = Codec.from_config(step.codec)
        made: list[_Step] = []
        encoded = bucket.dtype if step.codec.traits.exact else dtype
        if step.codec.traits.plain and dtype != encoded == torch.bfloat16:  # the same records, cast while encoding
            codec, encoded = Codec(RecordFormat.of("bf16")), dtype
        if order.table is not None:
            made.append(_Step(None, partial(self._in_table, _rows_of(order.table, device)[0])))
        if encoded != dtype:
            made.append(_Step(self._floats(encoded, order.rows), _copied))
        adds: Adds = "residuals" if residual is not None else ""
        rows = Rows.of(bucket.chunks, order.sizes, order.strides, step.outer, parts[1])
        encode = codec.encoder(rows, encoded, device, adds)

        def with_residuals(tensors: Sequence[torch.Tensor], out: torch.Tensor | None, seed: int, scale: float) -> Any:
            assert residual is not None
            residuals, factors = feedback.of(residual, bucket.keys, tensors, scale)
            return encode(tensors, out, seed, residuals, factors)

        return [*made, _Step(encode.bytes, with_residuals, 2) if adds else _Step(encode.bytes, encode, 1)]

    def _in_table(self, rows: torch.Tensor, tensors: Sequence[torch.Tensor], _: Any) -> list[torch.Tensor]:
        """Reorders shards by the rows of a table."""
        padded = (
            torch.nn.functional.pad(tensor, (0, len(rows) * chunk - tensor.numel()))
            for tensor, chunk in zip(tensors, self.bucket.chunks)
        )
        return [tensor.view(len(rows), -1)[rows].view(-1) for tensor in padded]

    def _turning(self, step: Turn, *_: Any) -> list[_Step]:
        world = self._collectives.plan.grid.world_size
        shape = step.crossed, step.ranks, world // step.crossed // step.ranks, -1

        def turn(value: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            turned = value.view(shape).transpose(0, 1)
            out.view(turned.shape).copy_(turned)
            return out

        return [_Step(step.codec.format.message_bytes(self.bucket.chunks, world, self.bucket.dtype.itemsize), turn)]

    def _crossing(self, step: Cross, _: torch.dtype, device: torch.device, parts: tuple[int, int]) -> list[_Step]:
        if not step.codec.traits.fixed:
            return [_Step(None, collective=_UnsizedCollective(self._collectives, self.bucket, step, device))]
        size = step.message_bytes(self.bucket.chunks, self.bucket.dtype.itemsize)
        how = dict(zip(("written", "read"), map(bool, parts)))
        collective = self._collectives.of_step(step, self.bucket, size, **how)
        return [_Step(collective.output_bytes or None, collective=collective, in_place=not collective.output_bytes)]

    def _summing(self, step: Sum, _: torch.dtype, device: torch.device, parts: tuple[int, int]) -> list[_Step]:
        codec, chunks, dtype = Codec.from_config(step.codec), self.bucket.chunks, self.bucket.dtype
        rows = Rows.of(chunks, (step.peers, step.rows), outer=step.peers, parts=parts[0])
        if step.target is not None:
            summed = Rows.of(chunks, (step.rows,), outer=step.outer, parts=parts[1])
            encode = codec.recoder(rows, dtype, device, Codec.from_config(step.target), summed)
            return [_Step(encode.bytes, encode, 1)]
        room, new = self._floats(torch.float32, step.rows), codec.decoder(rows, dtype, device, sums=True)
        if step is not self._program.steps[-1]:
            return [_Step(room, new)]
        onto = codec.decoder(rows, dtype, device, add=True, sums=True)
        return [_Step(room, lambda value, sums, checks=None: (new if sums is None else onto)(value, sums, checks))]

    def _decoding(self, step: Decode, _: torch.dtype, device: torch.device, parts: tuple[int, int]) -> list[_Step]:
        bucket, order = self.bucket, step.order
        codec = Codec.from_config(step.codec)
        layout = Rows.of(bucket.chunks, order.sizes, order.strides, step.outer, parts[0])
        decode = codec.decoder(layout, bucket.dtype, device, step.add)
        if order.table is None:
            return [_Step(self._floats(bucket.dtype, order.rows), decode)]
        shards, rows = _rows_of(order.table, device)

        def in_order(message: torch.Tensor, into: Any, checks: torch.Tensor | None = None) -> Any:
            added = None
            if step.add:
                assert into is not None, "there is nothing to add to"
                added = [tensor.view(order.rows, -1)[shards].view(-1) for tensor in into]
            whole = [tensor.view(order.rows, -1)[rows].view(-1) for tensor in decode(message, added, checks)]
            return whole if into is None else [place.view(-1).copy_(one) for place, one in zip(into, whole)]

        return [_Step(None, in_order)]


def _compared(run: Callable[..., Any], arrived: Arrived, *arguments: Any) -> Any:
    """Calls ``run`` on a message with checksums, and compares the checksums that it has added up."""
    sums = arrived.message.new_zeros(arrived.parts, dtype=torch.int64)
    made = run(arrived.message, *arguments, sums)
    arrived.compare(sums)
    return made


def _copied(tensors: Sequence[torch.Tensor], out: list[torch.Tensor], *_: Any) -> list[torch.Tensor]:
    """Converts tensors to another dtype; a tensor without all of its shards is shorter."""
    made = [room[: tensor.numel()] for room, tensor in zip(out, tensors)]
    torch._foreach_copy_(made, list(tensors))
    return made


@functools.lru_cache(maxsize=64)
def _rows_of(table: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the shard of every row, and the row of every shard."""
    rows = torch.tensor(table)  # computed on the host: streams of other lanes do not wait for this one
    return rows.to(device), rows.argsort().to(device)


# ---- hops -----------------------------------------------------------------------------------------------------------


class _UnsizedCollective:
    """A collective of messages without a fixed size. It first exchanges the largest size, for which the host waits.

    Args:
        collectives: The collectives that run it.
        bucket: The tensors.
        step: The program step.
        device: Device of the message.
    """

    def __init__(self, collectives: Collectives, bucket: Bucket, step: Cross, device: torch.device) -> None:
        self._collectives, self._bucket, self._step, self._device = collectives, bucket, step, device
        self._codec, self._what = module_of(step.codec.format), f"{bucket.label} in codec {step.codec.codec}"
        self._parts = step.ranks if step.kind == "all_to_all" else 1
        self._senders = step.ranks if step.kind in ("all_to_all", "all_gather") else 1
        self._rows = step.rows // self._parts
        self._row_bytes = step.message_bytes(bucket.chunks, bucket.dtype.itemsize) // step.rows

    def start(self, message: torch.Tensor, _: torch.Tensor | None) -> Pending:
        """Exchanges the length of the longest part on any rank, then the parts, padded with zeros to that length."""
        step, bucket = self._step, self._bucket
        lane = self._collectives.lane(bucket, step.tiers[0])
        receives = self._collectives.receives(step)
        used = [] if receives else self._codec.cut(message, self._parts, self._row_bytes)
        longest = torch.tensor([max((part.numel() for part in used), default=0)]).to(self._device).view(torch.uint8)
        kind: Kind = "all_gather" if step.kind == "all_to_all" else step.kind
        lengths = self._collectives.prepare(lane, kind, longest.numel(), f"{self._what} (lengths)", root=step.root)
        length = int(lengths.start(longest).wait().view(torch.int64).max())
        sent = message.new_zeros(self._parts, length)
        for place, part in zip(sent, used):
            place[: part.numel()] = part
        return self._collectives.of_step(step, bucket, sent.numel(), then=self._whole).start(sent.view(-1))

    def _whole(self, arrived: torch.Tensor) -> Any:
        """Returns the message with records of their full size.

        Raises:
            HopError: The message has bytes that the codec does not write.
        """
        try:
            return self._codec.whole(arrived, self._senders, self._rows, self._row_bytes)
        except ValueError as error:
            raise HopError(f"hzero: {self._what}: {error}") from error


@dataclass(eq=False)
class Collective:
    """A collective over the k ranks of a lane, with everything that stays the same between starts.

    ``all_gather`` collects uint8 ``[b]`` of every rank into ``[k * b]``, in the order of coordinates. ``all_to_all`` sends part
    i of ``[k * b]`` to rank i; part i of the output comes from rank i. ``reduce_scatter`` returns this rank's part of the sum,
    ``[b]``. ``broadcast`` fills ``[b]`` with the bytes of one rank, ``send`` and ``receive`` with the bytes of a peer.

    With checksums, each part ends with 16 extra bytes. Sums are then computed here, in float32, because a library that sums on
    the way has no message to check. On gloo and MPI, sums are always computed here (`TorchWires.library_sums` is False).

    An all-gather has three algorithms. ``library`` is the library's: mostly a ring in NCCL and RCCL, whose latency grows with k.
    ``doubling`` is recursive doubling for any k, by Bruck et al. (IEEE TPDS 8(11), 1997). Every round doubles the messages of a
    rank, so ceil(log2 k) rounds suffice. ``pairs`` is one round, in which every rank sends its message to each peer. PCCL (arXiv
    2504.18658) measures on Frontier at which sizes the latency of rings dominates.

    Attributes:
        collectives: The collectives with the lane.
        lane: The lane.
        kind: The collective, the same on all ranks.
        size: Bytes of the message.
        what: Description of the message, for errors.
        algorithm: Algorithm of an all-gather, the same on all ranks.
        root: Coordinate of the broadcasting rank; for a send or receive, the peer's rank in the group.
        dtype: Dtype of summed elements.
        counts: Entry that the wire log adds for each start; None is not counted.
        then: Computes the result from the output; None returns the output.
        written: Whether messages already contain the checksums of their bytes.
        read: Whether the consumer of the result compares checksums; the result is then an `Arrived`.
        uneven: For an all-to-all without checksums: bytes for each rank, and bytes from each rank. None: equal parts.
        peers: The ranks of the lane.
        output_bytes: Bytes of the output buffer; 0 if the collective overwrites the message.
        checksum: Whether its messages have checksums.
        finish: Computes the result from the output and the message's number on its lane; None returns the output.
    """

    collectives: Collectives
    lane: Lane
    kind: Kind
    size: int
    what: str
    algorithm: Algorithm = "library"
    root: int = 0
    dtype: torch.dtype = torch.uint8
    counts: WireEntry | None = None
    then: Callable[[torch.Tensor], torch.Tensor] | None = None
    written: bool = False
    read: bool = False
    uneven: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        collectives, kind, size = self.collectives, self.kind, self.size
        self.peers, self.checksum = collectives.peers[self.lane], collectives.plan.checksum
        if kind != "all_gather":
            self.algorithm = "library"
        self._label = f"hzero: {kind} {self.lane[1]}: {self.what}"
        ranks, reduces = len(self.peers.ranks), kind == "reduce_scatter"
        self._parts = ranks if kind in ("all_to_all", "reduce_scatter") else 1
        library_sums = self.peers.wires.library_sums and collectives.library_sums and not self.checksum
        self._sums = reduces and not library_sums
        self._add_up: Recoder | None = None
        self._start = self._starter()
        in_flight = size + (CHECKSUM_BYTES * self._parts if self.checksum else 0)
        outputs = {"all_gather": in_flight * ranks, "broadcast": 0, "send": 0, "receive": 0}
        self.output_bytes = outputs.get(kind, size // ranks if reduces and library_sums else in_flight)
        if self.uneven is not None:
            self.output_bytes = sum(self.uneven[1])
        finishes = self.algorithm == "doubling" or self.checksum or self._sums or self.then is not None
        self.finish = self._finish if finishes else None

    def __str__(self) -> str:
        ranks, place, what = self.peers.ranks, self.peers.coordinate, self.what
        if self.kind in ("send", "receive"):
            way = f"{'to' if self.kind == 'send' else 'from'} rank {ranks[1 - place]}"
            return f"hzero: {what} {way} (rank {ranks[place]}, {self.size:,} bytes)"
        shown = str(ranks) if len(ranks) <= 16 else f"[{ranks[0]}, {ranks[1]}, ... {len(ranks)} ranks]"
        where = f"on tier {self.lane[1]!r} (rank {ranks[place]} among {shown}, {self.size:,} bytes)"
        return f"hzero: {self.kind.replace('_', '-')} of {what} {where}"

    def start(self, message: torch.Tensor, output: torch.Tensor | None = None) -> Pending:
        """Starts the collective.

        Args:
            message: uint8, contiguous. On a rank that only receives, the buffer to fill.
            output: uint8 ``[output_bytes]``. It belongs to the collective until its result has been read. None makes one.

        Returns:
            The collective in flight. If it has several rounds, the last round, after the others have ended.

        Raises:
            HopError: It cannot start because peers are gone.
        """
        log, peers, began, number = self.collectives.wire_log, self.peers, None, 0
        if self.counts is not None:  # without streams, the host's clock times a hop on any device
            began = time.monotonic() if self.collectives.lanes.streams is None else HopTimer(message.device, log.spare)
        # With uneven rows nothing may arrive: an empty output of its own, not the message.
        if output is None and (self.output_bytes or self.uneven):
            output = message.new_empty(self.output_bytes)
        try:
            with record_function(self._label):
                if self.checksum:
                    peers.messages = number = peers.messages + 1
                    address = addresses(number, [peers.coordinate], range(self._parts), message.device)
                    message = addressed(message, address, checked=self.written)
                output = message if output is None else output
                return Pending(self, self._start(output, message), (message, output), began, number)
        except HopError:  # from a round of `_doubling`
            raise
        except RuntimeError as error:  # gloo closed the pair after a message did not arrive
            raise MissingPeerError.of(f"{self} cannot start: ", error) from error

    def _starter(self) -> Callable[[torch.Tensor, torch.Tensor], Work]:
        """Returns the function that starts the messages, given an output and a message."""
        wires = self.peers.wires
        if self.kind == "broadcast":
            return lambda output, _: wires.broadcast(output, self.root)
        if self.kind in ("send", "receive"):
            return lambda output, _: wires.message(output, self.root, sends=self.kind == "send")
        if self.kind == "reduce_scatter" and not self._sums:
            return lambda output, message: wires.reduce_scatter(output.view(self.dtype), message.view(self.dtype))
        if self.uneven is not None:
            sends, receives = self.uneven
            return lambda output, message: wires.all_to_all(output, message, receives, sends)
        if self.algorithm == "pairs":
            return lambda output, message: wires.all_to_all(output, message.repeat(len(self.peers.ranks)))
        if self.algorithm == "doubling":
            return self._doubling
        return wires.all_gather if self.kind == "all_gather" else wires.all_to_all  # type: ignore[no-any-return]

    def _doubling(self, output: torch.Tensor, message: torch.Tensor) -> Work:
        """Runs all rounds except the last, which it starts. Rank i then has the messages of i, i + 1, .. (modulo k).

        Before a round, the first rows of its buffer hold the messages of ranks i to i + distance - 1. In the round it sends
        these rows, or as many as are missing, to rank i - distance. It receives as many rows from rank i + distance, and appends
        them.
        """
        place, ranks = self.peers.coordinate, len(self.peers.ranks)
        held = output.view(ranks, -1)
        held[0] = message
        distance = 1
        while True:
            rows = min(distance, ranks - distance)
            sent, received = held[:rows].view(-1), held[distance : distance + rows].view(-1)
            work = self.peers.wires.exchange(received, sent, (place + distance) % ranks, (place - distance) % ranks)
            if 2 * distance >= ranks:
                return work
            Pending(self, work, (held,)).end()
            distance *= 2

    def _finish(self, output: torch.Tensor, number: int) -> torch.Tensor | Arrived:
        """Orders the output by coordinates, compares its checksums, and sums it. ``number``: of the message on its lane."""
        peers = self.peers
        if self.algorithm == "doubling":
            output = output.view(len(peers.ranks), -1).roll(peers.coordinate, 0).view(-1)
        if self.checksum:
            here = peers.coordinate
            alone = {"broadcast": self.root, "send": here, "receive": 1 - here}.get(self.kind)
            senders = range(len(peers.ranks)) if alone is None else [alone]
            parts, ranks = output.view(len(senders), -1), [peers.ranks[sender] for sender in senders]
            address = addresses(number, senders, [here if self._parts > 1 else 0], output.device)
            sent = parts[:, -CHECKSUM_BYTES:].clone().view(torch.int64)  # the buffer will be reused

            def compare(sums: torch.Tensor) -> None:
                arrived = torch.nn.functional.pad(sums.unsqueeze(1), (0, 1)) + address
                self.collectives.compare(Comparison(sent, arrived, ranks, number, self.__str__))

            if self.read:
                return Arrived(output.view(-1), len(senders), compare)
            if self._sums:
                sums = output.new_zeros(len(senders), dtype=torch.int64)
                output = self._summed(output.view(-1), sums)
            else:
                bare = parts[:, :-CHECKSUM_BYTES]
                sums, output = checksums(bare), bare.reshape(-1)
            compare(sums)
        elif self._sums:
            output = self._summed(output)
        return output if self.then is None else self.then(output)

    def _summed(self, output: torch.Tensor, sums: torch.Tensor | None = None) -> torch.Tensor:
        """Sums ``[k][n]`` over ``k`` in float32, rounds once to the elements' dtype, and overwrites the first ``n``."""
        size = self.size // len(self.peers.ranks)
        if self._add_up is None:  # prepared once, for the output's device
            codec, count = Codec.from_config(PLAIN), len(self.peers.ranks)
            rows = Rows.of((size // self.dtype.itemsize,), (count, 1), outer=count, parts=0 if sums is None else count)
            self._add_up = codec.recoder(rows, self.dtype, output.device, codec, Rows.of(rows.chunks, (1,)))
        return self._add_up(output, output[:size], checksums=sums)


class Pending:
    """A collective in flight, which is counted as started.

    Args:
        collective: The collective.
        work: The library's handle.
        buffers: The buffers that it reads and writes, the output last.
        began: Start time of a hop that the wire log counts; on a device, its timer.
        number: With checksums, number of the message on its lane.
    """

    def __init__(
        self, collective: Collective, work: Work, buffers: Sequence[torch.Tensor], began: Any = None, number: int = 0
    ) -> None:
        self.collective, self.buffers, self._number = collective, buffers, number
        self._work: Work | None = work
        self._began, self._started, hops = began, time.monotonic(), collective.peers.hops
        hops.started += 1
        hops.since, hops.what, hops.size = self._started, collective.__str__, buffers[-1].nbytes
        hops.passed = began.ready if isinstance(began, HopTimer) else None
        self._hop = hops.started

    def end(self) -> None:
        """Waits for the collective. On a device, the current stream waits.

        Raises:
            HopError: The collective failed, a peer is gone, or the group's timeout passed.
        """
        if self._work is None:
            return
        collective, hops = self.collective, self.collective.peers.hops
        try:
            self._work.wait()
        except DisagreementError as error:
            raise HopError(f"{collective} failed: {error}") from error
        except RuntimeError as error:
            failed = f"{collective} failed after {time.monotonic() - self._started:.1f} s: "
            raise MissingPeerError.of(failed, error, hops, self._hop) from error
        self._work = None
        hops.ended += 1
        if collective.counts is not None and self._began is not None:
            taken = time.monotonic() - self._began if isinstance(self._began, float) else self._began
            collective.collectives.wire_log.add(collective.counts, taken)

    def wait(self, kept: bool = False) -> Any:
        """Waits as in `end`, and returns the result.

        On a device, the buffers belong to the lane's stream, which does not wait for the collective. They are kept until the
        current stream, which does wait, has passed this point. Buffers of the arena (``kept``) live longer anyway.

        Raises:
            HopError: As in `end`, or a message arrived corrupted and the host can compare immediately.
        """
        self.end()
        collective: Collective = self.collective
        arrived: Any = self.buffers[-1]
        if collective.finish is not None:
            arrived = collective.finish(arrived, self._number)
        if collective.collectives.lanes.streams is not None and (not kept or collective.checksum):
            for buffer in (*self.buffers, arrived.message if isinstance(arrived, Arrived) else arrived):
                collective.collectives.used(buffer)
        return arrived


# ---- buffers ----------------------------------------------------------------------------------------------------------


class FlatTensors(NamedTuple):
    """Tensors between two steps: their dtype and their numbers of elements."""

    dtype: torch.dtype
    numels: list[int]


class Room:
    """A buffer of the `Arena`.

    Attributes:
        buffer: Its memory, uint8.
        size: Its bytes.
        event: On a device: recorded at its last use.
        wanted: The size or tensors of the last `Arena.take`.
        view: A message in the buffer, or flat tensors one after the other.
    """

    def __init__(self, buffer: torch.Tensor, streams: DeviceStreams | None) -> None:
        self.buffer, self.size, self._streams = buffer, buffer.numel(), streams
        self.event: Any = None if streams is None else streams.event()
        self.wanted: int | FlatTensors = -1
        self.view: Any = None

    def __del__(self) -> None:
        # Streams may still use the memory of an engine that was never closed, or of a chain that failed.
        if self._streams is not None:
            with contextlib.suppress(Exception):  # at process exit the device may be gone
                self._streams.used_by_all(self.buffer)


class Arena:
    """Buffers for messages. A program run takes them step by step, and leaves them for the next run.

    On CPU, a buffer can be reused immediately, and large buffers are not kept. On a device, the stream that takes a buffer waits
    for the event of its last use. To let programs overlap, `take` prefers a buffer that the device has passed, or a new one,
    until `_BEHIND` buffers of that size are busy. Before it makes a new buffer, it frees large ones that the device has passed.

    Args:
        streams: Streams of the lanes; None on CPU.
    """

    def __init__(self, streams: DeviceStreams | None) -> None:
        self._streams = streams
        self._free: list[Room] = []  # by size
        self._lock = threading.Lock()

    def take(self, wanted: int | FlatTensors, device: torch.device) -> Room:
        """Returns a buffer of at least ``wanted`` bytes, or for these tensors, for use on the current stream."""
        size = wanted if isinstance(wanted, int) else sum(wanted.numels) * wanted.dtype.itemsize
        streams = self._streams
        with self._lock:
            first = found = bisect.bisect_left(self._free, size, key=_SIZE)
            end = bisect.bisect_right(self._free, 2 * size, key=_SIZE)
            while found < end and streams is not None and not self._free[found].event.query():
                found += 1
            if found == end and end - first >= _BEHIND:
                found = first
            room = self._free.pop(found) if found < end else None
            if room is None and streams is not None:
                self._free = [one for one in self._free if one.size <= _SMALL or not one.event.query()]
        if room is None:
            room = Room(torch.empty(size, dtype=torch.uint8, device=device), streams)
        elif streams is not None:
            streams.wait(room.event)
        if room.wanted != wanted:
            if isinstance(wanted, int):
                room.view = room.buffer[:wanted]
            else:
                room.view = list(room.buffer[:size].view(wanted.dtype).split(wanted.numels))
            room.wanted = wanted
        return room

    def give(self, room: Room) -> None:
        """Takes back a buffer that the current stream has used last."""
        if self._streams is not None:
            room.event.record(self._streams.device.current_stream())
        elif room.size > _SMALL:
            return
        with self._lock:
            bisect.insort(self._free, room, key=_SIZE)


# ---- error feedback ---------------------------------------------------------------------------------------------------


@dataclass
class Residual:
    """Accumulated encoding loss of one parameter on one tier.

    Attributes:
        values: The loss, bfloat16, flat; updated in place.
        scale: Loss scale of the values.
    """

    values: torch.Tensor
    scale: float


class ErrorFeedback:
    """Residuals in bfloat16, one per tier and parameter (Seide et al. 2014; Karimireddy et al., arXiv 1901.09847).

    A residual is at most one encoding error, and bfloat16 loses a 256th of it. There is one copy: an encoding reads it and
    overwrites it (as in LoCo, arXiv 2407.04480). A skipped step discards its gradients and resets the residuals that they
    changed to zero. Such a step loses at most the error of one more encoding. Residuals start at zero.
    """

    def __init__(self) -> None:
        self._residuals: dict[tuple[str, int], Residual] = {}
        self._changed: dict[tuple[str, int], Residual] = {}  # since the last completed step

    def of(
        self, name: str, keys: Sequence[int], tensors: Sequence[torch.Tensor], scale: float
    ) -> tuple[list[torch.Tensor], list[float]]:
        """Returns the residuals to add to tensors before they are encoded. The encoding overwrites them with its loss.

        Args:
            name: Name of the residuals, such as the tier of the hop.
            keys: Keys of the tensors.
            tensors: Flat floating tensors.
            scale: Loss scale of ``tensors``, and so of the new residuals.

        Returns:
            Tensors with as many elements as ``tensors``, and the factors that convert their loss scale.
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
        """Keeps the residuals of a completed step; they are added to the next gradients."""
        self._changed.clear()

    def discard(self) -> None:
        """Sets the residuals to zero that discarded gradients have changed since the last `commit`."""
        for kept in self._changed.values():
            kept.values.zero_()
        self._changed.clear()

    @property
    def bytes(self) -> int:
        """Memory of the residuals on this rank, in bytes."""
        return sum(kept.values.nbytes for kept in self._residuals.values())

    def clear(self) -> None:
        """Drops all residuals, after their weights have been replaced."""
        self._residuals.clear()
        self._changed.clear()
