"""DeepSpeed's AutoEP: exchanges of tokens between experts, tier by tier and with the codecs of the block.

DeepSpeed partitions each expert over its expert-data-parallel group, and gathers and reduces it. The stage partitions all other
parameters over the world.
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
from hzero.validation import ConfigError, attributes, first_of_ranks


def is_expert(param: Any) -> bool:
    """Returns whether a parameter belongs to an expert of AutoEP."""
    return getattr(param, "ds_zero_placement_family", None) == "autoep_expert"


def take_over(module: torch.nn.Module, config: HZeroConfig, world: Grid) -> Communicator | None:
    """Makes AutoEP's layers exchange tokens with a communicator of dimension ``expert``. Collective over the world.

    If no tier that the exchanges cross has a codec, DeepSpeed's exchanges remain.

    Args:
        module: An engine's model, with or without layers of AutoEP.
        config: The block.
        world: Grid of the world.

    Returns:
        The communicator. None if DeepSpeed's exchanges remain.
    """
    modules: list[Any] = list(module.modules())
    layers = [one for one in modules if getattr(one, "_is_autoep_layer", False) and one.ep_size > 1]
    if not layers or all(config.codecs.expert[tier].traits.plain for tier in world.crossed):
        return None
    crossed, problem = [], None
    try:
        crossed = list(world.of_ranks(ranks_of(layers[0].ep_group)).crossed)
    except ConfigError as error:  # of some groups only
        problem = str(error)
    if problem := first_of_ranks(problem):
        raise ConfigError(problem)
    if all(config.codecs.expert[tier].traits.plain for tier in crossed):
        return None
    group = for_dimension("expert", config, layers[0].ep_group, grid=world, uses=())
    for layer in layers:
        layer.hzero_group, layer.forward = group, partial(_forward, type(layer).forward, layer)
    return group


def _forward(stock: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs the forward of a layer with the communicator's all-to-all."""
    from deepspeed.module_inject import auto_ep_layer  # older releases lack it

    def exchange(_: Any, tokens: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        return exchange_rows(tokens, layer.hzero_group, sent, received)

    with attributes((auto_ep_layer, "_AllToAllV", SimpleNamespace(apply=exchange))):
        return stock(layer, *args, **kwargs)
