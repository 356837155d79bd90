"""Muon: each matrix whole on one rank, from shards over the data-parallel ranks and back, tier by tier.

Stock gathers the gradient and the momentum of every matrix on all ranks, and their updates again: four times the model over the
slowest wire. The momentum needs no whole matrix, so it stays sharded. The orthogonalisation (Newton-Schulz,
https://kellerjordan.github.io/posts/muon) is stock's, of one matrix on one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hzero.comm import Communicator, for_dimension
from hzero.config import HZeroConfig
from hzero.engine.engine import Owners


class Matrix(NamedTuple):
    """This rank's shard of a matrix that Muon steps; both tensors are changed in place.

    Attributes:
        param: The parameter, as DeepSpeed's ``zero.Init`` has changed it.
        gradient: ``[ceil(numel / ranks)]``, in any type; becomes the update.
        momentum: Of the same size, in the type in which matrices travel.
    """

    param: Any
    gradient: torch.Tensor
    momentum: torch.Tensor


class Orthogonalizer:
    """Muon's update of sharded matrices, with the codecs of dimension ``optimizer``.

    Args:
        config: The block.
        owners: The ranks over which matrices are sharded.

    Attributes:
        group: Carries them.
    """

    def __init__(self, config: HZeroConfig, owners: Owners) -> None:
        self.group: Communicator = for_dimension("optimizer", config, owners.group, grid=owners.world, uses=["sums"])

    def update(self, matrices: Iterable[Matrix], beta: float, method: str) -> None:
        """Replaces gradients by updates, and moves the momentum on. Collective.

        A matrix with a gradient that is not finite gets an update of NaN, which makes the norm NaN and so discards the step on
        all ranks. Its momentum stays as it was.

        Args:
            matrices: The same on all ranks.
            beta: The momentum's.
            method: Newton-Schulz method of stock.
        """
        # Rounds of one matrix for each rank, of nearly equal sizes, since all messages of a round are as long as the longest.
        ordered = sorted(matrices, key=lambda matrix: -matrix.gradient.numel())
        ranks = self.group.plan.grid.world_size
        rounds = [self._round(ordered[at : at + ranks], beta, method) for at in range(0, len(ordered), ranks)]
        # While this rank computes, the next matrices travel, and the last ones back. Only they are in memory.
        under_way: list[Iterator[None]] = []
        while rounds or under_way:
            under_way[:0] = [rounds.pop(0)] if rounds else []
            under_way = [one for one in under_way if next(one, "done") is None]

    def _round(self, matrices: Sequence[Matrix], beta: float, method: str) -> Iterator[None]:
        """Steps one matrix for each rank, or for fewer in the last round. Yields where messages are under way."""
        # Imported here because the import compiles its kernels.
        from deepspeed.runtime.zero.muon.original_muon import muon_update

        rank, ranks = self.group.plan.rank, self.group.plan.grid.world_size
        message = matrices[0].momentum.new_zeros(ranks, matrices[0].gradient.numel())
        momenta = []
        for row, matrix in zip(message, matrices):
            gradient = matrix.gradient.to(message.dtype)
            momenta.append(matrix.momentum.lerp(gradient, 1 - beta))
            row[: gradient.numel()] = gradient.lerp(momenta[-1], beta)  # Nesterov's
        sent = self.group.all_to_all(message, async_op=True)
        yield

        received, answer = sent.wait(), torch.zeros_like(message)
        if rank < len(matrices):
            param, chunk = matrices[rank].param, matrices[rank].gradient.numel()
            whole = received[:, :chunk].reshape(-1)[: param.ds_numel].view(param.ds_shape)
            heads = getattr(param, "muon_num_heads", None)
            # With a momentum that equals the gradient, the update is the orthogonalisation of the gradient alone.
            update = muon_update(whole, whole.clone(), nesterov=False, ns_method=method, num_heads=heads)
            update = torch.where(torch.isfinite(whole).all(), update, torch.nan).reshape(-1)
            padded = torch.nn.functional.pad(update, (0, ranks * chunk - param.ds_numel))
            answer[:, :chunk] = padded.view(ranks, chunk)
        returned = self.group.all_to_all(answer, async_op=True)
        yield

        for row, matrix, momentum in zip(returned.wait(), matrices, momenta):
            update = row[: matrix.gradient.numel()]
            matrix.momentum.copy_(torch.where(torch.isfinite(update).all(), momentum, matrix.momentum))
            matrix.gradient.copy_(update)
