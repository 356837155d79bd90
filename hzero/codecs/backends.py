"""Chooses the backend that encodes and decodes on a device, and says why."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hzero.codecs import reference
from hzero.codecs.device import DeviceKernels
from hzero.codecs.host import HostLibrary
from hzero.codecs.kernels import KernelBackend
from hzero.validation import ConfigError, one_of

#: Environment variable that forces a backend for the devices that it serves (``reference`` serves all). Where it is not
#: set, and for other devices, the fastest that works is used.
VARIABLE = "HZERO_BACKEND"
BACKENDS = ("reference", "host", "hip", "cuda")

logger = logging.getLogger("hzero")


@dataclass(frozen=True)
class Choice:
    """The backend of one kind of device.

    Attributes:
        name: One of `BACKENDS`.
        backend: Has the functions of `hzero.codecs.reference` that prepare calls.
        why: The reason, on one line.
        fallback: Whether a faster one is expected here and missing.
    """

    name: str
    backend: Any
    why: str
    fallback: bool = False


@functools.cache
def choice(kind: str) -> Choice:
    """The backend for tensors of a kind of device.

    Args:
        kind: ``cpu`` or ``cuda`` (which torch calls AMD GPUs too).

    Raises:
        ConfigError: ``HZERO_BACKEND`` names no backend, or one that serves this kind and does not work.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted and wanted not in BACKENDS:
        raise one_of(VARIABLE, wanted, BACKENDS, "backend")
    if wanted in ("hip", "cuda") and not getattr(torch.version, wanted):
        raise ConfigError(f"{VARIABLE}: {wanted} cannot be used: this torch, {torch.__version__}, is not built for it")
    if wanted == "reference":
        return Choice("reference", reference, f"{VARIABLE} asks for it")
    own = "host" if kind == "cpu" else ("hip" if torch.version.hip else "cuda")
    try:
        if kind == "cpu":
            library = HostLibrary()
            return Choice(own, KernelBackend(library), f"compiled library, {library.instruction_set}")
        kernels = DeviceKernels()
        return Choice(own, KernelBackend(kernels), kernels.describe())
    except (OSError, ImportError) as error:
        if wanted == own:
            raise ConfigError(f"{VARIABLE}: {own} cannot be used: {error}") from None
        return Choice("reference", reference, str(error), fallback=True)


@functools.cache
def _announced(kind: str) -> Choice:
    """`choice`; warns once, on rank 0, if it falls back to the reference."""
    chosen = choice(kind)
    if chosen.fallback and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        logger.warning("hzero: codecs run in plain torch on %s tensors, several times slower: %s", kind, chosen.why)
    return chosen


@contextlib.contextmanager
def reference_instead() -> Iterator[None]:
    """Inside, the reference computes everything: for comparisons in one process."""
    _reference_only.append(True)
    try:
        yield
    finally:
        _reference_only.pop()


_reference_only: list[bool] = []


def of(device: torch.device) -> Any:
    """The backend in use for a device."""
    if _reference_only or device.type not in ("cpu", "cuda"):
        return reference
    return _announced(device.type).backend
