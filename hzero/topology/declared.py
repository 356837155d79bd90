"""Topology as declared in the configuration or in a file, fitted to a world size."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import yaml

from hzero.config import ConfigError, TopologyConfig, parse_topology
from hzero.topology.grid import Grid


def resolve_grid(topology: str | TopologyConfig, world_size: int, where: str = "hzero.topology") -> Grid:
    """The grid of a declared machine.

    Args:
        topology: A declared machine, or the path of a YAML or JSON file with the same keys (at the top, or under
            ``topology``). ``nodes`` may be left out: it then follows from the world size.
        world_size: Ranks of the world.
        where: The key that holds it, for messages.

    Raises:
        ConfigError: The file cannot be read, a key is wrong, or the product is not the world size; the message names
            the factors that would fit. Also for ``"auto"``, which this release refuses: it cannot discover a machine.
    """
    if topology == "auto":
        raise ConfigError(_no_discovery(world_size))
    if isinstance(topology, str):
        where = topology
        topology = _read(Path(topology))
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


def _read(path: Path) -> TopologyConfig:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"hzero.topology: cannot read the file {str(path)!r}: {error}") from None
    except yaml.YAMLError as error:
        place = " ".join(str(error).split())
        raise ConfigError(f"hzero.topology: {path} is neither YAML nor JSON: {place}") from None
    if isinstance(content, Mapping) and "topology" in content:
        content = content["topology"]
    if isinstance(content, Mapping):
        # A file may say more of a machine than its grid: what is said here is the part that counts.
        content = {key: value for key, value in content.items() if key not in ("name", "bandwidth_gb_s")}
    return parse_topology(str(path), content)


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


def _no_discovery(world_size: int) -> str:
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    per_node = int(local) if local.isdigit() and int(local) and world_size % int(local) == 0 else world_size
    return (
        'hzero.topology: "auto" needs discovery, which this release does not have; declare the machine, for example '
        f'{{"nodes": {world_size // per_node}, "gpus_per_node": {per_node}, "gcds_per_gpu": 1}}, or name a file'
    )
