"""Visible devices: which of a node's devices a process sees, in its order, and which of them is its own.

The rules are the vendors' own. AMD ("GPU isolation techniques" in ROCm's documentation): the ROCr runtime applies
``ROCR_VISIBLE_DEVICES`` to the devices in the kernel's order (``RvdFilter`` of ROCR-Runtime: indices or ``GPU-`` and the
beginning of a UUID, an empty value hides all, a negative index ends the list); HIP then applies ``HIP_VISIBLE_DEVICES`` or
``CUDA_VISIBLE_DEVICES`` to what is left, under new indices, and ends the list at the first entry that is none
(``Device::init`` of clr's rocdevice.cpp). ``GPU_DEVICE_ORDINAL``, which Slurm sets besides, is read there for OpenCL alone,
although the documentation names HIP as well: it does not count. NVIDIA ("CUDA Environment Variables" of the CUDA
programming guide): ``CUDA_VISIBLE_DEVICES`` has indices or beginnings of UUIDs; the first invalid entry ends the list; an empty
value hides all.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence

from hzero.topology.machine import Device, TopologyError, bus_id

_ROCR, _HIP, _CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
#: What makes devices visible, for messages.
VARIABLES = (_ROCR, _HIP, _CUDA)

_AMD = re.compile(r"gfx[0-9]|\bMI[0-9]|AMD|Instinct|Radeon", re.IGNORECASE)
_NUMBER = re.compile(r"-?[0-9]{1,9}")
# ROCr reads numbers as C does (strtol with base 0): 0x10 and 010 are numbers too.
_C_NUMBER = re.compile(r"0[xX][0-9a-fA-F]{1,7}|-?[0-9]{1,9}")


def visible_devices(environ: Mapping[str, str], devices: Sequence[Device]) -> list[int]:
    """Numbers of the devices that a process sees, in its own order: the first is its device 0.

    Args:
        environ: The environment of the process.
        devices: All devices of the node, in the order of their numbers, which is that of the runtime (ROCr, CUDA).

    Returns:
        Numbers of devices. ROCm's HIP takes an empty ``HIP_VISIBLE_DEVICES`` for an unset one where torch counts no
        devices; torch is what counts here.

    Raises:
        TopologyError: ``ROCR_VISIBLE_DEVICES`` names a device that is not there, a list names one twice, or on an AMD node
            ``HIP_VISIBLE_DEVICES`` and ``CUDA_VISIBLE_DEVICES`` are not the same.
    """
    seen = sorted(devices, key=lambda device: device.number)
    if not _are_amd(environ, seen):
        return [device.number for device in _ending(environ, _CUDA, seen)]
    if _ROCR in environ:
        seen = _rocr(environ[_ROCR], seen)
    hip, cuda = environ.get(_HIP), environ.get(_CUDA)
    if hip is not None and cuda is not None and _entries(hip) != _entries(cuda):
        raise TopologyError(
            f"{_HIP}={hip!r} and {_CUDA}={cuda!r} contradict each other: HIP reads either; set one of them, or both alike"
        )
    return [device.number for device in _ending(environ, _CUDA if hip is None else _HIP, seen)]


def own_device(environ: Mapping[str, str], devices: Sequence[Device], local_rank: int, bus: str | None) -> int:
    """Number of the device of a rank.

    Args:
        environ: The environment of the rank.
        devices: All devices of the node, in the order of their numbers.
        local_rank: Index among the devices that the rank sees.
        bus: PCI bus id that the runtime states for that index, which decides: sources number devices in orders of their
            own. None where it does not; then the lists of the environment do.

    Raises:
        TopologyError: The node has no device with that bus id, or fewer devices are visible than the index needs.
    """
    if bus is not None:
        found = _with_bus(devices, bus)
        if found is None:
            buses = ", ".join(device.bus or "unknown" for device in devices) or "none"
            raise TopologyError(
                f"topology: the runtime states PCI bus id {bus}, which no device of the node has; there are: {buses}"
            )
        return found
    seen = visible_devices(environ, devices)
    if not 0 <= local_rank < len(seen):
        lists = ", ".join(f"{name}={environ[name]!r}" for name in VARIABLES if name in environ)
        raise TopologyError(
            f"topology: there is no device with index {local_rank} (LOCAL_RANK) among the {len(seen)} visible devices "
            f"({lists or 'no variable that hides any'}) of {len(devices)}"
        )
    return seen[local_rank]


def runtime_bus_id(local_rank: int) -> str | None:
    """The PCI bus id that torch's runtime states for a device index; None without a GPU, or where torch does not tell.

    Versions of torch that tell it do so as ``pci_domain_id``, ``pci_bus_id`` and ``pci_device_id`` of
    ``torch.cuda.get_device_properties``.

    Args:
        local_rank: Index among the devices that this process sees.
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


def _rocr(value: str, devices: list[Device]) -> list[Device]:
    seen: list[Device] = []
    for entry in _entries(value):
        if entry.upper().startswith("GPU-"):
            matching = _with_uuid(devices, entry)
            if len(matching) != 1:
                uuids = ", ".join(device.uuid for device in devices if device.uuid) or "none are known"
                what = "no device has it" if not matching else f"{len(matching)} devices begin so"
                raise TopologyError(f"{_ROCR}={value!r}: entry {entry!r}: {what}; UUIDs: {uuids}")
            device = matching[0]
        else:
            if _C_NUMBER.fullmatch(entry) is None:
                raise TopologyError(f"{_ROCR}={value!r}: entry {entry!r} is neither an index nor GPU-<UUID>")
            number = _c_number(entry)
            if number < 0:
                break
            if number >= len(devices):
                possible = f"0 to {len(devices) - 1}" if devices else "none"
                raise TopologyError(f"{_ROCR}={value!r}: there is no device {entry}; possible: {possible}")
            device = devices[number]
        _add(seen, device, _ROCR, value, entry)
    return seen


def _ending(environ: Mapping[str, str], variable: str, devices: list[Device]) -> list[Device]:
    """What a list leaves, by the rule that the first entry that names no device ends it."""
    value = environ.get(variable)
    if value is None:
        return devices
    seen: list[Device] = []
    for entry in _entries(value):
        if entry.upper().startswith("MIG-"):
            raise TopologyError(
                f"{variable}={value!r}: entry {entry!r} is a part of a GPU; whole GPUs alone are supported"
            )
        if entry.upper().startswith("GPU-"):
            matching = _with_uuid(devices, entry)
            if len(matching) != 1:
                break
            device = matching[0]
        else:
            if _NUMBER.fullmatch(entry) is None or not 0 <= int(entry) < len(devices):
                break
            device = devices[int(entry)]
        _add(seen, device, variable, value, entry)
    return seen


def _add(seen: list[Device], device: Device, variable: str, value: str, entry: str) -> None:
    # ROCr ends the list there, HIP skips the entry, CUDA and torch see no device at all.
    if device in seen:
        raise TopologyError(f"{variable}={value!r}: entry {entry!r} names a device that the list has already")
    seen.append(device)


def _c_number(text: str) -> int:
    digits = text.lstrip("-")
    if digits.lower().startswith("0x"):
        return int(text, 16)
    if len(digits) > 1 and digits.startswith("0") and set(digits) <= set("01234567"):
        return int(text, 8)
    return int(text)


def _with_uuid(devices: Sequence[Device], beginning: str) -> list[Device]:
    """Devices whose UUID begins so; sources write it with or without ``GPU-``, and AMD's UUIDs have no case."""
    wanted = beginning.upper().removeprefix("GPU-")
    return [d for d in devices if wanted and d.uuid and d.uuid.upper().removeprefix("GPU-").startswith(wanted)]


def _with_bus(devices: Sequence[Device], bus: str) -> int | None:
    wanted = bus_id(bus, "the runtime's device")
    same = [device for device in devices if device.bus == wanted]
    if not same:  # torch does not tell the function of a device
        same = [
            device for device in devices if device.bus and device.bus.rpartition(".")[0] == wanted.rpartition(".")[0]
        ]
    if len(same) > 1:
        numbers = ", ".join(str(device.number) for device in same)
        raise TopologyError(f"topology: the runtime states PCI bus id {bus}, which devices {numbers} share")
    return same[0].number if same else None
