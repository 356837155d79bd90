"""The environment of a process on a machine with Slingshot: RCCL's plug-in, and the variables that the site's guide sets."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hzero.commands.ds_config import DEGRADED, UNUSABLE, Finding
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


def examine_environment(findings: list[Finding], site: str, nodes: int = 1) -> list[dict[str, Any]]:
    """One row for each variable that is not as it should be, and for RCCL's plug-in if it is missing.

    Args:
        findings: Takes the same as lines.
        site: One of `SITES`.
        nodes: Nodes of the job.
    """
    rows: list[dict[str, Any]] = []
    for variable in (variable for variable in VARIABLES if site in variable.sites):
        found = os.environ.get(variable.name)
        good = any(fnmatch.fnmatchcase(found, value) for value in variable.good) if found else not variable.good
        if good or ((variable.name, found) == _ONE_NODE and nodes == 1):
            continue
        state, wanted = f"is {found!r}" if found is not None else "is not set", (*variable.good, "not set")[0]
        text = f"{variable.name} {state}, expected {wanted}: {variable.reason}"
        findings.append((UNUSABLE if found in variable.fatal else DEGRADED, text))
        rows.append({"variable": variable.name, "found": found, "expected": wanted, "why": variable.reason})
    if (
        site != "lumi" and rccl_plugin() is None and os.environ.get("NCCL_NET") != "Socket"
    ):  # LUMI's container brings it
        required = os.environ.get("NCCL_NET") in ("OFI", "AWS Libfabric")
        then = "RCCL stops, as NCCL_NET asks" if required else "RCCL falls back to TCP sockets"
        text = f"RCCL's network plug-in is not in LD_LIBRARY_PATH: {then}; module load rccl-net-plugin"
        findings.append((UNUSABLE if required else DEGRADED, text))
        rows.append({"variable": "RCCL plug-in", "found": None, "expected": _PLUGINS[0], "why": then})
    return rows


def rccl_plugin() -> str | None:
    """Path of the network plug-in that RCCL would load; None if the library path has none.

    ``NCCL_NET_PLUGIN`` names another one, by its path, its file or the middle of its file's name; ``none`` means none.
    """
    named = os.environ.get("NCCL_NET_PLUGIN", "")
    names = (named, f"librccl-net-{named}.so", f"libnccl-net-{named}.so") if named else _PLUGINS
    folders = [""] if "/" in named else os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    paths = (Path(folder, name) for folder in folders for name in names if folder or "/" in name)
    return next((str(path) for path in paths if path.is_file()), None)
