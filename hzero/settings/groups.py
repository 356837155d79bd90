"""The groups of the trainer's configuration as pydantic models."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, FiniteFloat, ValidationInfo, field_validator

from hzero.config import HZeroConfig
from hzero.validation import Frozen, seconds_of

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[FiniteFloat, Field(ge=0)]
#: Seconds of a wait, at most eleven days: larger ones overflow in torch.
Timeout = Annotated[FiniteFloat, Field(ge=1, le=1e6)]
Name = Annotated[str, Field(min_length=1)]
#: A duration: ``2h``, ``1h30m``, ``45s``, or seconds.
Duration = Annotated[Any, AfterValidator(lambda value: seconds_of(value) and value)]
#: Adam's two decay rates.
Betas = Annotated[list[Annotated[FiniteFloat, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]


class AnyModel(Frozen):
    """What all models have. ``zero_init`` says whether it is built under ``deepspeed.zero.Init``."""

    seq_length: int = Field(ge=2)
    zero_init: Literal["auto", True, False]


class ModelGroup(AnyModel):
    """A GPT-NeoX.

    Attributes:
        tensor_parallel: Ranks among which heads of attention and hidden units of the MLP are divided; they divide both.
        sequence_parallel: Ranks among which every sequence is divided, and in attention its heads; they divide both.
        pipeline_parallel: Stages among which the layers are divided; micro-batches are `train.grad_accumulation`.
    """

    name: str
    hidden_size: Positive
    num_layers: Positive
    num_heads: Positive
    intermediate_size: Positive
    vocab_size: int = Field(ge=257)
    tensor_parallel: Positive = 1
    sequence_parallel: Positive = 1
    pipeline_parallel: Positive = 1

    @field_validator("tensor_parallel")
    @classmethod
    def _divides_layers(cls, value: int, info: ValidationInfo) -> int:
        for key in ("num_heads", "intermediate_size"):
            if info.data.get(key, value) % value:
                raise ValueError(f"found {value}, which does not divide model.{key} {info.data[key]}")
        if value > 1 and info.data.get("zero_init") is True:
            raise ValueError(
                f"found {value} with model.zero_init true, and layers are split once they are built; possible: zero_init auto "
                "or false"
            )
        return value

    @field_validator("sequence_parallel")
    @classmethod
    def _divides_sequences(cls, value: int, info: ValidationInfo) -> int:
        for key in ("num_heads", "seq_length"):
            if info.data.get(key, value) % value:
                raise ValueError(f"found {value}, which does not divide model.{key} {info.data[key]}")
        if value > 1 and info.data.get("tensor_parallel", 1) > 1:
            raise ValueError(
                f"found {value} with model.tensor_parallel {info.data['tensor_parallel']}; one of them has to be 1"
            )
        return value

    @field_validator("pipeline_parallel")
    @classmethod
    def _has_layers(cls, value: int, info: ValidationInfo) -> int:
        if value > info.data.get("num_layers", value):
            raise ValueError(f"found {value}, more than model.num_layers {info.data['num_layers']}")
        if value > 1 and info.data.get("zero_init") is True:
            raise ValueError(f"found {value} with model.zero_init true; possible: zero_init auto or false")
        if value > 1 and info.data.get("sequence_parallel", 1) > 1:
            raise ValueError(
                f"found {value} with model.sequence_parallel {info.data['sequence_parallel']}; one of them has to be 1"
            )
        return value

    @field_validator("num_heads")
    @classmethod
    def _divides(cls, value: int, info: ValidationInfo) -> int:
        hidden = info.data.get("hidden_size", value)
        if hidden % value:
            raise ValueError(f"found {value}, which does not divide model.hidden_size {hidden}")
        return value


class HFModel(AnyModel):
    """Any causal language model of transformers (`hzero.settings.architecture`)."""

    name: Name | None
    path: Name | None
    config: dict[str, Any] | None


class DataGroup(Frozen):
    """The text. ``path`` null is Python's standard library; ``max_bytes`` 0 takes all, null all of ``path``."""

    path: Name | None
    max_bytes: Count | None
    eval_share: FiniteFloat = Field(gt=0, lt=1)
    cache_dir: Name | None
    format: Literal["auto", "text", "jsonl"]
    packing: bool
    chat_template: Name | None


class Bandwidth(Frozen):
    """Bytes per second that one device receives over a tier, in GB/s."""

    gcd: FiniteFloat | None = Field(None, gt=0)
    hive: FiniteFloat | None = Field(None, gt=0)
    gpu: FiniteFloat | None = Field(None, gt=0)
    node: FiniteFloat | None = Field(None, gt=0)
    group: FiniteFloat | None = Field(None, gt=0)
    cluster: FiniteFloat | None = Field(None, gt=0)


class TopologyGroup(Frozen):
    """A source to discover the grid from, or a declared grid (checked as `hzero.config.TopologyConfig`)."""

    source: Name | None = None
    nodes: Any = None
    gpus_per_node: Any = None
    gcds_per_gpu: Any = None
    gpus_per_hive: Any = None
    nodes_per_group: Any = None
    switch_nodes: Any = None
    clusters: Any = None
    order: Any = None
    bandwidth_gb_s: Bandwidth | None = None


class LauncherGroup(Frozen):
    """How `hzero train` starts its ranks."""

    world_size: Positive | None
    threads: Positive
    start_timeout_s: Timeout


class RunBlock(Frozen):
    """The run's folder."""

    name: Name
    dir: Name
    overwrite: bool


class TrainBlock(Frozen):
    """The loop."""

    steps: Positive
    micro_batch: Positive
    grad_accumulation: Positive
    lr: Rate
    min_lr_ratio: FiniteFloat = Field(ge=0, le=1)
    warmup_steps: Count
    weight_decay: Rate
    betas: Betas
    grad_clip: Rate
    seed: Count
    dtype: Literal["auto", "fp32", "bf16", "fp16"]
    activation_checkpointing: bool
    eval_every: Count
    eval_batches: Positive
    monitor: Literal["tensorboard", "wandb", "csv"] | None
    guard: Count
    timeout_s: Timeout
    time_limit: Duration | None


class CheckpointBlock(Frozen):
    """When checkpoints are written, how many are kept, and which are loaded."""

    every: Count
    keep: Positive
    keep_for: Duration | None
    max_failures: Positive
    timeout_s: Timeout
    trust: bool
    direct: bool


class SampleBlock(Frozen):
    """Text that the model writes: every so many steps (0: never) and at the end."""

    every: Count
    at_end: bool
    prompt: Name | None
    tokens: Positive
    temperature: Rate
    max_s: Timeout


class WindowBlock(Frozen):
    """The first and the last step that rank 0 traces or profiles; null for none."""

    steps: Annotated[list[Positive], Field(min_length=2, max_length=2)] | None

    @field_validator("steps")
    @classmethod
    def _in_order(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and value[0] > value[1]:
            raise ValueError(f"found {value}, whose first step comes after the last")
        return value


class Configuration(Frozen):
    """The whole configuration. ``zero`` is checked by `hzero.parsing.parse_config`, ``deepspeed`` by DeepSpeed."""

    model: ModelGroup
    data: DataGroup
    topology: TopologyGroup
    zero: dict[str, Any]
    launcher: LauncherGroup
    resume: Any
    run: RunBlock
    train: TrainBlock
    checkpoint: CheckpointBlock
    sample: SampleBlock
    trace: WindowBlock
    profile: WindowBlock
    deepspeed: dict[str, Any]

    @field_validator("resume")
    @classmethod
    def _false_auto_or_path(cls, value: Any) -> Any:
        if value is not None and value is not False and not (isinstance(value, str) and value):
            raise ValueError(f"found {value!r}, possible: false, auto or a path")
        return value


class HFConfiguration(Configuration):
    """The same with ``model=hf``."""

    model: HFModel  # type: ignore[assignment]


def known_keys() -> list[str]:
    """Dotted names of all keys, groups among them."""
    zero = (f"zero.{key}" for key in _dotted(HZeroConfig) if not key.startswith(("topology", "preset_")))
    return [*_dotted(Configuration), *_dotted(HFModel, "model."), *zero]


def _dotted(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in ((field.alias or name, field) for name, field in model.model_fields.items()):
        yield f"{prefix}{name}"
        inside = () if typing.get_origin(field.annotation) is dict else typing.get_args(field.annotation)
        for inner in (field.annotation, *inside):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from _dotted(inner, f"{prefix}{name}.")
