"""One node as a source describes it: devices, direct links between them, NICs."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hzero.validation import ConfigError

#: GB/s each way of one link between two GPUs of an architecture. gfx90a: OLCF's Frontier guide (4 links carry 200 GB/s);
#: gfx908 and gfx942: half of the two-way figures of AMD's data sheets of MI100 (92 GB/s) and MI300X (128 GB/s).
XGMI_LINK_GB_S = {"gfx908": 46.0, "gfx90a": 50.0, "gfx942": 64.0}

#: Products by PCI device id (pci.ids). MI250X and MI250 share one; both have two dies per module.
PRODUCTS = {
    0x738C: "MI100", 0x7408: "MI250X", 0x740C: "MI250X", 0x740F: "MI210", 0x74A0: "MI300A", 0x74A1: "MI300X", 0x74A5: "MI325X",
}  # fmt: skip

#: Dies of a module, by product or architecture. None: a gfx90a may be a die of an MI250X or a whole MI210.
DIES = {
    "MI250X": 2, "MI250": 2, "MI210": 1, "MI100": 1, "MI300X": 1, "MI300A": 1, "MI308X": 1, "MI325X": 1, "MI350X": 1,
    "MI355X": 1, "H200": 1, "gfx908": 1, "gfx90a": None, "gfx942": 1,
}  # fmt: skip

#: Largest number of devices of a node; more means a broken or hostile source.
MAX_DEVICES = 1024

_BUS = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")


class AmbiguousTopologyError(ConfigError):
    """A machine that can be read in more than one way. The message says how to declare one."""


@dataclass(frozen=True)
class Device:
    """The device that one rank computes on.

    Attributes:
        number: Its number in the source.
        bus: PCI bus id as `bus_id` writes it; empty where unknown.
        kind: Product or architecture, such as ``MI250X`` or ``gfx90a``; empty where unknown.
        module: Identity of the module it sits on, where the source states one: devices of one module are one package.
        numa: NUMA domain; None where unknown.
        uuid: Identity that the vendor gave it; empty where unknown.
        node: Name of the device in every process of the node, also in those that may not use it: KFD's node number.
        hidden: Whether a task's cgroup keeps this process from it: only its links to others are known then.
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
        """Its name in all processes of the node, which may number devices differently."""
        return self.node or self.bus or f"#{self.number}"


@dataclass(frozen=True)
class Link:
    """Direct links between two devices; pairs without one are routed.

    Attributes:
        a: Number of the one device.
        b: Number of the other; ``a < b``.
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
        kind: Protocol: ``cxi``, ``ib``, ``ethernet``; empty where unknown.
        gb_s: GB/s each way; None where unknown.
    """

    name: str
    kind: str = ""
    gb_s: float | None = None


@dataclass(frozen=True)
class Machine:
    """One node, checked: numbers and bus ids are unique, links join known devices, packages hold each device once.

    Attributes:
        source: Where it was read: a path, a command, a preset.
        devices: Sorted by number.
        links: Sorted; one entry per pair.
        nics: As the source orders them.
        packages: Groups of device numbers that the source declares to be packages; None where they follow from
            modules and links.
        tier_gb_s: Bandwidth per device by tier that the source declares, GB/s each way.
        remarks: What was missing in the source or left out.
        switch_nodes: Nodes of one switch group of the network that the source declares.

    Raises:
        ConfigError: The parts do not go together.
    """

    source: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    nics: tuple[Nic, ...] = ()
    packages: tuple[tuple[int, ...], ...] | None = None
    tier_gb_s: dict[str, float] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    switch_nodes: int | None = None

    def __post_init__(self) -> None:
        if len(self.devices) > MAX_DEVICES:
            raise ConfigError(f"{self.source}: {len(self.devices)} devices in one node, expected at most {MAX_DEVICES}")
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
        """The device with a number. Raises `KeyError` if missing."""
        return {device.number: device for device in self.devices}[number]

    def link(self, one: int, other: int) -> Link | None:
        """The direct links between two devices; None where the pair is routed."""
        return next((link for link in self.links if {link.a, link.b} == {one, other}), None)


def product(kind: str) -> str:
    """The product or architecture in a source's name, as in ``AMD Instinct MI250X`` and ``gfx90a:sramecc+``.

    A name of nothing known stays as it is.
    """
    return next((name for name in DIES if name.lower() in kind.lower()), kind)


def bus_id(text: str, where: str = "") -> str:
    """A PCI bus id in one form: ``0000:c1:00.0``, lower case, the domain written out.

    Args:
        text: As a source writes it; the domain may be missing, or have eight digits as NVIDIA's tools write it.
        where: File and place, for messages.

    Raises:
        ConfigError: It is none.
    """
    found = _BUS.fullmatch(text.strip())
    if found is None:
        place = f"{where}: " if where else ""
        raise ConfigError(f"{place}found {text[:40]!r}, expected a PCI bus id such as 0000:c1:00.0")
    domain, bus, slot, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{slot}.{function}".lower()


def merge_links(source: str, seen: Iterable[Link]) -> tuple[Link, ...]:
    """One entry per pair from links that a source lists from one or both ends, either end first.

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
