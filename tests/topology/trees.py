"""Sysfs trees of pretended nodes: KFD's topology, the PCI devices' NUMA domains and the NICs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

#: Links between the GCDs of a Frontier node (OLCF user guide).
FRONTIER_LINKS = {
    **dict.fromkeys([(0, 1), (2, 3), (4, 5), (6, 7)], 4),
    **dict.fromkeys([(0, 6), (2, 4)], 2),
    **dict.fromkeys([(0, 2), (1, 3), (1, 5), (3, 7), (4, 6), (5, 7)], 1),
}
FRONTIER_BUSES = ("c1", "c6", "c9", "ce", "d1", "d6", "d9", "de")
#: NUMA domain of each package.
_FRONTIER_NUMA = (3, 1, 0, 2)


class Gpu(NamedTuple):
    """A GPU to write: ``device`` is its PCI device id, ``target`` its gfx_target_version."""

    bus: str
    numa: int = 0
    device: int = 0x740C
    target: int = 90010
    unique_id: int = 0


def write_kfd(
    root: Path,
    gpus: Sequence[Gpu],
    links: Mapping[tuple[int, int], int] | None = None,
    nics: Mapping[str, int] | None = None,
    cpus: int = 1,
    unreadable: Collection[int] = (),
    link_mb_s: int = 50_000,
) -> Path:
    """Writes a node below ``root``, which represents /sys, and returns it.

    Args:
        root: What stands for /sys.
        gpus: In the order of their KFD nodes, which follow those of the CPUs.
        links: Number of xGMI links by pairs of indices into ``gpus``. Where there are any, all other pairs are routed.
        nics: Mbit/s by name; ``mlx5_*`` are RDMA devices, ``lo`` has no device.
        cpus: How many CPU nodes stand first.
        unreadable: Indices of GPUs whose files give an error, as those outside a task's cgroup do.
        link_mb_s: Bandwidth of a link; 0 as older drivers write it.
    """
    nodes = root / "class/kfd/kfd/topology/nodes"
    for cpu in range(cpus):
        _write(nodes / f"{cpu}/properties", {"cpu_cores_count": 64, "simd_count": 0, "location_id": 0})
    for index, gpu in enumerate(gpus):
        node = nodes / str(cpus + index)
        properties = {
            "cpu_cores_count": 0,
            "simd_count": 440,
            "gfx_target_version": gpu.target,
            "device_id": gpu.device,
        }
        properties |= {"location_id": int(gpu.bus, 16) << 8, "domain": 0, "unique_id": gpu.unique_id}
        if index in unreadable:
            node.mkdir(parents=True)
            (node / "properties").symlink_to("properties")  # fails for every user, root too
        else:
            _write(node / "properties", properties)
        _write(node / "io_links/0/properties", {"type": 2, "node_to": 0, "weight": 20, "max_bandwidth": 32_000})
        others = [other for other in range(len(gpus)) if other != index and links]
        for number, other in enumerate(others, start=1):
            count = next((n for pair, n in (links or {}).items() if {*pair} == {index, other}), 0)
            link = {"type": 11, "node_from": cpus + index, "node_to": cpus + other, "weight": 15 if count else 30}
            link |= {"min_bandwidth": link_mb_s if count else 0, "max_bandwidth": link_mb_s * count}
            _write(node / f"io_links/{number}/properties", link)
        _write(root / f"bus/pci/devices/0000:{gpu.bus}:00.0/numa_node", str(gpu.numa))
    for name, mbit_s in (nics or {}).items():
        if name.startswith("mlx5"):
            _write(root / f"class/infiniband/{name}/ports/1/rate", f"{mbit_s // 1000} Gb/sec (4X)")
        else:
            _write(root / f"class/net/{name}/speed", str(mbit_s))
            if name != "lo":
                _write(root / f"class/net/{name}/device", "")
    return root


def frontier(
    root: Path,
    order: Sequence[int] = range(8),
    missing: Collection[int] = (),
    unreadable: Collection[int] = (),
    link_mb_s: int = 50_000,
) -> Path:
    """A Frontier node: 4 MI250X and 4 Slingshot NICs.

    Args:
        root: What stands for /sys.
        order: GCDs by device number; OLCF's own is 0 to 7.
        missing: GCDs that are not there.
        unreadable: GCDs that the process may not use.
        link_mb_s: Bandwidth of a link; 0 as older drivers write it.
    """
    gcds = [gcd for gcd in order if gcd not in missing]
    gpus = [Gpu(FRONTIER_BUSES[gcd], _FRONTIER_NUMA[gcd // 2], unique_id=0xF00 + gcd) for gcd in gcds]
    index = {gcd: position for position, gcd in enumerate(gcds)}
    links = {(index[a], index[b]): count for (a, b), count in FRONTIER_LINKS.items() if a in index and b in index}
    nics = {**{f"hsn{package}": 200_000 for package in range(4)}, "lo": 0}
    hidden = {index[gcd] for gcd in unreadable}
    return write_kfd(root, gpus, links, nics, cpus=4, unreadable=hidden, link_mb_s=link_mb_s)


def connect(root: Path, nic: str, layer: str, subnet: int = 0, manager: int = 1, port: int = 1) -> None:
    """Gives an RDMA device of a tree a port that is on a network, or, with an empty ``layer``, one that is down."""
    folder = root / f"class/infiniband/{nic}/ports/{port}"
    _write(folder / "state", "4: ACTIVE" if layer else "1: DOWN")
    _write(folder / "link_layer", layer or "InfiniBand")
    _write(folder / "gids/0", f"fe80:0000:0000:{subnet:04x}:e41d:2d03:{port:04x}:{crc32(bytes(root)) % 2**16:04x}")
    _write(folder / "sm_lid", f"{manager:#x}")


def _write(path: Path, content: str | Mapping[str, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = content if isinstance(content, str) else "\n".join(f"{name} {value}" for name, value in content.items())
    path.write_text(f"{lines}\n")
