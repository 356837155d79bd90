"""DeepSpeed's AutoEP: tokens go to experts, and come back, tier by tier and with the codecs of the block.

DeepSpeed partitions each expert over its expert-data-parallel group. The stage leaves their gathers, gradients and refreshes to
DeepSpeed, and has all other parameters over the world.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from hzero.comm import Communicator, for_dimension
from hzero.comm.activations import exchange_rows
from hzero.config import HZeroConfig
from hzero.engine.engine import ranks_of
from hzero.topology import Grid
from hzero.validation import attributes


def is_expert(param: Any) -> bool:
    """Whether AutoEP has given a parameter to the ranks of an expert group."""
    return getattr(param, "ds_zero_placement_family", None) == "autoep_expert"


def take_over(module: torch.nn.Module, config: HZeroConfig, world: Grid) -> Communicator | None:
    """Gives the token exchanges of AutoEP's layers to a communicator of dimension ``expert``. Collective over the world.

    Without codecs for the tiers that they cross they stay DeepSpeed's own.

    Args:
        module: An engine's model, whose layers AutoEP has replaced or not.
        config: The block.
        world: Grid of the world.

    Returns:
        The communicator; None where all exchanges stay DeepSpeed's.
    """
    layers: list[Any] = [layer for layer in module.modules() if getattr(layer, "ep_size", 1) > 1]
    if not layers:
        return None
    crossed = world.of_ranks(ranks_of(layers[0].ep_group)).crossed
    if all(config.codecs.expert[tier].traits.plain for tier in crossed):
        return None
    group = for_dimension("expert", config, layers[0].ep_group, grid=world, uses=())
    for layer in layers:
        layer.hzero_group, layer.forward = group, partial(_forward, type(layer).forward, layer)
    return group


def _forward(stock: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a layer, with its all-to-alls."""
    from deepspeed.module_inject import auto_ep_layer  # which older releases lack

    def exchange(_: Any, tokens: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        return exchange_rows(tokens, layer.hzero_group, sent, received)

    with attributes((auto_ep_layer, "_AllToAllV", SimpleNamespace(apply=exchange))):
        return stock(layer, *args, **kwargs)
