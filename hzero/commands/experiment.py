"""An experiment: Hydra composes ``conf/``, pydantic checks it, and the arguments of DeepSpeed and Trainer follow from it.

`hzero train` runs an experiment, `hzero plan` computes from one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, BaseModel, Field, FiniteFloat

import hzero
from hzero.config import Tier, TopologyConfig, parse_config
from hzero.files import expanded, read_json
from hzero.plan.shards import ShardPlan
from hzero.topology import Grid, resolve_grid
from hzero.topology.discovery import foreseen_grid
from hzero.topology.sources import machine_of
from hzero.validation import ConfigError, Frozen, nearest, one_of, seconds_of, validated

#: Short names of keys.
SHORT = {
    "nodes": "topology.nodes",
    "gpus_per_node": "topology.gpus_per_node",
    "gcds_per_gpu": "topology.gcds_per_gpu",
    "preset": "zero.preset",
    "accumulation": "train.grad_accumulation",
}
#: DeepSpeed's keys that follow from other groups. Trainer replaces what is ``auto``.
OF_DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[FiniteFloat, Field(ge=0)]
#: Seconds of a wait, at most eleven days: larger ones overflow in torch.
Timeout = Annotated[FiniteFloat, Field(ge=1, le=1e6)]
Name = Annotated[str, Field(min_length=1)]
#: A dimension of a tensor. Larger ones than of any model only take the machine's memory.
Width = Annotated[int, Field(ge=1, le=10_000_000)]
Elements = Annotated[float, Field(ge=0, lt=1e15)]
#: A duration: ``2h``, ``1h30m``, ``45s``, or seconds.
Duration = Annotated[Any, AfterValidator(lambda value: seconds_of(value) and value)]
Betas = Annotated[list[Annotated[FiniteFloat, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]


class ModelGroup(Frozen):
    """A causal language model of transformers, by its folder or its configuration.

    Keys without a default are those of every option. The others are the shape of a GPT-NeoX, from which
    ``conf/model/gpt_neox.yaml`` makes ``config``.
    """

    name: Name | None
    path: Name | None
    config: dict[str, Any] | None
    seq_length: int = Field(ge=2, le=10_000_000)
    zero_init: Literal["auto", True, False]
    allow_other_weights: bool
    hidden_size: Width | None = None
    num_layers: int | None = Field(None, ge=1, le=1000)
    num_heads: Width | None = None
    intermediate_size: Width | None = None
    vocab_size: int | None = Field(None, ge=257, le=10_000_000)


class DataGroup(Frozen):
    """The text. ``path`` null is Python's standard library; ``max_bytes`` 0 takes all, null all of ``path``."""

    path: Name | None
    max_bytes: Count | None
    eval_share: FiniteFloat = Field(gt=0, lt=1)
    cache_dir: Name | None


class TopologyGroup(BaseModel, extra="allow", strict=True):
    """GB/s that one device receives over a tier. `hzero.config` checks the other keys."""

    bandwidth_gb_s: dict[Tier, Annotated[FiniteFloat, Field(gt=0)] | None] | None = None


class LauncherGroup(Frozen):
    """How `hzero train` starts its ranks where no launcher has."""

    world_size: int | None = Field(ge=1, le=1_000_000)
    threads: int = Field(ge=1, le=10_000)
    start_timeout_s: Timeout


class RunBlock(Frozen):
    """The run's folder."""

    name: Name
    dir: Name


class TrainBlock(Frozen):
    """The loop."""

    steps: Positive
    micro_batch: int = Field(ge=1, le=1_000_000)
    grad_accumulation: int = Field(ge=1, le=10_000)  # a plan counts every micro-step
    lr: Rate
    min_lr_ratio: FiniteFloat = Field(ge=0, le=1)
    warmup_steps: Count
    weight_decay: Rate
    betas: Betas
    grad_clip: Rate
    seed: int = Field(ge=0, lt=2**32)
    dtype: Literal["auto", "fp32", "bf16", "fp16"]
    activation_checkpointing: bool
    eval_every: Count
    eval_batches: Positive
    timeout_s: Timeout
    time_limit: Duration | None


class CheckpointBlock(Frozen):
    """Checkpoints, and the model at the end; ``dtype`` null keeps that of training."""

    every: Count
    keep: Positive
    model: bool
    dtype: Literal["fp32", "bf16", "fp16"] | None


class SampleBlock(Frozen):
    """Text that the model writes after every evaluation."""

    prompt: Name | None
    tokens: Positive


class ZeroOptimization(BaseModel, extra="allow"):
    """Sizes, in elements, that a plan has to know, with DeepSpeed's defaults. DeepSpeed checks the other keys."""

    stage3_prefetch_bucket_size: Elements = 50_000_000
    stage3_max_live_parameters: Elements = 1_000_000_000
    stage3_max_reuse_distance: Elements = 1_000_000_000
    reduce_bucket_size: Elements = 500_000_000
    sub_group_size: Elements = 1_000_000_000
    contiguous_gradients: bool = True
    offload_optimizer: dict[str, Any] | None = None


class TensorParallel(BaseModel, extra="allow"):
    """Ranks of a tensor group of AutoTP."""

    autotp_size: Positive = 1


class DeepSpeedGroup(BaseModel, extra="allow"):
    """Keys of DeepSpeed on top of `OF_DEEPSPEED`."""

    tensor_parallel: TensorParallel = TensorParallel()
    zero_optimization: ZeroOptimization = ZeroOptimization()
    data_types: dict[str, Any] = {}


class Configuration(Frozen):
    """The whole configuration. `hzero.config` checks ``zero``, and Trainer its arguments ``trainer``."""

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
    trainer: dict[str, Any]
    deepspeed: DeepSpeedGroup


def conf_dir() -> Path:
    """The folder of Hydra groups: inside the installed package, or at the root of a checkout."""
    package = Path(hzero.__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def compose(overrides: Sequence[str], world_size: int | None = None) -> Experiment:
    """The experiment that overrides of ``conf/train.yaml`` describe.

    Args:
        overrides: ``KEY=VALUE``; keys may be `SHORT`.
        world_size: Ranks that a launcher has started; None if the experiment may choose.

    Raises:
        ConfigError: Names the key, what was found and what is expected.
    """
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = hydra_compose("train", for_hydra(overrides))
    except (HydraException, OmegaConfBaseException, TypeError, ValueError) as error:
        raise ConfigError(one_line(error)) from None
    return Experiment(plain(config), world_size)


def full_names(overrides: Sequence[str]) -> list[str]:
    """Overrides with full keys instead of `SHORT` ones."""
    return [re.sub(r"^\w+(?==)", lambda key: SHORT.get(key[0], key[0]), override) for override in overrides]


def for_hydra(overrides: Sequence[str]) -> list[str]:
    """Overrides that add new keys below a group, so that pydantic, which names the nearest key, refuses unknown ones."""
    return [re.sub(r"^\+*(?!hydra\.)(\w+\.[^@/=]*=)", r"++\1", override) for override in full_names(overrides)]


def key_of(override: str) -> str:
    """The key of an override, without the signs that add and remove keys."""
    return override.partition("=")[0].lstrip("+~")


def plain(config: DictConfig) -> dict[str, Any]:
    """A composed configuration as plain dictionaries.

    Raises:
        ConfigError: Names the first key that has no value, or whose value cannot be resolved.
    """
    try:
        resolved: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from None
    return {str(key): value for key, value in resolved.items()}


def one_line(error: Exception) -> str:
    """A Hydra or OmegaConf error as one line that names the key or option, with the nearest known one."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        return str(one_of(group, option, sorted(error.options), "option"))
    text = " ".join(str(error).split())
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override.removeprefix('++')}: expected KEY=VALUE; a value with blanks, brackets, commas or ~ needs two "
            "pairs of quotes: KEY='\"my book (1)\"'"
        )
    if unknown := re.search(r"Could not override '([^']+)'", text):
        return str(one_of("", unknown[1], (*Configuration.model_fields, "experiment", *SHORT), "key"))
    message, _, rest = text.partition(" full_key: ")
    return f"{rest.split()[0]}: {message[0].lower()}{message[1:]}" if rest else text


class Experiment:
    """A configuration whose parts have been checked, also against each other.

    Attributes:
        config: The configuration as plain dictionaries; ``experiment["train"]`` is a group.
        deepspeed: The group ``deepspeed``, with the defaults of keys that a plan reads.
        world_size: Ranks of the run.
        grid: Where the ranks sit.
        tensor: Ranks of a tensor group, which train on the same sequences.
        block: The ``"hzero"`` block for DeepSpeed; None for stock ZeRO-3.
        plan: The shard plan of rank 0; None for stock ZeRO-3.

    Args:
        config: Plain dictionaries, such as `plain` returns.
        world_size: Ranks that a launcher has started; None if the experiment may choose.

    Raises:
        ConfigError: Names the key, what was found and what is expected.
    """

    def __init__(self, config: dict[str, Any], world_size: int | None = None) -> None:
        self.deepspeed = validated(Configuration, config, "").deepspeed
        self.config = {**config, "model": _named(config["model"])}
        owned = {**OF_DEEPSPEED, "zero_optimization": {**OF_DEEPSPEED["zero_optimization"], "hzero": None}}
        owned["train_batch_size"] = None
        _refuse_owned("deepspeed", config["deepspeed"], owned)
        _refuse_owned("zero", config["zero"], {"topology": None})
        self._check_trainer(config["trainer"])
        declared = self._declared()
        self.world_size: int = world_size or config["launcher"]["world_size"] or _ranks_to_start(declared)
        resolved = foreseen_grid if world_size is None else resolve_grid
        self.grid: Grid = resolved(declared, self.world_size, "topology")
        self.block = self._block(declared)
        self.tensor = self.deepspeed.tensor_parallel.autotp_size
        if self.world_size % self.tensor:
            key, ranks = "deepspeed.tensor_parallel.autotp_size", self.world_size
            raise ConfigError(f"{key}: found {self.tensor}; expected a divisor of the {ranks} ranks")
        parsed = parse_config(self.block, "zero") if self.block else None
        self.plan = ShardPlan.from_config(parsed, self.data_parallel, 0) if parsed is not None else None

    def __getitem__(self, group: str) -> Any:
        return self.config[group]

    @property
    def data_parallel(self) -> Grid:
        """The grid of the ranks that shard a weight: of every tensor group, one."""
        return self.grid.of_ranks(range(0, self.world_size, self.tensor)) if self.tensor > 1 else self.grid

    @property
    def preset(self) -> str:
        """Name of the preset; ``stock`` without one."""
        return self.config["zero"].get("preset") or "stock"

    @property
    def dtype(self) -> str:
        """Type of the weights. ``auto`` is fp32 on CPUs and bf16 on accelerators."""
        chosen = self.config["train"]["dtype"]
        if chosen != "auto":
            return str(chosen)
        import torch

        return "bf16" if torch.cuda.is_available() else "fp32"

    @property
    def itemsize(self) -> int:
        """Bytes of one weight."""
        return 4 if self.dtype == "fp32" else 2

    @cached_property
    def architecture(self) -> Architecture:
        """Shapes of the model, counted on torch's meta device. Raises `ConfigError` if transformers cannot build it."""
        return _counted(transformers_config(self.config["model"]))

    @property
    def numels(self) -> list[int]:
        """Elements of every parameter of the model; tied ones count once."""
        return list(self.architecture.numels)

    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's configuration. Trainer fills values that are ``auto``, and makes optimizer and schedule."""
        # Stock keeps small matrices whole by default; a comparison of what is sharded needs all of them sharded.
        own = {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if self.block is None else {}
        config: Any = OmegaConf.to_container(OmegaConf.merge(OF_DEEPSPEED, own, self["deepspeed"]))
        if self.block is not None:
            # A run may go on with other ranks, and an evaluation is of the weights that are saved.
            config["zero_optimization"]["hzero"] = {"checkpoint": {}, "exact_evaluation": True, **self.block}
        return {str(key): value for key, value in config.items()}

    def trainer_arguments(self) -> dict[str, Any]:
        """Arguments of transformers' ``TrainingArguments`` that follow from the groups ``train`` and ``checkpoint``."""
        train, checkpoint = self["train"], self["checkpoint"]
        return {
            "max_steps": train["steps"],
            "per_device_train_batch_size": train["micro_batch"],
            "per_device_eval_batch_size": train["micro_batch"],
            "gradient_accumulation_steps": train["grad_accumulation"],
            "learning_rate": train["lr"],
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": train["min_lr_ratio"]},
            "warmup_steps": train["warmup_steps"],
            "weight_decay": train["weight_decay"],
            "adam_beta1": train["betas"][0],
            "adam_beta2": train["betas"][1],
            "max_grad_norm": train["grad_clip"],
            "seed": train["seed"],
            "bf16": self.dtype == "bf16",
            "fp16": self.dtype == "fp16",
            "gradient_checkpointing": train["activation_checkpointing"],
            "eval_strategy": "steps" if train["eval_every"] else "no",
            "eval_steps": train["eval_every"] or None,
            "save_strategy": "steps" if checkpoint["every"] else "no",
            "save_steps": checkpoint["every"] or 1,
            "save_total_limit": checkpoint["keep"],
            "ddp_timeout": int(train["timeout_s"]),
        }

    def _check_trainer(self, written: dict[str, Any]) -> None:
        if not written:
            return
        from transformers import TrainingArguments

        _refuse_owned(
            "trainer", written, {**self.trainer_arguments(), **dict.fromkeys(("output_dir", "deepspeed", "fsdp"))}
        )
        fields = TrainingArguments.__dataclass_fields__
        for key, value in written.items():
            if key not in fields:
                raise _unknown(f"trainer.{key}", value, key, fields, "an argument of TrainingArguments")

    def _declared(self) -> TopologyConfig:
        keys = {key: value for key, value in self["topology"].items() if key != "bandwidth_gb_s"}
        # Null is no groups there, not a missing key.
        given = {key: value for key, value in keys.items() if value is not None or key == "nodes_per_group"}
        return validated(TopologyConfig, given, "topology")

    def _block(self, declared: TopologyConfig) -> dict[str, Any] | None:
        zero = without_nulls(self.config["zero"])
        if "preset" not in zero:
            if zero:
                raise ConfigError(f"zero.{next(iter(zero))}: found without zero.preset; expected one, as in zero=topo")
            return None
        if declared.gpus_per_node is not None:
            return {**zero, "topology": self.grid.declaration()}
        source = "discover" if declared.source == "auto" else declared.source  # the block's word for it
        return {**zero, "topology": {**declared.model_dump(exclude_unset=True), "source": source}}


def without_nulls(value: Any) -> Any:
    """A nested dictionary without its null leaves and the blocks that are empty then."""
    if not isinstance(value, dict):
        return value
    kept = {key: without_nulls(item) for key, item in value.items() if item is not None}
    return {key: item for key, item in kept.items() if item != {}}


def _ranks_to_start(declared: TopologyConfig) -> int:
    if declared.gpus_per_node is None:
        ranks = len(machine_of(declared.source).devices)
    else:
        ranks = (declared.nodes or 0) * declared.gpus_per_node * declared.gcds_per_gpu
    if not ranks:
        raise ConfigError("launcher.world_size: found null without topology.nodes and GPUs; expected one of them")
    return ranks


def _refuse_owned(group: str, written: dict[str, Any], owned: dict[str, Any]) -> None:
    """Refuses keys that other groups set: if one thing is said twice, one is ignored."""
    for key in owned.keys() & written.keys():
        if isinstance(owned[key], dict) and isinstance(written[key], dict):
            _refuse_owned(f"{group}.{key}", written[key], owned[key])
        else:
            owners = "the groups run, topology, train, checkpoint and zero"
            raise ConfigError(f"{group}.{key}: found {written[key]!r}; expected {owners}")


def _unknown(key: str, value: Any, name: Any, possible: Iterable[str], expected: str) -> ConfigError:
    near = nearest(name, possible)
    return ConfigError(f"{key}: found {value!r}; expected {expected}{f' (did you mean {near!r}?)' if near else ''}")


@dataclass(frozen=True)
class Architecture:
    """Shapes of a causal language model.

    Attributes:
        numels: Elements of every parameter; tied ones count once.
        idle: Parameters of the experts that a token does not visit.
        attention: Layers x width of the attention's queries.
        vocab_size: Number of token ids.
        hidden: Width of the embedding.
        layers: Number of layers.
        heads: Heads of attention.
        intermediate: Hidden units of a layer; 4 x ``hidden`` where the configuration does not say.
        before: Of ``numels``, those before the first layer.
        layer: Those of one layer; None where layers differ.
        after: Those after the last layer.
    """

    numels: tuple[int, ...]
    idle: float
    attention: int
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    intermediate: int
    before: tuple[int, ...]
    layer: tuple[int, ...] | None
    after: tuple[int, ...]


def checkpoint_folder(model: dict[str, Any]) -> Path | None:
    """The folder whose weights a ``model=hf`` starts from; None for random weights."""
    path = Path(model["path"]) if model.get("path") else None
    return path if path is not None and path.is_dir() else None


def _named(model: dict[str, Any]) -> dict[str, Any]:
    """The group ``model`` with a full path and a name: its folder's, or else its type."""
    path = expanded(model["path"]).resolve() if model["path"] else None
    model = {**model, "path": path and str(path)}
    folder = path.name if path is not None and path.is_dir() else None
    return {**model, "name": model["name"] or folder or _written(model).get("model_type")}


def _written(model: dict[str, Any]) -> dict[str, Any]:
    """The keys of ``config.json``, and over them those of ``model.config``."""
    written: Any = {}
    if model["path"]:
        path = Path(model["path"])
        file = path / "config.json" if path.is_dir() else path
        written = read_json(file)
        if not isinstance(written, dict):
            raise ConfigError(f"model.path: {str(file)!r} holds no JSON object; expected a model's config.json")
    return {**written, **(model["config"] or {})}


def transformers_config(model: dict[str, Any]) -> Any:
    """The configuration of a ``model`` group as transformers reads it. No code of a model's folder runs.

    Raises:
        ConfigError: It cannot be read, transformers has no causal language model of that type, or ``seq_length`` is too long
            for it.
    """
    written = {**_written(model), "use_cache": False}
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = str(written.get("model_type") or "")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        expected = "a causal language model of transformers, or model.path=FOLDER"
        raise _unknown("model.config.model_type", kind, kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, expected)
    for key, value in written.items():
        if key.endswith(("_size", "_layers", "_heads", "_dim")) and isinstance(value, int):
            limit = 1000 if key.endswith("_layers") else 10_000_000
            if value > limit:
                raise ConfigError(f"model.config.{key}: found {value}; expected at most {limit:,}")
        if key.endswith("attn_implementation") and "/" in str(value):
            raise ConfigError(f"model.config.{key}: found {value!r}; expected one of transformers, not code of the Hub")
    try:
        known, config = CONFIG_MAPPING[kind](), CONFIG_MAPPING[kind].from_dict(written)
    except Exception as error:  # whatever an architecture's own checks raise
        raise _refused_by_transformers(error) from None
    for key, value in (model["config"] or {}).items():
        if hasattr(config, key) and not hasattr(known, key):  # transformers keeps it, and nothing reads it
            raise _unknown(f"model.config.{key}", value, key, known.to_dict(), f"an argument of {type(known).__name__}")
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or model["seq_length"]
    if model["seq_length"] > longest:
        raise ConfigError(f"model.seq_length: found {model['seq_length']}; expected at most {longest} for this model")
    return config


def _refused_by_transformers(error: Exception) -> ConfigError:
    return ConfigError(f"model.config: {' '.join(str(error.__cause__ or error).split())}")


def _counted(config: Any) -> Architecture:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # of many kinds, by architecture
        raise _refused_by_transformers(error) from None
    before, layers, after = list[int](), dict[int, list[int]](), list[int]()
    for name, param in built.named_parameters():
        # The first number of a name is that of the layer: model.layers.0.mlp.experts.3.w1.weight.
        if place := re.search(r"\.(\d+)\.", name):
            layers.setdefault(int(place[1]), []).append(param.numel())
        else:
            (after if layers else before).append(param.numel())
    distinct = {tuple(layer) for layer in layers.values()}
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 0
    width = (getattr(text, "head_dim", None) or text.hidden_size // heads) * heads if heads else 0
    # A token visits some of the experts.
    experts = sum(param.numel() for name, param in built.named_parameters() if ".experts." in name)
    counts = (getattr(text, key, 0) for key in ("num_local_experts", "num_experts", "n_routed_experts"))
    of = next((count for count in counts if count), 0)
    return Architecture(
        numels=tuple(param.numel() for param in built.parameters()),
        idle=experts * (1 - getattr(text, "num_experts_per_tok", of) / of) if of else 0,
        attention=text.num_hidden_layers * width,
        vocab_size=text.vocab_size,
        hidden=built.get_input_embeddings().weight.shape[1],
        layers=len(layers),
        heads=heads,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        before=tuple(before),
        layer=distinct.pop() if len(distinct) == 1 else None,
        after=tuple(after),
    )
