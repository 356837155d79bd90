"""Streams of an accelerator: where codec kernels and collectives run, and in which order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from hzero.comm.wires import Lane, Work
from hzero.config import CollectiveOrder, Tier


class DeviceStreams:
    """At most six streams of high priority, since a device has few hardware queues, and one per direction of messages.

    Codec kernels before a hop run on the stream of its tier, those of results on streams of their own: so the next message
    is encoded while a hop is under way. From the third tier on, tiers share a stream. Under the order ``strict``
    collectives have a stream, and all results share one.

    Args:
        device: Makes streams and events: ``torch.cuda``, or an accelerator of DeepSpeed.
        order: As for `Lanes`.
    """

    def __init__(self, device: Any, order: CollectiveOrder = "lanes") -> None:
        self.device, self.order = device, order
        self._streams: dict[Any, Any] = {}
        self._tiers: dict[Tier | None, int] = {}

    def on(self, lane: Lane | None, *, results: bool = False) -> AbstractContextManager[Any]:
        """Makes the stream of a lane current, or that of its results."""
        if lane is not None and len(lane) > 2:
            return self._on(lane)
        number = min(self._tiers.setdefault(lane and lane[1], len(self._tiers)), 2)
        return self._on(("results", 0 if self.order == "strict" else number) if results else ("hops", number))

    def _on(self, key: Any) -> AbstractContextManager[Any]:
        if key not in self._streams:
            self._streams[key] = self.device.Stream(priority=-1)
        return self.device.stream(self._streams[key])  # type: ignore[no-any-return]

    def collective(self, start: Callable[..., Any]) -> Work:
        """Starts a collective; under the order ``strict`` it comes behind all others, and on their stream."""
        if self.order == "lanes":
            return start(async_op=True)  # type: ignore[no-any-return]
        before = self.event()
        with self._on("collectives"):
            self.wait(before)
            start(async_op=False)
            return SimpleNamespace(wait=partial(self.wait, self.event()))

    def event(self) -> Any:
        """An event recorded on the current stream."""
        event = self.device.Event()
        event.record(self.device.current_stream())
        return event

    def wait(self, event: Any) -> None:
        """Makes the current stream wait for an event."""
        self.device.current_stream().wait_event(event)

    def join(self) -> None:
        """Makes the current stream wait for all that the lanes have been given."""
        for stream in self._streams.values():
            self.device.current_stream().wait_stream(stream)

    def used(self, tensor: torch.Tensor) -> None:
        """Keeps a tensor's memory until the current stream has passed this point."""
        tensor.record_stream(self.device.current_stream())


@contextlib.contextmanager
def host_steps(device: int) -> Iterator[None]:
    """Around a part of a chain on a GPU whose hops the host starts and ends, as those over MPI, which knows no streams.

    Inputs may come from any stream and results go to any, so the host waits before the part for the device and after it for
    the part. It has not run on a GPU, and costs the overlap of encoding with compute.
    """
    torch.cuda.set_device(device)  # of this thread, which may be a lane's
    torch.cuda.synchronize()
    yield
    torch.cuda.current_stream().synchronize()
