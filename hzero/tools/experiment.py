"""An experiment: Hydra composes ``conf/``, pydantic checks it, and it sets the arguments of DeepSpeed and Trainer.

`hzero train` runs an experiment, and `hzero plan` computes its bytes, memory and time.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, BaseModel, Field, FiniteFloat, model_validator

import hzero
from hzero.calls import library_errors
from hzero.config import Tier, TopologyConfig, parse_config
from hzero.errors import ConfigError, one_of
from hzero.files import expanded, read_json
from hzero.program.shards import ShardPlan
from hzero.schema import Frozen, Quantity, seconds_of, validated
from hzero.topology import Grid, resolve_grid
from hzero.topology.resolve import foreseen_grid, ranks_here

#: Short names of keys.
SHORT = {
    "nodes": "topology.nodes",
    "packages_per_node": "topology.packages_per_node",
    "devices_per_package": "topology.devices_per_package",
    "preset": "zero.preset",
    "accumulation": "train.grad_accumulation",
}
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[FiniteFloat, Field(ge=0)]
#: Seconds of a wait, at most eleven days. Longer waits overflow in torch.
Timeout = Annotated[FiniteFloat, Field(ge=1, le=1e6)]
Name = Annotated[str, Field(min_length=1)]
#: A dimension of a tensor. The limit exceeds every known model, and protects the machine's memory.
Width = Annotated[int, Field(ge=1, le=10_000_000)]
Elements = Annotated[float, Field(ge=0, lt=1e15)]
#: A duration: ``2h``, ``1h30m``, ``45s``, or seconds.
Duration = Annotated[Any, AfterValidator(lambda value: seconds_of(value) and value)]
Betas = Annotated[list[Annotated[FiniteFloat, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]


class ModelGroup(Frozen):
    """A causal language model of transformers, by its folder or its configuration.

    Every option of the group has the keys without a default. The other keys are the shape of a GPT-NeoX, from which
    ``conf/model/gpt_neox.yaml`` makes ``config``.
    """

    name: Name | None
    path: Name | None
    config: dict[str, Any] | None
    seq_length: int = Field(ge=2, le=10_000_000)
    allow_other_weights: bool
    hidden_size: Width | None = None
    num_layers: int | None = Field(None, ge=1, le=1000)
    num_heads: Width | None = None
    intermediate_size: Width | None = None
    vocab_size: int | None = Field(None, ge=257, le=10_000_000)


class DataGroup(Frozen):
    """The text. ``path`` null is Python's standard library; ``max_bytes`` null or 0 means all of it."""

    path: Name | None
    max_bytes: Count | None
    eval_share: FiniteFloat = Field(gt=0, lt=1)
    cache_dir: Name | None


class TopologyGroup(BaseModel, extra="allow", strict=True):
    """Rates of a machine for `hzero plan`. `hzero.config` checks the other keys.

    Attributes:
        bandwidth_gb_s: GB/s that one device receives over a tier.
        profile: Profile of predictions.
        nic_gbit: Gbit/s of one NIC. It replaces the profile's rates between nodes.
        nics_per_node: NICs of a node.
    """

    bandwidth_gb_s: dict[Tier, Quantity | None] | None = None
    profile: Name | None = None
    nic_gbit: Annotated[Quantity, Field(le=10_000)] | None = None
    nics_per_node: int = Field(1, ge=1, le=64)

    @model_validator(mode="after")
    def _of_nics(self) -> TopologyGroup:
        if self.nics_per_node > 1 and self.nic_gbit is None:
            raise ValueError(f".nics_per_node: found {self.nics_per_node} without topology.nic_gbit; expected both")
        return self


class LauncherGroup(Frozen):
    """How `hzero train` starts its ranks without a launcher."""

    world_size: int | None = Field(ge=1, le=1_000_000)
    threads: int = Field(ge=1, le=1024)
    start_timeout_s: Timeout


class RunBlock(Frozen):
    """The run's folder."""

    name: Name
    dir: Name


class TrainBlock(Frozen):
    """The loop."""

    steps: Positive
    micro_batch: int = Field(ge=1, le=1_000_000)
    grad_accumulation: int = Field(ge=1, le=10_000)  # `hzero plan` simulates every micro-batch
    lr: Rate
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
    trace_step: Count


class CheckpointBlock(Frozen):
    """Checkpoints, and the model at the end."""

    every: Count
    keep: Positive
    model: bool


class ZeroGroup(BaseModel, extra="allow"):
    """A preset, or none for stock ZeRO-3. `hzero.config` checks the other keys. ``topology`` is a group of its own."""

    preset: str | None
    topology: None = None


class ZeroOptimization(BaseModel, extra="allow"):
    """Sizes in elements that a plan needs, with DeepSpeed's defaults. DeepSpeed checks the other keys."""

    stage: Literal[3]
    stage3_gather_16bit_weights_on_model_save: Literal[True]
    hzero: None = None  # the group zero
    stage3_prefetch_bucket_size: Elements = 50_000_000
    stage3_max_live_parameters: Elements = 1_000_000_000
    stage3_max_reuse_distance: Elements = 1_000_000_000
    stage3_param_persistence_threshold: Elements = 100_000
    reduce_bucket_size: Elements = 500_000_000
    sub_group_size: Elements = 1_000_000_000
    contiguous_gradients: bool = True
    offload_optimizer: dict[str, Any] | None = None


class TensorParallel(BaseModel, extra="allow"):
    """AutoTP: ranks of a tensor group."""

    autotp_size: Positive = 1


class ExpertParallel(BaseModel, extra="allow"):
    """AutoEP: ranks among which the experts of a layer are divided."""

    enabled: bool = False
    autoep_size: Positive = 1


class Precision(BaseModel, extra="allow"):
    """``train.dtype`` decides which precision is enabled."""

    enabled: Literal["auto"]
    bf16_optimizer_states: bool = False


class DeepSpeedGroup(BaseModel, extra="allow"):
    """The configuration of DeepSpeed. Trainer replaces ``auto`` by values that follow from the block ``train``."""

    train_batch_size: None = None  # follows from the keys of train
    train_micro_batch_size_per_gpu: Literal["auto"]
    gradient_accumulation_steps: Literal["auto"]
    gradient_clipping: Literal["auto"]
    bf16: Precision
    fp16: Precision
    tensor_parallel: TensorParallel = TensorParallel()
    expert_parallel: ExpertParallel = ExpertParallel()
    zero_optimization: ZeroOptimization
    optimizer: dict[str, Any] = {}
    data_types: dict[str, Any] = {}


class Configuration(Frozen):
    """The whole configuration. `hzero.config` checks ``zero``, and Trainer its arguments ``trainer``."""

    model: ModelGroup
    data: DataGroup
    topology: TopologyGroup
    zero: ZeroGroup
    launcher: LauncherGroup
    resume: Any
    run: RunBlock
    train: TrainBlock
    checkpoint: CheckpointBlock
    trainer: dict[str, Any]
    deepspeed: DeepSpeedGroup


def conf_dir() -> Path:
    """The folder of Hydra groups: inside the installed package, or at the root of a checkout."""
    package = Path(hzero.__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def key_lines() -> Iterator[tuple[str, str, str]]:
    """Keys of ``conf/`` that have a comment: dotted key, value and comment. If a key repeats, the last one counts."""
    conf = conf_dir()
    for path in [*sorted(conf.glob("[!e]*/*.yaml"), reverse=True), conf / "train.yaml"]:
        parents = [(-1, "" if path.parent == conf else path.parent.name)]
        for line in path.read_text().splitlines():
            if found := re.match(r"( *)(\w+):(?: ([^#]*?))?(?: *# (.*))?$", line):
                depth = len(found[1])
                while parents[-1][0] >= depth:
                    parents.pop()
                parents.append((depth, f"{parents[-1][1]}.{found[2]}".strip(".")))
                if found[4]:
                    yield parents[-1][1], found[3] or "", found[4]


def compose(overrides: Sequence[str]) -> Experiment:
    """The experiment of ``conf/train.yaml`` with overrides.

    Args:
        overrides: ``KEY=VALUE``; keys may be `SHORT`.

    Raises:
        ConfigError: An override is invalid.
    """
    return Experiment(composed("train", overrides))


def composed(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration ``conf/NAME.yaml`` with overrides, as plain dictionaries.

    Raises:
        ConfigError: An override is invalid.
    """
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = hydra_compose(name, for_hydra(overrides))
    except (HydraException, OmegaConfBaseException, TypeError, ValueError) as error:
        raise ConfigError(one_line(error)) from None
    return plain(config)


def full_names(overrides: Sequence[str]) -> list[str]:
    """Replaces `SHORT` keys by full ones. Raises `ConfigError` for several options of a group."""
    for key, _, value in (override.partition("=") for override in overrides):
        if value.lstrip().startswith("[") and (conf_dir() / key).is_dir():  # Hydra would use the last option
            raise ConfigError(f"{key}: found {value}; expected one option (-m {key}=A,B runs several)")
    return [re.sub(r"^\w+(?==)", lambda key: SHORT.get(key[0], key[0]), override) for override in overrides]


def for_hydra(overrides: Sequence[str]) -> list[str]:
    """Overrides that may add keys to a group, so that pydantic, which names the nearest key, refuses unknown keys."""
    return [re.sub(r"^\+*(?!hydra\.)(\w+\.[^@/=]*=)", r"++\1", override) for override in full_names(overrides)]


def key_of(override: str) -> str:
    """The key of an override, without Hydra's signs ``+`` and ``~``."""
    return override.partition("=")[0].lstrip("+~")


def plain(config: DictConfig) -> dict[str, Any]:
    """A composed configuration as plain dictionaries.

    Raises:
        ConfigError: A key has no value, or its value cannot be resolved.
    """
    try:
        resolved: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from None
    return {str(key): value for key, value in resolved.items()}


def one_line(error: Exception) -> str:
    """A Hydra or OmegaConf error as one line, with the nearest possible key or option."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        return str(one_of(group, option, sorted(error.options)))
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
    """A checked configuration, and the grid, block and plan that follow from it.

    Attributes:
        config: The configuration as plain dictionaries; ``experiment["train"]`` is a group.
        deepspeed: The group ``deepspeed``, with the defaults of keys that a plan reads.
        world_size: Ranks of the run.
        grid: Places of the ranks.
        tensor: Ranks of a tensor group, which train on the same sequences.
        experts: Ranks among which AutoEP divides the experts of a layer; 1 without AutoEP.
        sequence: The block's key ``sequence``; None without it.
        block: The ``"hzero"`` block for DeepSpeed; None for stock ZeRO-3.
        plan: The shard plan of rank 0; None for stock ZeRO-3.

    Args:
        config: Plain dictionaries, such as `plain` returns.
        world_size: Ranks that a launcher has started; None if the experiment may choose.

    Raises:
        ConfigError: A value is invalid, or two values exclude each other.
    """

    def __init__(self, config: dict[str, Any], world_size: int | None = None) -> None:
        self.deepspeed = validated(Configuration, config, "").deepspeed
        self.config = {**config, "model": _named(config["model"])}
        places = {key: value for key, value in config["topology"].items() if key not in TopologyGroup.model_fields}
        for key in (key for key in places if key not in TopologyConfig.model_fields):
            raise one_of("topology", key, [*TopologyConfig.model_fields, *TopologyGroup.model_fields], "key")
        declared = validated(TopologyConfig, places, "topology")
        self.world_size: int = world_size or config["launcher"]["world_size"] or ranks_here(declared, "topology")
        if not self.world_size:
            raise ConfigError("launcher.world_size: found null without topology.nodes and GPUs; expected one of them")
        resolved = foreseen_grid if world_size is None else resolve_grid
        self.grid: Grid = resolved(declared, self.world_size, "topology")
        self.block = self._block(declared)
        self.tensor = self.deepspeed.tensor_parallel.autotp_size
        of_experts = self.deepspeed.expert_parallel
        self.experts = of_experts.autoep_size if of_experts.enabled else 1
        for key, size in (("tensor_parallel.autotp_size", self.tensor), ("expert_parallel.autoep_size", self.experts)):
            if self.world_size % size:
                raise ConfigError(f"deepspeed.{key}: found {size}; expected a divisor of the {self.world_size} ranks")
        parsed = parse_config(self.block, "zero") if self.block else None
        self.plan = ShardPlan.from_config(parsed, self.data_parallel, 0) if parsed is not None else None
        if parsed is not None and self.plan is not None and self.experts > 1:
            # The ranks that have the same experts as rank 0.
            own = self.grid.of_ranks(range(0, self.world_size, self.experts), "deepspeed.expert_parallel.autoep_size")
            part = ShardPlan.of_part(parsed, own, 0, "experts")
            self.plan = replace(self.plan, scoped=(("*.experts.*", part), *self.plan.scoped))
        self.sequence = parsed.sequence if parsed is not None else None
        if self.sequence is not None:
            self.sequence.check(self.world_size, "ranks", "zero.sequence.parallel")
            self.sequence.check(self.architecture.heads, "attention heads", "zero.sequence.parallel")

    def __getitem__(self, group: str) -> Any:
        return self.config[group]

    @property
    def data_parallel(self) -> Grid:
        """The grid of the ranks that shard a weight: one rank of every tensor group."""
        return self.grid.of_ranks(range(0, self.world_size, self.tensor)) if self.tensor > 1 else self.grid

    @property
    def replicas(self) -> int:
        """Ranks, or groups of ranks, that train on different sequences."""
        return self.world_size // self.tensor // (self.sequence.parallel if self.sequence else 1)

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
        """Shapes of the model, from torch's meta device. Raises `ConfigError` if transformers cannot build it."""
        with library_errors("model.config"):
            return _counted(transformers_config(self.config["model"]))

    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's configuration with the block. Trainer fills in ``auto``, and makes optimizer and schedule."""
        own: dict[str, Any] = {}
        if self.block is not None:
            # A run may resume on other ranks, except with AutoEP. Its evaluations should use the saved weights.
            checkpoint: Any = None if self.deepspeed.expert_parallel.enabled else {}
            own = {"hzero": {"checkpoint": checkpoint, "exact_evaluation": True, **self.block}}
        return {**self["deepspeed"], "zero_optimization": {**own, **self["deepspeed"]["zero_optimization"]}}

    def _block(self, declared: TopologyConfig) -> dict[str, Any] | None:
        zero = self["zero"]
        if zero.get("preset") is not None:
            # Accelerate fills in values that are "auto".
            source = {"source": "discover"} if declared.source == "auto" else {}
            return {**zero, "topology": {**declared.model_dump(exclude_unset=True), **source}}
        if more := [key for key in zero if key != "preset"]:
            raise ConfigError(f"zero.{more[0]}: found without zero.preset; expected one, as in zero=topo")
        return None


@dataclass(frozen=True)
class Architecture:
    """Shapes of a causal language model.

    Attributes:
        numels: Elements of every parameter, those of layers in the order of layers; tied ones count once.
        idle: Parameters of experts that a token does not visit, on average.
        attention: Layers x width of the attention's queries.
        vocab_size: Number of token ids.
        hidden: Width of the embedding.
        layers: Number of layers.
        heads: Heads of attention.
        intermediate: Hidden units of a layer; 4 x ``hidden`` if the configuration has no such key.
        before: Elements of the parameters before the first layer.
        layer: Elements of the parameters of one layer; None if layers differ.
        after: Elements of the parameters after the last layer.
        keys: Width of a layer's keys, and of its values.
        rotary: Dimensions of a head that the rotary embedding rotates.
        names: Names of every parameter; tied ones have several.
        matrices: Shapes of the parameters that Muon updates.
        experts: Experts of a layer; 0 without them.
        experts_per_token: Experts of a layer that a token visits.
        expert_layers: Layers with experts.
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
    keys: int = 0
    rotary: int = 0
    names: tuple[tuple[str, ...], ...] = ()
    matrices: tuple[tuple[int, ...], ...] = ()
    experts: int = 0
    experts_per_token: int = 0
    expert_layers: int = 0


def checkpoint_folder(model: dict[str, Any]) -> Path | None:
    """The folder with the initial weights of ``model=hf``; None for random weights."""
    return Path(model["path"]) if model["path"] and Path(model["path"]).is_dir() else None


def _named(model: dict[str, Any]) -> dict[str, Any]:
    """The group ``model`` with an absolute path and a name: the name of its folder, or else its type."""
    model = {**model, "path": model["path"] and str(expanded(model["path"]).resolve())}
    folder = checkpoint_folder(model)
    return {**model, "name": model["name"] or (folder.name if folder else _written(model).get("model_type"))}


def _written(model: dict[str, Any]) -> dict[str, Any]:
    """The keys of ``config.json``, overridden by ``model.config``."""
    written: dict[str, Any] = {}
    if model["path"]:
        if "hidden_size" in model:
            raise ConfigError(f"model.path: found {model['path']!r} with model={model['name']}; expected model=hf")
        path = Path(model["path"])
        try:
            written = read_json(path / "config.json" if path.is_dir() else path)
        except ConfigError as error:
            raise ConfigError(f"model.path: {error}; expected a folder with config.json, or such a file") from None
    return {**written, **(model["config"] or {})}


def transformers_config(model: dict[str, Any]) -> Any:
    """The transformers configuration of a ``model`` group. No code of a model's folder runs.

    Raises:
        ConfigError: The configuration cannot be read, transformers has no causal language model of its type, or
            ``seq_length`` exceeds the model's maximum.
    """
    written = {**_written(model), "use_cache": False}
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if not (kind := str(written.get("model_type") or "")):
        raise ConfigError("model.path: found neither it nor model_type in model.config; expected one of them")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise one_of("model.config.model_type", kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    for key, value in written.items():
        if key.endswith(("_size", "_layers", "_heads", "_dim")) and isinstance(value, int):
            limit = 1000 if key.endswith("_layers") else 10_000_000
            if value > limit:
                raise ConfigError(f"model.config.{key}: found {value}; expected at most {limit:,}")
        if key.endswith("attn_implementation") and "/" in str(value):
            raise ConfigError(f"model.config.{key}: found {value!r}; expected one of transformers, not code of the Hub")
    with library_errors("model.config"):  # an architecture may check its values
        known, config = CONFIG_MAPPING[kind](), CONFIG_MAPPING[kind].from_dict(written)
    for key in model["config"] or {}:
        # Without a default, transformers keeps any key. A model reads some of these.
        if hasattr(config, key) and not hasattr(known, key) and not _reads(config, key):
            raise one_of("model.config", key, known.to_dict(), "key")
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or model["seq_length"]
    if model["seq_length"] > longest:
        raise ConfigError(f"model.seq_length: found {model['seq_length']}; expected at most {longest} for this model")
    return config


def _reads(config: Any, key: str) -> bool:
    """Whether the model of a transformers configuration reads a key, by the source of its package."""
    files = Path(inspect.getfile(type(config))).parent.glob("modeling_*.py")
    return any(re.search(rf"(config\.|[\"']){re.escape(key)}\b", file.read_text()) for file in files)


def _counted(config: Any) -> Architecture:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    before, layers, after, names = list[Any](), dict[int, list[Any]](), list[Any](), dict[Any, list[str]]()
    for name, param in built.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
        if len(names[param]) > 1:
            continue
        # The first number of a name is the layer's: model.layers.0.mlp.experts.3.w1.weight.
        if place := re.search(r"\.(\d+)\.", name):
            layers.setdefault(int(place[1]), []).append(param)
        else:
            (after if layers else before).append(param)
    ordered = [*before, *itertools.chain(*layers.values()), *after]
    distinct = {tuple(param.numel() for param in layer) for layer in layers.values()}
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 0
    width = (getattr(text, "head_dim", None) or text.hidden_size // heads) * heads if heads else 0
    rope = getattr(text, "rope_parameters", None)
    # A token visits only some of the experts.
    of_experts = {name: param.numel() for name, param in built.named_parameters() if ".experts." in name}
    counts = (getattr(text, key, 0) for key in ("num_local_experts", "num_experts", "n_routed_experts"))
    # Some configurations have a number for layers without experts.
    of = next(filter(None, counts), 0) if of_experts else 0
    return Architecture(
        numels=tuple(param.numel() for param in ordered),
        idle=sum(of_experts.values()) * (1 - getattr(text, "num_experts_per_tok", of) / of) if of else 0,
        attention=text.num_hidden_layers * width,
        vocab_size=text.vocab_size,
        hidden=built.get_input_embeddings().weight.shape[1],
        layers=len(layers),
        heads=heads,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        before=tuple(param.numel() for param in before),
        layer=distinct.pop() if len(distinct) == 1 else None,
        after=tuple(param.numel() for param in after),
        keys=width // heads * (getattr(text, "num_key_value_heads", None) or heads) if heads else 0,
        rotary=int(width // heads * rope.get("partial_rotary_factor", 1)) if heads and rope else 0,
        names=tuple(tuple(names[param]) for param in ordered),
        # The choice of DeepSpeed 0.19 (`set_optimizer_flags`).
        matrices=tuple(
            tuple(param.shape)
            for name, param in built.named_parameters()
            if param.ndim > 1 and not re.search("embed|lm_head", name.lower())
        ),
        experts=of,
        experts_per_token=getattr(text, "num_experts_per_tok", 0) or 0,
        expert_layers=len({name.partition(".experts.")[0] for name in of_experts}),
    )
