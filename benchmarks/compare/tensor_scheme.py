"""Tensor groups as in Megatron-LM (arXiv 1909.08053) with DeepSpeed's ZeRO-1, without anything of hzero's engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import groups

from benchmarks.compare.deepspeed_schemes import deepspeed_config
from benchmarks.compare.scheme import Job, Scheme, tensor_bytes
from benchmarks.hybrid.model import Layout, Mpu
from hzero.deepspeed.stage_state import optimizer_bytes

#: Of a layer of transformers' GPT-NeoX: the linear layers that are split by their outputs, and those by their inputs. Queries,
#: keys and values of a head are neighbours, so equal parts of the rows are whole heads.
COLUMNS = ("attention.query_key_value", "mlp.dense_h_to_4h")
ROWS = ("attention.dense", "mlp.dense_4h_to_h")


class _Sum(torch.autograd.Function):
    """The sum over a group, of a tensor in forward or of its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any, in_forward: bool) -> torch.Tensor:
        ctx.group, ctx.in_forward = group, in_forward
        return _summed(tensor, group) if in_forward else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return gradient if ctx.in_forward else _summed(gradient, ctx.group), None, None


def _summed(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _copied(group: Any, _: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (_Sum.apply(inputs[0], group, False),)


def _added(group: Any, linear: Any, _: Any, output: torch.Tensor) -> torch.Tensor:
    return _Sum.apply(output, group, True) + linear.whole_bias


class TensorZero1(Scheme):
    """Tensor groups of neighbours, whose data-parallel groups shard the optimizer.

    A tensor group trains on the sequences of its ranks together.

    Args:
        job: Shared by all schemes.
        size: Ranks of a tensor group.
    """

    def __init__(self, job: Job, size: int) -> None:
        model = job.build()
        self.parameters = sum(param.numel() for param in model.parameters())
        mpu = Mpu(Layout(range(job.grid.world_size), size))
        self._group, self._size = mpu.get_model_parallel_group(), size
        for layer in model.get_submodule("gpt_neox.layers").children():
            for name in (*COLUMNS, *ROWS):
                self._split(layer.get_submodule(name), mpu.get_model_parallel_rank(), by_rows=name in ROWS)
        config = deepspeed_config(job, None, None)
        config["train_micro_batch_size_per_gpu"] *= size
        config["zero_optimization"] = {"stage": 1, "reduce_bucket_size": job.bucket_numel}
        self._engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=mpu)[0]
        groups.mpu = None  # DeepSpeed keeps it for the process, and would take it for the engines that come after
        self._gradient_bytes = 0

    def _split(self, linear: Any, place: int, by_rows: bool) -> None:
        """Leaves a rank its part of a linear layer. A layer that is split by its inputs adds its bias to the sum."""
        dim = 1 if by_rows else 0
        linear.weight = torch.nn.Parameter(linear.weight.detach().chunk(self._size, dim)[place].clone())
        if by_rows:
            linear.register_parameter("whole_bias", linear.bias)
            linear.bias = None
            linear.register_forward_hook(partial(_added, self._group))
        else:
            linear.bias = torch.nn.Parameter(linear.bias.detach().chunk(self._size)[place].clone())
            linear.register_forward_pre_hook(partial(_copied, self._group))

    def step(self, batches: Sequence[torch.Tensor], rate: float) -> torch.Tensor:
        """As in `Scheme`."""
        total = torch.zeros(())
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        for mine in batches:
            parts = [torch.empty_like(mine) for _ in range(self._size)]
            dist.all_gather(parts, mine, group=self._group)
            ids = torch.cat(parts)
            loss = self._engine(input_ids=ids, labels=ids).loss
            total += loss.detach().float()
            self._engine.backward(loss)
            gradients = tensor_bytes(param.grad for param in self._engine.module.parameters())
            self._gradient_bytes = max(self._gradient_bytes, gradients)
            self._engine.step()
        return total / len(batches)

    def memory(self) -> dict[str, int]:
        """As in `Scheme`."""
        weights = tensor_bytes(self._engine.module.parameters())
        optimizer = optimizer_bytes(self._engine.optimizer)
        return {"weights": weights, "gradients": self._gradient_bytes, "optimizer": optimizer}

    def fetches(self) -> None:
        """As in `Scheme`: nothing is gathered for its use."""
