"""Muon: one rank collects the shards of a matrix, computes its update and sends it back, tier by tier.

Stock gathers the gradient and the momentum of every matrix on all ranks, and then the updates. This transfers four times the
model over the slowest tier. The momentum can be updated in shards, so it stays sharded here. Stock's function orthogonalises one
matrix on one rank (Newton-Schulz, https://kellerjordan.github.io/posts/muon).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hzero.comm import Communicator, for_dimension
from hzero.config import HZeroConfig
from hzero.engine.engine import Owners
from hzero.errors import ConfigError


class Matrix(NamedTuple):
    """This rank's shard of a matrix that Muon steps. Both tensors are changed in place.

    Attributes:
        param: The parameter, with the attributes of DeepSpeed's ``zero.Init``.
        gradient: ``[ceil(numel / ranks)]``, any dtype. The update replaces it.
        momentum: ``[ceil(numel / ranks)]``, in the dtype of messages.
    """

    param: Any
    gradient: torch.Tensor
    momentum: torch.Tensor


class Orthogonalizer:
    """Muon's update of sharded matrices, with the codecs of dimension ``optimizer``.

    Args:
        config: The block.
        owners: The ranks over which matrices are sharded.
        module: The model, whose parameters DeepSpeed has partitioned and marked.

    Attributes:
        group: The communicator that sends the matrices.

    Raises:
        ConfigError: Stock's function cannot orthogonalise a parameter.
    """

    def __init__(self, config: HZeroConfig, owners: Owners, module: torch.nn.Module) -> None:
        param: Any
        for name, param in module.named_parameters():
            # The function would return another shape, and fail on one rank between two collectives.
            if getattr(param, "use_muon", False) and len(param.ds_shape) == 4:
                found = f"{name} of shape {list(param.ds_shape)}"
                raise ConfigError(f"optimizer.type: found muon for {found}; expected no parameter of 4 dimensions")
        self.group: Communicator = for_dimension("optimizer", config, owners.group, grid=owners.world, uses=["sums"])

    def update(self, matrices: Iterable[Matrix], beta: float, method: str) -> None:
        """Replaces gradients by updates, and updates the momentum. Collective.

        If the gradient of a matrix is not finite, its update is NaN. The norm is then NaN, so all ranks discard the step. The
        momentum of the matrix does not change.

        Args:
            matrices: Shards of the same matrices on all ranks.
            beta: Factor of the momentum.
            method: Stock's Newton-Schulz method.
        """
        # A round has one matrix for each rank. Their sizes are similar, since all messages of a round have the longest's size.
        ordered = sorted(matrices, key=lambda matrix: -matrix.gradient.numel())
        ranks = self.group.plan.grid.world_size
        rounds = [self._round(ordered[at : at + ranks], beta, method) for at in range(0, len(ordered), ranks)]
        # The messages of the next and the last round overlap with compute. No other round is in memory.
        under_way: list[Iterator[None]] = []
        while rounds or under_way:
            under_way[:0] = [rounds.pop(0)] if rounds else []
            under_way = [one for one in under_way if next(one, "done") is None]

    def _round(self, matrices: Sequence[Matrix], beta: float, method: str) -> Iterator[None]:
        """Steps one matrix for each rank, or fewer in the last round. Yields while messages are in flight."""
        # Imported here, since the import compiles kernels.
        from deepspeed.runtime.zero.muon.original_muon import muon_update

        rank, ranks = self.group.plan.rank, self.group.plan.grid.world_size
        message = matrices[0].momentum.new_zeros(ranks, matrices[0].gradient.numel())
        momenta = []
        for row, matrix in zip(message, matrices):
            gradient = matrix.gradient.to(message.dtype)
            momenta.append(matrix.momentum.lerp(gradient, 1 - beta))
            row[: gradient.numel()] = gradient.lerp(momenta[-1], beta)  # Nesterov momentum
        sent = self.group.all_to_all(message, async_op=True)
        yield

        received, answer = sent.wait(), torch.zeros_like(message)
        if rank < len(matrices):
            param, chunk = matrices[rank].param, matrices[rank].gradient.numel()
            whole = received[:, :chunk].reshape(-1)[: param.ds_numel].view(param.ds_shape)
            heads = getattr(param, "muon_num_heads", None)
            # If the momentum equals the gradient, the update is the orthogonalised gradient.
            # Stock compiles it. On CPU, this takes a minute and a C++ compiler, and gains nothing.
            with torch.compiler.set_stance("force_eager" if whole.is_cpu else "default"):
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
