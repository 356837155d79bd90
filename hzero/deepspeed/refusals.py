"""DeepSpeed features that the stage does not support, each refused by name; and the block, read and checked."""

from __future__ import annotations

import importlib.util
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils.bwc import bwc_pipeline_parallel_world_size
from pydantic import BaseModel
from torch.utils.hooks import RemovableHandle

from hzero.block import KEY, PARENT, find, lifted
from hzero.codecs.codec import FLOATS
from hzero.config import TIERS, UNLOADABLE, HZeroConfig, TopologyConfig, check_of_pipelines, parse_config
from hzero.deepspeed.versions import check_features
from hzero.engine.engine import Partition, ranks_of
from hzero.engine.parameter import Route
from hzero.topology import Grid, declared_grid, resolve_grid
from hzero.validation import ConfigError, one_of, some

#: Keys of DeepSpeed's configuration with values that are refused: where DeepSpeed keeps the value, which values are supported
#: besides None, and how a message says them.
_NOT_SUPPORTED: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "compile.deepcompile": ("compile_config.deepcompile", (False,), "false"),
    "hybrid_engine.enabled": ("hybrid_engine.enabled", (False,), "false"),
    "zero_optimization.zenflow": ("zero_config.zenflow", (), "no such key"),
    "expert_parallel.enabled (AutoEP)": ("expert_parallel_config.enabled", (False,), "false"),
    "zero_optimization.offload_optimizer.super_offload": (
        "zero_config.offload_optimizer.super_offload",
        (False,),
        "false",
    ),
    "zero_optimization.offload_param.device": ("zero_config.offload_param.device", ("none",), "none"),
    "zero_optimization.offload_optimizer.device": (
        "zero_config.offload_optimizer.device",
        ("none", "cpu"),
        "none or cpu",
    ),
    "zero_optimization.reduce_scatter": ("zero_config.reduce_scatter", (True,), "true"),
    "zero_optimization.zero_hpz_partition_size": (
        "zero_config.zero_hpz_partition_size",
        (0, 1),
        f'1; {KEY} has "shard": {{"weights": "node"}} for it',
    ),
    **{
        f"zero_optimization.{key}": (f"zero_config.{key}", (False,), f"false; {KEY} has codecs")
        for key in ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
    },
    "torch_autocast.enabled": ("torch_autocast_enabled", (False,), "false; use bf16 or fp16"),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": (
        "zero_config.use_all_reduce_for_fetch_params",
        (False,),
        "false",
    ),
    "zero_optimization.stage3_allgather_sequential": ("zero_config.allgather_sequential", (False,), "false"),
}
_NOT_IN_PIPELINES: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "fp16.enabled": ("float16_config.enabled", (False,), "false; use bf16"),
    "data_types.grad_accum_dtype": ("grad_accum_dtype", ("fp32",), "fp32"),
    "communication_data_type": ("communication_data_type", (), "no such key"),
    "gradient_allreduce_op": ("gradient_allreduce_op", ("mean",), "mean"),
    "prescale_gradients": ("prescale_gradients", (False,), "false"),
    "gradient_predivide_factor": ("gradient_predivide_factor", (1.0,), "1.0"),
    "zero_optimization.offload_optimizer.device": ("zero_config.offload_optimizer.device", ("none",), "none"),
    "zero_optimization.overlap_comm": ("zero_config.overlap_comm", (False,), "false"),
    **{f"zero_optimization.{key}": (f"zero_config.{key}", (False,), "false") for key in UNLOADABLE},
    "tensor_parallel.autotp_size": (
        "tensor_parallel_config.autotp_size",
        (0, 1),
        "1; tensor groups are those of the PipelineModule",
    ),
}


def check_config(config: DeepSpeedConfig, optimizer: str | None, pipeline: bool | None = None) -> None:
    """Refuses, by name, DeepSpeed features that the stage does not support, and codecs that do not go with others.

    Args:
        config: The configuration, as DeepSpeed has read it, with the block.
        optimizer: Name of the optimizer.
        pipeline: Whether the model is a ``PipelineModule``; None if that is not known yet.

    Raises:
        ConfigError: Naming the key, what was found and what is possible.
    """
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
    _refuse(config, _NOT_SUPPORTED, "")
    if stage == 1:
        _check_pipeline(config)
    elif config.tensor_parallel_config.autotp_size > 1:
        from hzero.deepspeed import autotp

        autotp.check(config, config.hzero_block)


def _check_pipeline(config: DeepSpeedConfig) -> None:
    """Refuses what has no effect, or is not supported, in an engine with pipeline stages."""
    check_of_pipelines(config._param_dict[KEY], KEY)
    for role, tier in itertools.product(("pipeline", "optimizer"), TIERS):
        codec = config.hzero_block.codecs[role][tier]
        if codec.traits.narrow and not config.bfloat16_config.enabled:
            raise ConfigError(
                f"{KEY}.codecs.{role}.{tier}: found {codec.codec!r}, which holds bfloat16 numbers, with float32; possible with "
                "bf16.enabled, or codec none"
            )
    _refuse(config, _NOT_IN_PIPELINES, " with pipeline stages")


def _refuse(config: DeepSpeedConfig, table: Mapping[str, tuple[str, tuple[Any, ...], str]], where: str) -> None:
    for key, (path, supported, possible) in table.items():
        found: Any = config
        for name in path.split("."):
            found = getattr(found, name, None)
        found = getattr(found, "value", found)  # of an enum
        if found is not None and found not in supported:
            shown = "a block" if isinstance(found, BaseModel) else found
            raise ConfigError(f"{key}: found {shown}, which {KEY} does not support{where}; possible: {possible}")


def check_block(block: Mapping[str, Any]) -> HZeroConfig:
    """The block, parsed, after a check of all that it names on this machine.

    Raises:
        ConfigError: As `parse_config`; or its topology is no preset and no file, or its transport is not installed.
    """
    config = parse_config(block)
    declared_grid(config.topology, f"{KEY}.topology")
    if config.transport == "mpi" and importlib.util.find_spec("mpi4py") is None:
        raise ConfigError(f"{KEY}.transport: found 'mpi', and mpi4py is not installed (hzero[mpi])")
    return config


def check_written(config: Mapping[str, Any], ranks: int | None = None) -> DeepSpeedConfig:
    """Reads a configuration as it is written, before there are ranks; reading one checks its block, see `hzero.autoload`.

    Values "auto" are left out, since a client will fill them in, and ``train_batch_size`` if the number of ranks is not known.

    Args:
        config: The configuration.
        ranks: Ranks that will share a batch; None if that is not known.

    Returns:
        The configuration, as DeepSpeed has read it.

    Raises:
        ConfigError: As `check_block` and `check_config`.
        Exception: DeepSpeed refuses the configuration, with errors of many types.
    """
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    without = _filled_in(config)
    if (block := find(config)) is not None:
        without = lifted(without, block)
    if ranks is None:
        without = {**sizes, **without}
        without.pop("train_batch_size", None)
    elif not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(without):
        without["train_micro_batch_size_per_gpu"] = 1
    if "stage" in (config.get(PARENT) or {}) and "stage" not in without[PARENT]:
        without[PARENT]["stage"] = 3  # DeepSpeed's default is not the value that the client fills in
    return DeepSpeedConfig(without) if ranks is None else _config_of(ranks)(without)


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


def _config_of(ranks: int) -> type[DeepSpeedConfig]:
    """DeepSpeed's configuration of a run on this number of ranks, which it would ask the process group for."""

    class Config(DeepSpeedConfig):  # type: ignore[misc]
        world_size = property(lambda self: ranks, lambda self, asked: None)

    return Config


def _filled_in(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _filled_in(value) if isinstance(value, Mapping) else value
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
                f"{KEY}.codecs.weights.{narrow.tier}: found {narrow.codec.codec!r}, which holds bfloat16 numbers, "
                f"with {param.dtype} of {name}; "
                "possible with bf16.enabled, or codec none"
            )


def check_kinds(module: torch.nn.Module, group: Any) -> list[RemovableHandle]:
    """Refuses parameters that DeepSpeed itself cannot gather in a forward. Collective.

    Those that the backend cannot send are refused at once. A module whose parameters are all empty is refused when its
    forward runs: nothing would make DeepSpeed gather them, and an unused one does no harm.

    Args:
        module: The model, its parameters partitioned by DeepSpeed.
        group: The ranks over which they are; None is the world.

    Returns:
        Hooks of the modules whose parameters are all empty.

    Raises:
        ConfigError: Naming the parameter that the backend cannot send.
    """
    if (found := unsendable(module, group)) is not None:
        raise found
    hooks = []
    for path, one in module.named_modules():
        own = dict(one.named_parameters(recurse=False))
        runs = type(one).forward is not torch.nn.Module.forward
        in_leaf = any(hasattr(param, "ds_z3_leaf_module") for param in own.values())
        if own and runs and not in_leaf and not any(param.ds_numel for param in own.values()):  # type: ignore[attr-defined]
            refuse = partial(_refuse_empty, f"{path}{'.' if path else ''}{next(iter(own))}")
            hooks.append(one.register_forward_pre_hook(torch.compiler.disable(refuse), prepend=True))
    return hooks


def _refuse_empty(name: str, *_: Any) -> None:
    raise ConfigError(
        f"parameter {name}: found no elements; DeepSpeed gathers nothing for a module whose parameters are all empty, and its "
        "forward would fail; remove the parameter or make it a buffer"
    )


def unsendable(module: torch.nn.Module, group: Any) -> ConfigError | None:
    """The error for the first parameter that DeepSpeed cannot send over ``group``; None if it can send all. Collective."""
    world, sent = dist.get_world_size(group), set(FLOATS)
    for name, param in module.named_parameters():
        shard = getattr(param, "ds_tensor", None)
        dtype = param.dtype if shard is None else shard.dtype
        try:
            if shard is None:
                param.data.view(torch.uint8)  # as DeepSpeed broadcasts it
            if dtype not in sent and world > 1:  # a backend refuses a type before it sends anything, on all ranks
                part = torch.zeros(1, device=get_accelerator().current_device_name()).to(dtype)
                dist.all_gather_into_tensor(part.new_empty(world), part, group=group)
        except (RuntimeError, TypeError, ValueError) as error:
            shape = tuple(getattr(param, "ds_shape", param.shape))
            return ConfigError(
                f"parameter {name}: found a {type(param).__name__} of {dtype} and shape {shape}, which DeepSpeed cannot "
                f"send over {dist.get_backend(group)}: {' '.join(str(error).split())}; make it a buffer, or change its type"
            )
        sent.add(dtype)
    return None


def mixed_types(trained: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str]) -> ConfigError | None:
    """The error for trained parameters of several types; None if they have one.

    Args:
        trained: The parameters.
        names: Of the parameters.
    """
    types = Counter(param.dtype for param in trained)
    if len(types) < 2:
        return None
    usual = types.most_common(1)[0][0]
    other = next(param for param in trained if param.dtype != usual)
    return ConfigError(
        f"parameter {names.get(other)}: found {other.dtype}, but {usual} of other trained parameters; DeepSpeed's ZeRO-3 "
        "trains one type: convert the parameter, or freeze it"
    )


# ---- ranks --------------------------------------------------------------------------------------------------------------


def check_partition(module: torch.nn.Module, partition: Partition) -> None:
    """Refuses parameters that are partitioned over other ranks than the engine's.

    Raises:
        ConfigError: As under expert parallelism, or where ``deepspeed.zero.Init`` knew nothing of an mpu.
    """
    ranks = list(partition.ranks)
    for name, param in module.named_parameters():
        found = ranks_of(getattr(param, "ds_process_group", None))
        if found != ranks:
            raise ConfigError(
                f"parameter {name}: partitioned over {len(found)} ranks, and the engine over {len(ranks)}"
                f"{', others' if len(found) == len(ranks) else ''}; hzero needs one partition for all: no expert parallelism, "
                "and under deepspeed.zero.Init data_parallel_group=mpu.get_data_parallel_group()"
            )


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


def check_mpu(mpu: Any, topology: TopologyConfig) -> None:
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
