"""Memory and trace of one step."""

from __future__ import annotations

import gc
import gzip
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


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
        Maximum bytes of live tensors beyond those at the start.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    if path is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        plain = path.with_suffix("")
        profiler.export_chrome_trace(str(plain))
        with open(plain, "rb") as source, gzip.open(path, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target)
        plain.unlink()
    return _peak(profiler)


def _peak(profiler: Any) -> int:
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
