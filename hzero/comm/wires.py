"""Wires: the message transport of one group of ranks, its implementation on torch.distributed, and process groups."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from hzero.config import Tier

#: Channel of a stage's lanes.
STAGE = "stage"
#: Name of a communicator: channel and tier, for a stage or one use of a `Communicator`. Point-to-point messages add a third
#: part, their direction.
Lane: TypeAlias = tuple[str, Tier] | tuple[str, Tier, str]
#: Functions of torch.distributed. torch 2.13 renames them, and warns of the old names.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
_STOCK = getattr(dist, _REDUCE_SCATTER)


class Work(Protocol):
    """Messages in flight."""

    def wait(self) -> Any:
        """Waits for them. Raises RuntimeError if one failed or the group's timeout passed."""


class Wires(Protocol):
    """Transport of one lane's messages; see `TorchWires` for arguments and results."""

    library_sums: bool

    @property
    def all_gather(self) -> Callable[[torch.Tensor, torch.Tensor], Work]:
        """Starts an all-gather."""

    @property
    def all_to_all(self) -> Callable[..., Work]:
        """Starts an all-to-all."""

    @property
    def reduce_scatter(self) -> Callable[[torch.Tensor, torch.Tensor], Work]:
        """Starts a reduce-scatter, if `library_sums`."""

    def exchange(self, output: torch.Tensor, message: torch.Tensor, source: int, target: int) -> Work:
        """Starts a send to one rank and a receive from one rank."""

    def broadcast(self, message: torch.Tensor, root: int) -> Work:
        """Starts a broadcast."""

    def message(self, message: torch.Tensor, peer: int, *, sends: bool) -> Work:
        """Starts a send or a receive."""


class DisagreementError(RuntimeError):
    """A message has another size than this rank expects; `Pending.end` turns it into a `HopError`."""


class TorchWires:
    """A process group of torch.distributed that only its lane uses; k is its size, i the position of one rank.

    Buffers are contiguous and belong to the work until it has ended.

    Args:
        group: The group.
        timeout: Maximum wait for a point-to-point message, of which gloo's collectives consist here. Other collectives use the
            timeout of the group.
        in_order: Starts a collective after all earlier ones, see `hzero.comm.lanes.StreamLanes.collective`. None starts it
            immediately.
        in_pairs: Whether gloo's collectives consist of pairs of messages. On streams, only gloo's own are ordered.

    Attributes:
        all_gather: Sends uint8 ``[b]`` of every rank to ``[k * b]``; arguments are the output and the message.
        all_to_all: Sends part i of uint8 ``[k * b]`` to rank i; part i of the output comes from rank i. For uneven parts,
            two more arguments give the bytes from each rank and for each rank.
        reduce_scatter: Sums floating ``[k * n]`` to ``[n]``.
        library_sums: Whether `reduce_scatter` may be used. gloo's sends twice the bytes, and its handle never reports
            completion.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: timedelta,
        in_order: Callable[[Callable[..., Any]], Work] | None = None,
        in_pairs: bool = True,
    ) -> None:
        self._group, self._timeout, self._in_order = group, timeout, in_order
        self.all_gather = self._starts(getattr(dist, _ALL_GATHER))
        # NCCL and RCCL send to the rank d positions ahead while they receive from the rank d positions before, on all channels.
        # They use one distance d after the other. The source is `ncclP2pSchedule` in src/init.cc of NVIDIA/nccl 2.30.7 and of
        # ROCm/rocm-systems (projects/rccl). ROCm/rccl 2.20 and 2.21 store this order in `p2pSendOrder`. So no NIC receives from
        # all ranks at once, and this module needs no shift. gloo shifts too, but starts all messages at once.
        self.all_to_all = self._starts(dist.all_to_all_single)
        compares = dist.get_debug_level() is dist.DebugLevel.DETAIL  # torch does, the collectives of all peers
        if dist.get_backend(group) == "gloo" and in_pairs and not compares:
            self.all_to_all, ranks = self._all_to_all_by_pairs, group.size()
            self.all_gather = lambda out, part: self._pairs(out.split([len(part)] * ranks), [part] * ranks)
        self.reduce_scatter = self._starts(getattr(dist, _REDUCE_SCATTER))
        self.library_sums = dist.get_backend(group) != "gloo" or getattr(dist, _REDUCE_SCATTER) is not _STOCK

    def _starts(self, function: Callable[..., Any]) -> Callable[..., Work]:
        """Returns a function that starts a collective of torch.distributed. Without an order, it adds no Python call."""
        start, in_order = partial(function, group=self._group), self._in_order
        return partial(start, async_op=True) if in_order is None else lambda *args: in_order(partial(start, *args))

    def _all_to_all_by_pairs(self, output: torch.Tensor, message: torch.Tensor, *sizes: Sequence[int]) -> Work:
        """``sizes``: see `all_to_all`."""
        received, sent = sizes or [[len(one) // self._group.size()] * self._group.size() for one in (output, message)]
        return self._pairs(output.split(list(received)), message.split(list(sent)))

    def _pairs(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Work:
        """Sends a part to every rank and receives one from every rank, over gloo. All receives are posted first.

        A rank of gloo sends once its peer has posted the receive. This notice uses the connection of the data. gloo's
        collectives post sends first. If one rank is late, its notice queues behind its data, and the two directions of a link
        take turns.
        """
        group, own, works = self._group, self._group.rank(), list[Work]()
        others = [*range(own + 1, group.size()), *range(own)]
        works += [group.recv([received[rank]], rank, 0) for rank in reversed(others) if len(received[rank])]
        works += [group.send([sent[rank]], rank, 0) for rank in others if len(sent[rank])]
        received[own].copy_(sent[own])
        return SimpleNamespace(wait=partial(self._wait_for, works))

    def _wait_for(self, works: Sequence[Work], limited: bool = True) -> None:
        """Waits for messages. gloo applies their timeout in ``wait()``: ``limited``, all of them together have one."""
        ends = time.monotonic() + self._timeout.total_seconds()
        for work in works:
            work.wait(*[timedelta(seconds=max(ends - time.monotonic(), 0.001))] * limited)

    def exchange(self, output: torch.Tensor, message: torch.Tensor, source: int, target: int) -> Work:
        """Sends the whole message to ``target`` and receives as many bytes from ``source``; all ranks exchange at the same time.

        No other rank gets a message. An all-to-all with empty parts would send one to every rank. torch skips none
        (`_nccl_should_send_recv` in its nccl.cpp), and NCCL, RCCL and gloo send messages of zero bytes.
        """
        to, back = self._rank(target), self._rank(source)

        def start(group: dist.ProcessGroup, async_op: bool) -> Work:
            pair = [dist.P2POp(dist.irecv, output, back, group), dist.P2POp(dist.isend, message, to, group)]
            works = dist.batch_isend_irecv(pair)
            both = SimpleNamespace(wait=partial(self._wait_for, works, message.is_cpu))
            return both if async_op else both.wait()

        return self._starts(start)()

    def broadcast(self, message: torch.Tensor, root: int) -> Work:
        """Copies uint8 ``[b]`` from one rank to all others."""
        return self._starts(dist.broadcast)(message, self._rank(root))

    def message(self, message: torch.Tensor, peer: int, *, sends: bool) -> Work:
        """Sends a message to one rank, or receives one. Messages of one direction between two ranks arrive in order."""
        work: Any = (dist.isend if sends else dist.irecv)(message, self._rank(peer), group=self._group)
        return SimpleNamespace(wait=partial(self._wait_for, [work])) if message.is_cpu else work

    def _rank(self, place: int) -> int:
        return dist.get_global_rank(self._group, place)


# ---- process groups, made once per world of torch.distributed ------------------------------------------------------------


_groups: tuple[Any, dict[Any, dist.ProcessGroup]] = None, {}  # a world and its groups


def process_group(
    lane: Lane, ranks: Sequence[int], timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup:
    """Returns the group of ``ranks``, in this order; made at the first call. All its ranks must make the same call.

    Engines of this process share the group for the lifetime of torch.distributed's world. With ``use_local_synchronization``,
    torch names a group after its ranks. If a group of the same ranks was destroyed, a new one would find the old keys in the
    store and hang.

    Args:
        lane: Name of the communicator.
        ranks: World ranks.
        timeout: Maximum wait for one collective.
        backend: None uses the world's backend.
    """
    global _groups
    if _groups[0] is not dist.group.WORLD:
        _groups = dist.group.WORLD, {}
    made, key = _groups[1], (lane, tuple(ranks), timeout, backend)
    if key not in made:
        sorts = "sort_ranks" in inspect.signature(dist.new_group).parameters
        in_order: dict[str, Any] = {"sort_ranks": False} if sorts else {}
        with _apart(key):
            made[key] = dist.new_group(
                list(ranks),
                timeout=timeout,
                backend=backend,
                pg_options=_nccl_options(backend, timeout),
                use_local_synchronization=True,
                group_desc=f"hzero {lane[0]} {lane[1]}",  # shown in messages of torch's watchdog
                **in_order,
            )
    return made[key]


def messages_dropped(within_s: float) -> bool:
    """Waits until gloo's threads have dropped the messages that have ended. Returns whether they have in time.

    A thread of gloo reports the end of a message before it drops the tensors, for which it needs the GIL. If the interpreter
    shuts down in between, the process aborts (pytorch/pytorch#190489). A thread works in order, and an all-reduce of no
    elements needs no peer. Once it has dropped this one's tensor, it has dropped all earlier tensors.
    """
    if dist.get_debug_level() is dist.DebugLevel.DETAIL:  # checks every collective with all peers
        return True
    empty = torch.empty(0)
    dropped, ends = weakref.ref(empty), time.monotonic() + within_s
    for group in {*_groups[1].values(), *c10d._world.pg_map}:
        with contextlib.suppress(RuntimeError):  # no gloo, or an earlier failure
            group.allreduce([empty])
    del empty
    while dropped() is not None and time.monotonic() < ends:
        time.sleep(0.001)
    return dropped() is None


def world_timeout() -> timedelta:
    """Timeout of the world's process group; groups made later do not inherit it."""
    assert dist.group.WORLD is not None, "torch.distributed is not initialised"
    return group_timeout(dist.group.WORLD)


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Timeout of a process group."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)  # not exposed by every torch
    return options._timeout if options is not None else default_pg_timeout


def connection_to_store() -> Callable[[], Any]:
    """Returns a function that makes connections to the world's store, which no other thread uses."""
    store = c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return lambda: store
    host, port = store.host, store.port  # a clone would keep rank 0's server alive
    # A world that torchrun restarts uses the same store of its agent.
    prefix = f"hzero/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    return lambda: dist.PrefixStore(prefix, dist.TCPStore(host, port, is_master=False, wait_for_workers=False))


def limit_waits() -> None:
    """Sets the world's timeout on all groups of this rank with torch's default timeout, such as DeepSpeed's."""
    timeout, stock = world_timeout(), (default_pg_timeout, default_pg_nccl_timeout)
    if timeout in stock:
        return
    for group in list(c10d._world.pg_map):
        if group_timeout(group) in stock:
            c10d._set_pg_timeout(timeout, group)


@contextlib.contextmanager
def _apart(key: tuple[Any, ...]) -> Iterator[None]:
    """Context in which a new group is named after its key, needs no rank outside it, and has no gloo thread of its own.

    torch names a group after its ranks and the number of groups that this rank has made. Ranks that belong to more groups have a
    higher number, so the ranks of a group would wait for each other under different names.

    If the world is bound to a device, torch splits a new communicator off the world's (``ncclCommSplit``). This needs all ranks
    of the world, so a group that only its ranks make would wait forever (pytorch/pytorch#129965).

    gloo starts one thread per group that waits for messages. Ranks that share cores lose time with every thread switch.

    torch before 2.12 has no argument for the order of ranks, and sorts them with Python's ``sorted`` (pytorch/pytorch#176126).
    This context replaces that name in its module.
    """
    name: Any = f"hzero {hashlib.sha1(repr(key).encode(), usedforsecurity=False).hexdigest()}"
    changes = {
        "_process_group_name": lambda ranks, use_hashed_name: name,
        "_get_split_source": lambda *_: None,
        "ProcessGroupGloo": _gloo_of_one_thread(),
        "sorted": list,
    }
    module = vars(c10d)
    stock = {name: module[name] for name in changes if name in module}
    module.update(changes)
    try:
        yield
    finally:
        module.update(stock)
        for name in changes.keys() - stock:
            del module[name]


def _nccl_options(backend: str | None, timeout: timedelta) -> Any:
    """Gives collectives priority over compute on a GPU, as FSDP2 does."""
    if "nccl" not in (backend or dist.get_backend_config()):
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


@functools.cache
def _gloo_of_one_thread() -> Any:
    """Returns a gloo process group class whose groups in this process share one device, and so one thread."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not dist.is_gloo_available() or "," in interface:  # several interfaces need several devices
        return getattr(c10d, "ProcessGroupGloo", None)
    before = set(os.listdir("/proc/self/task"))
    make: Any = dist.ProcessGroupGloo
    device = make.create_device(interface=interface) if interface else make.create_default_device()
    for thread in set(os.listdir("/proc/self/task")) - before:
        # If this thread preempts a sender that has a lock, it spins until the sender runs again. A batch thread preempts no
        # other.
        os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))

    class OneThread(dist.ProcessGroupGloo):
        # torch 2.15 has more arguments.
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            # A lane has one collective in flight.
            options._devices, options._timeout, options._threads = [device], timeout, 1
            super().__init__(store, rank, size, options)

    return OneThread
