"""``hzero doctor``: ranks and their devices, links, environment, operators and versions; one verdict."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hzero import __version__
from hzero.config import ConfigError
from hzero.doctor.environment import examine_environment
from hzero.doctor.links import examine_links, examine_peer_access
from hzero.doctor.operators import examine_operators
from hzero.doctor.show import console, show
from hzero.doctor.verdict import DEGRADED, GOOD, UNUSABLE, Findings
from hzero.topology.bootstrap import bootstrap
from hzero.topology.discovery import TIMEOUT_S, Discovery, discover
from hzero.topology.local import host_identity, machine_of, this_machine
from hzero.topology.machine import Device, Machine
from hzero.topology.preset import PRESETS
from hzero.topology.report import by_host, node_of
from hzero.topology.tiers import positions

_PACKAGES = ("torch", "deepspeed", "cupy-rocm-7-0", "cupy-cuda13x", "mpi4py", "numpy")
_EXAMPLES = f"""exit status: 0 good, 1 degraded (works, slower than this machine could), 2 unusable. Input that cannot be read
is one line on stderr and nothing on stdout, status 2.

examples:
  hzero doctor                               this machine, as one process sees it
  srun -N2 -n16 -c7 --gpus-per-task=1 --gpu-bind=closest hzero doctor     the ranks of a job, each on its device
  hzero doctor --topology dump.xml           a recorded node: rank - device - package - NIC, and its links
  hzero doctor --topology dump.xml --expect frontier --json
  HZERO_BACKEND=hip hzero doctor             fails where the HIP kernels cannot be used

presets: {", ".join(PRESETS)}"""


def run_doctor(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments; the exit status is the place of the verdict in `verdict.STATES`.

    As several ranks of a launcher it is collective: rank 0 prints, the others stay silent and end with 0.
    """
    parser = argparse.ArgumentParser(
        prog="hzero doctor",
        description="Tells where ranks sit, whether the links, the environment and the codecs' backends are what this "
        "machine could have, and names what is not.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--topology",
        metavar="SOURCE",
        help="a recorded node: an RCCL/NCCL topology dump, rocm-smi's JSON, nvidia-smi's matrix, a declared machine, a "
        "folder like /sys, or a preset; nothing of this process is looked at then",
    )
    parser.add_argument("--expect", metavar="PRESET|FILE", help="the machine whose links the node should have")
    parser.add_argument(
        "--timeout", type=float, default=TIMEOUT_S, metavar="S", help="longest wait for other ranks (%(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    parsed = parser.parse_args(list(arguments))
    expected = machine_of(parsed.expect) if parsed.expect is not None else None
    found = (
        examine_source(parsed.topology, expected) if parsed.topology is not None else examine(expected, parsed.timeout)
    )
    if found is None:
        return 0
    if parsed.json:
        print(json.dumps(found, indent=1))
    else:
        show(found, console())
    return int(found["status"])


def examine_source(source: str, expected: Machine | None = None) -> dict[str, Any]:
    """What ``hzero doctor --topology SOURCE --json`` prints: devices, links and verdict of a recorded node.

    Raises:
        TopologyError: The source cannot be read.
    """
    findings = Findings()
    machine = machine_of(source)
    for remark in machine.remarks:
        findings.add(GOOD, remark)
    if not machine.devices:
        findings.add(UNUSABLE, f"{machine.source}: no devices are there")
    links = examine_links(Path(source).name, machine, expected, findings)
    return _result(findings, ranks=_devices(machine, Path(source).name), links=[links] if links else [])


def examine(
    expected: Machine | None = None, timeout_s: float = TIMEOUT_S, environ: Mapping[str, str] = os.environ
) -> dict[str, Any] | None:
    """What ``hzero doctor --json`` prints; None on all ranks but the first. Collective where there are several ranks.

    Args:
        expected: The machine whose links the nodes should have; None takes the preset that describes their devices.
        timeout_s: Longest wait for other ranks, in seconds.
        environ: The environment of this rank.
    """
    findings = Findings()
    start = bootstrap(environ, visible=0)
    ranks: list[dict[str, Any]] = []
    links: list[dict[str, Any] | None] = []
    grid = None
    fabric = ""
    try:
        if start.world_size > 1:
            found = discover(environ=environ, timeout_s=timeout_s)
            if start.rank:
                return None
            ranks, fabric = _ranks(found), "+".join(found.clusters)
            grid = str(found.grid) if found.grid is not None else "no grid"
            if found.grid is None:
                findings.add(UNUSABLE, found.refusal)
            for note in found.notes:
                findings.add(GOOD, note)
            links = _links_of_nodes(found, expected, findings)
        else:
            machine = this_machine(environ)
            for remark in machine.remarks:
                findings.add(GOOD, remark)
            ranks, fabric = _devices(machine, host_identity(environ)), "+".join(nic.kind for nic in machine.nics)
            links = [examine_links("this node", machine, expected, findings)]
    except ConfigError as error:
        if start.rank:
            raise
        findings.add(UNUSABLE, str(error))
    environment: list[dict[str, Any]] = []
    devices = sum(row["device"] is not None for row in ranks)
    if devices and not torch.cuda.is_available():
        findings.add(
            DEGRADED,
            f"torch {torch.__version__} finds no GPU, though {devices} are there: it is built without "
            "ROCm or CUDA, or may not use them",
        )
    if "cxi" in fabric:
        hosts = len({row["host"] for row in ranks})
        environment = examine_environment(findings, environ, hosts if start.world_size > 1 else None)
    elif devices:
        findings.add(GOOD, "no Slingshot NIC is there, so the variables of OLCF's guide are not judged")
    return _result(
        findings,
        ranks=ranks,
        grid=grid,
        links=[node for node in links if node],
        peer_access=examine_peer_access(findings),
        environment=environment,
        operators=examine_operators(findings),
        versions={"hzero": __version__, "python": platform.python_version(), **_versions()},
    )


def _result(findings: Findings, **sections: Any) -> dict[str, Any]:
    return {"verdict": findings.verdict, "status": findings.status, "remarks": findings.remarks, **sections}


def _ranks(found: Discovery) -> list[dict[str, Any]]:
    """One row a rank of a world."""
    return [
        _row(report.rank, report.host, report.device, place.package)
        for report, place in zip(found.reports, found.places)
    ]


def _devices(machine: Machine, host: str) -> list[dict[str, Any]]:
    """One row a device of a node, without ranks."""
    try:
        packages = {number: place.node_package for number, place in positions(machine).items()}
    except ConfigError:
        packages = {}
    return [_row(None, host, device, packages.get(device.number)) for device in machine.devices]


def _row(rank: int | None, host: str, device: Device | None, package: int | None) -> dict[str, Any]:
    kind = "processor" if device is None else "hidden" if device.hidden else device.kind
    return {
        "rank": rank,
        "host": host,
        "device": device.number if device else None,
        "kind": kind,
        "bus": device.bus if device else "",
        "package": package,
        "numa": device.numa if device else None,
        "nic": device.nic if device else "",
    }


def _links_of_nodes(found: Discovery, expected: Machine | None, findings: Findings) -> list[dict[str, Any] | None]:
    with_device = by_host(report for report in found.reports if report.device is not None)
    return [
        examine_links(host, node_of(reports)[1], expected, findings, ranks=True)
        for host, reports in with_device.items()
    ]


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["hip"], found["cuda"] = torch.version.hip, torch.version.cuda
    if torch.cuda.is_available():
        found["rccl" if torch.version.hip else "nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found
