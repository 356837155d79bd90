"""A GPT-NeoX whose layers are split over tensor groups (Megatron-LM, arXiv 1909.08053) and divided into pipeline stages.

Attention heads and hidden units of the MLP are divided among the ranks of a tensor group: the projections to queries, keys
and values and to the hidden units by their outputs, the projections back by their inputs. Norms, embeddings and the biases
after a sum are whole on every rank; their gradients are the same bits on all ranks of a group.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch.nn import functional as F  # noqa: N812

from hzero.comm import Communicator
from hzero.comm.activations import copy_to, reduce_from
from hzero.comm.wires import process_group, world_timeout


@dataclass(frozen=True)
class Layout:
    """Where ranks are: tensor groups innermost, stages of a pipeline outermost, data-parallel groups between them.

    Attributes:
        ranks: The rank of every place.
        tensor: Ranks of a tensor group.
        pipeline: Stages of a pipeline.
    """

    ranks: Sequence[int]
    tensor: int
    pipeline: int = 1

    @property
    def data(self) -> int:
        """Ranks of a data-parallel group."""
        return len(self.ranks) // self.tensor // self.pipeline

    def places(self, rank: int) -> tuple[int, int, int]:
        """Stage of a rank, its number in its data-parallel group, and in its tensor group."""
        group, tensor = divmod(self.ranks.index(rank), self.tensor)
        return *divmod(group, self.data), tensor

    def tensor_group(self, rank: int) -> list[int]:
        """The tensor group of a rank, in order."""
        return [other for other in self.ranks if self.places(other)[:2] == self.places(rank)[:2]]

    def data_group(self, rank: int) -> list[int]:
        """The data-parallel group of a rank, in order."""
        return [other for other in self.ranks if self.places(other)[::2] == self.places(rank)[::2]]


class Mpu:
    """The groups of a layout, under the names that DeepSpeed expects of an ``mpu``."""

    def __init__(self, layout: Layout) -> None:
        self._rank, self._layout = dist.get_rank(), layout
        timeout = world_timeout()
        self._tensor = process_group(("mpu tensor", "intra_package"), layout.tensor_group(self._rank), timeout)
        self._data = process_group(("mpu data", "inter_node"), layout.data_group(self._rank), timeout)

    def get_model_parallel_group(self) -> Any:
        """The tensor group."""
        return self._tensor

    def get_model_parallel_rank(self) -> int:
        """This rank's place in the tensor group."""
        return self._layout.places(self._rank)[2]

    def get_model_parallel_world_size(self) -> int:
        """Size of the tensor group."""
        return self._layout.tensor

    def get_data_parallel_group(self) -> Any:
        """The data-parallel group."""
        return self._data

    def get_data_parallel_rank(self) -> int:
        """This rank's place in the data-parallel group."""
        return self._layout.places(self._rank)[1]

    def get_data_parallel_world_size(self) -> int:
        """Size of the data-parallel group."""
        return self._layout.data


class ColumnParallel(torch.nn.Module):
    """This rank's part of the outputs of a linear layer: ``[.., in]``, the same on all ranks, to ``[.., out / ranks]``."""

    def __init__(self, whole: torch.nn.Linear, group: Communicator) -> None:
        super().__init__()
        self._group = group
        self.weight = _part(whole.weight, group, 0)
        self.bias = None if whole.bias is None else _part(whole.bias, group, 0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's outputs."""
        return F.linear(copy_to(tokens, self._group), self.weight, self.bias)


class RowParallel(torch.nn.Module):
    """A linear layer of this rank's part of the inputs, summed over the group: ``[.., in / ranks]`` to ``[.., out]``."""

    def __init__(self, whole: torch.nn.Linear, group: Communicator) -> None:
        super().__init__()
        self._group = group
        self.weight = _part(whole.weight, group, 1)
        self.bias = whole.bias

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The sum over the group."""
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
_SPLIT: dict[str, type[ColumnParallel] | type[RowParallel]] = {
    "attention.query_key_value": ColumnParallel,
    "attention.dense": RowParallel,
    "mlp.dense_h_to_4h": ColumnParallel,
    "mlp.dense_4h_to_h": RowParallel,
}


def split(model: Any, group: Communicator) -> None:
    """Replaces the linear layers of a whole GPT-NeoX, which is the same on all ranks, by this rank's parts."""
    for layer in model.gpt_neox.layers:
        for name, kind in _SPLIT.items():
            parent, _, own = name.rpartition(".")
            module = layer.get_submodule(parent)
            setattr(module, own, kind(getattr(module, own), group))


class _Stage(torch.nn.Module):
    """The layers of one stage of a model, which is used up. The first looks embeddings up; the last has norm and head."""

    def __init__(self, model: Any, stage: int, stages: int) -> None:
        super().__init__()
        self._first, self._last = stage == 0, stage == stages - 1
        first, last = (len(model.gpt_neox.layers) * number // stages for number in (stage, stage + 1))
        self.gpt_neox = model.gpt_neox
        self.gpt_neox.layers = self.gpt_neox.layers[first:last]
        if not self._first:
            self.gpt_neox.embed_in = None
        if self._last:
            self.embed_out = model.lm_head
        else:
            self.gpt_neox.final_layer_norm = torch.nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        given = {"input_ids": inputs} if self._first else {"inputs_embeds": inputs}
        hidden: torch.Tensor = self.gpt_neox(**given).last_hidden_state
        return self.embed_out(hidden) if self._last else hidden


def pipeline_of(model: Any, layout: Layout, rank: int) -> PipelineModule:
    """The stages of a GPT-NeoX, of which this rank keeps one; a layer without parameters replaces each of the others."""
    loss = functools.partial(_loss, model.loss_function, model.config.vocab_size)
    stages: list[torch.nn.Module] = [torch.nn.Identity() for _ in range(layout.pipeline)]
    stage, _, _ = layout.places(rank)
    stages[stage] = _Stage(model, stage, layout.pipeline)
    topology = PipeModelDataParallelTopology(layout.pipeline, layout.tensor, layout.data)
    with contextlib.redirect_stdout(None):  # a dozen lines about layers
        return PipelineModule(stages, topology=topology, loss_fn=loss, partition_method="uniform")


def _loss(of: Callable[..., torch.Tensor], vocab: int, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return of(logits=logits, labels=labels, vocab_size=vocab)
