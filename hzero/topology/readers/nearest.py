"""NUMA domains and NICs of a node from sysfs, and the NIC nearest to a device by the PCI tree."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hzero.topology.machine import Nic
from hzero.topology.readers.source import read_bytes

_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_MAX_INTERFACES = 1024


def nearest(path: Sequence[str], numa: int | None, nics: Iterable[tuple[Nic, Sequence[str]]]) -> str:
    """The name of the NIC that shares the longest part of a device's PCI path; of several the one in the same NUMA domain.

    Args:
        path: Of the device, root first.
        numa: Of the device.
        nics: Each NIC with its path.

    Returns:
        The name; empty without NICs or if several are equally near.
    """
    shared = {}
    for nic, other in nics:
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(path, other))
        shared[nic.name] = (len(list(same)), nic.numa)
    most = max((length for length, _ in shared.values()), default=0)
    near = {name: domain for name, (length, domain) in shared.items() if length == most}
    if len(near) > 1 and numa is not None:
        near = {name: domain for name, domain in near.items() if domain == numa}
    return next(iter(near)) if len(near) == 1 else ""


def read_nics(sysfs: Path) -> tuple[list[tuple[Nic, tuple[str, ...]]], list[str]]:
    """NICs with a device behind them: not loopback, bridges or virtual pairs.

    An RDMA device and the network interface of the same PCI function are one NIC, under the RDMA device's name, which is
    also the name in NCCL's dumps. Where a node has fabric NICs (cxi, or RDMA devices), its plain Ethernet interfaces are
    left out with a remark: training does not run over them.

    Returns:
        Each NIC with its PCI path, root first, by name; and remarks on what was left out.
    """
    found: dict[str, tuple[Nic, tuple[str, ...], bool]] = {}
    for folder in ("infiniband", "net"):
        for interface in _entries(sysfs / "class" / folder):
            path = pci_path(interface / "device")
            if path and path[-1] not in found:
                nic = _rdma(interface, path[-1]) if folder == "infiniband" else _interface(interface, path[-1])
                found[path[-1]] = (nic, path, folder == "infiniband" or nic.kind == "cxi")
    nics = sorted(found.values(), key=lambda entry: _natural(entry[0].name))
    fabric = any(of_fabric for _, _, of_fabric in nics)
    kept = [(nic, path) for nic, path, of_fabric in nics if of_fabric or not fabric]
    left_out = [nic.name for nic, _, of_fabric in nics if fabric and not of_fabric]
    return kept, [f"{name}: Ethernet, left out next to the NICs of the fabric" for name in left_out]


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
    cxi = folder.name.startswith("hsn") or os.path.realpath(folder / "device/driver").rpartition("/")[2].startswith(
        "cxi"
    )
    gb_s = speed / 8000 if speed is not None and speed > 0 else None
    return Nic(folder.name, bus, "cxi" if cxi else "ethernet", gb_s, numa_of(folder / "device"))


def _rdma(folder: Path, bus: str) -> Nic:
    ports = _entries(folder / "ports")
    speed = _number(ports[0] / "rate") if ports else None  # "200 Gb/sec (4X HDR)"
    layer = _text(ports[0] / "link_layer") if ports else ""
    gb_s = speed / 8 if speed is not None and speed > 0 else None
    return Nic(folder.name, bus, "ethernet" if layer == "Ethernet" else "ib", gb_s, numa_of(folder / "device"))


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


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts hsn2 before hsn10."""
    return [(int(digits or 0), text) for text, digits in re.findall(r"([^0-9]*)([0-9]{0,18})", name)]
