"""Wires: what carries the messages of one group of ranks, how torch.distributed does it, and its process groups."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from hzero.config import Tier

T = TypeVar("T")
#: The channel of a stage's lanes.
STAGE = "stage"
#: A communicator: the group of one tier, of the stage or for one use of a `Communicator`. Messages from rank to rank have one
#: more part, their direction.
Lane: TypeAlias = tuple[str, Tier] | tuple[str, Tier, str]
#: Messages under way: ``wait()`` waits for them, and raises RuntimeError where one failed or the group's timeout passed.
Work: TypeAlias = Any
#: Functions of torch.distributed: torch 2.13 has other names, and warns of these.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
_STOCK = getattr(dist, _REDUCE_SCATTER)


class DisagreementError(RuntimeError):
    """A message of another size has come than this rank expects; whoever waits makes a `HopError` of it."""


class TorchWires:
    """A process group of torch.distributed, on which nobody else sends; k is the number of its ranks, i the place of one.

    Buffers are contiguous and belong to the work until it has ended.

    Args:
        group: The group.
        timeout: Longest wait for a message from rank to rank; collectives have the group's own.
        in_order: Starts a collective behind those before it, see `hzero.comm.lanes.DeviceStreams.collective`; None: at once.

    Attributes:
        all_gather: Sends uint8 ``[b]`` of every rank to ``[k * b]``; takes the output and the message.
        all_to_all: Sends part i of uint8 ``[k * b]`` to rank i; part i of the output comes from it. Parts may be uneven, though
            not over MPI: it then takes the bytes from each rank and those for each.
        reduce_scatter: Sums floating ``[k * n]`` to ``[n]``.
        library_sums: Whether `reduce_scatter` may be used. gloo's sends twice the bytes and never says that it has ended.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: timedelta,
        in_order: Callable[[Callable[..., Any]], Work] | None = None,
    ) -> None:
        self._group, self._timeout, self._in_order = group, timeout, in_order
        self.all_gather = self._starts(getattr(dist, _ALL_GATHER))
        # NCCL and RCCL send to the rank d places ahead while they receive from the one d places behind, for one distance after
        # the other, on as many channels as they have (`ncclP2pSchedule` in src/init.cc of NVIDIA/nccl 2.30.7 and of
        # ROCm/rocm-systems, projects/rccl; in ROCm/rccl 2.20 and 2.21 the order that init.cc gives `p2pSendOrder`). So no NIC
        # receives from all ranks at a time, and this module shifts nothing. gloo shifts too, and starts all messages at once.
        self.all_to_all = self._starts(dist.all_to_all_single)
        self.reduce_scatter = self._starts(getattr(dist, _REDUCE_SCATTER))
        self.library_sums = dist.get_backend(group) != "gloo" or getattr(dist, _REDUCE_SCATTER) is not _STOCK

    def _starts(self, function: Callable[..., Any]) -> Callable[..., Work]:
        """Starts a collective of torch.distributed, which has no function of ours on its way where it starts at once."""
        start, in_order = partial(function, group=self._group), self._in_order
        return partial(start, async_op=True) if in_order is None else lambda *args: in_order(partial(start, *args))

    def exchange(self, output: torch.Tensor, message: torch.Tensor, source: int, target: int) -> Work:
        """The whole message goes to one rank, and as many bytes come from one; all ranks exchange at the same time.

        No other rank gets a message. An all-to-all with empty parts sends one to every rank: torch skips none
        (`_nccl_should_send_recv` in its nccl.cpp), and NCCL and RCCL, like gloo, send messages of no bytes.
        """
        to, back = self._rank(target), self._rank(source)
        limit = (self._timeout,) if message.is_cpu else ()  # a send or receive of gloo takes it when it is waited for

        def start(group: dist.ProcessGroup, async_op: bool) -> Work:
            pair = [dist.P2POp(dist.isend, message, to, group), dist.P2POp(dist.irecv, output, back, group)]
            works = dist.batch_isend_irecv(pair)
            both = SimpleNamespace(wait=lambda: [work.wait(*limit) for work in works])
            return both if async_op else both.wait()

        return self._starts(start)()

    def broadcast(self, message: torch.Tensor, root: int) -> Work:
        """uint8 ``[b]`` of one rank into all others'."""
        return self._starts(dist.broadcast)(message, self._rank(root))

    def message(self, message: torch.Tensor, peer: int, *, sends: bool) -> Any:
        """A message to one rank or from it. Those of one direction between two ranks arrive in order."""
        work: Any = (dist.isend if sends else dist.irecv)(message, self._rank(peer), group=self._group)
        # A send or receive of gloo takes its timeout when it is waited for.
        return SimpleNamespace(wait=partial(work.wait, self._timeout)) if message.is_cpu else work

    def _rank(self, place: int) -> int:
        return dist.get_global_rank(self._group, place)


# ---- process groups, made once per world of torch.distributed ------------------------------------------------------------


_groups: tuple[Any, dict[Any, dist.ProcessGroup]] = None, {}  # of a world


def process_group(
    lane: Lane, ranks: Sequence[int], timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup:
    """The group of ``ranks``, in this order; made at the first call. All its ranks must call alike.

    The engines of this process share it for as long as torch.distributed's world lives. With ``use_local_synchronization``
    torch names a group after its ranks: a group made after one of the same ranks was destroyed finds that one's keys in the
    store, and hangs.

    Args:
        lane: What it is for.
        ranks: Of the world.
        timeout: Longest wait for one collective.
        backend: None: the world's.
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
                group_desc=f"hzero {lane[0]} {lane[1]}",  # what a watchdog's message names
                **in_order,
            )
    return made[key]


def world_timeout() -> timedelta:
    """Timeout of the world's process group; groups made later do not inherit it."""
    assert dist.group.WORLD is not None, "torch.distributed is not initialised"
    return group_timeout(dist.group.WORLD)


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Timeout of a process group."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)  # not every torch exposes them
    return options._timeout if options is not None else default_pg_timeout


def connection_to_store() -> Callable[[], Any]:
    """Makes connections to the world's store that no other thread uses."""
    store = c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return lambda: store
    host, port = store.host, store.port  # a clone of the store would keep the server of rank 0 alive
    # Worlds that torchrun starts again share its agent's store.
    prefix = f"hzero/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    return lambda: dist.PrefixStore(prefix, dist.TCPStore(host, port, is_master=False, wait_for_workers=False))


def limit_waits() -> None:
    """Gives the world's timeout to all groups of this rank that have one of torch's, such as those that DeepSpeed makes."""
    timeout, stock = world_timeout(), (default_pg_timeout, default_pg_nccl_timeout)
    if timeout in stock:
        return
    for group in list(c10d._world.pg_map):
        if group_timeout(group) in stock:
            c10d._set_pg_timeout(timeout, group)


@contextlib.contextmanager
def _apart(key: tuple[Any, ...]) -> Iterator[None]:
    """Inside, a new group is named after its key, needs nothing of ranks outside it, and on gloo no thread of its own.

    torch names a group after its ranks and the number of groups that this rank has made. Ranks that are in groups of which
    others know nothing have made more, and would wait for each other under different names.

    Where the world is bound to a device, torch splits a new communicator off the world's (``ncclCommSplit``), for which it
    needs all ranks of the world: a group that only its ranks make would wait for ever (pytorch/pytorch#129965).

    gloo has a thread for each group that waits for its messages. Ranks that share cores lose time with every switch.

    torch before 2.12 has no argument for the order of ranks, and sorts them with Python's ``sorted``
    (pytorch/pytorch#176126). Inside, its module finds another function of that name.
    """
    name: Any = f"hzero {hashlib.sha1(repr(key).encode(), usedforsecurity=False).hexdigest()}"
    changes = {
        "_process_group_name": lambda ranks, use_hashed_name: name,
        "_get_split_source": lambda world: None,
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
    """Collectives run before the compute that a GPU has room for, as FSDP2's do."""
    if "nccl" not in (backend or dist.get_backend_config()):
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return options


@functools.cache
def _gloo_of_one_thread() -> Any:
    """Gloo's groups on one device, and so one thread, of this process."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not dist.is_gloo_available() or "," in interface:  # several interfaces are several devices
        return getattr(c10d, "ProcessGroupGloo", None)
    before = set(os.listdir("/proc/self/task"))
    make: Any = dist.ProcessGroupGloo
    device = make.create_device(interface=interface) if interface else make.create_default_device()
    for thread in set(os.listdir("/proc/self/task")) - before:
        # If it preempts a sender, which holds a lock, it spins until the sender runs again: a batch thread preempts nobody.
        os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))

    class OneThread(dist.ProcessGroupGloo):
        # torch 2.15 has more arguments.
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **_: Any) -> None:
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            # A lane has one collective under way.
            options._devices, options._timeout, options._threads = [device], timeout, 1
            super().__init__(store, rank, size, options)

    return OneThread
