"""DeepSpeed features that the stage does not support, each refused by name; and the block, read and checked."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils.bwc import bwc_pipeline_parallel_world_size
from pydantic import BaseModel

from hzero.block import KEY, PARENT
from hzero.deepspeed.versions import check_features
from hzero.engine.engine import Partition, ranks_of
from hzero.engine.parameter import Route
from hzero.topology import Grid, declared_grid
from hzero.validation import ConfigError, one_of, some

#: Keys of DeepSpeed's configuration, and the values that are supported besides null, with a hint after them.
_SUPPORTED = {
    "compile.deepcompile": "false",
    "hybrid_engine.enabled": "false",
    "zero_optimization.zenflow": "no such key",
    "expert_parallel.enabled": "false",
    "zero_optimization.offload_optimizer.super_offload": "false",
    "zero_optimization.offload_param.device": "none",
    "zero_optimization.offload_optimizer.device": "none or cpu",
    "zero_optimization.reduce_scatter": "true",
    "zero_optimization.zero_hpz_partition_size": f'0 or 1; {KEY} has "shard": {{"weights": "node"}} for it',
    "zero_optimization.zero_quantized_weights": f"false; {KEY} has codecs",
    "zero_optimization.zero_quantized_nontrainable_weights": f"false; {KEY} has codecs",
    "zero_optimization.zero_quantized_gradients": f"false; {KEY} has codecs",
    "torch_autocast.enabled": "false; use bf16 or fp16",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": "false",
    "zero_optimization.stage3_allgather_sequential": "false",
}
_SUPPORTED_IN_PIPELINES = {
    "fp16.enabled": "false; use bf16",
    "data_types.grad_accum_dtype": "fp32",
    "communication_data_type": "no such key",
    "gradient_allreduce_op": "mean",
    "prescale_gradients": "false",
    "gradient_predivide_factor": "1.0",
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.overlap_comm": "false",
    # Stock cannot load what it saves with the first, and with the second loads what was saved without it in another order.
    "zero_optimization.elastic_checkpoint": "false",
    "zero_optimization.round_robin_gradients": "false",
    "tensor_parallel.autotp_size": "0 or 1; tensor groups are those of the PipelineModule",
}
#: Where DeepSpeed keeps values of keys under other names.
_PLACES = {
    "compile": "compile_config",
    "zero_optimization": "zero_config",
    "expert_parallel": "expert_parallel_config",
    "torch_autocast.enabled": "torch_autocast_enabled",
    "stage3_use_all_reduce_for_fetch_params": "use_all_reduce_for_fetch_params",
    "stage3_allgather_sequential": "allgather_sequential",
    "fp16": "float16_config",
    "data_types.grad_accum_dtype": "grad_accum_dtype",
    "tensor_parallel": "tensor_parallel_config",
}
#: Keys of the block that pipelines have; the others say how stage 3 shards, and what watches its resident weights.
_OF_PIPELINES = (
    *("preset", "codecs", "block_size", "error_feedback", "node_all_gather", "checksum", "transport", "checkpoint"),
    "topology",
)


def check_config(config: DeepSpeedConfig, optimizer: str | None, pipeline: bool | None = None) -> None:
    """Refuses, by name, DeepSpeed features that the stage does not support, and what the block names and this machine lacks.

    Args:
        config: The configuration, as DeepSpeed has read it, with the block parsed.
        optimizer: Name of the optimizer.
        pipeline: Whether the model is a ``PipelineModule``; None if that is not known yet.

    Raises:
        ConfigError: Naming the key, what was found and what is possible.
    """
    declared_grid(config.hzero_block.topology, f"{KEY}.topology")
    if config.hzero_block.transport == "mpi" and importlib.util.find_spec("mpi4py") is None:
        raise ConfigError(f"{KEY}.transport: found 'mpi', and mpi4py is not installed (hzero[mpi])")
    check_features(config, pipeline=pipeline)
    stage = int(config.zero_config.stage)
    if pipeline and stage != 1:
        raise ConfigError(
            f"{KEY} needs zero_optimization.stage 1 with a PipelineModule, found {stage}; set it to 1 or remove the {KEY} block"
        )
    if not pipeline and stage != 3 and (pipeline is False or stage != 1):
        why = ", which is for a PipelineModule" if stage == 1 else ""
        raise ConfigError(
            f"{KEY} needs zero_optimization.stage 3, found {stage}{why}; set it to 3 or remove the {KEY} block"
        )
    if str(optimizer).lower() == "muon":
        raise ConfigError(
            f"optimizer.type: found {optimizer}, which {KEY} does not support; possible: another optimizer"
        )
    _refuse(config, _SUPPORTED, "")
    if stage == 1:
        _refuse(config, _SUPPORTED_IN_PIPELINES, " with pipeline stages")
        written = config._param_dict[KEY]
        unused = [key for key in written if key not in _OF_PIPELINES]
        unused += [f"codecs.{role}" for role in ("weights", "except") if role in written.get("codecs", {})]
        if unused:
            raise ConfigError(
                f"{KEY}.{unused[0]}: has no effect with pipeline stages; possible: {', '.join(_OF_PIPELINES)}, of "
                "codecs gradients, pipeline, optimizer and those of the model's dimensions"
            )


def _refuse(config: DeepSpeedConfig, table: Mapping[str, str], where: str) -> None:
    for key, possible in table.items():
        found: Any = config
        for name in (_PLACES.get(key) or key).split("."):
            found = getattr(found, _PLACES.get(name, name), None)
        found = getattr(found, "value", found)  # of an enum
        if found is not None and str(found).lower() not in possible.partition(";")[0].split(" or "):
            shown = "a block" if isinstance(found, BaseModel) else found
            raise ConfigError(f"{key}: found {shown}, which {KEY} does not support{where}; possible: {possible}")


def check_written(config: Mapping[str, Any], ranks: int | None = None) -> DeepSpeedConfig:
    """Reads a configuration as it is written, before there are ranks; reading one checks its block, see `hzero.autoload`.

    Values "auto" are left out, since a client will fill them in, and ``train_batch_size`` if the number of ranks is not known.

    Args:
        config: The configuration.
        ranks: Ranks that will share a batch; None if that is not known.

    Returns:
        The configuration, as DeepSpeed has read it.

    Raises:
        ConfigError: As `parse_config` and `check_config`.
        Exception: DeepSpeed refuses the configuration, with errors of many types.
    """
    without = _filled_in(config)
    if ranks is None:
        without.pop("train_batch_size", None)
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(without):
        without["train_micro_batch_size_per_gpu"] = 1
    if "stage" in (config.get(PARENT) or {}) and "stage" not in without[PARENT]:
        without[PARENT]["stage"] = 3  # DeepSpeed's default is not the value that the client fills in

    class Config(DeepSpeedConfig):  # type: ignore[misc]
        # DeepSpeed would ask the process group.
        world_size = property(lambda self: ranks or 1, lambda self, asked: None)

    return Config(without)


class _Asked(dict[str, Any]):
    """A configuration that remembers the keys that DeepSpeed has asked it for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked = {"sequence_parallel_size"}  # only ranks ask for it

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self


def ignored(read: DeepSpeedConfig, where: str) -> list[ConfigError]:
    """Errors for the keys that DeepSpeed ignores at the top level of ``where``, which `check_written` has read."""
    config = _Asked({key: value for key, value in read._param_dict.items() if key != KEY})
    type(read)(config)
    return [one_of(where, key, sorted(config.asked), "key") for key in config if key not in config.asked]


def _filled_in(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _filled_in(value) if isinstance(value, Mapping) and key != KEY else value
        for key, value in config.items()
        if value != "auto"
    }


def check_types(module: torch.nn.Module, routes: Mapping[torch.nn.Parameter, Route]) -> None:
    """Refuses codecs of bfloat16 for weights of another type.

    Args:
        module: The model.
        routes: Of its parameters.

    Raises:
        ConfigError: Naming the tier, the parameter and its type.
    """
    for name, param in module.named_parameters():
        narrow = next((hop for hop in routes[param].plan.gather_hops() if hop.codec.traits.narrow), None)
        if narrow and param.dtype != torch.bfloat16:
            raise ConfigError(
                f"{KEY}.codecs.weights.{narrow.tier}: found {narrow.codec.codec!r}, which holds bfloat16 numbers, with "
                f"{param.dtype} of {name}; possible with bf16.enabled, or codec none"
            )


# ---- ranks --------------------------------------------------------------------------------------------------------------


def check_partition(module: torch.nn.Module, ranks: Sequence[int]) -> None:
    """Refuses parameters that are partitioned over other ranks than the engine's.

    Raises:
        ConfigError: As under expert parallelism, or where ``deepspeed.zero.Init`` knew nothing of an mpu.
    """
    for name, param in module.named_parameters():
        found = ranks_of(getattr(param, "ds_process_group", None))
        if found != list(ranks):
            raise ConfigError(
                f"parameter {name}: partitioned over {len(found)} ranks, and the engine over {len(ranks)}"
                f"{', others' if len(found) == len(ranks) else ''}; hzero needs one partition for all: no expert parallelism, "
                "and under deepspeed.zero.Init data_parallel_group=mpu.get_data_parallel_group()"
            )


def partition_of_autotp(size: int, world: Grid, rank: int) -> Partition:
    """The partition beside DeepSpeed's AutoTP.

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
        _check_tensor_group(range(first, first + size), world)
    return Partition.of_ranks(range(rank % size, world.world_size, size), world, rank)


def check_mpu(mpu: Any, world: Grid) -> None:
    """Refuses groups of model parallelism that the stage does not work beside, on all ranks if it does on one. Collective.

    Args:
        mpu: As DeepSpeed gets it.
        world: Grid of the world.

    Raises:
        ConfigError: Pipeline parallelism, or a tensor group that is not inside a node or does not fill its tiers evenly.
    """
    # One of Ulysses splits sequences and no parameters.
    if not hasattr(mpu, "get_model_parallel_group") or hasattr(mpu, "initialize_sequence_parallel"):
        return
    every: list[str | None] = [None] * world.world_size
    try:
        _check_groups(mpu, world)
        dist.all_gather_object(every, None)
    except ConfigError as error:
        dist.all_gather_object(every, str(error))
    for found in filter(None, every):
        raise ConfigError(found)


def _check_groups(mpu: Any, world: Grid) -> None:
    """`check_mpu` on this rank."""
    if hasattr(mpu, "get_slice_parallel_group"):  # PipelineParallelGrid, whose model-parallel group has all stages
        tensor = ranks_of(mpu.get_slice_parallel_group())
        for group in (mpu.get_data_parallel_group(), mpu.get_pipe_parallel_group()):
            world.of_ranks(ranks_of(group))
    else:
        tensor = ranks_of(mpu.get_model_parallel_group())
        if (stages := bwc_pipeline_parallel_world_size(mpu)) > 1:
            raise ConfigError(
                f"mpu: found {stages} pipeline stages, which {KEY} supports with deepspeed.PipelineModule alone; possible: "
                "tensor parallelism"
            )
    _check_tensor_group(tensor, world)


def _check_tensor_group(ranks: Sequence[int], world: Grid) -> None:
    if world.of_ranks(ranks).nodes > 1:
        raise ConfigError(
            f"the tensor group of ranks {some(list(map(str, ranks)), 16)} crosses nodes ({world}); tensor groups have to lie "
            "inside a node, devices of a package first"
        )
