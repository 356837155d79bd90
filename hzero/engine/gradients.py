"""Gradients of one engine: reduced inside their scope every micro-step, across the outer tiers once per step."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from hzero.codecs.formats import chunk_numel, owned_numel
from hzero.comm import Bucket, Chain, Collectives, in_buckets
from hzero.deepspeed.refusals import ZeroParameter
from hzero.engine.accumulators import Accumulators
from hzero.engine.routes import Route, Routes
from hzero.plan.program import IN_FLIGHT

logger = logging.getLogger("hzero")

#: Takes parameters and their flat shards, cut to the elements that exist (possibly none).
Deliver: TypeAlias = Callable[[list[ZeroParameter], list[torch.Tensor]], None]


class Gradients:
    """Reduces gradients tier by tier and, where their scope is smaller than the world, accumulates partial sums.

    `micro` submits the reduction of a bucket and does not wait for it. Its partial sums are added to the gradient
    accumulators, ``[rows * chunk]`` per parameter in hop order, where ``rows`` is the world size divided by the size of the
    gradients' scope; into float32 accumulators the last hop adds them as it decodes them. Over a single device no hop is
    made, and whole gradients are added up as they are. In the last micro-step of a window they go on across the outer tiers
    at once, while backward runs; a window of one micro-step keeps no accumulator. `boundary` sends what still waits, and
    delivers their shards together. After an error the window is given up: what is left of it is an error too, until `clear`.

    Args:
        collectives: The stage's tiered collectives.
        routes: How each parameter travels.
        bucket_numel: Max elements of the parameters that share one boundary message.

    Attributes:
        bucket_numel: The same; may be set later.
        reductions: Seeds of stochastic rounding that were made so far; the next ones count on.
        complete: Ids of the parameters whose gradient the last micro-step of the current window has delivered.
    """

    def __init__(self, collectives: Collectives, routes: Routes, bucket_numel: int) -> None:
        self._collectives = collectives
        self._plan = collectives.plan
        self._routes = routes
        # Each holds its message twice; a bucket is one chain for each route.
        self._most = IN_FLIGHT * len(routes.all)
        self.bucket_numel = bucket_numel
        dtype = torch.bfloat16 if self._plan.accumulator_bytes == 2 else torch.float32
        self._accumulators = Accumulators(dtype, collectives.used)
        self._waiting: dict[int, ZeroParameter] = {}
        self._arrived: set[int] = set()
        self.complete: set[int] = set()
        self._reducing: deque[tuple[Chain[Any], Callable[[list[torch.Tensor]], None] | None]] = deque()
        self._error: BaseException | None = None
        self._crossing: list[tuple[list[ZeroParameter], torch.dtype, Chain[list[torch.Tensor]]]] = []
        self.reductions = 0
        self._peak_bytes = 0

    def accumulators(self) -> list[torch.Tensor]:
        """The sums that wait now, as they are kept."""
        return self._accumulators.tensors()

    @property
    def waiting(self) -> bool:
        """Whether a boundary is still to come: for partial sums, for reductions under way, or to tell of an error."""
        return bool(self._waiting or self._reducing or self._error)

    def holds(self, param: ZeroParameter) -> bool:
        """Whether this parameter's gradient of the current accumulation window waits for the boundary."""
        return param.ds_id in self._waiting

    def arrived(self, param: ZeroParameter) -> bool:
        """Whether DeepSpeed has received a gradient of this parameter in the current window."""
        return param.ds_id in self._arrived

    def arrive(self, params: Sequence[ZeroParameter]) -> None:
        """Notes that DeepSpeed has received gradients of ``params``."""
        self._arrived.update(param.ds_id for param in params)

    def micro(
        self, params: Sequence[ZeroParameter], dtype: torch.dtype, scale: float, *, last: bool, deliver: Deliver
    ) -> None:
        """Submits the reduction of whole gradients over the gradients' scope.

        Args:
            params: Parameters with ``grad`` set, sorted by id, the same on all ranks. Their gradients are taken: on
                return they have been read, or on a device will have been before the current stream goes on.
            dtype: Communication type.
            scale: Loss scale of these gradients.
            last: Whether no other micro-step of this window follows.
            deliver: Takes this rank's shards where gradients are sharded over the world.
        """
        self._check()
        with self.all_or_nothing():
            for route, alike in self._routes.alike(params):
                self._micro(route, alike, dtype, scale, last=last, deliver=deliver)
            if last and not self._accumulators.bytes:  # a window of one micro-step plans no memory for all of its sums
                self._limit_crossings()

    def _micro(
        self,
        route: Route,
        params: list[ZeroParameter],
        dtype: torch.dtype,
        scale: float,
        *,
        last: bool,
        deliver: Deliver,
    ) -> None:
        """`micro` of parameters of one route."""
        if not route.micro.steps and self._plan.accumulates:
            self._accumulate_whole(route, params, dtype, scale, last)
            return
        flat = []
        for param in params:
            # Without a hop nothing else copies it from DeepSpeed's bucket, which the next gradients overwrite.
            grad = self._collectives.used(param.grad).to(dtype, copy=not route.micro.steps)
            flat.append(grad.reshape(-1))
            param.grad = None
        if self._divides_first(route, dtype):
            torch._foreach_div_(flat, self._plan.grid.world_size)
        if self._plan.accumulates:
            self._waiting.update((param.ds_id, param) for param in params)
            # Taken here: when sums arrive depends on the wires, and two runs must round alike.
            seed = self._next_seed() if last or self._accumulators.dtype != torch.float32 else 0
            then: Callable[[list[torch.Tensor]], Any] = partial(self._reduced, params, dtype, scale, last, seed)
        else:
            then = partial(self._cut, params, dtype)
        chain = self._collectives.run(
            route.micro,
            self._bucket(params, dtype),
            lambda: flat,
            then,
            seed=self._next_seed(),
            scale=scale,
            into=partial(self._accumulators.to_add_to, [param.ds_id for param in params]),
        )
        chain.wait_read()
        self._reducing.append((chain, None if self._plan.accumulates else partial(deliver, params)))
        while len(self._reducing) > self._most:
            self._finish_first()

    def _accumulate_whole(
        self, route: Route, params: list[ZeroParameter], dtype: torch.dtype, scale: float, last: bool
    ) -> None:
        """`micro` where the gradients' scope is one device: no hop, and whole gradients are added where they lie.

        Those of a window's only micro-step cross as they are.
        """
        flat = [self._collectives.used(param.grad).to(dtype).reshape(-1) for param in params]
        for param in params:
            param.grad = None
        if self._divides_first(route, dtype):
            torch._foreach_div_(flat, self._plan.grid.world_size)
        self._waiting.update((param.ds_id, param) for param in params)
        # Without a hop nothing copies them from DeepSpeed's bucket, which the next gradients overwrite.
        if last and route.boundary.steps and not any(param.ds_id in self._accumulators for param in params):
            self._submit_crossing(params, dtype, scale, self._next_seed(), flat).wait_read()
            self._limit_crossings()
            return
        # The first of a window is kept, so it must be a copy.
        parts = [
            grad if param.ds_id in self._accumulators else grad.to(torch.float32, copy=True)
            for param, grad in zip(params, flat)
        ]
        self._reduced(params, dtype, scale, last, self._next_seed(), parts)
        if last:
            self._limit_crossings()

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Inside, an error gives up the window: a step with some of its gradients would be wrong and look right."""
        try:
            yield
        except BaseException as error:
            self._error = error
            self._drop()
            raise

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError(
                "hzero: gradients of this accumulation window are lost by an error, and a step with the others would be wrong; "
                f"begin a new window with engine.optimizer.zero_grad(). The error: {self._error}"
            ) from self._error

    def settle(self) -> None:
        """Waits for the reductions of the micro-steps so far.

        Raises:
            RuntimeError: The window is given up.
        """
        self._check()
        with self.all_or_nothing():
            while self._reducing:
                self._finish_first()

    def _finish_first(self) -> None:
        chain, deliver = self._reducing.popleft()
        shards = chain.wait()
        if deliver is not None:  # here and not by the chain, which may be moved on at any time
            deliver(shards)

    def _divides_first(self, route: Route, dtype: torch.dtype) -> bool:
        """Whether gradients become parts of an average before they are summed, and not the shards that sums leave.

        Shards are fewer. But a sum on the wire may overflow in float16, and rounds otherwise than in ZeRO-3 if it is
        divided afterwards by what is no power of two. Sums of decoded messages are float32.
        """
        return route.sums_travel and (dtype == torch.float16 or self._plan.grid.world_size.bit_count() > 1)

    def _reduced(
        self,
        params: list[ZeroParameter],
        dtype: torch.dtype,
        scale: float,
        last: bool,
        seed: int,
        sums: list[torch.Tensor],
    ) -> None:
        """Adds partial sums to the accumulators, unless the last hop has; in the last micro-step they cross at once.

        The first of a window becomes the accumulator: nobody else may keep it.
        """
        keys = [param.ds_id for param in params]
        if last:  # accumulators are freed as soon as they are encoded
            self._submit_crossing(params, dtype, scale, seed, self._accumulators.take(keys, sums))
        else:
            self._accumulators.add(keys, sums, seed)
            self._peak_bytes = max(self._peak_bytes, self._accumulators.bytes)

    def _submit_crossing(
        self, params: list[ZeroParameter], dtype: torch.dtype, scale: float, seed: int, sums: list[torch.Tensor]
    ) -> Chain[list[torch.Tensor]]:
        route = self._routes.of(params[0])
        chain: Chain[list[torch.Tensor]] = self._collectives.run(
            route.boundary, self._bucket(params, dtype), lambda: sums, lambda shards: shards, seed=seed, scale=scale
        )
        self._crossing.append((params, dtype, chain))
        return chain

    def _limit_crossings(self) -> None:
        """Waits until few crossings are in flight: each holds its message twice."""
        if len(self._crossing) > self._most:
            self._crossing[-self._most - 1][2].wait()

    def boundary(self, dtype: torch.dtype, scale: float, deliver: Deliver) -> None:
        """Sends the partial sums that still wait over the outer tiers and delivers this rank's shards.

        Args:
            dtype: Communication type of hops with codec ``none``.
            scale: Loss scale of these gradients.
            deliver: Takes the shards, bucket by bucket, once all have arrived.
        """
        self.settle()
        with self.all_or_nothing():
            rest = [self._waiting[key] for key in self._accumulators.in_order()]
            for _, alike in self._routes.alike(rest):
                for params in in_buckets(((param, param.ds_numel) for param in alike), self.bucket_numel):
                    sums = self._accumulators.take([param.ds_id for param in params])
                    self._submit_crossing(params, dtype, scale, self._next_seed(), sums)
                    self._limit_crossings()
            crossed = [(params, kind, chain.wait()) for params, kind, chain in self._crossing]
            self._crossing.clear()
            self._waiting.clear()
            for params, kind, shards in crossed:
                deliver(params, self._cut(params, kind, shards))

    def _cut(
        self, params: Sequence[ZeroParameter], dtype: torch.dtype, shards: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """This rank's shards of the average, without the padding beyond the parameters' ends, as DeepSpeed expects them."""
        if not self._divides_first(self._routes.of(params[0]), dtype):
            torch._foreach_div_(list(shards), self._plan.grid.world_size)
        rank = self._plan.rank
        return [shard[: owned_numel(param.ds_numel, shard.numel(), rank)] for param, shard in zip(params, shards)]

    def clear(self) -> None:
        """Starts a new window: nothing waits, nothing has arrived, and pending residuals are discarded."""
        self._drop()
        self._error = None

    def _drop(self) -> None:
        reducing: list[Chain[Any]] = [chain for chain, _ in self._reducing]
        for chains in (reducing, (chain for *_, chain in self._crossing)):  # the former may add to the latter
            for chain in chains:
                try:
                    chain.wait()
                except Exception as error:
                    if self._error is None:  # else whoever waited has been told of the first
                        logger.warning("hzero: gradients that nobody waits for any more: %s", error)
        self._reducing.clear()
        self._crossing.clear()
        self._waiting.clear()
        self._arrived.clear()
        self.complete.clear()
        self._accumulators.clear()
        if self._collectives.feedback is not None:
            self._collectives.feedback.discard()

    def commit(self) -> None:
        """The step with this window's gradients is done: its residuals are kept."""
        if self._collectives.feedback is not None:
            self._collectives.feedback.commit()

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the accumulators at a boundary on this rank, in bytes."""
        return self._peak_bytes

    def _next_seed(self) -> int:
        # Ranks round with different seeds, so that the errors of a sum do not add up.
        self.reductions += 1
        return (self.reductions * 1_000_003 + self._plan.rank) & 0x7FFFFFFF

    def _bucket(self, params: Sequence[ZeroParameter], dtype: torch.dtype) -> Bucket:
        return Bucket(
            keys=tuple(param.ds_id for param in params),
            chunks=tuple(chunk_numel(param.ds_numel, self._plan.grid.world_size) for param in params),
            dtype=dtype,
            role="gradients",
        )
