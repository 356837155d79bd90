"""Exchange: what carries one record of every rank to rank 0, and one answer back.

Traffic is bounded for any world: a rank sends one record of at most `MAX_RECORD_BYTES` and receives one answer. A rank that
cannot say its record says why, and all ranks raise the same message instead of waiting for it.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hzero.topology.machine import TopologyError

if TYPE_CHECKING:
    from hzero.topology.bootstrap import Bootstrap

#: Longest record of one rank.
MAX_RECORD_BYTES = 4096

#: Records that rank 0 reads from a store in one message.
BATCH = 512

_GOOD, _BAD = b"+", b"-"
_PREFIX = "hzero/exchange"
_NAMED = 8  # ranks that a message names
_HANDSHAKE_S = 5.0  # longest wait for a store to answer once it is connected to


class Exchange(ABC):
    """A round is one `gather` and then one `broadcast`, by all ranks.

    Args:
        rank: This rank.
        world_size: Ranks of the world.
        timeout_s: Longest wait of rank 0 for the others, in seconds; they wait a little longer for its answer.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._failed = False

    def gather(self, record: bytes | Exception) -> list[bytes] | None:
        """Brings the records of all ranks to rank 0.

        Args:
            record: This rank's; or why it has none.

        Returns:
            On rank 0 all records, in rank order; None on the others, which call `broadcast` next.

        Raises:
            TopologyError: A rank had no record, had one that is too long, or did not come in time. Rank 0 raises it here, the
                others from `broadcast`, with the same message.
        """
        if isinstance(record, bytes) and len(record) > MAX_RECORD_BYTES:
            record = TopologyError(f"a record of {len(record)} bytes; at most {MAX_RECORD_BYTES} are exchanged")
        self._failed = not isinstance(record, bytes)
        if isinstance(record, bytes):
            frames = self._collect(_GOOD + record)
        else:
            frames = self._collect(_BAD + one_line(record)[:MAX_RECORD_BYTES])
        if frames is None:
            return None
        failed = [(rank, frame[1:].decode(errors="replace")) for rank, frame in enumerate(frames) if frame[:1] != _GOOD]
        if failed:
            message = _failure(failed, self.world_size)
            self._spread(_BAD + message.encode())
            raise TopologyError(message)
        return [frame[1:] for frame in frames]

    def broadcast(self, answer: bytes | Exception | None) -> bytes:
        """Brings rank 0's answer to all ranks.

        Args:
            answer: On rank 0 the answer, or why there is none, which all ranks raise; None on the others.

        Returns:
            The answer, on all ranks.

        Raises:
            TopologyError: Rank 0 had none, the round failed in `gather`, or no answer came in time.
        """
        if self.rank == 0:
            if answer is None:
                raise ValueError("rank 0 gives the answer")
            good = isinstance(answer, bytes)
            self._spread(_GOOD + answer if isinstance(answer, bytes) else _BAD + one_line(answer))
            if not good:
                raise TopologyError(str(answer))
            assert isinstance(answer, bytes)
            return answer
        frame = self._spread(None)
        if frame[:1] != _GOOD:
            message = frame[1:].decode(errors="replace")
            raise TopologyError(message) if self._failed else TopologyError.of_rank_0(message)
        return frame[1:]

    @property
    def grace_s(self) -> float:
        """How much longer others wait for rank 0 than rank 0 for them: so its reason reaches them before they give up."""
        return max(2.0, self.timeout_s / 5)

    @abstractmethod
    def _collect(self, frame: bytes) -> list[bytes] | None:
        """The frames of all ranks, on rank 0."""

    @abstractmethod
    def _spread(self, frame: bytes | None) -> bytes:
        """Rank 0's frame, on all ranks."""


class AloneExchange(Exchange):
    """A world of one rank."""

    def __init__(self) -> None:
        super().__init__(0, 1, 0.0)

    def _collect(self, frame: bytes) -> list[bytes]:
        return [frame]

    def _spread(self, frame: bytes | None) -> bytes:
        assert frame is not None
        return frame


class StoreExchange(Exchange):
    """Through a store of torch.distributed: one key a rank, read by rank 0 in batches, and one for the answer.

    Each rank counts its rounds in the store, so that a second exchange in the same job has keys of its own. Each
    rank removes its record once it has the answer, and rank 0 the answer once all have it, where the store can.

    Args:
        store: TCPStore, FileStore, HashStore, or a PrefixStore of one.
        rank: This rank.
        world_size: Ranks of the world.
        timeout_s: Longest wait of rank 0 for the others, in seconds.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
        super().__init__(rank, world_size, timeout_s)
        self._store = store
        self._round = 0

    def _collect(self, frame: bytes) -> list[bytes] | None:
        try:
            self._round = self._store.add(f"{_PREFIX}/rounds/{self.rank}", 1)
            self._store.set(self._key(self.rank), frame)
        except RuntimeError as error:
            raise self._gone(error) from None
        if self.rank != 0:
            return None
        deadline = time.monotonic() + self.timeout_s
        frames: list[bytes] = []
        for first in range(0, self.world_size, BATCH):
            keys = [self._key(rank) for rank in range(first, min(first + BATCH, self.world_size))]
            try:
                self._store.wait(keys, _left(deadline))
                frames += self._store.multi_get(keys)
            except RuntimeError as error:
                raise self._incomplete(first, error, deadline) from None
        return frames

    def _spread(self, frame: bytes | None) -> bytes:
        if frame is not None:
            self._answer(frame, self.world_size - 1)
            return frame
        patience = self.timeout_s + self.grace_s
        deadline = time.monotonic() + patience
        try:
            self._store.wait([self._key("answer")], _left(deadline))
            answer = bytes(self._store.get(self._key("answer")))
            self._free(self.rank)
            self._store.add(self._key("heard"), 1)
        except RuntimeError as error:
            if time.monotonic() < deadline - 0.5:
                raise self._gone(error) from None
            raise TopologyError(
                f"topology: rank {self.rank} has waited {patience:g} s for the answer of rank 0, which did not come"
            ) from None
        return answer

    def _answer(self, frame: bytes, listeners: int) -> None:
        """Writes the answer, and stays until it has been heard: rank 0 may be what serves the store."""
        deadline, pause = time.monotonic() + self.grace_s, 1e-3
        try:
            self._store.set(self._key("answer"), frame)
            while self._store.add(self._key("heard"), 0) < listeners:
                if time.monotonic() > deadline:
                    return
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            self._free(0, "answer", "heard")
        except RuntimeError as error:
            raise self._gone(error) from None

    def _free(self, *names: int | str) -> None:
        """Removes keys that are not needed any more, where the store can."""
        with contextlib.suppress(RuntimeError):
            for name in names:
                self._store.delete_key(self._key(name))

    def _incomplete(self, first: int, error: RuntimeError, deadline: float) -> TopologyError:
        if time.monotonic() < deadline - 0.5:
            return self._gone(error)
        try:
            missing = self._missing(first, self.world_size)
        except RuntimeError:
            return self._gone(error)
        message = absent(missing, self.world_size, self.timeout_s)
        self._answer(_BAD + message.encode(), self.world_size - 1 - len(missing))
        return TopologyError(message)

    def _missing(self, first: int, end: int) -> list[int]:
        if self._store.check([self._key(rank) for rank in range(first, end)]):
            return []
        if end - first == 1:
            return [first]
        middle = (first + end) // 2
        return self._missing(first, middle) + self._missing(middle, end)

    def _key(self, name: int | str) -> str:
        return f"{_PREFIX}/{self._round}/{name}"

    def _gone(self, error: Exception) -> TopologyError:
        text = one_line(error).decode()[:200]
        return TopologyError(f"topology: rank {self.rank}: the store that ranks exchange through has failed: {text}")


def open_exchange(bootstrap: Bootstrap, timeout_s: float = 300.0) -> Exchange:
    """What this process can exchange through: the store of the process group that is there, one at the master address, MPI.

    A store that is made here is kept until `release_store`, so that a process group that is initialised later on the same
    address and port shares it: closed at once, it would take away what other ranks are connecting to.

    Args:
        bootstrap: This rank's place in the world, and the master address.
        timeout_s: Longest wait of rank 0 for the others, in seconds.

    Raises:
        TopologyError: The process group is another world than the environment's, or the store cannot be reached.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if bootstrap.launcher != "alone" and (rank, world_size) != (bootstrap.rank, bootstrap.world_size):
            raise TopologyError(
                f"topology: torch.distributed has this process as rank {rank} of {world_size}, its environment "
                f"({bootstrap.launcher}) as rank {bootstrap.rank} of {bootstrap.world_size}"
            )
        release_store()
        if world_size == 1:
            return AloneExchange()
        store = dist.distributed_c10d._get_default_store()
        return StoreExchange(store, rank, world_size, timeout_s)
    if bootstrap.world_size == 1:
        return AloneExchange()
    if bootstrap.address_from == "mpi":
        from hzero.topology.mpi import MpiExchange

        return MpiExchange(timeout_s=timeout_s)
    return StoreExchange(_store(bootstrap, timeout_s), bootstrap.rank, bootstrap.world_size, timeout_s)


# A store that nobody holds is closed, and with it what the other ranks are reading; a later process group shares it.
_stores: dict[tuple[str, int, int], Any] = {}


def _store(bootstrap: Bootstrap, timeout_s: float) -> Any:
    """A TCPStore as torch's ``env://`` rendezvous makes it, but without its wait for all ranks, which names nobody."""
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.rendezvous import _torchelastic_use_agent_store

    key = (bootstrap.master_addr, bootstrap.master_port, bootstrap.rank)
    if key in _stores:
        return _stores[key]
    serves = bootstrap.rank == 0 and not _torchelastic_use_agent_store()
    at = f"{bootstrap.master_addr}, port {bootstrap.master_port} (MASTER_ADDR, MASTER_PORT)"

    def make() -> Any:
        return TCPStore(
            bootstrap.master_addr,
            bootstrap.master_port,
            bootstrap.world_size,
            serves,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )

    try:
        store = _within(timeout_s + _HANDSHAKE_S, make)
    except (RuntimeError, ValueError, TimeoutError) as error:
        text = one_line(error).decode()[:200]
        if serves:
            raise TopologyError(f"topology: rank 0 cannot serve a store at {at}: {text}") from None
        raise TopologyError(
            f"topology: rank {bootstrap.rank} has not reached rank 0 at {at} within {timeout_s:g} s: {text}"
        ) from None
    # The store of torchrun's agent outlives the ranks of an attempt.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _stores[key] = PrefixStore(f"attempt_{attempt}", store)
    return _stores[key]


def release_store() -> None:
    """Lets go of the store that an exchange has made, once a process group is up, which holds what it shares of it.

    A group that is made after that one was destroyed would else meet in the old store what the first has left there.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        _stores.clear()


def _within(patience_s: float, make: Callable[[], Any]) -> Any:
    """The result of a call that may wait without end: something that listens on the port but is no store says nothing."""
    done: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()

    def call() -> None:
        try:
            done.put((make(), None))
        except Exception as error:
            done.put((None, error))

    threading.Thread(target=call, daemon=True).start()
    try:
        result, error = done.get(timeout=patience_s)
    except queue.Empty:
        raise TimeoutError("what listens there does not answer as a store does") from None
    if error is not None:
        raise error
    return result


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.01))


def one_line(error: Exception) -> bytes:
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).encode()


def _failure(failed: list[tuple[int, str]], world_size: int) -> str:
    text = failed[0][1]
    if world_size == 1:
        return text
    same = [rank for rank, other in failed if other == text]
    who = f"all {world_size} ranks" if len(same) == world_size else _ranks(same)
    others = f"; {len(failed) - len(same)} other ranks fail for other reasons" if len(failed) > len(same) else ""
    return f"{text} ({who}{others})"


def absent(missing: Sequence[int], world_size: int, timeout_s: float) -> str:
    """The message for ranks that did not come."""
    many = f"{len(missing)} of {world_size} ranks have"
    return f"topology: {many} not said within {timeout_s:g} s where they sit: {_ranks(missing)}"


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:_NAMED]))
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"
