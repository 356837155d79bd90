"""Reads a machine that a person declares, in YAML or JSON: one node, or a grid of ranks.

It sees what neither KFD's sysfs nor a dump of RCCL or NCCL tells: the packages of a machine whose links can be read in two
ways, bandwidths of tiers, and a machine that is not at hand (the presets). Only ``devices`` is required, and
not where ``packages`` or ``buses`` give their number; ``null`` stands for a value that is not known::

    name: my node
    kind: MI250X                       # of all devices without a kind of their own
    devices: 8                         # or a list of {number, bus, kind, numa, nic, module, uuid}
    packages: [[0, 1], [2, 3], [4, 5], [6, 7]]
    buses: ["0000:c1:00.0", ...]       # by device number
    numa: {0: [4, 5], 1: [2, 3]}       # domain: devices
    links:                             # gb_s: of all parallel links of a pair, GB/s each way
      - {kind: xgmi, count: 4, gb_s: 200, pairs: [[0, 1], [2, 3]]}
      - {kind: nvswitch, pairs: all}   # every pair of devices
    nics:
      - {name: hsn0, kind: cxi, gb_s: 25, bus: "0000:c5:00.0", numa: 3, devices: [0, 1]}
    tier_gb_s: {gcd: 200, gpu: 50, node: 12.5}
    switch_nodes: 128                  # nodes of one switch group of the network
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, Field

from hzero.config import TopologyConfig
from hzero.topology.machine import MAX_DEVICES, MAX_GB_S, Device, Link, Machine, Nic, bus_id
from hzero.topology.readers.source import READABLE, read_text
from hzero.validation import ConfigError, Frozen, nearest, validated

#: Largest file, bytes: PyYAML is slow, and a machine of 1,024 devices needs less.
MAX_BYTES = 131_072


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"found {text!r}, expected printable characters")
    return text


def _bus(value: Any) -> str:
    if not isinstance(value, str):  # YAML takes 01:00.0 for a time of day
        raise ValueError(f"found {value!r}, expected a PCI bus id in quotes, such as '0000:c1:00.0'")
    return bus_id(value)


def _domain(value: Any) -> Any:
    """JSON's keys are texts."""
    plain = isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 7
    return int(value) if plain and str(int(value)) == value else value


def _counted(value: Any) -> Any:
    """A number of devices as so many devices."""
    if type(value) is int and 0 <= value <= MAX_DEVICES:
        return [{}] * value
    if isinstance(value, (int, float)):
        raise ValueError(
            f"found {reprlib.repr(value)}, expected a list of devices or their number from 0 to {MAX_DEVICES}"
        )
    return value


Number = Annotated[int, Field(ge=0, le=1_000_000)]
Text = Annotated[str, Field(max_length=100), AfterValidator(_printable)]
Bus = Annotated[str, BeforeValidator(_bus)]
Rate = Annotated[float, Field(gt=0, le=MAX_GB_S, allow_inf_nan=False)]
Pair = Annotated[list[Number], Field(min_length=2, max_length=2)]


class DeclaredDevice(Frozen):
    """A device; by default its number is its place in the list."""

    number: Number | None = None
    bus: Bus = ""
    kind: Text = ""
    numa: Number | None = None
    nic: Text = ""
    module: Text = ""
    uuid: Text = ""


class DeclaredLinks(Frozen):
    """Pairs with links that are alike; None stands for all pairs."""

    kind: Literal["xgmi", "nvlink", "nvswitch", "pcie"] = "xgmi"
    count: Annotated[int, Field(ge=1, le=1000)] | None = None
    gb_s: Rate | None = None
    pairs: Annotated[list[Pair] | None, BeforeValidator(lambda value: None if value == "all" else value)]


class DeclaredNic(Frozen):
    """A NIC, and the devices that it is nearest to."""

    name: Text
    kind: Text = ""
    gb_s: Rate | None = None
    bus: Bus = ""
    numa: Number | None = None
    devices: list[Number] = []


class ByLevel(Frozen):
    """A figure for each level of links."""

    gcd: Rate | None = None
    hive: Rate | None = None
    gpu: Rate | None = None
    node: Rate | None = None
    cluster: Rate | None = None


class DeclaredMachine(Frozen):
    """The file of a node."""

    name: Text = ""
    kind: Text = ""
    devices: Annotated[list[DeclaredDevice], Field(max_length=MAX_DEVICES), BeforeValidator(_counted)] | None = None
    packages: list[list[Number]] | None = None
    buses: list[Bus] | None = None
    numa: dict[Annotated[Number, BeforeValidator(_domain)], list[Number]] = {}
    links: list[DeclaredLinks] = []
    nics: list[DeclaredNic] = []
    tier_gb_s: ByLevel = ByLevel()
    switch_nodes: Annotated[int, Field(ge=1)] | None = None


class DeclaredGrid(TopologyConfig):
    """The file of a grid: how many nodes, packages and devices, and the bandwidths of its tiers."""

    name: Text = ""
    bandwidth_gb_s: ByLevel = ByLevel()


def read(path: Path | str, source: str | None = None) -> Machine:
    """Reads a declared machine.

    Args:
        path: A YAML or JSON file with the keys above at the top, or under ``topology``. A grid (``gpus_per_node``,
            ``gcds_per_gpu``) becomes a node of as many packages and devices without links.
        source: Its name in messages; the path where None.

    Raises:
        ConfigError: A key is unknown, or a value is wrong; the message names file and key.
    """
    content = load(path)
    name = content.get("name")
    source = source or (f"{path} ({name})" if isinstance(name, str) and name.isprintable() else str(path))
    grid = grid_in(content, str(path))
    return _machine(content, str(path), source) if grid is None else _node_of(grid, str(path), source)


def load(path: Path | str) -> dict[str, Any]:
    """The keys of a file, or those under its ``topology``; without keys of the value ``null``.

    Raises:
        ConfigError: It cannot be read, is too large, is neither YAML nor JSON, holds a key twice or a reference, or has
            no key of a declared machine.
    """
    text = read_text(Path(path), MAX_BYTES)
    try:
        # YAML has no tabs between tokens, JSON may.
        content = yaml.load(text.replace("\t", " ") if text.lstrip().startswith("{") else text, _Loader)
    except _RefusedError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or (
            "nested too deeply" if isinstance(error, RecursionError) else error
        )
        problem = " ".join(str(problem).split())[:200]
        raise ConfigError(f"{path}: {line}is neither YAML nor JSON: {problem}; readable are: {READABLE}") from None
    if isinstance(content, dict) and set(content) == {"topology"}:
        content = content["topology"]
    known = {*DeclaredMachine.model_fields, *DeclaredGrid.model_fields}
    if not isinstance(content, dict) or not any(nearest(key, known, 0.45) for key in content):
        raise ConfigError(f"{path}: is of no known kind; readable are: {READABLE}")
    return content


def grid_in(content: Mapping[str, Any], file: str) -> DeclaredGrid | None:
    """The grid that a file's content declares; None where it declares a machine.

    Raises:
        ConfigError: A key is unknown, as one of a machine is in a grid, or has a wrong value.
    """
    if not set(content) & (set(DeclaredGrid.model_fields) - set(DeclaredMachine.model_fields)):
        return None
    return validated(DeclaredGrid, content, f"{file}:")


class _RefusedError(yaml.YAMLError):
    """What YAML allows and `_Loader` does not."""

    def __init__(self, problem: str, mark: yaml.Mark) -> None:
        super().__init__(f"line {mark.line + 1}: {problem}")


class _Loader(yaml.SafeLoader):
    """YAML without what turns a small file into a large or doubtful machine: references, and keys that occur twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if getattr(event, "anchor", None) is not None:  # of an alias, too
            raise _RefusedError(problem="found a reference (& or *); write the value out", mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys: set[Any] = set()
        for name, _ in node.value:
            if name.tag == "tag:yaml.org,2002:merge":
                raise _RefusedError(problem="found a merge (<<); write the keys out", mark=name.start_mark)
            key = self.construct_object(name, deep=True)  # 0 and 0x0 are one key
            if isinstance(key, Hashable):  # the others are refused below
                if key in keys:
                    raise _RefusedError(problem=f"the key {name.value[:40]!r} occurs twice", mark=name.start_mark)
                keys.add(key)
        return {key: value for key, value in super().construct_mapping(node, deep).items() if value is not None}


def _node_of(grid: DeclaredGrid, file: str, source: str) -> Machine:
    size, count = grid.gcds_per_gpu, grid.gpus_per_node * grid.gcds_per_gpu
    if count > MAX_DEVICES:
        raise ConfigError(f"{file}: gpus_per_node x gcds_per_gpu is {count}, expected at most {MAX_DEVICES} devices")
    remarks = ["a grid: devices and packages without links, bus ids and NICs"]
    if grid.nodes is not None:
        remarks.append(f"the file declares {grid.nodes} nodes; this is one of them")
    return Machine(
        source,
        tuple(map(Device, range(count))),
        packages=tuple(tuple(range(first, first + size)) for first in range(0, count, size)),
        tier_gb_s=grid.bandwidth_gb_s.model_dump(exclude_none=True),
        remarks=tuple(remarks),
        switch_nodes=grid.switch_nodes,
    )


def _machine(content: Mapping[str, Any], file: str, source: str) -> Machine:
    declared = validated(DeclaredMachine, content, f"{file}:")
    listed = declared.devices
    if listed is None:
        count = len(declared.buses or []) or sum(map(len, declared.packages or []))
        if not 0 < count <= MAX_DEVICES:
            raise ConfigError(f"{file}: devices: missing; expected a list of devices or their number")
        listed = [DeclaredDevice()] * count
    devices: dict[int, Device] = {}
    for place, each in enumerate(listed):
        number = place if each.number is None else each.number
        if number in devices:
            raise ConfigError(f"{file}: devices.{place}: device {number} occurs twice")
        devices[number] = Device(
            number, each.bus, each.kind or declared.kind, each.module, each.numa, each.nic, each.uuid
        )

    def fill(members: Iterable[int], field: str, value: Any, where: str) -> None:
        for member in members:
            if member not in devices:
                raise ConfigError(f"{file}: {where}: found device {member}, possible: {', '.join(map(str, devices))}")
            if getattr(devices[member], field) not in ("", None, value):
                raise ConfigError(f"{file}: {where}: device {member} has another {field} elsewhere")
            devices[member] = replace(devices[member], **{field: value})

    if declared.buses is not None and len(declared.buses) != len(devices):
        raise ConfigError(
            f"{file}: buses: found {len(declared.buses)}, expected one for each of {len(devices)} devices"
        )
    for number, bus in zip(sorted(devices), declared.buses or []):
        fill([number], "bus", bus, "buses")
    for domain, members in declared.numa.items():
        fill(members, "numa", domain, f"numa.{domain}")
    for place, nic in enumerate(declared.nics):
        fill(nic.devices, "nic", nic.name, f"nics.{place}.devices")
    names = [nic.name for nic in declared.nics]
    strange = {device.nic for device in devices.values() if device.nic} - set(names) if names else set()
    if len(set(names)) < len(names) or strange:
        raise ConfigError(f"{file}: nics: found {', '.join(names)}; expected each once, and all that devices name")
    links: list[Link] = []
    for group in declared.links:
        if len(links) > len(devices) ** 2:
            break  # the machine refuses pairs that occur twice
        pairs = itertools.combinations(sorted(devices), 2) if group.pairs is None else map(sorted, group.pairs)
        links += [Link(a, b, group.kind, group.count, group.gb_s) for a, b in pairs]
    return Machine(
        source,
        tuple(devices.values()),
        tuple(links),
        tuple(Nic(nic.name, nic.bus, nic.kind, nic.gb_s, nic.numa) for nic in declared.nics),
        None if declared.packages is None else tuple(map(tuple, declared.packages)),
        tier_gb_s=declared.tier_gb_s.model_dump(exclude_none=True),
        switch_nodes=declared.switch_nodes,
    )
