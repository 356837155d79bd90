"""Sources of a node: this machine, a file, or a preset.

- KFD's sysfs describes a live AMD node. It needs no job and no tool. It counts parallel links by their bandwidth, and shows the
  devices that a task's cgroup hides. rocm-smi and amdsmi read the same files.
- NVIDIA's driver lists the GPUs of a live node in procfs, without their NVLinks.
- A dump of RCCL or NCCL also contains NVLinks and NVSwitches, and may come from another machine. It needs a running job.
- A declared file states packages that the links leave ambiguous, or describes another machine, as the presets do. It may also
  declare the grid of all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import yaml
from pydantic import AfterValidator, BeforeValidator, Field

from hzero.config import HERE, TopologyConfig
from hzero.errors import ConfigError, did_you_mean, nearest
from hzero.files import read_text, read_whole
from hzero.schema import Frozen, Quantity, validated
from hzero.topology.node import LINK_GB_S, MAX_DEVICES, PRODUCTS, Device, Link, Nic, Node, bus_id, merge_links

#: Variable with the path of sysfs, for containers that mount the host's elsewhere.
SYSFS = "HZERO_SYSFS"
#: NVIDIA's driver describes each GPU in a folder that is named after its PCI bus id (its README, chapter "The /proc Interface").
_PROCFS = Path("/proc/driver/nvidia/gpus")

#: Nodes of known machines. Their declared files cite the public source of every figure.
PRESETS = ("frontier", "lumi", "el_capitan", "mi300x", "mi355x", "dgx_h200", "nic", "laptop")


#: Maximum bytes of a dump, and of a declared file. A dump of a node with 16 devices has 18 kB. PyYAML is slow, so a
#: declared file may have only as much as 1,024 devices need.
_MAX_BYTES, _MAX_DECLARED = 8 * 2**20, 131_072


def read_node(source: str, environ: Mapping[str, str] = os.environ, where: str = "topology") -> Node:
    """Reads the node of a source: ``discover`` or ``auto``, one of `PRESETS`, or a file or folder.

    Args:
        source: The source.
        environ: The environment. ``HZERO_SYSFS`` replaces ``/sys``.
        where: Key or option of the source, for messages.

    Raises:
        ConfigError: The file does not exist, is invalid, or declares a grid.
    """
    found = this_node(environ) if source in HERE else read_source(source, where)
    if isinstance(found, TopologyConfig):
        raise ConfigError(f"{source}: declares a grid (packages_per_node); expected a node (devices or packages)")
    return found


def this_node(environ: Mapping[str, str] = os.environ) -> Node:
    """The node on which this process runs. Without GPUs, it has no devices.

    Raises:
        ConfigError: There are GPUs, but their description cannot be read.
    """
    node = read_sysfs(Path(environ.get(SYSFS) or "/sys"))
    if node.devices or environ.get(SYSFS) or not _PROCFS.is_dir():
        return node
    remark = "NVLinks are unknown: a dump of NCCL (NCCL_TOPO_DUMP_FILE) lists them"
    return replace(node, source=str(_PROCFS), devices=tuple(_nvidia_devices()), remarks=(remark,))


def _nvidia_devices() -> Iterator[Device]:
    """The GPUs of NVIDIA's driver, numbered by PCI bus id as nvidia-smi does."""
    for number, folder in enumerate(_entries(_PROCFS)):
        lines = read_text(folder / "information", _MAX_PAGE).splitlines()
        said = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        numa = _number(Path("/sys/bus/pci/devices") / folder.name / "numa_node")
        yield Device(
            number,
            bus_id(folder.name, str(_PROCFS)),
            said.get("Model", "")[:80],
            numa=None if numa is None or numa < 0 else int(numa),
            uuid=said.get("GPU UUID", "")[:80],
        )


def read_source(source: str, where: str) -> Node | TopologyConfig:
    """Reads the node of a preset, file or folder, or the grid that a file declares. The content decides the kind of a file.

    Raises:
        ConfigError: The source does not exist, cannot be read, is of no known kind, or contradicts itself.
    """
    if source in PRESETS:
        return preset(source)
    if os.path.isdir(source):
        if not (Path(source) / NODES).is_dir():
            raise ConfigError(f"{where}: found no {NODES} in {source!r}; expected /sys or a copy of it")
        return read_sysfs(Path(source))
    if not os.path.exists(source):
        expected = f"discover, a file, or a preset: {', '.join(PRESETS)}{did_you_mean(source, PRESETS)}"
        raise ConfigError(f"{where}: found no file {source[:200]!r}; expected {expected}")
    text = read_text(source, _MAX_BYTES)
    if text.lstrip().startswith("<"):
        return read_dump(text, source)
    return read_declared(text, source)


@functools.cache
def preset(name: str) -> Node:
    """One node of a known machine, by its name in `PRESETS`."""
    path = Path(__file__).resolve().parent / "presets" / f"{name}.yaml"
    node = read_declared(read_text(path), str(path), f"preset {name}")
    assert isinstance(node, Node)
    return node


# ---- KFD's sysfs, /sys/class/kfd/kfd/topology/nodes -------------------------------------------------------------------------

# Source of the conventions: the Linux kernel's amdkfd (kfd_topology.c: node_show, iolink_show and kfd_topology_add_device;
# kfd_crat.h for the link types; kfd_crat.c, kfd_fill_gpu_xgmi_link_to_gpu, for weights) and amdgpu
# (amdgpu_xgmi_get_bandwidth). A node of KFD is a CPU or a GPU; a GPU has SIMDs. If a device cgroup hides a GPU from a process,
# the files of its node give EPERM, and ROCr does not count it either. A hop has weight 15, a pair of partitions of one module
# weight 13. The minimum bandwidth is the rate of one link, the maximum the rate of all links to the peer, in MB/s. Both are 0
# for routed pairs, for all pairs of MI100, and with drivers before Linux 5.15.

NODES = Path("class/kfd/kfd/topology/nodes")

#: Values of ``type`` in io_links.
_PCIE, _XGMI = 2, 11
#: Weights of two hops, of a link inside a module (KFD_CRAT_INTRA_SOCKET_WEIGHT), and of a link between partitions of two
#: modules. RCCL's rocm_smi_wrap.cc treats 13, 15 and 41 as direct.
_ROUTED, _SAME_MODULE, _PARTITIONS = 30, 13, 41
#: Maximum bytes of a file of sysfs: one page.
_MAX_PAGE = 65_536
_ACTIVE = 4  # of the file `state` of an RDMA port: "4: ACTIVE"
_LINE = re.compile(r"([a-z0-9_]{1,40}) ([0-9]{1,20})")


def read_sysfs(sysfs: Path = Path("/sys")) -> Node:
    """The GPUs of this node, their links and its NICs.

    Devices that the process may use are numbered in the order of their KFD nodes. ROCr uses this order, and so does HIP if no
    variable hides devices. Hidden devices follow, since links lead to them.

    Args:
        sysfs: Root of sysfs, or of a copy of it.

    Returns:
        The node. Without KFD's topology, it has no devices and a remark.

    Raises:
        ConfigError: The folder is missing, or the files contradict each other.
    """
    root = sysfs / NODES
    if not sysfs.is_dir():
        raise ConfigError(f"{sysfs}: is no folder; expected /sys or a copy of it")
    if not root.is_dir():
        remark = "no KFD topology: no AMD GPU, or its driver is not loaded"
        return Node(str(root), (), nics=_nics(sysfs), remarks=(remark,))
    nodes = {int(path.name): _properties(path / "properties") for path in _numbered(root)}
    gpus = {number: values for number, values in nodes.items() if values is not None and values.get("simd_count", 0)}
    hidden = [number for number, values in nodes.items() if values is None]
    index = {number: position for position, number in enumerate([*gpus, *hidden])}
    links: list[Link] = []
    partitioned = False
    for number in gpus:
        for path in _numbered(root / f"{number}/io_links"):
            values = _properties(path / "properties") or {}
            end = values.get("node_to", -1)
            if values and end not in nodes:
                raise ConfigError(f"{path}: found node_to {end}; expected one of KFD's nodes")
            if end in index and (found := _link(index[number], index[end], values)) is not None:
                links.append(found)
                partitioned |= found.kind == "xgmi" and values.get("weight") == _SAME_MODULE
    devices = [_device(index[number], number, values, sysfs, partitioned) for number, values in gpus.items()]
    devices += [Device(index[number], node=f"kfd{number}", hidden=True) for number in hidden]
    remarks = tuple(f"KFD node {number} cannot be read by this process" for number in hidden)
    return Node(str(root), tuple(devices), merge_links(str(root), links), _nics(sysfs), remarks=remarks)


def _link(start: int, end: int, values: dict[str, int]) -> Link | None:
    """The links between two devices; None if the pair is routed."""
    low, high, weight = (values.get(key, 0) for key in ("min_bandwidth", "max_bandwidth", "weight"))
    if values.get("type") == _PCIE:
        return Link(start, end, "pcie", gb_s=high / 1000 if high else None)
    # The first drivers that count links give a routed pair the minimum bandwidth of one link.
    if values.get("type") != _XGMI or (weight >= _ROUTED and weight != _PARTITIONS) or (low and not high):
        return None
    return Link(start, end, "xgmi", high // low if high and low else None, high / 1000 if high else None)


def _device(index: int, number: int, values: dict[str, int], sysfs: Path, partitioned: bool) -> Device:
    location, domain, version = (values.get(key, 0) for key in ("location_id", "domain", "gfx_target_version"))
    slot = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"
    function = f"{slot}.{location & 7}"  # the function to which the driver is bound
    # 90010 is gfx90a
    architecture = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""
    numa = _number(sysfs / "bus/pci/devices" / function / "numa_node")
    unique_id = values.get("unique_id", 0)
    return Device(
        index,
        bus=f"{slot}.{location >> 28 & 7}" if location >> 28 else function,  # HIP numbers partitions as functions
        kind=PRODUCTS.get(values.get("device_id", 0), architecture),
        module=slot if partitioned else "",
        numa=None if numa is None or numa < 0 else int(numa),
        uuid=f"GPU-{unique_id:016x}" if unique_id else "",  # in the form of ROCR_VISIBLE_DEVICES
        node=f"kfd{number}",
    )


def _numbered(folder: Path) -> list[Path]:
    """Entries of a folder whose names are numbers, sorted by number."""
    numbers = [path for path in _entries(folder) if re.fullmatch("[0-9]{1,9}", path.name)]
    if len(numbers) > 4 * MAX_DEVICES:
        raise ConfigError(f"{folder}: found {len(numbers)} entries; expected at most {4 * MAX_DEVICES}")
    return sorted(numbers, key=lambda path: int(path.name))


def _properties(path: Path) -> dict[str, int] | None:
    """Parses lines of a name and a number; None if the file is empty or this process may not read it."""
    try:
        content = read_whole(path, _MAX_PAGE)
    except ConfigError:
        return None
    values: dict[str, int] = {}
    for place, line in enumerate(content.decode("ascii", "replace").splitlines(), start=1):
        if (found := _LINE.fullmatch(line.strip())) is None or found[1] in values:
            raise ConfigError(f"{path}:{place}: found {line[:40]!r}; expected a name, once, and a number from 0")
        values[found[1]] = int(found[2])
    return values or None


def _nics(sysfs: Path) -> tuple[Nic, ...]:
    """RDMA devices and Slingshot's interfaces; if there are none, Ethernet interfaces with a device."""
    fabric: list[Nic] = []
    ethernet: list[Nic] = []
    for folder in _entries(sysfs / "class/infiniband"):
        ports = _entries(folder / "ports")
        if ports and all(_number(port / "state") not in (None, _ACTIVE) for port in ports):
            continue  # it connects no ranks
        rates = [_number(port / "rate") or 0 for port in ports]  # "200 Gb/sec (4X HDR)"
        subnets = tuple(sorted({subnet for port in ports if (subnet := _subnet(port))}))
        fabric.append(Nic(folder.name, "rdma", max(rates, default=0) / 8 or None, subnets))
    for folder in _entries(sysfs / "class/net"):
        speed = _number(folder / "speed") or 0  # Mbit/s; an error or -1 if the link is down
        kind = "cxi" if folder.name.startswith("hsn") else "ethernet"
        if (folder / "device").exists():  # not loopback, bridges and virtual pairs
            (fabric if kind == "cxi" else ethernet).append(Nic(folder.name, kind, speed / 8000 if speed > 0 else None))
    return tuple(fabric or ethernet)


def _subnet(port: Path) -> str:
    """The network of an RDMA port; empty without a link, or if the kernel does not report it.

    InfiniBand: the subnet's prefix, with which GIDs begin, and the subnet manager's LID, since most subnets keep the default
    prefix. Both are equal on all ports of a subnet. RoCE is the network of Ethernet interfaces, since IP subnets are routed.
    """
    if _number(port / "state") not in (None, _ACTIVE):
        return ""
    infiniband = f"ib {_text(port / 'gids/0')[:19]} {_text(port / 'sm_lid')}"
    return {"InfiniBand": infiniband, "Ethernet": "ethernet"}.get(_text(port / "link_layer"), "")


def _text(path: Path) -> str:
    """The first 80 characters of a file of sysfs; empty if it cannot be read."""
    with contextlib.suppress(ConfigError):
        return read_whole(path, _MAX_PAGE).decode("ascii", "replace").strip()[:80]
    return ""


def _entries(folder: Path) -> list[Path]:
    """The sorted entries of a folder; empty if it cannot be listed."""
    with contextlib.suppress(OSError):
        return sorted(folder.iterdir())
    return []


def _number(path: Path) -> float | None:
    """The number at the beginning of a file of sysfs; None without one."""
    with contextlib.suppress(ConfigError):
        if found := re.match(rb"-?[0-9]{1,9}(\.[0-9]{1,3})?(?![0-9])", read_whole(path, _MAX_PAGE)):
            return float(found[0])
    return None


# ---- topology dumps of RCCL and NCCL, the XML of NCCL_TOPO_DUMP_FILE --------------------------------------------------------

# Source of the format: RCCL's and NCCL's src/graph/xml.cc and topo.cc, and RCCL's models (tools/topo_expl). PCI devices are
# nested below the CPU of a NUMA domain, as in the machine. ``gpu`` and ``nic`` are children of their PCI device. ``tclass`` is
# the PCI class of a link's target: 0x068000 is an NVSwitch, 0x068001 a CPU.

_NVSWITCH, _CPU = "0x068000", "0x068001"
_CRAY, _INFINIBAND = "0x17db", "0x0207"
#: Maximum number of parallel links. An MI300X has 7 links, and a GPU with NVSwitches 18.
_MAX_COUNT = 64
#: Older dumps have hipDeviceProp_t.gcnArch instead of a name with features.
_GCN = {"906": "gfx906", "908": "gfx908", "910": "gfx90a", "940": "gfx942"}


def read_dump(text: str, path: str) -> Node:
    """Reads the node in a dump. Devices keep the numbers of the dump.

    Args:
        text: Content of the file.
        path: Name of the file, for messages.

    Raises:
        ConfigError: The text is not a dump, is incomplete, has a DOCTYPE or entities, or contradicts itself.
    """
    if re.search("<!(DOCTYPE|ENTITY)", text):
        raise ConfigError(f"{path}: found a DOCTYPE or an entity; expected a topology dump, which has neither")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ConfigError(f"{path}: is not valid XML: {error}") from None
    if root.tag != "system" or root.get("version") not in ("1", "2"):
        raise ConfigError(f"{path}: found <{root.tag[:40]}>; expected system of version 1 or 2")
    devices: dict[str, Device] = {}  # by PCI bus id
    rates: dict[int, float | None] = {}  # of one link, by device
    links: list[tuple[int, Element]] = []
    nics: dict[str, Nic] = {}
    for cpu in root.iter("cpu"):
        for pci in (cpu, *cpu.iter("pci")):
            for gpu in pci.iterfind("gpu"):
                bus = bus_id(pci.get("busid", ""), f"{path}: pci of a gpu")
                if bus in devices or len(devices) >= MAX_DEVICES:
                    raise ConfigError(f"{path}: found PCI bus id {bus} twice, or more than {MAX_DEVICES} gpus")
                number, numa = _integer(gpu, "dev", path, 0, 2**20), _integer(cpu, "numaid", path, -1, 2**20, "-1")
                product = re.fullmatch("(0x)?[0-9a-fA-F]{1,8}", pci.get("device", ""))
                kind = PRODUCTS.get(int(product[0], 16) if product else 0, _architecture(gpu))
                devices[bus] = Device(number, bus, kind[:40], numa=numa if numa >= 0 else None)
                rates[number] = LINK_GB_S.get(_architecture(gpu))
                links += [(number, link) for link in gpu if link.tag in ("xgmi", "nvlink")]
            for net in pci.iterfind("nic/net"):
                name = net.get("name", "")[:80]  # NCCL lists a socket interface below every CPU
                speed = _integer(net, "speed", path, 0, 10**9, "0")  # Mbit/s
                nics[name] = Nic(name, _nic_kind(name, pci), speed / 8000 if speed else None)
    if (hosts := len({cpu.get("host_hash", "") for cpu in root.iter("cpu")})) > 1:
        raise ConfigError(f"{path}: found {hosts} hosts; expected a dump of one node")
    merged = merge_links(path, _links(links, devices, rates, path))
    return Node(path, tuple(devices.values()), merged, tuple(nics.values()))


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
                raise ConfigError(f"{path}: found a link to {target}; expected a gpu of this file, from all GPUs")
            yield _between(number, devices[target].number, link.tag, count, rates)
    for a, b in itertools.combinations(switched, 2):
        yield _between(a, b, "nvswitch", min(switched[a], switched[b]), rates)


def _between(a: int, b: int, kind: str, count: int, rates: dict[int, float | None]) -> Link:
    rate = rates[a] if rates[a] == rates[b] else None
    return Link(a, b, kind, count, rate * count if rate else None)


def _integer(element: Element, name: str, path: str, low: int, high: int, default: str = "") -> int:
    text = element.get(name, default).strip()
    if not re.fullmatch("-?[0-9]{1,12}", text) or not low <= int(text) <= high:
        raise ConfigError(f"{path}: {element.tag}: found {name}={text[:40]!r}; expected {low} to {high}")
    return int(text)


def _nic_kind(name: str, pci: Element) -> str:
    if name.startswith(("cxi", "hsn")) or pci.get("vendor") == _CRAY:
        return "cxi"
    return "ib" if pci.get("class", "").startswith(_INFINIBAND) else "ethernet"


# ---- declared files, YAML or JSON -------------------------------------------------------------------------------------------

Number = Annotated[int, Field(ge=0, lt=MAX_DEVICES)]
Text = Annotated[str, Field(max_length=100)]
Rate = Annotated[Quantity, Field(le=1e6)]
Pair = Annotated[list[Number], Field(min_length=2, max_length=2), AfterValidator(sorted)]


class DeclaredLinks(Frozen):
    """Pairs of devices with equal links; ``pairs`` None means all pairs."""

    kind: Literal["xgmi", "nvlink", "nvswitch", "pcie"] = "xgmi"
    count: Annotated[int, Field(ge=1, le=1000)] | None = None
    gb_s: Rate | None = None
    pairs: Annotated[list[Pair] | None, BeforeValidator(lambda value: None if value == "all" else value)]


class DeclaredNic(Frozen):
    """A NIC of a node."""

    name: Text
    kind: Text = ""
    gb_s: Rate | None = None


class DeclaredNode(Frozen):
    """The file of a node. The file of a grid has the keys of `hzero.config.TopologyConfig`.

    Only ``devices`` is required. ``packages`` or ``buses`` can give the number instead. ``null`` is an unknown value::

        name: my node
        kind: MI250X
        devices: 8
        packages: [[0, 1], [2, 3], [4, 5], [6, 7]]
        buses: ["0000:c1:00.0", ...]       # by device
        numa: [3, 3, 1, 1, 0, 0, 2, 2]     # domain, by device
        links:                             # gb_s: GB/s each way, of all parallel links of a pair together
          - {kind: xgmi, count: 4, gb_s: 200, pairs: [[0, 1], [2, 3]]}
          - {kind: nvswitch, pairs: all}   # every pair of devices
        nics:
          - {name: hsn0, kind: cxi, gb_s: 25}
        switch_nodes: 128                  # nodes of one switch group of the network
    """

    name: Text = ""
    kind: Text = ""
    devices: Annotated[int, Field(ge=0, le=MAX_DEVICES)] | None = None
    packages: list[list[Number]] | None = None
    buses: list[Annotated[str, AfterValidator(bus_id)]] | None = None
    numa: list[Number] | None = None
    links: Annotated[list[DeclaredLinks], Field(max_length=1000)] = []
    nics: list[DeclaredNic] = []
    switch_nodes: Annotated[int, Field(ge=1)] | None = None


def read_declared(text: str, path: str, source: str = "") -> Node | TopologyConfig:
    """Reads the node or the grid that a file declares.

    Args:
        text: Content of the file.
        path: Name of the file, for messages.
        source: Name of the machine; empty: the path.

    Raises:
        ConfigError: A value is wrong, or a key is unknown, for example a key of a node in a grid.
    """
    content = _load(text, path)
    if set(content) & (set(TopologyConfig.model_fields) - set(DeclaredNode.model_fields)):
        content.pop("bandwidth_gb_s", None)  # files of conf/topology have it, for plans
        grid = validated(TopologyConfig, content, f"{path}:")
        if grid.packages_per_node is None:
            raise ConfigError(f"{path}: packages_per_node: missing")
        return grid
    declared = validated(DeclaredNode, content, f"{path}:")
    counts = [len(declared.buses or []), sum(map(len, declared.packages or [])), len(declared.numa or [])]
    count = max(counts) if declared.devices is None else declared.devices
    if declared.devices is None and not 0 < count <= MAX_DEVICES:
        raise ConfigError(f"{path}: devices: missing; expected their number, at most {MAX_DEVICES}")
    for key, values in (("buses", declared.buses), ("numa", declared.numa)):
        if values is not None and len(values) != count:
            raise ConfigError(f"{path}: {key}: found {len(values)}; expected one for each of {count} devices")
    links: list[Link] = []
    for group in declared.links:
        if len(links) > count**2:
            break  # enough: `Node` refuses pairs that occur twice
        pairs = itertools.combinations(range(count), 2) if group.pairs is None else map(tuple, group.pairs)
        links += [Link(a, b, group.kind, group.count, group.gb_s) for a, b in pairs]
    buses = declared.buses or [""] * count
    numa: Sequence[int | None] = declared.numa or [None] * count
    return Node(
        source or (f"{path} ({declared.name})" if declared.name else path),
        tuple(Device(number, buses[number], declared.kind, numa=numa[number]) for number in range(count)),
        tuple(links),
        tuple(Nic(nic.name, nic.kind, nic.gb_s) for nic in declared.nics),
        None if declared.packages is None else tuple(map(tuple, declared.packages)),
        switch_nodes=declared.switch_nodes,
    )


def _load(text: str, path: str) -> dict[str, Any]:
    """Loads the keys of a file, or of its block ``topology``, without keys whose value is ``null``.

    Raises:
        ConfigError: The file is neither YAML nor JSON, has a key twice or a reference, or no key of a declared machine.
    """
    if len(text) > _MAX_DECLARED:
        raise ConfigError(f"{path}: larger than {_MAX_DECLARED:,} bytes, the limit")
    try:
        # JSON allows tabs between tokens, YAML does not.
        content = yaml.load(text.replace("\t", " ") if text.lstrip().startswith("{") else text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "problem", None) or error
        raise ConfigError(f"{path}: {line}is neither YAML nor JSON that can be used: {problem!s:.200}") from None
    if isinstance(content, dict) and set(content) == {"topology"}:
        content = content["topology"]
    known = {*DeclaredNode.model_fields, *TopologyConfig.model_fields}
    if not isinstance(content, dict) or not any(nearest(key, known, 0.45) for key in content):
        raise ConfigError(
            f"{path}: found no known kind of file; expected an XML dump of RCCL or NCCL (NCCL_TOPO_DUMP_FILE), a declared "
            "machine (YAML or JSON), or a folder with class/kfd (/sys or a copy of it)"
        )
    return content


class _Loader(yaml.SafeLoader):
    """YAML without references, which can turn a small file into a huge machine, and without repeated keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if getattr(event, "anchor", None) is not None:  # also set for an alias
            raise yaml.MarkedYAMLError(
                problem="found a reference (& or *); write it out", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise yaml.MarkedYAMLError(problem="a key occurs twice", problem_mark=node.start_mark)
        return {key: value for key, value in mapping.items() if value is not None}
