"""Visible devices: the devices of a node that a process sees, in its order, and its own one among them.

The rules are the vendors' own. AMD ("GPU isolation techniques" in ROCm's documentation): the ROCr runtime applies
``ROCR_VISIBLE_DEVICES`` to the devices in the kernel's order (``RvdFilter`` of ROCR-Runtime: indices or ``GPU-`` and the
beginning of a UUID, an empty value hides all, a negative index ends the list); HIP then applies ``HIP_VISIBLE_DEVICES`` or
``CUDA_VISIBLE_DEVICES`` to what is left, under new indices, and ends the list at the first entry that is none
(``Device::init`` of clr's rocdevice.cpp). ``GPU_DEVICE_ORDINAL``, which Slurm sets too, is read there for OpenCL alone,
although the documentation names HIP as well: it does not count. NVIDIA ("CUDA Environment Variables" of the CUDA
programming guide): ``CUDA_VISIBLE_DEVICES`` has indices or beginnings of UUIDs; the first invalid entry ends the list; an empty
value hides all.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence

from hzero.topology.machine import Device, bus_id
from hzero.validation import ConfigError

VARIABLES = _ROCR, _HIP, _CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"

_AMD = re.compile(r"gfx[0-9]|\bMI[0-9]|AMD|Instinct|Radeon", re.IGNORECASE)
# ROCr reads 010 and 0x10 as C does; here they are refused.
_INDEX = re.compile(r"-?(0|[1-9][0-9]{0,8})")


def visible_devices(environ: Mapping[str, str], devices: Sequence[Device]) -> list[int]:
    """Numbers of the devices that a process sees, in its own order: the first is its device 0.

    Args:
        environ: The environment of the process.
        devices: All devices of the node, in the order of their numbers, which is that of the runtime (ROCr, CUDA).

    Returns:
        Numbers of devices. ROCm's HIP takes an empty ``HIP_VISIBLE_DEVICES`` for an unset one where torch counts no
        devices; torch is what counts here.

    Raises:
        ConfigError: ``ROCR_VISIBLE_DEVICES`` names a device that is not there, a list names one twice, or on an AMD node
            ``HIP_VISIBLE_DEVICES`` and ``CUDA_VISIBLE_DEVICES`` are not the same.
    """
    seen = sorted(devices, key=lambda device: device.number)
    if not _are_amd(environ, seen):
        return [device.number for device in _listed(environ, _CUDA, seen)]
    seen = _listed(environ, _ROCR, seen)
    hip, cuda = environ.get(_HIP), environ.get(_CUDA)
    if hip is not None and cuda is not None and _entries(hip) != _entries(cuda):
        raise ConfigError(
            f"{_HIP}={hip!r} and {_CUDA}={cuda!r} contradict each other: HIP reads either; set one of them, or both alike"
        )
    return [device.number for device in _listed(environ, _CUDA if hip is None else _HIP, seen)]


def own_device(environ: Mapping[str, str], devices: Sequence[Device], local_rank: int, bus: str | None) -> int:
    """Number of the device of a rank.

    Args:
        environ: The environment of the rank.
        devices: All devices of the node, in the order of their numbers.
        local_rank: Index among the devices that the rank sees.
        bus: PCI bus id that the runtime states for that index, which decides, since sources number devices in orders of
            their own. None where it states none; then the lists of the environment decide.

    Raises:
        ConfigError: The node has no device with that bus id, or fewer devices are visible than the index needs.
    """
    if bus is not None:
        wanted = bus_id(bus, "the runtime's device")
        # torch does not state the function of a device.
        alike = [device for device in devices if device.bus and device.bus[:-2] == wanted[:-2]]
        same = [device for device in alike if device.bus == wanted] or alike
        if len(same) > 1:
            numbers = ", ".join(str(device.number) for device in same)
            raise ConfigError(f"topology: the runtime states PCI bus id {bus}, which devices {numbers} share")
        if not same:
            buses = ", ".join(device.bus or "unknown" for device in devices) or "none"
            raise ConfigError(
                f"topology: the runtime states PCI bus id {bus}, which no device of the node has; there are: {buses}"
            )
        return same[0].number
    seen = visible_devices(environ, devices)
    if not 0 <= local_rank < len(seen):
        lists = ", ".join(f"{name}={environ[name]!r}" for name in VARIABLES if name in environ)
        raise ConfigError(
            f"topology: no device with index {local_rank} (LOCAL_RANK) among the {len(seen)} visible devices "
            f"({lists or 'no variable that hides any'}) of {len(devices)}"
        )
    return seen[local_rank]


def runtime_bus_id(local_rank: int) -> str | None:
    """The PCI bus id that torch's runtime states for a device index; None without a GPU, or where torch states none.

    Versions of torch that state it do so as ``pci_domain_id``, ``pci_bus_id`` and ``pci_device_id`` of
    ``torch.cuda.get_device_properties``.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tools that torch looks for
        import torch

        if not torch.cuda.is_available() or not 0 <= local_rank < torch.cuda.device_count():
            return None
        properties = torch.cuda.get_device_properties(local_rank)
    parts = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if not all(isinstance(part, int) and part >= 0 for part in parts):
        return None
    domain, bus, device = parts
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def current_device() -> int:
    """Index, among the visible ones, of the device that torch computes on now; 0 without a GPU."""
    import torch

    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def _are_amd(environ: Mapping[str, str], devices: Sequence[Device]) -> bool:
    kinds = [device.kind for device in devices if device.kind]
    if kinds:
        return any(_AMD.search(kind) for kind in kinds)
    return _ROCR in environ or _HIP in environ


def _entries(value: str) -> list[str]:
    return [entry.strip() for entry in value.split(",")] if value.strip() else []


def _listed(environ: Mapping[str, str], variable: str, devices: list[Device]) -> list[Device]:
    """The devices that a list leaves, by the rules of its variable."""
    if variable not in environ:
        return devices
    value = environ[variable]
    strict = variable == _ROCR  # what ROCr refuses ends the lists of HIP and CUDA
    seen: list[Device] = []
    for entry in _entries(value):
        wrong = ""
        matching: Sequence[Device] = ()
        if entry.upper().startswith("MIG-"):
            raise ConfigError(
                f"{variable}={value!r}: entry {entry!r} is a part of a GPU; only whole GPUs are supported"
            )
        if entry.upper().startswith("GPU-"):
            matching = _with_uuid(devices, entry)
            uuids = ", ".join(device.uuid for device in devices if device.uuid) or "none are known"
            count = "no device has it" if not matching else f"{len(matching)} devices begin so"
            wrong = f"entry {entry!r}: {count}; UUIDs: {uuids}"
        elif _INDEX.fullmatch(entry) is None:
            wrong = f"entry {entry!r} is neither an index nor GPU-<UUID>"
        elif int(entry) < 0:
            break
        else:
            matching = devices[int(entry) : int(entry) + 1]
            possible = f"0 to {len(devices) - 1}" if devices else "none"
            wrong = f"no device {entry}; possible: {possible}"
        if len(matching) != 1:
            if strict:
                raise ConfigError(f"{variable}={value!r}: {wrong}")
            break
        if matching[0] in seen:  # ROCr ends the list there, HIP skips the entry, CUDA and torch see no device at all
            raise ConfigError(f"{variable}={value!r}: entry {entry!r} names a device that the list has already")
        seen.append(matching[0])
    return seen


def _with_uuid(devices: Sequence[Device], beginning: str) -> list[Device]:
    """Devices whose UUID begins so; sources write it with or without ``GPU-``, and AMD's UUIDs have no case."""
    wanted = beginning.upper().removeprefix("GPU-")
    return [d for d in devices if wanted and d.uuid and d.uuid.upper().removeprefix("GPU-").startswith(wanted)]
