"""Kernels that tests compile: those of devices on the host, thread by thread (hip_kernels/emulation.h), behind a launcher."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hzero.codecs import launchers
from hzero.codecs.launchers import FAMILIES

__all__ = ["FAMILIES", "KERNELS", "LIBRARY", "SANITIZED", "EmulatedKernels", "build"]

KERNELS = Path(__file__).resolve().parents[2] / "hip_kernels"
#: tests/kernels/test_sanitizers.py sets both: the host library to test, and more flags for the emulation.
LIBRARY = Path(os.environ.get("HZERO_TESTS_LIBRARY", launchers.LIBRARY))
_FLAGS = os.environ.get("HZERO_TESTS_CXXFLAGS", "").split()
#: Whether this process looks for faults of memory alone: bits are compared without sanitizers, which make that slow.
SANITIZED = bool(_FLAGS) or "HZERO_TESTS_LIBRARY" in os.environ


def compiler() -> str:
    """A C++ compiler, or a skipped test."""
    found = next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), None
    )
    if found is None:
        pytest.skip("no C++ compiler: the kernels cannot be emulated")
    return found


@functools.cache
def build(text: str, *flags: str) -> Path:
    """A library of C++ that includes files of hip_kernels. Gone with the process."""
    path = Path(tempfile.mkdtemp(dir=_scratch().name)) / "kernels.so"
    command = [compiler(), "-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC", f"-I{KERNELS}"]
    command += [*flags, *_FLAGS, "-x", "c++", "-", "-o", str(path)]
    done = subprocess.run(command, input=text, cwd=KERNELS, capture_output=True, text=True, check=False)
    if done.returncode and any(word in done.stderr for word in ("lasan", "lubsan", "_Float16")):
        pytest.skip(f"{command[0]} lacks the sanitizers, or _Float16 in C++: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return path


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hzero-kernels-")


class EmulatedKernels:
    """Starts emulated kernels; builds a family when one of its kernels is first needed."""

    on_device, kind = True, "cpu"

    def __init__(self, wave: int) -> None:
        self.wave = wave
        compiler()  # or the test is skipped here

    def kernel(self, family: str, name: str) -> Any:
        return functools.partial(self.launch, family, name)

    def launch(self, family: str, kernel: str, bucket: np.ndarray, workgroups: int, device: torch.device) -> None:
        getattr(self._library(family), kernel)(ctypes.c_void_p(bucket.ctypes.data), workgroups)

    def accesses(self, family: str) -> dict[int, int]:
        """Accesses to elements so far, by their bytes."""
        counts = self._library(family).hz_accesses
        counts.restype = ctypes.POINTER(ctypes.c_uint64)
        return {width: counts()[width] for width in (1, 2, 4, 8, 16)}

    def _library(self, family: str) -> ctypes.CDLL:
        flags = ("-DHZ_EMULATE", f"-DHZ_WAVE={self.wave}", "-Wall", "-Wno-unknown-pragmas", "-Werror")
        return ctypes.CDLL(str(build(f'#include "{family}.hip"\n', *flags)))
