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
    """Bytes of every storage that a tensor of this process keeps, by address; memory inside of C++ alone is not seen."""
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


def traced(step: Callable[[], Any], path: Path | None) -> dict[str, Any]:
    """Runs a step under torch's profiler.

    Args:
        step: What to run.
        path: Where to write the Chrome trace, gzipped; None writes none.

    Returns:
        ``peak``: maximum bytes of live tensors beyond those at the start. ``breakdown``: seconds of the
        step in all (``step``), of the main thread inside operators of torch and hzero (``operators``), and with a
        collective under way (``collectives``, which may run beside operators).
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
    return {"peak": _peak(profiler), "breakdown": _breakdown(profiler)}


def _peak(profiler: Any) -> int:
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def _breakdown(profiler: Any) -> dict[str, float]:
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() != "[memory]"]
    begun = min(event.start_ns() for event in events)
    ended = max(event.start_ns() + event.duration_ns() for event in events)
    main = max(
        {event.start_thread_id() for event in events},
        key=lambda thread: sum(event.start_thread_id() == thread for event in events),
    )
    collectives, operators = [], []
    for event in events:
        span = (event.start_ns(), event.start_ns() + event.duration_ns())
        if "gloo:" in event.name():
            collectives.append(span)
        elif event.start_thread_id() == main and event.name().startswith(("aten::", "hzero::")):
            operators.append(span)
    return {
        "step": (ended - begun) / 1e9,
        "operators": _covered(operators) / 1e9,
        "collectives": _covered(collectives) / 1e9,
    }


def _covered(spans: list[tuple[int, int]]) -> int:
    """Length of the union of spans."""
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total
