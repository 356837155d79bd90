"""The device kernels on the host, thread by thread (hip_kernels/emulation.h), behind the launcher of a backend."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from hzero.codecs.device import FAMILIES
from tests.ranks import ROOT

__all__ = ["FAMILIES", "KERNELS", "EmulatedKernels", "build"]

KERNELS = ROOT / "hip_kernels"


def compiler() -> str:
    """A C++ compiler, or a skipped test."""
    found = next(
        (path for name in (os.environ.get("CXX"), "g++", "clang++") if name and (path := shutil.which(name))), None
    )
    if found is None:
        pytest.skip("no C++ compiler: the kernels cannot be emulated")
    return found


@functools.cache
def build(wave: int, *sources: str) -> Path:
    """A library of kernels at a wave size. Gone with the process."""
    folder = Path(_scratch().name)
    path = folder / f"emulated_{wave}_{len(list(folder.iterdir()))}.so"
    text = "".join(f'#include "{source}"\n' for source in sources)
    command = [compiler(), "-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-DHZ_EMULATE"]
    command += [f"-DHZ_WAVE={wave}", f"-I{KERNELS}", "-Wall", "-Wno-unknown-pragmas", "-Werror"]
    command += ["-x", "c++", "-", "-o", str(path)]
    done = subprocess.run(command, input=text, cwd=KERNELS, capture_output=True, text=True, check=False)
    if done.returncode and "_Float16" in done.stderr:
        pytest.skip(f"{command[0]} has no _Float16 in C++: the kernels cannot be emulated")
    assert done.returncode == 0, done.stderr
    return path


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hzero-emulated-")


class EmulatedKernels:
    """Starts emulated kernels; builds a family when one of its kernels is first needed."""

    alignment = 16

    def __init__(self, wave: int) -> None:
        self.name = f"emulated wave {wave}"
        self.wave = wave
        compiler()  # or the test is skipped here

    def launch(self, family: str, kernel: str, bucket: np.ndarray, device: torch.device) -> None:
        library = ctypes.CDLL(str(build(self.wave, f"{family}.hip")))
        getattr(library, kernel)(ctypes.c_void_p(bucket.ctypes.data))
