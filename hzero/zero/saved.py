"""What of the stage's own state a checkpoint holds, beside what stock DeepSpeed writes and in the same files."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from hzero.collectives import ErrorFeedback
from hzero.config import ROLES
from hzero.sharding.plan import ShardPlan
from hzero.zero.gradients import Gradients
from hzero.zero.partition import speaks
from hzero.zero.weights import Weights

logger = logging.getLogger("hzero")

#: Key in what DeepSpeed's optimizer saves. Stock, and releases before this, ignore it.
KEY = "hzero"


class SavedState:
    """Residuals of error feedback, and the numbers from which seeds of stochastic rounding are made.

    A run that goes on from a checkpoint of the same plan then rounds gradients as one that was never interrupted. Weights that
    are rounded stochastically are rounded anew where a load lays them into other messages than a step does.

    Args:
        module: The model; residuals are saved by the names of its parameters.
        plan: The shard plan.
        weights: The weights.
        gradients: The gradients.
        feedback: Where residuals are kept; None where no tier keeps any.
        residuals: Whether they are saved: they may be many times what a rank saves otherwise.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        plan: ShardPlan,
        weights: Weights,
        gradients: Gradients,
        feedback: ErrorFeedback | None,
        residuals: bool,
    ) -> None:
        self._module, self._plan, self._feedback = module, plan, feedback
        self._residuals = residuals
        self._weights, self._gradients = weights, gradients
        codecs = [plan.codecs[role][tier] for role in ROLES for tier in plan.codecs[role].written]
        codecs += [codec for _, codec in plan.exceptions]
        self._by_chance = plan.accumulator_bytes < 4 or any(codec.rounding == "stochastic" for codec in codecs)

    def of_now(self) -> dict[str, Any] | None:
        """Of this rank, in plain types and tensors; None where there is nothing to save, so the files stay stock."""
        if not self._by_chance and not self._residuals:
            return None
        names = self._names()
        residuals: dict[str, dict[str, torch.Tensor]] = {}
        scales: dict[str, dict[str, float]] = {}
        for tier, kept in self._feedback.saved().items() if self._feedback is not None and self._residuals else ():
            residuals[tier] = {names[key]: residual for key, (residual, _) in kept.items()}
            scales[tier] = {names[key]: scale for key, (_, scale) in kept.items()}
        return {
            "plan": self._identity(),
            "seeds": {"weights": self._weights.version, "gradients": self._gradients.reductions},
            "residuals": residuals,
            "scales": scales,
        }

    def restore(self, found: Mapping[str, Any] | None) -> None:
        """Goes on from what a checkpoint holds, after everything else has been replaced.

        Residuals of another plan are dropped with a warning; they start at zero.

        Args:
            found: What `of_now` has given; None where the checkpoint has nothing, as one of stock.
        """
        if self._feedback is None and not self._by_chance:
            return
        kept = found["residuals"] if found is not None else {}
        same = found is not None and found["plan"] == self._identity()
        if self._feedback is not None and speaks() and not (same and kept):
            why = "was written with another plan or on other ranks" if kept else "has none"
            logger.warning("hzero: residuals of error feedback start at zero: the checkpoint %s", why)
        if found is None or not same:
            return
        self._weights.version, self._gradients.reductions = found["seeds"]["weights"], found["seeds"]["gradients"]
        if self._feedback is None:
            return
        keys = {name: key for key, name in self._names().items()}
        device = get_accelerator().current_device_name()
        for tier, residuals in kept.items():
            for name, residual in residuals.items():
                if name in keys:
                    self._feedback.restore(tier, keys[name], residual.to(device), found["scales"][tier][name])

    def _identity(self) -> str:
        """What residuals depend on: which rows a rank holds, and what is lost on the way to it."""
        plan = self._plan
        hops = (plan.gather_hops(), plan.micro_hops(), plan.boundary_hops())
        told = (plan.grid, plan.weights_scope, plan.gradients_scope, hops, plan.error_feedback, plan.exceptions)
        return hashlib.sha256(repr(told).encode()).hexdigest()

    def _names(self) -> dict[int, str]:
        return {param.ds_id: name for name, param in self._module.named_parameters()}  # type: ignore[attr-defined]
