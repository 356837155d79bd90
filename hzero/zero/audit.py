"""Audit: whether resident weights are those of their owners and of the other copies, and how much codecs lose on the way."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from hzero.collectives import Bucket, Chain, TieredCollectives, WireLog, blaming
from hzero.collectives.checksum import checksums
from hzero.reasons import PlainError
from hzero.sharding.plan import ShardPlan, plain
from hzero.validation import some
from hzero.zero import noise
from hzero.zero.managed import Managed
from hzero.zero.refusals import ZeroParameter
from hzero.zero.weights import Weights

logger = logging.getLogger("hzero")

#: Names that a message gives of a set of parameters.
_NAMED = 8
#: Elements of the weights, and of the gradients, that are gathered and summed with and without codecs, on all ranks together;
#: a rank gives at least `_LEAST`, some blocks of a codec.
_SAMPLE, _LEAST = 1 << 20, 512


class StaleWeightsError(PlainError):
    """Resident weights are not those that their owners, or other ranks, hold. The message names them."""


class Audit:
    """Checks the weights that forward and backward read, and measures what codecs lose. Nothing of it is in the wire log.

    Args:
        module: The model, its parameters partitioned by DeepSpeed.
        weights: Its weights.
        collectives: The stage's; hops go over their lanes.

    Attributes:
        ratios: Signal-to-noise ratios of the last audit in dB: of a role (``weights``, ``gradients``) all the way through
            the tiers, and of one tier's codec (``weights/node``). Those without loss, or without a finite signal, are left out.
    """

    def __init__(self, module: torch.nn.Module, weights: Weights, collectives: TieredCollectives) -> None:
        self._module, self._weights = module, weights
        self._plan: ShardPlan = collectives.plan
        self._collectives = collectives.beside(WireLog())
        self._count = 0
        self.ratios: dict[str, float] = {}

    @torch.no_grad()
    def run(self, step: int, gradient_of: Callable[[ZeroParameter], torch.Tensor]) -> None:
        """Audits before an optimizer step, when no hop is under way. Collective; waits for the device.

        Args:
            step: The number of the step, for messages.
            gradient_of: Gives this rank's shard of a parameter's gradient.

        Raises:
            StaleWeightsError: On all ranks, if one has found a difference.
        """
        self._collectives.pipeline.drain()
        with blaming():
            self._compare(step)
            self.ratios = self._measure(gradient_of)
            self._collectives.verify()
        self._count += 1
        if self.ratios and self._plan.rank == 0:
            texts = [f"{name} {ratio:.1f}" for name, ratio in self.ratios.items()]
            logger.info("hzero: signal-to-noise ratios before step %d, in dB: %s", step, ", ".join(texts))

    # ---- resident weights -------------------------------------------------------------------------------------------

    def _compare(self, step: int) -> None:
        resident = self._weights.resident()
        if not resident:
            return
        stale = torch.stack([self._is_stale(own, kept) for own, kept in resident])
        sums = torch.cat([checksums(kept.view(-1).view(torch.uint8), 1) for _, kept in resident])
        differs = torch.zeros_like(stale)
        for hop in self._plan.refresh_hops():  # equal on each tier outside the scope: equal on all of them
            lane = ("weights", hop.tier)
            chain = self._collectives.send(lane, sums.view(torch.uint8).view(-1), "weights of an audit", "library")
            differs |= (chain.wait().view(torch.int64).view(hop.size, *sums.shape) != sums).any(dim=2).any(dim=0)
        found = torch.stack([stale, differs]).to(torch.uint8)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        names = {id(param): name for name, param in self._module.named_parameters()}
        stale_names, different_names = (
            [
                names.get(id(own.param), f"parameter {own.param.ds_id}")
                for (own, _), mark in zip(resident, marks)
                if mark
            ]
            for marks in found.tolist()
        )
        parts = []
        if stale_names:
            parts.append(
                f"the resident copies of {len(stale_names)} of {len(resident)} weights are not what their owners hold: "
                f"{some(stale_names, _NAMED)}. Something has changed them behind the stage: change weights inside "
                "deepspeed.zero.GatheredParameters with a modifier_rank, or call "
                "hzero.state(engine).weights.mark_stale() on all ranks afterwards"
            )
        if different_names:
            parts.append(
                f"ranks that hold the same copies of {len(different_names)} of {len(resident)} weights have different ones: "
                f"{some(different_names, _NAMED)}. Go back to a checkpoint from before, and look at the links between nodes "
                '("checksum": true finds the message)'
            )
        if parts:
            error = StaleWeightsError(f"hzero: guard before step {step} of this engine: {'; '.join(parts)}")
            error.elsewhere = self._plan.rank != 0
            raise error

    def _is_stale(self, own: Managed, kept: torch.Tensor) -> torch.Tensor:
        """Whether a refresh would now make other bytes of this rank's shard than its copy has; bool ``[]``."""
        compared = self._weights.own_shard(own)
        if compared is None:
            return torch.zeros((), dtype=torch.bool, device=kept.device)
        copy, fresh = (tensor.reshape(-1).view(torch.uint8) for tensor in compared)
        return (copy != fresh).any()

    # ---- codecs -----------------------------------------------------------------------------------------------------

    def _measure(self, gradient_of: Callable[[ZeroParameter], torch.Tensor]) -> dict[str, float]:
        """Ratios of a sample, gathered and summed with and without codecs."""
        tiers = noise.lossy_tiers(self._plan)
        if not tiers:
            return {}
        params: list[ZeroParameter] = [param for param in self._module.parameters() if param.requires_grad]
        mean = sum(param.ds_numel for param in params) / len(params)
        large = [param for param in params if param.ds_numel >= mean]
        param = large[self._count % len(large)]
        gradients = self._sample(gradient_of, params)
        weights = self._weights.primary_shard(param)
        device = gradients.device
        powers = torch.stack([self._of_weights(param), self._of_gradients(gradients)])
        powers[0] /= self._plan.grid.world_size  # all ranks hold the same
        dist.all_reduce(powers)
        found = dict(zip(("weights", "gradients"), powers.tolist()))
        round_trips = noise.of_codecs(tiers, {"weights": [weights], "gradients": [gradients]}, device)
        for (role, _), names, power in zip(tiers, tiers.values(), round_trips):
            found.update({f"{role}/{tier}": power for tier in names})
        ratios = {name: noise.decibels(*power) for name, power in found.items()}
        return {name: ratio for name, ratio in ratios.items() if ratio is not None and math.isfinite(ratio)}

    def _of_weights(self, param: ZeroParameter) -> torch.Tensor:
        """Powers of one parameter, as forward gathers it and from the primary shards."""
        decoded, exact = self._weights.gathered_both_ways(param, self._collectives)
        return noise.power(exact[: param.ds_numel], decoded[: param.ds_numel])

    def _sample(
        self, gradient_of: Callable[[ZeroParameter], torch.Tensor], params: Sequence[ZeroParameter]
    ) -> torch.Tensor:
        """This rank's shards of gradients, one after the other, in float32: as many values as on the other ranks."""
        wanted, shards = max(_SAMPLE // self._plan.grid.world_size, _LEAST), []
        for place in range(len(params)):
            shard = gradient_of(params[(place + self._count) % len(params)]).detach().flatten()[:wanted]
            shards.append(shard.float())
            wanted -= shard.numel()
            if not wanted:
                break
        return torch.cat(shards)

    def _of_gradients(self, sample: torch.Tensor) -> torch.Tensor:
        """Powers of this rank's part of the sum of all ranks' samples."""
        chunk = -(-sample.numel() // self._plan.grid.world_size)
        hops = self._plan.reduce_hops()
        bucket = Bucket((0,), (chunk,), torch.float32, "gradients", name="gradients of an audit")
        sums: list[torch.Tensor] = []
        for way in (plain(hops), hops):
            chain: Chain[list[torch.Tensor]] = self._collectives.reduce(
                way, bucket, [sample], rows=self._plan.grid.world_size, shard_order=True, seed=self._plan.rank
            )
            sums += chain.wait()
        return noise.power(*sums)
