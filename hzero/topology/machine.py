"""Machine: one node as a source describes it. Devices, links between them, NICs."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hzero.validation import ConfigError

#: GB/s each way of one link of a kind between two GPUs of an architecture. gfx90a: OLCF's Frontier guide (4 links carry
#: 200 GB/s); gfx908 and gfx942: half of the two-way figures of AMD's data sheets of MI100 (92 GB/s) and MI300X (128 GB/s).
XGMI_LINK_GB_S = {"gfx908": 46.0, "gfx90a": 50.0, "gfx942": 64.0}

#: Products by PCI device id (pci.ids). MI250X and MI250 share one; both have two dies per module.
PRODUCTS = {
    0x738C: "MI100", 0x7408: "MI250X", 0x740C: "MI250X", 0x740F: "MI210", 0x74A0: "MI300A", 0x74A1: "MI300X", 0x74A5: "MI325X",
}  # fmt: skip

#: Largest number of devices of a node; more means a broken or hostile source.
MAX_DEVICES = 1024

#: Largest GB/s of a link or NIC; more means a broken source.
MAX_GB_S = 1e6

_PRODUCT = re.compile(
    r"MI250X|MI250|MI210|MI100|MI300X|MI300A|MI308X|MI325X|MI350X|MI355X|H200|gfx908|gfx90a|gfx94[012]", re.IGNORECASE
)
_BUS = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")


class AmbiguousTopologyError(ConfigError):
    """A machine that can be read in more than one way. The message states the ways and how to declare one."""


@dataclass(frozen=True)
class Device:
    """The device that one rank computes on.

    Attributes:
        number: Its number in the source.
        bus: PCI bus id as `bus_id` writes it; empty where unknown.
        kind: Product or architecture, such as ``MI250X`` or ``gfx90a``; empty where unknown.
        module: Identity of the module it sits on, where the source states one: devices of one module are one package.
        numa: NUMA domain; None where unknown.
        nic: Name of the nearest NIC; empty if unknown or missing.
        uuid: Identity that the vendor gave it; empty where unknown.
        node: Name that the source gives it in every process of the node, as KFD's node number; empty where the source
            has none, or numbers devices alike everywhere.
        hidden: Whether a task's cgroup keeps this process from it: only its links to others are known then.
    """

    number: int
    bus: str = ""
    kind: str = ""
    module: str = ""
    numa: int | None = None
    nic: str = ""
    uuid: str = ""
    node: str = ""
    hidden: bool = False

    @property
    def identity(self) -> str:
        """Its name in other processes of the node: bus id, else the source's name, else its number."""
        return self.bus or self.alias

    @property
    def alias(self) -> str:
        """Its name in processes that cannot read its bus id."""
        return self.node or f"#{self.number}"


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


@dataclass(frozen=True)
class Nic:
    """A network interface to other nodes.

    Attributes:
        name: As ``hsn0`` or ``mlx5_0``.
        bus: PCI bus id; empty where unknown.
        kind: Protocol: ``cxi``, ``ib``, ``ethernet``; empty where unknown.
        gb_s: GB/s each way; None where unknown.
        numa: NUMA domain; None where unknown.
    """

    name: str
    bus: str = ""
    kind: str = ""
    gb_s: float | None = None
    numa: int | None = None


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
        texts = [text for d in self.devices for text in (d.bus, d.kind, d.module, d.nic, d.uuid, d.node)]
        for text in [*texts, *(text for nic in self.nics for text in (nic.name, nic.bus, nic.kind))]:
            if not text.isprintable():
                raise ConfigError(f"{self.source}: found the name {text[:40]!r}, expected printable characters")
        for rate in [*self.tier_gb_s.values(), *(nic.gb_s for nic in self.nics), *(link.gb_s for link in self.links)]:
            if rate is not None and not 0 < rate <= MAX_GB_S:
                raise ConfigError(f"{self.source}: found {rate:g} GB/s, expected more than 0 and at most {MAX_GB_S:g}")
        known = {device.number for device in self.devices}
        numbers = ", ".join(map(str, sorted(known))) or "none"
        for link in self.links:
            where = f"{self.source}: link {link.a}-{link.b}"
            for end in (link.a, link.b):
                if end not in known:
                    raise ConfigError(f"{where} leads to device {end}, which is not there; devices: {numbers}")
            if link.a >= link.b:
                raise ConfigError(f"{where}: expected two devices, the smaller number first")
            if link.count is not None and link.count < 1:
                raise ConfigError(f"{where}: found a count of {link.count}, expected at least 1")
        if self.packages is not None and sorted(itertools.chain(*self.packages)) != sorted(known):
            packages = [list(package) for package in self.packages]
            raise ConfigError(f"{self.source}: packages {packages} do not hold each of the devices {numbers} once")
        object.__setattr__(self, "devices", tuple(sorted(self.devices, key=lambda device: device.number)))
        object.__setattr__(self, "links", tuple(sorted(self.links, key=lambda link: (link.a, link.b))))

    def device(self, number: int) -> Device:
        """The device with a number. Raises `KeyError` if missing."""
        return self._by_number[number]

    def link(self, one: int, other: int) -> Link | None:
        """The direct links between two devices; None where the pair is routed."""
        return self._by_pair.get((min(one, other), max(one, other)))

    @functools.cached_property
    def _by_number(self) -> dict[int, Device]:
        return {device.number: device for device in self.devices}

    @functools.cached_property
    def _by_pair(self) -> dict[tuple[int, int], Link]:
        return {(link.a, link.b): link for link in self.links}


def by_bus(device: Device) -> tuple[str, int]:
    """Key that orders devices by PCI bus id, and by number where ids are not known."""
    return device.bus, device.number


def product(kind: str) -> str:
    """The product or architecture that a source's name has in it, as in ``AMD Instinct MI250X`` and ``gfx90a:sramecc+``.

    ``gfx940`` and ``gfx941``, the first steppings of ``gfx942``, are taken for it; a name of nothing known stays as it is.
    """
    found = _PRODUCT.search(kind)
    if found is None:
        return kind
    name = found.group().lower()
    return "gfx942" if name.startswith("gfx94") else name if name.startswith("gfx") else name.upper()


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


def merge_links(source: str, seen: Iterable[Link], both_ends: bool = False) -> tuple[Link, ...]:
    """One entry per pair from links that a source lists from one or both ends.

    Args:
        source: File or command, for messages.
        seen: Links as listed; either end may stand first.
        both_ends: Whether the source lists every link from both ends, so that one listed once contradicts itself.

    Raises:
        ConfigError: A device is linked to itself, or the two ends contradict each other.
    """
    ends: dict[tuple[int, int], set[int]] = {}
    merged: dict[tuple[int, int], Link] = {}
    for link in seen:
        if link.a == link.b:
            raise ConfigError(f"{source}: device {link.a} is linked to itself")
        pair = (min(link.a, link.b), max(link.a, link.b))
        ends.setdefault(pair, set()).add(link.a)
        ordered = replace(link, a=pair[0], b=pair[1])
        other = merged.setdefault(pair, ordered)
        if other != ordered:
            raise ConfigError(
                f"{source}: the two ends of link {pair[0]}-{pair[1]} contradict each other: "
                f"{link_text(other)} and {link_text(ordered)}"
            )
    for (a, b), listing in ends.items():
        if both_ends and len(listing) < 2:
            (end,) = listing
            raise ConfigError(f"{source}: device {end} lists a link to {b if end == a else a}, which lists none back")
    return tuple(merged.values())


def link_text(link: Link | None) -> str:
    """Parallel links of a pair, for messages."""
    if link is None:
        return "none (routed)"
    count = f"{link.count} {link.kind} link{'s' if link.count != 1 else ''}" if link.count else f"{link.kind} links"
    return count + (f" of {link.gb_s:g} GB/s together" if link.gb_s is not None else "")
