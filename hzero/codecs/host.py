"""Host backend: the compiled library for tensors of a CPU (hip_kernels/host)."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

import numpy as np
import torch

from hzero.codecs.kernels import BUCKET, VERSION

#: Folder of the compiled parts, in an installation and in a checkout that was set up.
NATIVE = Path(__file__).resolve().parents[1] / "native"
LIBRARY = NATIVE / "libhzero_host.so"


class HostLibrary:
    """Starts kernels of the host library, on as many threads as torch was given.

    Args:
        path: The library.

    Raises:
        OSError: It is not there, cannot be loaded, or was built for another version of hzero.
    """

    name = "host"
    alignment = 4
    wave = 0  # one thread computes a whole block

    def __init__(self, path: Path = LIBRARY) -> None:
        if not path.exists():
            raise OSError(
                f"{path} is not there: hzero was installed without a C++ compiler, or its checkout not set up"
            )
        _check_whole(path)
        self._library = ctypes.CDLL(str(path))
        try:
            built = self._library.hz_bucket_version(), self._library.hz_bucket_bytes()
        except AttributeError:
            raise OSError(f"{path} is not hzero's library") from None
        if built != (VERSION, BUCKET.itemsize):
            raise OSError(
                f"{path} has version {built[0]} ({built[1]} bytes), expected {VERSION} ({BUCKET.itemsize} bytes): "
                "build it again"
            )
        self._library.hz_instruction_set.restype = ctypes.c_char_p

    @property
    def instruction_set(self) -> str:
        """The instruction set in use: ``avx512``, ``avx2`` or ``baseline``."""
        return self._library.hz_instruction_set().decode()

    @instruction_set.setter
    def instruction_set(self, name: str) -> None:
        if not self._library.hz_use_instruction_set(name.encode()):
            raise ValueError(f"instruction_set: this processor or library has no {name!r}")

    def launch(self, family: str, kernel: str, bucket: np.ndarray, workgroups: int, device: torch.device) -> None:
        """Runs a kernel to its end. Other Python threads go on meanwhile."""
        getattr(self._library, kernel)(ctypes.c_void_p(bucket.ctypes.data), torch.get_num_threads())


def _check_whole(path: Path) -> None:
    """Raises OSError for a truncated file: loading one kills the process when it touches the missing part."""
    with path.open("rb") as file:
        header = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if len(header) == 64 and header[:5] == b"\x7fELF\x02":  # a 64-bit ELF; the loader itself refuses all else
        (sections,), (width, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
        if sections + width * count > size:
            raise OSError(f"{path} is cut short: {size} bytes of {sections + width * count}")
