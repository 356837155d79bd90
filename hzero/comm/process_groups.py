"""Process groups of the lanes, made once per world of torch.distributed."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from hzero.comm.wires import Lane


class ProcessGroups:
    """The tier groups of this process, shared by its engines for as long as torch.distributed's world lives.

    They cannot be made anew for every engine. With ``use_local_synchronization`` torch names a group after its ranks: a
    group made after one of the same ranks was destroyed finds that one's keys in the store, and hangs.
    """

    def __init__(self) -> None:
        self._world: dist.ProcessGroup | None = None
        self._made: dict[tuple[Lane, tuple[int, ...], timedelta, str | None], dist.ProcessGroup] = {}

    def get(self, lane: Lane, ranks: list[int], timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
        """The group of ``ranks``, in this order; made at the first call. All its ranks must call alike.

        Args:
            lane: What it is for.
            ranks: Of the world.
            timeout: Longest wait for one collective.
            backend: None: the world's.
        """
        if self._world is not dist.group.WORLD:
            self._world, self._made = dist.group.WORLD, {}
        key = (lane, tuple(ranks), timeout, backend)
        if key not in self._made:
            with _named(key), _lowest_rank_as_colour(), order_of_ranks() as in_order:
                self._made[key] = dist.new_group(
                    ranks,
                    timeout=timeout,
                    backend=backend,
                    use_local_synchronization=True,
                    group_desc=f"hzero {lane[0]} {lane[1]}",  # what a watchdog's message names
                    **in_order,
                )
        return self._made[key]


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


#: Those of this process.
shared_groups = ProcessGroups()


@contextlib.contextmanager
def _named(key: tuple[Any, ...]) -> Iterator[None]:
    """Inside, a new group is named after its key.

    torch names it after its ranks and the number of groups that this rank has made. Ranks that are in groups of which
    others know nothing have made more, and would wait for each other under different names.
    """
    stock = c10d._process_group_name
    name: Any = f"hzero {hashlib.sha1(repr(key).encode(), usedforsecurity=False).hexdigest()}"
    c10d._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        c10d._process_group_name = stock


@contextlib.contextmanager
def _lowest_rank_as_colour() -> Iterator[None]:
    """Inside, groups that torch splits off the world's communicator have colours that cannot collide.

    torch splits where that communicator is bound to a device, and takes 31 bits of a hash of the ranks for the colour. Two
    groups of one colour become one communicator, and a tier has tens of thousands of groups on a large machine. They share
    no rank, so the lowest rank tells them apart.
    """
    stock = c10d._process_group_color
    c10d._process_group_color = lambda ranks: min(ranks)
    try:
        yield
    finally:
        c10d._process_group_color = stock


@contextlib.contextmanager
def order_of_ranks() -> Iterator[dict[str, Any]]:
    """Gives the arguments with which `torch.distributed.new_group` keeps the ranks in their order.

    torch before 2.12 has no such argument and sorts them with Python's ``sorted`` (pytorch/pytorch#176126). Inside, its
    module finds another function of that name.
    """
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        yield {"sort_ranks": False}
        return
    c10d.sorted = list  # type: ignore[attr-defined]
    try:
        yield {}
    finally:
        del c10d.sorted  # type: ignore[attr-defined]
