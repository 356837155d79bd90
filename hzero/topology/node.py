"""One node as a source describes it: devices, their direct links, and NICs; and the packages and tiers that follow.

Packages follow from the physical identity of modules if the source states it, and otherwise from the number of parallel links.
They never follow from adjacent numbers. If the links allow several readings, an error explains how to declare the machine.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hzero.config import TIERS, Tier, TopologyConfig
from hzero.errors import ConfigError, some
from hzero.schema import validated

#: GB/s each way of one link between two GPUs, by architecture or product. gfx90a: OLCF's Frontier guide (4 links carry 200 GB/s).
#: The other rates are half of the two-way figures in data sheets. AMD: MI100 (92 GB/s), MI300X (128), MI355X (153.6). NVIDIA:
#: V100 (300 GB/s over 6 links), A100 (600 over 12), H100 and H200 (900 over 18), B200 (1800 over 18).
LINK_GB_S = {
    "gfx908": 46.0, "gfx90a": 50.0, "gfx942": 64.0, "gfx950": 76.8, "sm_70": 25.0, "sm_80": 25.0, "sm_90": 25.0,
    "sm_100": 50.0, "V100": 25.0, "A100": 25.0, "H100": 25.0, "H200": 25.0, "B200": 50.0,
}  # fmt: skip

#: Products by PCI device id (pci.ids). MI250X and MI250 share an id; both have two dies per module.
PRODUCTS = {
    0x738C: "MI100", 0x7408: "MI250X", 0x740C: "MI250X", 0x740F: "MI210", 0x74A0: "MI300A", 0x74A1: "MI300X", 0x74A5: "MI325X",
}  # fmt: skip

#: Dies of a module, by product or architecture. None: a gfx90a may be a die of an MI250X or a whole MI210.
DIES = {
    "MI250X": 2, "MI250": 2, "MI210": 1, "MI100": 1, "MI300X": 1, "MI300A": 1, "MI308X": 1, "MI325X": 1, "MI350X": 1,
    "MI355X": 1, "H200": 1, "gfx908": 1, "gfx90a": None, "gfx942": 1, "gfx950": 1,
}  # fmt: skip

#: Maximum number of devices of a node. More devices mean a broken or hostile source.
MAX_DEVICES = 1024

_BUS = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")


class AmbiguousTopologyError(ConfigError):
    """The links of a machine allow several readings. The message explains how to declare the machine."""


@dataclass(frozen=True)
class Device:
    """The device that one rank computes on.

    Attributes:
        number: Its number in the source.
        bus: PCI bus id as `bus_id` writes it; empty if unknown.
        kind: Product or architecture, such as ``MI250X`` or ``gfx90a``; empty if unknown.
        module: Identity of its module, if the source states it. The devices of one module are one package.
        numa: NUMA domain; None if unknown.
        uuid: UUID from the vendor; empty if unknown.
        node: KFD's node number: a name that is the same in all processes of the node, even if they may not use the device.
        hidden: Whether a task's cgroup hides it from this process. Only links from other devices to it are known then.
    """

    number: int
    bus: str = ""
    kind: str = ""
    module: str = ""
    numa: int | None = None
    uuid: str = ""
    node: str = ""
    hidden: bool = False

    @property
    def identity(self) -> str:
        """A name that is the same in all processes of the node, which may number devices differently."""
        return self.node or self.bus or f"#{self.number}"


@dataclass(frozen=True)
class Link:
    """Direct links between two devices; pairs without one are routed.

    Attributes:
        a: Number of the first device.
        b: Number of the second device; ``a < b``.
        kind: ``xgmi``, ``nvlink``, ``nvswitch`` or ``pcie``.
        count: Number of parallel links; None if unknown.
        gb_s: Their total bandwidth, GB/s each way; None if unknown.
    """

    a: int
    b: int
    kind: str = "xgmi"
    count: int | None = None
    gb_s: float | None = None

    def __str__(self) -> str:
        count = f"{self.count} {self.kind} link{'s' if self.count != 1 else ''}" if self.count else f"{self.kind} links"
        return count + (f" of {self.gb_s:g} GB/s together" if self.gb_s is not None else "")


@dataclass(frozen=True)
class Nic:
    """A network interface to other nodes.

    Attributes:
        name: Such as ``hsn0`` or ``mlx5_0``.
        kind: Protocol: ``cxi``, ``ib``, ``ethernet``; empty if unknown.
        gb_s: GB/s each way; None if unknown.
        subnets: Networks of its ports, such as ``ib fe80:0000:0000:0000 0x1``, if the source distinguishes them.
    """

    name: str
    kind: str = ""
    gb_s: float | None = None
    subnets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Node:
    """One checked node: numbers and bus ids are unique, links join known devices, and packages contain each device once.

    Attributes:
        source: Its source: a path, a command or a preset.
        devices: Sorted by number.
        links: Sorted; one entry per pair.
        nics: NICs in the order of the source.
        packages: Groups of device numbers that the source declares as packages; None if packages follow from modules and
            links.
        remarks: Remarks about missing or omitted parts.
        switch_nodes: Nodes of one switch group of the network that the source declares.

    Raises:
        ConfigError: The parts contradict each other.
    """

    source: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    nics: tuple[Nic, ...] = ()
    packages: tuple[tuple[int, ...], ...] | None = None
    remarks: tuple[str, ...] = ()
    switch_nodes: int | None = None

    def __post_init__(self) -> None:
        if len(self.devices) > MAX_DEVICES:
            raise ConfigError(f"{self.source}: {len(self.devices)} devices in one node; expected at most {MAX_DEVICES}")
        for what, values in (
            ("device number", [str(device.number) for device in self.devices]),
            ("PCI bus id", [device.bus for device in self.devices if device.bus]),
            ("link", [f"{link.a}-{link.b}" for link in self.links]),
        ):
            value, count = Counter(values).most_common(1)[0] if values else ("", 0)
            if count > 1:
                raise ConfigError(f"{self.source}: {what} {value} occurs twice")
        known = {device.number for device in self.devices}
        numbers = ", ".join(map(str, sorted(known))) or "none"
        for link in self.links:
            if not {link.a, link.b} <= known or link.a >= link.b:
                raise ConfigError(f"{self.source}: link {link.a}-{link.b}: expected two of the devices {numbers}")
        if self.packages is not None and sorted(itertools.chain(*self.packages)) != sorted(known):
            packages = [list(package) for package in self.packages]
            raise ConfigError(f"{self.source}: packages {packages} do not hold each of the devices {numbers} once")
        object.__setattr__(self, "devices", tuple(sorted(self.devices, key=lambda device: device.number)))
        object.__setattr__(self, "links", tuple(sorted(self.links, key=lambda link: (link.a, link.b))))

    def device(self, number: int) -> Device:
        """The device with a number. Raises `KeyError` if it does not exist."""
        return {device.number: device for device in self.devices}[number]

    def link(self, one: int, other: int) -> Link | None:
        """The direct links between two devices; None if the pair is routed."""
        return next((link for link in self.links if {link.a, link.b} == {one, other}), None)


def product(kind: str) -> str:
    """The product or architecture in a source's name, as in ``AMD Instinct MI250X`` and ``gfx90a:sramecc+``.

    An unknown name is returned as it is.
    """
    return next((name for name in DIES if name.lower() in kind.lower()), kind)


def bus_id(text: str, where: str = "") -> str:
    """Normalises a PCI bus id: ``0000:c1:00.0``, in lower case and with the domain.

    Args:
        text: The bus id in a source. The domain may be missing, or have eight digits as in NVIDIA's tools.
        where: File and position, for messages.

    Raises:
        ConfigError: The text is not a PCI bus id.
    """
    if (found := _BUS.fullmatch(text.strip())) is None:
        place = f"{where}: " if where else ""
        raise ConfigError(f"{place}found {text[:40]!r}; expected a PCI bus id such as 0000:c1:00.0")
    domain, bus, slot, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{slot}.{function}".lower()


def merge_links(source: str, seen: Iterable[Link]) -> tuple[Link, ...]:
    """Merges links that a source lists from one or both ends into one entry per pair.

    Raises:
        ConfigError: A device is linked to itself, or the two ends contradict each other.
    """
    merged: dict[tuple[int, int], Link] = {}
    for link in seen:
        if link.a == link.b:
            raise ConfigError(f"{source}: device {link.a} is linked to itself")
        pair = (min(link.a, link.b), max(link.a, link.b))
        ordered = replace(link, a=pair[0], b=pair[1])
        other = merged.setdefault(pair, ordered)
        if other != ordered:
            raise ConfigError(f"{source}: the ends of link {pair[0]}-{pair[1]} contradict: {other} and {ordered}")
    return tuple(merged.values())


# ---- packages and tiers -----------------------------------------------------------------------------------------------

#: Links between the two dies of an MI250X. No other pair of gfx90a has so many (OLCF user guide; RCCL's models).
_MI250X_LINKS = 4
_GFX90A = {"gfx90a", "MI250X", "MI250", "MI210"}


class NodeTier(NamedTuple):
    """A tier of one node.

    Attributes:
        name: Its name.
        groups: Groups of device numbers that differ only in this tier's coordinate.
        gb_s: GB/s each way of the slowest direct link in the groups; for ``inter_node`` a device's share of the NICs. None if one
            of these rates is unknown.
    """

    name: Tier
    groups: tuple[tuple[int, ...], ...]
    gb_s: float | None

    @property
    def size(self) -> int:
        """Members of its largest group; 1 if the machine lacks the tier."""
        return max(map(len, self.groups), default=1)


class Position(NamedTuple):
    """The place of a device in its node. It follows the order of PCI bus ids, so all processes agree.

    Attributes:
        device: Index in its package.
        hive: Index of its package in the hive, the packages that direct links connect; 0 in a node without hives.
        part: Index of the hive, or of the package in a node without hives.
        package: Index of its package in the node, hive after hive.
    """

    device: int
    hive: int
    part: int
    package: int


def tiers_of(node: Node) -> list[NodeTier]:
    """The tiers of one node, innermost first; ``inter_node`` has size 1. Raises `AmbiguousTopologyError`, see `packages_of`."""
    places, tiers = positions(node), list[NodeTier]()
    for axis, name in enumerate(TIERS[: TIERS.index("inter_node") + 1]):
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, (*place, _) in places.items():
            groups.setdefault((*place[:axis], *place[axis + 1 :]), []).append(number)
        home = {number: group for group in groups.values() for number in group}
        linked = [link.gb_s for link in node.links if link.b in home[link.a]]
        rates = [nic.gb_s for nic in node.nics] if name == "inter_node" else linked
        known, gb_s = [rate for rate in rates if rate is not None], None
        if known and home and len(known) == len(rates):
            gb_s = sum(known) / len(home) if name == "inter_node" else min(known)
        tiers.append(NodeTier(name, _sorted(groups.values()), gb_s))
    return tiers


def positions(node: Node, of_ranks: bool = False) -> dict[int, Position]:
    """Position of every device by its number. Arguments and errors: see `packages_of`."""
    by_bus = sorted(node.devices, key=lambda device: (device.hidden, device.bus, device.number))
    order = {device.number: index for index, device in enumerate(by_bus)}
    packages = [sorted(package, key=order.__getitem__) for package in packages_of(node, of_ranks)]
    packages.sort(key=lambda package: order[package[0]])
    home = {number: index for index, package in enumerate(packages) for number in package}
    joined = [(home[link.a], home[link.b]) for link in node.links if link.kind != "pcie"]
    hives = _components(range(len(packages)), joined)
    if max(map(len, hives), default=0) < 2:  # without direct links the node is one group of packages
        hives = [list(range(len(packages)))]
    found, numbers = dict[int, Position](), itertools.count()
    for hive, members in enumerate(hives):
        for index, package in enumerate(members):
            place, in_node = (index, hive) if len(hives) > 1 else (0, index), next(numbers)
            found |= {number: Position(device, *place, in_node) for device, number in enumerate(packages[package])}
    return found


def packages_of(node: Node, of_ranks: bool = False) -> tuple[tuple[int, ...], ...]:
    """The packages of a node: each a group of device numbers, sorted; the packages sorted by their first.

    Declared packages have priority, then modules that the source states, then links. Four links join the two dies of an
    MI250X. A single die without such a partner is a package.

    Args:
        node: The node.
        of_ranks: Whether the node comes from reports of ranks. Then hidden devices have no rank, the links between two of
            them are unknown, and their packages do not matter.

    Raises:
        AmbiguousTopologyError: The links allow several readings, or devices are hidden from this process.
    """
    if node.packages is not None:
        return _sorted(node.packages)
    hidden = [device.number for device in node.devices if device.hidden]
    if hidden and not of_ranks:
        raise AmbiguousTopologyError(
            f"{node.source}: a task's cgroup hides the devices {hidden}, so one process cannot identify the packages; "
            "the ranks of a job can, together, as in `srun ... hzero doctor`"
        )
    modules: dict[str, list[int]] = {}
    for device in node.devices:
        modules.setdefault(device.module or f"#{device.number}", []).append(device.number)
    singles = _sorted(modules.values())
    kinds = {product(device.kind) for device in node.devices if device.kind}  # a device without a rank may have none
    links = [link for link in node.links if link.kind == "xgmi"]
    dies = {DIES.get(kind) for kind in kinds}
    if any(device.module for device in node.devices) or not links or dies == {1}:
        return singles
    numbers = [device.number for device in node.devices]
    counts = {(link.a, link.b): link.count for link in links}
    most = max(count or 0 for count in counts.values())
    strongest = _components(numbers, [pair for pair, count in counts.items() if (count or 0) == most])
    alone = [group for group in strongest if len(group) == 1 and not node.device(group[0]).hidden]
    largest, alike = max(map(len, strongest)), len(set(counts.values())) == 1
    # On an unknown product, four links identify a pair only next to pairs with fewer links. One die may have lost its partner.
    # Two such dies may be a pair with broken links.
    stands_out = bool(kinds) or not alike
    if kinds <= _GFX90A and most == _MI250X_LINKS and largest == 2 and stands_out and len(alone) <= bool(kinds):
        return _sorted(strongest)
    # Two devices with several links and no others may be two dies, or two bridged cards.
    if alike and dies != {2} and (most == 1 or (1 < most < _MI250X_LINKS and largest > 2)):
        return singles
    shown = some([f"{a}-{b}: {'?' if count is None else count}" for (a, b), count in counts.items()], 16)
    ways = [_sorted(strongest), singles] if largest == 2 else [singles]
    text = " or ".join(f"packages: {[list(package) for package in way]}" for way in ways)
    raise AmbiguousTopologyError(
        f"{node.source}: ambiguous: the links do not say which devices share a package ({shown} links); declare the "
        f"machine in a file, for example with {text}, or the grid (packages_per_node, devices_per_package)"
    )


def grid_of_nodes(node: Node, where: str, **keys: Any) -> TopologyConfig:
    """The grid of nodes that equal ``node``, for `declared_grid`. ``keys`` are more keys of the block.

    Raises:
        ConfigError: The packages are ambiguous, or differ in size.
    """
    packages = packages_of(node)
    if len(sizes := {len(package) for package in packages}) > 1:
        raise ConfigError(f"{node.source}: found packages of {sorted(sizes)} devices; expected one size")
    shape = {"packages_per_node": len(packages), "devices_per_package": len(packages[0])}
    return validated(TopologyConfig, {**shape, "switch_nodes": node.switch_nodes, **keys}, where)


def _components(nodes: Iterable[int], pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Connected components. Each is sorted, and they are sorted by their first member."""
    group = {node: [node] for node in nodes}
    for a, b in pairs:
        if group[a] is not group[b]:
            group[a] += group[b]
            group.update(dict.fromkeys(group[b], group[a]))
    return sorted({id(found): sorted(found) for found in group.values()}.values())


def _sorted(groups: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(tuple(sorted(group)) for group in groups))
