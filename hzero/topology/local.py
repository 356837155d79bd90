"""What this process can say by itself: its node, and which of the node's devices is its own."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from hzero.config import ConfigError, one_of
from hzero.topology.bootstrap import Bootstrap
from hzero.topology.machine import Device, Machine, TopologyError
from hzero.topology.preset import PRESETS, preset
from hzero.topology.readers import amd_smi, kfd, nvidia, read_file, rocm_smi
from hzero.topology.report import RankReport, report_of
from hzero.topology.visible import own_device, runtime_bus_id, visible_devices

#: Where the kernel's tree is, for containers that see the host's elsewhere.
SYSFS = "HZERO_SYSFS"


def this_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """The node that this process runs on, from the first source that knows its links.

    The kernel's KFD tree tells devices and links of AMD GPUs; drivers before 5.15 leave out bandwidths, so that amdsmi
    or rocm-smi are asked then. NVIDIA's are asked of nvidia-smi. A node without GPUs is a machine without devices.

    Args:
        environ: ``HZERO_SYSFS`` names another place of ``/sys``.

    Raises:
        TopologyError: GPUs are there, but nothing that describes them can be read.
    """
    machine = kfd.read(Path(environ.get(SYSFS) or "/sys"))
    if machine.devices or environ.get(SYSFS):
        return _counted(machine)
    if shutil.which("nvidia-smi"):
        return nvidia.query()
    return machine


def _counted(machine: Machine) -> Machine:
    """The same machine from a source that tells parallel links apart, where the kernel does not and there is one."""
    if all(link.count or link.gb_s for link in machine.links if link.kind == "xgmi"):
        return machine
    for query in (amd_smi.query, rocm_smi.query):
        try:
            found = query()
        except TopologyError:
            continue
        if {device.bus for device in found.devices} == {device.bus for device in machine.devices}:
            return found
    return machine


def host_identity(environ: Mapping[str, str] = os.environ) -> str:
    """What tells nodes apart: ``NCCL_HOSTID`` where it is set, as for NCCL and RCCL; else host name and boot id.

    The boot id tells machines of one name apart.
    """
    if stated := environ.get("NCCL_HOSTID"):
        return stated
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()}/{boot}"


def own_report(bootstrap: Bootstrap, machine: Machine, environ: Mapping[str, str] = os.environ) -> RankReport:
    """What this rank says of itself in a discovery.

    Args:
        bootstrap: Its rank and local index.
        machine: Its node.
        environ: Which devices it sees.

    Raises:
        TopologyError: Its device cannot be told, or the runtime and the environment contradict each other.
    """
    host = host_identity(environ)
    if not machine.devices:
        return report_of(bootstrap.rank, bootstrap.world_size, host, machine, None)
    devices = _readable(machine)
    # One visible device is device 0 of its process, whatever the launcher's local index is.
    local = 0 if visible_count(machine, environ) == 1 else bootstrap.local_rank
    number = own_device(environ, devices, local, runtime_bus_id(local))
    return report_of(bootstrap.rank, bootstrap.world_size, host, machine, machine.device(number))


def visible_count(machine: Machine, environ: Mapping[str, str] = os.environ) -> int:
    """How many of a node's devices this process sees."""
    return len(visible_devices(environ, _readable(machine)))


def _readable(machine: Machine) -> list[Device]:
    """Devices that a task's cgroup does not hide: a runtime does not count the others."""
    return [device for device in machine.devices if not device.hidden]


def machine_of(source: str, environ: Mapping[str, str] = os.environ) -> Machine:
    """The node that a text stands for: ``auto``, one of `PRESETS`, or else a file.

    Raises:
        ConfigError: There is no such preset or file, or it cannot be used.
    """
    if source == "auto":
        return this_machine(environ)
    if source in PRESETS:
        return preset(source)
    try:
        there = Path(source).exists()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"topology: found {source[:40]!r}, which can be no file: {reason.lower()}") from None
    if not there and "/" not in source and "." not in source:
        known = one_of("topology", source[:80], ("auto", *PRESETS), "source")
        raise ConfigError(f"{known}, or a file (there is none of that name)")
    return read_file(Path(source))
