"""Scheme: one way to distribute training, with the interface that all schemes of a measurement share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.training import build
from hzero.topology import Grid


@dataclass(frozen=True)
class Job:
    """The work that all schemes of a measurement share.

    Attributes:
        model: The ``model`` group.
        train: The ``train`` block, as `benchmarks.rows.Train` has it.
        grid: Where the ranks sit, numbered node by node and package by package.
        bucket_numel: Elements that are gathered or reduced together: one transformer layer.
    """

    model: dict[str, Any]
    train: dict[str, Any]
    grid: Grid
    bucket_numel: int

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights in kernels and on the wires."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[self.train["dtype"]]

    @property
    def topology(self) -> dict[str, int]:
        """The grid as hzero's configurations declare it."""
        grid = self.grid
        return {
            "nodes": grid.nodes,
            "packages_per_node": grid.packages_per_node,
            "devices_per_package": grid.devices_per_package,
        }

    def build(self) -> torch.nn.Module:
        """The float32 model, equal on all ranks. Its weights are rounded to `dtype`, so that all schemes start equal."""
        built: torch.nn.Module = build(self.model, self.train["seed"])
        with torch.no_grad():
            for param in built.parameters():
                param.copy_(param.to(self.dtype))
        return built

    @property
    def adamw(self) -> dict[str, Any]:
        """Arguments of AdamW in all schemes."""
        train = self.train
        return {"lr": train["lr"], "betas": tuple(train["betas"]), "weight_decay": train["weight_decay"]}

    def optimizers(self, model: torch.nn.Module, muon: Callable[..., torch.optim.Optimizer]) -> list[Any]:
        """AdamW, and in measurements of Muon ``muon(matrices, lr=..)`` for the matrices of layers."""
        if not self.train["muon"]:
            return [torch.optim.AdamW(model.parameters(), **self.adamw)]
        layers = set(model.get_submodule("gpt_neox.layers").parameters())
        stepped = {param: param in layers and param.ndim == 2 for param in model.parameters()}
        matrices, rest = ([param for param, of in stepped.items() if of is kind] for kind in (True, False))
        return [muon(matrices, lr=self.train["lr"]), torch.optim.AdamW(rest, **self.adamw)]


class Scheme(ABC):
    """One engine with its model.

    Attributes:
        parameters: Elements of the whole model.
    """

    parameters: int

    @abstractmethod
    def step(self, batches: Sequence[torch.Tensor], rate: float) -> torch.Tensor:
        """Takes one optimizer step.

        Args:
            batches: Token ids of this rank for each micro-batch, int64 ``[micro_batch, length]``.
            rate: Learning rate.

        Returns:
            Mean loss of this rank, a float32 scalar.
        """

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Maximum bytes that a step of this rank holds of each state, temporary buffers not counted.

        Returns:
            ``weights``, ``gradients``, ``optimizer`` (float32 masters and moments).
        """

    @abstractmethod
    def fetches(self) -> float | None:
        """Gathers of each weight per micro-batch since `start_counting`, on average; None if nothing is gathered."""

    def start_counting(self) -> None:  # noqa: B027 - most schemes count nothing
        """Resets the counters."""


def tensor_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of tensors; of a sharded one, of this rank's part."""
    total = 0
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            total += local.numel() * local.element_size()
    return total
