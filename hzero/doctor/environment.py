"""The environment of a process on a machine with Slingshot: RCCL's plug-in, and the variables that OLCF's guide sets."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hzero.doctor.verdict import DEGRADED, UNUSABLE, Findings


@dataclass(frozen=True)
class Variable:
    """A variable that RCCL or libfabric reads.

    Attributes:
        name: Its name.
        good: Values that are as they should be, ``*`` standing for anything; the first is the one to set.
        reason: The fault that it avoids.
        fatal: Values with which a run hangs.
    """

    name: str
    good: tuple[str, ...]
    reason: str
    fatal: tuple[str, ...] = ()


#: The OLCF user guide's settings for RCCL on Frontier (July 2026), with what each avoids; the last three are hzero's own,
#: by AMD's guides, and not measured.
VARIABLES = (
    Variable("NCCL_NET", ("OFI", "AWS Libfabric"), "else RCCL may fall back to TCP in silence"),
    Variable("NCCL_CROSS_NIC", ("1",), "rings may change NICs between nodes"),
    Variable("NCCL_NET_GDR_LEVEL", ("PHB", "3"), "NICs read GCD memory directly"),
    Variable("NCCL_SOCKET_IFNAME", ("hsn0,hsn1,hsn2,hsn3", "hsn0", "hsn"), "RCCL starts over the fabric"),
    Variable("FI_MR_CACHE_MONITOR", ("kdreg2", "userfaultfd", "disabled"), "memhooks deadlocks", ("memhooks",)),
    Variable("FI_CXI_RDZV_PROTO", ("alt_read",), "with #SBATCH --network=disable_rdzv_get"),
    Variable("FI_CXI_RDZV_EAGER_SIZE", ("0",), "of the guide's rendezvous settings"),
    Variable("FI_CXI_RDZV_THRESHOLD", ("0",), "of the guide's rendezvous settings"),
    Variable("FI_CXI_RDZV_GET_MIN", ("0",), "of the guide's rendezvous settings"),
    Variable("FI_CXI_RX_MATCH_MODE", ("hybrid",), "matching spills to software, else fails"),
    Variable("FI_CXI_DEFAULT_CQ_SIZE", ("131072",), "many ranks overflow smaller queues"),
    Variable("FI_CXI_DEFAULT_TX_SIZE", ("2048",), "bounds the messages under way (fi_cxi)"),
    Variable("FI_CXI_DISABLE_HOST_REGISTER", ("1",), "registering host buffers can deadlock"),
    Variable("HSA_FORCE_FINE_GRAIN_PCIE", ("1",), "NICs and devices see each other's writes"),
    Variable("MIOPEN_USER_DB_PATH", ("/tmp/*",), "its locks fail on shared file systems"),
    Variable("MIOPEN_CUSTOM_CACHE_DIR", ("/tmp/*",), "its locks fail on shared file systems"),
    Variable("GPU_MAX_HW_QUEUES", ("8", "*"), "streams of tiers share queues, 4 by default"),
    Variable("NCCL_MIN_NCHANNELS", ("16", "[1-9]", "[1-5][0-9]", "6[0-4]"), "RCCL does not tune groups of a tier"),
    Variable("HIP_FORCE_DEV_KERNARG", ("1",), "kernels read arguments from device memory"),
)
#: RCCL's transport on one node, which has no fabric to use (OLCF user guide).
_ONE_NODE = ("NCCL_NET", "Socket")

_PLUGINS = ("librccl-net.so", "libnccl-net.so", "librccl-net-ofi.so", "libnccl-net-ofi.so")


def examine_environment(
    findings: Findings, environ: Mapping[str, str] = os.environ, nodes: int | None = None
) -> list[dict[str, Any]]:
    """One row per variable: the value found, the value expected, why, and a remark where they differ.

    Args:
        findings: Takes what is not as it should be.
        environ: The environment.
        nodes: Nodes of the job; None where that is not known.
    """
    rows: list[tuple[str, str | None, str, str, str]] = []
    for variable in VARIABLES:
        found = environ.get(variable.name)
        good = found is not None and any(fnmatch.fnmatchcase(found, value) for value in variable.good)
        good |= (variable.name, found) == _ONE_NODE and nodes in (None, 1)
        stands = "is not set" if found is None else f"is {found!r}"
        remark = "" if good else f"{variable.name} {stands}, expected {variable.good[0]}: {variable.reason}"
        if remark:
            findings.add(UNUSABLE if found in variable.fatal else DEGRADED, remark)
        rows.append((variable.name, found, variable.good[0], variable.reason, remark))
    plugin = rccl_plugin(environ)
    remark = ""
    if plugin is None and environ.get("NCCL_NET") != "Socket":
        required = environ.get("NCCL_NET") in ("OFI", "AWS Libfabric")
        then = "RCCL stops, as NCCL_NET asks" if required else "RCCL falls back to TCP sockets"
        name = environ.get("NCCL_NET_PLUGIN") or _PLUGINS[0]
        remark = f"RCCL's network plug-in ({name}) is not in LD_LIBRARY_PATH: {then}; module load rccl-net-plugin"
        findings.add(UNUSABLE if required else DEGRADED, remark)
    rows.append(("RCCL plug-in", plugin, _PLUGINS[0], "carries RCCL over libfabric", remark))
    return [dict(zip(("name", "found", "expected", "reason", "remark"), row)) for row in rows]


def rccl_plugin(environ: Mapping[str, str] = os.environ) -> str | None:
    """Path of the network plug-in that RCCL would load; None if the library path has none.

    ``NCCL_NET_PLUGIN`` names another one, by its path, its file or the middle of its file's name; ``none`` means none.
    """
    named = environ.get("NCCL_NET_PLUGIN", "")
    if "/" in named:
        return named if Path(named).is_file() else None
    names = (named, f"librccl-net-{named}.so", f"libnccl-net-{named}.so") if named else _PLUGINS
    for folder in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        for name in names:
            if folder and (path := Path(folder, name)).is_file():
                return str(path)
    return None
