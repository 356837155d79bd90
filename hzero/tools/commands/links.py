"""Measures bandwidth and latency of every tier by all-gathers.

Under srun, torchrun or mpiexec every process is a rank; otherwise the command starts the ranks itself.

Sizes and rates are defined as in rccl-tests (its doc/PERFORMANCE.md). The size is the whole array over one group. For groups
of n ranks, busbw = size / time x (n - 1) / n. The time of an iteration is the time of its slowest rank; the table shows the
median. All groups of a tier run at once, as in training. The algorithm library is the all-gather of RCCL, NCCL, gloo or MPI.
The algorithms doubling and pairs are hzero's, for tiers between nodes.

Examples:
  hzero links --topology 2x2x2      8 ranks on this machine as 2 nodes x 2 packages x 2 devices
  mpiexec -n 8 hzero links --topology 2x2x2 --transport mpi
  srun -N2 -n16 -c7 --gpus-per-task=1 --gpu-bind=closest hzero links --max-bytes 1G --out frontier.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hzero import __version__
from hzero.comm import Runtime, WireLog, peers_of
from hzero.comm.probe import Probe, parts_of
from hzero.config import ALGORITHMS, NET_TIERS, TRANSPORTS, TopologyConfig, parse_config
from hzero.errors import ConfigError, from_rank_0, printable
from hzero.program.shards import ShardPlan
from hzero.schema import validated
from hzero.tools.launch import MAX_RANKS, launched, run_launched, run_ranks
from hzero.tools.terminal import Parser, positive
from hzero.topology import resolve_grid
from hzero.topology.links_file import LinkRow, LinksFile, node_all_gather, write_links
from hzero.topology.resolve import ranks_here

#: Maximum seconds until all ranks have joined. Collectives use --timeout.
START_TIMEOUT_S = 300.0
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_HEAD = (
    "#      size  algorithm          time         min         max      algbw      busbw\n"
    "#       (B)                     (us)        (us)        (us)     (GB/s)     (GB/s)"
)


def run_links(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments.

    Returns:
        Exit status: 0, 1 if a rank failed, 2 if the ranks refused the input, 130 after Ctrl-C.

    Raises:
        ConfigError: The input is invalid, or there is nothing to measure.
    """
    parser = Parser("hzero links", __doc__)
    add = parser.add_argument
    where = "nodes x GPUs per node x GCDs per GPU, a file with the keys of a declared topology, or auto (default): discover it"
    add("--topology", default="auto", metavar="NxPxG|FILE|auto", help=where)
    add("--min-bytes", type=_size, default="4K", metavar="SIZE", help="smallest size, such as 512 or 4K (default 4K)")
    add("--max-bytes", type=_size, default="16M", metavar="SIZE", help="largest size, such as 1G (default 16M)")
    add("--device", choices=("auto", "cpu"), default="auto", help="auto (GPUs if torch has them) or cpu")
    add("--transport", choices=TRANSPORTS, default="torch", help="transport of the messages; mpi under mpiexec or srun")
    timed = "timed iterations per measurement (default 20)"
    add("--iterations", type=positive(int, 1e9), default=20, metavar="N", help=timed)
    wait = "maximum seconds of one collective (default 120)"
    add("--timeout", type=positive(float, 1e6), default=120.0, metavar="S", help=wait)
    add("--out", type=Path, default="links.json", metavar="FILE", help="JSON file to write (default links.json)")
    add("--overwrite", action="store_true", help="replace FILE if it exists")
    parsed = parser.parse_args(arguments)
    if parsed.max_bytes < parsed.min_bytes:
        raise ConfigError(f"--max-bytes: found {parsed.max_bytes:,}; expected at least {parsed.min_bytes:,}")
    keys: dict[str, Any] = {"source": parsed.topology}
    if factors := re.fullmatch(r"(\d{1,9})x(\d{1,9})x(\d{1,9})", parsed.topology, re.ASCII):
        keys = dict(zip(("nodes", "packages_per_node", "devices_per_package"), map(int, factors.groups())))
    parsed.topology = validated(TopologyConfig, keys, "--topology")
    if launched():
        run_launched(partial(measure, parsed))
    check_output(parsed)
    ranks = ranks_here(parsed.topology, "--topology")
    if not 1 < ranks <= MAX_RANKS:
        raise ConfigError(f"--topology: found {ranks:,} ranks for this machine; expected 2 to {MAX_RANKS}, as in 2x2x2")
    logs = Path(tempfile.mkdtemp(prefix="hzero-links-"))
    status = run_ranks(partial(measure, parsed), ranks, logs=logs)
    if status != 1:
        shutil.rmtree(logs, ignore_errors=True)
    return status


def _size(text: str) -> int:
    found = re.fullmatch(r"([1-9]\d{0,14})([KMG]?)(?:i?B)?", text, re.IGNORECASE | re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"found {text!r}; expected bytes, such as 512, 4K, 16M or 1G (powers of 1024)")
    return int(found[1]) * _UNITS[found[2].upper()]


def check_output(parsed: argparse.Namespace) -> None:
    """Raises `ConfigError` early if the file cannot be written, since ranks measure for minutes first."""
    out: Path = parsed.out
    if not os.access(out.parent, os.W_OK):
        raise ConfigError(f"--out: found {str(out)!r}; expected a file in a folder that you can write to")
    if out.is_dir():
        raise ConfigError(f"--out: found the folder {str(out)!r}; expected a file")
    if out.exists() and not parsed.overwrite:
        raise ConfigError(f"--out: found {str(out)!r}, which exists; expected --overwrite, or another file")


def measure(parsed: argparse.Namespace) -> None:
    """Measures all tiers. Rank 0 prints each row and writes the file. Collective.

    Raises:
        ConfigError: The input is invalid.
        PlainError: A collective failed or timed out.
    """
    warnings.simplefilter("ignore")  # torch warns about its own calls
    device, name = torch.device("cpu"), "cpu"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if parsed.device == "auto" and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        memory, name = torch.cuda.mem_get_info(device)[0], torch.cuda.get_device_name(device)
    if (needed := 4 * parsed.max_bytes) > memory:  # the parts of all ranks are received and copied
        found = f"found {parsed.max_bytes:,}, which needs {needed:,} bytes per rank"
        raise ConfigError(f"--max-bytes: {found}; a rank has {memory:,}")
    timeout = timedelta(seconds=max(parsed.timeout, START_TIMEOUT_S))
    dist.init_process_group("gloo" if name == "cpu" else "nccl", timeout=timeout)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    from_rank_0(lambda: check_output(parsed))
    grid = resolve_grid(parsed.topology, world_size, "--topology")
    backend = "mpi" if parsed.transport == "mpi" else dist.get_backend()
    say = partial(print, flush=True) if rank == 0 else lambda *_: None
    say(f"# hzero links: {world_size:,} ranks, {grid}; {backend} on {name}")
    sizes = [parsed.min_bytes * 4**step for step in range(25) if parsed.min_bytes * 4**step <= parsed.max_bytes]
    config = parse_config({"preset": "lossless", "transport": parsed.transport})
    plan = ShardPlan.from_config(config, grid, rank)
    runtime = Runtime(plan, peers_of(plan, timedelta(seconds=parsed.timeout)), WireLog())
    probe, rows = Probe(runtime, device), list[LinkRow]()
    for tier in grid.crossed:
        ranks = grid.size(tier)
        say(f"# tier {tier}: {world_size // ranks} x {ranks} ranks, all at once\n{_HEAD}")
        algorithms = ALGORITHMS if tier in NET_TIERS else ALGORITHMS[:1]  # inside a node only the library's
        for algorithm, part in itertools.product(algorithms, parts_of(sizes, ranks)):
            row = probe.row(tier, part, parsed.iterations, algorithm)
            rows.append(row)
            shown = " ".join(f"{value:11.1f}" for value in (row.median_us, row.min_us, row.max_us))
            say(f"{row.size_bytes:11}  {algorithm:11} {shown} {row.algbw_gb_s:10.4g} {row.busbw_gb_s:10.4g}")
    together = probe.together(rows)
    if rank == 0:
        links = probe.file(rows, backend, name).model_copy(update={"together": together})
        links.versions["hzero"] = __version__
        write_links(parsed.out, links)
        out = printable(str(parsed.out))
        say(f"{summary(links)}\nwritten: {out}, for `hzero plan ... --links {out}`")
    dist.barrier()  # mpiexec ends all ranks when the first one exits


def summary(links: LinksFile) -> str:
    """Bandwidth and latency of every tier, and the block if another all-gather between nodes is faster."""
    lines = []
    for tier, rate in links.tiers.items():
        # A rank receives the parts of all other ranks. Latency is a tenth of the time if these parts take nine times as long.
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
