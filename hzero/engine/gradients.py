"""Gradients: reduced inside their scope in every micro-batch, accumulated there, and sent over the outer tiers once per step."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from hzero.comm import Chain, Runtime, in_buckets
from hzero.comm.runtime import BoundProgram, seed_of
from hzero.engine.parameter import READY, Parameter, alike, bucket_of
from hzero.program.program import IN_FLIGHT

logger = logging.getLogger("hzero")

#: Receives parameters and their flat shards, cut to the existing elements (possibly none).
Deliver: TypeAlias = Callable[[list[Parameter], list[torch.Tensor]], None]


class _Layout(NamedTuple):
    """Gradients that travel together, and the programs that carry them. Made once.

    Attributes:
        params: Parameters of one route.
        micro: Reduces over the gradients' scope.
        boundary: Reduces over the outer tiers except the outermost.
        outermost: Reduces over the outermost tier.
        part_bytes: Bytes for each peer on the outermost tier; 0 if the program does not cross it.
        divides_first: Whether gradients are divided before the sum, instead of the shards after it.
    """

    params: list[Parameter]
    micro: BoundProgram
    boundary: BoundProgram
    outermost: BoundProgram
    part_bytes: int
    divides_first: bool

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of the parameters."""
        return self.micro.bucket.keys


class _Sums(NamedTuple):
    """Sums of one layout, ready for the outermost tier.

    Attributes:
        layout: The layout.
        chain: Computes the sums; None if they are there.
        ready: The sums, if they are there.
    """

    layout: _Layout
    chain: Chain[list[torch.Tensor]] | None
    ready: list[torch.Tensor]

    def take(self) -> list[torch.Tensor]:
        """Returns the sums, once."""
        return self.ready if self.chain is None else self.chain.take()


def _layouts_of(
    runtime: Runtime, dtype: torch.dtype, params: tuple[Parameter, ...], _: tuple[int, ...], divisor: int
) -> list[_Layout]:
    """Returns one layout for each route."""
    # Dividing shards is cheaper than dividing gradients. But float16 sums may overflow on the wire. And division by a number
    # that is no power of two rounds differently after the sum than in ZeRO-3, which divides first. Sums of decoded messages are
    # float32, so this concerns only sums on the wire.
    divides_later = divisor.bit_count() == 1 and dtype != torch.float16
    layouts: list[_Layout] = []
    for same in alike(params):
        route, bucket = same[0].route, bucket_of(same, dtype, "gradients")
        programs = route.programs
        part = sum(crossing.part_bytes(bucket.chunks, dtype.itemsize) for crossing in programs.outermost.crossings)
        every = programs.micro, programs.boundary, programs.outermost
        micro, boundary, outermost = (runtime.bind(one, bucket) for one in every)
        divides = route.sums_travel and not divides_later
        layouts.append(_Layout(same, micro, boundary, outermost, part, divides))
    return layouts


class Gradients:
    """Reduces gradients tier by tier and, if their scope is smaller than the world, accumulates partial sums.

    A window calls the methods in this order:

    1. `accumulate`, in every micro-batch: reduces a bucket over the gradients' scope, without waiting. Its partial sums are
       added to float32 gradient accumulation buffers, ``[rows * chunk]`` per parameter in hop order, where ``rows`` is the
       world size divided by the scope size. If the scope is one device, there is no hop, and whole gradients are added. If it
       is the world, shards of the average are delivered. In the last micro-batch, sums continue over the outer tiers
       immediately, overlapped with backward. A window of one micro-batch keeps no gradient accumulation buffer. Before the
       outermost tier, the sums of several buckets are collected until their parts reach ``boundary_message_bytes``, since parts
       are smallest there.
    2. `finish`, at the boundary: sends the partial sums that the last micro-batch has not sent, and delivers this rank's shards
       of the average.
    3. `clear`, after the step.

    After an error the window is lost: `accumulate`, `wait_reduced` and `finish` raise until `clear`.

    Args:
        runtime: The engine's runtime.
        bucket_numel: Maximum number of elements in one boundary message.
        routes: Number of routes of the parameters.

    Attributes:
        bucket_numel: The same; may be changed later.
        divisor: Divisor of the sums. The world size gives averages; a front end may set another number.
        reductions: Number of stochastic-rounding seeds made so far.
        peak_bytes: Peak memory of the gradient accumulation buffers on this rank.
    """

    def __init__(self, runtime: Runtime, bucket_numel: int, routes: int = 1) -> None:
        self._runtime, self._plan = runtime, runtime.plan
        self._most = IN_FLIGHT * routes  # max crossings; a bucket has one for each route
        self.bucket_numel, self.divisor = bucket_numel, self._plan.grid.world_size
        self._layouts = functools.lru_cache(READY)(partial(_layouts_of, runtime))
        self._sums: dict[int, torch.Tensor] = {}  # float32 gradient accumulation buffers by key
        self._bytes = self.peak_bytes = 0  # of the gradient accumulation buffers
        self._lock = threading.Lock()  # for these two: lanes of several routes add sums at the same time
        self._waiting: dict[int, Parameter] = {}
        self._reducing: deque[tuple[Chain[Any], Callable[[list[torch.Tensor]], None] | None, int]] = deque()
        self._buckets = 0  # reductions started so far; numbers each one
        self._inner: list[Chain[list[torch.Tensor]]] = []  # over the outer tiers except the outermost
        self._collected: dict[tuple[int, torch.dtype], list[_Sums]] = {}  # for the outermost tier, by route and dtype
        self._crossing: list[tuple[_Layout, Chain[list[torch.Tensor]]]] = []
        self._accumulates = False  # whether an earlier micro-batch of this window has added sums
        self._error: BaseException | None = None
        self.reductions = 0

    @property
    def waiting(self) -> bool:
        """Whether a boundary is due: for partial sums, for reductions in flight, or to raise an error."""
        return bool(self._waiting or self._reducing or self._error)

    def holds(self, key: int) -> bool:
        """Whether a parameter's gradient of the current window waits for the boundary."""
        return key in self._waiting

    # ---- every micro-batch ----------------------------------------------------------------------------------------

    def accumulate(
        self,
        params: Sequence[Parameter],
        gradients: Sequence[torch.Tensor],
        dtype: torch.dtype,
        scale: float,
        *,
        last: bool,
        deliver: Deliver,
    ) -> None:
        """Submits the reduction of whole gradients over the gradients' scope.

        Args:
            params: Parameters in the order of keys, the same on all ranks.
            gradients: One gradient per parameter. On return they have been read. On a device, the current stream waits for the
                read.
            dtype: Communication dtype.
            scale: Loss scale of these gradients.
            last: Whether this is the last micro-batch of the window.
            deliver: Receives this rank's shards if gradients are sharded over the world.
        """
        self._check()
        gradient_of = dict(zip((param.key for param in params), gradients))
        self._buckets += 1
        with self.all_or_nothing():
            for layout in self._layouts_now(params, dtype):
                self._accumulate(layout, [gradient_of[key] for key in layout.keys], scale, last, deliver)
            self._accumulates |= not last
            # A window of one micro-batch has no gradient accumulation buffers. Without a limit, all its sums would be in memory
            # at once.
            if last and not self._accumulates:
                self._limit_crossings()

    def _layouts_now(self, params: Sequence[Parameter], dtype: torch.dtype) -> list[_Layout]:
        """Returns the layouts of gradients that arrive together; made once for parameters of the same sizes."""
        return self._layouts(dtype, tuple(params), tuple([param.numel for param in params]), self.divisor)

    def _accumulate(
        self, layout: _Layout, gradients: list[torch.Tensor], scale: float, last: bool, deliver: Deliver
    ) -> None:
        """Runs `accumulate` for one layout."""
        accumulates, travels = layout.params[0].route.plan.accumulates, bool(layout.micro.hops)
        # Without a hop, only this copy leaves the front end's bucket, which the next gradients overwrite.
        copy = not travels and not accumulates
        flat = [self._runtime.lanes.used(one).to(layout.micro.bucket.dtype, copy=copy).reshape(-1) for one in gradients]
        if layout.divides_first:
            self._divide(flat)
        then: Callable[[list[torch.Tensor]], Any] = partial(self._average, layout)
        if accumulates:
            self._waiting.update(zip(layout.keys, layout.params))
            then = partial(self._add, layout.keys, last, not travels)
        into = partial(self._to_add_to, layout.keys)
        chain = layout.micro.run(lambda: flat, then, seed=self._next_seed(), scale=scale, into=into)
        chain.wait_read()
        if not travels:
            chain.wait()
        if last and accumulates:
            # Submitted here, not by the lane that computes the sums. All ranks need the same order relative to the gathers of
            # weights.
            self._submit_crossing(_Sums(layout, chain, []), scale)
        self._reducing.append((chain, None if accumulates else partial(deliver, layout.params), self._buckets))
        while self._reducing[0][2] <= self._buckets - IN_FLIGHT:  # each one uses two buffers of the message's size
            self._finish_first()

    def _add(self, keys: Sequence[int], last: bool, copy: bool, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Adds partial sums to the buffers, unless the last hop already has. Returns the totals in the last micro-batch.

        The first partial sum of a window becomes the gradient accumulation buffer. ``copy`` is True if another owner may keep
        that tensor.
        """
        kept = self._take(keys)
        for index, (total, part) in enumerate(zip(kept, parts)):
            if total is None:
                kept[index] = part.to(torch.float32, copy=copy)
            elif total is not part:  # else the hop has added to it (`_to_add_to`)
                self._runtime.lanes.used(total).add_(part)
        totals = [total for total in kept if total is not None]
        if last:  # each gradient accumulation buffer is freed once it is encoded
            return totals
        self._sums.update(zip(keys, totals))
        with self._lock:
            self._bytes += sum(total.nbytes for total in totals)
            self.peak_bytes = max(self.peak_bytes, self._bytes)
        return []

    def _to_add_to(self, keys: Sequence[int]) -> list[torch.Tensor] | None:
        """Returns the gradient accumulation buffers for a hop that decodes and adds in one pass; None if one is missing."""
        kept = [self._sums[key] for key in keys if key in self._sums]
        return kept if len(kept) == len(keys) else None

    def _take(self, keys: Iterable[int]) -> list[torch.Tensor | None]:
        """Removes and returns gradient accumulation buffers; None for a missing one."""
        totals = [self._sums.pop(key, None) for key in keys]
        with self._lock:
            self._bytes -= sum(total.nbytes for total in totals if total is not None)
        return totals

    def wait_reduced(self) -> None:
        """Waits for the reductions of the micro-batches so far.

        Raises:
            RuntimeError: The window is lost.
        """
        self._check()
        with self.all_or_nothing():
            while self._reducing:
                self._finish_first()

    def _finish_first(self) -> None:
        chain, deliver, _ = self._reducing.popleft()
        shards = chain.wait()
        if deliver is not None:  # not in the chain, which may run on another thread
            deliver(shards)

    # ---- the boundary --------------------------------------------------------------------------------------------

    def finish(self, dtype: torch.dtype, scale: float, deliver: Deliver) -> None:
        """Sends the remaining partial sums over the outer tiers, and delivers this rank's shards.

        The last micro-batch has already sent most sums. The others belong to parameters without a gradient in it.

        Args:
            dtype: Communication dtype of hops with codec ``none``.
            scale: Loss scale of these gradients.
            deliver: Receives the shards, bucket by bucket, after all have arrived.
        """
        self.wait_reduced()
        with self.all_or_nothing():
            rest = [self._waiting[key] for key in sorted(self._sums)]
            for same in alike(rest):
                for params in in_buckets(((param, param.numel) for param in same), self.bucket_numel):
                    (layout,) = self._layouts_now(params, dtype)
                    sums = [total for total in self._take(layout.keys) if total is not None]
                    self._submit_crossing(_Sums(layout, None, sums), scale)
                    self._limit_crossings()
            for kind in list(self._collected):
                self._submit_outermost(kind, scale)
            crossed = [(layout, chain.wait()) for layout, chain in self._crossing]
            self._reset()
            for layout, shards in crossed:
                deliver(layout.params, self._average(layout, shards))

    def _submit_crossing(self, sums: _Sums, scale: float) -> None:
        layout = sums.layout
        if layout.boundary.hops:
            chain = self._cross(layout.boundary, [sums], scale)
            self._inner.append(chain)
            sums = _Sums(layout, chain, [])
        kind = layout.params[0].route.number, layout.micro.bucket.dtype
        if any(not set(one.layout.keys).isdisjoint(layout.keys) for one in self._collected.get(kind, ())):
            self._submit_outermost(kind, scale)  # a second gradient in one backward: a message has each parameter once
        collected = self._collected.setdefault(kind, [])
        collected.append(sums)
        if sum(one.layout.part_bytes for one in collected) >= layout.params[0].route.plan.boundary_message_bytes:
            self._submit_outermost(kind, scale)

    def _submit_outermost(self, kind: tuple[int, torch.dtype], scale: float) -> None:
        """Sends all collected sums in one message."""
        collected = self._collected.pop(kind)
        params = [param for sums in collected for param in sums.layout.params]
        (layout,) = self._layouts_now(params, kind[1])
        self._crossing.append((layout, self._cross(layout.outermost, collected, scale)))

    def _cross(self, program: BoundProgram, collected: list[_Sums], scale: float) -> Chain[list[torch.Tensor]]:
        return program.run(
            lambda *_: [total for sums in collected for total in sums.take()],
            seed=self._next_seed(),
            scale=scale,
            after=[sums.chain for sums in collected if sums.chain is not None],
        )

    def _limit_crossings(self) -> None:
        """Waits until few crossings are in flight, since each one uses two buffers of its message's size."""
        for chains in (self._inner, [chain for _, chain in self._crossing]):
            if len(chains) > self._most:
                chains[-self._most - 1].wait()

    def _average(self, layout: _Layout, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns this rank's shards of the average, without the padding after the parameters' ends."""
        if not layout.divides_first:
            self._divide(shards)
        return [shard[:numel] for shard, numel in zip(shards, layout.micro.bucket.owned)]

    def _divide(self, tensors: Sequence[torch.Tensor]) -> None:
        if self.divisor != 1:
            torch._foreach_div_(list(tensors), self.divisor)

    # ---- the end of a window -------------------------------------------------------------------------------------

    def clear(self, *, done: bool = False) -> None:
        """Starts a new window: discards sums, the error and, unless the step was ``done``, the residuals that it changed."""
        if done:
            self._runtime.feedback.commit()
        self._drop()
        self._error = None

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Discards the window if the body raises: a step with some of its gradients would be wrong without a sign of it."""
        try:
            yield
        except BaseException as error:
            self._error = error
            self._drop()
            raise

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(
                "hzero: gradients of this accumulation window are lost by an error, so a step would be wrong; "
                f"begin a new window with the optimizer's zero_grad(). The error: {self._error}"
            ) from self._error

    def _drop(self) -> None:
        chains: list[Chain[Any]] = [chain for chain, *_ in self._reducing]
        chains += [*self._inner, *(chain for _, chain in self._crossing)]
        for chain in chains:
            try:
                chain.wait()
            except Exception as error:
                if self._error is None:  # else the caller already has the first error
                    logger.warning("hzero: a reduction of discarded gradients failed: %s", error)
        self._reset()
        self._runtime.feedback.discard()

    def _reset(self) -> None:
        self._reducing.clear()
        self._crossing.clear()
        self._inner.clear()
        self._collected.clear()
        self._waiting.clear()
        self._sums.clear()
        self._accumulates, self._bytes = False, 0

    def _next_seed(self) -> int:
        self.reductions += 1
        return seed_of(self.reductions, self._plan.rank)
