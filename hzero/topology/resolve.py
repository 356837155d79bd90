"""The grid of a run, from the topology that its configuration declares, or by discovery."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from typing import Any

from hzero.config import Topology, TopologyConfig, TopologySource
from hzero.files import read_text
from hzero.topology.declared import MAX_BYTES, grid_in, load
from hzero.topology.device import own_device
from hzero.topology.discovery import RankReport, assemble, discover
from hzero.topology.grid import Grid
from hzero.topology.machine import Machine
from hzero.topology.sources import HERE, PRESETS, machine_of, preset
from hzero.topology.tiers import packages_of
from hzero.validation import ConfigError, validated

logger = logging.getLogger("hzero")


def resolve_grid(topology: Topology, world_size: int, where: str = "hzero.topology") -> Grid:
    """The grid of a run.

    Collective where the topology is discovered: every rank of the world calls it. A world is discovered once a process.

    Args:
        topology: A declared grid; the path of a YAML or JSON file with the same keys (at the top, or under
            ``topology``), where ``nodes`` may be left out and then follows from the world size; the name of a preset,
            with ranks numbered by device, package and node; ``"discover"``, or a source of a node
            (`hzero.topology.sources.machine_of`), to discover where the ranks sit.
        world_size: Ranks of the world.
        where: The key that holds it, for messages.

    Raises:
        ConfigError: The file cannot be read, a key is wrong, or the product is not the world size; the message names
            the factors that would fit. Where it is discovered: the ranks do not form a grid, or packages are ambiguous.
    """
    if not isinstance(topology, TopologyConfig):
        declared = declared_grid(topology, where)
        reference = TopologySource(source=topology) if isinstance(topology, str) else topology
        if declared is None:
            return _discovered(reference.source, world_size).grouped(reference.nodes_per_group)
        where, topology = reference.source, declared
    values = topology.model_dump(include=set(TopologyConfig.model_fields))
    if topology.nodes is None:
        inside = topology.gpus_per_node * topology.gcds_per_gpu
        if world_size % inside:
            node = f"gpus_per_node={topology.gpus_per_node} x gcds_per_gpu={topology.gcds_per_gpu} is {inside} ranks a node"
            raise ConfigError(f"{where}: {node}, but the world has {world_size}; expected a multiple")
        values = validated(TopologyConfig, {**values, "nodes": world_size // inside}, where).model_dump()
    grid = Grid(**{**values, "nodes_per_group": None}).grouped(topology.nodes_per_group)
    if grid.world_size != world_size:
        factors = {"nodes": grid.nodes, "gpus_per_node": grid.gpus_per_node, "gcds_per_gpu": grid.gcds_per_gpu}
        others = {name: grid.world_size // value for name, value in factors.items()}
        possible = [f"{name}={world_size // other}" for name, other in others.items() if world_size % other == 0]
        would = f"{' or '.join(possible)} would fit" if possible else "no single factor makes it fit"
        product = " x ".join(f"{name}={value}" for name, value in factors.items())
        raise ConfigError(f"{where}: {product} is {grid.world_size} ranks, but the world has {world_size}; {would}")
    return grid


def sub_grid(topology: Topology, ranks: Sequence[int], world_size: int, where: str) -> Grid:
    """The grid of a group of ranks, in the group's own numbers.

    A declared grid is the grid of the group. Where the topology is discovered, every rank of the world calls this, for its own
    group; the ranks keep their places in the world.

    Args:
        topology: As in `resolve_grid`.
        ranks: Rank in the world of each rank of the group.
        world_size: Ranks of the world.
        where: As in `resolve_grid`.

    Raises:
        ConfigError: As in `resolve_grid`; or the group's places are no grid.
    """
    if declared_grid(topology, where) is not None:
        return resolve_grid(topology, len(ranks), where)
    return resolve_grid(topology, world_size, where).of_ranks(ranks)


def foreseen_grid(topology: TopologySource, ranks: int) -> Grid:
    """As `resolve_grid`, for ``ranks`` ranks that will be started on this node only, with ``LOCAL_RANK`` from 0."""
    if declared_grid(topology, "topology") is not None:
        return resolve_grid(topology, ranks, "topology")
    machine = machine_of(topology.source)
    devices = [own_device(machine, {**os.environ, "LOCAL_RANK": str(rank)}) for rank in range(ranks)]
    reports = [RankReport.of(rank, "of this machine", machine, device) for rank, device in enumerate(devices)]
    return assemble(reports).required_grid().grouped(topology.nodes_per_group)


def declared_grid(topology: Topology, where: str) -> TopologyConfig | None:
    """The grid that is declared, maybe by a preset or a file; None where it has to be discovered. Arguments as in `resolve_grid`.

    Raises:
        ConfigError: The file is missing, or a key is wrong.
    """
    if isinstance(topology, TopologyConfig):
        return topology
    if isinstance(topology, TopologySource):
        declared = declared_grid(topology.source, f"{where}.source")
        if declared is None or "nodes_per_group" not in topology.model_fields_set:
            return declared
        return declared.model_copy(update={"nodes_per_group": topology.nodes_per_group})
    if topology in HERE:
        return None
    if topology in PRESETS:
        return grid_of_nodes(preset(topology), where)
    if not os.path.exists(topology):
        raise ConfigError(
            f'{where}: no such file: {topology[:80]!r}; possible: "discover", a file, a preset '
            f'({", ".join(PRESETS)}), or {{"nodes": .., "gpus_per_node": .., "gcds_per_gpu": ..}}'
        )
    try:
        content = load(read_text(topology, MAX_BYTES), topology)
    except ConfigError:
        return None  # the readers judge it
    return grid_in(content, topology)


def grid_of_nodes(machine: Machine, where: str, **keys: Any) -> TopologyConfig:
    """The grid of nodes that are all like one with devices, for `declared_grid`; ``keys`` are further ones of the block.

    Raises:
        ConfigError: Its packages are ambiguous, or differ in size.
    """
    packages = packages_of(machine)
    if len(sizes := {len(package) for package in packages}) > 1:
        raise ConfigError(f"{machine.source}: found packages of {sorted(sizes)} devices, expected one size")
    shape = {"gpus_per_node": len(packages), "gcds_per_gpu": len(packages[0])}
    return validated(TopologyConfig, {**shape, "switch_nodes": machine.switch_nodes, **keys}, where)


@functools.cache
def _discovered(source: str, world_size: int) -> Grid:
    found = discover(source)
    grid = found.required_grid()
    if found.reports:  # only rank 0 logs
        for note in found.notes:
            logger.warning("hzero: %s", note)
    if grid.world_size != world_size:
        raise ConfigError(f"hzero.topology: discovery found {grid.world_size} ranks; expected {world_size}")
    return grid
