"""NUMA domains and NICs of a node from sysfs, and the NIC nearest to a device by the PCI tree."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hzero.topology.machine import Nic
from hzero.topology.readers.source import read_bytes

_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_MAX_INTERFACES = 1024


@dataclass(frozen=True)
class Nics:
    """NICs of a node with their places.

    Attributes:
        nics: Sorted by name.
        paths: PCI path of each by its name, root first.
        remarks: What was left out.
    """

    nics: tuple[Nic, ...] = ()
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def nearest(self, path: Sequence[str], numa: int | None) -> str:
        """Name of the nearest NIC; empty where several are equally near."""
        return nearest(path, numa, [(nic, self.paths[nic.name]) for nic in self.nics])


def nearest(path: Sequence[str], numa: int | None, nics: Iterable[tuple[Nic, Sequence[str]]]) -> str:
    """Name of the NIC that shares most of a device's PCI path; of several the one in the same NUMA domain.

    Args:
        path: Of the device, root first.
        numa: Of the device.
        nics: Each NIC with its path.

    Returns:
        The name; empty where there is no NIC, or where several are equally near.
    """
    shared = {nic.name: (_shared(path, other), nic.numa) for nic, other in nics}
    most = max((length for length, _ in shared.values()), default=0)
    near = {name: domain for name, (length, domain) in shared.items() if length == most}
    if len(near) > 1 and numa is not None:
        near = {name: domain for name, domain in near.items() if domain == numa}
    return next(iter(near)) if len(near) == 1 else ""


def read_nics(sysfs: Path) -> Nics:
    """NICs with a device behind them: not loopback, bridges or virtual pairs.

    An RDMA device and the network interface of the same PCI function are one NIC, under the RDMA device's name, which is
    also the name in NCCL's dumps. Where a node has fabric NICs (cxi, or RDMA devices), its plain Ethernet interfaces are
    left out with a remark: training does not run over them.
    """
    found: dict[str, tuple[Nic, tuple[str, ...], bool]] = {}
    for folder in ("infiniband", "net"):
        for interface in _entries(sysfs / "class" / folder):
            path = pci_path(interface / "device")
            if not path or path[-1] in found:
                continue
            nic = _rdma(interface, path[-1]) if folder == "infiniband" else _interface(interface, path[-1])
            found[path[-1]] = (nic, path, folder == "infiniband" or nic.kind == "cxi")
    fabric = any(is_fabric for _, _, is_fabric in found.values())
    kept = sorted(((nic, path) for nic, path, is_fabric in found.values() if is_fabric or not fabric), key=_by_name)
    left_out = sorted(nic.name for nic, _, is_fabric in found.values() if fabric and not is_fabric)
    remarks = [f"{name}: Ethernet, left out beside the fabric's NICs" for name in left_out]
    return Nics(tuple(nic for nic, _ in kept), {nic.name: path for nic, path in kept}, tuple(remarks))


def numa_of(device: Path) -> int | None:
    """NUMA domain of a PCI device's folder; None where the kernel does not know it."""
    value = _number(device / "numa_node")
    return int(value) if value is not None and value >= 0 else None


def pci_path(device: Path) -> tuple[str, ...]:
    """PCI path of a device, from its host bridge to itself; empty where it is no PCI device."""
    try:
        parts = device.resolve(strict=True).parts
    except (OSError, RuntimeError):  # the latter: a cyclic link, before Python 3.13
        return ()
    path = [part for part in parts if _PCI.fullmatch(part) or _HOST_BRIDGE.fullmatch(part)]
    return tuple(path) if path and _PCI.fullmatch(path[-1]) else ()


def _interface(folder: Path, bus: str) -> Nic:
    speed = _number(folder / "speed")  # Mbit/s; an error or -1 where the link is down
    cxi = folder.name.startswith("hsn") or _driver(folder / "device").startswith("cxi")
    gb_s = speed / 8000 if speed is not None and speed > 0 else None
    return Nic(folder.name, bus, "cxi" if cxi else "ethernet", gb_s, numa_of(folder / "device"))


def _rdma(folder: Path, bus: str) -> Nic:
    ports = _entries(folder / "ports")
    speed = _number(ports[0] / "rate") if ports else None  # "200 Gb/sec (4X HDR)"
    layer = _text(ports[0] / "link_layer") if ports else ""
    gb_s = speed / 8 if speed is not None and speed > 0 else None
    return Nic(folder.name, bus, "ethernet" if layer == "Ethernet" else "ib", gb_s, numa_of(folder / "device"))


def _shared(one: Sequence[str], other: Sequence[str]) -> int:
    length = 0
    for left, right in zip(one, other):
        if left != right:
            break
        length += 1
    return length


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda path: _natural(path.name))[:_MAX_INTERFACES]
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return read_bytes(path, 4096).decode("ascii", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> float | None:
    found = re.match(r"-?[0-9]{1,9}(\.[0-9]{1,3})?(?![0-9])", _text(path))
    return float(found.group()) if found else None


def _driver(device: Path) -> str:
    try:
        return (device / "driver").resolve(strict=True).name
    except (OSError, RuntimeError):
        return ""


def _by_name(entry: tuple[Nic, tuple[str, ...]]) -> list[tuple[int, str]]:
    return _natural(entry[0].name)


def _natural(name: str) -> list[tuple[int, str]]:
    """hsn2 before hsn10."""
    return [
        (int(digits), "") if digits else (-1, text) for digits, text in re.findall(r"([0-9]{1,18})|([^0-9]+)", name)
    ]
