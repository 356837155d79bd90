"""Guard: ends a training whose gradients stay not finite, and says where they are not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from hzero.codecs.formats import owned_numel
from hzero.deepspeed.partition import speaks
from hzero.deepspeed.refusals import ZeroParameter
from hzero.engine import noise
from hzero.plan.shards import ShardPlan
from hzero.validation import PlainError, of_all_ranks, some

logger = logging.getLogger("hzero")

#: Names that a message gives of a set of parameters.
_NAMED = 8


class DivergenceError(PlainError):
    """Losses or gradients are not finite, and loss scaling cannot mend it. The message says since when and where."""


class Guard:
    """Counts the optimizer steps that DeepSpeed discards because the norm of the gradients is not finite.

    DeepSpeed discards such a step in every type of weights and goes on, for ever if nothing changes. A step does not count
    while dynamic loss scaling can still lower its scale: there discarded steps are how it finds one.

    Args:
        module: The model, its parameters partitioned by DeepSpeed.
        plan: The shard plan of this rank.
        limit: Discarded steps in a row with which training ends; 0 never ends it.
    """

    def __init__(self, module: torch.nn.Module, plan: ShardPlan, limit: int) -> None:
        self._module = module
        self._plan = plan
        self._limit = limit
        self._steps = self._discarded = 0

    def stepped(self) -> None:
        """Notes a step that changed the weights."""
        self._steps += 1
        self._discarded = 0

    def discarded(
        self, loss_scaler: Any, params: Iterable[ZeroParameter], gradient_of: Callable[[ZeroParameter], torch.Tensor]
    ) -> None:
        """Notes a step that is about to be discarded. All ranks must call it alike.

        Args:
            loss_scaler: DeepSpeed's, before it takes account of the step.
            params: The parameters in the optimizer. Others may require gradients too, but have none to look at.
            gradient_of: Gives this rank's shard of the gradient of one of them.

        Raises:
            DivergenceError: Too many in a row, on all ranks. Or loss scaling has reached its minimum, where DeepSpeed would
                raise an error that names nothing.
        """
        self._steps += 1
        at_minimum = loss_scaler.dynamic
        # A discarded step lowers the loss scale, so a later one may be finite.
        if self._limit == 0 or (at_minimum and loss_scaler.cur_scale > loss_scaler.min_scale):
            return
        self._discarded += 1
        if self._discarded < self._limit and not (at_minimum and loss_scaler.raise_error_at_min_scale):
            if speaks():
                logger.warning(
                    "hzero: step %d is discarded: the norm of the gradients is not finite (guard: %d of %d in a row)",
                    self._steps,
                    self._discarded,
                    self._limit,
                )
            return
        scaled = f" and the loss scale is at its minimum of {loss_scaler.cur_scale:g}" if at_minimum else ""
        message = (
            f"the norm of the gradients is not finite in {self._discarded} steps in a row (guard: {self._limit})"
            f"{scaled}; the last is step {self._steps} of this engine. These steps have not changed the weights. "
            f"{self._where(params, gradient_of)}"
        )
        raise of_all_ranks(DivergenceError(message))

    @torch.no_grad()
    def _where(self, params: Iterable[ZeroParameter], gradient_of: Callable[[ZeroParameter], torch.Tensor]) -> str:
        """Names the parameters with values that are not finite, and gives the signal-to-noise ratio of lossy hops."""
        names_of = {id(param): name for name, param in self._module.named_parameters()}
        named = [(names_of.get(id(param), f"parameter {param.ds_id}"), param) for param in params]
        weights = [self._own_weights(param) for _, param in named]
        gradients = [gradient_of(param).detach().flatten() for _, param in named]
        device = torch.device(get_accelerator().current_device_name())  # offloaded gradients are on the host
        spoilt = torch.tensor(
            [[not bool(shard.isfinite().all()) for shard in shards] for shards in (gradients, weights)],
            dtype=torch.uint8,
            device=device,
        )
        dist.all_reduce(spoilt, dist.ReduceOp.MAX)
        parts = []
        for what, marks in zip(("gradients", "weights"), spoilt.tolist()):
            names = [name for (name, _), mark in zip(named, marks) if mark]
            listed = f": {some(names, _NAMED)}" if names else ""
            parts.append(f"Not finite in the {what} of {len(names)} of {len(named)} parameters{listed}")
        if tiers := noise.lossy_tiers(self._plan):
            powers = noise.of_codecs(tiers, {"weights": weights, "gradients": gradients}, device)
            ratios = [
                f"{role} {codec.codec} on {', '.join(names)}: {noise.described(noise.decibels(*found))}"
                for ((role, codec), names), found in zip(tiers.items(), powers)
            ]
            parts.append(f"Signal-to-noise ratio of the codecs on what is finite: {'; '.join(ratios)}")
        return ". ".join(parts)

    def _own_weights(self, param: ZeroParameter) -> torch.Tensor:
        """This rank's shard without the padding behind the last element, which DeepSpeed never writes."""
        shard = param.ds_tensor.detach().flatten()
        return shard[: owned_numel(param.ds_numel, shard.numel(), self._plan.rank)]
