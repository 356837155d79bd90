"""Long sequences: attention, layers and loss in chunks, with chunks in host memory and groups of ranks that share a sequence."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch.nn import Module

from hzero.calls import attributes
from hzero.comm import for_dimension
from hzero.config import HZeroConfig


def attach(model: Module, config: HZeroConfig, mark: Callable[..., Any] = lambda *_: None) -> None:
    """Makes a causal language model compute in chunks, and divides each sequence among the ranks of a group. Collective.

    Pass whole batches with labels, as before; all ranks of a group need the same batch. Each rank computes its part of the
    tokens. The loss is the mean over the labels of all batches of the world, and gradients averaged over all ranks are the
    gradients of that loss. Without labels, as in generation, every rank computes whole sequences.

    Every forward is collective over the world, also without labels, so that ranks which differ raise an error and do not wait.

    Args:
        model: A causal language model of transformers or a wrapper of one. Its weights may be sharded.
        config: The block. Without its key ``sequence`` the model is only detached.
        mark: Called as ``mark(layer, True)`` for each layer that runs in chunks, and as ``mark(layer, False)`` when the model
            is detached. Such a layer reads its weights without calling the modules that have them.

    Raises:
        ConfigError: The groups do not divide the ranks or the heads, or the model cannot run in chunks.
    """
    detacher(model)()
    if (settings := config.sequence) is None:
        return
    from hzero.sequence.models import ChunkedModel  # imports transformers

    settings.check(dist.get_world_size(), "ranks", "hzero.sequence.parallel")
    group = None
    if settings.parallel > 1:
        group = for_dimension("sequence", config, dist.new_subgroups(settings.parallel)[0], uses=["sums"])
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
