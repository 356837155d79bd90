"""Bytes that live on the device and on the host while something computes, counted apart on CPUs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hzero.sequence import host


class Live(TorchDispatchMode):
    """Counts the memory of tensors that operators make, until it is freed.

    Args:
        there: Tensors that are there before, and are not counted.

    Attributes:
        peak: The most bytes that have lived at a time, on the device and on the host.
    """

    def __init__(self, there: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak, self._place = {"device": 0, "host": 0, "": 0}, ""
        self._now = dict.fromkeys(self.peak, 0)
        self._counted: dict[int, tuple[str, int]] = {}
        self._ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in there:
            self._count(tensor.untyped_storage(), "")
        self._place = "device"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage(), self._place)
        return out

    def _count(self, storage: torch.UntypedStorage, place: str) -> None:
        key = storage._cdata
        if key not in self._counted:
            self._counted[key] = place, storage.nbytes()
            self._now[place] += storage.nbytes()
            self.peak[place] = max(self.peak[place], self._now[place])
            self._ends[key] = weakref.ref(storage, lambda _: self._freed(key))

    def _freed(self, key: int) -> None:
        place, size = self._counted.pop(key)
        del self._ends[key]
        self._now[place] -= size

    def on_host(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """A function whose tensors count for the host."""

        def counted(*args: Any) -> torch.Tensor:
            self._place = "host"
            try:
                return function(*args)
            finally:
                self._place = "device"

        return counted


@contextlib.contextmanager
def counting(there: Iterable[torch.Tensor]) -> Iterator[Live]:
    """Inside, bytes are counted. What `HostMemory` keeps is on the host."""
    live = Live(there)
    with live, mock.patch.object(host, "_on_host", live.on_host(host._on_host)):
        yield live
