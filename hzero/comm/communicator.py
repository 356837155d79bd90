"""Communicator: collectives of tensors over the tiers of a machine, with a codec for each tier. It needs no stage."""

from __future__ import annotations

import functools
import math
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
from hzero.codecs.formats import LOSSLESS, chunk_numel
from hzero.comm.lanes import Chain, shared_lanes
from hzero.comm.peers import Peers, peers_of, unused_name, wires_of
from hzero.comm.runtime import BoundProgram, Bucket, ErrorFeedback, Runtime, seed_of
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
from hzero.errors import ConfigError, one_of
from hzero.program import program as programs
from hzero.program.program import Program
from hzero.program.shards import ShardPlan
from hzero.schema import Frozen, validated
from hzero.topology import Grid, resolve_grid, sub_grid

#: Uses with separate wires: sums and copies on every tier, messages from rank to rank once for the whole group.
Use: TypeAlias = Literal["sums", "copies", "messages"]
USES: tuple[Use, ...] = ("sums", "copies", "messages")
#: Program of an operation that sends nothing.
_NOTHING = Program(())
#: Result of a reduction.
Reduced: TypeAlias = Literal["sum", "mean"]


class CommunicatorConfig(Frozen):
    """Settings of a `Communicator`.

    Attributes:
        codecs: Codec of each tier, by name or as a block with `codec` and its settings (as in a stage's `codecs`). Tiers that
            are not named use `none`. A name instead of the block sets the codec of all tiers. With `mpc`, sums have the same
            bits as with `none`.
        gather: The same for copies: all-gathers, broadcasts, all-to-alls, sends, and the second half of an all-reduce, which
            distributes the sums. The default is `codecs`.
        block_size: Elements that share a scale; a codec may set another value.
        error_feedback: Tiers whose encoding stores its loss (bfloat16) and adds it next time, in reductions that have a key.
            With the outermost tier of the machine, this includes the second half of an all-reduce.
        node_all_gather: Algorithm of the all-gathers between nodes.
        checksum: Whether every message ends with a 16-byte checksum, which is compared on arrival; on GPUs in
            `Communicator.verify`.
        transport: Transport of the messages: `torch`, the backend of the process group, or `mpi`.
        topology: Places of the ranks. `discover`, the default, reads them from the machine. Or the name of a preset or file, or
            a block that declares them.
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
        block: As the user wrote it. None: every codec is ``none`` and the topology is discovered.
        where: Prefix of messages.

    Raises:
        ConfigError: An unknown key, codec or tier (with the nearest known one), or a wrong type.
    """
    block = {} if block is None else block
    if not isinstance(block, Mapping):
        return validated(CommunicatorConfig, block, where)  # refuses it
    size = block.get("block_size", DEFAULT_BLOCK_SIZE)
    written = {"codecs": block.get("codecs", "none"), "gather": block.get("gather", block.get("codecs", "none"))}
    plain = dict.fromkeys(BASE_TIERS, "none")
    codecs = {key: codecs_by_tier(tiers, plain, size, groups_as_nodes=True) for key, tiers in written.items()}
    parsed = validated(CommunicatorConfig, {**block, **codecs}, where)
    for key, tiers in (("codecs", parsed.codecs), ("gather", parsed.gather)):
        for tier in tiers.written:
            if tiers[tier].traits.changes:
                found = f"found {tiers[tier].codec!r}, which sends changes of weights"
                raise ConfigError(f"{where}.{key}.{tier}: {found}; expected {', '.join(LOSSLESS)} or another codec")
    for tier in parsed.error_feedback:
        if parsed.codecs[tier].traits.exact and parsed.gather[tier].traits.exact:
            raise ConfigError(
                f"{where}.error_feedback: found {tier!r}, whose codec {parsed.codecs[tier].codec!r} loses nothing; "
                "expected a tier with a lossy codec"
            )
    return parsed


class Communicator:
    """Collectives over a process group of torch.distributed, one hop per tier of the machine, each with the tier's codec.

    Most machines have three tiers: ``intra_package`` (devices of a package), ``intra_node`` (packages of a node) and
    ``inter_node``. An operation crosses them one after the other: gathers and broadcasts from the outermost inwards, sums and
    all-to-alls from the innermost outwards. It sends payloads in the codec of each tier. If two tiers have the same codec, a
    payload that is only copied passes unchanged. All ranks decode the same bytes, including the owner of a tensor, so they get
    the same bits.

    Sums are computed in float32, tier by tier, in the order of the ranks of a tier group; a narrow dtype is never summed. With
    codec ``none`` or ``mpc``, a sum is rounded to the tensor's dtype once per tier. The result depends neither on the library
    nor on the order of arrival. It differs from another order of additions only by rounding.

    Every operation returns its result and changes no argument. With ``async_op=True`` it immediately returns a `Chain`, whose
    ``wait()`` returns the result. On CPU, the arguments have then been read. On a GPU, ``wait_read()`` makes the current stream
    wait until they have been read. All ranks call the same operations in the same order, with tensors of the same shape and
    dtype. Only `send` and `recv` are called by two ranks alone. After the group's timeout, a wait raises an error that names the
    missing ranks. Later operations of this group then fail too.

    Args:
        config: The settings, as a block (`CommunicatorConfig`). None: every codec is ``none``, and the topology is discovered.
        group: The process group; None is the world. For a smaller group with a discovered topology, all ranks of the world must
            make a communicator at the same point.
        timeout: Maximum wait for one hop; None uses the group's timeout.
        role: Role in the wire log and in lane names. None: the wire log lists each operation by its name.
        grid: Places of the group's ranks, in the group's numbering; None uses the topology of ``config``.
        uses: Uses that need process groups: ``sums`` (`reduce_scatter`, `all_to_all`), ``copies`` (`all_gather`, `broadcast`)
            and ``messages`` (`send`, `recv`). `all_reduce` needs ``sums`` and ``copies``.

    Attributes:
        config: The settings.
        plan: Tiers and hops, in the group's rank numbers. Its weights are the copies, its gradients the sums.
        role: As given.
        accelerator: Makes streams and events on a GPU; None on CPU.
        adopted: Whether an engine counts the hops in its wire log.

    Raises:
        ConfigError: A key is wrong, or the ranks do not fill the tiers evenly.
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
            raise ConfigError(f"communicator: timeout: found {timeout!r}; expected a positive datetime.timedelta")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ConfigError(f"communicator: group: found {group!r}; expected a process group of torch.distributed")
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
        self.role, self.adopted, self.accelerator = role, False, lanes.device
        timeout, self._group = timeout or group_timeout(group), group
        self._ranks, self._timeout = ranks, timeout
        name = role or "collectives"
        if not whole:
            name += f" {zlib.crc32(repr(ranks).encode()):08x}"
        self._name = name = unused_name(name, lanes.failures, group, ranks, {"communicator": settings.model_dump()})
        if wrong := [use for use in uses if use not in USES]:
            raise one_of("communicator: uses", wrong[0], USES)
        # In the order of USES, whatever the order of `uses`: all ranks make the groups in one order.
        self._channels: dict[Use, str] = {use: f"{name} {use}" for use in USES if use in uses}
        self._backend = None if whole else backend
        channels = [channel for use, channel in self._channels.items() if use != "messages"]
        peers = peers_of(self.plan, timeout, channels=channels, ranks=ranks, backend=self._backend, lanes=lanes)
        self._runtime = Runtime(self.plan, peers, WireLog(), lanes, library_sums=False)
        if "messages" in uses and len(ranks) > 1:
            channel = self._channels["messages"]
            self._wires = wires_of(settings.transport, (channel, "inter_node"), ranks, timeout, self._backend)
        copying, reducing = self.plan.gather_hops(), self.plan.reduce_hops()
        self._summing = programs.reduce_program(self.plan, reducing, len(ranks), shard_order=True)
        self._copying = self._again = programs.gather_program(self.plan, copying) if copying else _NOTHING
        if copying and copying[0].tier in settings.error_feedback and not copying[0].codec.traits.exact:
            # The second half of an all-reduce encodes again: this rank's part of the sums.
            self._again = programs.gather_program(self.plan, copying, residual=f"{copying[0].tier} again")
        plan = self.plan  # the cached programs do not keep this group alive
        self._program = functools.cache(lambda make, *peers: make(plan, *peers) if copying else _NOTHING)
        self._calls = self._sent = 0

    @property
    def wire_log(self) -> WireLog:
        """Bytes, codec and time of every completed hop, by tier and by operation or `role`. You may set another wire log."""
        return self._runtime.wire_log

    @wire_log.setter
    def wire_log(self, wire_log: WireLog) -> None:
        self._runtime.wire_log, self.adopted = wire_log, True

    # ---- sums ------------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def all_reduce(
        self, tensor: torch.Tensor, op: Reduced = "sum", *, key: int | None = None, async_op: bool = False
    ) -> Any:
        """Returns the sum or mean of all ranks' tensors: a reduce-scatter over the tiers, then an all-gather back.

        With codec ``none``, the result differs from another order of additions only by rounding. With other codecs, the error is
        at most the sum of their `Codec.error_bound` over the hops, for the sum of all ranks' magnitudes.

        Args:
            tensor: float32, bfloat16 or float16, of any shape.
            op: ``sum`` or ``mean``.
            key: Identifies the tensor across calls, for error feedback. Required if error feedback is on; otherwise ignored.
            async_op: Whether to return a `Chain`.

        Returns:
            A tensor like ``tensor``; with ``async_op``, a `Chain` of it.
        """
        flat, then = self._flat("all_reduce", tensor), self._shaped(tensor.dtype, tensor.shape)
        self._check_sum("all_reduce", op, key)
        chunk = chunk_numel(flat.numel(), self.plan.grid.world_size)
        sums, copies = (self._bucket("all_reduce", tensor, chunk, use, key) for use in USES[:2])
        if not self._copying.steps or not flat.numel():
            return self._run(copies, self._again, flat, then, async_op=async_op)
        same, mine = self._seeds()
        reduced = self._reduce(sums, flat, op, mine, lambda shard: [shard])
        how: dict[str, Any] = {"seed": same, "first_seed": mine, "after": [reduced], "read": Chain.take}
        return self._run(copies, self._again, flat, then, **how, async_op=async_op)

    @torch.compiler.disable
    def reduce_scatter(
        self, tensor: torch.Tensor, op: Reduced = "sum", *, key: int | None = None, async_op: bool = False
    ) -> Any:
        """Returns this rank's part of the sum or mean of all ranks' tensors.

        Args:
            tensor: float32, bfloat16 or float16, whose first dimension is a multiple of the group's size.
            op: As in `all_reduce`.
            key: As in `all_reduce`.
            async_op: As in `all_reduce`.

        Returns:
            Part r of the first dimension on rank r; with ``async_op``, a `Chain` of it.
        """
        flat = self._flat("reduce_scatter", tensor)
        self._check_sum("reduce_scatter", op, key)
        shape = self._part("reduce_scatter", tensor)
        bucket = self._bucket("reduce_scatter", tensor, math.prod(shape), "sums", key)
        return self._reduce(bucket, flat, op, self._seeds()[1], self._shaped(tensor.dtype, shape), async_op=async_op)

    def _reduce(
        self, bucket: Bucket, flat: torch.Tensor, op: str, seed: int, then: Callable[[torch.Tensor], Any], **how: Any
    ) -> Any:
        """Runs a reduction; ``then`` receives this rank's shard, float32."""
        world, averaged = self.plan.grid.world_size, then
        if op == "mean" and flat.dtype == torch.float16:  # or the sums may overflow on the wire
            flat = flat / world
        elif op == "mean":
            averaged = lambda shard: then(shard.div_(world))  # noqa: E731
        return self._run(bucket, self._summing, flat, averaged, seed=seed, **how)

    @property
    def feedback(self) -> ErrorFeedback:
        """The residuals of error feedback. Call `ErrorFeedback.clear` after their tensors have been replaced."""
        return self._runtime.feedback

    # ---- copies ----------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def all_gather(self, tensor: torch.Tensor, *, async_op: bool = False) -> Any:
        """Returns all ranks' tensors, concatenated in the order of ranks. Exact with codec ``none``.

        Args:
            tensor: float32, bfloat16 or float16, of any shape.
            async_op: As in `all_reduce`.

        Returns:
            A tensor whose first dimension is longer by a factor of the group's size; with ``async_op``, a `Chain` of it.
        """
        flat, (rows, *rest) = self._flat("all_gather", tensor), tensor.shape or (1,)
        bucket = self._bucket("all_gather", tensor, flat.numel(), "copies")
        then = self._shaped(tensor.dtype, (rows * self.plan.grid.world_size, *rest))
        same, mine = self._seeds()
        return self._run(bucket, self._copying, flat, then, seed=same, first_seed=mine, async_op=async_op)

    @torch.compiler.disable
    def all_to_all(self, tensor: torch.Tensor, *, async_op: bool = False) -> Any:
        """Sends part i of every rank's tensor to rank i. Exact with codec ``none``.

        Args:
            tensor: float32, bfloat16 or float16, whose first dimension is a multiple of the group's size. Part i of it is for
                rank i.
            async_op: As in `all_reduce`.

        Returns:
            A tensor like ``tensor``, whose part i comes from rank i; with ``async_op``, a `Chain` of it.
        """
        flat, part = self._flat("all_to_all", tensor), self._part("all_to_all", tensor)
        bucket = self._bucket("all_to_all", tensor, math.prod(part), "sums")
        program, then = self._program(programs.all_to_all_program), self._shaped(tensor.dtype, tensor.shape)
        return self._run(bucket, program, flat, then, seed=self._seeds()[1], async_op=async_op)

    @torch.compiler.disable
    def broadcast(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Any:
        """Returns the tensor of one rank. Exact with codec ``none``.

        Args:
            tensor: float32, bfloat16 or float16, of any shape. On ranks other than ``src``, only shape and dtype are used.
            src: Rank of the group.
            async_op: As in `all_reduce`.

        Returns:
            The decoded tensor, on ``src`` too; with ``async_op``, a `Chain` of it.
        """
        flat = self._flat("broadcast", tensor)
        self._check_rank("broadcast: src", src)
        bucket = self._bucket("broadcast", tensor, flat.numel(), "copies")
        program = self._program(programs.broadcast_program, int(src))
        read = None if src == self.plan.rank else _room(program, bucket, flat)
        then = self._shaped(tensor.dtype, tensor.shape)
        return self._run(bucket, program, flat, then, read=read, seed=self._seeds()[0], async_op=async_op)

    # ---- point to point --------------------------------------------------------------------------------------

    @torch.compiler.disable
    def send(self, tensor: torch.Tensor, dst: int, *, async_op: bool = False) -> Any:
        """Sends a tensor to one rank, with the codec of the outermost tier between the two.

        Messages from one rank to another arrive in order. Communicators with other roles are independent. On NCCL and RCCL, two
        ranks must not order their sends and receives so that each waits for the other, as with ``torch.distributed.isend``.

        Args:
            tensor: float32, bfloat16 or float16, of any shape.
            dst: Another rank of the group.
            async_op: As in `all_reduce`.

        Returns:
            None; with ``async_op``, a `Chain` of None.
        """
        flat = self._flat("send", tensor)
        program, bucket = self._message("send", tensor, "dst", dst)
        self._sent += 1  # apart from `_calls`, which must be equal on all ranks
        seed = seed_of(self._sent, self.plan.rank + 1)
        return self._run(bucket, program, flat, lambda _: None, seed=seed, async_op=async_op)

    @torch.compiler.disable
    def recv(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Any:
        """Receives a tensor that another rank sends with `send`.

        Args:
            tensor: A tensor of the sent shape and dtype; its values are neither read nor changed.
            src: Another rank of the group.
            async_op: As in `all_reduce`.

        Returns:
            The tensor; with ``async_op``, a `Chain` of it.
        """
        flat = self._flat("recv", tensor)
        program, bucket = self._message("recv", tensor, "src", src)
        then = self._shaped(tensor.dtype, tensor.shape)
        return self._run(bucket, program, flat, then, read=_room(program, bucket, flat), async_op=async_op)

    def _message(self, operation: str, tensor: torch.Tensor, argument: str, peer: int) -> tuple[Program, Bucket]:
        """Returns a message's program and bucket. Each direction has a lane: in a ring, all ranks send before they receive."""
        self._check_rank(f"{operation}: {argument}", peer)
        ways = {"dst": (self.plan.rank, int(peer)), "src": (int(peer), self.plan.rank)}
        source, target = ways[argument]
        if source == target:
            raise ValueError(f"{operation}: {argument}: found {peer}, this rank itself; expected another rank")
        bucket = self._bucket(operation, tensor, tensor.numel(), "messages", direction=f"{source} to {target}")
        lane = self._runtime.lane(bucket, self.plan.grid.tier_between(source, target))
        if lane not in self._runtime.peers:
            pair = [self._ranks[source], self._ranks[target]]
            self._runtime.peers[lane] = Peers.of(lane, self._wires, pair, self._timeout)
        return self._program(programs.message_program, source, target), bucket

    # ---- rows of experts -------------------------------------------------------------------------------------

    @torch.compiler.disable
    def exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Exchanges how many rows each rank is about to send to each other rank of the group.

        Args:
            counts: Integers ``[ranks, ...]``: row i is for rank i, such as the number of tokens for each of its experts.

        Returns:
            A tensor like ``counts``, whose row i comes from rank i.

        Raises:
            ValueError: The first dimension is no multiple of the group's size.
        """
        self._part("exchange_counts", counts)
        received = torch.empty_like(counts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, counts.contiguous(), group=self._group)
        return received

    @torch.compiler.disable
    def exchange_rows(self, tensor: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Sends rows to their ranks, and receives rows from all ranks: an all-to-all with uneven parts.

        A row crosses only the outermost tier between the two ranks, with that tier's codec in ``gather`` and with separate
        scales. Rows that stay on this rank are copied. The first call makes one process group per tier.

        Args:
            tensor: float32, bfloat16 or float16 ``[rows, ...]``; rows for rank 0 first, then for rank 1, and so on.
            sent: Number of rows for each rank. Other ranks get it from `exchange_counts`.
            received: Number of rows from each rank.

        Returns:
            ``[sum(received), ...]``, rows from rank 0 first.

        Raises:
            ValueError: The counts do not fit, or the settings have checksums or a codec without a fixed size.
        """
        flat, grid, rank = self._flat("exchange_rows", tensor), self.plan.grid, self.plan.rank
        fits = len(sent) == len(received) == grid.world_size and min(*sent, *received) >= 0
        if not fits or sum(sent) != len(tensor) or sent[rank] != received[rank]:
            raise ValueError(
                f"exchange_rows: found sent {list(sent)}, received {list(received)}; expected {grid.world_size} counts each, "
                f"{len(tensor)} rows sent in all, and sent[{rank}] equal to received[{rank}]"
            )
        row, seed = math.prod(tensor.shape[1:]), self._seeds()[1]
        if not row:
            return tensor.new_empty(sum(received), *tensor.shape[1:])
        arrived, running = list(flat.view(len(tensor), row).split(list(sent))), []
        for lane, ranks, peers in self._row_lanes:
            of_lane = ([side[one] if one in peers else 0 for one in ranks] for side in (sent, received))
            name = f"{self.role or 'exchange_rows'} of rows of {row} elements"
            bucket = Bucket((0,), (row,), tensor.dtype, self.role or "exchange_rows", lane[0], "rows", name)
            given = torch.cat([arrived[one] for one in peers]).view(-1)
            message: Any = [given] if given.numel() else given.view(torch.uint8)
            # `Runtime.bind` would keep the program for later calls, whose counts differ.
            bound = BoundProgram(self._runtime, programs.rows_program(self.plan, lane[1], *of_lane), bucket)
            running.append((peers, bound.run([message].pop, seed=seed)))  # `pop` returns the message once
        for peers, chain in running:
            sizes, brought = [received[one] for one in peers], chain.wait()
            parts = (brought[0] if any(sizes) else flat[:0]).view(-1, row).split(sizes)
            for one, part in zip(peers, parts):
                arrived[one] = part
        return torch.cat(arrived).view(-1, *tensor.shape[1:])

    @functools.cached_property
    def _row_lanes(self) -> list[tuple[Lane, list[int], list[int]]]:
        """Lanes for rows, innermost tier first: lane, ranks of its group, and peers that rows reach on it. Collective."""
        grid, rank, config = self.plan.grid, self.plan.rank, self.config
        sizeless = [config.gather[tier].codec for tier in grid.crossed if not config.gather[tier].traits.fixed]
        if sizeless or config.checksum:
            found = f"codec {sizeless[0]!r}" if sizeless else "checksum True"
            raise ValueError(f"exchange_rows: found {found}; expected fixed-size codecs and no checksums")
        ranks, lanes = [rank], list[tuple[Lane, list[int], list[int]]]()
        for tier in grid.crossed:
            peers = [one for one in range(grid.world_size) if one != rank and grid.tier_between(rank, one) == tier]
            ranks = sorted([*ranks, *peers])
            lane, members = (self._name, tier, "rows"), [self._ranks[one] for one in ranks]
            wires = wires_of(config.transport, lane, members, self._timeout, self._backend, self._runtime.lanes)
            self._runtime.peers[lane] = Peers.of(lane, wires, members, self._timeout)
            lanes.append((lane, ranks, peers))
        return lanes

    # ---- common ----------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """On a GPU: waits for all messages so far, and compares their checksums.

        Raises:
            HopError: A message arrived corrupted.
        """
        self._runtime.lanes.verify()

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
        read: Callable[..., Any] | None = None,
        async_op: bool = True,
        **how: Any,
    ) -> Any:
        """Starts a program whose single tensor ``then`` converts. Returns its chain, or waits for it."""
        read = read or (lambda: [flat])
        if not program.steps or not flat.numel():  # nothing to send
            program, read = _NOTHING, lambda: [self._runtime.lanes.used(flat).clone()]
        chain = self._runtime.bind(program, bucket).run(read, lambda tensors: then(tensors[0]), **how)
        return chain if async_op else chain.wait()

    def _shaped(self, dtype: torch.dtype, shape: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns a function that converts the output elements, which may be float32 and padded, to the result."""
        numel = math.prod(shape)
        return lambda flat: flat.to(dtype)[:numel].view(shape)

    def _seeds(self) -> tuple[int, int]:
        """Seeds of stochastic rounding: one common to all ranks, and one for this rank, so that errors do not add up."""
        self._calls += 1
        return seed_of(self._calls), seed_of(self._calls, self.plan.rank + 1)

    # ---- arguments -------------------------------------------------------------------------------------------

    def _flat(self, operation: str, tensor: Any) -> torch.Tensor:
        """Returns the tensor as one contiguous row, without gradient."""
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in FLOAT_DTYPES or tensor.layout != torch.strided:
            found = type(tensor).__name__
            if isinstance(tensor, torch.Tensor):
                found = f"{tensor.dtype} in layout {tensor.layout}"
            raise TypeError(f"{operation}: tensor: found {found}; expected dense float32, bfloat16 or float16")
        if tensor.device.type != self._device:
            raise ValueError(f"{operation}: tensor: found on {tensor.device}; expected {self._device}, for this group")
        return tensor.detach().reshape(-1).contiguous()  # reshape of an expanded tensor is a view

    def _part(self, operation: str, tensor: torch.Tensor) -> tuple[int, ...]:
        """Returns the shape of one rank's part. Raises ValueError if the first dimension is no multiple of the ranks."""
        ranks, (rows, *rest) = self.plan.grid.world_size, tensor.shape or (0,)
        if tensor.dim() == 0 or rows % ranks:
            raise ValueError(
                f"{operation}: tensor: found shape {list(tensor.shape)}; expected a first dimension that is a multiple of the "
                f"group's {ranks} ranks"
            )
        return (rows // ranks, *rest)

    def _check_sum(self, operation: str, op: str, key: int | None) -> None:
        """Raises ValueError for an unknown sum, or for a sum without a key if tiers have error feedback."""
        if op not in ("sum", "mean"):
            raise one_of(f"{operation}: op", op, ("sum", "mean"))
        if key is None and self.config.error_feedback:
            raise ValueError(
                f"{operation}: key: found None; expected a number that names the tensor from call to call, since "
                f"error_feedback is on ({', '.join(self.config.error_feedback)})"
            )

    def _check_rank(self, argument: str, rank: int) -> None:
        """Raises ValueError if ``rank`` is no rank of this group."""
        ranks = self.plan.grid.world_size
        if rank not in range(ranks):
            raise ValueError(f"{argument}: found {rank!r}; expected 0..{ranks - 1}")


def _room(program: Program, bucket: Bucket, like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Returns a function that allocates the buffer for a message from another rank."""
    size = program.crossings[0].message_bytes(bucket.chunks, bucket.dtype.itemsize)
    return lambda: like.new_empty(size, dtype=torch.uint8)


# ---- parallel dimensions of a model ---------------------------------------------------------------------------------

#: Communicators in use, for the next engine; see `in_use`.
_MADE: weakref.WeakSet[Communicator] = weakref.WeakSet()


def for_dimension(
    dimension: Dimension,
    config: Any,
    group: dist.ProcessGroup | None = None,
    *,
    grid: Grid | None = None,
    uses: Collection[Use] = USES,
) -> Communicator:
    """Returns a communicator for activations of one parallel dimension, with the codecs of ``codecs.tensor`` and so on.

    Make it before the engine, and pass it to `hzero.comm.activations`. An engine with the stage that is built later counts its
    hops in its wire log, under the dimension's name. Its ranks keep their places in the world's grid. A wait uses the world's
    timeout, since new groups do not inherit it.

    Args:
        dimension: ``tensor``, ``sequence`` or ``expert``. An engine of a ``PipelineModule`` makes the communicators of
            ``pipeline`` and ``optimizer`` itself.
        config: A DeepSpeed configuration, as for ``deepspeed.initialize``. Without a block there are no codecs.
        group: The ranks that share the dimension; None is the world.
        grid: Grid of the world; None uses the block's topology. If that is discovered, all ranks of the world must call this at
            the same point.
        uses: As in `Communicator`.

    Raises:
        ConfigError: The configuration cannot be read, its block is wrong, or the group fills the tiers unevenly.
    """
    if dimension not in DIMENSIONS:
        raise one_of("for_dimension: dimension", dimension, DIMENSIONS)
    parsed = config if isinstance(config, HZeroConfig) else None
    if parsed is None and config is not None:
        loaded = load(config)
        if loaded is None:
            raise ConfigError(f"for_dimension: config: found {config!r}; expected a DeepSpeed configuration or a path")
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
    """Returns the communicators from `for_dimension` that are still in use."""
    return list(_MADE)
