"""DeepSpeed's AutoTP: the sums of its linear layers over a tensor group, tier by tier and with the codecs of the block."""

from __future__ import annotations

import logging
import types
from typing import Any

import torch
from deepspeed.module_inject.layers import (
    GatherFromTensorParallelRegion,
    LinearAllreduce,
    LinearLayer,
    TensorParallel_Layer,
)
from deepspeed.runtime.config import DeepSpeedConfig

from hzero.block import KEY
from hzero.comm import Communicator, for_dimension
from hzero.comm.activations import copy_to, reduce_from
from hzero.config import HZeroConfig, tiers_inside
from hzero.deepspeed.refusals import check_tensor_group
from hzero.engine.engine import Owners
from hzero.topology import Grid
from hzero.validation import ConfigError, is_rank_0, some

logger = logging.getLogger("hzero")


def check(config: DeepSpeedConfig, block: HZeroConfig, world: Grid | None) -> Owners | None:
    """Refuses tensor groups that do not fit the world, and what does not go with codecs of AutoTP's sums.

    The tensor groups are neighbours in the order of ranks (``deepspeed.utils.groups._init_tp_mesh_device``).

    Args:
        config: The configuration, as DeepSpeed has read it.
        block: The block, parsed.
        world: Grid of the world; None where it is not known: tensor groups may then cross every tier inside a node.

    Returns:
        The owners to which rank 0 belongs beside its tensor group; None where the world is not known.

    Raises:
        ConfigError: The world cannot be divided so, a tensor group crosses nodes, or groups do not fill the tiers evenly.
            DeepSpeed is to hide its sums behind compute, or codecs that the user has written have no effect.
    """
    size, owners = config.tensor_parallel_config.autotp_size, None
    tiers = tiers_inside("node")  # outside which no tensor group is allowed
    if world is not None:
        if world.world_size % size:
            raise ConfigError(
                f"tensor_parallel.autotp_size: found {size}, which does not divide {world.world_size} ranks"
            )
        for first in range(0, world.world_size, size):  # all, so that all ranks end alike
            check_tensor_group(range(first, first + size), world)
        owners = Owners.of_ranks(range(0, world.world_size, size), world, 0)
        tiers = world.of_ranks(range(size)).crossed
    coded = [tier for tier in tiers if not block.codecs.tensor[tier].traits.plain]
    written = "tensor" in block.written_dimensions
    if config.tensor_parallel_config.tp_overlap_comm and coded:
        whose = "" if written else f" of preset {block.preset!r}"
        raise ConfigError(
            f"tensor_parallel.tp_overlap_comm: found True, with {KEY}.codecs.tensor{whose}, whose sums are waited for; possible: "
            "false, or codec none"
        )
    if written and not coded:
        raise ConfigError(
            f"{KEY}.codecs.tensor: none on the tiers that tensor groups of {size} ranks "
            f"{'cross' if world is not None else 'can cross'} ({', '.join(tiers)}), and so without effect"
        )
    return owners


def take_over(module: torch.nn.Module, config: HZeroConfig, world: Grid) -> Communicator | None:
    """Gives the sums of AutoTP's linear layers to a communicator of dimension ``tensor``. Collective over the world.

    Without codecs for the tiers that they cross they stay DeepSpeed's own, and so do those of layers with a forward that is
    neither ``LinearLayer``'s nor ``LinearAllreduce``'s, which are named in a warning.

    Args:
        module: An engine's model, which AutoTP has divided or not.
        config: The block.
        world: Grid of the world.

    Returns:
        The communicator; None where all sums stay DeepSpeed's.
    """
    found: dict[str, Any] = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, TensorParallel_Layer) and layer.is_tp_parallel
    }
    if not found:
        return None
    first = next(iter(found.values()))
    crossed = world.of_ranks(range(first.tp_world_size)).crossed  # by all groups: neighbours in the order of ranks
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
            "hzero: codecs.tensor does not reach layers of AutoTP with a forward of their own: %s",
            some(others, 4),
        )
    return group


def give_back(module: torch.nn.Module, group: Any = None) -> None:
    """Gives layers of AutoTP their own forward: for the next engine of a model, or with its communicator, of one engine alone."""
    for layer in module.modules():
        if "hzero_group" in vars(layer) and group in (None, layer.hzero_group):
            del layer.hzero_group, layer.forward


def _column(layer: Any, tensor: torch.Tensor) -> torch.Tensor:
    """``LinearLayer.forward``: each rank has some outputs, so in backward the gradients of the input are summed.

    A head's logits are gathered uncoded, by DeepSpeed.
    """
    output = torch.nn.functional.linear(copy_to(tensor, layer.hzero_group), layer.weight, layer.bias)
    if layer.gather_output:
        return GatherFromTensorParallelRegion.apply(layer.mp_group, output, layer._partition_sizes)
    return output


def _row(layer: Any, tensor: torch.Tensor) -> torch.Tensor:
    """``LinearAllreduce.forward``: each rank has some inputs, so outputs are summed, and then get the bias."""
    output = reduce_from(torch.nn.functional.linear(tensor, layer.weight), layer.hzero_group)
    return output if layer.bias is None else output + layer.bias


_FORWARDS: dict[Any, Any] = {LinearLayer.forward: _column, LinearAllreduce.forward: _row}
