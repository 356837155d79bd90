"""Programs: the steps of one bucket's hops as data, with codecs, layouts and bytes, without process groups or tensors.

A program is made once for each route of buckets. `hzero.comm` executes only programs. `hzero plan` adds up their bytes and
buffers, predictions time their steps, and tests compare the wire log with them.

A message is ``[outer][tensor][rows][record]`` (docs/payload_format.md).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from hzero.config import NET_TIERS, PLAIN, TIERS, CodecConfig, NodeAllGather, Role, Tier
from hzero.program.shards import Hop, ShardPlan, plain

#: Maximum number of programs of a kind in flight: reductions, and refreshes ahead of the gathers.
IN_FLIGHT = 2
#: The algorithm of all-gathers inside nodes.
_LIBRARY = NodeAllGather()
Kind: TypeAlias = Literal["all_gather", "all_to_all", "reduce_scatter", "all_reduce", "broadcast", "send", "receive"]


@dataclass(frozen=True)
class Order:
    """The shard in each row of a tensor.

    Attributes:
        sizes: Axes of the rows, row-major.
        strides: Distance in shards between neighbours on each axis.
        table: Shard of each row, if the ranks are numbered in no regular order.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    table: tuple[int, ...] | None = None

    @classmethod
    def of_rows(cls, rows: int) -> Order:
        """Rows in the order of the tensor."""
        return cls((rows,), (1,))

    @classmethod
    def of_hops(cls, plan: ShardPlan, *, outermost_first: bool = False) -> Order:
        """Rows in the order of a plan's hops: innermost tier first, or outermost."""
        tiers, grid = TIERS[::-1] if outermost_first else TIERS, plan.grid
        sizes = tuple(map(grid.size, tiers))
        if grid.regular:
            return cls(sizes, tuple(map(grid.stride, tiers)))
        places = itertools.product(*map(range, sizes))
        table = tuple(grid.rank(place[::-1] if outermost_first else place) for place in places)
        return cls((len(table),), (1,), table)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Encode:
    """Encodes tensors into a message.

    Attributes:
        codec: Codec of the message.
        order: Order of the tensors' rows.
        outer: Number of pieces of the message.
        residual: Name of the residuals that are added before, and that keep the error afterwards; None without residuals.
    """

    codec: CodecConfig
    order: Order
    outer: int = 1
    residual: str | None = None


@dataclass(frozen=True)
class Turn:
    """Transposes the first two of the axes ``[crossed][ranks][rest]`` of a message's rows.

    Attributes:
        codec: Codec of the message.
        crossed: Ranks of the hops before the next one.
        ranks: Ranks of the next hop. The parts of its peers become the first axis.
    """

    codec: CodecConfig
    crossed: int
    ranks: int


@dataclass(frozen=True)
class Cross:
    """One collective. If the codec has no fixed size, messages are truncated to the length of the longest.

    Attributes:
        role: Whether a stage's program moves weights or gradients, for predictions. Other programs ignore it.
        kind: The collective; ``all_reduce`` is for predictions of other engines only. A ``reduce_scatter``
            leaves the sum, rounded once to the type of the elements.
        tiers: Tiers whose coordinates differ among the ranks of a group. Only flat collectives of other engines have several.
        ranks: Ranks of a group.
        codec: Codec of the messages.
        rows: Shards of every tensor in the message of one rank: the part that an all-gather sends, or the whole message of a
            reduction.
        algorithms: Algorithms of an all-gather, by the bytes of the message.
        root: Coordinate of the broadcasting rank. For a send or a receive: rank of the peer.
        record: Bytes of a row, if the data decide them; None: as the codec's format says.
        uneven: For an all-to-all with parts of different sizes: rows for each rank of the group, and rows from each rank.
    """

    role: Role
    kind: Kind
    tiers: tuple[Tier, ...]
    ranks: int
    codec: CodecConfig
    rows: int
    algorithms: NodeAllGather = _LIBRARY
    root: int = 0
    record: int | None = None
    uneven: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def received(self) -> float:
        """Number of messages of this size that enter a rank."""
        if self.kind in ("broadcast", "receive"):
            return 1
        if self.kind == "send":
            return 0
        if self.kind == "all_gather":
            return self.ranks - 1
        return (2 if self.kind == "all_reduce" else 1) * (1 - 1 / self.ranks)

    def message_bytes(self, chunks: Sequence[int], itemsize: int) -> int:
        """Bytes of one rank's message for a bucket whose parameters have shards of ``chunks`` elements."""
        if self.record is not None:
            return self.rows * self.record
        return self.codec.format.message_bytes(chunks, self.rows, itemsize)

    def part_bytes(self, chunks: Sequence[int], itemsize: int) -> int:
        """Bytes of each peer's part in one rank's message of a reduction."""
        return self.message_bytes(chunks, itemsize) // self.ranks


@dataclass(frozen=True)
class Sum:
    """Sums the messages of peers in float32, in the order of the peers.

    Attributes:
        codec: Codec of the messages.
        peers: Number of messages.
        rows: Rows of each message.
        target: Codec of the sum; None leaves float32 tensors.
        outer: Pieces of the message with the sum.
    """

    codec: CodecConfig
    peers: int
    rows: int
    target: CodecConfig | None = None
    outer: int = 1


@dataclass(frozen=True)
class Decode:
    """Decodes a message into tensors of the bucket's type.

    Attributes:
        codec: Codec of the message.
        order: Order of the tensors' rows.
        outer: Number of pieces of the message.
    """

    codec: CodecConfig
    order: Order
    outer: int = 1


Step: TypeAlias = Encode | Turn | Cross | Sum | Decode


@dataclass(frozen=True, eq=False)  # compared by identity, since the runtime caches its preparations by program
class Program:
    """The steps of one bucket.

    Attributes:
        steps: Steps in order.
    """

    steps: tuple[Step, ...]

    @functools.cached_property
    def crossings(self) -> tuple[Cross, ...]:
        """The collectives."""
        return tuple(step for step in self.steps if isinstance(step, Cross))

    @property
    def residual_rows(self) -> int:
        """Shards of every tensor whose encoding keeps a residual."""
        kept = (step for step in self.steps if isinstance(step, Encode) and step.residual is not None)
        return sum(step.order.rows for step in kept)

    def checked(self, index: int) -> tuple[int, int]:
        """Number of checksums that the steps before and after a hop write and read. With 0, the hop does so itself.

        Encode, Sum and Decode handle checksums in the same pass. Forwarded messages, and codecs without kernels, need another
        pass. The result of a reduce-scatter is summed and compared by the hop.

        Args:
            index: Index of the step. Steps other than `Cross` give ``(0, 0)``.
        """
        before, cross, behind = (dict(enumerate(self.steps)).get(index + place) for place in (-1, 0, 1))
        kinds = ("all_gather", "all_to_all", "reduce_scatter")
        if not isinstance(cross, Cross) or cross.kind not in kinds or cross.codec.traits.compiled != "all":
            return 0, 0
        sent = 1 if cross.kind == "all_gather" else cross.ranks
        made = before.outer if isinstance(before, Encode | Sum) else 0
        taken = behind.peers if isinstance(behind, Sum) else behind.outer if isinstance(behind, Decode) else 0
        reads = taken and taken % cross.ranks == 0 and cross.kind != "reduce_scatter"
        return sent if made and made % sent == 0 else 0, cross.ranks if reads else 0

    def moved(self, chunks: Sequence[int], itemsize: int) -> list[tuple[Step, int, int]]:
        """Each step with the bytes of its input and of its result, for a bucket as in `Cross.message_bytes`."""
        found: list[tuple[Step, int, int]] = []
        taken = 0
        for step in self.steps:
            if isinstance(step, Cross):
                taken = step.message_bytes(chunks, itemsize)
            elif isinstance(step, Encode) and not found:
                taken = step.order.rows * sum(chunks) * itemsize
            result = _result_bytes(step, taken, chunks, itemsize)
            found.append((step, taken, result))
            taken = result
        return found

    def peak_bytes(self, chunks: Sequence[int], itemsize: int) -> int:
        """Maximum bytes of messages and sums in memory at once: the input and the result of a step.

        The tensors of the caller, and the whole tensors that the last step returns, do not count.
        """
        peak, moved = 0, self.moved(chunks, itemsize)
        for number, (step, taken, result) in enumerate(moved):
            given = isinstance(step, Encode) and number == 0
            whole = isinstance(step, Decode) and number == len(moved) - 1
            peak = max(peak, (0 if given else taken) + (0 if whole else result))
        return peak


def _result_bytes(step: Step, taken: int, chunks: Sequence[int], itemsize: int) -> int:
    if isinstance(step, Turn):
        return taken
    if isinstance(step, Cross):
        factor = {"all_gather": step.ranks, "reduce_scatter": 1 / step.ranks}.get(step.kind, 1.0)
        return round(taken * factor)
    if isinstance(step, Encode):
        return step.codec.format.message_bytes(chunks, step.order.rows, itemsize)
    if isinstance(step, Decode):
        return step.order.rows * sum(chunks) * itemsize
    if step.target is None:
        return step.rows * sum(chunks) * 4
    return step.target.format.message_bytes(chunks, step.rows, itemsize)


# ---- of the stage and the communicator ------------------------------------------------------------------------------


def gather_program(
    plan: ShardPlan,
    hops: Sequence[Hop],
    *,
    held: CodecConfig | None = None,
    rows: int = 1,
    result: CodecConfig | None = None,
    residual: str | None = None,
) -> Program:
    """The program from this rank's shards to the shards of a scope. Payloads are forwarded between tiers with equal codecs.

    Args:
        plan: The shard plan.
        hops: Tiers to cross, outermost first; at least one, unless ``held`` is given.
        held: Codec of the initial message; None: the program starts with tensors of one shard each.
        rows: Shards of every tensor in the initial message.
        result: Codec of the final message; None: the program ends with whole tensors over the world, shards in order.
        residual: See `Encode`.

    Returns:
        The program. Its message has one piece per rank of all hops, and the last hop is the outermost axis.
    """
    codec = held if held is not None else hops[0].codec
    steps: list[Step] = [] if held is not None else [Encode(codec, Order.of_rows(1), 1, residual)]
    outer = 1
    for hop in hops:
        steps += _recoded(codec, hop.codec, outer, rows)
        codec = hop.codec
        algorithms = plan.node_all_gather if hop.tier in NET_TIERS else _LIBRARY
        sent, outer = outer * rows, outer * hop.size
        steps.append(Cross("weights", "all_gather", (hop.tier,), hop.size, codec, sent, algorithms))
    if result is None:
        steps.append(Decode(codec, Order.of_hops(plan), outer))
        return Program(tuple(steps))
    return Program((*steps, *_recoded(codec, result, outer, rows)))


def changes_program(plan: ShardPlan, record: int) -> Program:
    """The program of a refresh that sends changes. Its message has ``record`` bytes for each shard of a bucket.

    It starts with the message of this rank and ends with the messages of all ranks whose shards are in the secondary partition.
    """
    hops = plan.refresh_hops()
    message = gather_program(plan, hops, held=hops[0].codec, result=hops[0].codec)
    return Program(tuple(replace(step, record=record) if isinstance(step, Cross) else step for step in message.steps))


def reduce_program(plan: ShardPlan, hops: Sequence[Hop], rows: int, *, shard_order: bool) -> Program:
    """The program from tensors of ``rows`` shards to the float32 sums of this rank's shards.

    A hop with codec ``none`` is a reduce-scatter. With any other codec the parts for all peers are encoded, received parts are
    summed in float32, and the sums are encoded for the next hop. With a lossless codec, messages are in codec ``none`` before
    and after the hop.

    Args:
        plan: The shard plan.
        hops: Tiers to cross, innermost first.
        rows: Shards of each tensor.
        shard_order: Whether the shards are in shard order, as in whole gradients, or in hop order.

    Returns:
        The program. It returns tensors in hop order; without hops, its input.
    """
    steps: list[Step] = []
    order = Order.of_hops(plan) if shard_order else Order.of_rows(rows)
    encoded = False
    for index, hop in enumerate(hops):
        held, outer = in_memory(hop), _outer(hops[index:])
        following = hops[index + 1] if index + 1 < len(hops) else None
        if not encoded:
            kept = hop.tier in plan.error_feedback and held is not PLAIN
            steps.append(Encode(held, order, outer, hop.tier if kept else None))
        kind: Kind = "reduce_scatter" if hop.codec.traits.plain else "all_to_all"
        steps += _recoded(held, hop.codec, outer, rows // outer)
        steps.append(Cross("gradients", kind, (hop.tier,), hop.size, hop.codec, rows))
        steps += _recoded(hop.codec, held, outer, rows // outer)
        rows //= hop.size
        order = Order.of_rows(rows)
        if held is PLAIN and kind == "all_to_all":
            steps.append(Sum(PLAIN, hop.size, rows, PLAIN, outer // hop.size))
        summed = held is PLAIN
        if following is None:
            steps.append(Sum(held, 1 if summed else hop.size, rows))
            break
        target = in_memory(following)
        # The error of encoding a sum may have to be kept.
        encoded = (summed and target is PLAIN) or (
            not summed and target is not PLAIN and following.tier not in plan.error_feedback
        )
        if not summed:
            steps.append(Sum(held, hop.size, rows, target if encoded else None, following.size if encoded else 1))
        elif not encoded:
            steps.append(Decode(PLAIN, order, 1))
    return Program(tuple(steps))


@dataclass(frozen=True)
class StagePrograms:
    """The programs of the stage for a bucket. Programs that a plan does not need have no steps.

    Attributes:
        refresh: From primary shards to secondary partitions, as payloads or decoded.
        uncoded: The refresh without codecs, if other refreshes send changes. These are for plans, and run as `changes_program`.
        unshard: To whole weights, from secondary partitions or, without copies, from primary shards.
        micro: Reduction of gradients in every micro-batch.
        boundary: Reduction of gradients once per step, without the outermost tier.
        outermost: Reduction over the outermost tier, of one or more buckets, since its peers have the smallest parts.
    """

    refresh: Program
    uncoded: Program
    unshard: Program
    micro: Program
    boundary: Program
    outermost: Program

    @classmethod
    def of(cls, plan: ShardPlan) -> StagePrograms:
        """The programs of a shard plan."""
        refresh = uncoded = unshard = Program(())
        if hops := plan.refresh_hops():
            kept = None if plan.whole_copies else plan.secondary_codec
            refresh = gather_program(plan, hops, result=kept)
            uncoded = gather_program(plan, plain(hops), result=kept)
            unshard = gather_program(plan, plan.unshard_hops(), held=plan.secondary_codec, rows=plan.secondary_rows)
        elif hops := plan.gather_hops():
            unshard = gather_program(plan, hops)
        micro, (*inner, last) = plan.micro_hops(), plan.boundary_hops() or (None,)
        rows = plan.gradient_rows // math.prod(hop.size for hop in inner)
        return cls(
            refresh,
            uncoded,
            unshard,
            micro=reduce_program(plan, micro, plan.grid.world_size, shard_order=True),
            boundary=reduce_program(plan, inner, plan.gradient_rows, shard_order=not micro),
            outermost=reduce_program(plan, [last] if last else (), rows, shard_order=not micro and not inner),
        )


def all_to_all_program(plan: ShardPlan) -> Program:
    """The program from a tensor with part i for rank i to one with part i from rank i. Hops have the codecs of weights.

    The innermost tier is crossed first. On every tier a rank sends to each peer all parts whose destinations have that peer's
    coordinate. So between nodes a rank sends one message to each other node, while an all-to-all over the world would send one
    to each rank. Every part crosses each tier at most once.
    """
    hops, world = plan.gather_hops()[::-1], plan.grid.world_size
    codec, crossed = hops[0].codec, 1
    steps: list[Step] = [Encode(codec, Order.of_hops(plan))]
    for hop in hops:
        steps.append(Turn(codec, crossed, hop.size))
        crossed *= hop.size
        steps += _recoded(codec, hop.codec, 1, world)
        codec = hop.codec
        steps.append(Cross("weights", "all_to_all", (hop.tier,), hop.size, codec, world))
    # Rows are now in the order of the senders, outermost tier first.
    steps.append(Decode(codec, Order.of_hops(plan, outermost_first=True), 1))
    return Program(tuple(steps))


def broadcast_program(plan: ShardPlan, source: int) -> Program:
    """The program from one rank's tensor to all ranks. The outermost tier is first, so that a node receives the payload once.

    A rank joins a hop if its coordinates on the inner tiers equal the source's.
    """
    home, place = plan.grid.coordinates(source), plan.grid.coordinates(plan.rank)
    steps: list[Step] = []
    codec: CodecConfig | None = None
    for hop in plan.gather_hops():
        if any(getattr(place, tier) != getattr(home, tier) for tier in TIERS[: TIERS.index(hop.tier)]):
            continue
        if codec is None and plan.rank == source:
            steps.append(Encode(hop.codec, Order.of_rows(1)))
        elif codec is not None:
            steps += _recoded(codec, hop.codec, 1, 1)
        codec = hop.codec
        root = getattr(home, hop.tier)
        steps.append(Cross("weights", "broadcast", (hop.tier,), hop.size, codec, 1, root=root))
    assert codec is not None, "there is more than one rank"
    return Program((*steps, Decode(codec, Order.of_rows(1))))


def message_program(plan: ShardPlan, source: int, target: int) -> Program:
    """The program from a tensor of one rank to another rank, in the codec of the outermost tier between them.

    Args:
        plan: The shard plan of either rank.
        source: The rank that sends.
        target: The rank that receives.
    """
    tier = plan.grid.tier_between(source, target)
    codec, order = plan.codecs.weights[tier], Order.of_rows(1)
    if plan.rank == source:
        return Program((Encode(codec, order), Cross("weights", "send", (tier,), 2, codec, 1, root=target)))
    return Program((Cross("weights", "receive", (tier,), 2, codec, 1, root=source), Decode(codec, order)))


def rows_program(plan: ShardPlan, tier: Tier, sent: Sequence[int], received: Sequence[int]) -> Program:
    """The program that exchanges rows of a tensor. Rows are sorted by destination before, and by sender afterwards.

    A row is encoded once, by its sender, and crosses one tier. A message without rows is neither encoded nor decoded.

    Args:
        plan: The shard plan.
        tier: The outermost tier between this rank and the ranks with which it exchanges rows.
        sent: Rows for each rank inside the tier.
        received: Rows from each rank inside the tier.
    """
    codec, rows, arriving = plan.codecs.weights[tier], sum(sent), sum(received)
    uneven = tuple(sent), tuple(received)
    steps: list[Step] = [Encode(codec, Order.of_rows(rows))] if rows else []
    steps.append(Cross("weights", "all_to_all", (tier,), len(sent), codec, rows, uneven=uneven))
    return Program((*steps, *([Decode(codec, Order.of_rows(arriving))] if arriving else [])))


def in_memory(hop: Hop) -> CodecConfig:
    """The codec of a reduction's message before and after a hop: ``none`` if the codec on the wire is lossless."""
    return PLAIN if hop.codec.traits.exact else hop.codec


def _outer(hops: Sequence[Hop]) -> int:
    """Number of pieces of the encoded message for the first of ``hops``.

    While successive hops have messages in codec ``none``, sums are forwarded unchanged. So the layout has the pieces of all
    these hops.
    """
    passed = itertools.takewhile(lambda hop: in_memory(hop) is PLAIN, hops)
    return math.prod([hop.size for hop in passed] or [hops[0].size])


def _recoded(source: CodecConfig, target: CodecConfig, outer: int, rows: int) -> list[Step]:
    """The steps that change the codec of a message, with one seed on all ranks. ``rows``: rows of a piece."""
    order = Order.of_rows(outer * rows)
    return [] if source.format == target.format else [Decode(source, order, outer), Encode(target, order, outer)]
