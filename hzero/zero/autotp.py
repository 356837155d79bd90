"""DeepSpeed's AutoTP: the sums of its linear layers over a tensor group, tier by tier and with the codecs of the block."""

from __future__ import annotations

import logging
import types
from typing import Any

import torch
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, TensorParallel_Layer
from deepspeed.runtime.config import DeepSpeedConfig

from hzero.block import KEY
from hzero.collectives import for_dimension
from hzero.collectives.activations import copy_to, reduce_from
from hzero.config import TIERS, HZeroConfig
from hzero.topology import Grid
from hzero.validation import ConfigError, some
from hzero.zero.partition import speaks

logger = logging.getLogger("hzero")


def check(config: DeepSpeedConfig, block: HZeroConfig) -> None:
    """Refuses what does not go with codecs of AutoTP's sums.

    Raises:
        ConfigError: DeepSpeed is to hide its sums behind compute, or a codec does not hold their numbers.
    """
    exp = next((tier for tier in TIERS if block.codecs.tensor[tier].codec == "exp"), None)
    if exp is not None and not config.bfloat16_config.enabled:
        raise ConfigError(
            f"{KEY}.codecs.tensor.{exp}: found 'exp', which holds bfloat16 numbers, without bf16.enabled; possible with it, or "
            "mpc, none"
        )
    if config.tensor_parallel_config.tp_overlap_comm and _coded(block):
        raise ConfigError(
            f"tensor_parallel.tp_overlap_comm: found True, with {KEY}.codecs.tensor, whose sums are waited for; possible: false, "
            "or codec none"
        )


def take_over(module: torch.nn.Module, config: HZeroConfig, world: Grid) -> None:
    """Gives the sums of AutoTP's linear layers to a communicator of dimension ``tensor``. Collective over the world.

    Without codecs for that dimension they stay DeepSpeed's own, and so do those of layers with a forward that is neither
    ``LinearLayer``'s nor ``LinearAllreduce``'s, which are named in a warning.

    Args:
        module: An engine's model, which AutoTP has divided or not.
        config: The block.
        world: Grid of the world.
    """
    found: dict[str, Any] = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, TensorParallel_Layer) and layer.is_tp_parallel
    }
    if not found or not _coded(config):
        return
    group = for_dimension("tensor", config, next(iter(found.values())).mp_group, grid=world)
    left = []
    for name, layer in found.items():
        forward = None if getattr(layer, "gather_output", False) else _FORWARDS.get(type(layer).forward)
        if forward is None:
            left.append(f"{name} ({type(layer).__name__})")
        else:
            layer.hzero_group, layer.forward = group, types.MethodType(forward, layer)
    if left and speaks():
        logger.warning(
            "hzero: codecs.tensor does not reach layers of AutoTP with a forward or a gather of their own: %s",
            some(left, 4),
        )


def give_back(module: torch.nn.Module) -> None:
    """Undoes `take_over`, for the next engine of the same model."""
    for layer in module.modules():
        if vars(layer).pop("hzero_group", None) is not None:
            del layer.forward


def _coded(config: HZeroConfig) -> bool:
    return any(config.codecs.tensor[tier].codec != "none" for tier in TIERS)


def _column(layer: Any, tensor: torch.Tensor) -> torch.Tensor:
    """``LinearLayer.forward``: each rank has some outputs, so in backward the gradients of the input are summed."""
    return torch.nn.functional.linear(copy_to(tensor, layer.hzero_group), layer.weight, layer.bias)


def _row(layer: Any, tensor: torch.Tensor) -> torch.Tensor:
    """``LinearAllreduce.forward``: each rank has some inputs, so outputs are summed, and then get the bias."""
    output = reduce_from(torch.nn.functional.linear(tensor, layer.weight), layer.hzero_group)
    return output if layer.bias is None else output + layer.bias


_FORWARDS: dict[Any, Any] = {LinearLayer.forward: _column, LinearAllreduce.forward: _row}
