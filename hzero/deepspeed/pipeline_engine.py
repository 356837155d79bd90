"""The engine of a model with pipeline stages."""

from __future__ import annotations

import functools
from typing import Any

import torch
from deepspeed import comm
from deepspeed.runtime.constants import BFLOAT16
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION

from hzero.block import KEY
from hzero.comm import blaming, limit_waits
from hzero.config import HZeroConfig
from hzero.deepspeed.pipeline_state import PipelineState, check_module
from hzero.deepspeed.refusals import read_block
from hzero.deepspeed.stage1 import HZeroStage1
from hzero.deepspeed.stage_messages import StageMessages
from hzero.deepspeed.versions import with_names
from hzero.validation import ConfigError


class HZeroPipelineEngine(PipelineEngine):
    """DeepSpeed's engine of a ``PipelineModule``, whose messages go by tier and codec; without the block it is stock.

    DeepSpeed's schedule is a list of instructions for each stage, and `_INSTRUCTION_MAP` says which method runs one. With
    the block those that send and receive run with `StageMessages` instead of DeepSpeed's ``p2p``. Gradients and updated
    weights are those of `HZeroStage1`. Shapes, tied weights and losses are sent as in stock.

    Gradients of micro-batches are added up in float32, whatever the type of the weights. Stock has an optimizer of its own
    for that with bfloat16 (``BF16_Optimizer``); here it is ZeRO-1's.
    """

    def __init__(self, *args: Any, model: Any, **kwargs: Any) -> None:
        object.__setattr__(self, "_given", model)  # for checks; torch's modules take no other before they are made
        super().__init__(*args, model=model, **kwargs)
        if self._block is None:
            return
        limit_waits()
        own = PipelineState(self.module, self.grid, self._block)
        self.optimizer.hzero = own
        self._messages = StageMessages(own.pipeline)
        self._INSTRUCTION_MAP = {
            **PipelineEngine._INSTRUCTION_MAP,
            schedule.ReduceTiedGrads: HZeroPipelineEngine._exec_reduce_tied_grads,
            **{one: with_names(PipelineEngine._INSTRUCTION_MAP[one], p2p=self._messages) for one in MESSAGES},
        }

    @functools.cached_property
    def _block(self) -> HZeroConfig | None:
        return read_block(self._config._param_dict)

    def _do_sanity_check(self) -> None:
        super()._do_sanity_check()
        if self._block is not None:
            check_module(self._given, self._block)

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Types of the weights and of sums of gradients: with the block float32."""
        weights, sums = super().get_data_types()
        return weights, sums if self._block is None else torch.float32

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
        found = super()._do_optimizer_sanity_check(basic_optimizer)
        return ZERO_OPTIMIZATION if found == BFLOAT16 and self._block is not None else found

    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        if self._block is None:
            return super()._configure_zero_optimizer(optimizer)
        if self.has_moe_layers:
            raise ConfigError(f"{KEY}: found experts with pipeline stages; possible: layers that every rank has")
        stock = PipelineEngine._configure_zero_optimizer
        return with_names(stock, DeepSpeedZeroOptimizer=HZeroStage1)(self, optimizer)

    def _exec_reduce_tied_grads(self) -> None:
        """Stock, of the gradients that ZeRO-1 keeps: in bfloat16 those are not ``weight.grad``. With the block alone."""
        for weight, group in self.module.get_tied_weights_and_groups():
            gradient = self.optimizer.get_gradient_for_reduction(weight)
            if gradient is not None:
                comm.all_reduce(gradient, group=group)

    def train_batch(self, data_iter: Any = None) -> Any:
        """Stock; with the block an error of its collectives names the ranks that did not come."""
        if self._block is None:
            return super().train_batch(data_iter)
        with blaming(), self._messages:
            return super().train_batch(data_iter)

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """As `train_batch`."""
        if self._block is None:
            return super().eval_batch(*args, **kwargs)
        with blaming(), self._messages:
            return super().eval_batch(*args, **kwargs)


#: Instructions that send or receive a tensor of the model.
MESSAGES = (schedule.SendActivation, schedule.RecvActivation, schedule.SendGrad, schedule.RecvGrad)
