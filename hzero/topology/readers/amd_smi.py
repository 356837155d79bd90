"""amdsmi: the Python package of AMD SMI, where it and the driver are there.

Source of names and signatures: amdsmi 7.0 (amdsmi_interface.py). Bandwidths are those of the kernel's KFD topology, in MB/s.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

from hzero.topology.machine import MAX_DEVICES, Device, Link, Machine, TopologyError, bus_id
from hzero.topology.readers.source import integer, shown
from hzero.topology.readers.xgmi import PRODUCTS, product_in, xgmi_link

_NAME = "amdsmi"
_MAX = 2**32 - 1


def query(library: Any = None) -> Machine:
    """The GPUs of this node and their links. Devices have AMD SMI's numbers, which need not be HIP's: their bus ids tell.

    Args:
        library: The module; None imports ``amdsmi``.

    Raises:
        TopologyError: The package, its library or the driver is missing, or a call fails.
    """
    library = library if library is not None else _import()
    try:
        library.amdsmi_init()
    except Exception as error:
        raise TopologyError(f"{_NAME}: no driver answers: {_text(error)}") from None
    try:
        return _machine(library)
    except TopologyError:
        raise
    except Exception as error:
        raise TopologyError(f"{_NAME}: {_text(error)}") from None
    finally:
        with contextlib.suppress(Exception):
            library.amdsmi_shut_down()


def _import() -> Any:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it misses
            return importlib.import_module(_NAME)
    except ImportError as error:
        raise TopologyError(f"{_NAME}: the Python package cannot be imported: {_text(error)}") from None
    except Exception as error:  # without its C library it stops with whatever its own code runs into
        raise TopologyError(
            f"{_NAME}: the package is there, but libamd_smi.so cannot be loaded: {_text(error)}"
        ) from None


def _machine(library: Any) -> Machine:
    handles = library.amdsmi_get_processor_handles()
    if len(handles) > MAX_DEVICES:
        raise TopologyError(f"{_NAME}: {len(handles)} GPUs in one node, at most {MAX_DEVICES} are read")
    remarks: list[str] = []
    devices = []
    for number, handle in enumerate(handles):
        where = f"{_NAME} device {number}"
        numa = _optional(where, remarks, library.amdsmi_topo_get_numa_node_number, handle)
        domain = integer(numa, where, "NUMA node", 0, _MAX) if numa is not None else _MAX
        asic = _optional(where, remarks, library.amdsmi_get_gpu_asic_info, handle) or {}
        identity = _optional(where, remarks, library.amdsmi_get_gpu_enumeration_info, handle) or {}
        devices.append(
            Device(
                number=number,
                bus=bus_id(str(library.amdsmi_get_gpu_device_bdf(handle)), where),
                kind=_kind(asic),
                numa=domain if domain < 2**20 else None,  # an unknown one is -1 without sign
                uuid=str(identity.get("hip_uuid", ""))[:40],
            )
        )
    links = tuple(_links(library, handles))
    if links and not any(link.count for link in links):
        remarks.append("no bandwidths of links, so parallel links are not counted")
    return Machine(_NAME, tuple(devices), links, remarks=tuple(remarks))


def _links(library: Any, handles: list[Any]) -> Iterator[Link]:
    xgmi = int(library.AmdSmiLinkType.AMDSMI_LINK_TYPE_XGMI)
    found = []
    for a, b in combinations(range(len(handles)), 2):
        where = f"{_NAME} devices {a} and {b}"
        kind = library.amdsmi_topo_get_link_type(handles[a], handles[b])
        if int(kind["type"]) != xgmi:
            continue
        weight = integer(library.amdsmi_topo_get_link_weight(handles[a], handles[b]), where, "weight", 0, 2**32)
        bandwidth = _optional(where, [], library.amdsmi_get_minmax_bandwidth_between_processors, handles[a], handles[b])
        least, most = (
            integer((bandwidth or {}).get(key, 0), where, key, 0, 10**9) for key in ("min_bandwidth", "max_bandwidth")
        )
        found.append((a, b, weight, least, most, where))
    measured = any(most for *_, most, _ in found)
    for a, b, weight, least, most, where in found:
        # Beside pairs with bandwidths one without is routed, whatever its weight.
        link = None if measured and not most else xgmi_link(a, b, weight, least, most, where)
        if link is not None:
            yield link


def _optional(where: str, remarks: list[str], call: Callable[..., Any], *handles: Any) -> Any:
    """What a call gives; None with a remark where this library or driver does not support it."""
    try:
        return call(*handles)
    except Exception as error:
        remarks.append(f"{where}: {_text(error)}")
        return None


def _kind(asic: dict[str, Any]) -> str:
    product = product_in(str(asic.get("market_name", ""))[:200])
    with contextlib.suppress(ValueError):
        product = product or PRODUCTS.get(int(str(asic.get("device_id", ""))[:12], 16), "")
    architecture = str(asic.get("target_graphics_version", ""))[:40]
    return product or (architecture if architecture.startswith("gfx") else "")


def _text(error: Exception) -> str:
    return f"{type(error).__name__} {shown(' '.join(str(error).split()))}" if str(error) else type(error).__name__
