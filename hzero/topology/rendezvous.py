"""The rendezvous of ranks: opens the exchange of a discovery, before the process group is up or after."""

from __future__ import annotations

import os
import queue
import sys
import threading
from datetime import timedelta
from typing import Any

from hzero.bootstrap import Bootstrap
from hzero.topology.exchange import AloneExchange, Exchange, StoreExchange, one_line
from hzero.validation import ConfigError

_HANDSHAKE_S = 5.0  # longest wait for a store to answer once it is connected to

# A store that nobody holds is closed, which breaks the reads of the other ranks; a later process group shares it.
_stores: dict[tuple[str, int, int], Any] = {}


def open_exchange(bootstrap: Bootstrap, timeout_s: float = 300.0) -> Exchange:
    """An exchange through the store of the process group if it is up, else through one at the master address.

    A store that is made here is kept until `release_store`, so that a process group that is initialised later on the same
    address and port shares it: closed at once, it would take away what other ranks are connecting to.

    Raises:
        ConfigError: The process group is another world than the environment's, or the store cannot be reached.
    """
    if (dist := _initialized()) is not None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if bootstrap.launcher != "alone" and (rank, world_size) != (bootstrap.rank, bootstrap.world_size):
            raise ConfigError(
                f"topology: torch.distributed has this process as rank {rank} of {world_size}, its environment "
                f"({bootstrap.launcher}) as rank {bootstrap.rank} of {bootstrap.world_size}"
            )
        release_store()
        if world_size == 1:
            return AloneExchange()
        return StoreExchange(dist.distributed_c10d._get_default_store(), rank, world_size, timeout_s)
    if bootstrap.world_size == 1:
        return AloneExchange()
    return StoreExchange(_store(bootstrap, timeout_s), bootstrap.rank, bootstrap.world_size, timeout_s)


def release_store() -> None:
    """Lets go of the store of an exchange once a process group is up, which holds its part of it.

    Without this a group that is made after that one was destroyed would find the first one's keys in the old store.
    """
    if _initialized() is not None:
        _stores.clear()


def _initialized() -> Any:
    """torch.distributed if its process group is up, else None. Does not import it."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _store(bootstrap: Bootstrap, timeout_s: float) -> Any:
    """A TCPStore as torch's ``env://`` rendezvous makes it, but without its wait for all ranks, which names nobody."""
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.rendezvous import _torchelastic_use_agent_store

    address, port, rank = bootstrap.master_addr, bootstrap.master_port, bootstrap.rank
    if (address, port, rank) in _stores:
        return _stores[address, port, rank]
    serves = rank == 0 and not _torchelastic_use_agent_store()
    done: queue.Queue[Any] = queue.Queue()

    def make() -> None:
        wait = timedelta(seconds=timeout_s)
        try:
            done.put(
                TCPStore(address, port, bootstrap.world_size, serves, wait, wait_for_workers=False, multi_tenant=True)
            )
        except Exception as error:
            done.put(error)

    # In a thread: something that listens on the port but is no store never answers.
    threading.Thread(target=make, daemon=True).start()
    try:
        store = done.get(timeout=timeout_s + _HANDSHAKE_S)
    except queue.Empty:
        store = TimeoutError("what listens there does not answer as a store does")
    if isinstance(store, Exception):
        failed = "cannot serve a store" if serves else f"has not reached rank 0 within {timeout_s:g} s"
        raise ConfigError(
            f"topology: rank {rank} {failed} at {address}, port {port} (MASTER_ADDR, MASTER_PORT): {one_line(store)[:200]}"
        )
    # The store of torchrun's agent outlives the ranks of an attempt.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _stores[address, port, rank] = PrefixStore(f"attempt_{attempt}", store)
    return _stores[address, port, rank]
