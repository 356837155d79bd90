"""KFD's topology in sysfs, ``/sys/class/kfd/kfd/topology/nodes``, which ROCr itself reads; and the NICs of the node.

It is the first source of a live AMD node: it needs no job and no tool, counts parallel links by their bandwidth, and shows
the devices that a task's cgroup hides. rocm-smi and amdsmi read the same files.

Source of the conventions: the Linux kernel's amdkfd (kfd_topology.c: node_show, iolink_show and kfd_topology_add_device;
kfd_crat.h for the link types; kfd_crat.c, kfd_fill_gpu_xgmi_link_to_gpu, for weights) and amdgpu
(amdgpu_xgmi_get_bandwidth). A node is a CPU or a GPU; it is a GPU where it has SIMDs. A process that a device cgroup keeps
from a GPU gets EPERM from the files of its node, so that ROCr does not count it either. A hop weighs 15, a pair of
partitions of one module 13. The minimum bandwidth counts one link, the maximum all links to the peer, in MB/s;
both are 0 where a pair is routed, and for all pairs of MI100 and of drivers before Linux 5.15.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from hzero.files import read_whole
from hzero.topology.machine import MAX_DEVICES, PRODUCTS, Device, Link, Machine, Nic, merge_links
from hzero.validation import ConfigError

NODES = Path("class/kfd/kfd/topology/nodes")

#: Values of ``type`` in io_links.
_PCIE, _XGMI = 2, 11
#: Weights of two hops, of a link inside a module (KFD_CRAT_INTRA_SOCKET_WEIGHT), and of one between partitions of two
#: modules (RCCL's rocm_smi_wrap.cc takes 13, 15 and 41 to be direct).
_ROUTED, _SAME_MODULE, _PARTITIONS = 30, 13, 41
#: A file of sysfs has at most a page.
_MAX_BYTES = 65536
_LINE = re.compile(r"([a-z0-9_]{1,40}) ([0-9]{1,20})")


def read_sysfs(sysfs: Path = Path("/sys")) -> Machine:
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
    if not sysfs.is_dir():
        raise ConfigError(f"{sysfs}: is no folder, expected /sys or a copy of it")
    if not root.is_dir():
        remark = "no KFD topology: no AMD GPU, or its driver is not loaded"
        return Machine(str(root), (), nics=_nics(sysfs), remarks=(remark,))
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
                raise ConfigError(f"{path}: leads to KFD node {end}, which is not there")
            if end in index and (found := _link(index[number], index[end], values, path)) is not None:
                links.append(found)
                partitioned |= found.kind == "xgmi" and values.get("weight") == _SAME_MODULE
    devices = [_device(index[number], number, values, sysfs, partitioned) for number, values in gpus.items()]
    devices += [Device(index[number], node=f"kfd{number}", hidden=True) for number in hidden]
    remarks = tuple(f"KFD node {number} cannot be read by this process" for number in hidden)
    return Machine(str(root), tuple(devices), merge_links(str(root), links), _nics(sysfs), remarks=remarks)


def _link(start: int, end: int, values: dict[str, int], path: Path) -> Link | None:
    """The links between two devices; None where the pair is routed."""
    low, high, weight = (values.get(key, 0) for key in ("min_bandwidth", "max_bandwidth", "weight"))
    if values.get("type") == _PCIE:
        return Link(start, end, "pcie", gb_s=high / 1000 if high else None)
    # The first drivers that count links give a routed pair the minimum of one link.
    if values.get("type") != _XGMI or (weight >= _ROUTED and weight != _PARTITIONS) or (low and not high):
        return None
    return Link(start, end, "xgmi", high // low if high and low else None, high / 1000 if high else None)


def _device(index: int, number: int, values: dict[str, int], sysfs: Path, partitioned: bool) -> Device:
    location, domain, version = (values.get(key, 0) for key in ("location_id", "domain", "gfx_target_version"))
    slot = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"
    function = f"{slot}.{location & 7}"  # that the driver is bound to
    # 90010 is gfx90a
    architecture = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else ""
    numa = _number(sysfs / "bus/pci/devices" / function / "numa_node")
    unique_id = values.get("unique_id", 0)
    return Device(
        index,
        bus=f"{slot}.{location >> 28 & 7}" if location >> 28 else function,  # HIP counts partitions as functions
        kind=PRODUCTS.get(values.get("device_id", 0), architecture),
        module=slot if partitioned else "",
        numa=None if numa is None or numa < 0 else int(numa),
        uuid=f"GPU-{unique_id:016x}" if unique_id else "",  # as ROCR_VISIBLE_DEVICES takes it
        node=f"kfd{number}",
    )


def _numbered(folder: Path) -> list[Path]:
    """Entries of a folder that are named by a number, in their order."""
    numbers = [path for path in _entries(folder) if re.fullmatch("[0-9]{1,9}", path.name)]
    if len(numbers) > 4 * MAX_DEVICES:
        raise ConfigError(f"{folder}: {len(numbers)} entries, at most {4 * MAX_DEVICES} are read")
    return sorted(numbers, key=lambda path: int(path.name))


def _properties(path: Path) -> dict[str, int] | None:
    """Lines of a name and a number; None where this process may not read them, or there are none."""
    try:
        content = read_whole(path, _MAX_BYTES)
    except ConfigError:
        return None
    values: dict[str, int] = {}
    for place, line in enumerate(content.decode("ascii", "replace").splitlines(), start=1):
        found = _LINE.fullmatch(line.strip())
        if found is None or found[1] in values:
            raise ConfigError(f"{path}:{place}: found {line[:40]!r}, expected a name, once, and a number from 0")
        values[found[1]] = int(found[2])
    return values or None


def _nics(sysfs: Path) -> tuple[Nic, ...]:
    """NICs of the fabric: RDMA devices and Slingshot's interfaces; where there are none, Ethernet interfaces with a device."""
    fabric: list[Nic] = []
    ethernet: list[Nic] = []
    for folder in _entries(sysfs / "class/infiniband"):
        rates = [_number(port / "rate") or 0 for port in _entries(folder / "ports")]  # "200 Gb/sec (4X HDR)"
        fabric.append(Nic(folder.name, "rdma", max(rates, default=0) / 8 or None))
    for folder in _entries(sysfs / "class/net"):
        speed = _number(folder / "speed") or 0  # Mbit/s; an error or -1 where the link is down
        kind = "cxi" if folder.name.startswith("hsn") else "ethernet"
        if (folder / "device").exists():  # not loopback, bridges and virtual pairs
            (fabric if kind == "cxi" else ethernet).append(Nic(folder.name, kind, speed / 8000 if speed > 0 else None))
    return tuple(fabric or ethernet)


def _entries(folder: Path) -> list[Path]:
    """What a folder holds; nothing where it cannot be listed."""
    with contextlib.suppress(OSError):
        return sorted(folder.iterdir())
    return []


def _number(path: Path) -> float | None:
    """The number at the beginning of a file of sysfs."""
    with contextlib.suppress(ConfigError):
        if found := re.match(rb"-?[0-9]{1,9}(\.[0-9]{1,3})?(?![0-9])", read_whole(path, _MAX_BYTES)):
            return float(found[0])
    return None
