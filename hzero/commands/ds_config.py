"""A DeepSpeed configuration: builds what a run builds from it before there is a model, and reports what that raises."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hzero import autoload
from hzero.block import KEY, PARENT, find
from hzero.block import read_text as parse_text
from hzero.config import HERE, TopologyConfig, parse_config
from hzero.files import read_text
from hzero.topology import Grid, declared_grid, resolve_grid
from hzero.topology.machine import Machine, grid_of_nodes
from hzero.topology.sources import machine_of
from hzero.validation import ConfigError, one_of

#: Verdicts; the exit status of ``hzero doctor`` is the worst one.
GOOD, DEGRADED, UNUSABLE = range(3)
#: A verdict and what was found, on one line.
Finding = tuple[int, str]
WHERE = f"{KEY}.topology"


def read_config(path: Path) -> dict[str, Any]:
    """A DeepSpeed configuration file.

    Raises:
        ConfigError: It cannot be read; the message names the file and the place.
    """
    text = read_text(path)
    try:
        config = parse_text(text)
    except ValueError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: found no JSON object, expected a DeepSpeed configuration")
    return config


def source_of(config: Mapping[str, Any]) -> str:
    """The source from which a run discovers its grid; ``auto`` where it declares one, and for a wrong block, named later."""
    with contextlib.suppress(ConfigError):
        topology = parse_config(find(config) or {}).topology
        if declared_grid(topology, WHERE) is None:
            return topology.source
    return "auto"


def grid_of(topology: TopologyConfig, machine: Machine, nodes: int | None, discovered: Grid | None) -> Grid | None:
    """The grid of a run; None where nothing says how many ranks there will be.

    Args:
        topology: The block's.
        machine: The node that a discovery would find.
        nodes: The number of such nodes; None if it is not known.
        discovered: The grid of the ranks that a launcher has started; None for one process.

    Raises:
        ConfigError: A file cannot be read, packages are ambiguous, or the ranks do not form the grid.
    """
    declared = declared_grid(topology, WHERE)
    if declared is None:
        if discovered is not None:
            return discovered.grouped(topology.nodes_per_group)
        if topology.source not in HERE:
            machine = machine_of(topology.source, where=WHERE)
        if not machine.devices:
            return None
        declared = grid_of_nodes(machine, WHERE, nodes_per_group=topology.nodes_per_group)
    ranks = (declared.gpus_per_node or 0) * declared.gcds_per_gpu * (nodes or declared.nodes or 0)
    ranks = discovered.world_size if discovered is not None else ranks
    return resolve_grid(declared, ranks, WHERE) if ranks else None


def examine_config(
    path: Path, config: Mapping[str, Any], machine: Machine, nodes: int | None, discovered: Grid | None
) -> tuple[str, list[Finding]]:
    """What a configuration does, on one line, and all that keeps a run from it.

    Args:
        path: The file, for messages.
        config: Its content.
        machine: As for `grid_of`.
        nodes: As for `grid_of`.
        discovered: As for `grid_of`.
    """
    with quiet():
        from hzero.deepspeed import autotp
        from hzero.deepspeed.refusals import check_written, partition_of_autotp
        from hzero.plan.shards import ShardPlan
    findings: list[Finding] = []
    block = parsed = grid = None
    effect, beside = f"{path}: not in effect", ""
    with _reported(path, findings):
        block = find(config)
        parsed = parse_config(block) if block is not None else None
    with _reported(path, findings):
        grid = grid_of(parsed.topology if parsed is not None else TopologyConfig(), machine, nodes, discovered)
    if block is not None and parsed is None:  # a wrong block hides no other fault
        parent = {key: value for key, value in (config.get(PARENT) or {}).items() if key != KEY}
        config = {**{key: value for key, value in config.items() if key != KEY}, PARENT: parent}
    with _reported(path, findings):
        read = check_written(config, _data_parallel_ranks(config, grid))
        check_names(read)
        build(read)
        if parsed is not None and (size := read.tensor_parallel_config.autotp_size) > 1:
            partition = partition_of_autotp(size, grid, 0) if grid is not None else None
            autotp.check(read, parsed, grid)
            grid, beside = (partition.grid, str(partition)) if partition is not None else (None, "")
    if parsed is None:
        findings += [(DEGRADED, f'{path}: no "{KEY}" block: DeepSpeed runs without hzero')] if block is None else []
        return effect, findings
    effect = f"{path}: {parsed.preset}, on the grid of the ranks that are started"
    if config.get(PARENT, {}).get("stage") == 1:
        effect = f"{path}: codecs of {parsed.preset} with ZeRO-1, of a PipelineModule only"
    else:
        for dimension in sorted({"pipeline", "optimizer"} & set(parsed.written_dimensions)):
            text = f"{path}: {KEY}.codecs.{dimension} has no effect but for a PipelineModule, with stage 1"
            findings.append((DEGRADED, text))
        with _reported(path, findings):
            if grid is not None:
                plan = ShardPlan.from_config(parsed, grid, 0)
                effect = f"{path}: {parsed.preset} on {plan}{beside}"
                findings += [(GOOD, f"{path}: {remark}") for remark in (*plan.adaptations, *plan.notes)]
    if state := autoload_off():
        findings.append((DEGRADED, f"autoload is {state}: start the script with `hzero run`, or import hzero in it"))
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on"):
        findings.append((UNUSABLE, "ACCELERATE_USE_CPU is set: Accelerate trains DDP then, without DeepSpeed"))
    return effect, findings


@contextlib.contextmanager
def _reported(path: Path, findings: list[Finding]) -> Iterator[None]:
    """Inside, an error is a finding; the same one is reported once."""
    try:
        with quiet():
            yield
    except ConfigError as error:
        if (finding := (UNUSABLE, f"{path}: {error}")) not in findings:
            findings.append(finding)
    except Exception as error:  # of many types, by the key
        findings.append((UNUSABLE, f"{path}: DeepSpeed refuses it: {' '.join(str(error).split())}"))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, DeepSpeed is imported without a search for absent accelerators, and logs errors only, to stderr."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _data_parallel_ranks(config: Mapping[str, Any], grid: Grid | None) -> int:
    """The ranks that share a batch. Without a grid, the number that the batch sizes imply, otherwise 1.

    Raises:
        ConfigError: No number of ranks gives these batch sizes.
    """
    if grid is not None:
        tensor, ranks = config.get("tensor_parallel"), grid.world_size
        tensor_size = tensor.get("autotp_size") if isinstance(tensor, Mapping) else 1
        for size in (tensor_size, config.get("sequence_parallel_size")):
            ranks //= size if type(size) is int and size > 0 else 1
        return max(ranks, 1)
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch, micro, steps = (config.get(key, 0) for key in keys)
    if not all(type(value) is int and value > 0 for value in (batch, micro, steps)):
        return 1
    if batch % (micro * steps):
        raise ConfigError(f"{keys[0]}: found {batch}, expected a multiple of {keys[1]} x {keys[2]}, {micro} x {steps}")
    return int(batch // (micro * steps))


def check_names(config: Any) -> None:
    """Refuses the name of an optimizer or scheduler that DeepSpeed does not find.

    Args:
        config: A ``DeepSpeedConfig``.

    Raises:
        ConfigError: Naming the key, what was found and what is possible.
    """
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES
    from torch import optim

    for key, name, own, module in (
        ("optimizer", config.optimizer_name, DEEPSPEED_OPTIMIZERS, optim),
        ("scheduler", config.scheduler_name, VALID_LR_SCHEDULES, optim.lr_scheduler),
    ):
        classes = (value for value in vars(module).values() if inspect.isclass(value) and value is not optim.Optimizer)
        possible = [*own, *(one.__name__ for one in classes if one.__module__.startswith(module.__name__))]
        if name is not None and name not in possible:
            raise one_of(f"{key}.type", name, possible, key)


#: What DeepSpeed's Adam takes and torch's does not.
_OF_KERNELS = {"torch_adam", "adam_w_mode", "adamw_mode", "bias_correction", "set_grad_none", "fp32_optimizer_states"}


def build(config: Any) -> None:
    """Builds optimizer and schedule on one weight, so that they raise what they would in a run.

    Values that are ``auto`` are Trainer's. Optimizers that torch lacks are not built, since they need DeepSpeed's kernels.

    Args:
        config: A ``DeepSpeedConfig`` with names that `check_names` accepts.
    """
    import torch
    from deepspeed.runtime import lr_schedules
    from torch import optim

    name, rate = config.optimizer_name or "AdamW", config.scheduler_name
    kind = optim.AdamW if name in ("adam", "adamw") else getattr(optim, name, None)
    given = {
        key: value
        for key, value in (config.optimizer_params or {}).items()
        if value != "auto" and key not in _OF_KERNELS
    }
    made = (kind or optim.AdamW)([torch.zeros(1)], **(given if kind else {}))
    if rate is not None and "auto" not in (given := config.scheduler_params or {}).values():
        (getattr(lr_schedules, rate, None) or getattr(optim.lr_scheduler, rate))(made, **given)


def autoload_off() -> str:
    """``off`` with the reason, if torch does not load hzero by itself; else empty."""
    if not any(entry.name == "hzero" for entry in entry_points(group="torch.backends")):
        return "off, since hzero is not installed as a package"
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return f"off by TORCH_DEVICE_BACKEND_AUTOLOAD={os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD']}"
    off = os.environ.get(autoload.VARIABLE, "1").strip().lower() in ("0", "false", "no", "off")
    return f"off by {autoload.VARIABLE}" if off else ""
