"""The grid of a run, from what its configuration says of the topology: declared, or discovered."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hzero.config import ConfigError, TopologyConfig, parse_topology
from hzero.topology.discovery import discover, foresee
from hzero.topology.exchange import release_store
from hzero.topology.grid import Grid
from hzero.topology.machine import TopologyError
from hzero.topology.preset import PRESETS, preset
from hzero.topology.readers.document import load
from hzero.topology.tiers import packages_of

logger = logging.getLogger("hzero")


def resolve_grid(topology: str | TopologyConfig, world_size: int, where: str = "hzero.topology") -> Grid:
    """The grid of a run.

    Collective where the topology is discovered: every rank of the world calls it. A world is discovered once a process.

    Args:
        topology: A declared grid; the path of a YAML or JSON file with the same keys (at the top, or under
            ``topology``), where ``nodes`` may be left out and then follows from the world size; the name of a preset,
            with ranks numbered by device, package and node; ``"auto"``, or the path of a file that describes a node
            (`hzero.topology.readers.read_file`), to discover where the ranks sit.
        world_size: Ranks of the world.
        where: The key that holds it, for messages.

    Raises:
        ConfigError: The file cannot be read, a key is wrong, or the product is not the world size; the message names
            the factors that would fit. Where it is discovered: the world is no grid, or packages are ambiguous.
    """
    release_store()
    if isinstance(topology, str):
        declared = declared_grid(topology, where)
        if declared is None:
            return _discovered(topology, world_size)
        where, topology = topology, declared
    inside = topology.gpus_per_node * topology.gcds_per_gpu
    nodes = topology.nodes
    if nodes is None:
        if world_size % inside:
            below = world_size // inside * inside
            fitting = " or ".join(str(count) for count in (below, below + inside) if count)
            raise ConfigError(
                f"{where}: gpus_per_node={topology.gpus_per_node} x gcds_per_gpu={topology.gcds_per_gpu} is {inside} ranks a "
                f"node, but the world has {world_size}; {fitting} ranks would fit"
            )
        nodes = world_size // inside
    grid = Grid(nodes, topology.gpus_per_node, topology.gcds_per_gpu, topology.order)
    if grid.world_size != world_size:
        raise ConfigError(_misfit(where, grid, world_size))
    return grid


def foreseen_grid(topology: str, ranks: int) -> Grid:
    """The grid that ranks started on this node alone will find, without starting them.

    Args:
        topology: As in `resolve_grid`, a text.
        ranks: How many will be started, with ``LOCAL_RANK`` from 0.

    Raises:
        ConfigError: As `resolve_grid`.
    """
    if declared_grid(topology, "topology.source") is not None:
        return resolve_grid(topology, ranks, "topology.source")
    return foresee(topology, ranks).required_grid()


def declared_grid(topology: str, where: str) -> TopologyConfig | None:
    """The grid that a preset or a file declares.

    Args:
        topology: As in `resolve_grid`, a text.
        where: The key that holds it, for messages.

    Returns:
        None where it has to be discovered.

    Raises:
        ConfigError: The file cannot be read, or a key is wrong.
    """
    if topology == "auto":
        return None
    if topology in PRESETS:
        return _grid_of_preset(topology, where)
    content = _content(Path(topology), where)
    if not isinstance(content, Mapping) or "gpus_per_node" not in content:
        return None
    # A file may say more of a machine than its grid: what is said here is the part that counts.
    return parse_topology(topology, {k: v for k, v in content.items() if k not in ("name", "bandwidth_gb_s")})


def _content(path: Path, where: str) -> Any:
    """What a YAML or JSON file holds, under ``topology`` where that is there; None for other files, which the readers judge."""
    if not os.path.exists(path):
        raise ConfigError(
            f'{where}: cannot read the file {str(path)[:80]!r}: there is none; possible: "auto", a file, a preset '
            f"({', '.join(PRESETS)}), "
            'or {"nodes": .., "gpus_per_node": .., "gcds_per_gpu": ..}'
        )
    try:
        content = load(path).plain()
    except TopologyError:
        return None
    return content["topology"] if isinstance(content, Mapping) and "topology" in content else content


def _grid_of_preset(name: str, where: str) -> TopologyConfig:
    packages = packages_of(preset(name))
    return parse_topology(where, {"gpus_per_node": len(packages), "gcds_per_gpu": len(packages[0])})


@functools.cache
def _discovered(source: str, world_size: int) -> Grid:
    found = discover(source)
    grid = found.required_grid()
    if found.reports:  # rank 0 tells
        for note in found.notes:
            logger.warning("hzero: %s", note)
    if grid.world_size != world_size:
        raise ConfigError(
            f"hzero.topology: {world_size} ranks were asked for, but {grid.world_size} have been discovered"
        )
    return grid


def _misfit(where: str, grid: Grid, world_size: int) -> str:
    factors = {"nodes": grid.nodes, "gpus_per_node": grid.gpus_per_node, "gcds_per_gpu": grid.gcds_per_gpu}
    fitting = []
    for name, value in factors.items():
        others = grid.world_size // value
        if world_size % others == 0:
            fitting.append(f"{name}={world_size // others}")
    would = f"{' or '.join(fitting)} would fit" if fitting else "no single factor makes it fit"
    product = " x ".join(f"{name}={value}" for name, value in factors.items())
    return f"{where}: {product} is {grid.world_size} ranks, but the world has {world_size}; {would}"
