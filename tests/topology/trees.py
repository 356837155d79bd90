"""Sysfs trees of pretended nodes: KFD's topology, the PCI tree and the NICs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Links between the GCDs of a Frontier node (OLCF user guide).
FRONTIER_LINKS = {
    **dict.fromkeys([(0, 1), (2, 3), (4, 5), (6, 7)], 4),
    **dict.fromkeys([(0, 6), (2, 4)], 2),
    **dict.fromkeys([(0, 2), (1, 3), (1, 5), (3, 7), (4, 6), (5, 7)], 1),
}
FRONTIER_BUSES = ("c1", "c6", "c9", "ce", "d1", "d6", "d9", "de")
#: NUMA domain and PCI host bridge of each package.
_FRONTIER_NUMA, _FRONTIER_BRIDGES = (3, 1, 0, 2), ("c0", "c8", "d0", "d8")


@dataclass(frozen=True)
class Gpu:
    """A GPU to write: ``device`` is its PCI device id, ``target`` its gfx_target_version."""

    bus: str
    bridge: str
    numa: int = 0
    device: int = 0x740C
    target: int = 90010
    unique_id: int = 0


@dataclass(frozen=True)
class Interface:
    """A network interface to write; without a bus it is virtual. ``rdma`` names the RDMA device of the same function."""

    name: str
    bus: str = ""
    bridge: str = ""
    numa: int = 0
    mbit_s: int = 200_000
    rdma: str = ""


def write_kfd(
    root: Path,
    gpus: Sequence[Gpu],
    links: Mapping[tuple[int, int], int] | None = None,
    interfaces: Sequence[Interface] = (),
    cpus: int = 1,
    unreadable: Collection[int] = (),
    link_mb_s: int = 50_000,
) -> Path:
    """Writes a node below ``root`` and returns it.

    Args:
        root: What stands for /sys.
        gpus: In the order of their KFD nodes, which follow those of the CPUs.
        links: Number of xGMI links by pairs of indices into ``gpus``. Where there are any, all other pairs are routed.
        interfaces: Of the network.
        cpus: How many CPU nodes stand first.
        unreadable: Indices of GPUs whose files give an error, as those outside a task's cgroup do.
        link_mb_s: Bandwidth of a link; 0 as older drivers write it.
    """
    nodes = root / "class/kfd/kfd/topology/nodes"
    nodes.mkdir(parents=True)
    for cpu in range(cpus):
        _write(nodes / str(cpu) / "properties", {"cpu_cores_count": 64, "simd_count": 0, "location_id": 0})
        _write(nodes / str(cpu) / "gpu_id", "0")
    counts = {tuple(sorted(pair)): count for pair, count in (links or {}).items()}
    for index, gpu in enumerate(gpus):
        node = nodes / str(cpus + index)
        location = int(gpu.bus, 16) << 8
        properties = {"cpu_cores_count": 0, "simd_count": 440, "gfx_target_version": gpu.target, "vendor_id": 4098}
        properties |= {"device_id": gpu.device, "location_id": location, "domain": 0, "unique_id": gpu.unique_id}
        if index in unreadable:
            node.mkdir()
            (node / "properties").symlink_to("properties")  # fails for every user, root too
        else:
            _write(node / "properties", properties)
        _write(node / "gpu_id", str(1000 + index))
        to_cpu = {"type": 2, "node_from": cpus + index, "node_to": 0, "weight": 20, "max_bandwidth": 32_000}
        _write(node / "io_links/0/properties", to_cpu)
        others = [other for other in range(len(gpus)) if other != index and counts]
        for number, other in enumerate(others, start=1):
            count = counts.get(tuple(sorted((index, other))), 0)
            link = {"type": 11, "node_from": cpus + index, "node_to": cpus + other, "weight": 15 if count else 30}
            link |= {"min_bandwidth": link_mb_s if count else 0, "max_bandwidth": link_mb_s * count}
            _write(node / f"io_links/{number}/properties", link)
        _pci(root, gpu.bridge, gpu.bus, gpu.numa)
    for interface in interfaces:
        _interface(root, interface)
    return root


def frontier(
    root: Path,
    order: Sequence[int] = range(8),
    missing: Collection[int] = (),
    unreadable: Collection[int] = (),
    link_mb_s: int = 50_000,
) -> Path:
    """A Frontier node: 4 MI250X, 4 Slingshot NICs, one below the host bridge of each package.

    Args:
        root: What stands for /sys.
        order: GCDs by device number; OLCF's own is 0 to 7.
        missing: GCDs that are not there.
        unreadable: GCDs that the process may not use.
        link_mb_s: Bandwidth of a link; 0 as older drivers write it.
    """
    gcds = [gcd for gcd in order if gcd not in missing]
    gpus = [
        Gpu(FRONTIER_BUSES[gcd], _FRONTIER_BRIDGES[gcd // 2], _FRONTIER_NUMA[gcd // 2], unique_id=0xF00 + gcd)
        for gcd in gcds
    ]
    index = {gcd: position for position, gcd in enumerate(gcds)}
    links = {(index[a], index[b]): count for (a, b), count in FRONTIER_LINKS.items() if a in index and b in index}
    nics = [
        Interface(f"hsn{package}", f"{int(bridge, 16) + 3:02x}", bridge, _FRONTIER_NUMA[package])
        for package, bridge in enumerate(_FRONTIER_BRIDGES)
    ]
    hidden = {index[gcd] for gcd in unreadable}
    return write_kfd(root, gpus, links, [*nics, Interface("lo")], cpus=4, unreadable=hidden, link_mb_s=link_mb_s)


def one_gpu(root: Path) -> Path:
    """A node of one MI210 and one Ethernet interface."""
    return write_kfd(root, [Gpu("03", "00", device=0x740F)], interfaces=[Interface("eno1", "05", "00", mbit_s=1000)])


def no_gpu(root: Path) -> Path:
    """A node of CPUs alone."""
    return write_kfd(root, [], cpus=2)


def _pci(root: Path, bridge: str, bus: str, numa: int) -> Path:
    """The folder of a PCI device below a port of a host bridge."""
    device = root / f"devices/pci0000:{bridge}/0000:{bridge}:{int(bus, 16) % 32:02x}.1/0000:{bus}:00.0"
    _write(device / "numa_node", str(numa))
    link = root / f"bus/pci/devices/0000:{bus}:00.0"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(device)
    return device


def _interface(root: Path, interface: Interface) -> None:
    folder = root / "class/net" / interface.name
    _write(folder / "speed", str(interface.mbit_s))
    if not interface.bus:
        return
    device = _pci(root, interface.bridge, interface.bus, interface.numa)
    (folder / "device").symlink_to(device)
    if interface.rdma:
        rdma = root / "class/infiniband" / interface.rdma
        _write(rdma / "ports/1/rate", f"{interface.mbit_s // 1000} Gb/sec (4X)")
        _write(rdma / "ports/1/link_layer", "InfiniBand")
        (rdma / "device").symlink_to(device)


def _write(path: Path, content: str | Mapping[str, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = content if isinstance(content, str) else "\n".join(f"{name} {value}" for name, value in content.items())
    path.write_text(f"{lines}\n")
