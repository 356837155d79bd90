"""Long sequences: attention, layers and loss in chunks on the host, and groups of ranks that share a sequence."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.distributed as dist

from hzero.comm import for_dimension
from hzero.config import HZeroConfig
from hzero.topology import Grid


def attach(model: torch.nn.Module, config: HZeroConfig, world: Grid, where: str = "hzero") -> list[torch.nn.Module]:
    """Makes a causal language model compute in chunks, and share each sequence with the ranks of a group. Collective.

    The model takes whole batches with labels as before, the same on all ranks of a group, and each rank computes its part of
    the tokens. Its loss is the mean over the labels of all batches of the world, and gradients that are averaged over all ranks
    are those of that loss. Without labels, as in generation, the model works as before.

    Args:
        model: A causal language model of transformers or what wraps one, its weights whole or already sharded.
        config: The block; without its key ``sequence`` nothing happens.
        world: Grid of the world.
        where: Begins messages.

    Returns:
        Layers that read their weights without calling the modules that have them.

    Raises:
        ConfigError: The groups fit neither the machine nor the model.
    """
    detach(model)
    if (settings := config.sequence) is None:
        return []
    from hzero.sequence.models import ChunkedModel  # imports transformers

    world.of_neighbours(settings.parallel, f"{where}.sequence.parallel")
    group = None
    if settings.parallel > 1:
        members, _ = dist.new_subgroups(settings.parallel)
        group = for_dimension("sequence", config, members, grid=world, uses=["sums"])
    chunked = ChunkedModel(model, settings, group)
    stock, names = chunked.model.forward, list(inspect.signature(chunked.model.forward).parameters)

    @functools.wraps(stock)  # clients read its signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        batch = {**dict(zip(names, args)), **kwargs}
        if batch.get("labels") is None and not (chunked.model.training and torch.is_grad_enabled()):
            return stock(*args, **kwargs)
        return chunked.forward(batch)

    forward.chunked = chunked  # type: ignore[attr-defined]
    chunked.model.forward = forward
    return chunked.layers


def detach(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Undoes `attach`, if it has been called. Returns the layers that it had given."""
    if (chunked := attached(model)) is None:
        return []
    chunked.model.forward = chunked.model.forward.__wrapped__
    return chunked.layers  # type: ignore[no-any-return]


def attached(model: torch.nn.Module) -> Any:
    """The `ChunkedModel` that `attach` has made; None without."""
    return next(filter(None, (getattr(one.forward, "chunked", None) for one in model.modules())), None)
