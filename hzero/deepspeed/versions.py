"""The supported versions of DeepSpeed: what the stage overrides or calls in them, and how they differ.

No other module depends on the version. `hzero.enable` checks the lists below against the installed version, and
``hzero doctor`` names every difference, also in versions that the stage does not support.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import deepspeed
from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from hzero.block import KEY
from hzero.validation import ConfigError

#: The versions supported: the first, and the first that is not.
VERSIONS = ((0, 18, 6), (0, 20))
SUPPORTED = "hzero supports deepspeed >=0.18.6,<0.20"
#: What only newer ones of them can do: the first that can.
NEWER = {"pipeline stages": "0.19.8", "AutoTP": "0.19.8", "managed_gradient_accumulation false": "0.19.4"}

#: Methods that the stage overrides, wraps or calls, with the arguments that it relies on. Taken from DeepSpeed 0.19.8.
STAGE3: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (DeepSpeedConfig, "_initialize_params", ("self", "param_dict")),
    (DeepSpeedEngine, "_do_sanity_check", ("self",)),
    (DeepSpeedEngine, "_broadcast_model", ("self",)),
    (DeepSpeedEngine, "zero_grad", ("self",)),
    (DeepSpeedEngine, "_configure_checkpointing", ("self",)),
    (DeepSpeedEngine, "_copy_recovery_script", ("self", "save_path")),
    (DeepSpeedEngine, "_get_all_ckpt_names", ("self", "checkpoints_path", "tag")),
    (DeepSpeedEngine, "save_checkpoint", ("self", "save_dir", "tag", "client_state", "save_latest")),
    (
        DeepSpeedEngine,
        "load_checkpoint",
        (
            "self",
            "load_dir",
            "tag",
            "load_module_strict",
            "load_optimizer_states",
            "load_lr_scheduler_states",
            "load_module_only",
        ),
    ),
    (DeepSpeedEngine, "set_train_batch_size", ("self", "train_batch_size")),
    (DeepSpeedZeRoOffload, "__init__", ("self", "module", "timers", "ds_config")),
    (DeepSpeedZeRoOffload, "partition_all_parameters", ("self",)),
    (DeepSpeedZeRoOffload, "destroy", ("self",)),
    (Init, "_all_gather", ("self", "param_list", "async_op", "hierarchy")),
    (Init, "_partition", ("self", "param_list", "force", "has_been_updated", "free_data")),
    (
        DeepSpeedZeroOptimizer_Stage3,
        "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
        ("self", "params_to_reduce", "communication_data_type"),
    ),
    (DeepSpeedZeroOptimizer_Stage3, "partition_grads", ("self", "params_to_release", "grad_partitions")),
    (DeepSpeedZeroOptimizer_Stage3, "backward_prologue", ("self",)),
    (DeepSpeedZeroOptimizer_Stage3, "exit_backward", ("self",)),
    (DeepSpeedZeroOptimizer_Stage3, "independent_gradient_partition_epilogue", ("self",)),
    (DeepSpeedZeroOptimizer_Stage3, "zero_grad", ("self", "set_to_none")),
    (DeepSpeedZeroOptimizer_Stage3, "step", ("self", "closure")),
    (DeepSpeedZeroOptimizer_Stage3, "_update_scale", ("self", "has_overflow")),
    (DeepSpeedZeroOptimizer_Stage3, "_overflow_clean_up", ("self", "prev_scale")),
    (DeepSpeedZeroOptimizer_Stage3, "_reassign_or_swap_out_partitioned_parameters", ("self", "sub_group_id")),
    (DeepSpeedZeroOptimizer_Stage3, "_restore_from_bit16_weights", ("self",)),
    (DeepSpeedZeroOptimizer_Stage3, "state_dict", ("self",)),
    (DeepSpeedZeroOptimizer_Stage3, "load_state_dict", ("self", "state_dict_list")),
    (DeepSpeedZeroOptimizer_Stage3, "offload_states", ("self",)),
    (DeepSpeedZeroOptimizer_Stage3, "get_fp32_grad_partitions", ("self",)),
    (DeepSpeedZeroOptimizer_Stage3, "_get_fp32_grad_state_partition", ("self", "param", "release_swap_buffers")),
    (DeepSpeedZeroOptimizer_Stage3, "update_fp32_grad_for_param_vectorized", ("self", "update_func", "param_list")),
    (DeepSpeedZeroOptimizer_Stage3, "reload_states", ("self", "non_blocking")),
)
#: The same of engines with pipeline stages.
PIPELINE: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (PipelineEngine, "train_batch", ("self", "data_iter")),
    (PipelineEngine, "eval_batch", ("self", "data_iter")),
    (PipelineEngine, "get_data_types", ("self",)),
    (PipelineEngine, "_do_optimizer_sanity_check", ("self", "basic_optimizer")),
    (PipelineEngine, "_configure_zero_optimizer", ("self", "optimizer")),
    (PipelineEngine, "_exec_reduce_tied_grads", ("self",)),
    (DeepSpeedZeroOptimizer, "setup_buckets", ("self",)),
    (DeepSpeedZeroOptimizer, "reduce_gradients", ("self", "pipeline_parallel")),
    (DeepSpeedZeroOptimizer, "get_gradient_for_reduction", ("self", "param")),
    (DeepSpeedZeroOptimizer, "_build_compact_grad_partition_buffer", ("self", "group_idx")),
    (DeepSpeedZeroOptimizer, "_get_preflattened_grad_partition", ("self", "group_idx")),
    (DeepSpeedZeroOptimizer, "_release_ipg_buffers", ("self",)),
    (DeepSpeedZeroOptimizer, "_clear_param_grad_only", ("self",)),
    (DeepSpeedZeroOptimizer, "step", ("self", "closure")),
    (DeepSpeedZeroOptimizer, "update_lp_params", ("self",)),
    (DeepSpeedZeroOptimizer, "load_state_dict", ("self", "state_dict_list")),
)
#: Names of their modules that some methods look up, and to which `with_names` gives another meaning.
NAMES: tuple[tuple[type, str, str], ...] = (
    (PipelineEngine, "_configure_zero_optimizer", "DeepSpeedZeroOptimizer"),
    (PipelineEngine, "_exec_send_activations", "p2p"),
    (PipelineEngine, "_exec_recv_activations", "p2p"),
    (PipelineEngine, "_exec_send_grads", "p2p"),
    (PipelineEngine, "_exec_recv_grads", "p2p"),
    (DeepSpeedZeroOptimizer, "step", "all_gather_dp_groups"),
)
#: Functions that DeepSpeed makes for every parameter inside this method, which the stage replaces on the parameter.
MAKER = (Init, "_convert_to_deepspeed_param")
ON_PARAMETERS: dict[str, tuple[str, ...]] = {
    "all_gather": ("param_list", "async_op", "hierarchy"),
    "all_gather_coalesced": ("params", "safe_mode", "quantize"),
    "partition": ("param_list", "hierarchy", "has_been_updated", "free_data"),
}


def differences() -> Iterator[str]:
    """Whatever stage 3 relies on and this DeepSpeed lacks or has otherwise, one line each."""
    yield from _changed(STAGE3)
    owner, name = MAKER
    made = {
        code.co_name: code.co_varnames[: code.co_argcount]
        for code in _function(getattr(owner, name)).__code__.co_consts
        if inspect.iscode(code)
    }
    for inner, arguments in ON_PARAMETERS.items():
        yield from _compared(f"{owner.__name__}.{name} -> {inner}", made.get(inner), arguments)


def differences_of_pipelines() -> Iterator[str]:
    """`differences` of what pipeline stages rely on."""
    yield from _changed(PIPELINE)
    for owner, name, used in NAMES:
        method = getattr(owner, name, None)
        code = getattr(method, "__code__", None)
        if code is None or used not in code.co_names:
            yield f"{owner.__name__}.{name} than the stage expects (it does not use {used})"


def check_deepspeed() -> None:
    """Checks that the stage supports this DeepSpeed.

    Raises:
        ConfigError: The version is outside ``>=0.18.6,<0.20``, or something of `differences`.
    """
    if not VERSIONS[0] <= installed() < VERSIONS[1]:
        raise ConfigError(f"deepspeed: found {deepspeed.__version__}; {SUPPORTED}")
    for difference in differences():
        raise ConfigError(f"deepspeed {deepspeed.__version__} has another {difference}; {SUPPORTED}")


def check_features(config: DeepSpeedConfig, *, pipeline: bool | None) -> None:
    """Refuses what a newer version of DeepSpeed can do, and the installed one cannot.

    Args:
        config: The configuration, as DeepSpeed has read it.
        pipeline: Whether the model is a ``PipelineModule``; None if that is not known yet.

    Raises:
        ConfigError: Naming the feature, and the first version that has it.
    """
    missing = lacking()
    if pipeline and "pipeline stages" in missing:
        raise ConfigError(_needs("PipelineModule", "pipeline stages"))
    if (size := config.tensor_parallel_config.autotp_size) > 1 and "AutoTP" in missing:
        raise ConfigError(_needs(f"tensor_parallel.autotp_size: found {size}", "AutoTP"))
    unmanaged = config._param_dict.get("managed_gradient_accumulation", True) is False
    if unmanaged and "managed_gradient_accumulation false" in missing:  # such a version ignores the key
        raise ConfigError(_needs("managed_gradient_accumulation: found False", "managed_gradient_accumulation false"))


def lacking() -> list[str]:
    """What the installed version cannot do of `NEWER`."""
    found = []
    if next(differences_of_pipelines(), None) is not None:
        found.append("pipeline stages")
    if "is_tp_parallel" not in TensorParallel_Layer.__init__.__code__.co_names:
        found.append("AutoTP")
    if not hasattr(DeepSpeedZeroOptimizer_Stage3, "finalize_gradient_accumulation_boundary"):
        found.append("managed_gradient_accumulation false")
    return found


def describe() -> str:
    """The installed version and what the stage supports there, on one line."""
    missing = [f"{feature} (deepspeed >={NEWER[feature]})" for feature in lacking()]
    return f"{deepspeed.__version__}: stage 3 is supported; {', '.join(missing) or 'nothing'} missing"


def installed() -> tuple[int, ...]:
    """The numbers of the installed version."""
    return tuple(int(number) for number in re.findall(r"\d+", deepspeed.__version__.split("+")[0])[:3])


def _needs(found: str, feature: str) -> str:
    return f"{found}, with deepspeed {deepspeed.__version__}; {KEY} supports {feature} with deepspeed >={NEWER[feature]},<0.20"


# ---- what differs -----------------------------------------------------------------------------------------------------


def uses_experts(config: DeepSpeedConfig) -> bool:
    """Whether a configuration asks for AutoEP, which DeepSpeed has since 0.19.2."""
    return bool(getattr(getattr(config, "expert_parallel_config", None), "enabled", False))


def at_boundary(optimizer: Any) -> bool:
    """Whether an optimizer is in the last micro-step of a window: a method since DeepSpeed 0.19.5, a value before it."""
    found = optimizer.is_gradient_accumulation_boundary
    return bool(found() if callable(found) else found)


def set_boundary(optimizer: Any) -> None:
    """Puts an optimizer into the last micro-step of its window."""
    if callable(optimizer.is_gradient_accumulation_boundary):
        optimizer.set_gradient_accumulation_boundary(True)
    else:
        optimizer.is_gradient_accumulation_boundary = True


def with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """A copy of a method of DeepSpeed that finds these values under global names of its module, which stays as it is.

    A subclass so replaces one call in the middle of a long method, and inherits the rest. `NAMES` are checked.
    """
    assert isinstance(function, types.FunctionType) and function.__closure__ is None
    return types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__
    )


# ---- comparison -------------------------------------------------------------------------------------------------------


def _changed(expected: Iterable[tuple[type, str, tuple[str, ...]]]) -> Iterator[str]:
    for owner, name, arguments in expected:
        method = getattr(owner, name, None)
        yield from _compared(f"{owner.__name__}.{name}", _arguments(method) if method is not None else None, arguments)


def _compared(what: str, found: tuple[str, ...] | None, expected: tuple[str, ...]) -> Iterator[str]:
    if found is None:
        yield f"{what} than the stage expects (it is missing, expected arguments {expected})"
    elif found[: len(expected)] != expected:
        yield f"{what} than the stage expects (arguments {found}, expected {expected})"


def _arguments(method: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(_function(method)).parameters)


def _function(method: Any) -> Any:
    """The function of a method, also where DeepSpeed's profiling decorator hides it behind (*args, **kwargs)."""
    if tuple(inspect.signature(method).parameters) == ("args", "kwargs"):
        for cell in method.__closure__ or ():
            if inspect.isfunction(cell.cell_contents):
                return _function(cell.cell_contents)
    return method
