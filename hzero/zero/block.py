"""The `"hzero"` block of a DeepSpeed configuration: finds it, reads it, and refuses unsupported features."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from hzero.config import HZeroConfig, parse_config
from hzero.validation import ConfigError

#: A torch.nn.Parameter with the attributes that DeepSpeed sets on it (ds_id, ds_tensor, ds_status and so on).
ZeroParameter: TypeAlias = Any

#: Top-level key of the block.
KEY = "hzero"

#: Methods that the stage overrides or calls, with the arguments that it relies on. Taken from DeepSpeed 0.19.8.
_EXPECTED: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (DeepSpeedEngine, "_do_sanity_check", ("self",)),
    (DeepSpeedZeRoOffload, "__init__", ("self", "module", "timers", "ds_config")),
    (DeepSpeedZeRoOffload, "partition_all_parameters", ("self",)),
    (DeepSpeedZeRoOffload, "destroy", ("self",)),
    (
        DeepSpeedZeroOptimizer_Stage3,
        "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
        ("self", "params_to_reduce", "communication_data_type"),
    ),
    (DeepSpeedZeroOptimizer_Stage3, "partition_grads", ("self", "params_to_release", "grad_partitions")),
    (DeepSpeedZeroOptimizer_Stage3, "backward_prologue", ("self",)),
    (DeepSpeedZeroOptimizer_Stage3, "backward_epilogue", ("self",)),
    (DeepSpeedZeroOptimizer_Stage3, "independent_gradient_partition_epilogue", ("self",)),
    (DeepSpeedZeroOptimizer_Stage3, "finalize_gradient_accumulation_boundary", ("self",)),
    (DeepSpeedZeroOptimizer_Stage3, "zero_grad", ("self", "set_to_none")),
    (DeepSpeedZeroOptimizer_Stage3, "step", ("self", "closure")),
    (DeepSpeedZeroOptimizer_Stage3, "_reassign_or_swap_out_partitioned_parameters", ("self", "sub_group_id")),
    (DeepSpeedZeroOptimizer_Stage3, "_restore_from_bit16_weights", ("self",)),
    (DeepSpeedZeroOptimizer_Stage3, "load_state_dict", ("self", "state_dict_list")),
    (DeepSpeedZeroOptimizer_Stage3, "offload_states", ("self",)),
    (DeepSpeedZeroOptimizer_Stage3, "get_fp32_grad_partitions", ("self",)),
    (DeepSpeedZeroOptimizer_Stage3, "_finalize_offload_gradient_accumulation", ("self",)),
    (DeepSpeedZeroOptimizer_Stage3, "_get_fp32_grad_state_partition", ("self", "param", "release_swap_buffers")),
    (DeepSpeedZeroOptimizer_Stage3, "update_fp32_grad_for_param_vectorized", ("self", "update_func", "param_list")),
    (DeepSpeedZeroOptimizer_Stage3, "reload_states", ("self", "non_blocking")),
)


def check_deepspeed() -> None:
    """Checks that the stage supports this DeepSpeed.

    Raises:
        ConfigError: The version is outside ``>=0.19.8,<0.20``, or a method that the stage overrides is missing or has
            other arguments.
    """
    supported = "hzero supports deepspeed >=0.19.8,<0.20"
    numbers = tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:3] if part.isdigit())
    if not (0, 19, 8) <= numbers < (0, 20):
        raise ConfigError(f"deepspeed {deepspeed.__version__} found; {supported}")
    for owner, name, arguments in _EXPECTED:
        method = getattr(owner, name, None)
        found = _arguments(method) if method is not None else ()
        if found[: len(arguments)] != arguments:
            raise ConfigError(
                f"deepspeed {deepspeed.__version__} has another {owner.__name__}.{name} than the stage expects "
                f"(arguments {found or 'none: it is missing'}, expected {arguments}); {supported}"
            )


def _arguments(method: Any) -> tuple[str, ...]:
    """Names of a method's arguments, also where DeepSpeed's profiling decorator hides them behind (*args, **kwargs)."""
    found = tuple(inspect.signature(method).parameters)
    if found == ("args", "kwargs"):
        for cell in method.__closure__ or ():
            if inspect.isfunction(cell.cell_contents):
                return _arguments(cell.cell_contents)
    return found


def find_block(ds_config: Any) -> Mapping[str, Any] | None:
    """The block of a DeepSpeed configuration, or None where it has none.

    Args:
        ds_config: The ``config`` of ``deepspeed.initialize``: a dictionary or the path of a JSON file.

    Raises:
        ConfigError: The block is not a mapping.
    """
    if ds_config is None:
        return None
    if not isinstance(ds_config, Mapping):
        import hjson  # a dependency of DeepSpeed, which reads its configurations with it

        try:
            with open(ds_config, encoding="utf-8") as file:
                ds_config = hjson.load(file)
        except (OSError, TypeError, ValueError):
            return None  # DeepSpeed itself reports the error.
    if KEY not in ds_config:
        for name in ds_config:
            if str(name).lower().replace("_", "").replace("-", "") == KEY:
                raise ConfigError(f"{name}: unknown key; did you mean {KEY!r}?")
        return None
    if not isinstance(ds_config[KEY], Mapping):
        raise ConfigError(f"{KEY}: found {ds_config[KEY]!r}, expected a block of keys")
    return ds_config[KEY]


def read_block(ds_config: Any) -> HZeroConfig | None:
    """`find_block`, parsed."""
    block = find_block(ds_config)
    return None if block is None else parse_config(block)


def sets_persistence_threshold(ds_config: Any) -> bool:
    """Whether the user set a persistence threshold; hzero's default is 0."""
    if not isinstance(ds_config, Mapping):
        import hjson

        with open(ds_config, encoding="utf-8") as file:
            ds_config = hjson.load(file)
    zero = ds_config.get("zero_optimization", {})
    return any(key in zero for key in ("stage3_param_persistence_threshold", "param_persistence_threshold"))


def check_engine(engine: DeepSpeedEngine) -> None:
    """Refuses, by name, DeepSpeed features that the stage does not support.

    Args:
        engine: An engine whose configuration has been read and whose model is still untouched.

    Raises:
        ConfigError: Naming the key, what was found and what is possible.
    """
    if engine.zero_optimization_stage() != 3:
        raise ConfigError(
            f"{KEY} needs zero_optimization.stage 3, found {engine.zero_optimization_stage()}; "
            f"set it to 3 or remove the {KEY} block"
        )
    config, zero = engine._config, engine._config.zero_config
    offload_param = getattr(zero.offload_param, "device", "none")
    offload_optimizer = getattr(zero.offload_optimizer, "device", "none")
    refused: list[tuple[str, Any, bool, str]] = [
        ("compile.deepcompile", True, bool(getattr(config.compile_config, "deepcompile", False)), "false"),
        ("hybrid_engine.enabled", True, bool(config.hybrid_engine.enabled), "false"),
        ("zero_optimization.zenflow", "a block", zero.zenflow is not None, "no such key"),
        (
            "expert_parallel (AutoEP)",
            "enabled",
            bool(getattr(config.expert_parallel_config, "enabled", False)),
            "disabled",
        ),
        ("zero_optimization.offload_optimizer.super_offload", True, bool(engine.super_offload()), "false"),
        (
            "optimizer.type",
            engine.optimizer_name(),
            str(engine.optimizer_name()).lower() == "muon",
            "another optimizer",
        ),
        ("zero_optimization.offload_param.device", str(offload_param), _is_set(offload_param), "none"),
        (
            "zero_optimization.offload_optimizer.device",
            str(offload_optimizer),
            _is_set(offload_optimizer, "cpu"),
            "none or cpu",
        ),
        ("zero_optimization.reduce_scatter", False, not zero.reduce_scatter, "true"),
        (
            "zero_optimization.zero_hpz_partition_size",
            zero.zero_hpz_partition_size,
            zero.zero_hpz_partition_size > 1,
            f'1; {KEY} has "shard": {{"weights": "node"}} for it',
        ),
        ("zero_optimization.zero_quantized_weights", True, zero.zero_quantized_weights, f"false; {KEY} has codecs"),
        (
            "zero_optimization.zero_quantized_nontrainable_weights",
            True,
            zero.zero_quantized_nontrainable_weights,
            f"false; {KEY} has codecs",
        ),
        ("zero_optimization.zero_quantized_gradients", True, zero.zero_quantized_gradients, f"false; {KEY} has codecs"),
        ("tensor_parallel.autotp_size", engine.autotp_size(), engine.autotp_size() > 1, "1"),
        ("torch_autocast.enabled", True, engine.torch_autocast_enabled(), "false; use bf16 or fp16"),
        (
            "zero_optimization.stage3_use_all_reduce_for_fetch_params",
            True,
            zero.use_all_reduce_for_fetch_params,
            "false",
        ),
        ("zero_optimization.stage3_allgather_sequential", True, zero.allgather_sequential, "false"),
    ]
    for key, found, is_refused, possible in refused:
        if is_refused:
            raise ConfigError(f"{key}: found {found}, which {KEY} does not support; possible: {possible}")


def _is_set(device: Any, *allowed: str) -> bool:
    name = str(getattr(device, "value", device))
    return name not in ("none", "None", *allowed)


def check_group(group: Any, what: str) -> None:
    """Refuses a partition group that is not the whole world in the world's order.

    Raises:
        ConfigError: The group is smaller, as under AutoTP, expert parallelism or an mpu, or its ranks are permuted, so
            that rank r does not own shard r.
    """
    ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
    if len(ranks) != dist.get_world_size():
        raise ConfigError(
            f"{what}: partitioned over {len(ranks)} of {dist.get_world_size()} ranks; {KEY} needs the whole world "
            "(no tensor, expert or model parallelism)"
        )
    place = next((place for place, rank in enumerate(ranks) if place != rank), None)
    if place is not None:
        raise ConfigError(
            f"{what}: its rank {place} is rank {ranks[place]} of the world; {KEY} needs the world's own order"
        )
