"""A DeepSpeed configuration, as hzero and DeepSpeed will read it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hzero import autoload
from hzero.block import KEY, PARENT, find, read_text
from hzero.config import HZeroConfig
from hzero.doctor.verdict import DEGRADED, GOOD, UNUSABLE, Findings
from hzero.parsing import parse_config
from hzero.sharding.plan import ShardPlan
from hzero.topology import Grid, resolve_grid
from hzero.topology.resolve import declared_grid
from hzero.validation import ConfigError

#: What Trainer and Accelerate fill in.
AUTO = "auto"


def examine_deepspeed(findings: Findings) -> str:
    """The installed version of DeepSpeed and what hzero supports there; every function that differs is a finding."""
    try:
        with _quiet():
            from hzero.zero import versions
    except ImportError as error:
        findings.add(UNUSABLE, f"deepspeed cannot be used: {error}")
        return str(error)
    other = list(versions.differences())
    findings.add(UNUSABLE, *(f"deepspeed has another {one}" for one in other))
    try:
        versions.check_deepspeed()
    except ConfigError as error:
        findings.add(UNUSABLE, *([] if other else [str(error)]))
        return str(error)
    return versions.describe()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside, DeepSpeed is imported without a search for absent accelerators, and logs errors alone, to stderr."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(sys.stderr):
        yield


def read_configuration(path: Path) -> dict[str, Any]:
    """A DeepSpeed configuration file.

    Raises:
        ConfigError: It cannot be read; the message names the file and the place.
    """
    try:
        found = read_text(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ConfigError(f"{path}: {why}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a DeepSpeed configuration, a JSON object")
    return found


def examine_configuration(
    path: Path, grid: Grid | None, world_size: int, findings: Findings, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Where the block stands, what it will do, and what keeps it from taking effect.

    Args:
        path: The file.
        grid: Where the ranks sit, if that has been discovered.
        world_size: Ranks that a launcher has started; 1 for none.
        findings: Takes what is wrong.
        environ: The environment.

    Raises:
        ConfigError: The file or the block cannot be read.
    """
    config = read_configuration(path)
    result: dict[str, Any] = {"file": str(path), "place": None, "in_effect": None, "autoload": autoload_state(environ)}
    read = None
    try:
        with _quiet():
            from hzero.zero.refusals import check_written

            read = check_written(config)
    except ConfigError as error:
        findings.add(UNUSABLE, f"{path}: {error}")
    except Exception as error:  # of many types, by the key
        findings.add(UNUSABLE, f"{path}: DeepSpeed refuses it: {' '.join(str(error).split())}")
    block = find(config)
    if block is None:
        findings.add(DEGRADED, f'{path}: no "{KEY}" block: DeepSpeed runs without hzero')
        return result
    parent = config.get(PARENT)
    inside = isinstance(parent, Mapping) and KEY in parent
    result["place"] = f"{PARENT}.{KEY}" if inside else KEY
    if not inside:
        findings.add(
            GOOD,
            f"{path}: {KEY} is at the top level, which DeepSpeed ignores where hzero is missing; inside {PARENT} "
            "DeepSpeed would refuse it then",
        )
    parsed = parse_config(block)
    result["auto"] = sorted(_auto_keys(config))
    if not result["autoload"].startswith("on"):
        findings.add(
            DEGRADED, f"autoload is {result['autoload']}: start the script with `hzero run`, or import hzero in it"
        )
    if environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on"):
        findings.add(UNUSABLE, "ACCELERATE_USE_CPU is set: Accelerate trains DDP then, without DeepSpeed")
    if read is None:
        return result
    if isinstance(parent, Mapping) and parent.get("stage") == 1:
        result["in_effect"] = f"codecs of {parsed.preset} with ZeRO-1, of a PipelineModule alone"
        return result
    for dimension in sorted({"pipeline", "optimizer"} & set(parsed.written_dimensions)):
        findings.add(DEGRADED, f"{path}: {KEY}.codecs.{dimension} has no effect but for a PipelineModule, with stage 1")
    result["in_effect"] = f"{parsed.preset}, on the grid of the ranks that are started"
    try:
        grid, beside = _grid(parsed, grid, world_size), ""
        if (tensor := read.tensor_parallel_config.autotp_size) > 1:
            from hzero.zero import autotp
            from hzero.zero.partition import Partition

            world = grid
            if world is not None:
                partition = Partition.of_autotp(tensor, world, 0)
                grid, beside = partition.grid, str(partition)
            autotp.check(read, parsed, world)
    except ConfigError as error:
        findings.add(UNUSABLE, f"{path}: {error}")
        return result
    if grid is not None:
        plan = ShardPlan.from_config(parsed, grid, 0)
        result["in_effect"] = f"{parsed.preset} on {plan}{beside}"
        findings.add(GOOD, *(f"{path}: {remark}" for remark in (*plan.adaptations, *plan.notes)))
    return result


def _grid(parsed: HZeroConfig, discovered: Grid | None, world_size: int) -> Grid | None:
    """The grid of the run; None where nothing says how many ranks there will be."""
    topology = parsed.topology
    declared = declared_grid(topology, f"{KEY}.topology")
    if declared is None:
        if discovered is None or isinstance(topology, str):
            return discovered
        return discovered.grouped(topology.nodes_per_group)
    if world_size == 1:
        if declared.nodes is None:
            return None
        world_size = declared.nodes * declared.gpus_per_node * declared.gcds_per_gpu
    return resolve_grid(declared, world_size)


def _auto_keys(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _auto_keys(value, f"{prefix}{key}.")
        elif value == AUTO:
            yield f"{prefix}{key}"


def autoload_state(environ: Mapping[str, str] = os.environ) -> str:
    """``on``, or ``off`` with the reason: whether torch loads hzero by itself."""
    if not any(entry.name == "hzero" for entry in entry_points(group="torch.backends")):
        return "off, since hzero is not installed as a package"
    if environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return f"off by TORCH_DEVICE_BACKEND_AUTOLOAD={environ['TORCH_DEVICE_BACKEND_AUTOLOAD']}"
    if autoload.turned_off(environ):
        return f"off by {autoload.VARIABLE}={environ[autoload.VARIABLE]}"
    return "on"
