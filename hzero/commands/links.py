"""``hzero links``: measures bandwidth and latency of every tier, and the time of each hop with and without codecs."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hzero import __version__
from hzero.bootstrap import launched
from hzero.codecs.formats import SUMMED
from hzero.config import TRANSPORTS, TopologyConfig
from hzero.launch import run_launched, run_ranks
from hzero.plan.links_file import SCHEMA, LinkRow, LinksFile, node_all_gather, tier_rate, write_links
from hzero.topology import declared_grid, resolve_grid
from hzero.topology.sources import machine_of
from hzero.validation import ConfigError, Parser, from_rank_0, of_all_ranks, one_of, positive, printable, validated

#: Maximum number of ranks that the command starts on one machine.
MAX_RANKS = 256
#: How long the ranks may take to import torch and meet, in seconds; collectives wait for --timeout.
START_TIMEOUT_S = 300.0
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_HEAD = (
    "#      size      count      type  op                     time         min         max      algbw      busbw\n"
    "#       (B)                                              (us)        (us)        (us)     (GB/s)     (GB/s)"
)
_ABOUT = (
    "Measures bandwidth and latency of every tier. Under srun, torchrun or mpiexec every process is a rank; otherwise the "
    "command starts the ranks itself."
)
_EPILOG = """Sizes and rates are those of rccl-tests (its doc/PERFORMANCE.md): size is the whole array over one group, and busbw =
size / time x (n - 1) / n for groups of n ranks. Time is the median over the iterations, each of its slowest rank. All
groups of a tier run at once, as in training. doubling and pairs are all-gathers by another algorithm. weights/CODEC and
gradients/CODEC are hops as in training (encode, gather or reduce, decode), whose size is the one before encoding.

examples:
  hzero links --topology 2x2x2      8 ranks on this machine as 2 nodes x 2 GPUs x 2 GCDs
  mpiexec -n 8 hzero links --topology 2x2x2 --transport mpi
  srun -N2 -n16 -c7 --gpus-per-task=1 --gpu-bind=closest hzero links --max-bytes 1G --out frontier.json"""


def _topology(text: str) -> TopologyConfig:
    if not re.fullmatch(r"[\dx]+", text, re.ASCII):
        return TopologyConfig(source=text)
    factors = re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})", text)
    if factors is None:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected nodes x GPUs x GCDs, as in 2x2x2")
    values = dict(zip(("nodes", "gpus_per_node", "gcds_per_gpu"), map(int, factors.groups())))
    try:
        return validated(TopologyConfig, values, "")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size(text: str) -> int:
    found = re.fullmatch(r"([1-9]\d{0,14})([KMG]?)(?:i?B)?", text, re.IGNORECASE | re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected bytes, such as 512, 4K, 16M or 1G (powers of 1024)")
    return int(found[1]) * _UNITS[found[2].upper()]


def _codecs(text: str) -> list[str]:
    for name in text.split(","):
        if name not in SUMMED:
            raise argparse.ArgumentTypeError(str(one_of("", name, SUMMED, "codec")))
    return list(dict.fromkeys(text.split(",")))


def run_links(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments.

    Returns:
        Exit status: 0, 1 if a rank failed, 2 for input that the ranks refused, 130 after Ctrl-C.

    Raises:
        ConfigError: Input that cannot be used, or nothing to measure.
    """
    parser = Parser("hzero links", _ABOUT, _EPILOG)
    add = parser.add_argument
    where = "nodes x GPUs per node x GCDs per GPU, a file with the keys of a declared topology, or auto (default): discover it"
    add("--topology", type=_topology, default="auto", metavar="NxPxG|FILE|auto", help=where)
    add("--min-bytes", type=_size, default="4K", metavar="SIZE", help="smallest size, such as 512 or 4K (default 4K)")
    add("--max-bytes", type=_size, default="16M", metavar="SIZE", help="largest size, such as 1G (default 16M)")
    add("--codecs", type=_codecs, default="none,int8,int4", help=f"codecs of {', '.join(SUMMED)} (default %(default)s)")
    add("--device", choices=("auto", "cpu"), default="auto", help="auto (GPUs if torch has them) or cpu")
    add("--transport", choices=TRANSPORTS, default="torch", help="what carries the messages; mpi under mpiexec or srun")
    timed = "timed iterations per measurement (default 20)"
    add("--iterations", type=positive(int, 1e9), default=20, metavar="N", help=timed)
    wait = "how many seconds one collective may take (default 120)"
    add("--timeout", type=positive(float, 1e6), default=120.0, metavar="S", help=wait)
    add("--out", type=Path, default="links.json", metavar="FILE", help="JSON file to write (default links.json)")
    add("--overwrite", action="store_true", help="replace FILE if it exists")
    parsed = parser.parse_args(arguments)
    if parsed.max_bytes < parsed.min_bytes:
        raise ConfigError(f"--max-bytes: found {parsed.max_bytes:,}, less than --min-bytes {parsed.min_bytes:,}")
    if launched():
        run_launched(partial(measure, parsed))
    check_output(parsed)
    if parsed.transport == "mpi":
        raise ConfigError("--transport: found 'mpi', whose ranks mpiexec or srun starts; expected torch")
    ranks = ranks_to_start(parsed.topology)
    if not 1 < ranks <= MAX_RANKS:
        raise ConfigError(f"--topology: found {ranks:,} ranks for this machine, expected 2 to {MAX_RANKS}")
    logs = Path(tempfile.mkdtemp(prefix="hzero-links-"))
    status = run_ranks(partial(measure, parsed, "hzero"), ranks, logs=logs, imports=("hzero.commands.probe",))
    if status != 1:
        shutil.rmtree(logs, ignore_errors=True)
    return status


def check_output(parsed: argparse.Namespace) -> None:
    """Refuses a file that could not be written: ranks measure for minutes before they write it. Raises `ConfigError`."""
    out: Path = parsed.out
    if out.suffix != ".json":
        raise ConfigError(f"--out: found {str(out)!r}, expected a name that ends in .json")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise ConfigError(f"--out: found {str(out)!r}, expected a file in a folder that you can write to")
    if out.is_dir() or (out.exists() and not parsed.overwrite):
        raise ConfigError(f"--out: {str(out)!r} exists; --overwrite replaces a file, --out FILE writes elsewhere")


def ranks_to_start(topology: TopologyConfig) -> int:
    """The number of ranks that a topology has on this machine. Raises `ConfigError` where it does not say."""
    declared = declared_grid(topology, "--topology")
    if declared is not None:
        return (declared.nodes or 1) * (declared.gpus_per_node or 0) * declared.gcds_per_gpu
    if ranks := len(machine_of(topology.source).devices):
        return ranks
    raise ConfigError("--topology: found no GPUs on this machine; expected nodes x GPUs x GCDs to start, as in 2x2x2")


def measure(parsed: argparse.Namespace, launcher: str = "") -> None:
    """Measures together with all other ranks; rank 0 prints each row and writes the file. Collective.

    Raises:
        ConfigError: Input that cannot be used.
        PlainError: A collective failed or timed out.
    """
    warnings.simplefilter("ignore")  # torch's, about its own calls
    import torch
    import torch.distributed as dist

    from hzero.codecs.backends import choice
    from hzero.commands.probe import Probe, measurements

    use_gpu = parsed.device == "auto" and torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=max(parsed.timeout, START_TIMEOUT_S))
    dist.init_process_group("nccl" if use_gpu else "gloo", timeout=timeout)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    from_rank_0(lambda: check_output(parsed))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    least = torch.tensor(torch.cuda.mem_get_info(device)[0] if use_gpu else memory, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    memory, needed = int(least), 4 * parsed.max_bytes  # messages are sent and received, encoded and decoded
    if needed > memory:
        found = f"found {parsed.max_bytes:,}, which needs {needed:,} bytes per rank"
        raise of_all_ranks(ConfigError(f"--max-bytes: {found}; a rank has {memory:,}"))
    grid = resolve_grid(parsed.topology, world_size, "--topology")
    backend = "mpi" if parsed.transport == "mpi" else dist.get_backend()
    name, codecs = torch.cuda.get_device_name(device) if use_gpu else "cpu", choice(device.type).name
    if rank == 0:
        print(f"# hzero links: {world_size:,} ranks, {grid}; {backend} on {name}, codecs by {codecs}", flush=True)
    sizes = [parsed.min_bytes * 4**step for step in range(25) if parsed.min_bytes * 4**step <= parsed.max_bytes]
    rows: list[LinkRow] = []
    probe = Probe(grid, device, parsed.transport, parsed.iterations, parsed.timeout)
    for one in measurements(grid, sizes, parsed.codecs, torch.bfloat16 if use_gpu else torch.float32):
        if rank == 0 and (not rows or rows[-1].tier != one.tier):
            print(f"# tier {one.tier}: {world_size // one.ranks} x {one.ranks} ranks, all at once", _HEAD, sep="\n")
        rows.append(probe.measure(one))
        if rank == 0:
            print(line(rows[-1]), flush=True)
    if rank == 0:
        links = LinksFile(
            schema=SCHEMA,
            date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            machine={"host": platform.node(), "processor": platform.processor() or platform.machine()},
            versions={"python": platform.python_version(), "hzero": __version__, "torch": torch.__version__},
            backend=backend,
            device=name,
            codecs=codecs,
            launcher=launcher or "other",
            grid={tier: grid.size(tier) for tier in grid.tiers},
            settings={"sizes": sizes, "iterations": parsed.iterations},
            tiers={tier: tier_rate([row for row in rows if row.tier == tier]) for tier in grid.crossed},
            rows=rows,
        )
        write_links(parsed.out, links)
        out = printable(str(parsed.out))
        print(summary(links), f"written: {out}, for `hzero plan ... --links {out}`", sep="\n")
    dist.barrier()  # mpiexec ends all ranks with the first that leaves


def line(row: LinkRow) -> str:
    """A row under the columns' heads."""
    op = row.op if row.codec is None else f"{row.op}/{row.codec}"
    times = " ".join(f"{value:11.1f}" for value in (row.median_us, row.min_us, row.max_us))
    rates = " ".join(f"{value:10.4g}" for value in (row.algbw_gb_s, row.busbw_gb_s))
    return f"{row.size_bytes:11} {row.count:10} {row.type:>9}  {op:15} {times} {rates}"


def summary(links: LinksFile) -> str:
    """Bandwidth and latency of every tier; the algorithm for all-gathers between nodes, if another one is faster."""
    lines = []
    for tier, rate in links.tiers.items():
        # A rank receives the parts of all others: latency is a tenth of the time where these take nine times as long.
        enough = 9 * rate.latency_us * rate.gb_s * 1e3 / (links.grid[tier] - 1)
        lines.append(
            f"tier {tier}: {rate.gb_s:.4g} GB/s per device; latency {rate.latency_us:.1f} us, less than a tenth of a hop from "
            f"{enough:,.0f} B per rank on"
        )
    setting = node_all_gather(links.rows)
    if setting.algorithm != "library":
        lines.append(
            f'all-gathers between nodes took less than the library\'s with, in the "hzero" block,\n'
            f'  "node_all_gather": {json.dumps(setting.model_dump())}'
        )
    return "\n".join(lines)
