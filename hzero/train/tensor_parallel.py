"""Tensor parallelism of a GPT-NeoX: its groups, and its layers split over a group (Megatron-LM, arXiv 1909.08053).

Heads of attention and hidden units of the MLP are divided among the ranks of a group: the projections to queries, keys and
values and up to the hidden units by their outputs, those back by their inputs. Norms, embeddings and the biases behind a sum
are whole on every rank. Their gradients are the same bits on all ranks of a group, since whatever they are computed from is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812

from hzero.collectives import Communicator
from hzero.collectives.activations import copy_to, reduce_from
from hzero.collectives.process_groups import shared_groups
from hzero.collectives.recorder import world_timeout
from hzero.sharding.tensor_groups import TensorGroups


class Groups:
    """The groups of a layout, as DeepSpeed asks an ``mpu`` for them. A rank makes its own two, as they live, once a world.

    Args:
        layout: The layout.
    """

    def __init__(self, layout: TensorGroups) -> None:
        self._rank, self._layout = dist.get_rank(), layout
        timeout = world_timeout()
        self._tensor = shared_groups.get(("mpu tensor", "gcd"), layout.tensor_group(self._rank), timeout)
        self._data = shared_groups.get(("mpu data", "node"), layout.data_group(self._rank), timeout)

    def get_model_parallel_group(self) -> Any:
        """The tensor group."""
        return self._tensor

    def get_model_parallel_rank(self) -> int:
        """This rank's number in it."""
        return self._layout.tensor_rank(self._rank)

    def get_model_parallel_world_size(self) -> int:
        """Its size."""
        return self._layout.tensor

    def get_data_parallel_group(self) -> Any:
        """The data-parallel group."""
        return self._data

    def get_data_parallel_rank(self) -> int:
        """This rank's number in it."""
        return self._layout.data_rank(self._rank)

    def get_data_parallel_world_size(self) -> int:
        """Its size."""
        return self._layout.data


class ColumnParallel(torch.nn.Module):
    """A part of the outputs of a linear layer.

    Args:
        whole: The layer, of which this rank takes its part.
        group: The tensor group.
    """

    def __init__(self, whole: torch.nn.Linear, group: Communicator) -> None:
        super().__init__()
        self._group = group
        self.weight = _part(whole.weight, group, 0)
        self.bias = None if whole.bias is None else _part(whole.bias, group, 0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[.., in]``, the same on all ranks, to ``[.., out / ranks]``."""
        return F.linear(copy_to(tokens, self._group), self.weight, self.bias)


class RowParallel(torch.nn.Module):
    """A linear layer of a part of the inputs, summed over the group. Each rank has the whole bias.

    Args:
        whole: The layer, of which this rank takes its part.
        group: The tensor group.
    """

    def __init__(self, whole: torch.nn.Linear, group: Communicator) -> None:
        super().__init__()
        self._group = group
        self.weight = _part(whole.weight, group, 1)
        self.bias = whole.bias

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[.., in / ranks]`` to ``[.., out]``, the same on all ranks."""
        total = reduce_from(F.linear(tokens, self.weight), self._group)
        return total if self.bias is None else total + self.bias


def _part(whole: torch.Tensor, group: Communicator, dim: int) -> torch.nn.Parameter:
    """This rank's part along a dimension. DeepSpeed's norm counts it on every rank, by the attribute that Megatron sets."""
    part = whole.detach().chunk(group.plan.grid.world_size, dim)[group.plan.rank].clone()
    made = torch.nn.Parameter(part, requires_grad=whole.requires_grad)
    made.tensor_model_parallel = True  # type: ignore[attr-defined]
    return made


#: Of a layer of transformers' GPT-NeoX: the linear layers that are split, and how. Queries, keys and values of a head lie next
#: to each other, so equal parts of the rows are whole heads.
SPLIT: dict[str, type[ColumnParallel] | type[RowParallel]] = {
    "attention.query_key_value": ColumnParallel,
    "attention.dense": RowParallel,
    "mlp.dense_h_to_4h": ColumnParallel,
    "mlp.dense_4h_to_h": RowParallel,
}


def joined(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A whole parameter from those of all ranks of a tensor group, in order, by its name in the model."""
    layer, _, own = name.rpartition(".")
    kind = next((kind for split, kind in SPLIT.items() if layer.endswith(f".{split}")), None)
    if kind is ColumnParallel:
        return torch.cat(list(parts), 0)
    return torch.cat(list(parts), 1) if kind is RowParallel and own == "weight" else parts[0]


def split(model: Any, group: Communicator) -> None:
    """Replaces the linear layers in the layers of a whole GPT-NeoX by this rank's parts.

    Args:
        model: A ``GPTNeoXForCausalLM``, the same on all ranks.
        group: The tensor group, whose size divides heads and hidden units.
    """
    for layer in model.gpt_neox.layers:
        for name, kind in SPLIT.items():
            parent, _, own = name.rpartition(".")
            module = layer.get_submodule(parent)
            setattr(module, own, kind(getattr(module, own), group))
