"""Environment of a process on a machine with Slingshot: RCCL's plug-in, and the variables that OLCF's guide sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hzero.doctor.verdict import DEGRADED, GOOD, UNUSABLE, Findings


@dataclass(frozen=True)
class Variable:
    """A variable that RCCL or libfabric reads.

    Attributes:
        name: Its name.
        good: Values that are as they should be; the first is the one to set.
        reason: What goes wrong otherwise.
        worst: What another value is: `DEGRADED` or `UNUSABLE`.
    """

    name: str
    good: tuple[str, ...]
    reason: str
    worst: int = DEGRADED


#: The OLCF user guide's settings for RCCL on Frontier (July 2026), with what each avoids.
VARIABLES = (
    Variable(
        "NCCL_NET",
        ("OFI", "AWS Libfabric"),
        "makes a missing plug-in an error; without it RCCL falls back to TCP in silence",
    ),
    Variable("NCCL_CROSS_NIC", ("1",), "lets rings change NICs between nodes"),
    Variable("NCCL_NET_GDR_LEVEL", ("PHB", "3"), "NICs read the memory of the GCDs directly"),
    Variable("NCCL_SOCKET_IFNAME", ("hsn0,hsn1,hsn2,hsn3", "hsn0", "hsn"), "RCCL's start-up uses the fabric"),
    Variable("FI_MR_CACHE_MONITOR", ("kdreg2", "userfaultfd", "disabled"), "memhooks can deadlock", UNUSABLE),
    Variable("FI_CXI_RDZV_PROTO", ("alt_read",), "belongs with #SBATCH --network=disable_rdzv_get"),
    Variable("FI_CXI_RDZV_EAGER_SIZE", ("0",), "part of the guide's rendezvous settings"),
    Variable("FI_CXI_RDZV_THRESHOLD", ("0",), "part of the guide's rendezvous settings"),
    Variable("FI_CXI_RDZV_GET_MIN", ("0",), "part of the guide's rendezvous settings"),
    Variable("FI_CXI_RX_MATCH_MODE", ("hybrid",), "hardware matching spills to software instead of failing"),
    Variable("FI_CXI_DEFAULT_CQ_SIZE", ("131072",), "a job of many ranks overflows smaller completion queues"),
    Variable("FI_CXI_DEFAULT_TX_SIZE", ("2048",), "bounds how many messages are under way (libfabric's fi_cxi)"),
    Variable("FI_CXI_DISABLE_HOST_REGISTER", ("1",), "registering host buffers with the GPU runtime can deadlock"),
    Variable("HSA_FORCE_FINE_GRAIN_PCIE", ("1",), "NICs and devices see each other's writes over PCIe"),
)

_PLUGINS = ("librccl-net.so", "libnccl-net.so", "librccl-net-ofi.so", "libnccl-net-ofi.so")


def examine_environment(findings: Findings, environ: Mapping[str, str] = os.environ) -> list[dict[str, Any]]:
    """One row a variable: what is set, what should be, why, and a remark where it is not.

    Args:
        findings: Takes what is not as it should be.
        environ: The environment.
    """
    rows = []
    for variable in VARIABLES:
        found = environ.get(variable.name)
        status = GOOD if found in variable.good else DEGRADED if found is None else variable.worst
        stands = "is not set" if found is None else f"is {found!r}"
        remark = f"{variable.name} {stands}, expected {variable.good[0]}: {variable.reason}" if status else ""
        if remark:
            findings.add(status, remark)
        rows.append(
            {
                "name": variable.name,
                "found": found,
                "expected": variable.good[0],
                "reason": variable.reason,
                "remark": remark,
            }
        )
    plugin = rccl_plugin(environ)
    remark = ""
    if plugin is None:
        required = environ.get("NCCL_NET") in ("OFI", "AWS Libfabric")
        then = "RCCL stops, as NCCL_NET asks" if required else "RCCL falls back to TCP sockets"
        remark = (
            f"RCCL's network plug-in ({_PLUGINS[0]}) is not in LD_LIBRARY_PATH: {then}; module load rccl-net-plugin"
        )
        findings.add(UNUSABLE if required else DEGRADED, remark)
    rows.append(
        {
            "name": "RCCL plug-in",
            "found": plugin,
            "expected": _PLUGINS[0],
            "reason": "carries RCCL over libfabric",
            "remark": remark,
        }
    )
    return rows


def rccl_plugin(environ: Mapping[str, str] = os.environ) -> str | None:
    """Path of the network plug-in that RCCL would load; None where there is none in the library path."""
    named = environ.get("NCCL_NET_PLUGIN", "")
    names = (*_PLUGINS, named, f"librccl-net-{named}.so", f"libnccl-net-{named}.so") if named else _PLUGINS
    for folder in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        for name in names:
            if folder and name and (path := Path(folder, name)).is_file():
                return str(path)
    return named if named and Path(named).is_file() else None
