"""Machine: one node as a source describes it. Devices, links between them, NICs."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from hzero.config import ConfigError

#: GB/s each way of one link of a kind between two GPUs of an architecture. gfx90a: OLCF's Frontier guide (4 links carry
#: 200 GB/s); gfx908 and gfx942: half of the two-way figures of AMD's data sheets of MI100 (92 GB/s) and MI300X (128 GB/s).
XGMI_LINK_GB_S = {"gfx908": 46.0, "gfx90a": 50.0, "gfx942": 64.0}

#: Most devices that a node may have; more is no machine but a broken or hostile source.
MAX_DEVICES = 1024

#: Most GB/s that a link or NIC may have; more is a broken source.
MAX_GB_S = 1e6

_PRODUCT = re.compile(
    r"MI250X|MI250|MI210|MI100|MI300X|MI300A|MI308X|MI325X|MI350X|MI355X|H200|gfx908|gfx90a|gfx94[012]", re.IGNORECASE
)
_BUS = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")


class TopologyError(ConfigError):
    """A source that cannot be used: the message names the file or command, the place in it, and what was found."""


class AmbiguousTopologyError(TopologyError):
    """A machine that can be read in more than one way. The message tells the ways and how to declare one."""


@dataclass(frozen=True)
class Device:
    """What one rank computes on.

    Attributes:
        number: The source's own number of it.
        bus: PCI bus id as `bus_id` writes it; empty where the source does not say.
        kind: Product or architecture, such as ``MI250X`` or ``gfx90a``; empty where unknown.
        module: Identity of the module it sits on, where the source states one: devices of one module are one package.
        numa: NUMA domain; None where unknown.
        nic: Name of the nearest NIC; empty where unknown or where there is none.
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
        """What other processes of the node know it by: bus id, else the source's name, else its number."""
        return self.bus or self.alias

    @property
    def alias(self) -> str:
        """What processes call it that cannot read its bus id."""
        return self.node or f"#{self.number}"


@dataclass(frozen=True)
class Link:
    """Direct links between two devices; pairs without one are routed.

    Attributes:
        a: Number of the one device.
        b: Number of the other; ``a < b``.
        kind: ``xgmi``, ``nvlink``, ``nvswitch`` or ``pcie``.
        count: How many there are in parallel; None where the source does not say.
        gb_s: What they carry together, GB/s each way; None where unknown.
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
        kind: What it speaks: ``cxi``, ``ib``, ``ethernet``; empty where unknown.
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
    """One node, checked: numbers and bus ids are unique, links join known devices and say the same from both ends.

    Attributes:
        source: Where it was read: a path, a command, a preset.
        devices: Sorted by number.
        links: Sorted; one entry a pair.
        nics: As the source orders them.
        packages: Groups of device numbers that the source declares to be packages; None where they follow from
            modules and links.
        tier_gb_s: Bandwidth a device by tier that the source declares, GB/s each way.
        tier_latency_us: Latency of a message by tier that the source declares, microseconds.
        remarks: What a reader should know of the source: what was missing or left out.

    Raises:
        TopologyError: The parts do not go together.
    """

    source: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    nics: tuple[Nic, ...] = ()
    packages: tuple[tuple[int, ...], ...] | None = None
    tier_gb_s: dict[str, float] = field(default_factory=dict)
    tier_latency_us: dict[str, float] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.devices) > MAX_DEVICES:
            raise TopologyError(
                f"{self.source}: {len(self.devices)} devices in one node, at most {MAX_DEVICES} are read"
            )
        for what, values in (
            ("device number", [str(device.number) for device in self.devices]),
            ("PCI bus id", [device.bus for device in self.devices if device.bus]),
            ("NIC", [nic.name for nic in self.nics]),
        ):
            if (twice := _twice(values)) is not None:
                raise TopologyError(f"{self.source}: {what} {twice} is there twice")
        texts = [text for d in self.devices for text in (d.bus, d.kind, d.module, d.nic, d.uuid, d.node)]
        for text in [*texts, *(text for nic in self.nics for text in (nic.name, nic.bus, nic.kind))]:
            if not text.isprintable():
                raise TopologyError(f"{self.source}: found the name {text[:40]!r}, expected printable characters")
        rates = [*self.tier_gb_s.values(), *(nic.gb_s for nic in self.nics), *(link.gb_s for link in self.links)]
        for rate in rates:
            if rate is not None and not 0 < rate <= MAX_GB_S:
                raise TopologyError(
                    f"{self.source}: found {rate:g} GB/s, expected more than 0 and at most {MAX_GB_S:g}"
                )
        known = {device.number for device in self.devices}
        pairs = []
        for link in self.links:
            for end in (link.a, link.b):
                if end not in known:
                    raise TopologyError(
                        f"{self.source}: link {link.a}-{link.b} leads to device {end}, which is not there; "
                        f"devices: {', '.join(map(str, sorted(known))) or 'none'}"
                    )
            if link.a >= link.b:
                raise TopologyError(
                    f"{self.source}: link {link.a}-{link.b}: expected two devices, the smaller number first"
                )
            if link.count is not None and link.count < 1:
                raise TopologyError(
                    f"{self.source}: link {link.a}-{link.b}: found a count of {link.count}, expected at least 1"
                )
            pairs.append(f"{link.a}-{link.b}")
        if (twice := _twice(pairs)) is not None:
            raise TopologyError(f"{self.source}: link {twice} is there twice")
        if self.packages is not None:
            members = [member for package in self.packages for member in package]
            if sorted(members) != sorted(known):
                raise TopologyError(
                    f"{self.source}: packages {[list(p) for p in self.packages]} do not hold each of the devices "
                    f"{', '.join(map(str, sorted(known)))} once"
                )
        object.__setattr__(self, "devices", tuple(sorted(self.devices, key=lambda device: device.number)))
        object.__setattr__(self, "links", tuple(sorted(self.links, key=lambda link: (link.a, link.b))))

    def device(self, number: int) -> Device:
        """The device with a number. Raises `KeyError` where there is none."""
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


def bus_id(text: str, where: str) -> str:
    """A PCI bus id in one form: ``0000:c1:00.0``, lower case, the domain written out.

    Args:
        text: As a source writes it; the domain may be missing, or have eight digits as NVIDIA's tools write it.
        where: File and place, for messages.

    Raises:
        TopologyError: It is none.
    """
    found = _BUS.fullmatch(text.strip())
    if found is None:
        raise TopologyError(f"{where}: found {text[:40]!r}, expected a PCI bus id such as 0000:c1:00.0")
    domain, bus, slot, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{slot}.{function}".lower()


def merge_links(source: str, seen: Iterable[Link], both_ends: bool = False) -> tuple[Link, ...]:
    """One entry a pair from links that a source lists from one or both ends.

    Args:
        source: File or command, for messages.
        seen: Links as listed; either end may stand first.
        both_ends: Whether the source lists every link from both ends, so that one listed once contradicts itself.

    Raises:
        TopologyError: A device is linked to itself, or the two ends do not say the same.
    """
    listed: dict[tuple[int, int], set[int]] = {}
    merged: dict[tuple[int, int], Link] = {}
    for link in seen:
        if link.a == link.b:
            raise TopologyError(f"{source}: device {link.a} is linked to itself")
        ordered = link if link.a < link.b else Link(link.b, link.a, link.kind, link.count, link.gb_s)
        listed.setdefault((ordered.a, ordered.b), set()).add(link.a)
        other = merged.setdefault((ordered.a, ordered.b), ordered)
        if other != ordered:
            raise TopologyError(
                f"{source}: the two ends of link {ordered.a}-{ordered.b} contradict each other: "
                f"{_text(other)} and {_text(ordered)}"
            )
    for (a, b), ends in listed.items():
        if both_ends and len(ends) < 2:
            (end,) = ends
            raise TopologyError(
                f"{source}: device {end} lists a link to {b if end == a else a}, which lists none back: the two ends contradict "
                "each other"
            )
    return tuple(merged.values())


def _text(link: Link) -> str:
    rate = f", {link.gb_s:g} GB/s" if link.gb_s is not None else ""
    return f"{link.count if link.count is not None else '?'} x {link.kind}{rate}"


def _twice(values: list[str]) -> str | None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None
