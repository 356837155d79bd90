"""Kernels against the reference, bit for bit: on the host with each instruction set, emulated, and on a GPU."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hzero.codecs import backends, host, reference
from hzero.codecs.descriptor import AXES, TENSORS
from hzero.codecs.kernels import KernelBackend
from hzero.sharding.records import RecordFormat
from tests.kernels.cases import FLOATS, KINDS, Case, disagreements, numbers, random_case
from tests.kernels.emulated import EmulatedKernels

CPU = torch.device("cpu")
TARGETS = ["avx512", "avx2", "baseline", "wave 64", "wave 32", "device"]


@functools.cache
def _backend(target: str) -> KernelBackend | str:
    """The backend of a target, or why there is none."""
    if target == "device":
        if not torch.cuda.is_available():
            return "no GPU"
        chosen = backends.choice("cuda")
        return chosen.why if chosen.fallback else chosen.backend
    if target.startswith("wave"):
        return KernelBackend(EmulatedKernels(int(target.split()[1])))
    try:
        library = host.HostLibrary()
        library.instruction_set = target
    except (OSError, ValueError) as error:
        return str(error)
    return KernelBackend(library)


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> tuple[Any, torch.device]:
    """A backend and its device."""
    backend = _backend(request.param)
    if isinstance(backend, str):
        pytest.skip(backend)
    if request.param in ("avx512", "avx2", "baseline"):
        backend.launcher.instruction_set = request.param  # one library, so one setting
    return backend, torch.device("cuda" if request.param == "device" else "cpu")


@pytest.fixture(autouse=True)
def _restore() -> Any:
    best = backends.choice("cpu").backend
    yield
    if isinstance(best, KernelBackend):
        for name in ("baseline", "avx2", "avx512"):
            try:
                best.launcher.instruction_set = name
            except ValueError:
                continue


@pytest.mark.parametrize("part", range(8))
def test_random_buckets(target: tuple[Any, torch.device], part: int) -> None:
    backend, device = target
    for seed in range(part * 40, (part + 1) * 40):
        case = random_case(seed)
        found = list(disagreements(backend, case, device)) if sum(case.chunks) else []
        assert not found, (found, case)
