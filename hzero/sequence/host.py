"""Chunks of tensors in host memory: copied there and back on a stream of their own, one ahead of what computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch


class HostMemory:
    """Keeps tensors on the host, in pinned memory, and brings them back one ahead of their use.

    All buffers of the device are allocated on the computing stream, which waits for a copy before it frees or reads one. A
    copy to the device starts when all that was enqueued before it has ended. So a loop over chunks has at most one chunk on
    its way and one in use, however far the host is ahead of the device.

    Args:
        offload: Whether tensors leave the device. If not, every tensor stays as it is.
        device: Makes streams and events, such as ``torch.cuda``. None: that of the tensors, and none on CPUs, where a copy
            has ended when it returns.
    """

    def __init__(self, offload: bool, device: Any = None) -> None:
        self.offload = offload
        self._device: Any = device
        self._stream: Any = None
        self._place = torch.device("cpu")
        self._leaving: tuple[Sequence[torch.Tensor], Any] | None = None

    def store(self, *tensors: torch.Tensor, into: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Starts copies to the host.

        Args:
            tensors: Of the device. They may be dropped at once, but not changed before `settle`.
            into: Tensors of the host that are no longer needed, to take the copies; None allocates.

        Returns:
            Tensors for `fetch`.
        """
        if not self.offload:
            return list(tensors)
        self.settle()
        self._place = tensors[0].device
        if self._device is None and self._place.type == "cuda":
            self._device = torch.cuda
        hosts = list(into) if into else [_on_host(tensor) for tensor in tensors]
        self._leaving = tensors, self._copy(hosts, tensors)
        return hosts

    def settle(self) -> None:
        """Makes the current stream wait for the last `store`, and lets go of its tensors."""
        if self._leaving is not None:
            self._wait(self._leaving[1])
            self._leaving = None

    def fetch(self, chunks: Iterable[Sequence[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
        """Brings chunks back, one after the other.

        Args:
            chunks: Tensors that `store` has returned, by chunk. Read one ahead of what is returned.

        Returns:
            The tensors of each chunk, on the device. The first chunk is under way when this function returns.
        """
        waiting = iter(chunks)
        return self._one_ahead(self._start(next(waiting, None)), waiting)

    def _one_ahead(self, started: Any, waiting: Iterator[Sequence[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
        try:
            while started is not None:
                (tensors, arrived), started = started, self._start(next(waiting, None))
                self._wait(arrived)
                yield tensors
                del tensors
        finally:
            if started is not None:  # the loop ends early: the memory must not be used again while a copy writes it
                self._wait(started[1])

    def _start(self, chunk: Sequence[torch.Tensor] | None) -> tuple[list[torch.Tensor], Any] | None:
        if chunk is None:
            return None
        if not self.offload:
            return list(chunk), None
        tensors = [torch.empty(one.shape, dtype=one.dtype, device=self._place) for one in chunk]
        return tensors, self._copy(tensors, chunk)

    def _copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Any:
        """Copies after all that the current stream has; returns the end of it, None if it has ended."""
        if self._device is None:
            for target, source in zip(targets, sources):
                target.copy_(source)
            return None
        if self._stream is None:
            self._stream = self._device.Stream()
        before, after = self._device.Event(), self._device.Event()
        before.record(self._device.current_stream())
        with self._device.stream(self._stream):
            self._stream.wait_event(before)
            for target, source in zip(targets, sources):
                target.copy_(source, non_blocking=True)
            after.record(self._stream)
        return after

    def _wait(self, event: Any) -> None:
        if event is not None:
            self._device.current_stream().wait_event(event)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
