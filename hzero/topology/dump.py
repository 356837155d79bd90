"""Topology dumps of RCCL and NCCL: the XML that ``NCCL_TOPO_DUMP_FILE`` makes a job write.

A dump shows what KFD's sysfs does not: NVLinks and NVSwitches of NVIDIA's machines, and a node that is not at hand.

Source of the format: RCCL's and NCCL's src/graph/xml.cc and topo.cc, and RCCL's models (tools/topo_expl). PCI devices are
nested as in the machine below the CPU of a NUMA domain; ``gpu`` and ``nic`` are children of their PCI device. ``tclass`` is
the PCI class of a link's target: 0x068000 is an NVSwitch, 0x068001 a CPU.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

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
)  # fmt: skip
from hzero.validation import ConfigError

_NVSWITCH, _CPU = "0x068000", "0x068001"
_CRAY, _INFINIBAND = "0x17db", "0x0207"
#: Largest number of parallel links; an MI300X has 7 in all, and a GPU behind NVSwitches 18.
_MAX_COUNT = 64
#: GB/s each way of one NVLink by compute capability: half of the two-way figures of NVIDIA's data sheets of V100 (300
#: GB/s by 6 links), A100 (600 by 12), H100 (900 by 18) and B200 (1800 by 18).
_LINK_GB_S = {**XGMI_LINK_GB_S, "sm_70": 25.0, "sm_80": 25.0, "sm_90": 25.0, "sm_100": 50.0}
#: Older dumps have hipDeviceProp_t.gcnArch instead of a name with features.
_GCN = {"906": "gfx906", "908": "gfx908", "910": "gfx90a", "940": "gfx942"}


def read_dump(text: str, path: str) -> Machine:
    """The node that a dump describes, with the dump's own device numbers.

    Args:
        text: Content of the file.
        path: Its name, for messages.

    Raises:
        ConfigError: It is no dump, is cut off, has a DOCTYPE or entities, or contradicts itself.
    """
    if re.search("<!(DOCTYPE|ENTITY)", text):
        raise ConfigError(f"{path}: has a DOCTYPE or an entity, which no topology dump has")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ConfigError(f"{path}: is not valid XML: {error}") from None
    if root.tag != "system" or root.get("version") not in ("1", "2"):
        raise ConfigError(f"{path}: found <{root.tag[:40]}>, expected system of version 1 or 2")
    devices: dict[str, Device] = {}  # by PCI bus id
    rates: dict[int, float | None] = {}  # of one link, by device
    links: list[tuple[int, Element]] = []
    nics: dict[str, Nic] = {}
    hosts: set[str] = set()
    around = {root: (Element("none"), Element("none"))}  # the PCI device and the CPU around an element
    for element in root.iter():
        pci, cpu = around[element]
        here = (element if element.tag == "pci" else pci, element if element.tag == "cpu" else cpu)
        around.update(dict.fromkeys(element, here))
        if element.tag == "cpu":
            hosts.add(element.get("host_hash", ""))
        elif element.tag == "gpu":
            bus = bus_id(pci.get("busid", ""), f"{path}: pci of a gpu")
            if bus in devices or len(devices) >= MAX_DEVICES:
                raise ConfigError(f"{path}: two gpus have the PCI bus id {bus}, or there are more than {MAX_DEVICES}")
            number, numa = _integer(element, "dev", path, 0, 2**20), _integer(cpu, "numaid", path, -1, 2**20, "-1")
            architecture = _architecture(element)
            product = re.fullmatch("(0x)?[0-9a-fA-F]{1,8}", pci.get("device", ""))
            kind = PRODUCTS.get(int(product[0], 16) if product else 0, architecture)
            devices[bus] = Device(number, bus, kind[:40], numa=numa if numa >= 0 else None)
            rates[number] = _LINK_GB_S.get(architecture)
            links += [(number, link) for link in element if link.tag in ("xgmi", "nvlink")]
        elif element.tag == "net":
            name = element.get("name", "")[:80]  # NCCL lists a socket interface below every CPU
            speed = _integer(element, "speed", path, 0, 10**9, "0")  # Mbit/s
            nics[name] = Nic(name, _nic_kind(name, pci), speed / 8000 if speed else None)
    if len(hosts) > 1:
        raise ConfigError(f"{path}: has {len(hosts)} hosts, expected a dump of one node")
    merged = merge_links(path, _links(links, devices, rates, path))
    return Machine(path, tuple(devices.values()), merged, tuple(nics.values()))


def _architecture(gpu: Element) -> str:
    gcn = gpu.get("gcn", "").split(":")[0]
    return _GCN.get(gcn, gcn) or f"sm_{gpu.get('sm', '')}"


def _links(
    links: list[tuple[int, Element]], devices: dict[str, Device], rates: dict[int, float | None], path: str
) -> Iterator[Link]:
    switched: dict[int, int] = {}  # links into switches, by device
    for number, link in links:
        count = _integer(link, "count", path, 1, _MAX_COUNT)
        of_class = link.get("tclass", "")
        if link.tag == "nvlink" and of_class.startswith(_NVSWITCH):
            switched[number] = switched.get(number, 0) + count
        elif link.tag == "xgmi" or not of_class.startswith(_CPU):
            target = bus_id(link.get("target", ""), f"{path}: target of a link of gpu {number}")
            if target not in devices:
                raise ConfigError(f"{path}: a link leads to {target}, no gpu of this file; dump a job on all GPUs")
            yield _between(number, devices[target].number, link.tag, count, rates)
    for a, b in itertools.combinations(switched, 2):
        yield _between(a, b, "nvswitch", min(switched[a], switched[b]), rates)


def _between(a: int, b: int, kind: str, count: int, rates: dict[int, float | None]) -> Link:
    rate = rates[a] if rates[a] == rates[b] else None
    return Link(a, b, kind, count, rate * count if rate else None)


def _integer(element: Element, name: str, path: str, low: int, high: int, default: str = "") -> int:
    text = element.get(name, default).strip()
    if not re.fullmatch("-?[0-9]{1,12}", text) or not low <= int(text) <= high:
        raise ConfigError(f"{path}: {element.tag}: found {name}={text[:40]!r}, expected {low} to {high}")
    return int(text)


def _nic_kind(name: str, pci: Element) -> str:
    if name.startswith(("cxi", "hsn")) or pci.get("vendor") == _CRAY:
        return "cxi"
    return "ib" if pci.get("class", "").startswith(_INFINIBAND) else "ethernet"
