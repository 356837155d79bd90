"""The MPI library through mpi4py. MPI's calls wait without end; all waits here end."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
import time
from typing import Any

from hzero.validation import ConfigError

#: Longest wait for rank 0, in seconds.
TIMEOUT_S = 300.0


def import_mpi(
    what: str = "ranks of mpiexec without MASTER_ADDR meet through mpi4py",
    otherwise: str = "or set MASTER_ADDR and MASTER_PORT to a host and a free port of rank 0",
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
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f'{what}, which cannot be used ({why[:200]}): pip install "hzero[mpi]", {otherwise}'
        ) from None
    return MPI


@functools.cache
def from_rank_0(text: str, rank: int, size: int) -> str:
    """Rank 0's text, on all ranks. Collective, once per process.

    Args:
        text: At most 500 characters.
        rank: This rank, as the launcher states it.
        size: Ranks of the world, as the launcher states it.

    Raises:
        ConfigError: mpi4py is missing or is of another MPI than the launcher, or rank 0 does not come.
    """
    mpi = import_mpi()
    _abort_after_errors()
    comm = mpi.COMM_WORLD
    if (comm.Get_rank(), comm.Get_size()) != (rank, size):
        raise ConfigError(
            f"mpi4py has this process as rank {comm.Get_rank()} of {comm.Get_size()}, its launcher as rank {rank} of {size}: "
            "they are of different MPI libraries"
        )
    line = bytearray(text.encode().ljust(512) if rank == 0 else 512)
    request, deadline = comm.Ibcast([line, mpi.BYTE], 0), time.monotonic() + TIMEOUT_S
    while not request.Test():
        if time.monotonic() > deadline:
            abort_at_exit()
            raise ConfigError(f"rank {rank} has waited {TIMEOUT_S:g} s for the address of rank 0; set MASTER_ADDR")
        time.sleep(0.005)
    return line.decode().strip()


def _abort_after_errors() -> None:
    """A rank that ends by an exception ends the MPI job: MPI_Finalize would wait for the others, and they for this rank."""
    stock = sys.excepthook

    def hook(*error: Any) -> None:
        stock(*error)
        abort_at_exit()

    sys.excepthook = hook


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


@functools.cache
def abort_at_exit() -> None:
    """From now on the process ends by ending the MPI job: MPI_Finalize would wait for ranks that do not come."""
    atexit.register(_abort)


def _abort() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    time.sleep(1.0)  # the first to abort ends the others, which may be saying why as well
    import_mpi().COMM_WORLD.Abort(2)
