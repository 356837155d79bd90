"""Gradients of one engine: reduced inside their scope every micro-step, across the rest once a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from hzero.collectives import Bucket, Chain, TieredCollectives, in_buckets, pipelined
from hzero.sharding.records import chunk_numel
from hzero.zero.block import ZeroParameter


class Gradients:
    """Reduces gradients tier by tier and, where their scope is smaller than the world, accumulates partial sums.

    The accumulators are float32, ``[rows * chunk]`` a parameter in hop order, ``rows`` being the world over the
    gradients' scope. They are made and filled by `accumulate` every micro-step, and sent and freed by `boundary` once a
    step.

    Args:
        collectives: The stage's tiered collectives.

    Attributes:
        bucket_numel: Most elements of parameters that share one boundary message.
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
        self._most_held = 0

    @property
    def waiting(self) -> bool:
        """Whether gradients are held here that have not crossed the outer tiers."""
        return bool(self._waiting)

    def holds(self, param: ZeroParameter) -> bool:
        """Whether this parameter's gradient of the current window waits for the boundary."""
        return param.ds_id in self._waiting

    def arrived(self, param: ZeroParameter) -> bool:
        """Whether DeepSpeed has been given a gradient of this parameter in the current window."""
        return param.ds_id in self._arrived

    def arrive(self, params: Sequence[ZeroParameter]) -> None:
        """Notes that DeepSpeed has been given gradients of ``params``."""
        self._arrived.update(param.ds_id for param in params)

    def micro(
        self, params: Sequence[ZeroParameter], dtype: torch.dtype, divisor: float, scale: float
    ) -> list[torch.Tensor]:
        """Averages whole gradients and reduces them over the gradients' scope.

        Args:
            params: Parameters with ``grad`` set, sorted by id, the same on all ranks. The gradients are consumed.
            dtype: Communication type.
            divisor: What every rank divides by before the sum, as stock ZeRO-3 does: the averaging world.
            scale: Loss scale of these gradients.

        Returns:
            One flat tensor a parameter, ``[rows * chunk]`` in hop order: partial sums where gradients stay inside the
            node, this rank's shard (padding included) where they are sharded over the world. Where their scope is one
            device there is no hop, and it is the averaged gradient itself, in shard order and without padding.
        """
        bucket = self._bucket(params, dtype)
        flat = [param.grad.to(dtype).reshape(-1).div_(divisor) for param in params]
        return self._collectives.reduce(
            self._micro_hops,
            bucket,
            flat,
            rows=self._plan.grid.world_size,
            whole=True,
            seed=self._next_seed(),
            scale=scale,
        ).wait()

    def accumulate(self, params: Sequence[ZeroParameter], partial_sums: Sequence[torch.Tensor]) -> None:
        """Adds partial sums to the accumulators. The first of a window becomes the accumulator: it must be the caller's own."""
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
        """Sends what waits over the outer tiers and delivers this rank's shards, bucket by bucket.

        Args:
            dtype: Communication type of hops with codec ``none``.
            scale: Loss scale of these gradients.
            deliver: Takes parameters and their flat shards, cut to the elements that exist (perhaps none).
        """
        held = sum(tensor.numel() * tensor.element_size() for tensor in self._accumulators.values())
        self._most_held = max(self._most_held, held)  # nothing has been freed yet
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
            whole=not self._micro_hops,
            seed=self._next_seed(),
            scale=scale,
        )

    def cut(self, params: Sequence[ZeroParameter], shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's shards without what lies beyond the parameters' ends, as DeepSpeed expects them."""
        cut = []
        for param, shard in zip(params, shards):
            start = self._plan.rank * shard.numel()
            cut.append(shard[: min(max(param.ds_numel - start, 0), shard.numel())])
        return cut

    def clear(self) -> None:
        """Starts a new window: nothing waits, nothing has arrived, and residuals not committed are forgotten."""
        self._waiting.clear()
        self._arrived.clear()
        self._accumulators.clear()
        if self._collectives.feedback is not None:
            self._collectives.feedback.discard()

    def commit(self) -> None:
        """The step with this window's gradients is done: residuals that they left count."""
        if self._collectives.feedback is not None:
            self._collectives.feedback.commit()

    def bytes(self) -> int:
        """Most memory that the accumulators have taken on this rank at a boundary, in bytes."""
        return self._most_held

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
