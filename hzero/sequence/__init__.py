"""Long sequences: attention, layers and loss in chunks on the host, and groups of ranks that share a sequence."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch.nn import Module

from hzero.comm import for_dimension
from hzero.config import HZeroConfig
from hzero.topology import Grid
from hzero.validation import attributes


def attach(model: Module, config: HZeroConfig, world: Grid, mark: Callable[..., Any] = lambda *_: None) -> None:
    """Makes a causal language model compute in chunks, and share each sequence with the ranks of a group. Collective.

    The model takes whole batches with labels as before, the same on all ranks of a group, and each rank computes its part of
    the tokens. Its loss is the mean over the labels of all batches of the world, and gradients that are averaged over all ranks
    are those of that loss. Without labels, as in generation, the model works as before. A forward is collective either way.

    Args:
        model: A causal language model of transformers or what wraps one, its weights whole or already sharded.
        config: The block; without its key ``sequence`` nothing happens.
        world: Grid of the world.
        mark: Called with each layer that reads its weights without calling the modules that have them, and True; and again
            with False when the model is detached.

    Raises:
        ConfigError: The groups fit neither the machine nor the model.
    """
    detacher(model)()
    if (settings := config.sequence) is None:
        return
    from hzero.sequence.models import ChunkedModel  # imports transformers

    settings.check(world.world_size, "ranks", "hzero.sequence.parallel")
    group = None
    if settings.parallel > 1:
        group = for_dimension("sequence", config, dist.new_subgroups(settings.parallel)[0], grid=world, uses=["sums"])
    chunked = ChunkedModel(model, settings, group)
    stock, names = chunked.model.forward, list(inspect.signature(chunked.model.forward).parameters)

    @functools.wraps(stock)  # clients read its signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        return chunked.forward(stock, {**dict(zip(names, args)), **kwargs})

    undo = ExitStack()
    undo.enter_context(attributes((chunked.model, "forward", forward)))
    for layer in chunked.layers:
        mark(layer, True)
        undo.callback(mark, layer, False)
    forward.detach = undo.close  # type: ignore[attr-defined]


def detacher(model: Module) -> Callable[[], None]:
    """Returns a function that undoes `attach`. It does nothing without `attach`, or if it has been undone already."""
    return next(filter(None, (getattr(one.forward, "detach", None) for one in model.modules())), lambda: None)
