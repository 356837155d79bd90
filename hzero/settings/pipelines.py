"""What the trainer does not do with pipeline stages, refused key by key; but for data as examples, before any rank starts."""

from __future__ import annotations

from typing import Any

from hzero.config import TIERS
from hzero.parsing import UNLOADABLE, check_of_pipelines
from hzero.sharding.tensor_groups import TensorGroups
from hzero.validation import ConfigError


def check_pipelines(config: dict[str, Any], zero: dict[str, Any], layout: TensorGroups) -> None:
    """Refuses what has no effect, or is not possible, with ``model.pipeline_parallel``.

    Args:
        config: The configuration, whose groups have been checked.
        zero: Its group ``zero`` without nulls.
        layout: Groups of the ranks, of more than one stage.

    Raises:
        ConfigError: Naming the key, what was found and what is possible.
    """
    train, sample = config["train"], config["sample"]
    deepspeed, stages = (config["deepspeed"].get(block, {}) for block in ("zero_optimization", "pipeline"))
    natural = layout.grid.regular and layout.grid.order == TIERS[::-1]
    refused: list[tuple[str, Any, bool, str]] = [
        ("topology.order", list(layout.grid.order), not natural, "ranks in the order node, gpu, gcd"),
        ("sample.every", sample["every"], sample["every"] > 0, "0"),
        ("sample.at_end", True, bool(sample["at_end"]), "false"),
        ("train.dtype", "fp16", train["dtype"] == "fp16", "auto, fp32, bf16"),
        ("trace.steps", config["trace"]["steps"], config["trace"]["steps"] is not None, "null"),
        (
            "deepspeed.pipeline",
            stages,
            bool(stages),
            "no such block; train.activation_checkpointing recomputes, and tensor ranks divide messages",
        ),
        *((f"deepspeed.zero_optimization.{key}", True, bool(deepspeed.get(key)), "false") for key in UNLOADABLE),
        *(
            (f"deepspeed.zero_optimization.{key}", value, key.startswith(("stage3_", "offload_")), "no such key")
            for key, value in deepspeed.items()
        ),
    ]
    for key, found, is_refused, possible in refused:
        if is_refused:
            raise ConfigError(
                f"{key}: found {found} with model.pipeline_parallel {layout.pipeline}; possible: {possible}"
            )
    check_of_pipelines(zero, "zero")
