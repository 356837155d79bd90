"""Guard: ends a training whose gradients stay not finite, and says where they are not."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from hzero.codecs import Codec
from hzero.config import ROLES, CodecConfig, Role, Tier
from hzero.reasons import PlainError
from hzero.sharding.plan import ShardPlan
from hzero.validation import some
from hzero.zero.refusals import ZeroParameter

logger = logging.getLogger("hzero")

#: Names that a message gives of a set of parameters.
_NAMED = 8


class DivergenceError(PlainError):
    """Losses or gradients are not finite, and loss scaling cannot mend it. The message says since when and where."""


def scaling_can_help(loss_scaler: Any) -> bool:
    """Whether a discarded step lowers the loss scale, so that a later one may be finite: DeepSpeed's scaler is not at its end."""
    return bool(loss_scaler.dynamic and loss_scaler.cur_scale > loss_scaler.min_scale)


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

    def discarded(self, loss_scaler: Any, gradient_of: Callable[[ZeroParameter], torch.Tensor]) -> None:
        """Notes a step that is about to be discarded. All ranks must call it alike.

        Args:
            loss_scaler: DeepSpeed's, before it takes account of the step.
            gradient_of: Gives this rank's shard of a parameter's gradient.

        Raises:
            DivergenceError: Too many in a row, on all ranks. Or loss scaling has reached its minimum, where DeepSpeed would
                raise an error that names nothing.
        """
        self._steps += 1
        if self._limit == 0 or scaling_can_help(loss_scaler):
            return
        at_minimum = loss_scaler.dynamic
        self._discarded += 1
        if self._discarded < self._limit and not (at_minimum and loss_scaler.raise_error_at_min_scale):
            if self._plan.rank == 0:
                logger.warning(
                    "hzero: step %d is discarded: the norm of the gradients is not finite (guard: %d of %d in a row)",
                    self._steps,
                    self._discarded,
                    self._limit,
                )
            return
        scaled = f" and the loss scale is at its minimum of {loss_scaler.cur_scale:g}" if at_minimum else ""
        error = DivergenceError(
            f"hzero: the norm of the gradients is not finite in {self._discarded} steps in a row (guard: {self._limit})"
            f"{scaled}; the last is step {self._steps} of this engine. These steps have not changed the weights. "
            f"{self._where(gradient_of)}"
        )
        error.elsewhere = self._plan.rank != 0
        raise error

    @torch.no_grad()
    def _where(self, gradient_of: Callable[[ZeroParameter], torch.Tensor]) -> str:
        """Names the parameters with values that are not finite, and gives the signal-to-noise ratio of lossy hops."""
        named: list[tuple[str, ZeroParameter]] = [
            (name, param) for name, param in self._module.named_parameters() if param.requires_grad
        ]
        weights = [self._own_weights(param) for _, param in named]
        gradients = [gradient_of(param).detach().flatten() for _, param in named]
        device = gradients[0].device
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
        # Tiers of one codec have one ratio.
        tiers: dict[tuple[Role, CodecConfig], list[Tier]] = {}
        for role in ROLES:
            for hop in self._plan.gather_hops() if role == "weights" else self._plan.reduce_hops():
                if not Codec.from_config(hop.codec).exact:
                    tiers.setdefault((role, hop.codec), []).append(hop.tier)
        if tiers:
            shards = {"weights": weights, "gradients": gradients}
            powers = torch.stack([_signal_and_noise(codec, shards[role], device) for role, codec in tiers])
            dist.all_reduce(powers)
            ratios = [
                f"{role} {codec.codec} on {', '.join(names)}: {_decibels(*power)}"
                for ((role, codec), names), power in zip(tiers.items(), powers.tolist())
            ]
            parts.append(f"Signal-to-noise ratio of the codecs on what is finite: {'; '.join(ratios)}")
        return ". ".join(parts)

    def _own_weights(self, param: ZeroParameter) -> torch.Tensor:
        """This rank's shard without the padding behind the last element, which DeepSpeed never writes."""
        shard = param.ds_tensor.detach().flatten()
        return shard[: max(param.ds_numel - self._plan.rank * shard.numel(), 0)]


def _decibels(signal: float, noise: float) -> str:
    if not signal:
        return "unknown (nothing but zeros)"
    return f"{10 * math.log10(signal / noise):.1f} dB" if noise else "without loss"


def _signal_and_noise(config: CodecConfig, shards: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sums of squares of finite elements and of the errors of one round trip, float64 ``[2]``."""
    codec, total = Codec.from_config(config), torch.zeros(2, dtype=torch.float64, device=device)
    for values in _finite(shards, device):
        (decoded,) = codec.decode(codec.encode([values], [values.numel()]), [values.numel()], dtype=values.dtype)
        error = decoded[: values.numel()].double() - values.double()
        total += torch.stack([values.double().square().sum(), error.square().sum()])
    return total


def _finite(shards: list[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    for shard in shards:
        if shard.numel() and bool(shard.isfinite().all()):
            yield shard.to(device, torch.float32)
