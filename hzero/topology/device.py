"""The device of a rank: the one among its node's devices that torch computes on.

The rules of the lists are the vendors' own. AMD ("GPU isolation techniques" in ROCm's documentation): the ROCr runtime applies
``ROCR_VISIBLE_DEVICES`` to the devices in the kernel's order; HIP then applies ``HIP_VISIBLE_DEVICES`` or
``CUDA_VISIBLE_DEVICES`` to what is left, under new indices. NVIDIA ("CUDA Environment Variables" of the CUDA programming
guide): ``CUDA_VISIBLE_DEVICES``. A list has indices, or ``GPU-`` and the beginning of a UUID; a negative index ends it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hzero.topology.machine import Device, Machine, bus_id
from hzero.validation import ConfigError

_ROCR, _HIP, _CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


def own_device(machine: Machine, environ: Mapping[str, str]) -> Device | None:
    """The device of this rank; None on a node without devices.

    The PCI bus id that torch states for it decides, since sources number devices in orders of their own. Without a GPU in
    torch, the lists of the environment decide.

    Raises:
        ConfigError: The node has no device with that bus id, or a list or LOCAL_RANK names one that is not there.
    """
    import torch

    if not machine.devices:
        return None
    if torch.cuda.is_available() and (bus := runtime_bus_id(_index(environ, torch.cuda.device_count()))) is not None:
        return with_bus(machine.devices, bus)
    readable = [device for device in machine.devices if not device.hidden]  # a runtime does not count the others
    seen = visible_devices(environ, readable)
    index = _index(environ, len(seen))
    if not 0 <= index < len(seen):
        lists = ", ".join(f"{name}={environ[name]!r}" for name in (_ROCR, _HIP, _CUDA) if name in environ)
        raise ConfigError(
            f"topology: no device with index {index} (LOCAL_RANK) among the {len(seen)} visible devices "
            f"({lists or 'no variable that hides any'}) of {len(readable)}"
        )
    return seen[index]


def with_bus(devices: Sequence[Device], bus: str) -> Device:
    """The device with a PCI bus id whose function torch does not state. Raises `ConfigError` if it is none, or several."""
    wanted = bus_id(bus, "the runtime's device")
    alike = [device for device in devices if device.bus and device.bus[:-2] == wanted[:-2]]
    same = [device for device in alike if device.bus == wanted] or alike
    if len(same) != 1:
        buses, found = ", ".join(device.bus or "unknown" for device in devices), f"{len(same) or 'no'} devices"
        raise ConfigError(f"topology: torch states PCI bus id {bus}, which {found} have; there are: {buses}")
    return same[0]


def runtime_bus_id(index: int) -> str | None:
    """The PCI bus id that torch states for a device index; None without a GPU, or in versions that state none."""
    import torch

    if not torch.cuda.is_available() or not 0 <= index < torch.cuda.device_count():
        return None
    properties = torch.cuda.get_device_properties(index)
    parts = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if not all(isinstance(part, int) and part >= 0 for part in parts):
        return None
    domain, bus, device = parts
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _index(environ: Mapping[str, str], count: int) -> int:
    """Index of this rank's device among those that it sees."""
    import torch

    local = environ.get("LOCAL_RANK", "")
    if count == 1:  # also if the launcher's local index is not 0
        return 0
    return int(local) if local.isdecimal() else torch.cuda.current_device() if torch.cuda.is_available() else 0


def visible_devices(environ: Mapping[str, str], devices: Sequence[Device]) -> list[Device]:
    """The devices that a process sees, in its own order: the first is its device 0.

    Args:
        environ: The environment of the process.
        devices: All devices of the node that it may use, in the order of the runtime (ROCr, CUDA).

    Raises:
        ConfigError: A list names a device that is not there, or one twice.
    """
    seen = list(devices)
    amd = any(re.search(r"gfx[0-9]|\bMI[0-9]|AMD|Instinct|Radeon", device.kind, re.IGNORECASE) for device in devices)
    if not amd and not (_ROCR in environ or _HIP in environ):
        return _listed(environ, _CUDA, seen)
    seen = _listed(environ, _ROCR, seen)
    return _listed(environ, _HIP if _HIP in environ else _CUDA, seen)


def _listed(environ: Mapping[str, str], variable: str, devices: list[Device]) -> list[Device]:
    """The devices that a list leaves; all of them where it is not set."""
    value = environ.get(variable)
    if value is None:
        return devices
    seen: list[Device] = []
    for entry in [entry.strip() for entry in value.split(",")] if value.strip() else []:
        if re.fullmatch("-[0-9]{1,9}", entry):
            break
        found = [device for index, device in enumerate(devices) if entry == str(index) or _has_uuid(device, entry)]
        if len(found) != 1 or found[0] in seen:
            uuids = ", ".join(device.uuid for device in devices if device.uuid)
            raise ConfigError(
                f"{variable}={value!r}: entry {entry!r} names {len(found) or 'no'} devices, or one that the list has already; "
                f"possible: 0 to {len(devices) - 1}{f', {uuids}' if uuids else ''}"
            )
        seen += found
    return seen


def _has_uuid(device: Device, entry: str) -> bool:
    """Whether an entry begins the UUID, which sources write with or without ``GPU-``; AMD's have no case."""
    beginning, uuid = entry.upper(), device.uuid.upper().removeprefix("GPU-")
    return len(beginning) > 4 and beginning.startswith("GPU-") and uuid.startswith(beginning[4:])
