"""Runtime: executes the programs of buckets, one collective per tier with that tier's codec.

The tiers follow arXiv 2501.04266 on MI250X machines. Hops that sum and quantise again follow ZeRO++ (arXiv 2306.10209).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch.profiler import record_function

from hzero.codecs.codec import Codec, Recoder, checksums
from hzero.codecs.formats import CHECKSUM_BYTES, RecordFormat, Rows
from hzero.codecs.reference import module_of
from hzero.comm.arena import FlatTensors
from hzero.comm.checksum import Arrived, Comparison, addressed, addresses
from hzero.comm.lanes import Call, Chain, Lanes, ThreadLanes
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

#: Number of bound programs in the cache. Messages of changing size, such as text, need one for each size.
_BOUND = 4096
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


# ---- the runtime --------------------------------------------------------------------------------------------------------


class Runtime:
    """Executes programs: gathers, reductions and moves that cross one tier at a time.

    Every program uses a `Bucket`: several tensors, each cut into one shard per rank, that travel in one message. A program lists
    the steps: encode the tensors, send the message over a tier, then decode, sum or encode again. `bind` prepares a program for
    a bucket. Each run is a chain of hops on the `Lanes`. Chains of several buckets overlap, since tiers use different links.

    Every rank decodes the same bytes, including its shards, so all ranks get the same bits. Sums are computed in float32, in the
    order of peers.

    This class does not average, accumulate or keep copies between calls. It keeps only the residuals of error feedback.

    Args:
        plan: The shard plan of this rank.
        peers: The ranks of every lane, see `hzero.comm.peers.peers_of`.
        wire_log: Counts every hop of a program.
        lanes: Lanes that run the hops; None makes new ones on CPU.
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
        self.lanes, self.library_sums = lanes or ThreadLanes(), library_sums
        self.feedback = ErrorFeedback()
        self._roles = roles or {}
        #: Prepares a program for a bucket; the same arguments return the same object.
        self.bind: Callable[[Program, Bucket], BoundProgram] = functools.lru_cache(_BOUND)(partial(BoundProgram, self))

    def prepare(self, lane: Lane, kind: Kind, size: int, what: str, **how: Any) -> PreparedHop:
        """Returns a hop over the ranks of a lane, which can start any number of times; arguments as in `PreparedHop`."""
        return PreparedHop(self, lane, kind, size, what, **how)

    def of_step(self, step: Cross, bucket: Bucket, size: int, **how: Any) -> PreparedHop:
        """Returns the hop of a program step, for a message of ``size`` bytes. The wire log counts it."""
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


# ---- programs of one bucket -----------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """One step of a bound program between two hops.

    Attributes:
        run: Receives the value, the space for the result (None: it makes its own) and the arguments that ``takes`` selects;
            returns the result.
        room: Arena space for the result: bytes of a message, tensors, or None.
        takes: 1: ``run`` receives a seed; 2: a seed and the loss scale.
        salt: Added to seeds. Each hop then rounds differently, and all ranks with the same copy round in the same way.
        last: Whether the result belongs to the caller.
    """

    run: Callable[..., Any]
    room: int | FlatTensors | None = None
    takes: int = 0
    salt: int = 0
    last: bool = False


class BoundProgram:
    """A program prepared for one bucket: layouts, descriptors, lanes, labels and counts are computed once.

    On a device, a second run allocates only the tensors or the message that it returns.

    Args:
        runtime: The runtime that executes the program.
        program: The steps.
        bucket: The tensors; ``bucket.dtype`` is the dtype of hops with codec ``none``.

    Attributes:
        bucket: As given.
        hops: The hops.
    """

    def __init__(self, runtime: Runtime, program: Program, bucket: Bucket) -> None:
        self._runtime, self._program, self.bucket = runtime, program, bucket
        self.hops: list[PreparedHop | _UnsizedHop] = [
            self._hop(index, step) for index, step in enumerate(program.steps) if isinstance(step, Cross)
        ]
        #: Steps before each hop and after the last, for the last dtype and device of inputs.
        self._ready: tuple[Any, list[list[_Step]]] = None, []

    def run(
        self,
        read: Callable[..., Any],
        then: Callable[[Any], Any] | None = None,
        *,
        after: Sequence[Chain[Any]] = (),
        seed: int = 0,
        first_seed: int | None = None,
        scale: float = 1.0,
        into: Callable[[], Sequence[torch.Tensor] | None] | None = None,
    ) -> Chain[Any]:
        """Starts the program.

        Args:
            read: Returns the input of the first step: a uint8 message, or flat tensors whose missing elements count as zero. It
                receives the chains of ``after``.
            then: Computes the result from the output of the last step: a uint8 message, or flat tensors. None returns that
                output.
            after: Chains that compute what ``read`` reads.
            seed: Seed of stochastic rounding. It must be the same on all ranks if copies are encoded again.
            first_seed: Seed of encodings before the first hop; None uses ``seed``.
            scale: Loss scale of gradients; residuals are converted to it.
            into: Called when everything has arrived. Returns the tensors that the last step writes, or adds to if it is a sum or
                an adding `Decode`. They have the shapes of the result. If it is or returns None, the step makes new ones.

        Returns:
            A chain with the result of ``then``.
        """
        call = Call(read, then, seed if first_seed is None else first_seed, seed, scale, into)
        return self._runtime.lanes.submit(self, call, after)

    def compute(self, chain: Chain[Any], stage: int) -> None:
        """Runs the steps before hop ``stage``, or after the last hop. The lanes call it with the output of the hop before it.

        On a device, a buffer returns to the arena once the next step has read it.
        """
        call, arena, used = chain.call, self._runtime.lanes.arena, self._runtime.lanes.used
        assert call is not None, "the chain has not ended"
        if stage == 0:
            value = call.read(*chain.after)
            chain.after, chain.call = (), call._replace(read=id)  # it may keep the inputs alive
            first = value if isinstance(value, torch.Tensor) else value[0]
            kind, chain.device = (first.dtype, first.device), first.device
            ready, chain.steps = self._ready  # read once: lanes change it
            if ready != kind:
                chain.steps = self._prepared(*kind)
                self._ready = kind, chain.steps
            if arena is not None:
                for tensor in [value] if first is value else value:
                    used(tensor)
        else:
            flight = chain.flight
            value = flight.output if flight.hop.finish is None else flight.hop.finish(flight.output, flight.number)
            chain.value = chain.flight = flight = None  # frees the message
        seed = call.seed if stage else call.first_seed
        for step in chain.steps[stage]:
            room = None if arena is None or step.room is None else arena.take(step.room, chain.device)
            out = None if room is None else room.view
            if step.last and call.into is not None:
                out = call.into()
            value = step.run(value, out, *((seed + step.salt) & _SEED, call.scale)[: step.takes])
            if arena is not None:
                chain.keep(room)
        chain.value = value if stage < len(self.hops) or call.then is None else call.then(value)

    # ---- steps, made ready --------------------------------------------------------------------------------------

    def _checked(self, index: int) -> tuple[int, int]:
        """Parts of a hop's message whose checksums the steps before and after it compute; see `Program.checked`."""
        return self._program.checked(index) if self._runtime.plan.checksum else (0, 0)

    def _hop(self, index: int, step: Cross) -> PreparedHop | _UnsizedHop:
        if step.record is None and not step.codec.traits.fixed:
            return _UnsizedHop(self._runtime, self.bucket, step)
        size = step.message_bytes(self.bucket.chunks, self.bucket.dtype.itemsize)
        how = dict(zip(("written", "read"), map(bool, self._checked(index))))
        last = index + 1 == len(self._program.steps)
        return self._runtime.of_step(step, self.bucket, size, last=last, **how)

    def _prepared(self, dtype: torch.dtype, device: torch.device) -> list[list[_Step]]:
        """Returns the steps before each hop and after the last one, for inputs of a dtype."""
        steps, ready = self._program.steps, list[list[_Step]]([[]])
        makers: dict[Any, Callable[..., list[_Step]]] = {
            Encode: self._encoding,
            Turn: self._turning,
            Sum: self._summing,
            Decode: self._decoding,
        }
        for index, step in enumerate(steps):
            if isinstance(step, Cross):
                ready.append([])
                continue
            following = next((one for one in steps[index:] if isinstance(one, Cross)), None)
            salt = (1 + TIERS.index(following.tiers[0])) * _SALT if index and following is not None else 0
            parts = self._checked(index - 1)[1], self._checked(index + 1)[0]
            made = [one._replace(salt=salt) for one in makers[type(step)](step, dtype, device, parts)]
            if parts[0]:
                made[0] = made[0]._replace(run=partial(_compared, made[0].run))
            if index + 1 == len(steps):
                made[-1] = made[-1]._replace(room=None, last=True)
            ready[-1] += made
            if isinstance(step, Sum) and step.target is None:
                dtype = torch.float32
            elif isinstance(step, Decode):
                dtype = self.bucket.dtype
        return ready

    def _floats(self, dtype: torch.dtype, rows: int) -> FlatTensors:
        return FlatTensors(dtype, [rows * chunk for chunk in self.bucket.chunks])

    def _encoding(self, step: Encode, dtype: torch.dtype, device: torch.device, parts: tuple[int, int]) -> list[_Step]:
        bucket, order, feedback, residual = self.bucket, step.order, self._runtime.feedback, step.residual
        codec = Codec.from_config(step.codec)
        made: list[_Step] = []
        encoded = bucket.dtype if step.codec.traits.exact else dtype
        if step.codec.traits.plain and dtype != encoded == torch.bfloat16:  # the same records, cast while encoding
            codec, encoded = Codec(RecordFormat.of("bf16")), dtype
        if order.table is not None:
            made.append(_Step(partial(self._in_table, _rows_of(order.table, device)[0])))
        if encoded != dtype:
            made.append(_Step(partial(_copied, encoded), self._floats(encoded, order.rows)))
        rows = Rows.of(bucket.chunks, order.sizes, order.strides, step.outer, parts[1])
        encode = codec.encoder(rows, encoded, device, residual is not None)

        def with_residuals(tensors: Sequence[torch.Tensor], out: torch.Tensor | None, seed: int, scale: float) -> Any:
            assert residual is not None
            residuals, factors = feedback.of(residual, bucket.keys, tensors, scale)
            return encode(tensors, out, seed, residuals, factors)

        return [*made, _Step(encode, encode.bytes, 1) if residual is None else _Step(with_residuals, encode.bytes, 2)]

    def _in_table(self, rows: torch.Tensor, tensors: Sequence[torch.Tensor], _: Any) -> list[torch.Tensor]:
        """Reorders shards by the rows of a table."""
        padded = (
            torch.nn.functional.pad(tensor, (0, len(rows) * chunk - tensor.numel()))
            for tensor, chunk in zip(tensors, self.bucket.chunks)
        )
        return [tensor.view(len(rows), -1)[rows].view(-1) for tensor in padded]

    def _turning(self, step: Turn, *_: Any) -> list[_Step]:
        world = self._runtime.plan.grid.world_size
        shape = step.crossed, step.ranks, world // step.crossed // step.ranks, -1

        def turn(value: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
            turned = value.view(shape).transpose(0, 1)
            out = torch.empty_like(value) if out is None else out
            out.view(turned.shape).copy_(turned)
            return out

        return [_Step(turn, step.codec.format.message_bytes(self.bucket.chunks, world, self.bucket.dtype.itemsize))]

    def _summing(self, step: Sum, _: torch.dtype, device: torch.device, parts: tuple[int, int]) -> list[_Step]:
        codec, chunks, dtype = Codec.from_config(step.codec), self.bucket.chunks, self.bucket.dtype
        rows = Rows.of(chunks, (step.peers, step.rows), outer=step.peers, parts=parts[0])
        if step.target is not None:
            summed = Rows.of(chunks, (step.rows,), outer=step.outer, parts=parts[1])
            encode = codec.recoder(rows, dtype, device, Codec.from_config(step.target), summed)
            return [_Step(encode, encode.bytes, 1)]
        room, new = self._floats(torch.float32, step.rows), codec.decoder(rows, dtype, device, sums=True)
        if step is not self._program.steps[-1]:
            return [_Step(new, room)]
        onto = codec.decoder(rows, dtype, device, sums=True, add=True)
        return [_Step(lambda value, sums, checks=None: (new if sums is None else onto)(value, sums, checks), room)]

    def _decoding(self, step: Decode, _: torch.dtype, device: torch.device, parts: tuple[int, int]) -> list[_Step]:
        bucket, order = self.bucket, step.order
        codec = Codec.from_config(step.codec)
        layout = Rows.of(bucket.chunks, order.sizes, order.strides, step.outer, parts[0])
        decode = codec.decoder(layout, bucket.dtype, device)
        if order.table is None:
            return [_Step(decode, self._floats(bucket.dtype, order.rows))]
        rows = _rows_of(order.table, device)[1]

        def in_order(message: torch.Tensor, into: Any, checks: torch.Tensor | None = None) -> Any:
            whole = [tensor.view(order.rows, -1)[rows].view(-1) for tensor in decode(message, None, checks)]
            return whole if into is None else [place.view(-1).copy_(one) for place, one in zip(into, whole)]

        return [_Step(in_order)]


def _compared(run: Callable[..., Any], arrived: Arrived, *arguments: Any) -> Any:
    """Calls ``run`` on a message with checksums, and compares the checksums that it has added up."""
    sums = arrived.message.new_zeros(arrived.parts, dtype=torch.int64)
    made = run(arrived.message, *arguments, sums)
    arrived.compare(sums)
    return made


def _copied(
    dtype: torch.dtype, tensors: Sequence[torch.Tensor], out: list[torch.Tensor] | None, *_: Any
) -> list[torch.Tensor]:
    """Converts tensors to another dtype; a tensor without all of its shards is shorter."""
    if out is None:
        return [tensor.to(dtype) for tensor in tensors]
    made = [room[: tensor.numel()] for room, tensor in zip(out, tensors)]
    torch._foreach_copy_(made, list(tensors))
    return made


@functools.lru_cache(maxsize=64)
def _rows_of(table: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the shard of every row, and the row of every shard."""
    rows = torch.tensor(table)  # computed on the host: streams of other lanes do not wait for this one
    return rows.to(device), rows.argsort().to(device)


# ---- hops -----------------------------------------------------------------------------------------------------------


class HopInFlight(NamedTuple):
    """A hop that has started.

    Attributes:
        hop: The hop.
        work: The library's handle.
        message: The buffer that it reads.
        output: The buffer that it writes.
        started: Start time.
        timer: On a device, if the wire log counts the hop: its timer.
        number: With checksums, number of the message on its lane.
        place: Number of the hop on its lane.
    """

    hop: PreparedHop
    work: Work
    message: torch.Tensor
    output: torch.Tensor
    started: float
    timer: HopTimer | None
    number: int
    place: int


@dataclass(eq=False)
class PreparedHop:
    """One collective over the k ranks of a lane, with everything that stays the same between starts.

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
        runtime: The runtime with the lane.
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
        last: Whether the output belongs to the caller of the program.
        peers: The ranks of the lane.
        output_bytes: Bytes of the output buffer; 0 if the collective overwrites the message.
        room: On a device: bytes of the arena's buffer for the output.
        checksum: Whether its messages have checksums.
        finish: Computes the result from the output and the message's number on its lane; None returns the output.
    """

    runtime: Runtime
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
    last: bool = False

    def __post_init__(self) -> None:
        runtime, kind, size = self.runtime, self.kind, self.size
        self.peers, self.checksum = runtime.peers[self.lane], runtime.plan.checksum
        if kind != "all_gather":
            self.algorithm = "library"
        self._label = f"hzero: {kind} {self.lane[1]}: {self.what}"
        ranks, reduces = len(self.peers.ranks), kind == "reduce_scatter"
        self._parts = ranks if kind in ("all_to_all", "reduce_scatter") else 1
        library_sums = self.peers.wires.library_sums and runtime.library_sums and not self.checksum
        self._sums = reduces and not library_sums
        self._add_up: Recoder | None = None
        self._start = self._starter()
        in_flight = size + (CHECKSUM_BYTES * self._parts if self.checksum else 0)
        outputs = {"all_gather": in_flight * ranks, "broadcast": 0, "send": 0, "receive": 0}
        self.output_bytes = outputs.get(kind, size // ranks if reduces and library_sums else in_flight)
        if self.uneven is not None:
            self.output_bytes = sum(self.uneven[1])
        self.room = 0 if self.last else self.output_bytes
        self._times_on_device = runtime.lanes.device is not None  # else the host's clock times a hop, on any device
        self._log: WireLog | None = None
        self._total: WireEntry | None = None
        finishes = self.algorithm == "doubling" or self.checksum or self._sums or self.then is not None
        self.finish = self._finish if finishes else None

    def __str__(self) -> str:
        ranks, place, what = self.peers.ranks, self.peers.coordinate, self.what
        if self.kind in ("send", "receive"):
            direction = "to" if self.kind == "send" else "from"
            return f"hzero: {what} {direction} rank {ranks[1 - place]} (rank {ranks[place]}, {self.size:,} bytes)"
        shown = str(ranks) if len(ranks) <= 16 else f"[{ranks[0]}, {ranks[1]}, ... {len(ranks)} ranks]"
        where = f"on tier {self.lane[1]!r} (rank {ranks[place]} among {shown}, {self.size:,} bytes)"
        return f"hzero: {self.kind.replace('_', '-')} of {what} {where}"

    def run(self, message: torch.Tensor) -> Any:
        """Starts the hop, waits for it, and returns the result; arguments and errors as in `start` and `end`."""
        flight = self.start(message)
        self.end(flight)
        return flight.output if self.finish is None else self.finish(flight.output, flight.number)

    def start(self, message: torch.Tensor, output: torch.Tensor | None = None) -> HopInFlight:
        """Starts the collective.

        Args:
            message: uint8, contiguous. On a rank that only receives, the buffer to fill.
            output: uint8 ``[output_bytes]``. It belongs to the hop until its result has been read. None makes one.

        Raises:
            HopError: It cannot start because peers are gone.
        """
        peers, number, started, timer = self.peers, 0, time.monotonic(), None
        hops = peers.hops
        if self.counts is not None and self._times_on_device:
            timer = HopTimer(message.device, self.runtime.wire_log.spare)
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
                work = self._start(output, message)
        except RuntimeError as error:  # gloo closed the pair after a message did not arrive
            raise MissingPeerError.of(f"{self} cannot start: ", error) from error
        hops.started += 1
        hops.since, hops.what, hops.size = started, self.__str__, output.nbytes
        hops.passed = None if timer is None else timer.ready
        return HopInFlight(self, work, message, output, started, timer, number, hops.started)

    def end(self, flight: HopInFlight) -> None:
        """Waits for the collective. On a device, the current stream waits.

        Raises:
            HopError: The collective failed, a peer is gone, or the group's timeout passed.
        """
        hops = self.peers.hops
        try:
            flight.work.wait()
        except DisagreementError as error:
            raise HopError(f"{self} failed: {error}") from error
        except RuntimeError as error:
            failed = f"{self} failed after {time.monotonic() - flight.started:.1f} s: "
            raise MissingPeerError.of(failed, error, hops, flight.place) from error
        hops.ended += 1
        counts, log = self.counts, self.runtime.wire_log
        if counts is None:
            return
        if self._log is not log:
            self._log, self._total = log, log.total(self.lane, counts)
        total = self._total
        assert total is not None, "made with the log"
        total.hops += 1
        total.elements += counts.elements
        total.payload_bytes += counts.payload_bytes
        total.wire_bytes += counts.wire_bytes
        total.raw_bytes += counts.raw_bytes
        if flight.timer is None:
            total.seconds += time.monotonic() - flight.started
        else:
            log.time(total, flight.timer)

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
        """Starts the first round; the wait runs the others. Rank i then has the messages of i, i + 1, .. (modulo k).

        Before a round, the first rows of its buffer hold the messages of ranks i to i + distance - 1. In the round it sends
        these rows, or as many as are missing, to rank i - distance. It receives as many rows from rank i + distance, and appends
        them.
        """
        place, ranks = self.peers.coordinate, len(self.peers.ranks)
        held = output.view(ranks, -1)
        held[0] = message

        def exchange(distance: int) -> Work:
            rows = min(distance, ranks - distance)
            sent, received = held[:rows].view(-1), held[distance : distance + rows].view(-1)
            target, source = (place - distance) % ranks, (place + distance) % ranks
            return self.peers.wires.exchange(received, sent, source, target)

        def wait() -> None:
            distance, work = 1, first
            while True:
                work.wait()
                distance *= 2
                if distance >= ranks:
                    return
                work = exchange(distance)

        first = exchange(1)
        return SimpleNamespace(wait=wait)

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
                self.runtime.lanes.compare(Comparison(sent, arrived, ranks, number, self.__str__))

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


class _UnsizedHop:
    """A hop of messages without a fixed size. It first exchanges the largest size, for which the host waits.

    Args:
        runtime: The runtime that executes it.
        bucket: The tensors.
        step: The program step.
    """

    room = 0

    def __init__(self, runtime: Runtime, bucket: Bucket, step: Cross) -> None:
        self._runtime, self._bucket, self._step = runtime, bucket, step
        self.lane, self.checksum = runtime.lane(bucket, step.tiers[0]), runtime.plan.checksum
        self._codec, self._what = module_of(step.codec.format), f"{bucket.label} in codec {step.codec.codec}"
        self._parts = step.ranks if step.kind == "all_to_all" else 1
        self._senders = step.ranks if step.kind in ("all_to_all", "all_gather") else 1
        self._rows = step.rows // self._parts
        self._row_bytes = step.message_bytes(bucket.chunks, bucket.dtype.itemsize) // step.rows

    def start(self, message: torch.Tensor, _: torch.Tensor | None = None) -> HopInFlight:
        """Exchanges the length of the longest part on any rank, then the parts, padded with zeros to that length."""
        step, receives = self._step, self._runtime.receives(self._step)
        used = [] if receives else self._codec.cut(message, self._parts, self._row_bytes)
        longest = torch.tensor([max((part.numel() for part in used), default=0)]).to(message.device).view(torch.uint8)
        kind: Kind = "all_gather" if step.kind == "all_to_all" else step.kind
        lengths = self._runtime.prepare(self.lane, kind, longest.numel(), f"{self._what} (lengths)", root=step.root)
        length = int(lengths.run(longest).view(torch.int64).max())
        sent = message.new_zeros(self._parts, length)
        for place, part in zip(sent, used):
            place[: part.numel()] = part
        hop = self._runtime.of_step(step, self._bucket, sent.numel(), then=self._whole)
        return hop.start(sent.view(-1))

    def end(self, flight: HopInFlight) -> None:
        """As in `PreparedHop`."""
        flight.hop.end(flight)

    def _whole(self, arrived: torch.Tensor) -> Any:
        """Returns the message with records of their full size.

        Raises:
            HopError: The message has bytes that the codec does not write.
        """
        try:
            return self._codec.whole(arrived, self._senders, self._rows, self._row_bytes)
        except ValueError as error:
            raise HopError(f"hzero: {self._what}: {error}") from error


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
