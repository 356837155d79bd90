"""Reads a machine that a person declares, in YAML or JSON: one node, or the older grid of ranks.

All keys are optional but ``devices`` (or ``packages`` or ``buses``, from which their number follows)::

    name: my node
    kind: MI250X                       # of all devices that do not say their own
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
    tier_latency_us: {node: 2}
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

from hzero.config import ConfigError, parse_topology
from hzero.topology.machine import MAX_DEVICES, Device, Link, Machine, Nic, TopologyError, bus_id
from hzero.topology.readers.document import Value, load
from hzero.topology.tiers import LEVELS

KEYS = (
    "name", "kind", "devices", "packages", "buses", "numa", "links", "nics", "tier_gb_s", "tier_latency_us",
)  # fmt: skip
GRID_KEYS = ("name", "nodes", "gpus_per_node", "gcds_per_gpu", "order", "bandwidth_gb_s")
LINK_KINDS = ("xgmi", "nvlink", "nvswitch", "pcie")
_DEVICE_KEYS = ("number", "bus", "kind", "numa", "nic", "module", "uuid")
_MAX_NUMBER = 1_000_000


def read(path: Path | str, source: str | None = None) -> Machine:
    """Reads a declared machine.

    Args:
        path: A YAML or JSON file with the keys above at the top, or under ``topology``. A grid (``gpus_per_node``,
            ``gcds_per_gpu``) becomes a node of as many packages and devices without links.
        source: What the machine says it was read from; the path where None.

    Raises:
        TopologyError: Naming file, line and key, what was found and what is possible.
    """
    top = load(Path(path))
    block = top.block(f"a block with keys {', '.join(KEYS)}")
    if set(block) == {"topology"}:
        top = block["topology"]
        block = top.block(f"a block with keys {', '.join(KEYS)}")
    is_grid = bool(set(block) & (set(GRID_KEYS) - set(KEYS)))
    if is_grid and (both := [key for key in block if key in KEYS and key not in GRID_KEYS]):
        grid_key = next(key for key in block if key in GRID_KEYS and key not in KEYS)
        raise TopologyError(
            f"{block[both[0]].where}: a file declares either a grid ({grid_key}, line {block[grid_key].line}) or a "
            f"machine ({both[0]}), not both"
        )
    block = top.block("a block", GRID_KEYS if is_grid else KEYS)
    name = block["name"].text("a name of printable characters") if "name" in block else ""
    source = source or (f"{path} ({name})" if name else str(path))
    return _grid(top.file, source, top) if is_grid else _machine(top.file, source, top, block)


def _grid(file: str, source: str, top: Value) -> Machine:
    values = {key: value for key, value in top.content.items() if key not in ("name", "bandwidth_gb_s")}
    try:
        grid = parse_topology(file, {key: value.plain() for key, value in values.items()})
    except ConfigError as error:
        raise TopologyError(str(error)[:500]) from None
    if grid.gpus_per_node * grid.gcds_per_gpu > MAX_DEVICES:
        raise values["gpus_per_node"].wrong(f"at most {MAX_DEVICES} devices in a node (gpus_per_node x gcds_per_gpu)")
    size = grid.gcds_per_gpu
    packages = tuple(tuple(range(first * size, (first + 1) * size)) for first in range(grid.gpus_per_node))
    remarks = ["a grid: devices and packages without links, bus ids and NICs"]
    if grid.nodes is not None:
        remarks.append(f"the file declares {grid.nodes} nodes; this is one of them")
    return Machine(
        source,
        tuple(Device(number) for number in range(grid.gpus_per_node * size)),
        packages=packages,
        tier_gb_s=_by_tier(top.content.get("bandwidth_gb_s"), "GB/s"),
        remarks=tuple(remarks),
    )


def _machine(file: str, source: str, top: Value, block: dict[str, Value]) -> Machine:
    devices = _devices(top, block)
    nics = _nics(block.get("nics"), devices)
    packages = None
    if "packages" in block and block["packages"].content is not None:
        packages = tuple(
            tuple(_members(package, devices)) for package in block["packages"].items("a list of lists of devices")
        )
    try:
        return Machine(
            source,
            tuple(devices.values()),
            _links(block.get("links"), devices),
            nics,
            packages,
            tier_gb_s=_by_tier(block.get("tier_gb_s"), "GB/s"),
            tier_latency_us=_by_tier(block.get("tier_latency_us"), "microseconds"),
        )
    except TopologyError as error:  # what does not go together, such as packages that leave a device out
        raise TopologyError(str(error) if file in str(error) else f"{file}: {error}") from None


def _devices(top: Value, block: dict[str, Value]) -> dict[int, Device]:
    """Devices by number, with what the keys ``kind``, ``buses`` and ``numa`` say of them."""
    declared = block.get("devices")
    if declared is None or declared.content is None:
        numbers = range(_count(top, block))
        devices = {number: Device(number) for number in numbers}
    elif isinstance(declared.content, list):
        devices = _listed(declared)
    else:
        count = declared.integer(0, MAX_DEVICES, "a list of devices or their number")
        devices = {number: Device(number) for number in range(count)}
    if "kind" in block and block["kind"].content is not None:
        kind = block["kind"].text("a product or architecture such as MI250X")
        devices = {number: device if device.kind else replace(device, kind=kind) for number, device in devices.items()}
    if "buses" in block and block["buses"].content is not None:
        buses = block["buses"].items("a list of PCI bus ids")
        if len(buses) != len(devices):
            raise block["buses"].wrong(f"one PCI bus id for each of the {len(devices)} devices, by number")
        for number, bus in zip(sorted(devices), buses):
            devices[number] = _filled(bus, devices[number], "bus", _bus(bus))
    if "numa" in block and block["numa"].content is not None:
        for text, members in block["numa"].block("a block of domain: [devices]").items():
            if not text.isdigit() or len(text) > 6:
                raise TopologyError(f"{members.where}: found {text[:40]!r}, expected the number of a NUMA domain")
            for member in _members(members, devices):
                devices[member] = _filled(members, devices[member], "numa", int(text))
    return devices


def _count(top: Value, block: dict[str, Value]) -> int:
    for key in ("buses", "packages"):
        if key in block and isinstance(block[key].content, list):
            items = block[key].content
            count = len(items) if key == "buses" else sum(len(item.items("a list of devices")) for item in items)
            if count > MAX_DEVICES:
                raise block[key].wrong(f"at most {MAX_DEVICES} devices")
            return count
    raise TopologyError(f"{top.where}: devices is missing; expected a list of devices or their number")


def _listed(declared: Value) -> dict[int, Device]:
    devices: dict[int, Device] = {}
    for item in declared.content:
        block = item.block(f"a block with keys {', '.join(_DEVICE_KEYS)}", _DEVICE_KEYS)
        known = {key: value for key, value in block.items() if value.content is not None}
        number = known["number"].integer(0, _MAX_NUMBER) if "number" in known else len(devices)
        if number in devices:
            raise TopologyError(f"{item.where}: device {number} is there twice")
        texts: dict[str, Any] = {key: known[key].text() for key in ("kind", "nic", "module", "uuid") if key in known}
        numa = known["numa"].integer(0, _MAX_NUMBER) if "numa" in known else None
        devices[number] = Device(number, _bus(known["bus"]) if "bus" in known else "", numa=numa, **texts)
    return devices


def _links(value: Value | None, devices: dict[int, Device]) -> tuple[Link, ...]:
    if value is None or value.content is None:
        return ()
    links: dict[tuple[int, int], Link] = {}
    for item in value.items("a list of links"):
        block = item.block("a block with keys kind, count, gb_s, pairs", ("kind", "count", "gb_s", "pairs"))
        kind = block["kind"].choice(LINK_KINDS) if "kind" in block else "xgmi"
        count = block.get("count")
        number = None if count is None or count.content is None else count.integer(1, 1000)
        gb_s = block["gb_s"].rate("GB/s") if "gb_s" in block else None
        if "pairs" not in block:
            raise TopologyError(f"{item.where}.pairs: is missing; expected all, or a list of pairs of devices")
        for a, b, where in _pairs(block["pairs"], devices):
            if (a, b) in links:
                raise TopologyError(f"{where}: link {a}-{b} is there twice")
            links[a, b] = Link(a, b, kind, number, gb_s)
    return tuple(links.values())


def _pairs(value: Value, devices: dict[int, Device]) -> list[tuple[int, int, str]]:
    if value.content == "all":
        return [(a, b, value.where) for a, b in itertools.combinations(sorted(devices), 2)]
    pairs = []
    for pair in value.items("all, or a list of pairs of devices"):
        members = _members(pair, devices)
        if len(members) != 2:
            raise pair.wrong("two different devices")
        pairs.append((min(members), max(members), pair.where))
    return pairs


def _nics(value: Value | None, devices: dict[int, Device]) -> tuple[Nic, ...]:
    """The NICs; devices that they name become theirs."""
    nics: dict[str, Nic] = {}
    keys = ("name", "kind", "gb_s", "bus", "numa", "devices")
    for item in value.items("a list of NICs") if value is not None and value.content is not None else []:
        block = item.block(f"a block with keys {', '.join(keys)}", keys)
        known = {key: entry for key, entry in block.items() if entry.content is not None}
        if "name" not in known:
            raise TopologyError(f"{item.where}.name: is missing; expected a name such as hsn0")
        name = known["name"].text("a name such as hsn0")
        if name in nics:
            raise TopologyError(f"{known['name'].where}: NIC {name} is there twice")
        nics[name] = Nic(
            name,
            _bus(known["bus"]) if "bus" in known else "",
            known["kind"].text("what it speaks, such as cxi, ib or ethernet") if "kind" in known else "",
            known["gb_s"].rate("GB/s") if "gb_s" in known else None,
            known["numa"].integer(0, _MAX_NUMBER) if "numa" in known else None,
        )
        for member in _members(known["devices"], devices) if "devices" in known else []:
            devices[member] = _filled(known["devices"], devices[member], "nic", name)
    for device in devices.values():
        if value is not None and device.nic and device.nic not in nics:
            raise TopologyError(
                f"{value.where}: device {device.number} names the NIC {device.nic!r}; "
                f"NICs that are there: {', '.join(nics) or 'none'}"
            )
    return tuple(nics.values())


def _members(value: Value, devices: dict[int, Device]) -> list[int]:
    """Numbers of devices that are there, each once."""
    members = [item.integer(0, _MAX_NUMBER, "the number of a device") for item in value.items("a list of devices")]
    for item, member in zip(value.content, members):
        if member not in devices:
            raise TopologyError(f"{item.where}: there is no device {member}; devices: {_span(devices)}")
    if len(set(members)) != len(members):
        raise TopologyError(f"{value.where}: a device is there twice in {members[:20]}")
    return members


def _filled(value: Value, device: Device, field: str, content: Any) -> Device:
    """The device with a field, unless it has another value already."""
    known = getattr(device, field)
    if known not in ("", None, content):
        raise TopologyError(f"{value.where}: device {device.number} has {field} {content} here and {known} elsewhere")
    return replace(device, **{field: content})


def _by_tier(value: Value | None, unit: str) -> dict[str, float]:
    if value is None or value.content is None:
        return {}
    rates = {tier: rate.rate(unit) for tier, rate in value.block("a block by tier", LEVELS).items()}
    return {tier: rate for tier, rate in rates.items() if rate is not None}


def _bus(value: Value) -> str:
    return bus_id(value.text("a PCI bus id such as 0000:c1:00.0"), value.where)


def _span(devices: dict[int, Device]) -> str:
    numbers = sorted(devices)
    if numbers == list(range(len(numbers))) and len(numbers) > 1:
        return f"0 to {len(numbers) - 1}"
    return ", ".join(map(str, numbers[:20])) or "none"
