"""The environment of a process on a machine with Slingshot: RCCL's plug-in, and the variables that the site's guide sets."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hzero.doctor.verdict import DEGRADED, UNUSABLE, Findings
from hzero.topology.machine import Machine

#: A machine with Slingshot that is none of those with a guide of their own.
OTHER = "other"
SITES = ("frontier", "lumi", OTHER)


@dataclass(frozen=True)
class Variable:
    """A variable that RCCL or libfabric reads.

    Attributes:
        name: Its name.
        good: Values that are as they should be, ``*`` standing for anything; the first is the one to set. Empty: it should
            not be set.
        reason: The fault that it avoids.
        fatal: Values with which a run hangs.
        sites: Where it is judged, of `SITES`.
    """

    name: str
    good: tuple[str, ...]
    reason: str
    fatal: tuple[str, ...] = ()
    sites: tuple[str, ...] = ("frontier", OTHER)


#: The OLCF user guide's settings for RCCL on Frontier (July 2026), with what each avoids, which other machines with Slingshot
#: mostly share; the last three are hzero's own, by AMD's guides, and not measured. LUMI's guides name few, and leave
#: libfabric's to the container. ``slurm/SITE.env`` sets them.
VARIABLES = (
    Variable("NCCL_NET", ("OFI", "AWS Libfabric"), "else RCCL may fall back to TCP in silence"),
    Variable("NCCL_CROSS_NIC", ("1",), "rings may change NICs between nodes"),
    Variable("NCCL_NET_GDR_LEVEL", ("PHB", "3"), "NICs read GCD memory directly", sites=("frontier",)),
    # lumi-ai-factory/laifs-container-recipes#28, #30; removed from LUMI's guide by LUMI-AI-Guide#97 (2026-05-04).
    Variable("NCCL_NET_GDR_LEVEL", (), "starts on several nodes hang in LUMI's ROCm 7.0 container", sites=("lumi",)),
    Variable("NCCL_SOCKET_IFNAME", ("hsn0,hsn1,hsn2,hsn3", "hsn0", "hsn"), "RCCL starts over the fabric", sites=SITES),
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
    Variable("MIOPEN_USER_DB_PATH", ("/tmp/*",), "its locks fail on shared file systems", sites=SITES),
    Variable("MIOPEN_CUSTOM_CACHE_DIR", ("/tmp/*",), "its locks fail on shared file systems", sites=SITES),
    Variable("GPU_MAX_HW_QUEUES", ("8", "*"), "streams of tiers share queues, 4 by default"),
    Variable("NCCL_MIN_NCHANNELS", ("16", "[1-9]", "[1-5][0-9]", "6[0-4]"), "RCCL does not tune groups of a tier"),
    Variable("HIP_FORCE_DEV_KERNARG", ("1",), "kernels read arguments from device memory"),
)
#: RCCL's transport on one node, which has no fabric to use (OLCF user guide).
_ONE_NODE = ("NCCL_NET", "Socket")

_PLUGINS = ("librccl-net.so", "libnccl-net.so", "librccl-net-ofi.so", "libnccl-net-ofi.so")


def site_of(environ: Mapping[str, str], expected: Machine | None) -> str:
    """One of `SITES`: the preset that the user expects, or the cluster that Slurm or the modules name.

    Links cannot tell, since LUMI's nodes are Frontier's.
    """
    named = expected.source.removeprefix("preset ") if expected is not None else ""
    cluster = environ.get("SLURM_CLUSTER_NAME") or environ.get("LMOD_SYSTEM_NAME") or ""
    return next((name for name in (named, cluster.lower()) if name in SITES), OTHER)


def examine_environment(
    findings: Findings, environ: Mapping[str, str] = os.environ, nodes: int | None = None, site: str = OTHER
) -> list[dict[str, Any]]:
    """One row per variable: the value found, the value expected, why, and a remark where they differ.

    Args:
        findings: Takes what is not as it should be.
        environ: The environment.
        nodes: Nodes of the job; None where that is not known.
        site: One of `SITES`.
    """
    rows: list[tuple[str, str | None, str, str, str]] = []
    for variable in (variable for variable in VARIABLES if site in variable.sites):
        found = environ.get(variable.name)
        good = any(fnmatch.fnmatchcase(found, value) for value in variable.good) if found else not variable.good
        good |= (variable.name, found) == _ONE_NODE and nodes in (None, 1)
        stands = "is not set" if found is None else f"is {found!r}"
        wanted = variable.good[0] if variable.good else "not set"
        remark = "" if good else f"{variable.name} {stands}, expected {wanted}: {variable.reason}"
        if remark:
            findings.add(UNUSABLE if found in variable.fatal else DEGRADED, remark)
        rows.append((variable.name, found, wanted, variable.reason, remark))
    if site != "lumi":  # whose container brings the plug-in
        rows.append(_plugin_row(findings, environ))
    return [dict(zip(("name", "found", "expected", "reason", "remark"), row)) for row in rows]


def _plugin_row(findings: Findings, environ: Mapping[str, str]) -> tuple[str, str | None, str, str, str]:
    plugin = rccl_plugin(environ)
    remark = ""
    if plugin is None and environ.get("NCCL_NET") != "Socket":
        required = environ.get("NCCL_NET") in ("OFI", "AWS Libfabric")
        then = "RCCL stops, as NCCL_NET asks" if required else "RCCL falls back to TCP sockets"
        name = environ.get("NCCL_NET_PLUGIN") or _PLUGINS[0]
        remark = f"RCCL's network plug-in ({name}) is not in LD_LIBRARY_PATH: {then}; module load rccl-net-plugin"
        findings.add(UNUSABLE if required else DEGRADED, remark)
    return "RCCL plug-in", plugin, _PLUGINS[0], "carries RCCL over libfabric", remark


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
