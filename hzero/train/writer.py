"""The thread that writes what a rank saves, while the rank trains on."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Writer:
    """Does tasks one after the other on a thread of its own, which ends with the process, whatever it waits for.

    A thread and no process: writing, hashing and bringing onto the disk leave Python's lock alone, and nothing has to be copied
    to another process, nor forked from one that has threads and a device.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="hzero writer", daemon=True).start()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Does a task after those before it; the result has its value or its error."""
        result: Future[T] = Future()
        self._tasks.put((task, result))
        return result

    def _work(self) -> None:
        while True:
            task, result = self._tasks.get()
            try:
                result.set_result(task())
            except BaseException as error:
                result.set_exception(error)
            del task, result  # a task may hold a copy of all states


class HostCopy:
    """Copies states to memory of the host, so that training may change them.

    Attributes:
        bytes: Of the tensors copied.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._devices = False

    def of(self, value: Any) -> Any:
        """A copy of nested dictionaries and lists; tensors, also views of large ones, become host tensors of their own.

        Copies from a device are under way until `wait`.
        """
        if torch.is_tensor(value):
            value = value.detach()
            self.bytes += value.nbytes
            if value.device.type == "cpu":
                return value.clone()
            self._devices = True
            return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
        if isinstance(value, dict):
            made = copy.copy(value)
            for key, item in value.items():
                made[key] = self.of(item)
            return made
        if type(value) in (list, tuple):
            return type(value)(self.of(item) for item in value)
        return copy.deepcopy(value)

    def wait(self) -> None:
        """Waits for copies from a device."""
        if self._devices:
            from deepspeed.accelerator import get_accelerator

            get_accelerator().synchronize()
