"""Gradients of one engine: reduced inside their scope every micro-step, across the outer tiers once per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from hzero.collectives import Bucket, Chain, TieredCollectives, in_buckets, pipelined
from hzero.sharding.records import chunk_numel
from hzero.zero.block import ZeroParameter


class Gradients:
    """Reduces gradients tier by tier and, where their scope is smaller than the world, accumulates partial sums.

    The gradient accumulators are float32, ``[rows * chunk]`` per parameter in hop order, where ``rows`` is the world
    size divided by the size of the gradients' scope. `accumulate` fills them every micro-step; `boundary` sends and
    frees them once per step.

    Args:
        collectives: The stage's tiered collectives.
        bucket_numel: Max elements of the parameters that share one boundary message.

    Attributes:
        bucket_numel: The same; may be set later.
    """

    def __init__(self, collectives: TieredCollectives, bucket_numel: int) -> None:
        self._collectives = collectives
        self._plan = collectives.plan
        self._micro_hops = self._plan.micro_hops()
        self._boundary_hops = self._plan.boundary_hops()
        self.bucket_numel = bucket_numel
        self._accumulators: dict[int, torch.Tensor] = {}
        self._waiting: dict[int, ZeroParameter] = {}
        self._arrived: set[int] = set()
        self._reductions = 0
        self._peak_bytes = 0

    @property
    def waiting(self) -> bool:
        """Whether gradients wait here to cross the outer tiers."""
        return bool(self._waiting)

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
        self, params: Sequence[ZeroParameter], dtype: torch.dtype, divisor: float, scale: float
    ) -> list[torch.Tensor]:
        """Averages whole gradients and reduces them over the gradients' scope.

        Args:
            params: Parameters with ``grad`` set, sorted by id, the same on all ranks. The gradients are consumed.
            dtype: Communication type.
            divisor: Every rank divides by it before the sum, as in stock ZeRO-3: the size of the averaging world.
            scale: Loss scale of these gradients.

        Returns:
            One flat tensor per parameter, ``[rows * chunk]`` in hop order: partial sums where gradients stay inside
            their scope, this rank's shard (padding included) where they are sharded over the world. Where the scope is
            one device no hop is made, and the result is the averaged gradient itself, in shard order and unpadded.
        """
        bucket = self._bucket(params, dtype)
        flat = [param.grad.to(dtype).reshape(-1).div_(divisor) for param in params]
        return self._collectives.reduce(
            self._micro_hops,
            bucket,
            flat,
            rows=self._plan.grid.world_size,
            shard_order=True,
            seed=self._next_seed(),
            scale=scale,
        ).wait()

    def accumulate(self, params: Sequence[ZeroParameter], partial_sums: Sequence[torch.Tensor]) -> None:
        """Adds partial sums to the accumulators. The first of a window becomes the accumulator: nobody else may keep it."""
        for param, partial_sum in zip(params, partial_sums):
            if param.ds_id in self._waiting:
                self._accumulators[param.ds_id].add_(partial_sum)
            else:
                # Without a hop the partial sum is the gradient itself, in a bucket that the next one overwrites.
                self._accumulators[param.ds_id] = partial_sum.to(torch.float32, copy=not self._micro_hops)
                self._waiting[param.ds_id] = param

    def boundary(
        self,
        dtype: torch.dtype,
        scale: float,
        deliver: Callable[[list[ZeroParameter], list[torch.Tensor]], None],
    ) -> None:
        """Sends the waiting partial sums over the outer tiers and delivers this rank's shards, bucket by bucket.

        Args:
            dtype: Communication type of hops with codec ``none``.
            scale: Loss scale of these gradients.
            deliver: Takes parameters and their flat shards, cut to the elements that exist (possibly none).
        """
        held = sum(tensor.numel() * tensor.element_size() for tensor in self._accumulators.values())
        self._peak_bytes = max(self._peak_bytes, held)  # nothing has been freed yet
        waiting = [self._waiting[key] for key in sorted(self._waiting)]
        buckets = list(in_buckets(((param, param.ds_numel) for param in waiting), self.bucket_numel))
        chains = pipelined(partial(self._start_boundary, bucket, dtype, scale) for bucket in buckets)
        for params, shards in zip(buckets, chains):
            deliver(params, self.cut(params, shards))
            for param in params:
                del self._accumulators[param.ds_id]
        self._waiting.clear()

    def _start_boundary(
        self, params: Sequence[ZeroParameter], dtype: torch.dtype, scale: float
    ) -> Chain[list[torch.Tensor]]:
        return self._collectives.reduce(
            self._boundary_hops,
            self._bucket(params, dtype),
            [self._accumulators[param.ds_id] for param in params],
            rows=self._plan.gradient_rows,
            shard_order=not self._micro_hops,
            seed=self._next_seed(),
            scale=scale,
        )

    def cut(self, params: Sequence[ZeroParameter], shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's shards without the padding beyond the parameters' ends, as DeepSpeed expects them."""
        cut = []
        for param, shard in zip(params, shards):
            start = self._plan.rank * shard.numel()
            cut.append(shard[: min(max(param.ds_numel - start, 0), shard.numel())])
        return cut

    def clear(self) -> None:
        """Starts a new window: nothing waits, nothing has arrived, and pending residuals are discarded."""
        self._waiting.clear()
        self._arrived.clear()
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
        self._reductions += 1
        return (self._reductions * 1_000_003 + self._plan.rank) & 0x7FFFFFFF

    def _bucket(self, params: Sequence[ZeroParameter], dtype: torch.dtype) -> Bucket:
        return Bucket(
            keys=tuple(param.ds_id for param in params),
            chunks=tuple(chunk_numel(param.ds_numel, self._plan.grid.world_size) for param in params),
            dtype=dtype,
            role="gradients",
        )
