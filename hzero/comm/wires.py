"""Wires: what carries the messages of one group of ranks, and how torch.distributed does it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError  # the builtin one from Python 3.11 on
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from hzero.config import Tier

T = TypeVar("T")
#: The channel of a stage's lanes.
STAGE = "stage"
#: What waits in vain raise.
NoAnswer = TimeoutError
#: A communicator: the group of one tier, of the stage or for one use of a `Communicator`. Messages from rank to rank have one
#: more part, their direction.
Lane: TypeAlias = tuple[str, Tier] | tuple[str, Tier, str]
#: Functions of torch.distributed: torch 2.13 has other names, and warns of these.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
_STOCK = getattr(dist, _REDUCE_SCATTER)


def in_time(call: Callable[[], T], within_s: float) -> T:
    """The result of a call of a library that may never return, made in a thread of its own.

    Raises:
        NoAnswer: It has not returned in time.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name="hzero call", daemon=True).start()
    return answer.result(within_s)


class Work(Protocol):
    """Messages under way."""

    def wait(self) -> Any:
        """Waits for them. Raises RuntimeError where one failed or the group's timeout passed."""


class TorchWires:
    """A process group of torch.distributed, on which nobody else sends; k is the number of its ranks, i the place of one.

    Buffers are contiguous and belong to the work until it has ended.

    Args:
        group: The group.
        timeout: Longest wait for a message from rank to rank; collectives have the group's own.
        collective: Starts a collective in its order on a device, see `hzero.comm.lanes.DeviceStreams.collective`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout: timedelta,
        collective: Callable[[Callable[..., Any]], Work] = lambda start: start(async_op=True),
    ) -> None:
        self._group, self._timeout, self._collective = group, timeout, collective

    def _start(self, function: Callable[..., Any], *arguments: Any) -> Work:
        return self._collective(partial(function, *arguments, group=self._group))

    @property
    def own_sums(self) -> bool:
        """Whether `reduce_scatter` is used, not an all-to-all: gloo's sends twice the bytes and never says that it has ended."""
        return dist.get_backend(self._group) != "gloo" or getattr(dist, _REDUCE_SCATTER) is not _STOCK

    def all_gather(self, output: torch.Tensor, message: torch.Tensor) -> Work:
        """uint8 ``[b]`` of every rank to ``[k * b]``."""
        return self._start(getattr(dist, _ALL_GATHER), output, message)

    def all_to_all(self, output: torch.Tensor, message: torch.Tensor) -> Work:
        """Part i of uint8 ``[k * b]`` goes to rank i; part i of the output comes from it."""
        return self._start(dist.all_to_all_single, output, message)

    def exchange(self, output: torch.Tensor, message: torch.Tensor, source: int, target: int) -> Work:
        """The whole message goes to one rank, and as many bytes come from one; all ranks exchange at the same time.

        Parts without bytes are not sent on NCCL and RCCL; on gloo they are empty messages.
        """
        ranks = dist.get_world_size(self._group)
        sends, receives = [0] * ranks, [0] * ranks
        sends[target] = receives[source] = message.numel()
        return self._start(dist.all_to_all_single, output, message, receives, sends)

    def broadcast(self, message: torch.Tensor, root: int) -> Work:
        """uint8 ``[b]`` of one rank into all others'."""
        return self._start(dist.broadcast, message, self._rank(root))

    def reduce_scatter(self, output: torch.Tensor, elements: torch.Tensor) -> Work:
        """Sums of floating ``[k * n]`` to ``[n]``."""
        return self._start(getattr(dist, _REDUCE_SCATTER), output, elements)

    def message(self, message: torch.Tensor, peer: int, *, sends: bool) -> Any:
        """A message to one rank or from it. Those of one direction between two ranks arrive in order."""
        work: Any = (dist.isend if sends else dist.irecv)(message, self._rank(peer), group=self._group)
        # A send or receive of gloo takes its timeout when it is waited for.
        return SimpleNamespace(wait=partial(work.wait, self._timeout)) if message.is_cpu else work

    def _rank(self, place: int) -> int:
        return dist.get_global_rank(self._group, place)
