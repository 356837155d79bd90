"""Settings of a run, checked before any rank starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hzero.config import AUTOMATIC, Dimension, HZeroConfig, TopologyConfig, TopologySource
from hzero.parsing import parse_config, parse_topology
from hzero.settings import architecture
from hzero.settings.groups import Configuration, HFConfiguration
from hzero.settings.pipelines import check_pipelines
from hzero.sharding.plan import ShardPlan
from hzero.sharding.shapes import gpt_neox_numels
from hzero.sharding.tensor_groups import TensorGroups
from hzero.topology import Grid, foreseen_grid, resolve_grid
from hzero.topology.sources import machine_of
from hzero.validation import ConfigError, validated

#: DeepSpeed's keys that the trainer sets, and what to write instead.
_OWNED = {
    "hzero": "choose zero=...",
    "train_micro_batch_size_per_gpu": "use train.micro_batch",
    "train_batch_size": "use train.micro_batch and train.grad_accumulation",
    "gradient_accumulation_steps": "use train.grad_accumulation",
    "gradient_clipping": "use train.grad_clip",
    "managed_gradient_accumulation": "the loop leaves the boundary to DeepSpeed",
    "scheduler": "use train.lr, train.warmup_steps and train.min_lr_ratio",
    "optimizer.params.lr": "use train.lr",
    "optimizer.params.betas": "use train.betas",
    "optimizer.params.weight_decay": "use train.weight_decay",
    "bf16.enabled": "use train.dtype",
    "fp16.enabled": "use train.dtype",
    "zero_optimization.stage": "the trainer runs stage 3, and stage 1 with model.pipeline_parallel",
    "zero_optimization.hzero": "choose zero=...",
    "checkpoint.load_universal": "a run goes on from its own checkpoints, see resume",
}

_STAGES = "model.pipeline_parallel"


def without_nulls(value: Any) -> Any:
    """A nested dictionary without its null leaves and the blocks that are empty then."""
    if not isinstance(value, dict):
        return value
    kept = {key: without_nulls(item) for key, item in value.items() if item is not None}
    return {key: item for key, item in kept.items() if item != {}}


def model_numels(model: dict[str, Any], tensor: int = 1) -> list[int]:
    """Elements of every parameter of the ``model`` group's model. Needs torch for ``model=hf`` alone.

    Args:
        model: The group.
        tensor: Ranks that share every layer; the elements are those of one of them.
    """
    if architecture.is_general(model):
        return list(architecture.architecture(model).numels)
    return gpt_neox_numels(
        hidden=model["hidden_size"],
        layers=model["num_layers"],
        vocab=model["vocab_size"],
        intermediate=model["intermediate_size"],
        tensor=tensor,
    )


def model_vocab(model: dict[str, Any]) -> int:
    """Ids of tokens of the ``model`` group's model."""
    if architecture.is_general(model):
        return architecture.architecture(model).vocab_size
    return int(model["vocab_size"])


class Settings:
    """A configuration whose parts have been checked, also against each other.

    Attributes:
        config: The configuration as plain dictionaries.
        world_size: Ranks of the run.
        grid: Where the ranks sit.
        layout: Their tensor groups, data-parallel groups and pipelines.
        sequence: Their sequence groups, innermost too, and the ranks at the same place of each.
        block: The ``"hzero"`` block for DeepSpeed; None for stock ZeRO-3.
        plan: The shard plan of rank 0; None for stock ZeRO-3.

    Args:
        config: Plain dictionaries, such as `hzero.settings.conf.plain` returns.
        world_size: Ranks that a launcher has started; None if the run may choose.

    Raises:
        ConfigError: Names the key, what was found, what is possible.
    """

    def __init__(self, config: dict[str, Any], world_size: int | None = None) -> None:
        self._launched = world_size
        model = config.get("model")
        general = isinstance(model, dict) and architecture.is_general(model)
        validated(HFConfiguration if general else Configuration, config, "")
        self.config = {**config, "model": architecture.resolved(config["model"])} if general else config
        _check_deepspeed(config["deepspeed"])
        declared = self._declared()
        self.world_size: int = world_size or config["launcher"]["world_size"] or _ranks_to_start(declared)
        if isinstance(declared, TopologySource) and world_size is None:
            self.grid: Grid = foreseen_grid(declared, self.world_size)
        else:
            self.grid = resolve_grid(declared, self.world_size, where="topology")
        model = self["model"]
        self.layout = TensorGroups(self.grid, model.get("tensor_parallel", 1), model.get("pipeline_parallel", 1))
        self.sequence = TensorGroups(self.grid, model.get("sequence_parallel", 1), key="model.sequence_parallel")
        if self.layout.pipeline > 1:
            check_pipelines(config, without_nulls(config["zero"]), self.layout)
        self.block = self._block(declared)
        parsed = parse_config(self.block, "zero") if self.block else None
        if parsed is not None:
            self._check_dimensions(parsed)
        self.plan = ShardPlan.from_config(parsed, self.layout.data_grid, 0) if parsed is not None else None
        self._check_windows()

    def with_accumulation(self, count: int) -> Settings:
        """The same with another number of micro-steps per step."""
        train = {**self.config["train"], "grad_accumulation": count}
        return Settings({**self.config, "train": train}, self._launched)

    def __getitem__(self, group: str) -> Any:
        return self.config[group]

    def _declared(self) -> TopologyConfig | TopologySource:
        """The grid that the group ``topology`` declares, or the source to discover it from."""
        keys = {k: v for k, v in self.config["topology"].items() if k != "bandwidth_gb_s" and v is not None}
        groups = self.config["topology"].get("nodes_per_group", AUTOMATIC)  # null, no groups, is no missing key
        if "source" in keys and groups == AUTOMATIC:  # the default, which overrides no file
            keys.pop("nodes_per_group", None)
        else:
            keys["nodes_per_group"] = groups
        return parse_topology("topology", keys)

    def _check_windows(self) -> None:
        if self.config["trace"]["steps"] is not None and self.plan is None:
            raise ConfigError("trace.steps: given without zero.preset, and stock ZeRO-3 has no hops to trace")
        last = self.config["train"]["steps"]
        for block in ("trace", "profile"):
            steps = self.config[block]["steps"]
            if steps is not None and steps[1] > last:
                raise ConfigError(f"{block}.steps: found {steps}, and the run ends with step {last} (train.steps)")

    def _check_dimensions(self, parsed: HZeroConfig) -> None:
        """Refuses written codecs of dimensions that this run does not send."""
        layout, sequence = self.layout, self.sequence
        of: dict[Dimension, tuple[str, int, Grid, str, str]] = {
            "tensor": (layout.key, layout.tensor, layout.tensor_grid, "tensor groups", "activations"),
            "sequence": (sequence.key, sequence.tensor, sequence.tensor_grid, "sequence groups", "activations"),
            "pipeline": (_STAGES, layout.pipeline, layout.pipeline_grid, "pipelines", "activations"),
            "optimizer": (_STAGES, layout.pipeline, layout.data_grid, "data-parallel groups", "updated weights"),
        }
        for dimension in parsed.written_dimensions:
            if dimension not in of:
                raise ConfigError(
                    f"zero.codecs.{dimension}: given, and nothing of the trainer's models is split like that; possible: "
                    "zero.codecs.tensor with model.tensor_parallel, zero.codecs.sequence with model.sequence_parallel, "
                    "zero.codecs.pipeline and optimizer with model.pipeline_parallel, or a script of your own "
                    "(hzero.collectives.for_dimension)"
                )
            key, parts, grid, groups, sent = of[dimension]
            if parts == 1:
                raise ConfigError(f"zero.codecs.{dimension}: given without {key}, and so no {sent} are sent")
            codecs = {tier: parsed.codecs[dimension][tier].codec for tier in grid.crossed}
            if all(codec == "none" for codec in codecs.values()):
                raise ConfigError(
                    f"zero.codecs.{dimension}: none on the tiers that {groups} of {grid.world_size} ranks cross "
                    f"({', '.join(codecs) or 'none'}), and so without effect"
                )
            narrow = [tier for tier, codec in codecs.items() if codec == "exp"]
            if narrow and self.dtype != "bf16":
                raise ConfigError(
                    f"zero.codecs.{dimension}.{narrow[0]}: found 'exp', which holds bfloat16 numbers, with train.dtype "
                    f"{self.dtype}; possible with train.dtype bf16, or mpc, none"
                )

    @property
    def numels(self) -> list[int]:
        """Elements of every parameter of the model; with tensor groups of one rank's parts, with stages of one stage at most."""
        model = self["model"]
        if self.layout.pipeline > 1:
            model = {**model, "num_layers": -(-model["num_layers"] // self.layout.pipeline)}
        return model_numels(model, self.layout.tensor)

    @property
    def readers(self) -> TensorGroups:
        """The groups whose ranks read the same sequences; their `data` is the number of ranks, or groups, that read others."""
        return self.sequence if self.sequence.tensor > 1 else self.layout

    @property
    def preset(self) -> str:
        """Name of the preset; ``stock`` without one."""
        return self.config["zero"].get("preset") or "stock"

    @property
    def dtype(self) -> str:
        """Type of the weights. ``auto`` is fp32 on processors and bf16 on accelerators."""
        chosen = self.config["train"]["dtype"]
        if chosen != "auto":
            return str(chosen)
        import torch

        return "bf16" if torch.cuda.is_available() else "fp32"

    @property
    def itemsize(self) -> int:
        """Bytes of one weight."""
        return 4 if self.dtype == "fp32" else 2

    def _block(self, declared: TopologyConfig | TopologySource) -> dict[str, Any] | None:
        zero = without_nulls(self.config["zero"])
        if "preset" not in zero:
            if zero:
                raise ConfigError(f"zero.{next(iter(zero))}: given without zero.preset; choose one, as in zero=topo")
            return None
        zero["topology"] = self._topology(declared)
        if self.layout.pipeline > 1:
            return zero
        guard = zero.get("guard", {})
        if isinstance(guard, Mapping):
            zero = {**zero, "guard": {"discarded_steps": self["train"]["guard"], **guard}}
        return zero

    def _topology(self, declared: TopologyConfig | TopologySource) -> Any:
        """The key ``topology`` of the block."""
        if isinstance(declared, TopologyConfig):
            return self.grid.declaration()
        source = "discover" if declared.source == "auto" else declared.source  # the block's word for it
        return {**declared.model_dump(exclude_unset=True), "source": source}


def _ranks_to_start(declared: TopologyConfig | TopologySource) -> int:
    if isinstance(declared, TopologySource):
        if ranks := len(machine_of(declared.source).devices):
            return ranks
        raise ConfigError(
            "launcher.world_size: not given, and this machine has no GPUs that would say how many ranks to start"
        )
    if declared.nodes is None:
        raise ConfigError(
            "topology.nodes: not given, and nothing else says how many ranks to start; give topology.nodes=.. or "
            "launcher.world_size=.."
        )
    return declared.nodes * declared.gpus_per_node * declared.gcds_per_gpu


def _check_deepspeed(written: dict[str, Any]) -> None:
    """Refuses DeepSpeed's keys that the trainer has keys for: of the same thing said twice, one would be ignored."""
    for key, instead in _OWNED.items():
        value: Any = written
        *blocks, last = key.split(".")
        for depth, block in enumerate(blocks):
            value = value.get(block, {})
            if not isinstance(value, dict):
                where = ".".join(["deepspeed", *blocks[: depth + 1]])
                raise ConfigError(f"{where}: found {value!r}, expected a block of keys")
        if last in value:
            raise ConfigError(f"deepspeed.{key}: the trainer sets it; {instead}")
