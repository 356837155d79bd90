"""The grid of a run: declared, of a preset, or discovered.

The modules that read machines are imported on demand, since a declared grid does not need them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from hzero.config import HERE, TopologyConfig
from hzero.errors import ConfigError
from hzero.topology.grid import Grid


def resolve_grid(topology: TopologyConfig, world_size: int, where: str = "hzero.topology") -> Grid:
    """The grid of a run.

    Collective over the world if the topology is discovered. A process discovers its world once.

    Args:
        topology: A declared grid, or a source (`hzero.topology.sources.read_source`). Without ``nodes``, a declared grid
            follows from the world size. A file may declare a grid with the same keys, which may be under ``topology``. A
            preset numbers ranks by device, package and node. ``discover``, and the file of a node, need a discovery.
        world_size: Ranks of the world.
        where: Key of the topology, for messages.

    Raises:
        ConfigError: The file cannot be read, a key is wrong, or the product of the sizes is not the world size; the message
            has the factors that would fit. In a discovery: the ranks do not form a grid, or packages are ambiguous.
    """
    declared = declared_grid(topology, where)
    if declared is None:
        from hzero.topology.discovery import discovered_grid

        return discovered_grid(topology.source, world_size).grouped(topology.nodes_per_group)
    if declared is not topology:
        where = topology.source
    inside = (declared.packages_per_node or 0) * declared.devices_per_package
    if declared.nodes is None and world_size % inside:
        node = (
            f"packages_per_node={declared.packages_per_node} x devices_per_package={declared.devices_per_package} is "
            f"{inside} ranks a node"
        )
        raise ConfigError(f"{where}: {node}, but the world has {world_size}; expected a multiple")
    grid = _grid(declared, declared.nodes or world_size // inside)
    if grid.world_size != world_size:
        factors = {
            "nodes": grid.nodes,
            "packages_per_node": grid.packages_per_node,
            "devices_per_package": grid.devices_per_package,
        }
        others = {name: grid.world_size // value for name, value in factors.items()}
        possible = [f"{name}={world_size // other}" for name, other in others.items() if world_size % other == 0]
        would = f"{' or '.join(possible)} would fit" if possible else "no single factor makes it fit"
        product = " x ".join(f"{name}={value}" for name, value in factors.items())
        raise ConfigError(f"{where}: {product} is {grid.world_size} ranks, but the world has {world_size}; {would}")
    return grid


def _grid(declared: TopologyConfig, nodes: int) -> Grid:
    keys = declared.model_dump(exclude={"source", "nodes", "nodes_per_group"})
    return Grid(nodes=nodes, **keys).grouped(declared.nodes_per_group)


def sub_grid(topology: TopologyConfig, ranks: Sequence[int], world_size: int, where: str) -> Grid:
    """The grid of a group of ranks, renumbered in the group. See `resolve_grid` for arguments and errors.

    A declared grid is the grid of the group. Collective over the world if the topology is discovered: every rank passes its
    own group, and the ranks keep their places in the world.
    """
    if declared_grid(topology, where) is not None:
        return resolve_grid(topology, len(ranks), where)
    return resolve_grid(topology, world_size, where).of_ranks(ranks)


def declared_grid(topology: TopologyConfig, where: str) -> TopologyConfig | None:
    """The declared grid, also from a preset or a file; None if a discovery is needed. Arguments: see `resolve_grid`.

    Raises:
        ConfigError: The file is missing, or a key is wrong.
    """
    declared = topology
    if topology.packages_per_node is None:
        if topology.source in HERE:
            return None
        from hzero.topology.node import Node, grid_of_nodes
        from hzero.topology.sources import PRESETS, read_source

        found = read_source(topology.source, where)
        if isinstance(found, Node) and topology.source not in PRESETS:
            return None
        declared = grid_of_nodes(found, where) if isinstance(found, Node) else found
        if "nodes_per_group" in topology.model_fields_set:
            declared = declared.model_copy(update={"nodes_per_group": topology.nodes_per_group})
    if declared.nodes is not None:
        _grid(declared, declared.nodes)  # raises if its parts do not divide it
    return declared


def ranks_here(topology: TopologyConfig, where: str) -> int:
    """The number of ranks of a topology if all run on this machine; 0 if the topology does not determine it."""
    declared = declared_grid(topology, where)
    if declared is None:
        from hzero.topology.sources import read_node

        return len(read_node(topology.source).devices)
    return (declared.nodes or 0) * (declared.packages_per_node or 0) * declared.devices_per_package


def foreseen_grid(topology: TopologyConfig, ranks: int, where: str) -> Grid:
    """The grid, as from `resolve_grid`, of ``ranks`` ranks that will be started on this node, with ``LOCAL_RANK`` from 0."""
    if declared_grid(topology, where) is not None:
        return resolve_grid(topology, ranks, where)
    from hzero.topology.discovery import RankReport, assemble, own_device
    from hzero.topology.sources import read_node

    node = read_node(topology.source)
    devices = [own_device(node, {**os.environ, "LOCAL_RANK": str(rank)}) for rank in range(ranks)]
    reports = [RankReport.of(rank, "of this machine", node, device) for rank, device in enumerate(devices)]
    return assemble(reports).required_grid().grouped(topology.nodes_per_group)
