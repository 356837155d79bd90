"""``hzero doctor``: checks ranks and their devices, links, environment, operators, versions, a configuration; one verdict."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hzero import __version__
from hzero.arguments import Parser
from hzero.doctor.configuration import autoload_state, examine_configuration, examine_deepspeed
from hzero.doctor.environment import examine_environment, site_of
from hzero.doctor.links import examine_links, examine_peer_access
from hzero.doctor.mpi import examine_mpi, started_by_mpi
from hzero.doctor.show import show
from hzero.doctor.verdict import DEGRADED, GOOD, UNUSABLE, Findings
from hzero.terminal import console
from hzero.topology import Grid
from hzero.topology.bootstrap import bootstrap
from hzero.topology.discovery import TIMEOUT_S, discover
from hzero.topology.local import host_identity, machine_of, this_machine
from hzero.topology.machine import Device, Machine
from hzero.topology.preset import PRESETS
from hzero.topology.rank_report import by_host, node_of
from hzero.topology.tiers import positions
from hzero.validation import ConfigError

_PACKAGES = ("torch", "deepspeed", "cupy-rocm-7-0", "cupy-cuda13x", "mpi4py", "numpy")
_EXAMPLES = f"""exit status: 0 good, 1 degraded (works, but more slowly than this machine could), 2 unusable. Input that
cannot be read gives one line on stderr, nothing on stdout, and status 2.

examples:
  hzero doctor                               this machine, as one process sees it
  srun -N2 -n16 -c7 --gpus-per-task=1 --gpu-bind=closest hzero doctor     the ranks of a job, each on its device
  mpiexec -n 8 hzero doctor                  the ranks of a job, their MPI, and a compressed collective over it
  hzero doctor --topology dump.xml           a node from a file: devices, packages, NICs and links
  hzero doctor --topology dump.xml --expect frontier --json
  HZERO_BACKEND=hip hzero doctor             fails if the HIP kernels cannot be used
  hzero doctor ds_config.json                this machine, and a DeepSpeed configuration as it will be used on it

presets: {", ".join(PRESETS)}"""


def parser() -> argparse.ArgumentParser:
    """Reads the command's arguments."""
    made = Parser(
        prog="hzero doctor",
        description="Checks ranks, links, environment and the backends of the codecs, and names each fault.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add(
        "config",
        nargs="?",
        type=Path,
        metavar="CONFIG",
        help='a DeepSpeed configuration (JSON) with the "hzero" block, to check as it will be used',
    )
    add(
        "--topology",
        metavar="SOURCE",
        help="a node to check in place of this machine: an RCCL or NCCL topology dump, nvidia-smi's matrix, a declared "
        "machine, a copy of /sys, or a preset",
    )
    add(
        "--expect",
        metavar="PRESET|FILE",
        help="the machine whose devices, links and NICs the node should have; what is missing or not known is named, and the "
        "verdict is then never good",
    )
    add("--timeout", type=float, default=TIMEOUT_S, metavar="S", help="longest wait for other ranks (%(default)g)")
    add("--json", action="store_true", help="print JSON in place of tables")
    return made


def run_doctor(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments; the exit status is the place of the verdict in `verdict.STATES`.

    As several ranks of a launcher it is collective: rank 0 prints, the others stay silent and end with 0.
    """
    parsed = parser().parse_args(list(arguments))
    if not 0 < parsed.timeout <= 1e6:
        raise ConfigError(f"--timeout: found {parsed.timeout:g}, expected more than 0 and at most 1e6 seconds")
    expected = machine_of(parsed.expect, where="--expect") if parsed.expect is not None else None
    found = (
        examine_source(parsed.topology, expected, parsed.config)
        if parsed.topology is not None
        else examine(expected, parsed.timeout, config=parsed.config)
    )
    if found is None:
        return 0
    if parsed.json:
        print(json.dumps(found, indent=1))
    else:
        show(found, console())
    return int(found["status"])


def examine_source(source: str, expected: Machine | None = None, config: Path | None = None) -> dict[str, Any]:
    """The content of ``hzero doctor --topology SOURCE --json``: devices, links and verdict of a node.

    Raises:
        ConfigError: The source cannot be read.
    """
    findings = Findings()
    machine = machine_of(source)
    findings.add(GOOD, *machine.remarks)
    if not machine.devices and expected is None:
        findings.add(UNUSABLE, f"{machine.source}: no devices found")
    links = examine_links(Path(source).name, machine, expected, findings)
    return _result(
        findings,
        ranks=_devices(machine, Path(source).name),
        links=[links] if links else [],
        configuration=examine_configuration(config, None, 1, findings) if config is not None else None,
    )


def examine(
    expected: Machine | None = None,
    timeout_s: float = TIMEOUT_S,
    environ: Mapping[str, str] = os.environ,
    config: Path | None = None,
) -> dict[str, Any] | None:
    """The content of ``hzero doctor --json``; None on all ranks but the first. Collective if started as several ranks.

    Args:
        expected: The machine whose links the nodes should have; None takes the preset that describes their devices.
        timeout_s: Longest wait for other ranks, in seconds.
        environ: The environment of this rank.
        config: A DeepSpeed configuration to check as it will be used.

    Raises:
        ConfigError: The configuration cannot be read.
    """
    import torch  # here, so that completion of the command does without

    from hzero.doctor.operators import examine_operators

    findings = Findings()
    start = bootstrap(environ, visible=0)
    ranks: list[dict[str, Any]] = []
    links: list[dict[str, Any] | None] = []
    grid: Grid | None = None
    mpi: dict[str, Any] | None = None
    refusal = ""
    fabric = ""
    try:
        if start.world_size > 1:
            found = discover(environ=environ, timeout_s=timeout_s)
            if started_by_mpi(environ):
                mpi = examine_mpi(start, findings, timeout_s, environ)
            if start.rank:
                return None
            placed = zip(found.reports, found.places)
            ranks = [_row(report.rank, report.host, report.device, place.package) for report, place in placed]
            fabric = "+".join(found.clusters)
            grid, refusal = found.grid, found.refusal
            if grid is None:
                findings.add(UNUSABLE, refusal)
            findings.add(GOOD, *found.notes)
            for host, reports in by_host(found.reports).items():
                machine = node_of(reports)[1] if reports[0].device is not None else Machine(f"node {host}", ())
                links.append(examine_links(host, machine, expected, findings, ranks=True))
        else:
            machine = this_machine(environ)
            findings.add(GOOD, *machine.remarks)
            ranks, fabric = _devices(machine, host_identity(environ)), "+".join(nic.kind for nic in machine.nics)
            links = [examine_links("this node", machine, expected, findings)]
    except ConfigError as error:
        if start.rank:
            raise
        findings.add(UNUSABLE, str(error))
    environment: list[dict[str, Any]] = []
    devices = sum(row["device"] is not None for row in ranks)
    if devices and not torch.cuda.is_available():
        why = "it is built without ROCm or CUDA, or may not use them"
        findings.add(DEGRADED, f"torch {torch.__version__} sees no GPU, but {devices} were found: {why}")
    if "cxi" in fabric or (expected is not None and any(nic.kind == "cxi" for nic in expected.nics)):
        hosts = len({row["host"] for row in ranks})
        nodes = hosts if start.world_size > 1 else None
        environment = examine_environment(findings, environ, nodes, site_of(environ, expected))
    elif devices:
        findings.add(GOOD, "no Slingshot NIC found, so the variables of sites with Slingshot are not judged")
    return _result(
        findings,
        ranks=ranks,
        grid=str(grid) if grid is not None else "no grid" if refusal else None,
        links=[node for node in links if node],
        peer_access=examine_peer_access(findings),
        environment=environment,
        operators=examine_operators(findings),
        mpi=mpi,
        deepspeed=examine_deepspeed(findings),
        configuration=None
        if config is None
        else examine_configuration(config, grid, start.world_size, findings, environ),
        autoload=autoload_state(environ),
        versions={"hzero": __version__, "python": platform.python_version(), **_versions()},
    )


def _result(findings: Findings, **sections: Any) -> dict[str, Any]:
    return {"verdict": findings.verdict, "status": findings.status, "remarks": findings.remarks, **sections}


def _devices(machine: Machine, host: str) -> list[dict[str, Any]]:
    """One row per device of a node, without ranks."""
    try:
        packages = {number: place.node_package for number, place in positions(machine).items()}
    except ConfigError:
        packages = {}
    return [_row(None, host, device, packages.get(device.number)) for device in machine.devices]


def _row(rank: int | None, host: str, device: Device | None, package: int | None) -> dict[str, Any]:
    return {
        "rank": rank,
        "host": host,
        "device": device.number if device else None,
        "kind": "processor" if device is None else "hidden" if device.hidden else device.kind,
        "bus": device.bus if device else "",
        "package": package,
        "numa": device.numa if device else None,
        "nic": device.nic if device else "",
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    import torch

    found["hip"], found["cuda"] = torch.version.hip, torch.version.cuda
    if torch.cuda.is_available():
        found["rccl" if torch.version.hip else "nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found
