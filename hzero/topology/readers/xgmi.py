"""What AMD's driver says of the links between two GPUs, and the products it names. Shared by the readers of AMD's sources.

Source: the Linux kernel's amdkfd (kfd_crat.c, kfd_fill_gpu_xgmi_link_to_gpu) and amdgpu (amdgpu_xgmi_get_bandwidth): a hop
weighs 15 and a pair of partitions of one module 13; the minimum bandwidth is that of one link, the maximum that of all
links to the peer, in MB/s. Both are 0 where a pair is routed, and for all pairs of MI100 and of older drivers.
"""

from __future__ import annotations

import re

from hzero.topology.machine import Link, TopologyError

#: Products by PCI device id (pci.ids). MI250X and MI250 share one; both have two dies a module.
PRODUCTS = {
    0x738C: "MI100",
    0x7408: "MI250X",
    0x740C: "MI250X",
    0x740F: "MI210",
    0x74A0: "MI300A",
    0x74A1: "MI300X",
    0x74A5: "MI325X",
}

#: Weight of two hops.
ROUTED_WEIGHT = 30
#: Weight of a link between two partitions of one module (KFD_CRAT_INTRA_SOCKET_WEIGHT).
SAME_MODULE_WEIGHT = 13
#: Weight of a link between partitions of two modules; RCCL's rocm_smi_wrap.cc takes 13, 15 and 41 to be direct.
_PARTITIONS_WEIGHT = 41
#: Most parallel links of a pair; an MI300X has 7 in all.
_MAX_COUNT = 64

_PRODUCT = re.compile(r"\bMI ?([0-9]{3}[AX]?)\b", re.IGNORECASE)


def xgmi_link(a: int, b: int, weight: int | None, least: int, most: int, where: str) -> Link | None:
    """The xGMI links of a pair; None where it is routed.

    Args:
        a: Number of the one device.
        b: Number of the other.
        weight: As the driver gives it; None where the source lacks it.
        least: Minimum bandwidth, MB/s; 0 where not given.
        most: Maximum bandwidth, MB/s; 0 where not given.
        where: File and place, for messages.

    Raises:
        TopologyError: The bandwidths contradict each other.
    """
    if weight is not None and weight >= ROUTED_WEIGHT and weight != _PARTITIONS_WEIGHT:
        return None
    if not most:
        # The first drivers that count links give a routed pair the minimum of one link.
        return None if least else Link(min(a, b), max(a, b), "xgmi")
    if not least or most % least or most // least > _MAX_COUNT:
        raise TopologyError(
            f"{where}: found a bandwidth of {least} MB/s at least and {most} at most, expected that of one link and of all"
        )
    return Link(min(a, b), max(a, b), "xgmi", most // least, most / 1000)


def product_in(text: str) -> str:
    """The product in a marketing name such as ``AMD Instinct MI250X``; empty where there is none."""
    found = _PRODUCT.search(text)
    return f"MI{found.group(1).upper()}" if found else ""


def unique_uuid(unique_id: int) -> str:
    """A driver's unique id as ``ROCR_VISIBLE_DEVICES`` takes it; empty where the device has none."""
    return f"GPU-{unique_id:016x}" if unique_id else ""
