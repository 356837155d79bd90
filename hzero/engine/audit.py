"""Audit: whether resident weights are those of their owners and of the other copies, and how much codecs lose on the way."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from hzero.comm import Bucket, Chain, Collectives, WireLog, blaming
from hzero.comm.checksum import checksums
from hzero.config import Role
from hzero.deepspeed.partition import speaks
from hzero.deepspeed.refusals import ZeroParameter
from hzero.engine import noise
from hzero.engine.managed import Managed
from hzero.engine.weights import Weights
from hzero.plan.program import reduce_program
from hzero.plan.shards import ShardPlan, plain
from hzero.validation import PlainError, of_all_ranks, some

logger = logging.getLogger("hzero")

#: Names that a message gives of a set of parameters.
_NAMED = 8
#: Elements of gradients that are summed with and without codecs, on all ranks together; a chunk has at least `_CHUNK`, since
#: blocks that are shorter than a codec's lose less.
_SAMPLE, _CHUNK = 1 << 20, 256


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
            the tiers, and of one tier's codec (``weights/node``). Those without loss, or without a finite signal, are left
            out. Those of gradients are of stand-ins: a rank does not keep its whole gradients, so its shards of their sums
            take their place.
    """

    def __init__(self, module: torch.nn.Module, weights: Weights, collectives: Collectives) -> None:
        self._module, self._weights = module, weights
        self._plan: ShardPlan = collectives.plan
        self._collectives = collectives.beside(WireLog())
        self._count = 0
        self.ratios: dict[str, float] = {}

    @torch.no_grad()
    def run(
        self, step: int, params: Iterable[ZeroParameter], gradient_of: Callable[[ZeroParameter], torch.Tensor]
    ) -> None:
        """Audits before an optimizer step. Collective; waits for the device.

        Args:
            step: The number of the step, for messages.
            params: Those that the optimizer steps.
            gradient_of: Gives this rank's shard of the gradient of one of them.

        Raises:
            StaleWeightsError: On all ranks, if one has found a difference.
        """
        self._collectives.lanes.drain()
        with blaming():
            self._compare(step)
            self.ratios = self._measure(params, gradient_of)
            self._collectives.verify()
        self._count += 1
        if self.ratios and speaks():
            texts = [f"{name} {ratio:.1f}" for name, ratio in self.ratios.items()]
            logger.info("hzero: signal-to-noise ratios before step %d, in dB: %s", step, ", ".join(texts))

    # ---- resident weights -------------------------------------------------------------------------------------------

    def _compare(self, step: int) -> None:
        resident = self._weights.resident()
        if not resident:
            return
        stale = torch.stack([self._is_stale(managed, kept) for managed, kept in resident])
        sums = torch.cat([checksums(kept.view(-1).view(torch.uint8), 1) for _, kept in resident])
        # One sum of all sums first: those of each parameter, from each peer, would take a gigabyte of a large world.
        both = torch.cat([stale, self._differing(checksums(sums.view(torch.uint8).view(-1), 1))]).to(torch.uint8)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        parts = []
        if names := self._names(resident, both[:-1]):
            parts.append(
                f"the resident copies of {len(names)} of {len(resident)} weights are not what their owners hold: "
                f"{some(names, _NAMED)}. Something has changed them behind the stage: change weights inside "
                "deepspeed.zero.GatheredParameters with a modifier_rank, or call "
                "hzero.state(engine).weights.mark_stale() on all ranks afterwards"
            )
        if bool(both[-1]):
            differing = self._differing(sums).to(torch.uint8)
            dist.all_reduce(differing, dist.ReduceOp.MAX)
            names = self._names(resident, differing)
            parts.append(
                f"ranks that hold the same copies of {len(names)} of {len(resident)} weights have different ones: "
                f"{some(names, _NAMED)}. Go back to a checkpoint from before, and look at the links between nodes "
                '("checksum": true finds the message)'
            )
        if parts:
            raise of_all_ranks(StaleWeightsError(f"guard before step {step} of this engine: {'; '.join(parts)}"))

    def _is_stale(self, managed: Managed, kept: torch.Tensor) -> torch.Tensor:
        """Whether a refresh would now make other bytes of this rank's shard than its copy has; bool ``[]``."""
        compared = self._weights.own_shard(managed)
        if compared is None:
            return torch.zeros((), dtype=torch.bool, device=kept.device)
        copy, fresh = (tensor.reshape(-1).view(torch.uint8) for tensor in compared)
        return (copy != fresh).any()

    def _differing(self, sums: torch.Tensor) -> torch.Tensor:
        """Which of the sums, int64 ``[n, 2]``, another rank with the same copies has otherwise; bool ``[n]``."""
        differs = torch.zeros(len(sums), dtype=torch.bool, device=sums.device)
        for hop in self._plan.refresh_hops():  # equal on each tier outside the scope: equal on all of them
            lane = ("weights", hop.tier)
            chain = self._collectives.send(lane, "all_gather", sums.view(torch.uint8).view(-1), "weights of an audit")
            differs |= (chain.wait().view(torch.int64).view(hop.size, *sums.shape) != sums).any(dim=2).any(dim=0)
        return differs

    def _names(self, resident: Sequence[tuple[Managed, torch.Tensor]], marks: torch.Tensor) -> list[str]:
        names = {id(param): name for name, param in self._module.named_parameters()}
        marked = [managed.param for (managed, _), mark in zip(resident, marks.tolist()) if mark]
        return [names.get(id(param), f"parameter {param.ds_id}") for param in marked]

    # ---- codecs -----------------------------------------------------------------------------------------------------

    def _measure(
        self, params: Iterable[ZeroParameter], gradient_of: Callable[[ZeroParameter], torch.Tensor]
    ) -> dict[str, float]:
        """Ratios of a weight and of a sample of gradients, with codecs against without."""
        tiers = noise.lossy_tiers(self._plan)
        gatherable = [param for param in self._weights.gatherable() if self._weights.is_usual(param)]
        if not tiers or not gatherable:
            return {}
        gradients = self._sample(list(params), gradient_of)
        if not len(gradients):
            return {}
        mean = sum(param.ds_numel for param in gatherable) / len(gatherable)
        large = [param for param in gatherable if param.ds_numel >= mean]
        param = large[self._count % len(large)]
        weights = self._weights.primary_shard(param).to(gradients.device)
        powers = torch.stack([self._of_weights(param, weights), self._of_gradients(gradients)])
        dist.all_reduce(powers)
        found = dict(zip(("weights", "gradients"), powers.tolist()))
        shards: dict[Role, list[torch.Tensor]] = {"weights": [weights], "gradients": [gradients]}
        for (role, _), names, power in zip(tiers, tiers.values(), noise.of_codecs(tiers, shards, gradients.device)):
            found.update({f"{role}/{tier}": power for tier in names})
        ratios = {name: noise.decibels(*power) for name, power in found.items()}
        return {name: ratio for name, ratio in ratios.items() if ratio is not None and math.isfinite(ratio)}

    def _of_weights(self, param: ZeroParameter, exact: torch.Tensor) -> torch.Tensor:
        """Powers of this rank's shard of a parameter as forward gathers it."""
        whole = self._weights.whole(param, self._collectives)
        return noise.power(exact, whole.view(self._plan.grid.world_size, -1)[self._plan.rank, : len(exact)])

    def _sample(
        self, params: Sequence[ZeroParameter], gradient_of: Callable[[ZeroParameter], torch.Tensor]
    ) -> torch.Tensor:
        """Float32 values as large as gradients are, as many on every rank: its shards, again from the first if they are few."""
        device = torch.device(get_accelerator().current_device_name())
        world = self._plan.grid.world_size
        wanted = left = max(_SAMPLE // world**2, _CHUNK) * world
        shards = [torch.empty(0, device=device)]
        for place in range(len(params)):
            shard = gradient_of(params[(place + self._count) % len(params)]).detach().flatten()[:left]
            shards.append(shard.to(device, torch.float32))
            left -= shard.numel()
            if not left:
                break
        found = torch.cat(shards)
        return found.repeat(-(-wanted // max(len(found), 1)))[:wanted]

    def _of_gradients(self, sample: torch.Tensor) -> torch.Tensor:
        """Powers of this rank's part of the sum of all ranks' samples."""
        world, hops = self._plan.grid.world_size, self._plan.reduce_hops()
        bucket = Bucket((0,), (len(sample) // world,), torch.float32, "gradients", name="gradients of an audit")
        sums: list[torch.Tensor] = []
        for way in (plain(hops), hops):
            program = reduce_program(self._plan, way, world, shard_order=True)
            chain: Chain[list[torch.Tensor]] = self._collectives.run(
                program, bucket, lambda: [sample], lambda sums: sums, seed=self._plan.rank
            )
            sums += chain.wait()
        return noise.power(*sums)
