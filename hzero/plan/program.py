"""Programs: the steps of one bucket's hops as data, with their codecs, layouts and bytes. No process group, no tensor.

A program is made once for each way that buckets take. `hzero.comm` executes it and nothing else. `hzero plan` adds up its
bytes and buffers, predictions time its steps, and tests compare the wire log with it.

A message is ``[outer][tensor][rows][record]`` (docs/payload_format.md).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hzero.config import NET_TIERS, PLAIN, TIERS, CodecConfig, NodeAllGather, Role, Tier
from hzero.plan.shards import Hop, ShardPlan, plain

#: Programs of a kind in flight, at most: reductions, and refreshes ahead of the gathers.
IN_FLIGHT = 2
#: The algorithm of all-gathers inside nodes.
_LIBRARY = NodeAllGather()
Kind: TypeAlias = Literal["all_gather", "all_to_all", "reduce_scatter", "all_reduce", "broadcast", "send", "receive"]


@dataclass(frozen=True)
class Order:
    """Which shard each row of a tensor holds.

    Attributes:
        sizes: Axes of the rows, row-major.
        strides: Distance in shards between neighbours on each axis.
        table: Shard of each row, where ranks are numbered in no regular order.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    table: tuple[int, ...] | None = None

    @classmethod
    def of_rows(cls, rows: int) -> Order:
        """Rows as they come."""
        return cls((rows,), (1,))

    @classmethod
    def of_hops(cls, plan: ShardPlan, *, outermost_first: bool = False) -> Order:
        """Rows in the order in which a plan's hops take and leave them: innermost tier first, or outermost."""
        tiers, grid = TIERS[::-1] if outermost_first else TIERS, plan.grid
        sizes = tuple(map(grid.size, tiers))
        if grid.regular:
            return cls(sizes, tuple(map(grid.stride, tiers)))
        places = itertools.product(*map(range, sizes))
        table = tuple(grid.rank(**dict(zip(tiers, place))) for place in places)
        return cls((len(table),), (1,), table)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Encode:
    """Tensors become a message.

    Attributes:
        codec: Of the message.
        order: Of the tensors' rows.
        outer: Its pieces.
        residual: Name of the residuals that are added, and under which what is lost is kept; None: nothing is.
    """

    codec: CodecConfig
    order: Order
    outer: int = 1
    residual: str | None = None


@dataclass(frozen=True)
class Turn:
    """Of the axes ``[crossed][ranks][rest]`` of a message's rows the first two change places.

    Attributes:
        codec: Of the message.
        crossed: Ranks of the hops before the next one.
        ranks: Of the next hop; its peers' parts come to the front.
    """

    codec: CodecConfig
    crossed: int
    ranks: int


@dataclass(frozen=True)
class Cross:
    """One collective. In a codec without a fixed size its messages are cut to what they use, once ranks know the longest.

    Attributes:
        role: Whether a stage's program moves weights or gradients, for predictions. Without a meaning in other programs.
        kind: The collective; ``all_reduce`` is for predictions of other engines only. A ``reduce_scatter``
            leaves the sum, rounded once to the type of the elements.
        tiers: Tiers whose coordinates differ among the ranks of a group; one, but for flat collectives of other engines.
        ranks: Ranks of a group.
        codec: Codec of the messages.
        rows: Shards of every tensor in the message of one rank: the part that an all-gather sends, the whole of which a
            reduction leaves a part.
        outer: Pieces of the message that arrives.
        algorithms: Of an all-gather, by the bytes of the message.
        root: Coordinate of the rank that broadcasts; of the rank that sends or receives a message its number in the plan.
        uneven: Of an all-to-all whose parts differ in size: the rows for each rank of the group, and the rows from each.
    """

    role: Role
    kind: Kind
    tiers: tuple[Tier, ...]
    ranks: int
    codec: CodecConfig
    rows: int
    outer: int = 1
    algorithms: NodeAllGather = _LIBRARY
    root: int = 0
    uneven: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def received(self) -> float:
        """Messages of this size that enter a rank."""
        if self.kind in ("broadcast", "receive"):
            return 1
        if self.kind == "send":
            return 0
        if self.kind == "all_gather":
            return self.ranks - 1
        return (2 if self.kind == "all_reduce" else 1) * (1 - 1 / self.ranks)

    def message_bytes(self, chunks: Sequence[int], itemsize: int) -> int:
        """Bytes of one rank's message of a bucket, whose parameters have shards of ``chunks`` elements."""
        return self.codec.format.message_bytes(chunks, self.rows, itemsize)

    def part_bytes(self, chunks: Sequence[int], itemsize: int) -> int:
        """Bytes of each peer's part in one rank's message, of a reduction."""
        return self.message_bytes(chunks, itemsize) // self.ranks


@dataclass(frozen=True)
class Sum:
    """The messages of peers become their sum, in float32 and in the order of the peers.

    Attributes:
        codec: Of the messages.
        peers: Their number.
        rows: Of each.
        target: Codec of the sum; None leaves float32 tensors.
        outer: Pieces of the message of the sum.
    """

    codec: CodecConfig
    peers: int
    rows: int
    target: CodecConfig | None = None
    outer: int = 1


@dataclass(frozen=True)
class Decode:
    """A message becomes tensors of the bucket's type.

    Attributes:
        codec: Of the message.
        order: Of the tensors' rows.
        outer: Its pieces.
        add: Whether it is added to tensors that exist, in float32, and each sum rounded once.
    """

    codec: CodecConfig
    order: Order
    outer: int = 1
    add: bool = False


Step: TypeAlias = Encode | Turn | Cross | Sum | Decode


@dataclass(frozen=True, eq=False)  # one is compared by identity, to find what has been made ready for it
class Program:
    """The steps of one bucket.

    Attributes:
        steps: In order.
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
        """Parts of a hop's message whose checksums the steps before and behind it write and read; 0: the hop does that.

        What encodes or decodes does it in the same pass. A message that passes, or whose codec has no kernels, is read once more;
        what a reduce-scatter brings is summed, and compared, by the hop.

        Args:
            index: Of the step; any that does not cross has no such parts.
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
        """Each step with the bytes that it takes and those that it leaves, for a bucket as in `Cross.message_bytes`."""
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
        """Most bytes of messages and sums that a rank holds at once: a step keeps what it takes until the next has it.

        Tensors that the caller gives, and whole ones that the last step leaves, do not count.
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
    """From this rank's shards to those of a whole scope. Where successive tiers have one codec, payloads pass.

    Args:
        plan: The shard plan.
        hops: Tiers to cross, outermost first; at least one, or ``held``.
        held: Codec of the message that this rank holds; None: it holds tensors, of one shard each.
        rows: Shards of every tensor in that message.
        result: Codec of the message that results; None: tensors do, shards in order, and the scope is the world.
        residual: As for `Encode`, of the tensors.

    Returns:
        The program. Its message has as many pieces as all hops have ranks, those of the last hop outermost.
    """
    codec = held if held is not None else hops[0].codec
    steps: list[Step] = [] if held is not None else [Encode(codec, Order.of_rows(1), 1, residual)]
    outer = 1
    for hop in hops:
        steps += _recoded(codec, hop.codec, outer, rows)
        codec = hop.codec
        algorithms = plan.node_all_gather if hop.tier in NET_TIERS else _LIBRARY
        sent, outer = outer * rows, outer * hop.size
        steps.append(Cross("weights", "all_gather", (hop.tier,), hop.size, codec, sent, outer, algorithms))
    if result is None:
        steps.append(Decode(codec, Order.of_hops(plan), outer))
        return Program(tuple(steps))
    return Program((*steps, *_recoded(codec, result, outer, rows)))


def reduce_program(plan: ShardPlan, hops: Sequence[Hop], rows: int, *, shard_order: bool) -> Program:
    """From tensors of ``rows`` shards to float32 sums of this rank's.

    A hop with codec ``none`` is a reduce-scatter. With any other codec the parts for all peers are encoded, received parts are
    summed in float32, and the sums are encoded for the next hop. What a lossless codec carries stays in codec ``none`` before
    and after the hop.

    Args:
        plan: The shard plan.
        hops: Tiers to cross, innermost first.
        rows: Shards that each tensor holds.
        shard_order: Whether they are in shard order, as in whole gradients, or in hop order.

    Returns:
        The program. It leaves tensors, in hop order; without hops those that were given.
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
        steps.append(Cross("gradients", kind, (hop.tier,), hop.size, hop.codec, rows, outer))
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
        # What the encoding of a sum loses may have to be kept.
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
    """What the stage runs for a bucket in one step. A program without steps is one that a plan does not need.

    Attributes:
        refresh: From primary shards to resident copies, as payloads or decoded.
        uncoded: The same without codecs, where other refreshes send differences.
        difference: From the message of a difference of primary shards to the resident copy that it is added to.
        unshard: To whole weights, from resident payloads or, where none are kept, from primary shards.
        micro: Of gradients in every micro-step.
        boundary: Of gradients once per step, but for the outermost tier.
        outermost: The rest of these, of one or more buckets: parts for the peers of the outermost tier are the smallest.
    """

    refresh: Program
    uncoded: Program
    difference: Program
    unshard: Program
    micro: Program
    boundary: Program
    outermost: Program

    @classmethod
    def of(cls, plan: ShardPlan) -> StagePrograms:
        """The programs of a shard plan."""
        refresh = uncoded = difference = unshard = Program(())
        if hops := plan.refresh_hops():
            kept = None if plan.whole_copies else plan.resident_codec
            refresh = gather_program(plan, hops, result=kept)
            uncoded = gather_program(plan, plain(hops), result=kept)
            message = gather_program(plan, hops, held=hops[0].codec, result=hops[-1].codec)
            order = Order.of_hops(plan) if plan.whole_copies else Order.of_rows(plan.resident_rows)
            difference = Program((*message.steps, Decode(hops[-1].codec, order, plan.resident_rows, add=True)))
            unshard = gather_program(plan, plan.unshard_hops(), held=plan.resident_codec, rows=plan.resident_rows)
        elif hops := plan.gather_hops():
            unshard = gather_program(plan, hops)
        micro, (*inner, last) = plan.micro_hops(), plan.boundary_hops() or (None,)
        rows = plan.gradient_rows // math.prod(hop.size for hop in inner)
        return cls(
            refresh,
            uncoded,
            difference,
            unshard,
            micro=reduce_program(plan, micro, plan.grid.world_size, shard_order=True),
            boundary=reduce_program(plan, inner, plan.gradient_rows, shard_order=not micro),
            outermost=reduce_program(plan, [last] if last else (), rows, shard_order=not micro and not inner),
        )


def all_to_all_program(plan: ShardPlan) -> Program:
    """From one tensor, part i for rank i, to one with part i of rank i. Hops take the codecs of weights.

    It crosses the innermost tier first. On every tier a rank sends to each peer all parts whose way leads over that peer's
    coordinate. So between nodes a rank sends one message to each other node, where an all-to-all over the world would send one
    to each rank; and every part crosses each tier at most once.
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
    # Rows are now those of the senders, outermost tier first.
    steps.append(Decode(codec, Order.of_hops(plan, outermost_first=True), 1))
    return Program(tuple(steps))


def broadcast_program(plan: ShardPlan, source: int) -> Program:
    """From a tensor of one rank to that of all, the outermost tier first, so that a node receives the payload once.

    A rank takes part in a hop once its coordinates on the tiers further inside are the source's.
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
    """From a tensor of one rank to another rank, in the codec of the outermost tier between them.

    Args:
        plan: The shard plan of either.
        source: The rank that sends.
        target: The rank that receives.
    """
    tier = plan.grid.tier_between(source, target)
    codec, order = plan.codecs.weights[tier], Order.of_rows(1)
    if plan.rank == source:
        return Program((Encode(codec, order), Cross("weights", "send", (tier,), 2, codec, 1, root=target)))
    return Program((Cross("weights", "receive", (tier,), 2, codec, 1, root=source), Decode(codec, order)))


def rows_program(plan: ShardPlan, tier: Tier, sent: Sequence[int], received: Sequence[int]) -> Program:
    """Rows of one tensor, in the order of the ranks that they are for, to the rows that other ranks have for this one.

    A row is encoded where it is born, and crosses no other tier. A message without rows is neither encoded nor decoded.

    Args:
        plan: The shard plan.
        tier: The outermost tier between this rank and each of those that send it something, or receive something.
        sent: Rows for each rank inside the tier.
        received: Rows from each of them.
    """
    codec, rows, arriving = plan.codecs.weights[tier], sum(sent), sum(received)
    uneven = tuple(sent), tuple(received)
    steps: list[Step] = [Encode(codec, Order.of_rows(rows))] if rows else []
    steps.append(Cross("weights", "all_to_all", (tier,), len(sent), codec, rows, uneven=uneven))
    return Program((*steps, *([Decode(codec, Order.of_rows(arriving))] if arriving else [])))


def in_memory(hop: Hop) -> CodecConfig:
    """The codec of a reduction's message before and after a hop: with a lossless one on the wire ``none``."""
    return PLAIN if hop.codec.traits.exact else hop.codec


def _outer(hops: Sequence[Hop]) -> int:
    """Number of pieces to encode a message in for the first of ``hops``.

    While successive hops have messages in codec ``none``, sums are passed on unchanged: the pieces of all those hops are laid
    out at once.
    """
    passed = itertools.takewhile(lambda hop: in_memory(hop) is PLAIN, hops)
    return math.prod([hop.size for hop in passed] or [hops[0].size])


def _recoded(source: CodecConfig, target: CodecConfig, outer: int, rows: int) -> list[Step]:
    """The steps that give a message another codec, with one seed on all ranks; ``rows`` are those of a piece."""
    order = Order.of_rows(outer * rows)
    return [] if source.format == target.format else [Decode(source, order, outer), Encode(target, order, outer)]
