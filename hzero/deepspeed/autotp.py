"""DeepSpeed's AutoTP: sums of linear layers over a tensor group, tier by tier and with the codecs of the block."""

from __future__ import annotations

import logging
import types
from typing import Any

import torch
from deepspeed.module_inject.layers import LinearAllreduce, LinearLayer, TensorParallel_Layer
from deepspeed.runtime.config import DeepSpeedConfig

from hzero.block import KEY
from hzero.comm import Communicator, for_dimension
from hzero.comm.activations import copy_to, reduce_from
from hzero.config import HZeroConfig, tiers_inside
from hzero.deepspeed.refusals import check_tensor_group
from hzero.engine.engine import Owners
from hzero.errors import ConfigError, is_rank_0, some
from hzero.topology import Grid

logger = logging.getLogger("hzero")


def check(config: DeepSpeedConfig, block: HZeroConfig, world: Grid | None) -> Owners | None:
    """Refuses tensor groups that do not fit the world, and settings that do not fit codecs of AutoTP's sums.

    The ranks of a tensor group are neighbours (``deepspeed.utils.groups._init_tp_mesh_device``).

    Args:
        config: The configuration, as DeepSpeed has read it.
        block: The block, parsed.
        world: Grid of the world. None if it is not known. Tensor groups may then cross every tier inside a node.

    Returns:
        The data-parallel ranks of rank 0, which own the primary shards. None if the world is not known.

    Raises:
        ConfigError: The size of tensor groups does not divide the world, a tensor group crosses nodes, or groups do not fill
            the tiers evenly. It is also raised if DeepSpeed would overlap the sums with compute, or if the user's codecs
            would have no effect.
    """
    size, owners = config.tensor_parallel_config.autotp_size, None
    tiers = tiers_inside("node")  # tensor groups may not cross others
    if world is not None:
        if world.world_size % size:
            raise ConfigError(
                f"tensor_parallel.autotp_size: found {size}; expected a divisor of {world.world_size} ranks"
            )
        for first in range(0, world.world_size, size):  # all groups, so that all ranks raise the same error
            check_tensor_group(range(first, first + size), world, "tensor_parallel.autotp_size")
        owners = Owners.of_ranks(range(0, world.world_size, size), world, 0)
        tiers = world.of_ranks(range(size)).crossed
    coded = [tier for tier in tiers if not block.codecs.tensor[tier].traits.plain]
    if config.tensor_parallel_config.tp_overlap_comm and coded:
        raise ConfigError(
            f"tensor_parallel.tp_overlap_comm: found True with {KEY}.codecs.tensor, whose sums cannot overlap with "
            "compute; expected false, or codec none"
        )
    if "tensor" in block.codecs.dimensions and not coded:
        raise ConfigError(
            f"{KEY}.codecs.tensor: found none on the tiers that tensor groups of {size} ranks "
            f"{'cross' if world is not None else 'can cross'} ({', '.join(tiers)}); expected a codec on one of them"
        )
    return owners


def take_over(module: torch.nn.Module, config: HZeroConfig, world: Grid) -> Communicator | None:
    """Makes AutoTP's linear layers sum with a communicator of dimension ``tensor``. Collective over the world.

    If no tier that the sums cross has a codec, DeepSpeed's sums remain. They also remain in layers whose forward is neither
    ``LinearLayer``'s nor ``LinearAllreduce``'s. A warning has the names of these layers.

    Args:
        module: An engine's model, with or without layers of AutoTP.
        config: The block.
        world: Grid of the world.

    Returns:
        The communicator. None if all of DeepSpeed's sums remain.
    """
    found: dict[str, Any] = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, TensorParallel_Layer) and layer.is_tp_parallel
    }
    if not found:
        return None
    first = next(iter(found.values()))
    crossed = world.of_ranks(range(first.tp_world_size)).crossed  # the same for all groups, whose ranks are neighbours
    if all(config.codecs.tensor[tier].traits.plain for tier in crossed):
        return None
    group = for_dimension("tensor", config, first.mp_group, grid=world, uses=("sums", "copies"))
    others = []
    for name, layer in found.items():
        if "forward" in vars(layer) or type(layer).forward not in _FORWARDS:
            others.append(f"{name} ({type(layer).__name__})")
        else:
            layer.hzero_group, layer.forward = group, types.MethodType(_FORWARDS[type(layer).forward], layer)
    if others and is_rank_0():
        logger.warning(
            "hzero: codecs.tensor has no effect on layers of AutoTP with another forward: %s",
            some(others, 4),
        )
    return group


def give_back(module: torch.nn.Module, group: Any = None) -> None:
    """Restores the forward of AutoTP's and AutoEP's layers.

    Args:
        module: The model.
        group: Restores only layers that use this communicator. None: all layers, for the next engine of the model.
    """
    for layer in module.modules():
        if "hzero_group" in vars(layer) and group in (None, layer.hzero_group):
            del layer.hzero_group, layer.forward


def _column(layer: Any, tensor: torch.Tensor) -> torch.Tensor:
    """``LinearLayer.forward``. Each rank computes a part of the outputs, so backward sums the gradients of the input.

    DeepSpeed gathers the logits of a head, without codecs.
    """
    output = torch.nn.functional.linear(copy_to(tensor, layer.hzero_group), layer.weight, layer.bias)
    if getattr(layer, "gather_output", False):
        from deepspeed.module_inject.layers import GatherFromTensorParallelRegion  # older releases gather no output

        return GatherFromTensorParallelRegion.apply(layer.mp_group, output, layer._partition_sizes)
    return output


def _row(layer: Any, tensor: torch.Tensor) -> torch.Tensor:
    """``LinearAllreduce.forward``. Each rank has a part of the inputs, so outputs are summed before the bias is added."""
    output = reduce_from(torch.nn.functional.linear(tensor, layer.weight), layer.hzero_group)
    return output if layer.bias is None else output + layer.bias


_FORWARDS: dict[Any, Any] = {LinearLayer.forward: _column, LinearAllreduce.forward: _row}
