"""Hops over gloo and over MPI, on the same ranks and in turns: collectives of three sizes.

    mpiexec -n 8 python -m benchmarks.transports [--rounds 5]

Both transports live in the same processes and take turns, round by round, so that whatever else the machine does meets both.
Rank 0 prints Markdown: the median and the least of all times.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import socket
import statistics
import sys
import time
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

import hzero
from hzero.config import TRANSPORTS

#: Bytes of the whole array, and iterations in one round.
SIZES = ((1 << 10, 30), (1 << 20, 10), (16 << 20, 3))
OPS = ("all_gather", "all_to_all", "reduce_scatter")


def collectives(rounds: int) -> list[str]:
    """Rows of a table of all collectives over all ranks at once, in one tier, without codec."""
    world = dist.get_world_size()
    topology = {"nodes": 1, "gpus_per_node": 1, "gcds_per_gpu": world}
    groups = {name: hzero.comm.Communicator({"transport": name, "topology": topology}) for name in TRANSPORTS}
    found: dict[Any, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for turn in range(rounds + 1):  # the first one connects
        for size, iterations in SIZES:
            for name in TRANSPORTS if turn % 2 else TRANSPORTS[::-1]:
                for op in OPS:
                    numel = size // 4 if op != "all_gather" else size // 4 // world
                    tensor = torch.ones(numel)
                    call = getattr(groups[name], op)
                    for _ in range(iterations):
                        dist.barrier()
                        begun = time.perf_counter()
                        call(tensor)
                        if turn:
                            found[op, size][name].append((time.perf_counter() - begun) * 1e6)
    rows = ["| collective | bytes | gloo, us | MPI, us | gloo / MPI | gloo, least | MPI, least |"]
    rows.append("|---|---|---|---|---|---|---|")
    for (op, size), times in sorted(found.items()):
        gloo, mpi = (statistics.median(times[name]) for name in TRANSPORTS)
        mins = " | ".join(f"{min(times[name]):,.0f}" for name in TRANSPORTS)
        rows.append(f"| {op} | {size:,} | {gloo:,.0f} | {mpi:,.0f} | {gloo / mpi:.1f} | {mins} |")
    return rows


def main() -> None:
    """One rank; mpiexec starts all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = world.bcast(probe.getsockname()[1])
    os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(world.rank), LOCAL_RANK=str(world.rank), WORLD_SIZE=str(world.size))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    before = os.getloadavg()[0]
    text = [f"## {dist.get_world_size()} ranks", "", *collectives(arguments.rounds), ""]
    version = " ".join(MPI.Get_library_version().splitlines()[0].split())
    text.append(
        f"{os.cpu_count()} cores ({platform.processor() or platform.machine()}), load {before:.1f} before and "
        f"{os.getloadavg()[0]:.1f} after; torch {torch.__version__}, {version}, {arguments.rounds} rounds."
    )
    if dist.get_rank() == 0:
        print("\n".join(text), flush=True)
    dist.barrier()
    sys.stdout.flush()
    MPI.Finalize()  # mpiexec ends all ranks with the first that leaves
    os._exit(0)


if __name__ == "__main__":
    main()
