"""Sequence parallelism of a GPT-NeoX by Ulysses (arXiv 2309.14509): ranks of a group hold parts of every sequence.

All that works on single tokens runs on a rank's own part. Attention alone exchanges: each rank gets all tokens of its share of
the heads, and gives back what they attend to. Parameters are whole, so DeepSpeed and the stage shard them over the whole world.
A rank's loss is its part of the group's mean loss, times the ranks of the group. So the world's mean of losses, and of
gradients, is that of whole sequences, and the engine need not know of the groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F  # noqa: N812
from transformers import AttentionInterface

from hzero.collectives import Communicator, for_dimension
from hzero.collectives.activations import exchange
from hzero.collectives.process_groups import shared_groups
from hzero.collectives.recorder import world_timeout
from hzero.settings.settings import Settings
from hzero.train.batches import IGNORED, Batch

#: The name of this attention in transformers, which makes no mask for it: it is causal, and sees whole sequences.
_NAME = "hzero_ulysses"


def sequence_group(settings: Settings, config: dict[str, Any]) -> Communicator:
    """The communicator of this rank's sequence group, with the codecs of ``codecs.sequence``. A collective of the group.

    Args:
        settings: The run's settings.
        config: DeepSpeed's configuration.
    """
    ranks = settings.sequence.tensor_group(dist.get_rank())
    group = shared_groups.get(("sequence", "gcd"), ranks, world_timeout())
    return for_dimension("sequence", config, group, grid=settings.grid)


def divide(model: Any, group: Communicator) -> None:
    """Makes the attention of a GPT-NeoX exchange heads for sequence.

    Args:
        model: A ``GPTNeoXForCausalLM``, whose heads the group's size divides.
        group: The sequence group.
    """
    AttentionInterface.register(_NAME, _attend)
    for layer in model.gpt_neox.layers:
        layer.attention.sequence_group = group
    model.set_attn_implementation(_NAME)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of ``[batch, heads, length / ranks, size]`` each; ``[batch, length / ranks, heads, size]``."""
    group = module.sequence_group
    query, key, value = exchange(torch.stack([query, key, value]), group, split=2, gather=3)
    seen = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True, scale=scaling)
    return exchange(seen, group, split=2, gather=1).transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def whole_sequences(model: Any) -> Iterator[None]:
    """Inside, each rank computes whole sequences alone, as to write a sample."""
    chosen = model.config._attn_implementation
    if chosen != _NAME:
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(chosen)


def part_of(batch: Batch, rank: int, ranks: int) -> Batch:
    """A rank's part of a group's batch, whose loss is its part of the batch's mean loss, times the ranks.

    Sequences are padded to a multiple of the ranks. The label of a token is the one behind it, also where a part ends.

    Args:
        batch: The same on all ranks of the group.
        rank: Number of this rank in the group.
        ranks: Its size.
    """
    ids, labels = batch.inputs["input_ids"], batch.inputs["labels"]
    length = -(-ids.shape[1] // ranks) * ranks
    following = np.full((len(ids), length), IGNORED)
    following[:, : ids.shape[1] - 1] = labels[:, 1:]
    padded = np.pad(ids, ((0, 0), (0, length - ids.shape[1])))
    positions = np.broadcast_to(np.arange(length), padded.shape)
    part = slice(rank * length // ranks, (rank + 1) * length // ranks)
    inputs = {"input_ids": padded, "labels": following, "shift_labels": following, "position_ids": positions}
    counted = np.asarray((following != IGNORED).sum() / ranks, np.float32)
    own = {name: np.ascontiguousarray(array[:, part]) for name, array in inputs.items()}
    return replace(batch, inputs={**own, "num_items_in_batch": counted})
