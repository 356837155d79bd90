"""Guards: end a training that diverges, or whose resident weights are wrong; and measure how much codecs lose."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from hzero.codecs.codec import Codec, checksums
from hzero.comm import Bucket, blaming
from hzero.config import GuardConfig, Role, Tier
from hzero.engine.parameter import Parameter
from hzero.engine.weights import Weights
from hzero.plan.shards import Hop
from hzero.validation import PlainError, is_rank_0, of_all_ranks, some

logger = logging.getLogger("hzero")

#: Gives this rank's shard of the gradient of a parameter.
GradientOf: TypeAlias = Callable[[Parameter], torch.Tensor]
#: Names that a message gives of a set of parameters.
_NAMED = 8


class DivergenceError(PlainError):
    """Losses or gradients are not finite, and loss scaling cannot mend it. The message says since when and where."""


class StaleWeightsError(PlainError):
    """Resident weights are not those that their owners, or other ranks, hold. The message names them."""


def speaks(group: dist.ProcessGroup | None) -> bool:
    """Whether this rank logs for all ranks of a group; None is the world."""
    return is_rank_0() if group is None else dist.get_rank(group) == 0


class Guard:
    """Ends a training that diverges, or whose resident weights are wrong; and measures how much codecs lose.

    It counts the optimizer steps that are discarded because the norm of the gradients is not finite. DeepSpeed discards such a
    step in every type of weights and continues, for ever if nothing changes. A step does not count while dynamic loss scaling
    can still lower its scale: there discarded steps are how it finds one.

    An audit checks the weights that forward and backward read. Nothing of it is in the wire log.

    Args:
        weights: The weights; hops of audits use their lanes.
        config: Discarded steps in a row with which training ends, 0 never ends it; and steps between audits.
        device: Where sums over ranks are made.
        advice: How a user changes weights without making resident copies stale, for a message.
        group: The ranks that train the model together, and so decide alike; None is the world.

    Attributes:
        ratios: Signal-to-noise ratios of each lossy tier's codec in the last audit, in dB, such as ``weights/node``: of one of
            the larger weights, or of its copy if refreshes send differences, and of the sum of one's gradients. Those without a
            finite signal are left out.
        audit_due: Whether the next step is audited in any case.
    """

    def __init__(
        self,
        weights: Weights,
        config: GuardConfig,
        device: torch.device,
        advice: str = "",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._weights, self._collectives, self._plan = weights, weights.collectives, weights.plan
        self._config, self._device, self._advice, self._group = config, device, advice, group
        self._steps = self._discarded = self._audits = 0
        self.ratios: dict[str, float] = {}
        self.audit_due = True

    # ---- divergence ----------------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """Notes a step that changed the weights."""
        self._steps += 1
        self._discarded = 0

    def discarded(self, scaler: Any, params: Sequence[Parameter], gradient_of: GradientOf) -> None:
        """Notes a step that is about to be discarded. All ranks must call it alike.

        Args:
            scaler: The loss scaler, with DeepSpeed's attributes, before it takes account of the step; None where there is none.
            params: The parameters in the optimizer. Others may require gradients too, but have none to look at.
            gradient_of: Gives this rank's shard of the gradient of one of them.

        Raises:
            DivergenceError: Too many in a row, on all ranks. Or loss scaling has reached its minimum, where DeepSpeed would
                raise an error that names nothing.
        """
        self._steps += 1
        at_minimum = scaler is not None and scaler.dynamic
        # A discarded step lowers the loss scale, so a later one may be finite.
        if self._config.discarded_steps == 0 or (at_minimum and scaler.cur_scale > scaler.min_scale):
            return
        self._discarded += 1
        if self._discarded < self._config.discarded_steps and not (at_minimum and scaler.raise_error_at_min_scale):
            if speaks(self._group):
                logger.warning(
                    "hzero: step %d is discarded: the norm of the gradients is not finite (guard: %d of %d in a row)",
                    self._steps,
                    self._discarded,
                    self._config.discarded_steps,
                )
            return
        scaled = f" and the loss scale is at its minimum of {scaler.cur_scale:g}" if at_minimum else ""
        message = (
            f"the norm of the gradients is not finite in {self._discarded} steps in a row (guard: {self._config.discarded_steps})"
            f"{scaled}; the last is step {self._steps} of this engine. These steps have not changed the weights. "
            f"{self._where(params, gradient_of)}"
        )
        raise of_all_ranks(DivergenceError(message))

    @torch.no_grad()
    def _where(self, params: Sequence[Parameter], gradient_of: GradientOf) -> str:
        """Names the parameters with values that are not finite, and gives the signal-to-noise ratios of lossy hops."""
        # Shards are on the host if the optimizer is. Padding beyond the last element, which nobody writes, is left out.
        weights = [self._weights.primary_shard(param).detach() for param in params]
        gradients = [gradient_of(param).detach().flatten() for param in params]
        spoilt = torch.tensor(
            [[not bool(shard.isfinite().all()) for shard in shards] for shards in (gradients, weights)],
            dtype=torch.uint8,
            device=self._device,
        )
        dist.all_reduce(spoilt, dist.ReduceOp.MAX, self._group)
        parts = []
        for what, marks in zip(("gradients", "weights"), spoilt.tolist()):
            names = _marked(params, marks)
            listed = f": {some(names, _NAMED)}" if names else ""
            parts.append(f"Not finite in the {what} of {len(names)} of {len(params)} parameters{listed}")
        if self.ratios:
            parts.append(f"Signal-to-noise ratios of the codecs in the last audit: {self._ratios_text()}")
        return ". ".join(parts)

    # ---- audit ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_step(self, params: Sequence[Parameter], gradient_of: GradientOf) -> None:
        """Audits before an optimizer step, if an audit is due. Collective; waits for the device.

        Args:
            params: Those that the optimizer steps.
            gradient_of: Gives this rank's shard of the gradient of one of them.

        Raises:
            StaleWeightsError: On all ranks, if one has found a difference.
        """
        step, every = self._steps + 1, self._config.every
        if not every or not (self.audit_due or step % every == 0):
            return
        self._collectives.lanes.drain()
        with blaming():
            self._compare(step)
            self.ratios = self._measure(params, gradient_of)
            self._collectives.verify()
        self._audits, self.audit_due = self._audits + 1, False
        if self.ratios and speaks(self._group):
            logger.info("hzero: signal-to-noise ratios before step %d: %s", step, self._ratios_text())

    def _compare(self, step: int) -> None:
        """Compares resident copies with their owners' shards, and with the other ranks' copies."""
        resident = self._weights.up_to_date()
        if not resident:
            return
        copies = [self._collectives.used(param.resident) for param in resident if param.resident is not None]
        stale = torch.stack([self._weights.is_stale(param) for param in resident])
        sums = torch.cat([checksums(copy.view(1, -1).view(torch.uint8)) for copy in copies])
        # Equal on each tier outside the weights' scope: equal on all of them. One sum of all sums first, or of those with one
        # scope: the sums of each parameter, from each peer, would take a gigabyte of a large world.
        outside = [tuple(hop.tier for hop in param.route.plan.refresh_hops()) for param in resident]
        kinds = list(dict.fromkeys(outside))
        totals = [checksums(sums[[one == kind for one in outside]].view(1, -1).view(torch.uint8)) for kind in kinds]
        both = torch.cat([stale, self._differing(torch.cat(totals), kinds)]).to(torch.uint8)
        dist.all_reduce(both, dist.ReduceOp.MAX, self._group)
        parts = []
        if names := _marked(resident, both[: len(resident)].tolist()):
            parts.append(
                f"the resident copies of {len(names)} of {len(resident)} weights are not what their owners hold: "
                f"{some(names, _NAMED)}. Something has changed them behind hzero: {self._advice}"
            )
        if bool(both[len(resident) :].any()):
            differing = self._differing(sums, outside).to(torch.uint8)
            dist.all_reduce(differing, dist.ReduceOp.MAX, self._group)
            names = _marked(resident, differing.tolist())
            parts.append(
                f"ranks that hold the same copies of {len(names)} of {len(resident)} weights have different ones: "
                f"{some(names, _NAMED)}. Go back to a checkpoint from before, and look at the links between nodes "
                '("checksum": true finds the message)'
            )
        if parts:
            raise of_all_ranks(StaleWeightsError(f"guard before step {step} of this engine: {'; '.join(parts)}"))

    def _differing(self, sums: torch.Tensor, outside: Sequence[Collection[Tier]]) -> torch.Tensor:
        """Which of the sums, int64 ``[n]``, another rank with the same copies has otherwise; bool ``[n]``.

        ``outside`` gives for each the tiers across which copies are equal.
        """
        differs, collectives = torch.zeros(len(sums), dtype=torch.bool, device=sums.device), self._collectives
        for hop in self._plan.gather_hops():
            compared = [hop.tier in tiers for tiers in outside]
            if not any(compared):
                continue
            mine = sums[compared]
            message = mine.view(torch.uint8).view(-1)
            bucket = Bucket((0,), (len(message),), torch.uint8, "weights")
            # No chain is under way.
            lane = collectives.lane(bucket, hop.tier)
            gather = collectives.prepare(lane, "all_gather", message.nbytes, "weights of an audit")
            theirs = gather.start(message).wait().view(torch.int64)
            differs[compared] |= (theirs.view(hop.size, -1) != mine).any(dim=0)
        return differs

    def _ratios_text(self) -> str:
        return ", ".join(f"{name} {ratio:.1f} dB" for name, ratio in self.ratios.items())

    def _measure(self, params: Sequence[Parameter], gradient_of: GradientOf) -> dict[str, float]:
        """Ratios of one round trip of a larger weight's and gradient's shards over all ranks, other ones in each audit.

        Shards that are not all finite are left out. Where refreshes send differences, what counts is the copy of the weight
        that all ranks hold: a difference alone loses far more.
        """
        differs, refreshed = self._plan.differences > 0, self._plan.refresh_hops()
        measured = self._weights.up_to_date() if differs else list(self._weights.parameters.values())
        weights = self._one_of(param for param in measured if param.trained or not differs)  # others' copies are exact
        shards: dict[Role, list[torch.Tensor]] = {
            "weights": [self._weights.primary_shard(param) for param in weights],
            "gradients": [gradient_of(param).detach().flatten() for param in self._one_of(params)],
        }
        hops: list[tuple[Role, Hop]] = [("weights", hop) for hop in self._plan.gather_hops()]
        hops += [("gradients", hop) for hop in self._plan.reduce_hops()]
        lossy = [(role, hop) for role, hop in hops if not hop.codec.traits.exact]
        powers = torch.zeros(len(lossy), 2, dtype=torch.float64, device=self._device)  # of signal and noise
        for power, (role, hop) in zip(powers, lossy):
            codec = Codec.from_config(hop.codec)
            of_copy = differs and role == "weights" and hop in refreshed
            for index, shard in enumerate(shards[role]):
                if shard.numel() and bool(shard.isfinite().all()):
                    values, numel = shard.to(self._device, torch.float32), [shard.numel()]
                    if of_copy:
                        decoded = self._weights.held_shard(weights[index])
                    else:
                        (decoded,) = codec.decode(codec.encode([values], numel), numel, dtype=values.dtype)
                    exact = values.double()
                    noise = decoded[: values.numel()].double() - exact
                    power += torch.stack([exact.square().sum(), noise.square().sum()])
        dist.all_reduce(powers, group=self._group)
        return {
            f"{role}/{hop.tier}": 10 * math.log10(signal / noise)
            for (role, hop), (signal, noise) in zip(lossy, powers.tolist())
            if signal and noise and math.isfinite(signal + noise)
        }

    def _one_of(self, params: Iterable[Parameter]) -> list[Parameter]:
        """One of at least mean size, the same on all ranks; none of those with a codec of their own."""
        usual = [param for param in params if param.route.number == 0 and param.numel]
        mean = sum(param.numel for param in usual) / max(len(usual), 1)
        large = [param for param in usual if param.numel >= mean]
        return large[self._audits % len(large) :][:1] if large else []


def _marked(params: Sequence[Parameter], marks: Sequence[int]) -> list[str]:
    return [param.name for param, mark in zip(params, marks) if mark]
