"""Checks ranks, devices, links, environment, codecs, versions and a configuration, and reports each fault.

exit status: 0 good, 1 degraded (works, but slower than this machine could), 2 unusable or wrong arguments

Examples:
  hzero doctor                               this machine, seen by one process
  srun -N2 -n16 -c7 --gpus-per-task=1 --gpu-bind=closest hzero doctor     the ranks of a job, each on its device
  hzero doctor --topology dump.xml --expect frontier     a node from a file, compared with a preset
  hzero doctor ds_config.json --nodes 64     a DeepSpeed configuration on 64 nodes like this one
  hzero doctor --log runs/NAME/slurm/*/*.log     known faults of RCCL, libfabric, Slurm and MIOpen in the logs of a job
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import itertools
import json
import math
import os
import platform
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml

from hzero import __version__, autoload
from hzero.block import KEY, PARENT, split
from hzero.block import read_text as parse_text
from hzero.calls import library_errors, quiet
from hzero.config import FIT, HERE, TopologyConfig, parse_config
from hzero.errors import ConfigError, one_of, printable, some
from hzero.files import read_json
from hzero.schema import Frozen
from hzero.tools.commands.logs import DEGRADED, GOOD, UNUSABLE, Finding, check_logs
from hzero.tools.launch import rank_variables
from hzero.tools.terminal import Parser, positive
from hzero.topology import Grid, declared_grid, resolve_grid
from hzero.topology.discovery import TIMEOUT_S, Exchange, by_host, discover, host_identity, merged_node
from hzero.topology.node import Device, Link, Node, grid_of_nodes, packages_of, product
from hzero.topology.sources import PRESETS, read_node

STATES = ("good", "degraded", "unusable")
WHERE = f"{KEY}.topology"
#: A link or NIC is good from this share of its expected bandwidth on, since sources round.
ENOUGH = 0.9
#: Products by architecture, for sources without product names.
_PRODUCTS = {"gfx90a": ("MI250X",), "gfx942": ("MI300X", "MI300A")}
#: Maximum number of ranks that are shown; `--json` has all.
_ROWS = 16


def run_doctor(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments and returns the verdict as the exit status.

    Collective if a launcher has started several ranks: rank 0 prints, and the other ranks return 0.
    """
    parser = Parser("hzero doctor", __doc__)
    add = parser.add_argument
    add("config", nargs="?", type=Path, metavar="CONFIG", help="a DeepSpeed configuration (JSON) to check")
    add("--topology", metavar="SOURCE", help="a file, a copy of /sys or a preset to check instead of this machine")
    expected = f"the machine whose devices, links and NICs the node should have; presets: {', '.join(PRESETS)}"
    add("--expect", metavar="PRESET|FILE", help=expected)
    add("--nodes", type=positive(int, 1e6), metavar="N", help="nodes of the run for which CONFIG is meant")
    wait = "longest wait for other ranks (%(default)g)"
    add("--timeout", type=positive(float, 1e6), default=TIMEOUT_S, metavar="S", help=wait)
    add("--log", nargs="+", type=Path, metavar="FILE", help="only search logs for known faults")
    add("--json", action="store_true", help="print JSON")
    parsed = parser.parse_args(arguments)
    if parsed.log:
        if parsed.config or parsed.topology or parsed.expect or parsed.nodes:
            raise ConfigError("--log: found with CONFIG, --topology, --expect or --nodes; expected it alone")
        found: dict[str, Any] | None = judged({}, list(check_logs(parsed.log)))
    else:
        found = examine(parsed)
    if found is None:
        return 0
    if parsed.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)
    return int(found["status"])


def examine(parsed: argparse.Namespace) -> dict[str, Any] | None:
    """The content of ``--json``; None on ranks other than 0. Collective if a launcher has started several ranks.

    Raises:
        ConfigError: A file cannot be read.
    """
    expected = read_node(parsed.expect, where="--expect") if parsed.expect is not None else None
    config = read_json(parsed.config, parse_text) if parsed.config is not None else {}
    variables = rank_variables(visible=0)
    rank, together = int(variables.get("RANK", 0)), bool(variables) and parsed.topology is None
    findings: list[Finding] = []
    nodes: dict[str, Node] = {}
    ranks: list[dict[str, Any]] = []
    grid, fabric = None, ""
    try:
        if together:
            environ = {**os.environ, **variables}
            found = discover(source_of(config), Exchange.of_environment(parsed.timeout, environ), environ)
            if rank:
                return None
            grid, fabric = found.grid, "+".join({report.fabric for report in found.reports})
            findings += [(GOOD, note) for note in found.notes] + [(UNUSABLE, found.refusal)] * (grid is None)
            for one, place in zip(found.reports, found.places):
                ranks.append({"rank": one.rank, "host": one.host, "package": place.package, **_row(one.device)})
            nodes = {host: merged_node(reports) for host, reports in by_host(found.reports).items()}
        else:
            node = read_node(parsed.topology or "auto")
            nodes = {host_identity() if parsed.topology is None else Path(parsed.topology).name: node}
            fabric, ranks = "+".join(nic.kind for nic in node.nics), [_row(device) for device in node.devices]
            findings += [(GOOD, remark) for remark in node.remarks]
            if parsed.topology is not None and not node.devices:
                findings.append((UNUSABLE, f"{node.source}: no devices found"))
    except ConfigError as error:
        if parsed.topology is not None or rank:
            raise
        findings.append((UNUSABLE, str(error)))
    hosts = defaultdict[Finding, list[str]](list)  # hosts by finding, since nodes are mostly equal
    for host, node in nodes.items():
        for finding in check_node(node, expected, together):
            hosts[finding].append(host)
    findings += [(status, f"{some(names, 4)}: {text}") for (status, text), names in hosts.items()]
    sections: dict[str, Any] = {"grid": str(grid) if grid is not None else None, "ranks": ranks}
    if parsed.topology is None:
        of_expected = () if expected is None else (expected,)
        slingshot = "cxi" in fabric or any(nic.kind == "cxi" for one in of_expected for nic in one.nics)
        kinds = {product(device.kind) for node in (*nodes.values(), *of_expected) for device in node.devices}
        site = site_of(os.environ, expected) if slingshot else None
        findings += check_environment(site, len(nodes), gfx90a=bool(kinds & MI200))
        findings += check_torch(sum(len(node.devices) for node in nodes.values()))
        findings += [*check_codecs(), *check_deepspeed(), *check_fsdp2(), *check_rccl(len(nodes)), *check_runtimes()]
        sections["versions"] = ", ".join(releases())
    if parsed.config is not None:
        node = next(iter(nodes.values()), Node("no node", ()))
        findings += check_config(parsed.config, config, node, parsed.nodes, grid)
    return judged(sections, findings)


def judged(sections: dict[str, Any], findings: Sequence[Finding]) -> dict[str, Any]:
    """Adds the findings as remarks, worst first, and the verdict."""
    worst_first = sorted(findings, key=lambda finding: -finding[0])
    remarks = [f"{('note', *STATES[1:])[status]}: {text}" for status, text in worst_first]
    status = max((status for status, _ in findings), default=GOOD)
    return {**sections, "remarks": remarks, "verdict": STATES[status], "status": status}


def _row(device: Device | None) -> dict[str, Any]:
    if device is None:
        return {"device": None, "kind": "CPU", "bus": "", "numa": None}
    kind = "hidden" if device.hidden else device.kind
    return {"device": device.number, "kind": kind, "bus": device.bus, "numa": device.numa}


# ---- nodes ------------------------------------------------------------------------------------------------------------


def check_node(node: Node, expected: Node | None, of_ranks: bool) -> Iterator[Finding]:
    """Checks the packages of a node, and compares its devices, links and NICs with an expected machine.

    Args:
        node: The node. Reports of ranks contain no NICs, and no links between devices without a rank.
        expected: The machine that the user expects, if any. Each missing or unknown part is a finding.
        of_ranks: Whether the node comes from reports of ranks.
    """
    if node.devices and (of_ranks or not any(device.hidden for device in node.devices)):
        try:
            packages_of(node, of_ranks=of_ranks)
        except ConfigError as error:
            yield UNUSABLE, str(error)
    if expected is None:
        return
    lines = differences(node, expected)
    slowest = min((nic.gb_s or 0 for nic in expected.nics), default=0)
    fast = [nic for nic in node.nics if (nic.gb_s or 0) >= ENOUGH * slowest]
    if not of_ranks and len(fast) < len(expected.nics):
        lines.append(f"found {len(node.nics)} NICs, expected {len(expected.nics)} of {slowest:g} GB/s")
    for line in lines:
        yield DEGRADED if node.devices else UNUSABLE, line
    if not lines:
        yield GOOD, f"no differences from {expected.source}"


def differences(node: Node, expected: Node) -> list[str]:
    """Lines about devices and links that are missing, of another kind, weaker than expected, or unknown.

    Numbers of devices may differ, so links are compared by bandwidth, fastest first.
    """
    lines = []
    if len(node.devices) != len(expected.devices):
        lines.append(f"found {len(node.devices)} devices, expected {len(expected.devices)} of {expected.source}")
    wanted = {product(device.kind) for device in expected.devices}
    for device in node.devices:
        if device.hidden:
            lines.append(f"device {device.number} is hidden by a cgroup or has no rank, so its links are not known")
        elif not {product(device.kind), *_PRODUCTS.get(product(device.kind), ())} & wanted:
            kinds = f"found {device.kind or 'no kind'}, expected {' or '.join(sorted(wanted))}"
            lines.append(f"device {device.number}: {kinds}")
    # NVIDIA's driver lists no NVLinks, so their absence is no finding.
    known = node.links or not any(link.kind.startswith("nv") for link in expected.links)
    if not node.devices or not known:
        return lines
    ordered = (sorted(one.links, key=lambda n: (-(n.gb_s or 0), -(n.count or 0))) for one in (node, expected))
    pairs = itertools.zip_longest(*ordered)
    weak = Counter(_text(link, want) for link, want in pairs if want is not None and _weaker(link, want))
    return lines + [f"{count} of {len(expected.links)} linked pairs: {text}" for text, count in weak.items()]


def _text(found: Link | None, expected: Link) -> str:
    return f"expected {expected}, found {found or 'none (routed)'}"


def _weaker(found: Link | None, expected: Link) -> bool:
    """Whether a link is slower than expected, or its bandwidth and count are unknown."""
    if found is None or found.kind == "pcie" != expected.kind:
        return True
    stated = ((found.count, expected.count), (found.gb_s, expected.gb_s))
    shares = [have / want for have, want in stated if have is not None and want is not None]
    return min(shares) < ENOUGH if shares else (expected.count, expected.gb_s) != (None, None)


# ---- environment ------------------------------------------------------------------------------------------------------

#: A machine with Slingshot, but without its own guide.
OTHER = "other"
SITES = ("frontier", "lumi", OTHER)
#: Devices of the architecture gfx90a, by product or architecture.
MI200 = {"gfx90a", "MI210", "MI250", "MI250X"}


class Variable(Frozen):
    """A variable that RCCL or libfabric reads: a row of ``environment.yaml``.

    Attributes:
        name: Its name.
        good: Good values, as patterns; the first is the recommended value. Empty: the variable should not be set.
        reason: The fault that the setting avoids.
        source: Publisher of the recommendation, and its date.
        fatal: Values with which a run hangs.
        fatal_from: The release of ROCm from which every other value is fatal; empty: none.
        sites: Sites where it is checked: some of `SITES`, or ``gfx90a``, with any network.
    """

    name: str
    good: list[str]
    reason: str
    source: str
    fatal: list[str] = []
    fatal_from: list[int] = []
    sites: list[str] = ["frontier", OTHER]


#: The variables that ``slurm/SITE.env`` sets, with the fault that each avoids.
VARIABLES = [Variable(**row) for row in yaml.safe_load(Path(__file__).with_name("environment.yaml").read_text())]
#: RCCL's transport on one node, where no fabric is needed (OLCF user guide).
_ONE_NODE = ("NCCL_NET", "Socket")

#: Values of ``NCCL_NET`` with which RCCL stops if the plug-in is missing.
_PLUGIN_NAMES = ("OFI", "Libfabric", "AWS Libfabric")
_PLUGINS = ("librccl-net.so", "libnccl-net.so", "librccl-net-ofi.so", "libnccl-net-ofi.so")


def site_of(environ: Mapping[str, str], expected: Node | None) -> str:
    """One of `SITES`: the expected preset, or the name of the cluster from Slurm or the modules.

    Links cannot distinguish LUMI's nodes from Frontier's.
    """
    named = expected.source.removeprefix("preset ") if expected is not None else ""
    cluster = environ.get("SLURM_CLUSTER_NAME") or environ.get("LMOD_SYSTEM_NAME") or ""
    return next((name for name in (named, cluster.lower()) if name in SITES), OTHER)


def check_environment(site: str | None, nodes: int = 1, *, gfx90a: bool = False) -> Iterator[Finding]:
    """Findings for variables without a good value, and for a missing network plug-in of RCCL.

    Args:
        site: One of `SITES`; None without Slingshot.
        nodes: Nodes of the job.
        gfx90a: Whether the devices are of this architecture.
    """
    wrong = False
    for variable in VARIABLES:
        if site not in variable.sites and not (gfx90a and "gfx90a" in variable.sites):
            continue
        found = os.environ.get(variable.name)
        good = any(fnmatch.fnmatchcase(found, value) for value in variable.good) if found else not variable.good
        if good or ((variable.name, found) == _ONE_NODE and nodes == 1):
            continue
        wrong, state = True, f"is {found!r}" if found is not None else "is not set"
        wanted = [*variable.good, "not set"][0]
        fatal = found in variable.fatal or (variable.fatal_from and rocm_release() >= variable.fatal_from)
        text = f"{variable.name} {state}, expected {wanted}: {variable.reason} ({variable.source})"
        yield UNUSABLE if fatal else DEGRADED, text
    net = os.environ.get("NCCL_NET")
    if site not in ("lumi", None) and not has_rccl_plugin() and net != "Socket":  # LUMI's container has it
        wrong, required = True, net in _PLUGIN_NAMES
        then = "RCCL stops, as NCCL_NET asks" if required else "RCCL falls back to TCP sockets"
        text = f"RCCL's network plug-in is not in LD_LIBRARY_PATH: {then}; module load rccl-net-plugin"
        yield UNUSABLE if required else DEGRADED, text
    if (site or gfx90a) and not wrong:
        yield GOOD, f"the environment has the settings for {site or 'gfx90a'}"


def has_rccl_plugin() -> bool:
    """Whether RCCL finds a network plug-in.

    ``NCCL_NET_PLUGIN`` selects another plug-in by path, file or the middle of the file's name; ``none`` disables it.
    """
    named = os.environ.get("NCCL_NET_PLUGIN", "")
    names = (named, f"librccl-net-{named}.so", f"libnccl-net-{named}.so") if named else _PLUGINS
    folders = [""] if "/" in named else filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    return any(Path(folder, name).is_file() for folder in folders for name in names)


# ---- software ---------------------------------------------------------------------------------------------------------


def check_torch(devices: int) -> Iterator[Finding]:
    """Checks that torch has GPUs if the nodes have ``devices``, and that this process' devices reach each other."""
    import torch

    if devices and not torch.cuda.is_available():
        text = f"torch {torch.__version__} sees no GPU, but {devices} were found: it may be built without ROCm or CUDA"
        yield DEGRADED, text
    for a, b in itertools.permutations(range(torch.cuda.device_count()), 2):
        if not torch.cuda.can_device_access_peer(a, b):  # a task's cgroup can block it (SchedMD bug 17793)
            yield DEGRADED, f"device {a} has no peer access to device {b}: traffic goes through the host"


def releases() -> list[str]:
    """Releases of the software that a run uses."""
    import torch

    found = [f"hzero {__version__}", f"python {platform.python_version()}", f"torch {torch.__version__}"]
    if release := rocm_release():
        found += [f"ROCm {'.'.join(map(str, release))}", f"RCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"]
    return found


def rocm_release() -> list[int]:
    """The release of ROCm in torch; older versions of torch lack its last part. Empty without ROCm."""
    import torch

    if release := getattr(torch.version, "rocm", None):
        return [int(part) for part in re.findall(r"\d+", release)]
    return [int(part) for part in re.findall(r"\d+", torch.version.hip or "")[:2]]


def check_rccl(nodes: int) -> Iterator[Finding]:
    """Known faults and costs of the loaded RCCL on ``nodes`` nodes."""
    import torch

    if not (release := rocm_release()):
        return
    version = torch.cuda.nccl.version()
    name = f"RCCL {'.'.join(map(str, version))}"
    if release[:2] == [7, 14] and not any(release[2:]) and nodes > 1:
        text = (
            f"{name} as packaged for ROCm 7.14.0 injects faults for tests, and is slow from 64 to 512 MB between nodes: take "
            "another release of ROCm, or build RCCL with -D FAULT_INJECTION=OFF (ROCm/TheRock#7903, 2026-07-20); doctor "
            "cannot tell such a build, so start the job with HZERO_CHECK=0 then"
        )
        yield UNUSABLE, text
    if version >= (2, 28) and nodes >= 8:
        text = (
            f"{name}: all-gathers over 8 nodes or more are hierarchical by default, with up to 128 MB per communicator that "
            "`hzero plan` leaves out; RCCL_HIERARCHICAL_ALLGATHER=0 turns it off (RCCL's change log, ROCm 7.13)"
        )
        yield GOOD, text


def check_codecs() -> Iterator[Finding]:
    """Compares the codecs' backend on each kind of device with the reference, on a bucket of awkward sizes."""
    import torch

    from hzero.codecs import backends
    from hzero.codecs.formats import TRAITS

    settings: list[dict[str, Any]] = [{"codec": codec} for codec in TRAITS]
    for codec, traits in TRAITS.items():
        settings += [{"codec": codec, "block_size": 64, "rotation": 64}] if traits.codes else []
        settings += [{"codec": codec, key: 9} for key in traits.settings if not traits.changes]
    for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        chosen, wrong = backends.choice(kind), []
        for one in settings:
            try:
                got = _tried(kind, one)
                with backends.reference_instead():
                    same = all(map(torch.equal, got, _tried(kind, one)))
                wrong += [] if same else [f"{kind}: {one} differs from the reference"]
            except RuntimeError as error:  # a kernel that does not compile or start
                wrong.append(f"{kind}: {one} fails: {error}")
        yield from ((UNUSABLE, text) for text in wrong)
        if chosen.fallback:
            yield DEGRADED, f"{kind}: codecs run in plain torch, several times slower: {chosen.why}"
        elif not wrong:
            yield GOOD, f"{kind}: codecs run as {chosen.name} ({chosen.why}), equal to the reference"


def _tried(kind: str, settings: dict[str, Any]) -> list[Any]:
    """Results of a codec's operators: a payload, its decoded tensors, and the sums of its two rows."""
    import torch

    from hzero.codecs import exact
    from hzero.codecs.codec import Codec
    from hzero.codecs.formats import TRAITS, Rows
    from hzero.config import CodecConfig

    if TRAITS[settings["codec"]].changes:
        old = [torch.linspace(-1.0, 1.0, chunk).to(kind, torch.bfloat16) for chunk in (517, 64)]
        new = [one * 1.01 for one in old]
        layout = exact.Layout.of((517, 64))
        record = old[0].new_zeros(layout.record_bytes(layout.dense_bytes), dtype=torch.uint8)
        exact.measure(new, old, record[: layout.head])
        exact.encode(new, old, record)
        copies = [one.view(1, -1) for one in old]
        right = exact.decode(record, copies, [0])
        return [record, right, *copies, *new]
    codec, chunks = Codec.from_config(CodecConfig(**settings)), (517, 64)
    generator = torch.Generator().manual_seed(0)
    source = [torch.randn(4 * chunk, generator=generator).to(kind) for chunk in chunks]
    order: dict[str, Any] = {"sizes": [2, 2], "strides": [1, 2], "outer": 2}
    payload = codec.encode(source, chunks, **order)
    sums = codec.decoder(Rows.of(chunks, (2, 2), outer=2), torch.float32, payload.device, sums=True)(payload)
    return [payload, *codec.decode(payload, chunks, dtype=torch.float32, **order), *sums]


def check_runtimes() -> Iterator[Finding]:
    """GPU runtimes of this process, and of one with CuPy. A second runtime shares neither torch's memory nor its streams."""
    import torch

    from hzero.codecs.launchers import runtimes, runtimes_with_cupy

    if torch.version.hip or torch.version.cuda:  # on login nodes without GPUs too
        ways = ("torch loads", UNUSABLE, runtimes()), ("torch with CuPy loads", DEGRADED, runtimes_with_cupy())
        for way, worst, found in ways:
            if found:
                advice = ", expected one: they share neither memory nor streams; hzero does not need CuPy"
                text = f"{way} the GPU runtime {' and '.join(found)}"
                yield (GOOD, text) if len(found) < 2 else (worst, text + advice)


def check_deepspeed() -> Iterator[Finding]:
    """The installed DeepSpeed, its features that hzero supports, and every function whose source differs."""
    try:
        with quiet():
            from hzero.deepspeed import versions
        yield from ((UNUSABLE, f"deepspeed has another {one}") for one in versions.differences())
        versions.check_deepspeed()
        yield from ((DEGRADED, f"deepspeed: {one}; hzero was not tested with it") for one in versions.changes())
        yield GOOD, f"deepspeed {versions.describe()}"
    except (ImportError, ConfigError) as error:
        yield UNUSABLE, f"deepspeed cannot be used: {error}"


def check_fsdp2() -> Iterator[Finding]:
    """Whether hzero supports this torch's FSDP2. An unsupported torch is good, since DeepSpeed may be used instead."""
    from hzero.fsdp.modules import torch_support

    try:
        yield GOOD, f"FSDP2 with {torch_support()}"
    except ConfigError as error:
        yield GOOD, f"FSDP2 cannot be used: {error}"


# ---- a DeepSpeed configuration ----------------------------------------------------------------------------------------


def source_of(config: Mapping[str, Any]) -> str:
    """The source from which a run discovers its grid; ``auto`` for a declared grid, and for a block with errors."""
    with contextlib.suppress(ConfigError):
        topology = parse_config(split(config)[0] or {}).topology
        if declared_grid(topology, WHERE) is None:
            return topology.source
    return "auto"


def grid_of(topology: TopologyConfig, node: Node, nodes: int | None, discovered: Grid | None) -> Grid | None:
    """The grid of a run; None if the number of ranks is unknown.

    Args:
        topology: The block's topology.
        node: The node that a discovery would find.
        nodes: The number of such nodes; None if unknown.
        discovered: The grid of the ranks that a launcher has started; None for one process.

    Raises:
        ConfigError: A file cannot be read, packages are ambiguous, or the ranks do not form the grid.
    """
    declared = declared_grid(topology, WHERE)
    if declared is None:
        if discovered is not None:
            return discovered.grouped(topology.nodes_per_group)
        if topology.source not in HERE:
            node = read_node(topology.source, where=WHERE)
            if not node.devices:
                raise ConfigError(f"{WHERE}: found no devices in {topology.source!r}; expected a node with some")
        if not node.devices:
            return None
        declared = grid_of_nodes(node, WHERE, nodes_per_group=topology.nodes_per_group)
    ranks = (declared.packages_per_node or 0) * declared.devices_per_package * (nodes or declared.nodes or 0)
    ranks = discovered.world_size if discovered is not None else ranks
    return resolve_grid(declared, ranks, WHERE) if ranks else None


def check_config(
    path: Path, config: Mapping[str, Any], node: Node, nodes: int | None, discovered: Grid | None
) -> list[Finding]:
    """Findings for a configuration: its effect, and all faults that prevent it.

    Args:
        path: The file, for messages.
        config: Its content.
        node: See `grid_of`.
        nodes: See `grid_of`.
        discovered: See `grid_of`.
    """
    with quiet():
        from hzero.deepspeed import autotp
        from hzero.deepspeed.refusals import check_written, ignored
        from hzero.program.shards import ShardPlan
    findings: list[Finding] = []
    block = parsed = grid = None
    beside = ""
    with _reported(path, findings):
        block, rest = split(config)
        parsed = parse_config(block) if block is not None else None
    with _reported(path, findings):
        grid = grid_of(parsed.topology if parsed is not None else TopologyConfig(), node, nodes, discovered)
    if block is not None and parsed is None:  # so that an error in the block hides no other fault
        config = rest
    with _reported(path, findings):
        read = check_written(config, _data_parallel_ranks(config, grid))
        build(read)
        findings += [(DEGRADED, f"{path}: {error}; DeepSpeed ignores it") for error in ignored(read, "")]
        if parsed is not None and read.tensor_parallel_config.autotp_size > 1:
            owners = autotp.check(read, parsed, grid)
            grid, beside = (owners.grid, str(owners)) if owners is not None else (None, "")
    if parsed is None:
        stock = (DEGRADED, f'{path}: no "{KEY}" block: DeepSpeed runs without hzero')
        return [*findings, stock] if block is None else findings
    effect = f"{parsed.preset}, on the grid of the ranks that are started"
    if config.get(PARENT, {}).get("stage") == 1:
        effect = f"codecs of {parsed.preset} with ZeRO-1, of a PipelineModule only"
    else:
        for dimension in sorted({"pipeline", "optimizer"} & set(parsed.codecs.dimensions)):
            text = f"{path}: {KEY}.codecs.{dimension} has no effect but for a PipelineModule, with stage 1"
            findings.append((DEGRADED, text))
        with _reported(path, findings):
            if grid is not None:
                plan = ShardPlan.from_config(parsed, grid, 0)
                by_module = f"; gathers by module ({parsed.by_module})" if parsed.by_module else ""
                what = f"{grid}; it chooses the layout at the start" if parsed.preset == FIT else plan
                effect = f"{parsed.preset} on {what}{beside}{by_module}"
                findings += [(GOOD, f"{path}: {remark}") for remark in (*plan.adaptations, *plan.notes)]
    if state := autoload_off():
        findings.append((DEGRADED, f"autoload is {state}: start the script with `hzero run`, or import hzero in it"))
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on"):
        findings.append((UNUSABLE, "ACCELERATE_USE_CPU is set: Accelerate trains DDP then, without DeepSpeed"))
    return [(GOOD, f"{path}: {effect}"), *findings]


@contextlib.contextmanager
def _reported(path: Path, findings: list[Finding]) -> Iterator[None]:
    """Converts an error in the block to a finding, unless it is already one."""
    try:
        with quiet(), library_errors("DeepSpeed refuses it"):
            yield
    except ConfigError as error:
        if (finding := (UNUSABLE, f"{path}: {error}")) not in findings:
            findings.append(finding)


def _data_parallel_ranks(config: Mapping[str, Any], grid: Grid | None) -> int:
    """The ranks that share a batch. Without a grid, the number that follows from the batch sizes, otherwise 1."""
    if grid is not None:
        tensor, ranks = config.get("tensor_parallel"), grid.world_size
        tensor_size = tensor.get("autotp_size") if isinstance(tensor, Mapping) else 1
        for size in (tensor_size, config.get("sequence_parallel_size")):
            ranks //= size if type(size) is int and size > 0 else 1
        return max(ranks, 1)
    with contextlib.suppress(KeyError, TypeError, ValueError, ArithmeticError):  # missing, "auto" or 0
        step = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
        return max(int(config["train_batch_size"] // step), 1)
    return 1


#: Parameters of DeepSpeed's Adam that torch's Adam lacks.
_OF_KERNELS = {"torch_adam", "adam_w_mode", "adamw_mode", "bias_correction", "set_grad_none", "fp32_optimizer_states"}


def build(config: Any) -> None:
    """Builds the optimizer and the scheduler of a ``DeepSpeedConfig`` around one weight, so that wrong values raise here.

    It also checks types. Trainer fills in values that are ``auto``. Optimizers that torch lacks are not built, since they need
    DeepSpeed's kernels.

    Raises:
        ConfigError: DeepSpeed has no such optimizer or scheduler, or a value has a wrong type.
    """
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DtypeEnum
    from torch import optim, zeros

    from hzero.deepspeed.refusals import classes_of, optimizer_class

    # DeepSpeed accepts any value of these keys, and fails when it uses one.
    for key, default in vars(type(config)({"train_micro_batch_size_per_gpu": 1})).items():
        if isinstance(default, (int, float)) and isinstance(found := getattr(config, key), (str, list, dict)):
            expected = "true or false" if isinstance(default, bool) else "a number"
            raise ConfigError(f"{key}: found {found!r}; expected {expected}")
    types = [name for name in DtypeEnum._value2member_map_ if isinstance(name, str)]
    for key in ("grad_accum_dtype", "param_dtype", "buffer_dtype"):
        if (found := getattr(config, key, None)) not in (None, *types):
            raise one_of(f"data_types.{key}", found, types)
    kind = optimizer_class(config)
    schedulers = {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}
    schedulers |= classes_of(optim.lr_scheduler)
    if (schedule := config.scheduler_name) is not None and schedule not in schedulers:
        raise one_of("scheduler.type", schedule, schedulers)
    given = config.optimizer_params or {}
    kept = {key: value for key, value in given.items() if value != "auto" and key not in _OF_KERNELS}
    made = kind([zeros(1)], **kept) if kind is not None else optim.AdamW([zeros(1)])
    if schedule is not None and "auto" not in (given := config.scheduler_params or {}).values():
        schedulers[schedule](made, **given)


def autoload_off() -> str:
    """``off`` with the reason, if torch does not load hzero automatically; else empty."""
    if not any(entry.name == "hzero" for entry in entry_points(group="torch.backends")):
        return "off, since hzero is not installed as a package"
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return f"off by TORCH_DEVICE_BACKEND_AUTOLOAD={os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD']}"
    off = os.environ.get(autoload.VARIABLE, "1").strip().lower() in ("0", "false", "no", "off")
    return f"off by {autoload.VARIABLE}" if off else ""


# ---- output -----------------------------------------------------------------------------------------------------------


def show(found: dict[str, Any]) -> None:
    """Prints the result of `examine`: grid, ranks and versions, then the remarks and the verdict."""
    if found.get("grid"):
        print(f"grid: {found['grid']}")
    if ranks := found.get("ranks"):
        if len(ranks) > _ROWS:
            print(f"# the first {_ROWS} of {len(ranks):,} ranks; --json has all")
        rows = {"ranks": ranks[:_ROWS]}
        print(yaml.safe_dump(rows, sort_keys=False, default_flow_style=None, width=math.inf), end="")
    if found.get("versions"):
        print(f"versions: {found['versions']}")
    for text in (*found["remarks"], f"verdict: {found['verdict']}"):
        print(printable(text))
