"""Checks a configuration and its block, and refuses DeepSpeed features that the stage does not support."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, DeepSpeedConfig
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils.bwc import bwc_pipeline_parallel_world_size
from pydantic import ValidationError

from hzero.block import KEY, PARENT
from hzero.deepspeed import versions
from hzero.deepspeed.autoep import is_expert
from hzero.engine.engine import ranks_of
from hzero.errors import ConfigError, agreed, one_of, some
from hzero.topology import Grid, declared_grid

#: Supported values of DeepSpeed's keys, besides null. A hint follows the semicolon.
_SUPPORTED = {
    "compile.deepcompile": "false",
    "hybrid_engine.enabled": "false",
    "zero_optimization.zenflow": "no such key",
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
#: Stock requires reduce_scatter false. An optimizer on the host would gather matrices without calling a hook of the stage.
_SUPPORTED_WITH_MUON = {
    "zero_optimization.reduce_scatter": "false",
    "zero_optimization.offload_optimizer.device": "none",
}
_SUPPORTED_WITH_EXPERTS = {
    "expert_parallel.comm_backend": "comm",
    "tensor_parallel.autotp_size": "0 or 1",
    "sequence_parallel_size": "1",
    "zero_optimization.offload_optimizer.device": "none",
}
_SUPPORTED_IN_PIPELINES = {
    "expert_parallel.enabled": "false",
    "fp16.enabled": "false; use bf16",
    "data_types.grad_accum_dtype": "fp32",
    "communication_data_type": "no such key",
    "gradient_allreduce_op": "mean",
    "prescale_gradients": "false",
    "gradient_predivide_factor": "1.0 or 1",
    "zero_optimization.offload_optimizer.device": "none",
    "zero_optimization.overlap_comm": "false",
    # Stock cannot load an elastic checkpoint. With round_robin_gradients it loads other checkpoints in the wrong order.
    "zero_optimization.elastic_checkpoint": "false",
    "zero_optimization.round_robin_gradients": "false",
    "tensor_parallel.autotp_size": "0 or 1; tensor groups are those of the PipelineModule",
}
_SUPPORTED_WITH_SEQUENCES = {"tensor_parallel.autotp_size": "0 or 1", "sequence_parallel_size": "1"}
#: Keys of the block that have an effect with pipeline stages. The others configure the shards and secondary partitions of stage
#: 3.
_OF_PIPELINES = (
    *("preset", "codecs", "rounding", "block_size", "error_feedback", "node_all_gather", "checksum", "transport"),
    *("checkpoint", "topology"),
)


def check_config(config: DeepSpeedConfig) -> None:
    """Refuses DeepSpeed features that the stage does not support, and settings of the block that this machine cannot use.

    Args:
        config: The configuration, as DeepSpeed has read it, with the block parsed. Stage 1 is for a ``PipelineModule``.

    Raises:
        ConfigError: A key has a value that is not supported. The message has the key, the value and the supported values.
    """
    block, stage, muon = config.hzero_block, int(config.zero_config.stage), config.optimizer_name == "muon"
    experts = getattr(getattr(config, "expert_parallel_config", None), "enabled", False)
    optimizer_class(config)
    # Requirements of this machine.
    declared_grid(block.topology, f"{KEY}.topology")
    if block.transport == "mpi" and importlib.util.find_spec("mpi4py") is None:
        raise ConfigError(f"{KEY}.transport: found 'mpi'; expected 'torch', or mpi4py installed (extra mpi of hzero)")
    # Features that this version of DeepSpeed lacks.
    size, managed = config.tensor_parallel_config.autotp_size, "managed_gradient_accumulation"
    newer = {
        "pipeline stages": "zero_optimization.stage: found 1" if stage == 1 else "",
        "AutoTP": f"tensor_parallel.autotp_size: found {size}" if size > 1 else "",
        "Muon": "optimizer.type: found muon" if muon else "",
        # Older versions ignore the key.
        f"{managed} false": f"{managed}: found False" if config._param_dict.get(managed, True) is False else "",
    }
    for feature in filter(newer.get, versions.lacking()):
        with_version = f"{newer[feature]}, with deepspeed {deepspeed.__version__}"
        raise ConfigError(f"{with_version}; {KEY} supports {feature} with deepspeed >={versions.NEWER[feature]},<0.20")
    # Features that the stage does not support.
    if stage not in (1, 3):
        raise ConfigError(
            f"zero_optimization.stage: found {stage} with the {KEY} block; expected 3, or 1 for a PipelineModule"
        )
    tables = [
        (_SUPPORTED | (_SUPPORTED_WITH_MUON if muon else {}), " with Muon" if muon else ""),
        (_SUPPORTED_WITH_EXPERTS if experts else {}, " with expert parallelism"),
        (_SUPPORTED_WITH_SEQUENCES if block.sequence is not None else {}, " with the key sequence"),
        (_SUPPORTED_IN_PIPELINES if stage == 1 else {}, " with pipeline stages"),
    ]
    # DeepSpeed's model of zero_optimization has replaced deprecated names.
    values = {**config._param_dict, PARENT: config.zero_config.model_dump(by_alias=True)}
    for key, possible, where in ((key, possible, where) for table, where in tables for key, possible in table.items()):
        found = _value(values, key)
        if found is not None and str(found).lower() not in possible.partition(";")[0].split(" or "):
            shown = "a block" if isinstance(found, Mapping) else found
            raise ConfigError(f"{key}: found {shown}, which {KEY} does not support{where}; expected {possible}")
    if experts and (muon or block.sequence is not None or block.checkpoint is not None or block.shard.exceptions):
        also = f"Muon, {KEY}.sequence, {KEY}.checkpoint or {KEY}.shard.except"
        raise ConfigError(f"expert_parallel.enabled: found True; expected false with {also}")
    if experts and (name := config.expert_parallel_config.preset_model) is not None:
        from deepspeed.module_inject.auto_ep_config import PRESET_MODELS  # older releases lack it

        if name not in PRESET_MODELS:
            raise one_of("expert_parallel.preset_model", name, PRESET_MODELS)
    # Stock keeps masters in bfloat16 only with moments in bfloat16, or on the host.
    masters, moments = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
    host = f"{PARENT}.offload_optimizer.device"
    if _value(values, masters) and not (found := _value(values, moments)) and _value(values, host) in (None, "none"):
        raise ConfigError(f"{moments}: found {found} with {masters}; expected true, or {host} cpu")
    if stage == 1 and muon:
        raise ConfigError("optimizer.type: found muon with pipeline stages; expected another optimizer")
    unused = [key for key in block.written if key.partition(".")[0] not in _OF_PIPELINES]
    unused += [key for key in ("codecs.weights", "codecs.except") if key in block.written]
    if stage == 1 and unused:
        raise ConfigError(
            f"{KEY}.{unused[0]}: has no effect with pipeline stages; expected {', '.join(_OF_PIPELINES)}; codecs for "
            "gradients, pipeline, optimizer and the model's dimensions"
        )


def optimizer_class(config: DeepSpeedConfig) -> Any:
    """Returns torch's class of the optimizer that a configuration names; None if DeepSpeed has another class for it.

    Raises:
        ConfigError: Neither DeepSpeed nor torch has such an optimizer.
    """
    adam = dict.fromkeys(("adam", "adamw"), torch.optim.AdamW)
    optimizers = {**dict.fromkeys(DEEPSPEED_OPTIMIZERS), **adam, **classes_of(torch.optim)}
    if (name := config.optimizer_name or "AdamW") not in optimizers:
        raise one_of("optimizer.type", name, optimizers)
    return optimizers[name]


def classes_of(module: Any) -> dict[str, Any]:
    """Returns the classes that a module or its submodules define, by name."""
    found = vars(module).items()
    return {name: one for name, one in found if inspect.isclass(one) and one.__module__.startswith(module.__name__)}


def _value(values: Mapping[str, Any], key: str) -> Any:
    """The value of a key with dots; of an enum, its value. None if the key is missing."""
    found: Any = values
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return getattr(found, "value", found)


def check_engine(engine: DeepSpeedEngine) -> None:
    """Refuses engines whose model, mpu or optimizer the stage does not support. The configuration does not show these.

    Raises:
        ConfigError: The stage does not fit the model, or the script passes an mpu or optimizer that is not supported.
    """
    stage, pipeline = engine.zero_optimization_stage(), isinstance(engine, PipelineEngine)
    if pipeline != (stage == 1):
        found, expected = ("3 with", 1) if pipeline else ("1 without", 3)
        raise ConfigError(
            f"zero_optimization.stage: found {found} a PipelineModule; expected {expected}, or no {KEY} block"
        )
    if pipeline and type(engine) is not PipelineEngine:  # such as DualPipeVEngine
        raise ConfigError(
            f"{KEY}: found the engine {type(engine).__name__}; expected the engine of deepspeed.initialize for a PipelineModule"
        )
    # Ulysses passes an mpu.
    if engine.mpu is not None and engine._config.hzero_block.sequence is not None:
        raise ConfigError(f"mpu: found {type(engine.mpu).__name__} with {KEY}.sequence; expected one of them")
    # torch's Muon would step flat shards as matrices.
    if engine.client_optimizer is not None and engine.optimizer_name() == "Muon":
        raise ConfigError(
            "optimizer: found Muon of the script, which would step flat shards as matrices; expected optimizer.type Muon in the "
            "configuration"
        )


def check_written(config: Mapping[str, Any], ranks: int | None = None, where: str = "") -> DeepSpeedConfig:
    """Reads and checks a configuration before ranks exist. `hzero.autoload` checks the block when DeepSpeed reads it.

    Values "auto" are omitted, since a client will replace them. Without ``ranks``, ``train_batch_size`` is also omitted.

    Args:
        config: The configuration, as the user has written it.
        ranks: Number of ranks that will share a batch. None: not known.
        where: Key of the configuration, for messages.

    Returns:
        The configuration, as DeepSpeed has read it.

    Raises:
        ConfigError: See `parse_config` and `check_config`.
        Exception: DeepSpeed refuses the configuration, with errors of many types.
    """
    without = _filled_in(config)
    if ranks is None:
        without.pop("train_batch_size", None)
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(without):
        without["train_micro_batch_size_per_gpu"] = 1
    if "stage" in (config.get(PARENT) or {}) and "stage" not in without[PARENT]:
        without[PARENT]["stage"] = 3  # the client will not fill in DeepSpeed's default

    class Config(DeepSpeedConfig):  # type: ignore[misc]
        # DeepSpeed would read it from the process group.
        world_size = property(lambda self: ranks or 1, lambda self, asked: None)

    try:
        return Config(without)
    except ConfigError as error:
        raise ConfigError(f"{'' if str(error).startswith(KEY) else where}.{error}".lstrip(".")) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] != "extra_forbidden" or len(first["loc"]) > 1:
            raise
        (key,), models = first["loc"], {model.__name__: model for model in DeepSpeedConfigModel.__subclasses__()}
        known = [field.alias or name for name, field in models[error.title].model_fields.items()]
        block = next(block for block, of in without.items() if key in of)
        raise one_of(f"{where}.{block}".strip("."), key, known, "key") from None


class _Asked(dict[str, Any]):
    """A configuration, or a block of it, that records the keys that DeepSpeed reads.

    Args:
        values: The configuration.
        asked: Keys that DeepSpeed reads later.
        blocks: Keys of blocks that DeepSpeed reads key by key. Its models refuse unknown keys of the other blocks.
    """

    def __init__(self, values: Mapping[str, Any], asked: Sequence[str] = (), blocks: Sequence[str] = ()) -> None:
        super().__init__({**values, **{key: _Asked(values[key]) for key in blocks if values.get(key)}})
        self.asked = set(asked)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self


def ignored(read: DeepSpeedConfig, where: str) -> list[ConfigError]:
    """Errors for the keys that DeepSpeed ignores.

    Args:
        read: The configuration from `check_written`.
        where: Key of the configuration, for messages.
    """
    # Only ranks read the first.
    config = _Asked(read._param_dict, ["sequence_parallel_size"], ["expert_parallel", "optimizer", "data_types"])
    type(read)(config)
    blocks = [(where, config), *((f"{where}.{key}", one) for key, one in config.items() if isinstance(one, _Asked))]
    return [
        one_of(place.strip("."), key, sorted(block.asked), "key")
        for place, block in blocks
        for key in block
        if key not in block.asked
    ]


def _filled_in(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _filled_in(value) if isinstance(value, Mapping) and key != KEY else value
        for key, value in config.items()
        if value != "auto"
    }


# ---- ranks --------------------------------------------------------------------------------------------------------------


def check_partition(module: torch.nn.Module, ranks: Sequence[int]) -> None:
    """Refuses parameters that are partitioned over other ranks than the engine's.

    Raises:
        ConfigError: The ranks differ, for example because ``deepspeed.zero.Init`` got no data-parallel group.
    """
    for name, param in module.named_parameters():
        found = ranks_of(getattr(param, "ds_process_group", None))
        if found != list(ranks) and not is_expert(param):
            raise ConfigError(
                f"parameter {name}: found a partition over {len(found)} ranks; expected the engine's {len(ranks)} ranks"
                f"{', which are others' if len(found) == len(ranks) else ''}; pass deepspeed.zero.Init "
                "data_parallel_group=mpu.get_data_parallel_group()"
            )


def check_mpu(mpu: Any, world: Grid) -> None:
    """Refuses groups of model parallelism that the stage does not support. Collective: all ranks raise if one does.

    Args:
        mpu: The mpu of ``deepspeed.initialize``.
        world: Grid of the world.

    Raises:
        ConfigError: The mpu has pipeline stages without a ``PipelineModule``, a tensor group crosses nodes, or a group does
            not fill its tiers evenly. Pipeline stages are on discovered clusters of different sizes.
    """
    # An mpu of Ulysses splits sequences, not parameters.
    if not hasattr(mpu, "get_model_parallel_group") or hasattr(mpu, "initialize_sequence_parallel"):
        return
    with agreed():
        if hasattr(mpu, "get_slice_parallel_group"):  # a PipelineParallelGrid: its model-parallel group has all stages
            if world.uneven_clusters and len(ranks_of(mpu.get_pipe_parallel_group())) > 1:
                raise ConfigError(
                    f"{KEY}.topology: found pipeline stages on clusters of {', '.join(map(str, world.uneven_clusters))} nodes; "
                    "expected clusters of one size, or a declared topology, whose tier inter_node joins all of them"
                )
            tensor = mpu.get_slice_parallel_group()
            for group in (mpu.get_data_parallel_group(), mpu.get_pipe_parallel_group()):
                world.of_ranks(ranks_of(group))
        elif (stages := bwc_pipeline_parallel_world_size(mpu)) > 1:
            raise ConfigError(
                f"mpu: found {stages} pipeline stages; expected a deepspeed.PipelineModule, or tensor parallelism only"
            )
        else:
            tensor = mpu.get_model_parallel_group()
        check_tensor_group(ranks_of(tensor), world, "mpu")


def check_tensor_group(ranks: Sequence[int], world: Grid, key: str) -> None:
    """Raises `ConfigError` if a tensor group, made by ``key``, crosses nodes or does not fill the tiers evenly."""
    if world.of_ranks(ranks, key).nodes > 1:
        raise ConfigError(
            f"{key}: found a tensor group of ranks {some(list(map(str, ranks)), 16)}, which crosses nodes ({world}); expected "
            "tensor groups inside a node, with the devices of a package first"
        )
