"""Muon under DeepSpeed: stock's update, with one owner for each matrix.

Stock gathers the gradient and the momentum of every matrix on all ranks, and then the updates. This transfers four times the
model over the slowest tier. The momentum can be updated in shards, so it stays sharded here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hzero.config import HZeroConfig
from hzero.engine.engine import Owners
from hzero.engine.muon import MatrixOwners
from hzero.errors import ConfigError
from hzero.program.matrices import Matrix


class Shard(NamedTuple):
    """This rank's shard of a matrix that Muon steps. Both tensors are changed in place.

    Attributes:
        param: The parameter, with the attributes of DeepSpeed's ``zero.Init``.
        gradient: ``[ceil(numel / ranks)]``, any dtype. The update replaces it.
        momentum: ``[ceil(numel / ranks)]``, in the dtype of messages.
    """

    param: Any
    gradient: torch.Tensor
    momentum: torch.Tensor


class Orthogonalizer(MatrixOwners):
    """Muon's update of sharded matrices by stock's function.

    Args:
        config: The block.
        owners: The ranks over which matrices are sharded.
        module: The model, whose parameters DeepSpeed has partitioned and marked.

    Raises:
        ConfigError: Stock's function cannot orthogonalise a parameter.
    """

    def __init__(self, config: HZeroConfig, owners: Owners, module: torch.nn.Module) -> None:
        param: Any
        for name, param in module.named_parameters():
            # The function would return another shape, and fail on one rank between two collectives.
            if getattr(param, "use_muon", False) and len(param.ds_shape) == 4:
                found = f"{name} of shape {list(param.ds_shape)}"
                raise ConfigError(
                    f"optimizer.type: found muon for {found}; expected matrices, since DeepSpeed's update would return another "
                    "shape; use another optimizer"
                )
        super().__init__(config, owners)

    def orthogonalize(self, shards: Sequence[Shard], beta: float, method: str) -> None:
        """Replaces gradients by updates, and updates the momentum. Collective.

        If the gradient of a matrix is not finite, its update is NaN. The norm is then NaN, so all ranks discard the step. The
        momentum of the matrix does not change.

        Args:
            shards: Shards of the same matrices on all ranks.
            beta: Factor of the momentum.
            method: Stock's Newton-Schulz method.
        """
        # Imported here, since the import compiles kernels.
        from deepspeed.runtime.zero.muon.original_muon import muon_update

        momenta: dict[int, torch.Tensor] = {}

        def send(number: int) -> torch.Tensor:
            _, gradient, momentum = shards[number]
            gradient = gradient.to(momentum.dtype)
            momenta[number] = momentum.lerp(gradient, 1 - beta)
            return gradient.lerp(momenta[number], beta)  # Nesterov momentum

        def compute(numbers: list[int], wholes: list[torch.Tensor]) -> list[torch.Tensor]:
            updates = []
            for number, whole in zip(numbers, wholes):
                heads = getattr(shards[number].param, "muon_num_heads", None)
                # If the momentum equals the gradient, the update is the orthogonalised gradient.
                # Stock compiles it. On CPU, this takes a minute and a C++ compiler, and gains nothing.
                with torch.compiler.set_stance("force_eager" if whole.is_cpu else "default"):
                    update = muon_update(whole, whole.clone(), nesterov=False, ns_method=method, num_heads=heads)
                updates.append(torch.where(torch.isfinite(whole).all(), update, torch.nan))
            return updates

        def receive(number: int, update: torch.Tensor) -> None:
            _, gradient, momentum = shards[number]
            momentum.copy_(torch.where(torch.isfinite(update).all(), momenta.pop(number), momentum))
            gradient.copy_(update[: gradient.numel()])

        matrices = [Matrix(tuple(one.param.ds_shape), one.gradient.numel()) for one in shards]
        if shards:
            self.update(matrices, shards[0].momentum, send, compute, receive)
