"""Chunks of tensors in host memory. A separate stream copies them to the host and back, one chunk ahead of compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def one_ahead(started: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Waits for operations in flight, such as copies or exchanges, and yields their results.

    Args:
        started: Starts an operation each time that an element is read. An element waits for its result.

    Yields:
        Each result, after the next operation has been started.
    """
    arriving: Callable[[], T] | None = None
    for following in chain(started, [None]):
        if arriving is not None:
            yield arriving()
        arriving = following


class HostMemory:
    """Stores tensors in pinned host memory, and copies them back one chunk ahead of their use.

    Device buffers are allocated on the compute stream, which waits for a copy before it frees or reads one. A copy to the
    device starts after all work that the compute stream had before it. So a loop over chunks has at most one chunk in flight
    and one in use, however far the host runs ahead of the device.

    Args:
        offload: Whether tensors leave the device. If False, `store` and `start` return the tensors that they get.
        device: Makes streams and events, such as ``torch.cuda``. None takes ``torch.cuda``, or ``torch.cpu`` without GPUs.
    """

    def __init__(self, offload: bool, device: Any = None) -> None:
        self._offload = offload
        self._device: Any = device or (torch.cuda if torch.cuda.is_available() else torch.cpu)
        self._stream = self._device.Stream()
        self._place = torch.device("cpu")
        self._leaving: tuple[Sequence[torch.Tensor], Any] = (), self._copy((), ())

    def store(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Starts copies to the host.

        Args:
            tensors: Tensors on the device. You may drop them at once, but do not change them before `close`.

        Returns:
            Tensors for `fetch`.
        """
        if not self._offload:
            return list(tensors)
        self._leaving[1].wait()
        self._place = tensors[0].device
        hosts = [_on_host(tensor) for tensor in tensors]
        self._leaving = tensors, self._copy(hosts, tensors)
        return hosts

    def fetch(self, chunks: Iterable[Sequence[torch.Tensor]]) -> Iterator[Sequence[torch.Tensor]]:
        """Copies chunks back to the device, one after the other.

        Args:
            chunks: For each chunk, tensors that `store` has returned. They are read one chunk ahead of the result.

        Returns:
            The tensors of each chunk, on the device.
        """
        return one_ahead(map(self.start, chunks))

    def start(self, chunk: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor]]:
        """Starts to copy a chunk back to the device. The returned function waits for it and returns its tensors."""
        if not self._offload:
            return lambda: chunk
        tensors = [torch.empty(one.shape, dtype=one.dtype, device=self._place) for one in chunk]
        event = self._copy(tensors, chunk)

        def arrived() -> Sequence[torch.Tensor]:
            event.wait()
            return tensors

        return arrived

    def close(self) -> None:
        """Makes the current stream wait for all copies, including those in flight when an error ended a loop."""
        self._device.current_stream().wait_stream(self._stream)
        self._leaving = (), self._leaving[1]

    def _copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Any:
        """Copies after all work of the current stream. Returns an event at the end of the copies."""
        event = self._device.Event()
        self._stream.wait_stream(self._device.current_stream())
        with self._device.stream(self._stream):
            for target, source in zip(targets, sources):
                target.copy_(source, non_blocking=True)
            event.record()
        return event


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
