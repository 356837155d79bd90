"""Communicator: collectives of tensors over the tiers of a machine, with a codec for each tier. Needs no stage."""

from __future__ import annotations

import functools
import math
import reprlib
import weakref
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from pydantic import Field

from hzero.block import load, split
from hzero.codecs.codec import FLOAT_DTYPES
from hzero.codecs.formats import chunk_numel
from hzero.comm.lanes import shared_lanes
from hzero.comm.peers import Peers, peers_of, unused_name, wires_of
from hzero.comm.runtime import Bound, Bucket, Collectives, ErrorFeedback, seed_of
from hzero.comm.wirelog import WireLog
from hzero.comm.wires import Lane, group_timeout, world_timeout
from hzero.config import (
    BASE_TIERS,
    DEFAULT_BLOCK_SIZE,
    DIMENSIONS,
    UNCODED,
    CodecsConfig,
    Dimension,
    HZeroConfig,
    NodeAllGather,
    TierCodecs,
    TierList,
    Topology,
    TopologyConfig,
    TransportName,
    codecs_by_tier,
    parse_config,
)
from hzero.plan.program import (
    Program,
    all_to_all_program,
    broadcast_program,
    gather_program,
    message_program,
    reduce_program,
    rows_program,
)
from hzero.plan.shards import ShardPlan
from hzero.topology import Grid, resolve_grid, sub_grid
from hzero.validation import ConfigError, Frozen, one_of, validated

#: What has wires of its own: sums and copies on every tier, messages from rank to rank one for the whole group.
Use: TypeAlias = Literal["sums", "copies", "messages"]
USES: tuple[Use, ...] = ("sums", "copies", "messages")
#: The program of an operation that has nothing to send.
_NOTHING = Program(())
#: What a reduction makes.
Reduced: TypeAlias = Literal["sum", "mean"]


class CommunicatorConfig(Frozen):
    """What a `Communicator` sends, and over which tiers.

    Attributes:
        codecs: Codec of each tier, by name or as a block with `codec` and its settings (those of a stage's `codecs`); a tier
            that is not named has `none`. A name instead of the block is the codec of all tiers. With `mpc` sums are bit for bit
            those of `none`.
        gather: The same for what is copied and not summed: all-gathers, broadcasts, all-to-alls, sends, and the second half
            of an all-reduce, which spreads the sums. By default `codecs`.
        block_size: Elements that share a scale; a codec may have its own.
        error_feedback: Tiers whose encoding keeps its loss (bfloat16) and adds it the next time, in reductions that have a
            key; with the outermost tier of the machine also in the second half of an all-reduce.
        node_all_gather: Algorithm of the all-gathers between nodes.
        checksum: Whether every message is followed by a checksum of 16 bytes, which is compared on arrival; on GPUs in
            `Communicator.verify`.
        transport: What carries the messages: `torch`, the backend of the process group, or `mpi`.
        topology: Where the ranks sit: `discover`, the default, finds out; a preset's name or a file names a machine; a block
            declares one.
    """

    codecs: TierCodecs
    gather: TierCodecs
    block_size: int = Field(DEFAULT_BLOCK_SIZE, ge=16, le=512, multiple_of=16)
    error_feedback: TierList = ()
    node_all_gather: NodeAllGather = NodeAllGather()
    checksum: bool = False
    transport: TransportName = "torch"
    topology: Topology = TopologyConfig()


def parse_communicator(block: Any, where: str = "communicator") -> CommunicatorConfig:
    """Reads the settings of a communicator.

    Args:
        block: As the user wrote them; None: every codec is ``none`` and the topology is discovered.
        where: Begins messages.

    Raises:
        ConfigError: An unknown key, codec or tier (with the nearest known one), or a wrong type.
    """
    block = {} if block is None else block
    if not isinstance(block, Mapping):
        keys = ", ".join(CommunicatorConfig.model_fields)
        raise ConfigError(f"{where}: found {reprlib.repr(block)}, expected a block with keys {keys}")
    size = block.get("block_size", DEFAULT_BLOCK_SIZE)
    written = {"codecs": block.get("codecs", "none"), "gather": block.get("gather", block.get("codecs", "none"))}
    plain = dict.fromkeys(BASE_TIERS, "none")
    codecs = {key: codecs_by_tier(tiers, plain, size, groups_as_nodes=True) for key, tiers in written.items()}
    values = {**block, **codecs}
    parsed = validated(CommunicatorConfig, values, where)
    for tier in parsed.error_feedback:
        if parsed.codecs[tier].traits.exact and parsed.gather[tier].traits.exact:
            raise ConfigError(
                f"{where}.error_feedback: found {tier!r}, whose codec {parsed.codecs[tier].codec!r} loses nothing; possible: "
                "tiers with another one"
            )
    return parsed


class Communicator:
    """Collectives over a process group of torch.distributed, one hop per tier of the machine, each with the tier's codec.

    Most machines have three tiers: ``gcd`` (devices of a package), ``gpu`` (packages of a node) and ``node``. An operation
    crosses them one after the other: gathers and broadcasts from the outermost inwards, sums and all-to-alls from the innermost
    outwards. On each it sends payloads in the codec of that tier; where two tiers have one codec a payload that is only copied
    passes unchanged. All ranks decode the same bytes, the owner of a tensor too, so they end with the same bits.

    Sums are made in float32, in the order of the ranks of a tier group, tier by tier; a narrow type is never summed. With codec
    ``none`` or ``mpc`` a sum is rounded to the tensor's type once per tier. So the result does not depend on the library, nor on
    when messages arrive, and differs from another order of additions by rounding alone.

    Every operation returns its result, and changes no argument. With ``async_op=True`` it returns a handle at once, whose
    ``wait()`` gives the result (`Chain`). The arguments have been read then, except on a GPU, where ``wait_read()`` makes the
    current stream wait until they have been. All ranks call the same operations in the same order, with tensors of the same
    shape and type, except `send` and `recv`, which the two ranks alone call. A wait ends with an error after the group's
    timeout, which names the ranks that did not come; the operations of this group that follow it fail too.

    Args:
        config: The settings, as a block (`CommunicatorConfig`); None: every codec is ``none``, and the topology is
            discovered.
        group: The process group; None takes the world. With a smaller group and a topology that is discovered, all ranks of
            the world must make a communicator at the same point.
        timeout: Longest wait for one hop; None takes that of the group.
        role: What it carries, for the wire log and the names of its lanes; None: the wire log has each operation by its name.
        grid: Where the ranks of the group sit, in the group's own numbers; None takes the topology of ``config``.
        uses: What has process groups: ``sums`` (`reduce_scatter`, `all_to_all`), ``copies`` (`all_gather`, `broadcast`), of
            which `all_reduce` takes both, and ``messages`` (`send`, `recv`).

    Attributes:
        config: The settings.
        plan: Tiers and hops, in the group's own rank numbers: weights stand for what is copied, gradients for sums.
        role: What it carries; None if nobody has said.
        streams: Streams of the lanes on a GPU; None on CPUs.
        adopted: Whether an engine counts its hops in a wire log of its own.

    Raises:
        ConfigError: A wrong key, or ranks that do not fill the tiers evenly.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | CommunicatorConfig | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: timedelta | None = None,
        role: str | None = None,
        grid: Grid | None = None,
        uses: Collection[Use] = USES,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError("communicator: torch.distributed is not initialised; call init_process_group first")
        self.config = settings = config if isinstance(config, CommunicatorConfig) else parse_communicator(config)
        if timeout is not None and (not isinstance(timeout, timedelta) or timeout <= timedelta(0)):
            raise ConfigError(f"communicator: timeout: found {timeout!r}, expected a positive datetime.timedelta")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ConfigError(f"communicator: group: found {group!r}, expected a process group of torch.distributed")
        group = group or dist.group.WORLD
        assert group is not None
        rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        if rank < 0:
            raise ConfigError(f"communicator: rank {dist.get_rank()} is not in the group of ranks {ranks}")
        whole, where = ranks == list(range(dist.get_world_size())), "communicator.topology"
        if grid is None and whole:
            grid = resolve_grid(settings.topology, len(ranks), where)
        elif grid is None:
            grid = sub_grid(settings.topology, ranks, dist.get_world_size(), where)
        codecs = CodecsConfig(weights=settings.gather, gradients=settings.codecs)
        names = ("error_feedback", "node_all_gather", "checksum", "transport")
        self.plan = ShardPlan(grid, rank, "world", "world", codecs, **{name: getattr(settings, name) for name in names})
        backend = dist.get_backend_config(group)
        self._device = "cuda" if "nccl" in backend else "cpu"
        lanes = shared_lanes(torch.cuda if self._device == "cuda" else None, settings.transport)
        self.role, self.adopted, self.streams = role, False, lanes.streams
        timeout, self._group = timeout or group_timeout(group), group
        self._ranks, self._timeout = ranks, timeout
        name = role or "collectives"
        if not whole:
            name += f" {zlib.crc32(repr(ranks).encode()):08x}"
        self._name = name = unused_name(name, lanes.failures, group, ranks)
        if wrong := [use for use in uses if use not in USES]:
            raise one_of("communicator: uses", wrong[0], USES)
        # In the order of USES, whatever the order of `uses`: all ranks make the groups in one order.
        self._channels: dict[Use, str] = {use: f"{name} {use}" for use in USES if use in uses}
        self._backend = None if whole else backend
        channels = [channel for use, channel in self._channels.items() if use != "messages"]
        how: dict[str, Any] = {"ranks": ranks, "backend": self._backend, "streams": lanes.streams}
        peers = peers_of(self.plan, timeout, channels=channels, **how)
        self._collectives = Collectives(self.plan, peers, WireLog(), lanes, library_sums=False)
        if "messages" in uses and len(ranks) > 1:
            channel = self._channels["messages"]
            self._wires = wires_of(settings.transport, (channel, "node"), ranks, timeout, self._backend)
        copying, reducing = self.plan.gather_hops(), self.plan.reduce_hops()
        self._summing = reduce_program(self.plan, reducing, len(ranks), shard_order=True)
        self._copying = self._again = gather_program(self.plan, copying) if copying else _NOTHING
        if copying and copying[0].tier in settings.error_feedback and not copying[0].codec.traits.exact:
            # The second half of an all-reduce encodes once more, what this rank owns of the sums.
            self._again = gather_program(self.plan, copying, residual=f"{copying[0].tier} again")
        plan = self.plan  # the programs of this group are made once; they do not keep it alive
        self._program = functools.cache(lambda make, *peers: make(plan, *peers) if copying else _NOTHING)
        self._calls = self._sent = 0

    @property
    def wire_log(self) -> WireLog:
        """Bytes, codec and time of every hop that has ended, by operation, or by `role`, and tier. Another one may be set."""
        return self._collectives.wire_log

    @wire_log.setter
    def wire_log(self, wire_log: WireLog) -> None:
        self._collectives.wire_log, self.adopted = wire_log, True

    # ---- sums ------------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def all_reduce(
        self, tensor: torch.Tensor, op: Reduced = "sum", *, key: int | None = None, async_op: bool = False
    ) -> Any:
        """The sum, or the mean, of all ranks' tensors: a reduce-scatter over the tiers, then an all-gather back.

        With codec ``none`` it differs from another order of additions by rounding alone; the error of other codecs is at most
        the sum of their `Codec.error_bound` over the hops, for the sum of all ranks' magnitudes.

        Args:
            tensor: float32, bfloat16 or float16, of any shape.
            op: ``sum`` or ``mean``.
            key: Names the tensor from call to call, for its error feedback; needed where that is on, without effect else.
            async_op: Whether to return a handle.

        Returns:
            A tensor like ``tensor``; with ``async_op`` a `Chain` of it.
        """
        flat, then = self._flat("all_reduce", tensor), self._shaped(tensor.dtype, tensor.shape)
        self._check_sum("all_reduce", op, key)
        chunk = chunk_numel(flat.numel(), self.plan.grid.world_size)
        sums, copies = (self._bucket("all_reduce", tensor, chunk, use, key) for use in USES[:2])
        if not self._copying.steps or not flat.numel():
            return self._run(copies, self._again, flat, then, async_op=async_op)
        same, mine = self._seeds()
        held: list[torch.Tensor] = []
        reduced = self._reduce(sums, flat, op, mine, held.append)
        how: dict[str, Any] = {"seed": same, "first_seed": mine, "after": [reduced]}
        return self._run(copies, self._again, flat, then, read=lambda: [held.pop()], **how, async_op=async_op)

    @torch.compiler.disable
    def reduce_scatter(
        self, tensor: torch.Tensor, op: Reduced = "sum", *, key: int | None = None, async_op: bool = False
    ) -> Any:
        """This rank's part of the sum, or of the mean, of all ranks' tensors.

        Args:
            tensor: float32, bfloat16 or float16, whose first dimension is a multiple of the group's size.
            op: As in `all_reduce`.
            key: As in `all_reduce`.
            async_op: As in `all_reduce`.

        Returns:
            Part r of the first dimension on rank r; with ``async_op`` a `Chain` of it.
        """
        flat = self._flat("reduce_scatter", tensor)
        self._check_sum("reduce_scatter", op, key)
        shape = self._part("reduce_scatter", tensor)
        bucket = self._bucket("reduce_scatter", tensor, math.prod(shape), "sums", key)
        return self._reduce(bucket, flat, op, self._seeds()[1], self._shaped(tensor.dtype, shape), async_op=async_op)

    def _reduce(
        self, bucket: Bucket, flat: torch.Tensor, op: str, seed: int, then: Callable[[torch.Tensor], Any], **how: Any
    ) -> Any:
        """`_run` of a reduction, which ends with ``then`` of this rank's shard, float32."""
        world, averaged = self.plan.grid.world_size, then
        if op == "mean" and flat.dtype == torch.float16:  # whose sums may overflow where they travel
            flat = flat / world
        elif op == "mean":
            averaged = lambda shard: then(shard.div_(world))  # noqa: E731
        return self._run(bucket, self._summing, flat, averaged, seed=seed, **how)

    @property
    def feedback(self) -> ErrorFeedback:
        """The residuals of error feedback: `ErrorFeedback.clear` when what they belong to has changed."""
        return self._collectives.feedback

    # ---- copies ----------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def all_gather(self, tensor: torch.Tensor, *, async_op: bool = False) -> Any:
        """All ranks' tensors, one after the other in the order of ranks. With codec ``none`` bit for bit.

        Args:
            tensor: float32, bfloat16 or float16, of any shape.
            async_op: As in `all_reduce`.

        Returns:
            A tensor with the group's size times as large a first dimension; with ``async_op`` a `Chain` of it.
        """
        flat, (rows, *rest) = self._flat("all_gather", tensor), tensor.shape or (1,)
        bucket = self._bucket("all_gather", tensor, flat.numel(), "copies")
        then = self._shaped(tensor.dtype, (rows * self.plan.grid.world_size, *rest))
        same, mine = self._seeds()
        return self._run(bucket, self._copying, flat, then, seed=same, first_seed=mine, async_op=async_op)

    @torch.compiler.disable
    def all_to_all(self, tensor: torch.Tensor, *, async_op: bool = False) -> Any:
        """Part i of every rank's tensor goes to rank i. With codec ``none`` bit for bit.

        Args:
            tensor: float32, bfloat16 or float16, whose first dimension is a multiple of the group's size. Part i of it is for
                rank i.
            async_op: As in `all_reduce`.

        Returns:
            A tensor like ``tensor``, whose part i is of rank i; with ``async_op`` a `Chain` of it.
        """
        flat, part = self._flat("all_to_all", tensor), self._part("all_to_all", tensor)
        bucket = self._bucket("all_to_all", tensor, math.prod(part), "sums")
        program, then = self._program(all_to_all_program), self._shaped(tensor.dtype, tensor.shape)
        return self._run(bucket, program, flat, then, seed=self._seeds()[1], async_op=async_op)

    @torch.compiler.disable
    def broadcast(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Any:
        """The tensor of one rank. With codec ``none`` bit for bit.

        Args:
            tensor: float32, bfloat16 or float16, of any shape; on other ranks than ``src`` only shape and type count.
            src: Rank of the group.
            async_op: As in `all_reduce`.

        Returns:
            The tensor, on ``src`` too as the others decode it; with ``async_op`` a `Chain` of it.
        """
        flat = self._flat("broadcast", tensor)
        self._check_rank("broadcast: src", src)
        bucket = self._bucket("broadcast", tensor, flat.numel(), "copies")
        program = self._program(broadcast_program, int(src))
        read = None if src == self.plan.rank else _room(program, bucket, flat)
        then = self._shaped(tensor.dtype, tensor.shape)
        return self._run(bucket, program, flat, then, read=read, seed=self._seeds()[0], async_op=async_op)

    # ---- point to point --------------------------------------------------------------------------------------

    @torch.compiler.disable
    def send(self, tensor: torch.Tensor, dst: int, *, async_op: bool = False) -> Any:
        """Sends a tensor to one rank, in the codec of the outermost tier between the two.

        Messages of one rank to another arrive in order; those of communicators with other roles pass each other. On NCCL and
        RCCL the order of sends and receives of two ranks must not make each wait for the other, as with
        ``torch.distributed.isend``.

        Args:
            tensor: float32, bfloat16 or float16, of any shape.
            dst: Rank of the group, another one than this.
            async_op: As in `all_reduce`.

        Returns:
            None; with ``async_op`` a `Chain` of it.
        """
        flat = self._flat("send", tensor)
        program, bucket = self._message("send", tensor, "dst", dst)
        self._sent += 1  # apart from `_calls`, which has to be the same on all ranks
        seed = seed_of(self._sent, self.plan.rank + 1)
        return self._run(bucket, program, flat, lambda _: None, seed=seed, async_op=async_op)

    @torch.compiler.disable
    def recv(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Any:
        """Receives what a rank has sent with `send`.

        Args:
            tensor: A tensor of the shape and type that were sent; its values are neither read nor changed.
            src: Rank of the group, another one than this.
            async_op: As in `all_reduce`.

        Returns:
            The tensor; with ``async_op`` a `Chain` of it.
        """
        flat = self._flat("recv", tensor)
        program, bucket = self._message("recv", tensor, "src", src)
        then = self._shaped(tensor.dtype, tensor.shape)
        return self._run(bucket, program, flat, then, read=_room(program, bucket, flat), async_op=async_op)

    def _message(self, operation: str, tensor: torch.Tensor, argument: str, peer: int) -> tuple[Program, Bucket]:
        """The program of a message, and its bucket. Each direction has a lane: in a ring all ranks send before they receive."""
        self._check_rank(f"{operation}: {argument}", peer)
        ways = {"dst": (self.plan.rank, int(peer)), "src": (int(peer), self.plan.rank)}
        source, target = ways[argument]
        if source == target:
            raise ValueError(f"{operation}: {argument}: found {peer}, this rank itself; expected another rank")
        bucket = self._bucket(operation, tensor, tensor.numel(), "messages", direction=f"{source} to {target}")
        lane = self._collectives.lane(bucket, self.plan.grid.tier_between(source, target))
        if lane not in self._collectives.peers:
            pair = [self._ranks[source], self._ranks[target]]
            self._collectives.peers[lane] = Peers.of(lane, self._wires, pair, self._timeout)
        return self._program(message_program, source, target), bucket

    # ---- rows of experts -------------------------------------------------------------------------------------

    @torch.compiler.disable
    def exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """How many rows each rank is about to send to this one, over the group that the communicator was made for.

        Args:
            counts: Integers ``[ranks, ...]``: row i is for rank i, such as the tokens for each of its experts.

        Returns:
            A tensor like ``counts``, whose row i is of rank i.

        Raises:
            ValueError: Another first dimension.
        """
        self._part("exchange_counts", counts)
        received = torch.empty_like(counts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, counts.contiguous(), group=self._group)
        return received

    @torch.compiler.disable
    def exchange_rows(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Rows go to the ranks that they are for, and come from all ranks: an all-to-all with uneven parts.

        A row crosses one tier, the outermost between the two ranks, in its codec of ``gather``, with scales of its own. Rows
        that stay on this rank are copied. The first call makes one process group for each tier.

        Args:
            tensor: float32, bfloat16 or float16 ``[rows, ...]``; those for rank 0 first, then for rank 1, and so on.
            sent: Rows for each rank. `exchange_counts` tells the other ranks.
            received: Rows from each rank.

        Returns:
            ``[sum(received), ...]``, rows from rank 0 first.

        Raises:
            ValueError: The counts do not fit, or the settings have checksums, transport ``mpi`` or a codec without a fixed size.
        """
        flat, grid, rank = self._flat("exchange_rows", tensor), self.plan.grid, self.plan.rank
        fits = len(sent) == len(received) == grid.world_size and min(*sent, *received) >= 0
        if not fits or sum(sent) != len(tensor) or sent[rank] != received[rank]:
            raise ValueError(
                f"exchange_rows: found sent {list(sent)}, received {list(received)}; expected {grid.world_size} counts each, "
                f"{len(tensor)} rows sent in all, and sent[{rank}] equal to received[{rank}]"
            )
        row, seed = math.prod(tensor.shape[1:]), self._seeds()[1]
        arrived, running = list(flat.view(len(tensor), row).split(list(sent))), []
        for lane, ranks, peers in self._row_lanes if row else ():
            of_lane = ([side[one] if one in peers else 0 for one in ranks] for side in (sent, received))
            name = f"{self.role or 'exchange_rows'} of rows of {row} elements"
            bucket = Bucket((0,), (row,), tensor.dtype, self.role or "exchange_rows", lane[0], "rows", name)
            given = torch.cat([arrived[one] for one in peers]).view(-1)
            message: Any = [given] if given.numel() else given.view(torch.uint8)
            # `Collectives.bind` would keep the program for later calls, whose counts differ.
            bound = Bound(self._collectives, rows_program(self.plan, lane[1], *of_lane), bucket)
            running.append((peers, bound.run(lambda message=message: message, seed=seed)))
        for peers, chain in running:
            sizes, brought = [received[one] for one in peers], chain.wait()
            parts = (brought[0] if any(sizes) else flat[:0]).view(-1, row).split(sizes)
            for one, part in zip(peers, parts):
                arrived[one] = part
        return torch.cat(arrived).view(-1, *tensor.shape[1:])

    @functools.cached_property
    def _row_lanes(self) -> list[tuple[Lane, list[int], list[int]]]:
        """Lanes of rows, innermost tier first, with the ranks inside the tier and those that rows cross it to. Collective."""
        grid, rank, config = self.plan.grid, self.plan.rank, self.config
        sizeless = [config.gather[tier].codec for tier in grid.crossed if not config.gather[tier].traits.fixed]
        if sizeless or config.checksum or config.transport == "mpi":
            found = f"codec {sizeless[0]!r}" if sizeless else "checksum True" if config.checksum else "transport 'mpi'"
            raise ValueError(f"exchange_rows: found {found}; expected fixed-size codecs, no checksums and 'torch'")
        ranks, lanes = [rank], list[tuple[Lane, list[int], list[int]]]()
        for tier in grid.crossed:
            peers = [one for one in range(grid.world_size) if one != rank and grid.tier_between(rank, one) == tier]
            ranks = sorted([*ranks, *peers])
            lane, members = (self._name, tier, "rows"), [self._ranks[one] for one in ranks]
            wires = wires_of("torch", lane, members, self._timeout, self._backend, self._collectives.lanes.streams)
            self._collectives.peers[lane] = Peers.of(lane, wires, members, self._timeout)
            lanes.append((lane, ranks, peers))
        return lanes

    # ---- common ----------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """On a GPU: compares all checksums until now, and waits for them.

        Raises:
            HopError: A message arrived changed.
        """
        self._collectives.verify()

    def _bucket(
        self, role: str, tensor: torch.Tensor, chunk: int, use: Use, key: int | None = None, direction: str = ""
    ) -> Bucket:
        if use not in self._channels:
            raise ValueError(f"{role}: found no {use!r} among the uses of this communicator: {list(self._channels)}")
        of = f"{self.role} in " if self.role else ""
        name = f"{role} of {of}{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        channel = self._channels[use]
        return Bucket((key or 0,), (chunk,), tensor.dtype, self.role or role, channel, direction, name)

    def _run(
        self,
        bucket: Bucket,
        program: Program,
        flat: torch.Tensor,
        then: Callable[[torch.Tensor], Any],
        *,
        read: Callable[[], Any] | None = None,
        async_op: bool = True,
        **how: Any,
    ) -> Any:
        """Starts a program that ends with ``then`` of its only tensor; returns its chain, or waits for it."""
        read = read or (lambda: [flat])
        if not program.steps or not flat.numel():  # nothing has to be sent
            program, read = _NOTHING, lambda: [self._collectives.used(flat).clone()]
        chain = self._collectives.bind(program, bucket).run(read, lambda tensors: then(tensors[0]), **how)
        return chain if async_op else chain.wait()

    def _shaped(self, dtype: torch.dtype, shape: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Makes the result of an operation of the elements that it leaves, which may be float32, and more than there are."""
        numel = math.prod(shape)
        return lambda flat: flat.to(dtype)[:numel].view(shape)

    def _seeds(self) -> tuple[int, int]:
        """Seeds of stochastic rounding: one that all ranks have, and one of this rank, so that errors do not add up."""
        self._calls += 1
        return seed_of(self._calls), seed_of(self._calls, self.plan.rank + 1)

    # ---- arguments -------------------------------------------------------------------------------------------

    def _flat(self, operation: str, tensor: Any) -> torch.Tensor:
        """The tensor as one contiguous row, without gradient."""
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in FLOAT_DTYPES or tensor.layout != torch.strided:
            found = type(tensor).__name__
            if isinstance(tensor, torch.Tensor):
                found = f"{tensor.dtype} in layout {tensor.layout}"
            raise TypeError(f"{operation}: tensor: found {found}, possible: dense float32, bfloat16, float16")
        if tensor.device.type != self._device:
            possible = f"possible with the backend of this group: {self._device}"
            raise ValueError(f"{operation}: tensor: found on {tensor.device}, {possible}")
        return tensor.detach().reshape(-1).contiguous()  # of an expanded tensor reshape makes a view

    def _part(self, operation: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """The shape of one rank's part. Raises ValueError where the first dimension is no multiple of the ranks."""
        ranks, (rows, *rest) = self.plan.grid.world_size, tensor.shape or (0,)
        if tensor.dim() == 0 or rows % ranks:
            raise ValueError(
                f"{operation}: tensor: found shape {list(tensor.shape)}, expected a first dimension that is a multiple of the "
                f"group's {ranks} ranks"
            )
        return (rows // ranks, *rest)

    def _check_sum(self, operation: str, op: str, key: int | None) -> None:
        """Raises ValueError for an unknown sum, or one without a key where tiers have error feedback."""
        if op not in ("sum", "mean"):
            raise one_of(f"{operation}: op", op, ("sum", "mean"))
        if key is None and self.config.error_feedback:
            raise ValueError(
                f"{operation}: key: found None, expected a number that names the tensor from call to call, since "
                f"error_feedback is on ({', '.join(self.config.error_feedback)})"
            )

    def _check_rank(self, argument: str, rank: int) -> None:
        """Raises ValueError for what is no rank of this group."""
        ranks = self.plan.grid.world_size
        if rank not in range(ranks):
            raise ValueError(f"{argument}: found {rank!r}, possible: 0..{ranks - 1}")


def _room(program: Program, bucket: Bucket, like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes the buffer of a message that another rank sends."""
    size = program.crossings[0].message_bytes(bucket.chunks, bucket.dtype.itemsize)
    return lambda: like.new_empty(size, dtype=torch.uint8)


# ---- parallel dimensions of a model ---------------------------------------------------------------------------------

#: Those that live, which the next engine asks; see `in_use`.
_MADE: weakref.WeakSet[Communicator] = weakref.WeakSet()


def for_dimension(
    dimension: Dimension,
    config: Any,
    group: dist.ProcessGroup | None = None,
    *,
    grid: Grid | None = None,
    uses: Collection[Use] = USES,
) -> Communicator:
    """A communicator for the activations of one parallel dimension, with the codecs of ``codecs.tensor`` and so on.

    Make it before the engine, and give it to `hzero.comm.activations`. An engine with the stage that is built after it counts
    its hops in its own wire log, under the dimension's name. Its ranks keep their places in the world's grid.

    Args:
        dimension: ``tensor``, ``sequence`` or ``expert``; an engine of a ``PipelineModule`` makes those of ``pipeline`` and
            ``optimizer`` itself.
        config: A DeepSpeed configuration, as for ``deepspeed.initialize``. One without block has no codecs.
        group: The ranks that share the dimension; None takes the world.
        grid: Of the world; None takes the block's topology. Where that is discovered, all ranks of the world call this at the
            same point.
        uses: As for a `Communicator`.

    A wait lasts as long as the world's timeout allows: groups that others make do not inherit it.

    Raises:
        ConfigError: The configuration cannot be read, its block is wrong, or the group fills the tiers unevenly.
    """
    if dimension not in DIMENSIONS:
        raise one_of("for_dimension: dimension", dimension, DIMENSIONS)
    parsed = config if isinstance(config, HZeroConfig) else None
    if parsed is None and config is not None:
        loaded = load(config)
        if loaded is None:
            raise ConfigError(f"for_dimension: config: found {config!r}, expected a DeepSpeed configuration or a path")
        block, _ = split(loaded)
        if block is not None:
            parsed = parse_config(block)
    codecs = parsed.codecs[dimension] if parsed is not None else UNCODED
    if grid is None:
        grid = resolve_grid(TopologyConfig() if parsed is None else parsed.topology, dist.get_world_size())
    if group is not None:
        grid = grid.of_ranks(dist.get_process_group_ranks(group))
    common = () if parsed is None else ("node_all_gather", "checksum", "transport")
    settings = CommunicatorConfig(codecs=codecs, gather=codecs, **{key: getattr(parsed, key) for key in common})
    made = Communicator(settings, group, timeout=world_timeout(), role=dimension, grid=grid, uses=uses)
    _MADE.add(made)
    return made


def in_use() -> list[Communicator]:
    """The communicators that `for_dimension` has made and somebody still holds."""
    return list(_MADE)
