"""The ranks over which DeepSpeed partitions beside other kinds of parallelism: an ``mpu`` of a model's own, and AutoTP."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from deepspeed.utils.bwc import bwc_pipeline_parallel_world_size

from hzero.block import KEY
from hzero.config import Topology
from hzero.engine.engine import Partition, ranks_of
from hzero.topology import Grid, resolve_grid
from hzero.validation import ConfigError, some


def partition_of_autotp(size: int, world: Grid, rank: int) -> Partition:
    """The partition beside DeepSpeed's AutoTP, whose groups are made later than the first check of an engine.

    Its tensor groups are neighbours in the order of ranks (``deepspeed.utils.groups._init_tp_mesh_device``).

    Args:
        size: Ranks of a tensor group.
        world: Grid of the world.
        rank: Of the world.

    Raises:
        ConfigError: The world cannot be divided so, a tensor group crosses nodes, or groups do not fill the tiers evenly.
    """
    if world.world_size % size:
        raise ConfigError(f"tensor_parallel.autotp_size: found {size}, which does not divide {world.world_size} ranks")
    for first in range(0, world.world_size, size):  # all, so that all ranks end alike
        _check_tensor_group(list(range(first, first + size)), world)
    return Partition.of_ranks(range(rank % size, world.world_size, size), world, rank)


def group_of(mpu: Any) -> Any:
    """The process group over which DeepSpeed will partition with this ``mpu``; None for the world."""
    if mpu is None or hasattr(mpu, "initialize_sequence_parallel"):
        return None  # of Ulysses, which splits sequences and no parameters
    if hasattr(mpu, "get_sequence_data_parallel_group"):
        return mpu.get_sequence_data_parallel_group()
    return mpu.get_data_parallel_group()


def check_mpu(mpu: Any, topology: Topology) -> None:
    """Refuses groups of model parallelism that the stage does not work beside, on all ranks if it does on one. Collective.

    Raises:
        ConfigError: Pipeline parallelism; a tensor group that is not inside a node, or does not fill its tiers evenly; data
            and tensor groups that are not the world together.
    """
    group = group_of(mpu)
    if group is None or not hasattr(mpu, "get_model_parallel_group"):
        return
    world = resolve_grid(topology, dist.get_world_size())
    try:
        _check_groups(mpu, group, world)
        found = None
    except ConfigError as error:
        found = str(error)
    every: list[str | None] = [None] * world.world_size
    dist.all_gather_object(every, found)
    if (first := next(filter(None, every), None)) is not None:
        raise ConfigError(first)


def _check_groups(mpu: Any, group: Any, world: Grid) -> None:
    """`check_mpu` on this rank."""
    stages = bwc_pipeline_parallel_world_size(mpu)
    of_pipeline = hasattr(
        mpu, "get_slice_parallel_group"
    )  # PipelineParallelGrid, whose model-parallel group has all stages
    if stages > 1 and not of_pipeline:
        raise ConfigError(
            f"mpu: found {stages} pipeline stages, which {KEY} supports with deepspeed.PipelineModule alone; possible: tensor "
            "parallelism"
        )
    ranks = ranks_of(mpu.get_slice_parallel_group() if of_pipeline else mpu.get_model_parallel_group())
    data = ranks_of(group)
    if of_pipeline:
        for others in (data, ranks_of(mpu.get_pipe_parallel_group())):
            world.of_ranks(others)
    elif len(ranks) * len(data) != world.world_size or set(ranks) & set(data) != {dist.get_rank()}:
        raise ConfigError(
            f"mpu: found {len(data)} data-parallel and {len(ranks)} model-parallel ranks in a world of {world.world_size}; "
            "the one number times the other has to be the world, and a rank may meet another one in one of them only"
        )
    _check_tensor_group(ranks, world)


def _check_tensor_group(ranks: list[int], world: Grid) -> None:
    if world.of_ranks(ranks).nodes > 1:
        raise ConfigError(
            f"the tensor group of ranks {some(list(map(str, ranks)), 16)} crosses nodes ({world}); tensor groups have to lie "
            "inside a node, devices of a package first"
        )
