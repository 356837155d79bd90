"""The exchange through MPI, and the address of rank 0. MPI's calls wait without end; all waits here end."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from hzero.launcher import free_port as any_free_port
from hzero.topology.exchange import Exchange, absent, one_line
from hzero.validation import ConfigError

#: Longest wait for rank 0's address, in seconds.
TIMEOUT_S = 300.0

_REPORT, _ANSWER, _ABSENT = 7301, 7302, 7303  # tags of messages


class MpiExchange(Exchange):
    """Through messages of MPI: every rank sends rank 0 its report and receives the answer.

    MPI's calls wait without end, so all waits here poll calls that return at once. A rank that gives up ends the whole MPI
    job when its process ends: MPI's own end would wait for the missing ranks.

    Args:
        timeout_s: Longest wait of rank 0 for the others, in seconds.

    Raises:
        ConfigError: mpi4py cannot be imported.
    """

    def __init__(self, timeout_s: float = 300.0) -> None:
        self._mpi = import_mpi()
        self._comm = self._mpi.COMM_WORLD
        super().__init__(self._comm.Get_rank(), self._comm.Get_size(), timeout_s)

    def _collect(self, frame: bytes) -> list[bytes] | None:
        if self.rank != 0:
            self._sent = self._comm.Isend([frame, self._mpi.BYTE], 0, _REPORT)
            return None
        frames = {0: frame}
        status = self._mpi.Status()

        def all_here() -> bool:
            while self._comm.Iprobe(self._mpi.ANY_SOURCE, _REPORT, status):
                frames[status.Get_source()] = self._receive(status)
            return len(frames) == self.world_size

        if not _poll(all_here, time.monotonic() + self.timeout_s):
            missing = sorted(set(range(self.world_size)) - set(frames))
            message = absent(missing, self.world_size, self.timeout_s)
            self._send(message.encode(), _ABSENT, sorted(frames))
            raise _give_up(message)
        return [frames[rank] for rank in range(self.world_size)]

    def _spread(self, frame: bytes | None) -> bytes:
        if frame is not None:
            self._send(frame, _ANSWER, range(self.world_size))
            return frame
        status = self._mpi.Status()
        patience = self.timeout_s + self.grace_s
        if not _poll(lambda: self._comm.Iprobe(0, self._mpi.ANY_TAG, status), time.monotonic() + patience):
            wait = f"topology: rank {self.rank} has waited {patience:g} s for the answer of rank 0, which did not come"
            raise _give_up(wait)
        tag, answer = status.Get_tag(), self._receive(status)
        if tag == _ABSENT:
            raise _give_up(answer.decode())
        return answer

    def _send(self, frame: bytes, tag: int, ranks: Iterable[int]) -> None:
        sends = [self._comm.Isend([frame, self._mpi.BYTE], rank, tag) for rank in ranks if rank != 0]
        _poll(lambda: self._mpi.Request.Testall(sends), time.monotonic() + self.grace_s)

    def _receive(self, status: Any) -> bytes:
        frame = bytearray(status.Get_count(self._mpi.BYTE))
        self._comm.Recv([frame, self._mpi.BYTE], status.Get_source(), status.Get_tag())
        return bytes(frame)


def import_mpi(
    what: str = "topology: ranks of MPI meet through mpi4py",
    otherwise: str = "or set MASTER_ADDR to the host of rank 0",
) -> Any:
    """mpi4py's ``MPI``, which initialises MPI.

    Args:
        what: Needs it, for the message.
        otherwise: What else would do.

    Raises:
        ConfigError: It cannot be imported, or finds no MPI library.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f'{what}, which cannot be used ({one_line(error)[:200]}): pip install "hzero[mpi]", {otherwise}'
        ) from None
    return MPI


@functools.cache
def address_of_mpi(rank: int, size: int, variables: str, one_host: bool) -> tuple[str, int]:
    """Rank 0's address and a free port there, sent to all ranks. Once per process: it is collective.

    Args:
        rank: This rank, as the launcher states it.
        size: Ranks of the world, as the launcher states it.
        variables: Which state it, for messages.
        one_host: Whether all ranks are on one host.

    Raises:
        ConfigError: mpi4py is missing or states otherwise, or rank 0 does not come.
    """
    mpi = _checked_mpi(rank, size, variables)
    comm = mpi.COMM_WORLD
    line = bytearray(512)
    if rank == 0:
        text = f"{'127.0.0.1' if one_host else socket.gethostname()} {free_port()}".encode()
        line[: len(text)] = text
    if not _poll(comm.Ibcast([line, mpi.BYTE], 0).Test, time.monotonic() + TIMEOUT_S):
        wait = f"topology: rank {rank} has waited {TIMEOUT_S:g} s for the address of rank 0; MASTER_ADDR would state it"
        raise _give_up(wait)
    address, port = line.rstrip(b"\0").decode().split()
    return address, int(port)


def size_of_mpi(rank: int, variables: str) -> int:
    """The world size where the launcher states the rank alone. Raises `ConfigError` as `address_of_mpi`."""
    return int(_checked_mpi(rank, None, variables).COMM_WORLD.Get_size())


#: A port that was free a moment ago; the same throughout a process.
free_port = functools.cache(any_free_port)


def _checked_mpi(rank: int, size: int | None, variables: str) -> Any:
    mpi = import_mpi()
    own, world = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    if (own, world) != (rank, size or world):
        raise ConfigError(
            f"mpi4py has this process as rank {own} of {world}, but {variables}: mpi4py is of another MPI than the launcher"
        )
    return mpi


def gpu_aware() -> bool:
    """Whether the MPI library says that it reads and writes the memory of this torch's GPUs."""
    import torch

    mpi = import_mpi()
    if "CRAY MPICH" in mpi.Get_library_version().upper():
        return os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"
    found = ctypes.CDLL(mpi.__file__)
    names = ("rocm", "hip") if torch.version.hip else ("cuda",)  # ROCm is rocm in Open MPI and hip in MPICH
    asks = (getattr(found, f"MPIX_Query_{name}_support", None) for name in names)
    return any(ask() for ask in asks if ask is not None)


def _give_up(message: str) -> ConfigError:
    """The error for ranks that did not come."""
    abort_at_exit()
    return ConfigError(message)


@functools.cache
def abort_at_exit() -> None:
    """From now on the process ends by ending the MPI job: MPI_Finalize would wait for ranks that do not come."""
    atexit.register(_abort)


def _abort() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    time.sleep(1.0)  # the first to abort ends the others, which may be saying why as well
    import_mpi().COMM_WORLD.Abort(2)


def _poll(over: Callable[[], bool], deadline: float) -> bool:
    """Asks again and again until it is over; False where that has not come by the deadline."""
    pause = 1e-5
    while not over():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    return True
