"""Communicator: collectives of tensors over the tiers of a machine, with a codec for each tier. Needs no stage."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from numbers import Integral
from typing import Any, Literal

import torch
import torch.distributed as dist

from hzero.codecs.codec import FLOATS
from hzero.codecs.formats import chunk_numel
from hzero.comm.bucket import Bucket
from hzero.comm.feedback import ErrorFeedback
from hzero.comm.lanes import Chain, shared_lanes
from hzero.comm.mpi_wires import world_ranks
from hzero.comm.process_groups import group_timeout
from hzero.comm.runtime import Collectives, Lost
from hzero.comm.settings import USES, CommunicatorConfig, Use, check_uses, parse_communicator
from hzero.comm.transport import Transport, Wires, most_failures, wires_of
from hzero.comm.wirelog import WireLog
from hzero.comm.wires import Lane
from hzero.config import CodecsConfig
from hzero.plan.program import (
    Program,
    all_to_all_program,
    broadcast_program,
    gather_program,
    message_program,
    reduce_program,
)
from hzero.plan.shards import ShardPlan
from hzero.topology import Grid, resolve_grid, sub_grid
from hzero.validation import ConfigError, one_of


class Communicator:
    """Collectives over a process group of torch.distributed, one hop per tier of the machine, each with the tier's codec.

    A machine has three tiers: ``gcd`` (devices of a package), ``gpu`` (packages of a node) and ``node``. An operation crosses
    them one after the other: gathers and broadcasts from the outermost inwards, sums and all-to-alls from the innermost
    outwards. On each it sends payloads in the codec of that tier; where two tiers have one codec a payload that is only
    copied passes unchanged. All ranks decode the same bytes, the owner of a tensor too, so they end with the same bits.

    Sums are made in float32, in the order of the ranks of a tier group, tier by tier; a narrow type is never summed. With
    codec ``none``, ``exp`` or ``mpc`` a sum is rounded to the tensor's type once per tier. So the result does not depend on the
    library, nor on when messages arrive, and differs from another order of additions by rounding alone.

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
        comm: A communicator of mpi4py instead of a process group; its hops take the transport ``mpi``. Its ranks are those of
            the operations. No message is sent on it. torch.distributed has to be initialised with the same numbers of ranks as
            MPI's world, and its timeout holds.
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
        comm: Any = None,
        uses: Collection[Use] = USES,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError("communicator: torch.distributed is not initialised; call init_process_group first")
        self.config = settings = config if isinstance(config, CommunicatorConfig) else parse_communicator(config)
        if timeout is not None and (not isinstance(timeout, timedelta) or timeout <= timedelta(0)):
            raise ConfigError(f"communicator: timeout: found {timeout!r}, expected a positive datetime.timedelta")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ConfigError(f"communicator: group: found {group!r}, expected a process group of torch.distributed")
        if role is not None and not isinstance(role, str):
            raise ConfigError(f"communicator: role: found {role!r}, expected a name")
        if comm is not None and group is not None:
            raise ConfigError("communicator: found a group and comm, expected one of them")
        if comm is not None and "transport" in settings.model_fields_set and settings.transport != "mpi":
            raise ConfigError(f"communicator: found comm with transport {settings.transport!r}, expected 'mpi' or none")
        if comm is not None:
            self.config = settings = settings.model_copy(update={"transport": "mpi"})
        group = group or dist.group.WORLD
        assert group is not None
        if comm is None:
            rank, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        else:
            ranks, rank = world_ranks(comm), comm.Get_rank()
        if rank < 0:
            raise ConfigError(f"communicator: rank {dist.get_rank()} is not in the group of ranks {ranks}")
        whole, where = ranks == list(range(dist.get_world_size())), "communicator.topology"
        if grid is None and whole:
            grid = resolve_grid(settings.topology, len(ranks), where)
        elif grid is None:
            grid = sub_grid(settings.topology, ranks, dist.get_world_size(), where)
        self.plan = ShardPlan(
            grid,
            rank,
            "world",
            "world",
            CodecsConfig(weights=settings.gather, gradients=settings.codecs),
            settings.error_feedback,
            node_all_gather=settings.node_all_gather,
            checksum=settings.checksum,
            transport=settings.transport,
        )
        backend = dist.get_backend_config(group)
        self._device = "cuda" if "nccl" in backend else "cpu"
        lanes = shared_lanes(torch.cuda if self._device == "cuda" else None, settings.transport)
        self.role, self.adopted, self.streams = role, False, lanes.streams
        timeout = timeout or group_timeout(group)
        failures = most_failures(lanes.failures, settings.transport, group, ranks, timeout)
        parts = "" if whole else f" {zlib.crc32(repr(ranks).encode()):08x}", f" #{failures}" if failures else ""
        name = (role or "collectives") + "".join(parts)
        uses = check_uses(uses)
        self._sums, self._copies = f"{name} sums", f"{name} copies"
        self._channels = [f"{name} {use}" for use in uses if use != "messages"]
        transport = Transport(
            self.plan,
            timeout,
            channels=self._channels,
            ranks=None if whole else ranks,
            backend=None if whole else backend,
            streams=lanes.streams,
            sums=False,
        )
        feedback = ErrorFeedback() if settings.error_feedback else None
        self._transport, self._name = transport, name
        self._collectives = Collectives(self.plan, transport, WireLog(), feedback, lanes, strict=True)
        self._messages: Wires | None = None
        if "messages" in uses and len(ranks) > 1:
            lane: Lane = f"{name} messages", "node"
            self._messages = wires_of(settings.transport, lane, ranks, timeout, None if whole else backend)
        copying, reducing = self.plan.gather_hops(), self.plan.reduce_hops()
        self._bfloat16 = any(hop.codec.traits.narrow for hop in (*copying, *reducing))
        self._summing = reduce_program(self.plan, reducing, len(ranks), shard_order=True)
        self._copying = self._again = gather_program(self.plan, copying) if copying else Program(())
        if copying and copying[0].tier in settings.error_feedback:
            # The second half of an all-reduce encodes once more, what this rank owns of the sums.
            self._again = gather_program(self.plan, copying, residual=f"{copying[0].tier} again")
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
        self,
        tensor: torch.Tensor,
        op: Literal["sum", "mean"] = "sum",
        *,
        key: int | None = None,
        async_op: bool = False,
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
        flat = self._flat("all_reduce", tensor)
        _check_sum("all_reduce", op, key, self.config.error_feedback)
        chunk = chunk_numel(flat.numel(), self.plan.grid.world_size)
        shape = tensor.shape
        result = lambda whole: whole[: math.prod(shape)].view(shape)  # noqa: E731
        return self._end(self._all_reduce("all_reduce", tensor, flat, chunk, op, key, result), async_op)

    def _all_reduce(
        self,
        role: str,
        tensor: torch.Tensor,
        flat: torch.Tensor,
        chunk: int,
        op: str,
        key: int | None,
        then: Callable[[torch.Tensor], torch.Tensor],
    ) -> Chain[torch.Tensor]:
        if not self._copying.steps or not flat.numel():
            return self._local(flat, then)
        same, own = self._seeds()
        held: list[torch.Tensor] = []
        lost: list[Lost] = []
        reduced = self._reduce(role, tensor, flat, chunk, op, key, own, held.append, lost)
        bucket = self._bucket(role, tensor, chunk, self._copies, key)
        read = lambda: [held.pop()]  # noqa: E731

        def whole(tensors: list[torch.Tensor]) -> torch.Tensor:
            self._collectives.note(lost)
            return then(tensors[0])

        return self._collectives.run(self._again, bucket, read, whole, seed=same, own_seed=own, after=[reduced])

    @torch.compiler.disable
    def average_into(self, tensor: torch.Tensor, key: int) -> Chain[torch.Tensor]:
        """`all_reduce` of a mean whose result goes back into ``tensor``, which is contiguous; for hooks of other engines."""
        flat = self._flat("ddp_hook", tensor)
        chunk = chunk_numel(flat.numel(), self.plan.grid.world_size)

        def into(whole: torch.Tensor) -> torch.Tensor:
            self._collectives.used(flat).copy_(whole[: flat.numel()])
            return tensor

        return self._all_reduce("all_reduce", tensor, flat, chunk, "mean", key, into)

    @torch.compiler.disable
    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: Literal["sum", "mean"] = "sum",
        *,
        key: int | None = None,
        async_op: bool = False,
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
        _check_sum("reduce_scatter", op, key, self.config.error_feedback)
        shape = _part("reduce_scatter", tensor, self.plan.grid.world_size)
        chunk = math.prod(shape)
        if not self.plan.reduce_hops() or not chunk:
            return self._end(self._local(flat, lambda got: got.view(shape)), async_op)
        _, own = self._seeds()
        then = lambda shard: shard.to(tensor.dtype).view(shape)  # noqa: E731
        return self._end(self._reduce("reduce_scatter", tensor, flat, chunk, op, key, own, then), async_op)

    def _reduce(
        self,
        role: str,
        tensor: torch.Tensor,
        flat: torch.Tensor,
        chunk: int,
        op: str,
        key: int | None,
        seed: int,
        then: Callable[[torch.Tensor], Any],
        lost: list[Lost] | None = None,
    ) -> Chain[Any]:
        """A chain that ends with ``then`` of this rank's shard, float32."""
        world = self.plan.grid.world_size
        first = op == "mean" and tensor.dtype == torch.float16  # whose sums may overflow where they travel
        if first:
            flat = flat / world

        def averaged(shards: list[torch.Tensor]) -> Any:
            return then(shards[0].div_(world) if op == "mean" and not first else shards[0])

        bucket = self._bucket(role, tensor, chunk, self._sums, key)
        return self._collectives.run(self._summing, bucket, lambda: [flat], averaged, seed=seed, lost=lost)

    @property
    def feedbacks(self) -> list[ErrorFeedback]:
        """What keeps residuals, for who knows of steps: `ErrorFeedback.commit`, `discard`."""
        return [self._collectives.feedback] if self._collectives.feedback is not None else []

    def forget(self) -> None:
        """Drops all residuals of error feedback: what they belong to has changed."""
        for feedback in self.feedbacks:
            feedback.clear()

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
        flat, hops = self._flat("all_gather", tensor), self.plan.gather_hops()
        rows, *rest = tensor.shape or (1,)
        shape = (rows * self.plan.grid.world_size, *rest)
        if not hops or not flat.numel():
            return self._end(self._local(flat, lambda got: got.view(shape)), async_op)
        bucket = self._bucket("all_gather", tensor, flat.numel(), self._copies)
        same, own = self._seeds()
        then = lambda tensors: tensors[0].view(shape)  # noqa: E731
        chain = self._collectives.run(self._copying, bucket, lambda: [flat], then, seed=same, own_seed=own)
        return self._end(chain, async_op)

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
        flat, shape = self._flat("all_to_all", tensor), tensor.shape
        chunk = math.prod(_part("all_to_all", tensor, self.plan.grid.world_size))
        if not self.plan.gather_hops() or not chunk:
            return self._end(self._local(flat, lambda got: got.view(shape)), async_op)
        bucket = self._bucket("all_to_all", tensor, chunk, self._sums)
        _, own = self._seeds()
        program, then = all_to_all_program(self.plan), lambda tensors: tensors[0].view(shape)
        return self._end(self._collectives.run(program, bucket, lambda: [flat], then, seed=own), async_op)

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
        flat, shape = self._flat("broadcast", tensor), tensor.shape
        _check_rank("broadcast: src", src, self.plan.grid.world_size)
        if not self.plan.gather_hops() or not flat.numel():
            return self._end(self._local(flat, lambda got: got.view(shape)), async_op)
        bucket = self._bucket("broadcast", tensor, flat.numel(), self._copies)
        same, _ = self._seeds()
        program = broadcast_program(self.plan, src)
        read = (lambda: [flat]) if src == self.plan.rank else self._room(program, bucket, flat)
        then = lambda tensors: tensors[0].view(shape)  # noqa: E731
        return self._end(self._collectives.run(program, bucket, read, then, seed=same), async_op)

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
        self._check_peer("send: dst", dst)
        if not flat.numel():
            return self._end(self._local(flat, lambda _: None), async_op)
        self._sent += 1  # apart from `_calls`, which has to be the same on all ranks
        program, bucket = self._message("send", tensor, self.plan.rank, dst)
        seed = self._own_seed(self._sent)
        return self._end(self._collectives.run(program, bucket, lambda: [flat], lambda _: None, seed=seed), async_op)

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
        flat, shape = self._flat("recv", tensor), tensor.shape
        self._check_peer("recv: src", src)
        if not flat.numel():
            return self._end(self._local(flat, lambda got: got.view(shape)), async_op)
        program, bucket = self._message("recv", tensor, src, self.plan.rank)
        then = lambda tensors: tensors[0].view(shape)  # noqa: E731
        return self._end(self._collectives.run(program, bucket, self._room(program, bucket, flat), then), async_op)

    # ---- common ----------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """On a GPU: compares all checksums until now, looks for blocks that ``exp`` could not hold, and waits for them.

        Raises:
            HopError: A message arrived changed, or lost a block.
        """
        self._collectives.verify()

    @staticmethod
    def _end(chain: Chain[Any], async_op: bool) -> Any:
        return chain if async_op else chain.wait()

    def _local(self, tensor: torch.Tensor, then: Callable[[torch.Tensor], Any]) -> Chain[Any]:
        """A chain without hops, with ``then`` of a copy: nothing has to be sent."""

        def hops() -> Any:
            copy = self._collectives.used(tensor).clone()
            yield None
            return then(copy)

        return self._collectives.lanes.submit(hops(), ())

    def _seeds(self) -> tuple[int, int]:
        """Seeds of stochastic rounding: one that all ranks have, and one of this rank, so that errors do not add up."""
        self._calls += 1
        return (self._calls * 1_000_003) & 0x7FFFFFFF, self._own_seed(self._calls)

    def _own_seed(self, count: int) -> int:
        return (count * 1_000_003 + self.plan.rank + 1) & 0x7FFFFFFF

    def _bucket(
        self, role: str, tensor: torch.Tensor, chunk: int, channel: str, key: int | None = None, direction: str = ""
    ) -> Bucket:
        if channel in (self._sums, self._copies) and channel not in self._channels:
            raise ValueError(f"{role}: found no {channel!r} among the uses of this communicator: {self._channels}")
        of = f"{self.role} in " if self.role else ""
        name = f"{role} of {of}{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        return Bucket((key or 0,), (chunk,), tensor.dtype, self.role or role, channel, direction, name)

    def _message(self, role: str, tensor: torch.Tensor, source: int, target: int) -> tuple[Program, Bucket]:
        """The program of a message, and its bucket. Each direction has a lane: in a ring all ranks send before they receive."""
        direction = f"{source} to {target}"
        bucket = self._bucket(role, tensor, tensor.numel(), f"{self._name} messages", direction=direction)
        assert self._messages is not None, "the peer has been checked"
        lane = bucket.lane(self.plan.grid.tier_between(source, target))
        self._transport.direction(lane, self._messages, source, target)
        return message_program(self.plan, source, target), bucket

    @staticmethod
    def _room(program: Program, bucket: Bucket, like: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Makes the buffer of a message that another rank sends."""
        size = program.crossings[0].message_bytes(bucket.chunks, bucket.dtype.itemsize)
        return lambda: like.new_empty(size, dtype=torch.uint8)

    def _check_peer(self, argument: str, rank: int) -> None:
        """Raises ValueError for what is no other rank, or where nothing carries messages."""
        _check_rank(argument, rank, self.plan.grid.world_size)
        if rank == self.plan.rank:
            raise ValueError(f"{argument}: found {rank}, this rank itself; expected another rank of the group")
        if self._messages is None:
            raise ValueError(f"{argument}: found no 'messages' among the uses of this communicator: {self._channels}")

    def _flat(self, operation: str, tensor: torch.Tensor) -> torch.Tensor:
        return _flat(operation, tensor, self._device, self._bfloat16)


def _flat(operation: str, tensor: torch.Tensor, device: str, exp: bool) -> torch.Tensor:
    """The tensor as one contiguous row, without gradient.

    Args:
        operation: Begins messages.
        tensor: Dense, float32, bfloat16 or float16; with ``exp`` bfloat16.
        device: Kind of device that it has to be on.
        exp: Whether a hop has codec ``exp``.

    Raises:
        TypeError: It is something else.
        ValueError: It is on another device.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in FLOATS or tensor.layout != torch.strided:
        found = type(tensor).__name__
        if isinstance(tensor, torch.Tensor):
            found = f"{tensor.dtype} in layout {tensor.layout}"
        raise TypeError(f"{operation}: tensor: found {found}, possible: dense float32, bfloat16, float16")
    if exp and tensor.dtype != torch.bfloat16:
        raise TypeError(f"{operation}: tensor: found {tensor.dtype}, possible with codec exp: bfloat16")
    if tensor.device.type != device:
        raise ValueError(
            f"{operation}: tensor: found on {tensor.device}, possible with the backend of this group: {device}"
        )
    return tensor.detach().reshape(-1).contiguous()  # of an expanded tensor reshape makes a view


def _part(operation: str, tensor: torch.Tensor, ranks: int) -> tuple[int, ...]:
    """The shape of one rank's part. Raises ValueError where the first dimension is no multiple of the ranks."""
    rows, *rest = tensor.shape or (0,)
    if tensor.dim() == 0 or rows % ranks:
        raise ValueError(
            f"{operation}: tensor: found shape {list(tensor.shape)}, expected a first dimension that is a multiple of the "
            f"group's {ranks} ranks"
        )
    return (rows // ranks, *rest)


def _check_sum(operation: str, op: str, key: int | None, error_feedback: Sequence[str]) -> None:
    """Raises ValueError for an unknown sum, or one without a key where tiers have error feedback."""
    if op not in ("sum", "mean"):
        raise one_of(f"{operation}: op", op, ("sum", "mean"))
    if key is None and error_feedback:
        raise ValueError(
            f"{operation}: key: found None, expected a number that names the tensor from call to call, since "
            f"error_feedback is on ({', '.join(error_feedback)})"
        )


def _check_rank(argument: str, rank: int, ranks: int) -> None:
    """Raises ValueError for what is no rank of a group of so many."""
    if isinstance(rank, bool) or not isinstance(rank, Integral) or not 0 <= rank < ranks:
        raise ValueError(f"{argument}: found {rank!r}, possible: 0..{ranks - 1}")
