"""Exchange through MPI, and waits that end where MPI's own would not."""

from __future__ import annotations

import array
import atexit
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from hzero.topology.exchange import Exchange, absent, one_line
from hzero.topology.machine import TopologyError

_HERE, _WHY, _CALL = 7301, 7302, 7303  # tags of the messages that find out which ranks are missing


class MpiExchange(Exchange):
    """Through MPI in two levels: inside a host first (``MPI_Comm_split_type``, shared), then one message a host to rank 0.

    MPI's calls wait without end, so that all waits here poll calls that return at once. A rank that gives up ends the
    whole MPI job when its process ends: MPI's own end would wait for the missing ranks.

    Args:
        comm: A communicator of mpi4py; the world by default.
        timeout_s: Longest wait of rank 0 for the others, in seconds.

    Raises:
        TopologyError: mpi4py cannot be imported.
    """

    def __init__(self, comm: Any = None, timeout_s: float = 300.0) -> None:
        self._mpi = import_mpi()
        self._comm = self._mpi.COMM_WORLD if comm is None else comm
        self._levels: tuple[Any, Any] | None = None
        super().__init__(self._comm.Get_rank(), self._comm.Get_size(), timeout_s)

    def _collect(self, frame: bytes) -> list[bytes] | None:
        self._arrive()
        if self._levels is None:
            host = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED, self.rank)
            leads = host.Get_rank() == 0
            leaders = self._comm.Split(0 if leads else self._mpi.UNDEFINED, self.rank)
            self._levels = host, leaders if leads else None
        host, leaders = self._levels
        here = self._gather(host, [(self.rank, frame)], "the other ranks of its host")
        if leaders is None:
            return None
        everyones = self._gather(leaders, here, "the other hosts")
        return [frame for _, frame in sorted(everyones)] if self.rank == 0 else None

    def _gather(self, comm: Any, frames: Sequence[tuple[int, bytes]], whom: str) -> list[tuple[int, bytes]]:
        """Frames of all ranks of a communicator with their ranks in the world, on its first one."""
        leads, size = comm.Get_rank() == 0, comm.Get_size()
        table = array.array("q", [number for rank, frame in frames for number in (rank, len(frame))])
        payload = b"".join(frame for _, frame in frames)
        mine = array.array("q", [len(table), len(payload)])
        counts = array.array("q", bytes(16 * size))
        wait = f"rank {self.rank} has waited {self.timeout_s:g} s for {whom}"
        self._wait(comm.Igather(mine, counts if leads else None, 0), wait)
        lengths, sizes = list(counts[0::2]), list(counts[1::2])
        tables, payloads = array.array("q", bytes(8 * sum(lengths))), bytearray(sum(sizes))
        kind = self._mpi.INT64_T
        self._wait(comm.Igatherv([table, kind], [tables, lengths, kind] if leads else None, 0), wait)
        byte = self._mpi.BYTE
        self._wait(comm.Igatherv([payload, byte], [payloads, sizes, byte] if leads else None, 0), wait)
        found, at = [], 0
        for rank, length in zip(tables[0::2], tables[1::2]):
            found.append((rank, bytes(payloads[at : at + length])))
            at += length
        return found

    def _spread(self, frame: bytes | None) -> bytes:
        assert self._levels is not None
        host, leaders = self._levels
        patience = self.timeout_s + self.grace_s
        wait = f"rank {self.rank} has waited {patience:g} s for the answer of rank 0, which did not come"
        deadline = time.monotonic() + patience
        data = bytearray(frame or b"")
        for comm in (leaders, host):
            if comm is None:
                continue
            length = array.array("q", [len(data)])
            self._wait(comm.Ibcast(length, 0), wait, deadline)
            if len(data) != length[0]:
                data = bytearray(length[0])
            self._wait(comm.Ibcast([data, self._mpi.BYTE], 0), wait, deadline)
        return bytes(data)

    def _arrive(self) -> None:
        """All ranks are there: nothing before this may wait without end."""
        barrier = self._comm.Ibarrier()
        if self.rank == 0:
            if not _poll(barrier.Test, time.monotonic() + self.timeout_s):
                raise self._give_up(self._roll_call())
            return
        called: list[bool] = []

        def over() -> bool:
            if not called and self._comm.Iprobe(0, _CALL):
                called.append(True)
            return bool(called) or barrier.Test()

        # Rank 0 may have come this much later than we have, and then waits in full.
        patience = 2 * self.timeout_s + self.grace_s
        if not _poll(over, time.monotonic() + patience):
            raise self._give_up(f"topology: rank {self.rank} has waited {patience:g} s for all ranks to come")
        if called:
            raise self._give_up(self._answer_call())

    def _roll_call(self) -> str:
        """Rank 0 asks who is there, and tells those why the exchange ends."""
        calls = [self._comm.Isend([b"", self._mpi.BYTE], rank, _CALL) for rank in range(1, self.world_size)]
        here: set[int] = set()
        status = self._mpi.Status()

        def all_here() -> bool:
            while self._comm.Iprobe(self._mpi.ANY_SOURCE, _HERE, status):
                self._comm.Recv([bytearray(), self._mpi.BYTE], status.Get_source(), _HERE)
                here.add(status.Get_source())
            return len(here) == self.world_size - 1

        _poll(all_here, time.monotonic() + self.grace_s / 2)
        message = absent(sorted(set(range(1, self.world_size)) - here), self.world_size, self.timeout_s)
        why = message.encode()
        told = [self._comm.Isend([why, self._mpi.BYTE], rank, _WHY) for rank in sorted(here)]
        _poll(lambda: all(send.Test() for send in told), time.monotonic() + self.grace_s / 2)
        del calls  # to absent ranks: never received
        return message

    def _answer_call(self) -> str:
        self._comm.Recv([bytearray(), self._mpi.BYTE], 0, _CALL)
        self._comm.Isend([b"", self._mpi.BYTE], 0, _HERE)
        status = self._mpi.Status()
        if not _poll(lambda: self._comm.Iprobe(0, _WHY, status), time.monotonic() + self.grace_s):
            return f"topology: rank 0 has not said within {self.grace_s:g} s which ranks are missing"
        why = bytearray(status.Get_count(self._mpi.BYTE))
        self._comm.Recv([why, self._mpi.BYTE], 0, _WHY)
        return why.decode()

    def _wait(self, request: Any, what: str, deadline: float | None = None) -> None:
        if not _poll(request.Test, time.monotonic() + self.timeout_s if deadline is None else deadline):
            raise self._give_up(f"topology: {what}")

    def _give_up(self, message: str) -> TopologyError:
        return give_up_mpi(self._comm, message)


def import_mpi() -> Any:
    """mpi4py's ``MPI``, which initialises MPI.

    Raises:
        TopologyError: It cannot be imported, or finds no MPI library.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise TopologyError(
            f"topology: ranks of MPI meet through mpi4py, which cannot be used ({one_line(error).decode()[:200]}): pip "
            'install "hzero[mpi]", or set MASTER_ADDR to the host of rank 0'
        ) from None
    return MPI


def wait_mpi(comm: Any, request: Any, timeout_s: float, what: str) -> None:
    """Waits for a request of mpi4py, but not for ever. Raises `TopologyError` with ``what`` after ``timeout_s``."""
    if not _poll(request.Test, time.monotonic() + timeout_s):
        raise give_up_mpi(comm, what)


def give_up_mpi(comm: Any, message: str) -> TopologyError:
    """The error for ranks that did not come. The process will end by ending the MPI job: MPI_Finalize would wait for them."""
    atexit.register(_abort, comm)
    return TopologyError(message)


def _abort(comm: Any) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    time.sleep(1.0)  # the first to abort ends the others, which may be saying why as well
    comm.Abort(2)


def _poll(over: Callable[[], bool], deadline: float) -> bool:
    """Asks again and again until it is over; False where that has not come by the deadline."""
    pause = 1e-5
    while not over():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    return True
