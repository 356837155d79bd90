"""The optimizer of a model with pipeline stages: ZeRO-1, whose gradients and weights cross tier by tier with codecs."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from hzero.comm import Chain
from hzero.deepspeed.pipeline_state import PipelineState
from hzero.deepspeed.versions import with_names

#: A hop in flight, and what is done with its result.
_Submitted = tuple[Chain[torch.Tensor], Callable[[torch.Tensor], Any]]


class HZeroStage1(DeepSpeedZeroOptimizer):
    """Stock ZeRO-1 but for its two collectives: each rank gets the sum of its own partition, and sends its new weights.

    Stock reduces whole gradients on all ranks, of which each then reads its partition. Here a bucket holds the same columns of
    all partitions, ``[data-parallel ranks, columns]``, whose reduce-scatter leaves each rank what it reads: half of the bytes,
    and one lossy way instead of two. Sums are float32 in the order of ranks, tier by tier.

    Attributes:
        hzero: Communicators and wire log; the engine sets it.
    """

    hzero: PipelineState
    ready_for_gradients: bool

    def setup_buckets(self) -> None:
        """Stock without its buffer: buckets are filled when gradients are complete."""
        if not self.ready_for_gradients:
            self.micro_step_id += 1
            self.ready_for_gradients = True

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Averages the gradients of all micro-batches; `averaged_gradients` then holds this rank's partition, float32."""
        _two_at_a_time(self._reductions())
        for index, size in enumerate(self.partition_size):
            start = self.hzero.gradients.plan.rank * int(size)
            flat = self.averaged_gradients[index].flat_partition
            self.hzero.keep_alike("gradients", [flat[a - start : b - start] for a, b in self._copied(index, start)])
        self._release_ipg_buffers()
        self._clear_param_grad_only()

    def _reductions(self) -> Iterator[_Submitted]:
        communicator, keys = self.hzero.gradients, itertools.count()
        for index, size in enumerate(self.partition_size):
            self.averaged_gradients[index] = self._build_compact_grad_partition_buffer(index)
            own = self.averaged_gradients[index].flat_partition
            for first, last in self._columns(index, self.reduce_bucket_size):
                bucket = own.new_zeros(communicator.plan.grid.world_size, last - first)
                for rank, row in enumerate(bucket):
                    self._fill(index, row, rank * int(size) + first)
                keep = functools.partial(_copy, own[first:last])
                yield communicator.reduce_scatter(bucket, "mean", key=next(keys), async_op=True), keep

    def _columns(self, index: int, elements: int) -> Iterator[tuple[int, int]]:
        """Parts of a group's partitions, of about so many elements over all of them."""
        size = int(self.partition_size[index])
        step = max(1, elements // self.hzero.gradients.plan.grid.world_size)
        return ((first, min(first + step, size)) for first in range(0, size, step))

    def _parts(self, index: int, start: int, size: int) -> Iterator[tuple[Any, int, int, int]]:
        """Parameters in elements ``start`` to ``start + size`` of a flat group: each with its offset, and its part's two ends."""
        params, offsets = self.round_robin_bit16_groups[index], self.round_robin_bit16_offsets[index]
        for param, offset in zip(params, offsets, strict=True):
            first, last = max(start, offset), min(start + size, offset + param.numel())
            if first < last:
                yield param, offset, first, last

    def _fill(self, index: int, row: torch.Tensor, start: int) -> None:
        """Copies gradients from an element of the flat group on; a parameter without gradient leaves zeros."""
        for param, offset, first, last in self._parts(index, start, row.numel()):
            gradient = self.get_gradient_for_reduction(param)
            if gradient is not None:
                row[first - start : last - start] = gradient.reshape(-1)[first - offset : last - offset]

    def _copied(self, index: int, start: int) -> Iterator[tuple[int, int]]:
        """Elements of the flat group, in the partition that starts there, of parameters that all tensor ranks have whole."""
        for param, _, first, last in self._parts(index, start, int(self.partition_size[index])):
            if not is_model_parallel_parameter(param):
                yield first, last

    def step(self, closure: Any = None) -> None:
        """Stock, but for what sends the new weights; a step that is skipped leaves no residuals of error feedback."""
        self.hzero.verify()
        with_names(DeepSpeedZeroOptimizer.step, all_gather_dp_groups=self._gather)(self, closure)
        for feedback in self.hzero.gradients.feedbacks:
            feedback.discard() if self.overflow else feedback.commit()
        if self.hzero.logged_hops.wanted():
            self.hzero.settle()

    @torch.no_grad()
    def update_lp_params(self) -> None:
        """Stock, but for what sends the new weights."""
        rank = self.hzero.optimizer.plan.rank
        masters = zip(self.parallel_partitioned_bit16_groups, self.single_partition_of_fp32_groups, strict=True)
        for partitions, master in masters:
            partitions[rank].data.copy_(master.data)
        self._gather()

    def _gather(self, **_: Any) -> None:
        """Sends all partitions to all ranks; the owner too takes what the others decode, so that all have the same bits."""
        _two_at_a_time(self._gathers())
        copies = (param for group in self.bit16_groups for param in group if not is_model_parallel_parameter(param))
        self.hzero.keep_alike("optimizer", [param.data for param in copies])

    def _gathers(self) -> Iterator[_Submitted]:
        rank = self.hzero.optimizer.plan.rank
        for index, partitions in enumerate(self.parallel_partitioned_bit16_groups):
            for first, last in self._columns(index, self.allgather_bucket_size):

                def spread(whole: torch.Tensor, into: list[torch.Tensor] = partitions, first: int = first) -> None:
                    for partition, part in zip(into, whole.view(len(into), -1), strict=True):
                        partition.data[first : first + part.numel()] = part

                yield self.hzero.optimizer.all_gather(partitions[rank][first:last], async_op=True), spread

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """Inside, weights are what the masters round to, sent without codecs. Collective over the data-parallel ranks."""
        with torch.no_grad():
            decoded = [flat.clone() for flat in self.bit16_groups_flat]
            masters = zip(self.parallel_partitioned_bit16_groups, self.single_partition_of_fp32_groups, strict=True)
            for index, (partitions, master) in enumerate(masters):
                dist.all_gather(partitions, master.to(partitions[0].dtype), group=self.real_dp_process_group[index])
        try:
            yield
        finally:
            for flat, before in zip(self.bit16_groups_flat, decoded, strict=True):
                flat.copy_(before)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Stock; then drops what error feedback keeps, which belongs to the old weights."""
        super().load_state_dict(*args, **kwargs)
        self.hzero.forget()

    def _restore_from_bit16_weights(self) -> None:
        super()._restore_from_bit16_weights()
        self.hzero.gradients.forget()


def _copy(into: torch.Tensor, part: torch.Tensor) -> None:
    into.copy_(part.view(-1))


def _two_at_a_time(submitted: Iterable[_Submitted]) -> None:
    """Lets the next bucket be filled while one is under way, and no more: each takes memory."""
    under_way: deque[_Submitted] = deque()
    for one in submitted:
        under_way.append(one)
        if len(under_way) == 2:
            chain, then = under_way.popleft()
            then(chain.wait())
    for chain, then in under_way:
        then(chain.wait())
