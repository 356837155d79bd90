"""An experiment: Hydra composes ``conf/``, pydantic checks it, and the arguments of DeepSpeed and Trainer follow from it.

`hzero train` runs an experiment, `hzero plan` computes from one.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, BaseModel, Field, FiniteFloat, ValidationInfo, field_validator

import hzero
from hzero.config import AUTOMATIC, TIERS, HZeroConfig, Tier, TopologyConfig, TopologySource
from hzero.files import expanded, read_json
from hzero.parsing import parse_config, parse_topology
from hzero.sharding.memory import BUCKET_NUMEL, REDUCE_NUMEL, REUSE_NUMEL, SUB_GROUP_NUMEL, Buffers
from hzero.sharding.plan import ShardPlan
from hzero.topology import Grid, foreseen_grid, resolve_grid
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
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[FiniteFloat, Field(ge=0)]
#: Seconds of a wait, at most eleven days: larger ones overflow in torch.
Timeout = Annotated[FiniteFloat, Field(ge=1, le=1e6)]
Name = Annotated[str, Field(min_length=1)]
#: A dimension of a tensor. Larger ones than of any model only take the machine's memory.
Width = Annotated[int, Field(ge=1, le=10_000_000)]
#: A duration: ``2h``, ``1h30m``, ``45s``, or seconds.
Duration = Annotated[Any, AfterValidator(lambda value: seconds_of(value) and value)]
Betas = Annotated[list[Annotated[FiniteFloat, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]


class ModelGroup(Frozen):
    """A GPT-NeoX. ``zero_init`` says whether it is built under ``deepspeed.zero.Init``."""

    name: Name
    hidden_size: Width
    num_layers: int = Field(ge=1, le=1000)
    num_heads: Width
    intermediate_size: Width
    vocab_size: int = Field(ge=257, le=10_000_000)
    seq_length: int = Field(ge=2, le=10_000_000)
    zero_init: Literal["auto", True, False]

    @field_validator("num_heads")
    @classmethod
    def _divides(cls, value: int, info: ValidationInfo) -> int:
        hidden = info.data.get("hidden_size", value)
        if hidden % value:
            raise ValueError(f"found {value}, expected a divisor of model.hidden_size, {hidden}")
        return value


class HFModel(Frozen):
    """Any causal language model of transformers, by its folder or its configuration."""

    name: Name | None
    path: Name | None
    config: dict[str, Any] | None
    seq_length: int = Field(ge=2, le=10_000_000)
    zero_init: Literal["auto", True, False]
    allow_other_weights: bool


class DataGroup(Frozen):
    """The text. ``path`` null is Python's standard library; ``max_bytes`` 0 takes all, null all of ``path``."""

    path: Name | None
    max_bytes: Count | None
    eval_share: FiniteFloat = Field(gt=0, lt=1)
    cache_dir: Name | None


class _Bandwidth(Frozen):
    """Rates of the group ``topology``: GB/s that one device receives over a tier."""

    bandwidth_gb_s: dict[Tier, Annotated[FiniteFloat, Field(gt=0)] | None] | None


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
    """Text that the model writes every so many steps (0: only at the end)."""

    every: Count
    prompt: Name | None
    tokens: Positive
    temperature: Rate


class Configuration(Frozen):
    """The whole configuration.

    `hzero.parsing` checks ``zero`` and ``topology``, Trainer its arguments ``trainer``, and DeepSpeed ``deepspeed``.
    """

    model: ModelGroup
    data: DataGroup
    topology: dict[str, Any]
    zero: dict[str, Any]
    launcher: LauncherGroup
    resume: Any
    run: RunBlock
    train: TrainBlock
    checkpoint: CheckpointBlock
    sample: SampleBlock
    trainer: dict[str, Any]
    deepspeed: dict[str, Any]

    @field_validator("resume")
    @classmethod
    def _false_auto_or_path(cls, value: Any) -> Any:
        if value is not None and value is not False and not (isinstance(value, str) and value):
            raise ValueError(f"found {value!r}; expected false, auto or a path")
        return value


class HFConfiguration(Configuration):
    """The same with ``model=hf``."""

    model: HFModel  # type: ignore[assignment]


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
            config = hydra_compose("train", full_names(overrides))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(one_line(error)) from None
    return Experiment(plain(config), world_size)


def full_names(overrides: Sequence[str]) -> list[str]:
    """Overrides with full keys instead of `SHORT` ones.

    Raises:
        ConfigError: One has no key.
    """
    found = []
    for override in overrides:
        key, sign, value = override.partition("=")
        if sign and not key.lstrip("+~"):
            raise ConfigError(f"{override}: expected KEY=VALUE")
        found.append(f"{SHORT[key]}={value}" if sign and key in SHORT else override)
    return found


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
        if "=" not in error.override:
            return f"{error.override}: expected KEY=VALUE"
        return (
            f"{error.override}: cannot be read; a value with blanks, brackets, commas or ~ needs two pairs of quotes: "
            "KEY='\"my book (1)\"'"
        )
    if found := re.search(r"Could not override '([^']+)'", text):
        return _unknown_key(found[1])
    message, _, rest = text.partition(" full_key: ")
    return f"{rest.split()[0]}: {message[0].lower()}{message[1:]}" if rest else text


def _unknown_key(key: str) -> str:
    known = known_keys()
    if key in known or key.startswith(("deepspeed.", "trainer.", "model.config.")):
        return f"{key}: not set yet, or with other keys than these; expected +{key}=VALUE"
    same_end = (name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2])
    near = next(same_end, None) or nearest(key, known)
    return f"{key}: unknown key{f'; did you mean {near!r}?' if near else '.'} `hzero train --cfg job` shows all"


def known_keys() -> list[str]:
    """Dotted names of all keys, groups included."""
    zero = (f"zero.{key}" for key in _dotted(HZeroConfig) if not key.startswith(("topology", "preset_")))
    topology = ["topology.source", *_dotted(TopologyConfig, "topology.")]
    rates = (f"topology.bandwidth_gb_s.{tier}" for tier in TIERS)
    return [*_dotted(Configuration), *_dotted(HFModel, "model."), *zero, *topology, *rates]


def _dotted(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in ((field.alias or name, field) for name, field in model.model_fields.items()):
        yield f"{prefix}{name}"
        inside = () if typing.get_origin(field.annotation) is dict else typing.get_args(field.annotation)
        for inner in (field.annotation, *inside):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from _dotted(inner, f"{prefix}{name}.")


class Experiment:
    """A configuration whose parts have been checked, also against each other.

    Attributes:
        config: The configuration as plain dictionaries; ``experiment["train"]`` is a group.
        world_size: Ranks of the run.
        grid: Where the ranks sit.
        block: The ``"hzero"`` block for DeepSpeed; None for stock ZeRO-3.
        plan: The shard plan of rank 0; None for stock ZeRO-3.

    Args:
        config: Plain dictionaries, such as `plain` returns.
        world_size: Ranks that a launcher has started; None if the experiment may choose.

    Raises:
        ConfigError: Names the key, what was found and what is expected.
    """

    def __init__(self, config: dict[str, Any], world_size: int | None = None) -> None:
        general = "path" in (config.get("model") or {})
        validated(HFConfiguration if general else Configuration, config, "")
        self.config = {**config, "model": _resolved(config["model"])} if general else config
        validated(_Bandwidth, {"bandwidth_gb_s": config["topology"].get("bandwidth_gb_s")}, "topology")
        _refuse_owned("deepspeed", config["deepspeed"], _ds_defaults())
        self._check_trainer(config["trainer"])
        declared = self._declared()
        self.world_size: int = world_size or config["launcher"]["world_size"] or _ranks_to_start(declared)
        if isinstance(declared, TopologySource) and world_size is None:
            self.grid: Grid = foreseen_grid(declared, self.world_size)
        else:
            self.grid = resolve_grid(declared, self.world_size, where="topology")
        self.block = self._block(declared)
        parsed = parse_config(self.block, "zero") if self.block else None
        self.plan = ShardPlan.from_config(parsed, self.grid, 0) if parsed is not None else None

    def __getitem__(self, group: str) -> Any:
        return self.config[group]

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

    def elements(self, key: str, default: int) -> int:
        """A number of elements in DeepSpeed's ``zero_optimization``. Raises `ConfigError` if it is none."""
        value = self["deepspeed"].get("zero_optimization", {}).get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e15:
            raise ConfigError(f"deepspeed.zero_optimization.{key}: found {value!r}; expected a number of elements")
        return int(value)

    def buffers(self, module: int = 0) -> Buffers:
        """Sizes of DeepSpeed's buffers; ``module`` is that of the largest module that is gathered as a whole."""
        zero, types = (self["deepspeed"].get(block) or {} for block in ("zero_optimization", "data_types"))
        return Buffers(
            prefetch=self.elements("stage3_prefetch_bucket_size", BUCKET_NUMEL),
            reduce=self.elements("reduce_bucket_size", REDUCE_NUMEL),
            contiguous=bool(zero.get("contiguous_gradients", True)),
            reuse=self.elements("stage3_max_reuse_distance", REUSE_NUMEL),
            sub_group=self.elements("sub_group_size", SUB_GROUP_NUMEL),
            module=module,
            accumulation_itemsize={"fp32": 4, "bf16": 2, "fp16": 2}.get(str(types.get("grad_accum_dtype"))),
            offload=(zero.get("offload_optimizer") or {}).get("device", "none") != "none",
        )

    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's configuration. Trainer fills values that are ``auto``, and makes optimizer and schedule."""
        config = _ds_defaults()
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        if self.block is None:
            # Stock keeps small matrices whole by default; a comparison of what is sharded needs all of them sharded.
            config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        config = OmegaConf.to_container(OmegaConf.merge(config, self["deepspeed"]))  # type: ignore[assignment]
        if self.block is not None:
            # A run may go on with other ranks, and an evaluation is of the weights that are saved.
            config["zero_optimization"]["hzero"] = {"checkpoint": {}, "exact_evaluation": True, **self.block}
        return config

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

        _refuse_owned("trainer", written, self.trainer_arguments())
        fields = TrainingArguments.__dataclass_fields__
        for key in written:
            if key not in fields:
                near = nearest(key, fields)
                hint = f" (did you mean {near!r}?)" if near else ""
                raise ConfigError(f"trainer.{key}: found no such key; expected an argument of TrainingArguments{hint}")

    def _declared(self) -> TopologyConfig | TopologySource:
        """The grid that the group ``topology`` declares, or the source to discover it from."""
        keys = {k: v for k, v in self.config["topology"].items() if k != "bandwidth_gb_s" and v is not None}
        groups = self.config["topology"].get("nodes_per_group", AUTOMATIC)  # null, no groups, is no missing key
        if "source" in keys and groups == AUTOMATIC:  # the default, which overrides no file
            keys.pop("nodes_per_group", None)
        else:
            keys["nodes_per_group"] = groups
        return parse_topology("topology", keys)

    def _block(self, declared: TopologyConfig | TopologySource) -> dict[str, Any] | None:
        zero = without_nulls(self.config["zero"])
        if "preset" not in zero:
            if zero:
                raise ConfigError(f"zero.{next(iter(zero))}: found without zero.preset; expected one, as in zero=topo")
            return None
        if isinstance(declared, TopologyConfig):
            return {**zero, "topology": self.grid.declaration()}
        source = "discover" if declared.source == "auto" else declared.source  # the block's word for it
        return {**zero, "topology": {**declared.model_dump(exclude_unset=True), "source": source}}


def without_nulls(value: Any) -> Any:
    """A nested dictionary without its null leaves and the blocks that are empty then."""
    if not isinstance(value, dict):
        return value
    kept = {key: without_nulls(item) for key, item in value.items() if item is not None}
    return {key: item for key, item in kept.items() if item != {}}


def _ranks_to_start(declared: TopologyConfig | TopologySource) -> int:
    if isinstance(declared, TopologySource):
        if ranks := len(machine_of(declared.source).devices):
            return ranks
        raise ConfigError("launcher.world_size: found null on a machine without GPUs; expected a number of ranks")
    if declared.nodes is None:
        raise ConfigError(
            "topology.nodes: found null, and nothing else gives the number of ranks; expected topology.nodes=.. or "
            "launcher.world_size=.."
        )
    return declared.nodes * declared.gpus_per_node * declared.gcds_per_gpu


def _ds_defaults() -> dict[str, Any]:
    """DeepSpeed's keys that other groups set."""
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3},
    }


def _refuse_owned(group: str, written: dict[str, Any], owned: dict[str, Any]) -> None:
    """Refuses keys that other groups set: if one thing is said twice, one is ignored."""
    for key, value in owned.items():
        if key not in written:
            continue
        if not isinstance(value, dict):
            raise ConfigError(f"{group}.{key}: found {written[key]!r}; expected the groups train, checkpoint and zero")
        if not isinstance(written[key], dict):
            raise ConfigError(f"{group}.{key}: found {written[key]!r}; expected a block of keys")
        _refuse_owned(f"{group}.{key}", written[key], value)


@dataclass(frozen=True)
class Architecture:
    """Shapes of a causal language model.

    Attributes:
        numels: Elements of every parameter; tied ones count once.
        multiplied: Parameters that a token is multiplied with: without the embedding's lookup and idle experts.
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
    multiplied: float
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


def _resolved(model: dict[str, Any]) -> dict[str, Any]:
    """The group of ``model=hf`` with the full path and a name.

    Raises:
        ConfigError: There is no configuration, transformers cannot read it, or ``seq_length`` is too long for it.
    """
    path = expanded(model["path"]).resolve() if model["path"] else None
    model = {**model, "path": None if path is None else str(path)}
    config = transformers_config(model)
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and model["seq_length"] > limit:
        raise ConfigError(
            f"model.seq_length: found {model['seq_length']}; expected at most {limit}, the architecture's "
            "max_position_embeddings"
        )
    folder = path.name if path is not None and path.is_dir() else None
    return {**model, "name": model["name"] or folder or str(config.model_type)}


def transformers_config(model: dict[str, Any]) -> Any:
    """The configuration of a ``model`` group as transformers reads it. No code of a model's folder runs.

    Raises:
        ConfigError: It cannot be read, or transformers has no causal language model of that type.
    """
    if "path" not in model:
        from transformers import GPTNeoXConfig

        return GPTNeoXConfig(
            vocab_size=model["vocab_size"],
            hidden_size=model["hidden_size"],
            num_hidden_layers=model["num_layers"],
            num_attention_heads=model["num_heads"],
            intermediate_size=model["intermediate_size"],
            max_position_embeddings=model["seq_length"],
            attention_dropout=0.0,
            hidden_dropout=0.0,
            use_cache=False,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    written: Any = {}
    if model["path"]:
        path = Path(model["path"])
        file = path / "config.json" if path.is_dir() else path
        written = read_json(file)
        if not isinstance(written, dict):
            raise ConfigError(f"model.path: {str(file)!r} holds no JSON object; expected a model's config.json")
    written = {**written, **(model["config"] or {})}
    if not written:
        raise ConfigError(
            "model.path: found null; expected a folder of config.json, safetensors and tokenizer, a config.json, or "
            "model.config={model_type: ..}"
        )
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = written.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = nearest(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        hint = f" (did you mean {near!r}?)" if near else ""
        raise ConfigError(
            f"model.config.model_type: found {kind!r}; expected a causal language model of transformers{hint}"
        )
    for key, value in written.items():
        if key.endswith(("_size", "_layers", "_heads", "_dim")) and isinstance(value, int):
            limit = 1000 if key.endswith("_layers") else 10_000_000
            if value > limit:
                raise ConfigError(f"model.config.{key}: found {value}; expected at most {limit:,}")
    try:
        return CONFIG_MAPPING[kind].from_dict({**written, "use_cache": False})
    except Exception as error:  # whatever an architecture's own checks raise
        raise ConfigError(f"model.config: {' '.join(str(error).split())}") from None


def _counted(config: Any) -> Architecture:
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # of many kinds, by architecture
        raise ConfigError(f"model.config: {' '.join(str(error).split())}") from None
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 0
    width = (getattr(text, "head_dim", None) or text.hidden_size // heads) * heads if heads else 0
    inputs, outputs = built.get_input_embeddings(), built.get_output_embeddings()
    tied = outputs is not None and outputs.weight is inputs.weight
    # A token visits some of the experts.
    experts = sum(param.numel() for name, param in built.named_parameters() if ".experts." in name)
    counts = (getattr(text, key, 0) for key in ("num_local_experts", "num_experts", "n_routed_experts"))
    of = next((count for count in counts if count), 0)
    idle = experts * (1 - getattr(text, "num_experts_per_tok", of) / of) if of else 0
    # The first number of a name is that of the layer: model.layers.0.mlp.experts.3.w1.weight.
    places = [re.search(r"\.(\d+)\.", name) for name, _ in built.named_parameters()]
    numels = tuple(param.numel() for param in built.parameters())
    layers: dict[int, list[int]] = {}
    for place, numel in zip(places, numels):
        if place is not None:
            layers.setdefault(int(place[1]), []).append(numel)
    first = next((index for index, place in enumerate(places) if place is not None), len(places))
    outside = [(index, numel) for index, (place, numel) in enumerate(zip(places, numels)) if place is None]
    distinct = {tuple(layer) for layer in layers.values()}
    return Architecture(
        numels=numels,
        multiplied=sum(numels) - (0 if tied else inputs.weight.numel()) - idle,
        attention=text.num_hidden_layers * width,
        vocab_size=text.vocab_size,
        hidden=inputs.weight.shape[1],
        layers=len(layers),
        heads=heads,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        before=tuple(numel for index, numel in outside if index < first),
        layer=distinct.pop() if len(distinct) == 1 else None,
        after=tuple(numel for index, numel in outside if index > first),
    )
