"""Hops over gloo and over MPI, on the same ranks and in turns: collectives of three sizes, and steps of one training job.

    mpiexec -n 8 python -m benchmarks.transports [--rounds 5] [--steps 5] [--report benchmarks/reports/DATE-transports.md]

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hzero
from hzero.config import TRANSPORTS

#: Bytes of the whole array, and iterations in one round.
SIZES = ((1 << 10, 30), (1 << 20, 10), (16 << 20, 3))
OPS = ("all_gather", "all_to_all", "reduce_scatter")
PRESETS = ("lossless", "topo")


def collectives(rounds: int) -> list[str]:
    """Rows of a table of all collectives over all ranks at once, in one tier, without codec."""
    world = dist.get_world_size()
    topology = {"nodes": 1, "gpus_per_node": 1, "gcds_per_gpu": world}
    groups = {name: hzero.collectives.Communicator({"transport": name, "topology": topology}) for name in TRANSPORTS}
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


def steps(rounds: int, count: int) -> list[str]:
    """Rows of a table of step times of one job, by preset."""
    import deepspeed
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    deepspeed.utils.logger.setLevel("ERROR")
    world = dist.get_world_size()
    topology = {"nodes": max(world // 4, 1), "gpus_per_node": max(min(world, 4) // 2, 1), "gcds_per_gpu": 2}
    shape = {"vocab_size": 512, "hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 4}
    shape |= {"intermediate_size": 768, "max_position_embeddings": 64}
    engines: dict[tuple[str, str], Any] = {}
    for preset in PRESETS:
        for transport in TRANSPORTS:
            torch.manual_seed(0)
            model = GPTNeoXForCausalLM(GPTNeoXConfig(**shape))
            block = {"preset": preset, "transport": transport, "topology": topology}
            config = {
                "train_micro_batch_size_per_gpu": 2,
                "zero_optimization": {"stage": 3, "hzero": block, "stage3_param_persistence_threshold": 0},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
                "steps_per_print": 10**9,
            }
            engines[preset, transport] = hzero.initialize(
                model=model, model_parameters=model.parameters(), config=config
            )[0]
    tokens = torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(dist.get_rank()))
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    losses: dict[tuple[str, str], list[float]] = defaultdict(list)
    for turn in range(rounds + 1):  # DeepSpeed records its trace in the first steps
        for key in engines if turn % 2 else list(engines)[::-1]:
            for _ in range(count):
                dist.barrier()
                started = time.perf_counter()
                loss = engines[key](input_ids=tokens, labels=tokens).loss
                engines[key].backward(loss)
                engines[key].step()
                dist.barrier()
                losses[key].append(float(loss.detach()))
                if turn:
                    times[key].append(time.perf_counter() - started)
    numel = sum(p.ds_numel for p in next(iter(engines.values())).module.parameters())
    rows = [
        f"{numel:,} weights in float32, {topology}; losses of both transports are the same bits: {_same(losses)}.",
        "",
    ]
    rows += ["| preset | gloo, ms | MPI, ms | gloo / MPI | gloo, least | MPI, least |", "|---|---|---|---|---|---|"]
    for preset in PRESETS:
        gloo, mpi = (statistics.median(times[preset, transport]) * 1e3 for transport in TRANSPORTS)
        mins = " | ".join(f"{min(times[preset, transport]) * 1e3:.0f}" for transport in TRANSPORTS)
        rows.append(f"| `{preset}` | {gloo:.0f} | {mpi:.0f} | {gloo / mpi:.2f} | {mins} |")
    return rows


def _same(losses: dict[tuple[str, str], list[float]]) -> str:
    return "yes" if all(losses[p, "torch"] == losses[p, "mpi"] for p in PRESETS) else "NO"


def main() -> None:
    """One rank; mpiexec starts all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="steps of each job in one round; 0 leaves them out")
    parser.add_argument("--report", type=Path, help="file to append to")
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
    parts: list[Callable[[], list[str]]] = [lambda: collectives(arguments.rounds)]
    if arguments.steps:
        parts.append(lambda: steps(arguments.rounds, arguments.steps))
    text = [f"## {dist.get_world_size()} ranks", ""]
    for part in parts:
        text += [*part(), ""]
    version = " ".join(MPI.Get_library_version().splitlines()[0].split())
    text.append(
        f"{os.cpu_count()} cores ({platform.processor() or platform.machine()}), load {before:.1f} before and "
        f"{os.getloadavg()[0]:.1f} after; torch {torch.__version__}, {version}, {arguments.rounds} rounds."
    )
    if dist.get_rank() == 0:
        print("\n".join(text), flush=True)
        if arguments.report is not None:
            with open(arguments.report, "a") as file:
                file.write("\n" + "\n".join(text) + "\n")
    dist.barrier()
    sys.stdout.flush()
    MPI.Finalize()  # mpiexec ends all ranks with the first that leaves
    os._exit(0)


if __name__ == "__main__":
    main()
