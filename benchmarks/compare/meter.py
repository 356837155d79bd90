"""Memory and trace of one step."""

from __future__ import annotations

import ctypes
import gc
import gzip
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

_ALL_THREADS = _ExperimentalConfig(profile_all_threads=True)
_PERIOD_S = 0.0005


def live_storages() -> dict[int, int]:
    """Bytes of every storage that a tensor of this process keeps, by address; memory that only C++ holds is not counted."""
    gc.collect()
    found: dict[int, int] = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor):
            for tensor in _plain(item):
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return found


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    for one in (local, local.grad if local.is_leaf else None):
        one = getattr(one, "_local_tensor", one)
        if one is not None and one.device.type != "meta" and one.layout == torch.strided:
            yield one


def traced(step: Callable[[], Any], path: Path | None) -> int:
    """Runs a step under torch's profiler.

    Args:
        step: What to run.
        path: Where to write the Chrome trace, gzipped; None writes none.

    Returns:
        Maximum bytes of the process's heap beyond those at the start.
    """
    with _Heap() as heap, profile(activities=[ProfilerActivity.CPU], experimental_config=_ALL_THREADS) as profiler:
        step()
    if path is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        plain = path.with_suffix("")
        profiler.export_chrome_trace(str(plain))
        with open(plain, "rb") as source, gzip.open(path, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)
        plain.unlink()
    return heap.peak


class _Heap:
    """Maximum bytes that the process has allocated beyond those at the start.

    torch's profiler records the memory of one thread only, but hzero's lanes are threads, and gloo's buffers are no tensors.

    Attributes:
        peak: Maximum bytes.
    """

    def __init__(self) -> None:
        self._allocated = ctypes.CDLL(None).mallinfo2
        self._allocated.restype = _Mallinfo
        self._ended = threading.Event()
        self.peak = self._start = 0

    def _now(self) -> int:
        found = self._allocated()
        return int(found.uordblks + found.hblkhd)

    def _watch(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            self.peak = max(self.peak, self._now() - self._start)

    def __enter__(self) -> _Heap:
        self._start = self._now()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()
        self.peak = max(self.peak, self._now() - self._start)


_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    """glibc's ``mallinfo2``: the bytes in use, of mapped blocks and of all arenas, are its fields ``hblkhd`` and ``uordblks``."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)
