"""Reads what a person declares, in YAML or JSON: one node, or a grid of ranks.

It adds what KFD's sysfs and the dumps of RCCL and NCCL do not state: the packages of a machine whose links can be read in two
ways, bandwidths of tiers, and a machine that is not at hand (the presets). Only ``devices`` is required, and not where
``packages`` or ``buses`` give their number; ``null`` is an unknown value::

    name: my node
    kind: MI250X
    devices: 8
    packages: [[0, 1], [2, 3], [4, 5], [6, 7]]
    buses: ["0000:c1:00.0", ...]       # by device
    numa: [3, 3, 1, 1, 0, 0, 2, 2]     # domain, by device
    links:                             # gb_s: of all parallel links of a pair, GB/s each way
      - {kind: xgmi, count: 4, gb_s: 200, pairs: [[0, 1], [2, 3]]}
      - {kind: nvswitch, pairs: all}   # every pair of devices
    nics:
      - {name: hsn0, kind: cxi, gb_s: 25}
    tier_gb_s: {gcd: 200, gpu: 50, node: 12.5}
    switch_nodes: 128                  # nodes of one switch group of the network
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, Field

from hzero.config import TopologyConfig
from hzero.topology.machine import MAX_DEVICES, Device, Link, Machine, Nic, bus_id
from hzero.validation import ConfigError, Frozen, nearest, validated

#: Largest file, bytes: PyYAML is slow, and a machine of 1,024 devices needs less.
MAX_BYTES = 131_072


Number = Annotated[int, Field(ge=0, lt=MAX_DEVICES)]
Text = Annotated[str, Field(max_length=100)]
Rate = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
#: By level of links.
Rates = dict[Literal["gcd", "hive", "gpu", "node", "cluster"], Rate]
Pair = Annotated[list[Number], Field(min_length=2, max_length=2), AfterValidator(sorted)]


class DeclaredLinks(Frozen):
    """Pairs with equal links; None means all pairs."""

    kind: Literal["xgmi", "nvlink", "nvswitch", "pcie"] = "xgmi"
    count: Annotated[int, Field(ge=1, le=1000)] | None = None
    gb_s: Rate | None = None
    pairs: Annotated[list[Pair] | None, BeforeValidator(lambda value: None if value == "all" else value)]


class DeclaredNic(Frozen):
    """A NIC."""

    name: Text
    kind: Text = ""
    gb_s: Rate | None = None


class DeclaredMachine(Frozen):
    """The file of a node."""

    name: Text = ""
    kind: Text = ""
    devices: Annotated[int, Field(ge=0, le=MAX_DEVICES)] | None = None
    packages: list[list[Number]] | None = None
    buses: list[Annotated[str, AfterValidator(bus_id)]] | None = None
    numa: list[Number] | None = None
    links: Annotated[list[DeclaredLinks], Field(max_length=1000)] = []
    nics: list[DeclaredNic] = []
    tier_gb_s: Rates = {}
    switch_nodes: Annotated[int, Field(ge=1)] | None = None


class DeclaredGrid(TopologyConfig):
    """The file of a grid: how many nodes, packages and devices, and the bandwidths of its tiers."""

    bandwidth_gb_s: Rates = {}


def read_declared(text: str, path: str, source: str = "") -> Machine:
    """The node that a file declares.

    Args:
        text: Its content.
        path: Its name, for messages.
        source: Name of the machine; the path where empty.

    Raises:
        ConfigError: A key is unknown, a value is wrong, or the file declares a grid; the message names file and key.
    """
    content = load(text, path)
    if grid_in(content, path) is not None:
        raise ConfigError(f"{path}: declares a grid (gpus_per_node), expected a node with the key devices or packages")
    declared = validated(DeclaredMachine, content, f"{path}:")
    counts = [len(declared.buses or []), sum(map(len, declared.packages or [])), len(declared.numa or [])]
    count = max(counts) if declared.devices is None else declared.devices
    if declared.devices is None and not 0 < count <= MAX_DEVICES:
        raise ConfigError(f"{path}: devices: missing; expected their number, at most {MAX_DEVICES}")
    for key, values in (("buses", declared.buses), ("numa", declared.numa)):
        if values is not None and len(values) != count:
            raise ConfigError(f"{path}: {key}: found {len(values)}, expected one for each of {count} devices")
    links: list[Link] = []
    for group in declared.links:
        if len(links) > count**2:
            break  # the machine refuses pairs that occur twice
        pairs = itertools.combinations(range(count), 2) if group.pairs is None else map(tuple, group.pairs)
        links += [Link(a, b, group.kind, group.count, group.gb_s) for a, b in pairs]
    buses = declared.buses or [""] * count
    numa: Sequence[int | None] = declared.numa or [None] * count
    return Machine(
        source or (f"{path} ({declared.name})" if declared.name else path),
        tuple(Device(number, buses[number], declared.kind, numa=numa[number]) for number in range(count)),
        tuple(links),
        tuple(Nic(nic.name, nic.kind, nic.gb_s) for nic in declared.nics),
        None if declared.packages is None else tuple(map(tuple, declared.packages)),
        tier_gb_s={level: rate for level, rate in declared.tier_gb_s.items()},
        switch_nodes=declared.switch_nodes,
    )


def grid_in(content: Mapping[str, Any], path: str) -> DeclaredGrid | None:
    """The grid that a file's content declares; None where it declares a machine.

    Raises:
        ConfigError: A key is unknown, as one of a machine is in a grid, or has a wrong value.
    """
    if not set(content) & (set(DeclaredGrid.model_fields) - set(DeclaredMachine.model_fields)):
        return None
    return validated(DeclaredGrid, content, f"{path}:")


def load(text: str, path: str) -> dict[str, Any]:
    """The keys of a file, or those under its ``topology``; without keys of the value ``null``.

    Raises:
        ConfigError: It is neither YAML nor JSON, has a key twice or a reference, or has no key of a declared machine.
    """
    try:
        # YAML has no tabs between tokens, JSON may.
        content = yaml.load(text.replace("\t", " ") if text.lstrip().startswith("{") else text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "problem", None) or error
        raise ConfigError(f"{path}: {line}is neither YAML nor JSON that can be used: {problem!s:.200}") from None
    if isinstance(content, dict) and set(content) == {"topology"}:
        content = content["topology"]
    known = {*DeclaredMachine.model_fields, *DeclaredGrid.model_fields}
    if not isinstance(content, dict) or not any(nearest(key, known, 0.45) for key in content):
        raise ConfigError(
            f"{path}: is of no known kind; expected an XML dump of RCCL or NCCL (NCCL_TOPO_DUMP_FILE), the output of nvidia-smi "
            "topo -m, a declared machine (YAML or JSON), or a folder with class/kfd (/sys or a copy of it)"
        )
    return content


class _Loader(yaml.SafeLoader):
    """YAML without what turns a small file into a large or doubtful machine: references, and keys that occur twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if getattr(event, "anchor", None) is not None:  # of an alias, too
            raise yaml.MarkedYAMLError(
                problem="found a reference (& or *); write the value out", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise yaml.MarkedYAMLError(problem="a key occurs twice", problem_mark=node.start_mark)
        return {key: value for key, value in mapping.items() if value is not None}
