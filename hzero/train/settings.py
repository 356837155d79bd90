"""Settings of a run, checked before any rank starts."""

from __future__ import annotations

import math
from typing import Any

from hzero.config import TIERS, ConfigError, TopologyConfig, one_of, parse_config, parse_topology
from hzero.sharding.plan import ShardPlan
from hzero.sharding.shapes import gpt_neox_numels
from hzero.topology.grid import Grid
from hzero.topology.local import machine_of
from hzero.topology.resolve import foreseen_grid, resolve_grid

DTYPES = ("auto", "fp32", "bf16", "fp16")

GROUPS = ("model", "data", "topology", "zero", "launcher", "run", "train", "checkpoint", "deepspeed")

#: Keys with the least value they may have.
_AT_LEAST = {
    "train.steps": 1,
    "train.micro_batch": 1,
    "train.grad_accumulation": 1,
    "train.seed": 0,
    "train.min_lr_ratio": 0,
    "train.warmup_steps": 0,
    "train.eval_every": 0,
    "train.eval_batches": 1,
    "train.timeout_s": 1,
    "train.grad_clip": 0,
    "train.lr": 0,
    "train.weight_decay": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "data.max_bytes": 0,
    "launcher.threads": 1,
    "launcher.start_timeout_s": 1,
    "model.hidden_size": 1,
    "model.num_layers": 1,
    "model.num_heads": 1,
    "model.intermediate_size": 1,
    "model.vocab_size": 257,
    "model.seq_length": 2,
}

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
    "zero_optimization.stage": "the trainer runs stage 3",
}


def without_nulls(value: Any) -> Any:
    """A nested dictionary without its null leaves and the blocks that are empty then."""
    if not isinstance(value, dict):
        return value
    kept = {key: without_nulls(item) for key, item in value.items() if item is not None}
    return {key: item for key, item in kept.items() if item != {}}


def model_numels(model: dict[str, Any]) -> list[int]:
    """Elements of every parameter of the ``model`` group's model."""
    return gpt_neox_numels(
        hidden=model["hidden_size"],
        layers=model["num_layers"],
        vocab=model["vocab_size"],
        intermediate=model["intermediate_size"],
    )


def check_model_and_data(config: dict[str, Any]) -> None:
    """Checks the groups ``model`` and ``data``.

    Raises:
        ConfigError: Naming the key, what was found, what is possible.
    """
    _check_numbers(config, "model", "data")
    model, data = config["model"], config["data"]
    if model["hidden_size"] % model["num_heads"]:
        raise ConfigError(
            f"model.num_heads: found {model['num_heads']}, which does not divide model.hidden_size {model['hidden_size']}"
        )
    if model.get("zero_init") not in ("auto", True, False):
        raise ConfigError(f"model.zero_init: found {model.get('zero_init')!r}, possible: auto, true, false")
    share = data.get("eval_share")
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1:
        raise ConfigError(f"data.eval_share: found {share!r}, expected a share between 0 and 1")
    for name in ("path", "cache_dir"):
        value = data.get(name)
        if value == "" or not isinstance(value, (str, type(None))):
            raise ConfigError(f"data.{name}: found {value!r}, expected a name or path")


def check_betas(betas: Any) -> None:
    """Checks ``train.betas``.

    Raises:
        ConfigError: It is not two numbers from 0 to below 1.
    """
    numbers = isinstance(betas, list) and all(isinstance(b, (int, float)) for b in betas)
    if not (numbers and len(betas) == 2 and all(0 <= b < 1 for b in betas)):
        raise ConfigError(f"train.betas: found {betas!r}, expected two numbers from 0 to below 1")


def _check_numbers(config: dict[str, Any], *groups: str) -> None:
    for key, least in _AT_LEAST.items():
        group, name = key.split(".")
        if group not in groups:
            continue
        value = config[group].get(name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < least:
            raise ConfigError(f"{key}: found {value!r}, expected a number of at least {least}")
        whole = key not in ("train.grad_clip", "train.lr", "train.min_lr_ratio", "train.weight_decay")
        if whole and not isinstance(value, int):
            raise ConfigError(f"{key}: found {value!r}, expected a whole number")


class Settings:
    """A configuration whose parts have been checked against each other.

    Attributes:
        config: The configuration as plain dictionaries, resolved.
        world_size: Ranks of the run.
        grid: Where they stand.
        block: The ``"hzero"`` block for DeepSpeed; None for stock ZeRO-3.
        plan: The shard plan of rank 0; None for stock ZeRO-3.

    Args:
        config: Plain dictionaries; `hzero.train.conf.plain` makes them of what Hydra composed.
        world_size: Ranks that a launcher has started; None where the run may choose.

    Raises:
        ConfigError: Naming the key, what was found, what is possible.
    """

    def __init__(self, config: dict[str, Any], world_size: int | None = None) -> None:
        self.config = config
        for group in GROUPS:
            if not isinstance(self.config.get(group), dict):
                raise ConfigError(f"{group}: found {self.config.get(group)!r}, expected a block of keys")
        self._check_values()
        topology = {k: v for k, v in self.config["topology"].items() if k != "bandwidth_gb_s" and v is not None}
        self._source: str | None = topology.pop("source", None)
        started = world_size is not None
        declared = self._declared(topology)
        if world_size is None:
            world_size = self.config["launcher"]["world_size"]
        if world_size is None:
            world_size = self._ranks_to_start(declared)
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ConfigError(f"launcher.world_size: found {world_size!r}, expected a positive number of ranks")
        self.world_size = world_size
        if isinstance(declared, str) and not started:
            self.grid: Grid = foreseen_grid(declared, world_size)
        else:
            self.grid = resolve_grid(
                declared, world_size, where="topology" if self._source is None else "topology.source"
            )
        self.block = self._block()
        self.plan = None
        if self.block is not None:
            self.plan = ShardPlan.from_config(parse_config(self.block, "zero"), self.grid, 0)

    def __getitem__(self, group: str) -> Any:
        return self.config[group]

    def _declared(self, topology: dict[str, Any]) -> str | TopologyConfig:
        """The grid that the group declares, or the source to discover it from."""
        if self._source is None:
            return parse_topology("topology", topology)
        if not isinstance(self._source, str):
            raise ConfigError(f"topology.source: found {self._source!r}, expected auto, a preset or a file")
        if topology:
            raise ConfigError(
                f"topology.{next(iter(topology))}: given beside topology.source {self._source!r}, which says where ranks "
                "sit; topology=auto sets none of these keys"
            )
        return self._source

    @staticmethod
    def _ranks_to_start(declared: str | TopologyConfig) -> int:
        if isinstance(declared, str):
            if ranks := len(machine_of(declared).devices):
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

    @property
    def preset(self) -> str:
        """Name of the preset; ``stock`` without one."""
        return self.config["zero"].get("preset") or "stock"

    @property
    def dtype(self) -> str:
        """Type of the weights, ``auto`` decided: fp32 on processors, bf16 on accelerators."""
        chosen = self.config["train"]["dtype"]
        if chosen != "auto":
            return str(chosen)
        import torch

        return "bf16" if torch.cuda.is_available() else "fp32"

    @property
    def itemsize(self) -> int:
        """Bytes of one weight."""
        return 4 if self.dtype == "fp32" else 2

    def _block(self) -> dict[str, Any] | None:
        zero = without_nulls(self.config["zero"])
        if "preset" not in zero:
            if zero:
                raise ConfigError(f"zero.{next(iter(zero))}: given without zero.preset; choose one, as in zero=topo")
            return None
        grid = self.grid
        declared = {
            "nodes": grid.nodes,
            "gpus_per_node": grid.gpus_per_node,
            "gcds_per_gpu": grid.gcds_per_gpu,
            "order": list(grid.order),
        }
        return {**zero, "topology": self._source or declared}

    def _check_values(self) -> None:
        _check_numbers(self.config, "train", "checkpoint", "launcher")
        check_model_and_data(self.config)
        train = self.config["train"]
        if train["dtype"] not in DTYPES:
            raise ConfigError(f"train.dtype: found {train['dtype']!r}, possible: {', '.join(DTYPES)}")
        if train["min_lr_ratio"] > 1:
            raise ConfigError(f"train.min_lr_ratio: found {train['min_lr_ratio']}, expected a share of at most 1")
        check_betas(train["betas"])
        for key in ("train.activation_checkpointing", "run.overwrite"):
            group, name = key.split(".")
            if not isinstance(self.config[group][name], bool):
                raise ConfigError(f"{key}: found {self.config[group][name]!r}, expected true or false")
        for name in ("name", "dir"):
            value = self.config["run"][name]
            if not isinstance(value, str) or not value:
                raise ConfigError(f"run.{name}: found {value!r}, expected a name or path")
        self._check_deepspeed()
        self._check_bandwidth()

    def _check_deepspeed(self) -> None:
        """The trainer's own keys decide what it has keys for; the same said twice would be ignored once."""
        for key, instead in _OWNED.items():
            value: Any = self.config["deepspeed"]
            *blocks, last = key.split(".")
            for depth, block in enumerate(blocks):
                value = value.get(block, {})
                if not isinstance(value, dict):
                    where = ".".join(["deepspeed", *blocks[: depth + 1]])
                    raise ConfigError(f"{where}: found {value!r}, expected a block of keys")
            if last in value:
                raise ConfigError(f"deepspeed.{key}: the trainer sets it; {instead}")

    def _check_bandwidth(self) -> None:
        bandwidth = self.config["topology"].get("bandwidth_gb_s")
        where = "topology.bandwidth_gb_s"
        if bandwidth is None:
            return
        if not isinstance(bandwidth, dict):
            raise ConfigError(f"{where}: found {bandwidth!r}, expected a block of tiers: {', '.join(TIERS)}")
        for tier, rate in bandwidth.items():
            if tier not in TIERS:
                raise one_of(where, tier, TIERS, "tier")
            if rate is not None and (isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0):
                raise ConfigError(f"{where}.{tier}: found {rate!r}, expected GB/s above 0")
