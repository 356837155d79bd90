"""The kernel's KFD topology: ``/sys/class/kfd/kfd/topology/nodes``, which ROCr itself reads.

It is the first source of a live AMD node: it needs no job and no tool, counts parallel links by their bandwidth, and shows
the devices that a task's cgroup hides. rocm-smi and amdsmi read the same files.

Source of the conventions: the Linux kernel's amdkfd (kfd_topology.c: node_show, iolink_show and kfd_topology_add_device;
kfd_crat.h for the link types; kfd_crat.c, kfd_fill_gpu_xgmi_link_to_gpu, for weights) and amdgpu
(amdgpu_xgmi_get_bandwidth). A node is a CPU or a GPU; it is a GPU where it has SIMDs. A process that a device cgroup keeps
from a GPU gets EPERM from the files of its node, so that ROCr does not count it either. A hop weighs 15, a pair of
partitions of one module 13. The minimum bandwidth is that of one link, the maximum that of all links to the peer, in MB/s;
both are 0 where a pair is routed, and for all pairs of MI100 and of drivers before Linux 5.15.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from hzero.topology.machine import MAX_DEVICES, PRODUCTS, Device, Link, Machine, merge_links
from hzero.topology.readers.nearest import nearest, numa_of, pci_path, read_nics
from hzero.topology.readers.source import integer, read_bytes
from hzero.validation import ConfigError

NODES = Path("class/kfd/kfd/topology/nodes")

#: Values of ``type`` in io_links.
_PCIE, _XGMI = 2, 11
#: Weights of two hops, of a link inside a module (KFD_CRAT_INTRA_SOCKET_WEIGHT), and of one between partitions of two
#: modules (RCCL's rocm_smi_wrap.cc takes 13, 15 and 41 to be direct).
_ROUTED, _SAME_MODULE, _PARTITIONS = 30, 13, 41
#: Largest number of parallel links of a pair; an MI300X has 7 in all.
_MAX_COUNT = 64
#: A file of sysfs has at most a page.
_MAX_BYTES = 65536
_MAX_NODES = 4 * MAX_DEVICES
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True)
class _Node:
    number: int
    folder: Path
    properties: dict[str, int]

    @property
    def function(self) -> str:
        """PCI bus id of the function that the driver is bound to."""
        where = self.folder / "properties"
        location = self.properties.get("location_id", 0)
        if location >= 2**32 or location >> 16 & 0xFFF or self.properties.get("domain", 0) >= 2**32:
            raise ConfigError(f"{where}: found location_id {location}, expected partition << 28 | bus << 8 | function")
        domain, bus, slot = self.properties.get("domain", 0), location >> 8 & 0xFF, location >> 3 & 0x1F
        return f"{domain:04x}:{bus:02x}:{slot:02x}.{location & 7}"

    @property
    def bus(self) -> str:
        """PCI bus id of its own: partitions of a module differ in the function, as HIP counts them."""
        partition = self.properties.get("location_id", 0) >> 28
        return f"{self.function[:-1]}{partition & 7}" if partition else self.function


def read(sysfs: Path = Path("/sys")) -> Machine:
    """The GPUs of this node, their links and its NICs.

    Devices that the process may use are numbered in the order of their KFD nodes, which is ROCr's and, where nothing else
    hides devices, HIP's. Those that it may not use follow, as hidden ones: the links of the others lead to them.

    Args:
        sysfs: Root of sysfs, or of a copy of it.

    Returns:
        The node; without devices, and with a remark, if KFD's topology is missing.

    Raises:
        ConfigError: The folder is missing, or the files contradict each other.
    """
    root = sysfs / NODES
    if not os.path.isdir(sysfs):
        raise ConfigError(f"{sysfs}: is no folder, expected /sys or a copy of it")
    placed, left_out = read_nics(sysfs)
    nics = tuple(nic for nic, _ in placed)
    if not os.path.isdir(root):
        remark = "no KFD topology: no AMD GPU, or its driver is not loaded"
        return Machine(str(root), (), nics=nics, remarks=(remark, *left_out))
    remarks: list[str] = []
    hidden: list[int] = []
    gpus: list[_Node] = []
    nodes = dict(_numbered(root))
    for number, folder in nodes.items():
        properties = _properties(folder / "properties", remarks, f"KFD node {number}")
        if properties is None:
            hidden.append(number)
        elif properties.get("simd_count", 0) > 0:
            gpus.append(_Node(number, folder, properties))
    index = {number: position for position, number in enumerate([*(gpu.number for gpu in gpus), *hidden])}
    links: list[Link] = []
    partitioned = False
    for gpu in gpus:
        found, same_module = _links(gpu, index, nodes, remarks)
        links += found
        partitioned |= same_module
    devices = []
    for gpu in gpus:
        folder = sysfs / "bus/pci/devices" / gpu.function
        numa, unique_id = numa_of(folder), gpu.properties.get("unique_id", 0)
        devices.append(
            Device(
                number=index[gpu.number],
                bus=gpu.bus,
                kind=_kind(gpu.properties),
                module=gpu.function[:-2] if partitioned else "",
                numa=numa,
                nic=nearest(pci_path(folder), numa, placed),
                uuid=f"GPU-{unique_id:016x}" if unique_id else "",  # as ROCR_VISIBLE_DEVICES takes it
                node=f"kfd{gpu.number}",
            )
        )
    devices += [Device(index[number], node=f"kfd{number}", hidden=True) for number in hidden]
    merged = merge_links(str(root), links)
    return Machine(str(root), tuple(devices), merged, nics, remarks=(*remarks, *left_out))


def _links(gpu: _Node, index: dict[int, int], nodes: Container[int], remarks: list[str]) -> tuple[list[Link], bool]:
    """Links of a GPU to others, and whether one stays inside a module."""
    links: list[Link] = []
    same_module = False
    folders = gpu.folder / "io_links"
    for number, folder in _numbered(folders) if os.path.isdir(folders) else ():
        path = folder / "properties"
        link = _properties(path, remarks, f"link {number} of KFD node {gpu.number}")
        if link is None:
            continue
        start, end = link.get("node_from", gpu.number), link.get("node_to", -1)
        if start != gpu.number:
            raise ConfigError(f"{path}: found node_from {start}, expected {gpu.number}")
        if end not in nodes:
            raise ConfigError(f"{path}: leads to KFD node {end}, which is not there")
        if end == gpu.number:
            raise ConfigError(f"{path}: KFD node {end} is linked to itself")
        if end not in index:
            continue  # a CPU
        a, b = sorted((index[gpu.number], index[end]))
        low, high = link.get("min_bandwidth", 0), link.get("max_bandwidth", 0)
        if link.get("type") == _XGMI:
            weight = link.get("weight", 0)
            # The first drivers that count links give a routed pair the minimum of one link.
            if (weight >= _ROUTED and weight != _PARTITIONS) or (low and not high):
                continue
            if high and (not low or high % low or high // low > _MAX_COUNT):
                raise ConfigError(
                    f"{path}: found min_bandwidth {low} and max_bandwidth {high} MB/s, expected those of one link and of all"
                )
            count, gb_s = (high // low, high / 1000) if high else (None, None)
            links.append(Link(a, b, "xgmi", count, gb_s))
            same_module |= weight == _SAME_MODULE
        elif link.get("type") == _PCIE:
            links.append(Link(a, b, "pcie", gb_s=high / 1000 if high else None))
    return links, same_module


def _kind(properties: dict[str, int]) -> str:
    """Product where it is known, else the architecture: 90010 is gfx90a."""
    version = properties.get("gfx_target_version", 0)
    architecture = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""
    return PRODUCTS.get(properties.get("device_id", 0), architecture)


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Entries of a folder that are named by a number, in their order."""
    try:
        entries = [(int(path.name), path) for path in folder.iterdir() if _NUMBER.fullmatch(path.name)]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{folder}: cannot be listed ({reason.lower()})") from None
    if len(entries) > _MAX_NODES:
        raise ConfigError(f"{folder}: {len(entries)} entries, at most {_MAX_NODES} are read")
    return sorted(entries)


def _properties(path: Path, remarks: list[str], what: str) -> dict[str, int] | None:
    """Lines of a name and a number; None with a remark where the file cannot be read or is empty."""
    try:
        content = read_bytes(path, _MAX_BYTES + 1)
    except OSError as error:
        remarks.append(f"{what} cannot be read ({(error.strerror or 'error').lower()})")
        return None
    if not content.strip():
        remarks.append(f"{what} is empty")
        return None
    if len(content) > _MAX_BYTES or not content.isascii():
        raise ConfigError(f"{path}: expected at most {_MAX_BYTES} bytes of ASCII")
    properties: dict[str, int] = {}
    for number, line in enumerate(content.decode("ascii").splitlines(), start=1):
        words = line.split()
        if len(words) != 2:
            raise ConfigError(f"{path}:{number}: found {line[:40]!r}, expected a name and a number")
        if words[0] in properties:
            raise ConfigError(f"{path}:{number}: {words[0][:40]} occurs twice")
        properties[words[0]] = integer(words[1], f"{path}:{number}", words[0][:40], 0, 2**64 - 1)
    return properties
