"""Guard: stops a training that diverges or has wrong secondary partitions, and measures the error of codecs."""

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
from hzero.errors import PlainError, is_rank_0, of_all_ranks, some
from hzero.program.shards import Hop

logger = logging.getLogger("hzero")

#: Returns this rank's shard of a parameter's gradient.
GradientOf: TypeAlias = Callable[[Parameter], torch.Tensor]
#: Maximum number of parameter names in a message.
_NAMED = 8


class DivergenceError(PlainError):
    """Losses or gradients are not finite, and loss scaling cannot recover. The message names the steps and parameters."""


class StaleWeightsError(PlainError):
    """Secondary partitions differ from their owners' shards or from the copies on other ranks. The message names them."""


def speaks(group: dist.ProcessGroup | None) -> bool:
    """Whether this rank logs for all ranks of a group; None is the world."""
    return is_rank_0() if group is None else dist.get_rank(group) == 0


class Guard:
    """Stops a training that diverges or has wrong secondary partitions, and measures the error of codecs.

    The guard counts optimizer steps that are discarded because the gradient norm is not finite. DeepSpeed discards such a step
    with every weight dtype, and continues without limit. A step does not count while dynamic loss scaling can still lower its
    scale: discarded steps are how loss scaling finds one.

    An audit checks the weights that forward and backward read. The wire log does not count an audit's messages.

    Args:
        weights: The weights; audits use their lanes.
        config: The number of discarded steps in a row that ends training (0 never does), and the number of steps between
            audits.
        device: Device on which sums over ranks are computed.
        advice: Advice in a message: how to change weights without making secondary partitions stale.
        group: The ranks that train the model together, and so take the same decisions; None is the world.

    Attributes:
        ratios: Signal-to-noise ratios from the last audit, in dB, for each lossy tier's codec, such as ``weights/node``. An
            audit measures one of the larger weights and the summed gradient of one.
            Ratios without a finite signal are left out.
        audit_due: Whether the next step is audited regardless of its number.
        steps: Optimizer steps so far, with discarded ones.
    """

    def __init__(
        self,
        weights: Weights,
        config: GuardConfig,
        device: torch.device,
        advice: str = "",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._weights, self._runtime, self._plan = weights, weights.runtime, weights.plan
        self._config, self._device, self._advice, self._group = config, device, advice, group
        self.steps = self._discarded = self._audits = 0
        self.ratios: dict[str, float] = {}
        self.audit_due = True

    # ---- divergence ----------------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """Counts a step that changed the weights."""
        self.steps += 1
        self._discarded = 0

    def discarded(self, scaler: Any, params: Sequence[Parameter], gradient_of: GradientOf) -> None:
        """Counts a step that is about to be discarded. All ranks must call it for the same step.

        Args:
            scaler: The loss scaler, with DeepSpeed's attributes, before its update for this step; None if there is none.
            params: The optimizer's parameters. Other parameters may require gradients too, but have no gradient shard here.
            gradient_of: Returns this rank's gradient shard of one parameter.

        Raises:
            DivergenceError: Too many steps in a row were discarded, on all ranks. Or the loss scale is at its minimum, where
                DeepSpeed would raise an error without names.
        """
        self.steps += 1
        at_minimum = scaler is not None and scaler.dynamic
        # A discarded step lowers the loss scale, so a later one may be finite.
        if self._config.discarded_steps == 0 or (at_minimum and scaler.cur_scale > scaler.min_scale):
            return
        self._discarded += 1
        if self._discarded < self._config.discarded_steps and not (at_minimum and scaler.raise_error_at_min_scale):
            if speaks(self._group):
                logger.warning(
                    "hzero: step %d is discarded: the norm of the gradients is not finite (guard: %d of %d in a row)",
                    self.steps,
                    self._discarded,
                    self._config.discarded_steps,
                )
            return
        scaled = f" and the loss scale is at its minimum of {scaler.cur_scale:g}" if at_minimum else ""
        message = (
            f"the norm of the gradients is not finite in {self._discarded} steps in a row (guard: {self._config.discarded_steps})"
            f"{scaled}; the last is step {self.steps} of this engine. These steps have not changed the weights. "
            f"{self._where(params, gradient_of)}"
        )
        raise of_all_ranks(DivergenceError(message))

    @torch.no_grad()
    def _where(self, params: Sequence[Parameter], gradient_of: GradientOf) -> str:
        """Names the parameters with values that are not finite, and lists the signal-to-noise ratios of lossy hops."""
        # Shards are on the CPU if the optimizer is. The padding after the last element is left out, since it is never written.
        weights = [self._weights.primary_shard(param).detach() for param in params]
        gradients = [gradient_of(param).detach().flatten() for param in params]
        spoilt = torch.tensor(
            [[not bool(shard.isfinite().all()) for shard in shards] for shards in (gradients, weights)],
            dtype=torch.uint8,
            device=self._device,
        )
        dist.all_reduce(spoilt, dist.ReduceOp.MAX, self._group)
        parts = []
        for state, marks in zip(("gradients", "weights"), spoilt.tolist()):
            names = _marked(params, marks)
            listed = f": {some(names, _NAMED)}" if names else ""
            parts.append(f"Not finite in the {state} of {len(names)} of {len(params)} parameters{listed}")
        if self.ratios:
            parts.append(f"Signal-to-noise ratios of the codecs in the last audit: {self._ratios_text()}")
        return ". ".join(parts)

    # ---- audit ---------------------------------------------------------------------------------------------------

    @property
    def audits_next(self) -> bool:
        """Whether the next step is audited."""
        every = self._config.every
        return bool(every) and (self.audit_due or (self.steps + 1) % every == 0)

    @torch.no_grad()
    def before_step(self, params: Sequence[Parameter], gradient_of: GradientOf) -> None:
        """Runs an audit before an optimizer step, if one is due. Collective; waits for the device.

        Args:
            params: Parameters that the optimizer steps.
            gradient_of: Returns this rank's gradient shard of one parameter.

        Raises:
            StaleWeightsError: On all ranks, if one rank has found a difference.
        """
        if not self.audits_next:
            return
        step = self.steps + 1
        self._runtime.lanes.drain()
        with blaming():
            self._compare(step)
            self.ratios = self._measure(params, gradient_of)
            self._runtime.lanes.verify()
        self._audits, self.audit_due = self._audits + 1, False
        if self.ratios and speaks(self._group):
            logger.info("hzero: signal-to-noise ratios before step %d: %s", step, self._ratios_text())

    def _compare(self, step: int) -> None:
        """Compares secondary partitions with their owners' shards and with the copies on other ranks."""
        checked = self._weights.up_to_date()
        if not checked:
            return
        copies = [self._runtime.lanes.used(param.secondary) for param in checked if param.secondary is not None]
        stale = torch.stack([self._weights.is_stale(param) for param in checked])
        sums = torch.cat([checksums(copy.view(1, -1).view(torch.uint8)) for copy in copies])
        # Copies are equal across each tier outside the weights' scope, so comparing neighbours on each of these tiers compares
        # all. First compare one sum of all sums per scope: one sum per parameter and peer would need a gigabyte in a large
        # world.
        hops = ((param.route.plan.channel, param.route.plan.refresh_hops()) for param in checked)
        outside = [tuple((channel, hop.tier, hop.size) for hop in of_it) for channel, of_it in hops]
        kinds = list(dict.fromkeys(outside))
        totals = [checksums(sums[[one == kind for one in outside]].view(1, -1).view(torch.uint8)) for kind in kinds]
        both = torch.cat([stale, self._differing(torch.cat(totals), kinds)]).to(torch.uint8)
        dist.all_reduce(both, dist.ReduceOp.MAX, self._group)
        parts = []
        if names := _marked(checked, both[: len(checked)].tolist()):
            parts.append(
                f"the secondary partitions of {len(names)} of {len(checked)} weights are not what their owners hold: "
                f"{some(names, _NAMED)}. Something has changed them behind hzero: {self._advice}"
            )
        if bool(both[len(checked) :].any()):
            differing = self._differing(sums, outside).to(torch.uint8)
            dist.all_reduce(differing, dist.ReduceOp.MAX, self._group)
            names = _marked(checked, differing.tolist())
            parts.append(
                f"ranks that hold the same copies of {len(names)} of {len(checked)} weights have different ones: "
                f"{some(names, _NAMED)}. Go back to a checkpoint from before, and look at the links between nodes "
                '("checksum": true finds the message)'
            )
        if parts:
            raise of_all_ranks(StaleWeightsError(f"guard before step {step} of this engine: {'; '.join(parts)}"))

    def _differing(self, sums: torch.Tensor, outside: Sequence[Collection[tuple[str, Tier, int]]]) -> torch.Tensor:
        """Marks sums that differ on another rank with the same copies.

        Args:
            sums: int64 ``[n]``.
            outside: The tiers across which the copies behind each sum are equal, as channel, tier and ranks.

        Returns:
            bool ``[n]``.
        """
        differs, runtime = torch.zeros(len(sums), dtype=torch.bool, device=sums.device), self._runtime
        for across in dict.fromkeys(one for hops in outside for one in hops):
            compared, (channel, tier, ranks) = [across in hops for hops in outside], across
            mine = sums[compared]
            message = mine.view(torch.uint8).view(-1)
            bucket = Bucket((0,), (len(message),), torch.uint8, "weights", channel)
            # The lane is free: `before_step` has drained all chains.
            lane = runtime.lane(bucket, tier)
            gather = runtime.prepare(lane, "all_gather", message.nbytes, "weights of an audit")
            theirs = gather.run(message).view(torch.int64)
            differs[compared] |= (theirs.view(ranks, -1) != mine).any(dim=0)
        return differs

    def _ratios_text(self) -> str:
        return ", ".join(f"{name} {ratio:.1f} dB" for name, ratio in self.ratios.items())

    def _measure(self, params: Sequence[Parameter], gradient_of: GradientOf) -> dict[str, float]:
        """Ratios of one round trip for the shards of one weight and one gradient over all ranks; each audit takes others.

        Shards with values that are not finite are left out.
        """
        weights = self._one_of(self._weights.parameters.values())
        shards: dict[Role, list[torch.Tensor]] = {
            "weights": [self._weights.primary_shard(param) for param in weights],
            "gradients": [gradient_of(param).detach().flatten() for param in self._one_of(params)],
        }
        hops: list[tuple[Role, Hop]] = [("weights", hop) for hop in self._plan.gather_hops()]
        hops += [("gradients", hop) for hop in self._plan.reduce_hops()]
        lossy = [(role, hop) for role, hop in hops if not hop.codec.traits.exact]
        powers = torch.zeros(len(lossy), 2, dtype=torch.float64, device=self._device)  # signal and noise
        for power, (role, hop) in zip(powers, lossy):
            codec = Codec.from_config(hop.codec)
            for shard in shards[role]:
                if shard.numel() and bool(shard.isfinite().all()):
                    values, numel = shard.to(self._device, torch.float32), [shard.numel()]
                    (decoded,) = codec.decode(codec.encode([values], numel), numel, dtype=values.dtype)
                    exact = values.double()
                    noise = decoded.double() - exact
                    power += torch.stack([exact.square().sum(), noise.square().sum()])
        dist.all_reduce(powers, group=self._group)
        return {
            f"{role}/{hop.tier}": 10 * math.log10(signal / noise)
            for (role, hop), (signal, noise) in zip(lossy, powers.tolist())
            if signal and noise and math.isfinite(signal + noise)
        }

    def _one_of(self, params: Iterable[Parameter]) -> list[Parameter]:
        """One parameter of at least mean size, the same on all ranks. Parameters with a codec of their own are left out."""
        usual = [param for param in params if param.route.number == 0 and param.numel]
        mean = sum(param.numel for param in usual) / max(len(usual), 1)
        large = [param for param in usual if param.numel >= mean]
        return large[self._audits % len(large) :][:1] if large else []


def _marked(params: Sequence[Parameter], marks: Sequence[int]) -> list[str]:
    return [param.name for param, mark in zip(params, marks) if mark]
