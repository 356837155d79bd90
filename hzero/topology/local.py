"""The node of this process, and its own device on it."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from hzero.bootstrap import Bootstrap
from hzero.topology.machine import Device, Machine
from hzero.topology.preset import PRESETS, preset
from hzero.topology.rank_report import RankReport, report_of
from hzero.topology.readers import kfd, nvidia, read_file
from hzero.topology.visible import own_device, runtime_bus_id, visible_devices
from hzero.validation import ConfigError, one_of

#: Where the kernel's tree is, for containers that see the host's elsewhere.
SYSFS = "HZERO_SYSFS"


def this_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """The node that this process runs on, from the first source that knows its links.

    AMD's GPUs are read from the kernel's KFD tree, which AMD's own tools read too. NVIDIA's are asked of nvidia-smi. A
    node without GPUs is a machine without devices.

    Args:
        environ: ``HZERO_SYSFS`` names another place of ``/sys``.

    Raises:
        ConfigError: GPUs are there, but nothing that describes them can be read.
    """
    machine = kfd.read(Path(environ.get(SYSFS) or "/sys"))
    if machine.devices or environ.get(SYSFS) or not shutil.which("nvidia-smi"):
        return machine
    return nvidia.query()


def host_identity(environ: Mapping[str, str] = os.environ) -> str:
    """The name of this node: ``NCCL_HOSTID`` where it is set, as for NCCL and RCCL; else host name and boot id.

    The boot id distinguishes machines of one name.
    """
    if stated := environ.get("NCCL_HOSTID"):
        return stated
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()}/{boot}"


def own_report(bootstrap: Bootstrap, machine: Machine, environ: Mapping[str, str] = os.environ) -> RankReport:
    """The report of this rank in a discovery.

    Args:
        bootstrap: Its rank and local index.
        machine: Its node.
        environ: Which devices it sees.

    Raises:
        ConfigError: Its device is ambiguous, or the runtime and the environment contradict each other.
    """
    device = None
    if machine.devices:
        # One visible device is device 0 of its process, whatever the launcher's local index is.
        local = 0 if visible_count(machine, environ) == 1 else bootstrap.local_rank
        device = machine.device(own_device(environ, _readable(machine), local, runtime_bus_id(local)))
    return report_of(bootstrap.rank, bootstrap.world_size, host_identity(environ), machine, device)


def visible_count(machine: Machine, environ: Mapping[str, str] = os.environ) -> int:
    """The number of devices of a node that this process sees."""
    return len(visible_devices(environ, _readable(machine)))


def _readable(machine: Machine) -> list[Device]:
    """Devices that a task's cgroup does not hide: a runtime does not count the others."""
    return [device for device in machine.devices if not device.hidden]


def machine_of(source: str, environ: Mapping[str, str] = os.environ, where: str = "topology") -> Machine:
    """The node that a text stands for: ``auto``, one of `PRESETS`, or else a file. ``where`` begins a message.

    Raises:
        ConfigError: Unknown preset, missing file, or unusable content.
    """
    if source == "auto":
        return this_machine(environ)
    if source in PRESETS:
        return preset(source)
    if "/" not in source and "." not in source and not os.path.exists(source):
        known = one_of(where, source[:80], ("auto", *PRESETS), "source")
        raise ConfigError(f"{known}, or a file (no such file)")
    return read_file(Path(source))
