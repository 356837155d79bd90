"""Buffers: sizes of DeepSpeed's buffers in a configuration of the trainer."""

from __future__ import annotations

from hzero.settings.settings import Settings
from hzero.sharding.memory import BUCKET_NUMEL, REDUCE_NUMEL, REUSE_NUMEL, SUB_GROUP_NUMEL, Buffers
from hzero.validation import ConfigError

#: DeepSpeed's key of the elements that are gathered together.
BUCKET = "stage3_prefetch_bucket_size"
#: Its key of those that are reduced together.
REDUCE_BUCKET = "reduce_bucket_size"


def buffers_of(settings: Settings, module: int = 0) -> Buffers:
    """DeepSpeed's buffers in a configuration; ``module`` is the size of the largest module that is gathered as a whole."""
    zero, types = (settings["deepspeed"].get(block) or {} for block in ("zero_optimization", "data_types"))
    return Buffers(
        prefetch=elements_of(settings, BUCKET, BUCKET_NUMEL),
        reduce=elements_of(settings, REDUCE_BUCKET, REDUCE_NUMEL),
        contiguous=bool(zero.get("contiguous_gradients", True)),
        reuse=elements_of(settings, "stage3_max_reuse_distance", REUSE_NUMEL),
        sub_group=elements_of(settings, "sub_group_size", SUB_GROUP_NUMEL),
        module=module,
        accumulation_itemsize={"fp32": 4, "bf16": 2, "fp16": 2}.get(str(types.get("grad_accum_dtype"))),
        offload=(zero.get("offload_optimizer") or {}).get("device", "none") != "none",
    )


def elements_of(settings: Settings, key: str, default: int) -> int:
    """A number of elements in DeepSpeed's configuration of the stage; `ConfigError` if it is none."""
    value = settings["deepspeed"].get("zero_optimization", {}).get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e15:
        raise ConfigError(f"deepspeed.zero_optimization.{key}: found {value!r}, expected a number of elements")
    return int(value)
