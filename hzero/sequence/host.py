"""Chunks of tensors in host memory: copied there and back on a stream of their own, one ahead of what computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def one_ahead(started: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Results of what is under way, such as a copy or an exchange: each when the next one has been started, too."""
    arriving: Callable[[], T] | None = None
    for following in chain(started, [None]):
        if arriving is not None:
            yield arriving()
        arriving = following


class HostMemory:
    """Keeps tensors on the host, in pinned memory, and brings them back one ahead of their use.

    All buffers of the device are allocated on the computing stream, which waits for a copy before it frees or reads one. A
    copy to the device starts when all that was enqueued before it has ended. So a loop over chunks has at most one chunk on
    its way and one in use, however far the host is ahead of the device.

    Args:
        offload: Whether tensors leave the device. If not, every tensor stays as it is.
        device: Makes streams and events, such as ``torch.cuda``. None: that, or ``torch.cpu`` without GPUs, where a copy has
            ended when it returns.
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
            tensors: Of the device. They may be dropped at once, but not changed before `close`.

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
        """Brings chunks back, one after the other.

        Args:
            chunks: Tensors that `store` has returned, by chunk. Read one ahead of what is returned.

        Returns:
            The tensors of each chunk, on the device.
        """
        return one_ahead(map(self.start, chunks))

    def start(self, chunk: Sequence[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor]]:
        """Starts to bring a chunk back; the result waits for it."""
        if not self._offload:
            return lambda: chunk
        tensors = [torch.empty(one.shape, dtype=one.dtype, device=self._place) for one in chunk]
        event = self._copy(tensors, chunk)

        def arrived() -> Sequence[torch.Tensor]:
            event.wait()
            return tensors

        return arrived

    def close(self) -> None:
        """Makes the current stream wait for all copies, also those that a loop had started when an error ended it."""
        self._device.current_stream().wait_stream(self._stream)
        self._leaving = (), self._leaving[1]

    def _copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Any:
        """Copies after all that the current stream has; returns an event at the end."""
        event = self._device.Event()
        self._stream.wait_stream(self._device.current_stream())
        with self._device.stream(self._stream):
            for target, source in zip(targets, sources):
                target.copy_(source, non_blocking=True)
            event.record()
        return event


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
