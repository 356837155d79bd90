"""The MPI library through mpi4py."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
import time
from typing import Any

from hzero.validation import ConfigError


def import_mpi(initialize: bool = True) -> Any:
    """mpi4py's ``MPI``.

    Args:
        initialize: Whether the first import initialises MPI, which waits for all ranks, as its end does.

    Raises:
        ConfigError: It cannot be imported, or finds no MPI library.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = initialize
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f'transport "mpi" needs mpi4py, which cannot be used ({why[:200]}): pip install "hzero[mpi]", possible '
            'without: "torch"'
        ) from None
    return MPI


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
