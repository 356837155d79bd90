"""Topology dumps of RCCL and NCCL: the XML that ``NCCL_TOPO_DUMP_FILE`` makes a job write.

A dump shows what KFD's sysfs does not: NVLinks and NVSwitches of NVIDIA's machines, and a node that is not at hand, such as
the models that come with RCCL.

Source of the format: RCCL's and NCCL's src/graph/xml.cc and topo.cc (system version 2 is RCCL's with gcn and arch, 1 is
NCCL's), and RCCL's models (tools/topo_expl). PCI devices are nested as in the machine below the CPU of a NUMA
domain; ``gpu`` and ``nic`` stand inside their PCI device. ``tclass`` is the PCI class of a link's target: 0x068000 is an
NVSwitch, 0x068001 a CPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from xml.parsers import expat

from hzero.topology.machine import (
    MAX_DEVICES,
    PRODUCTS,
    XGMI_LINK_GB_S,
    Device,
    Link,
    Machine,
    Nic,
    bus_id,
    merge_links,
)
from hzero.topology.readers.nearest import nearest
from hzero.topology.readers.source import integer, read_text, shown
from hzero.validation import ConfigError

VERSIONS = ("1", "2")

_NVSWITCH, _CPU = "0x068000", "0x068001"
_MAX_DEPTH = 64
#: Largest number of links of a GPU, and of parallel ones: partitions of 8 MI300X reach 63 others.
_MAX_LINKS = 64
_CRAY, _INFINIBAND = "0x17db", "0x0207"
#: GB/s each way of one NVLink by compute capability: half of the two-way figures of NVIDIA's data sheets of V100 (300
#: GB/s by 6 links), A100 (600 by 12), H100 (900 by 18) and B200 (1800 by 18).
_NVLINK_GB_S = {"70": 25.0, "80": 25.0, "90": 25.0, "100": 50.0}


@dataclass
class _Gpu:
    line: int
    device: Device
    architecture: str
    link_gb_s: float | None
    path: tuple[str, ...]
    links: list[tuple[int, str, int, str, str]] = field(default_factory=list)  # line, kind, count, target, tclass


@dataclass
class _Dump:
    """The content of the elements, collected while they are read."""

    name: str
    parser: expat.XMLParserType
    stack: list[tuple[str, dict[str, str]]] = field(default_factory=list)  # open elements with their attributes
    gpus: dict[str, _Gpu] = field(default_factory=dict)  # by PCI bus id
    nics: dict[str, tuple[Nic, tuple[str, ...]]] = field(default_factory=dict)  # with their PCI paths, by name
    hosts: set[str] = field(default_factory=set)

    def where(self) -> str:
        return f"{self.name}:{self.parser.CurrentLineNumber}"

    def refuse(self, *_: object) -> None:
        raise ConfigError(f"{self.where()}: has a DOCTYPE or an entity, which no topology dump has")

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if len(self.stack) >= _MAX_DEPTH:
            raise ConfigError(f"{self.where()}: elements are nested deeper than {_MAX_DEPTH}")
        if not self.stack:
            if tag != "system":
                raise ConfigError(f"{self.where()}: found the element {shown(tag)}, expected system")
            if (version := attributes.get("version")) not in VERSIONS:
                raise ConfigError(f"{self.where()}: found version {shown(version)}, possible: {', '.join(VERSIONS)}")
        self.stack.append((tag, attributes))
        if tag == "cpu":
            self.hosts.add(attributes.get("host_hash", ""))
            if len(self.hosts) > 1:
                raise ConfigError(f"{self.where()}: a second host begins, expected a dump of one node")
        elif tag == "gpu":
            self._gpu(attributes)
        elif tag in ("xgmi", "nvlink"):
            self._link(tag, attributes)
        elif tag == "net":
            self._net(attributes)

    def end(self, _: str) -> None:
        self.stack.pop()

    def _attribute(self, attributes: dict[str, str], name: str) -> str:
        if name not in attributes:
            raise ConfigError(f"{self.where()}: {self.stack[-1][0]} has no attribute {name}")
        return attributes[name]

    def _path(self) -> tuple[str, ...]:
        """NUMA domain, then the PCI bus ids from the root down to here."""
        path = []
        for tag, attributes in self.stack:
            if tag == "cpu":
                path.append(f"cpu {attributes.get('numaid', '')}")
            elif tag == "pci":
                path.append(bus_id(self._attribute(attributes, "busid"), self.where()))
        return tuple(path)

    def _numa(self) -> int | None:
        text = next(
            (attributes["numaid"] for tag, attributes in self.stack if tag == "cpu" and "numaid" in attributes), "-1"
        )
        numa = integer(text, self.where(), "numaid", -1, 2**20)
        return numa if numa >= 0 else None

    def _pci(self) -> dict[str, str]:
        """Attributes of the innermost PCI device around."""
        return next((attributes for tag, attributes in reversed(self.stack) if tag == "pci"), {})

    def _gpu(self, attributes: dict[str, str]) -> None:
        path = self._path()
        if not self._pci():
            raise ConfigError(f"{self.where()}: found a gpu that is in no pci element")
        bus = path[-1]
        number = integer(self._attribute(attributes, "dev"), self.where(), "dev", 0, 2**20)
        if len(self.gpus) >= MAX_DEVICES:
            raise ConfigError(f"{self.where()}: more than {MAX_DEVICES} devices in one node")
        for other in self.gpus.values():
            if number == other.device.number or bus == other.device.bus:
                raise ConfigError(f"{self.where()}: gpu {number} at {bus} is also in line {other.line}")
        capability, product = attributes.get("sm", ""), ""
        architecture, rate = f"sm_{capability}" if capability else "", _NVLINK_GB_S.get(capability)
        if "gcn" in attributes:
            architecture = _architecture(attributes["gcn"])
            rate = XGMI_LINK_GB_S.get(architecture)
            product = PRODUCTS.get(_hexadecimal(self._pci().get("device", "")), "")
        device = Device(number, bus, (product or architecture)[:40], numa=self._numa())
        self.gpus[bus] = _Gpu(self.parser.CurrentLineNumber, device, architecture, rate, path)

    def _link(self, tag: str, attributes: dict[str, str]) -> None:
        if len(self.stack) < 2 or self.stack[-2][0] != "gpu":
            raise ConfigError(f"{self.where()}: found {tag} outside a gpu")
        gpu = next(reversed(self.gpus.values()))
        if len(gpu.links) >= _MAX_LINKS:
            raise ConfigError(f"{self.where()}: gpu {gpu.device.number} has more than {_MAX_LINKS} links")
        target, target_class = self._attribute(attributes, "target"), attributes.get("tclass", "")
        if tag == "xgmi" or not target_class.startswith((_NVSWITCH, _CPU)):  # a hidden switch may have no bus id
            target = bus_id(target, self.where())
        count = integer(self._attribute(attributes, "count"), self.where(), "count", 1, _MAX_LINKS)
        gpu.links.append((self.parser.CurrentLineNumber, tag, count, target, target_class))

    def _net(self, attributes: dict[str, str]) -> None:
        name, path, pci = self._attribute(attributes, "name"), self._path(), self._pci()
        if len(self.nics) >= MAX_DEVICES:
            raise ConfigError(f"{self.where()}: more than {MAX_DEVICES} NICs in one node")
        speed = integer(attributes.get("speed", "0"), self.where(), "speed", 0, 10**9)  # Mbit/s
        bus = path[-1] if pci else ""
        nic = Nic(name[:80], bus, _nic_kind(name, pci), speed / 8000 if speed else None, self._numa())
        # NCCL lists a socket interface below every CPU; then it has no place of its own.
        if nic.name in self.nics and self.nics[nic.name][1] != path:
            nic, path = Nic(nic.name, "", nic.kind, nic.gb_s), ()
        self.nics[nic.name] = (nic, path)

    def links(self) -> Iterator[tuple[int, Link]]:
        """Links between two GPUs, each with its line; the end that lists it stands first."""
        switched: dict[int, dict[str, int]] = {}
        for gpu in self.gpus.values():
            for line, tag, count, target, target_class in gpu.links:
                if tag == "nvlink" and target_class.startswith(_CPU):
                    continue
                if tag == "nvlink" and target_class.startswith(_NVSWITCH):
                    switches = switched.setdefault(gpu.device.number, {})
                    switches[target] = max(switches.get(target, 0), count)
                    continue
                if target not in self.gpus:
                    raise ConfigError(
                        f"{self.name}:{line}: {tag} leads to {target}, which is no gpu of this file; "
                        "a dump has the GPUs of its job alone, so take one of a job on all of the node's"
                    )
                other = self.gpus[target]
                rate = gpu.link_gb_s if gpu.architecture == other.architecture else None
                yield line, Link(gpu.device.number, other.device.number, tag, count, rate * count if rate else None)
        rates = {gpu.device.number: gpu.link_gb_s for gpu in self.gpus.values()}
        for a, b in combinations(sorted(switched), 2):
            shared = switched[a].keys() & switched[b].keys()
            if count := sum(min(switched[a][switch], switched[b][switch]) for switch in shared):
                rate = rates[a] if rates[a] == rates[b] else None
                yield 0, Link(a, b, "nvswitch", count, rate * count if rate else None)


def read(path: Path) -> Machine:
    """The node that a dump describes, with the dump's own device numbers.

    Raises:
        ConfigError: It is no dump, is cut off, has a DOCTYPE or entities, or contradicts itself; the message names the
            file and the line.
    """
    parser = expat.ParserCreate()
    dump = _Dump(str(path), parser)
    parser.StartDoctypeDeclHandler = dump.refuse
    parser.EntityDeclHandler = dump.refuse
    parser.StartElementHandler = dump.start
    parser.EndElementHandler = dump.end
    try:
        parser.Parse(read_text(path), True)
    except expat.ExpatError as error:
        raise ConfigError(f"{path}:{error.lineno}: is not valid XML: {expat.ErrorString(error.code)}") from None
    listed = list(dump.links())
    seen: dict[frozenset[int], Link] = {}
    for line, link in listed:
        before = seen.setdefault(frozenset((link.a, link.b)), link)
        merge_links(f"{path}:{line}" if line else str(path), [before, link])
    switched = [link for _, link in listed if link.kind == "nvswitch"]
    links = merge_links(str(path), [link for _, link in listed if link.kind != "nvswitch"], both_ends=True)
    nics = list(dump.nics.values())
    gpus = dump.gpus.values()
    devices = [replace(gpu.device, nic=nearest(gpu.path, gpu.device.numa, nics)) for gpu in gpus]
    return Machine(str(path), tuple(devices), (*links, *switched), tuple(nic for nic, _ in nics))


def _architecture(gcn: str) -> str:
    """Older dumps have hipDeviceProp_t.gcnArch, in which 910 is gfx90a; newer ones a name with features."""
    name = gcn.split(":")[0]
    if name.startswith("gfx") or not name:
        return name
    return {"910": "gfx90a", "940": "gfx942"}.get(name, f"gfx{name}")


def _nic_kind(name: str, pci: dict[str, str]) -> str:
    if name.startswith(("cxi", "hsn")) or pci.get("vendor") == _CRAY:
        return "cxi"
    return "ib" if pci.get("class", "").startswith(_INFINIBAND) else "ethernet"


def _hexadecimal(text: str) -> int:
    return int(text, 16) if re.fullmatch(r"(0x)?[0-9a-fA-F]{1,8}", text) else 0
