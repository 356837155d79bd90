"""The cost of a discovery at the scale of Frontier: bytes per rank, and time, with simulated ranks.

Every simulated rank writes its report to one real store (torch's TCPStore, served by this process as by rank 0) and
reads the answer from it, through the code that ranks run; a few processes take turns in being them over a connection
each, since one machine cannot hold as many. Rank 0 is real: it gathers, finds the packages of every node and the grid,
and answers. Nodes are Frontier's, four MI250X each; ranks see one device each, and know the others by number, as under
task cgroups.

    python benchmarks/discovery.py [--nodes 1,48,9408] [--processes 2] [--report benchmarks/reports]
    python benchmarks/discovery.py --connections 768,6144    # how long that many connections to the store take
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import random
import resource
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from hzero import __version__
from hzero.topology.discovery import exchanged
from hzero.topology.exchange import StoreExchange
from hzero.topology.machine import Device, Machine
from hzero.topology.preset import preset
from hzero.topology.rank_report import RankReport, report_of

LOCAL = 8
TIMEOUT_S = 600.0
#: GCDs by local rank with `--gpu-bind=closest` (OLCF user guide).
OLCF = (4, 5, 2, 3, 6, 7, 0, 1)


def report(rank: int, world: int, place: int) -> RankReport:
    """What a rank says that sits at a place of the world, its device the only one that it can read."""
    whole = preset("frontier")
    node, local = divmod(place, LOCAL)
    own = OLCF[local]
    devices = [
        Device(
            d.number,
            d.bus,
            d.kind,
            numa=d.numa,
            nic=d.nic,
            uuid=f"GPU-{node * LOCAL + own:016x}",
            node=f"kfd{d.number + 4}",
        )
        if d.number == own
        else Device(d.number, node=f"kfd{d.number + 4}", hidden=True)
        for d in whole.devices
    ]
    links = tuple(link for link in whole.links if own in (link.a, link.b))
    seen = Machine(whole.source, tuple(devices), links, whole.nics)
    return report_of(rank, world, f"frontier{node:05d}/0123abcd", seen, seen.device(own))


def simulate(ranks: range, places: list[int] | range, world: int, port: int, ready: Any, heard: Any) -> None:
    """Some ranks, one after the other: all of them report, then all of them hear the answer."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    exchanges = [StoreExchange(store, rank, world, TIMEOUT_S) for rank in ranks]
    ready.wait(TIMEOUT_S)
    for exchange in exchanges:
        exchange.gather(report(exchange.rank, world, places[exchange.rank]).encode())
    for exchange in exchanges:
        answer = exchange.broadcast(None)
    heard.put(len(answer) if exchanges else 0)


class TimedExchange(StoreExchange):
    """Rank 0's exchange: notes when the reports were there and when the answer was found."""

    marks: list[float]
    reports: list[bytes]

    def gather(self, report: bytes | Exception) -> list[bytes] | None:
        """As `StoreExchange.gather`."""
        self.reports = super().gather(report) or []
        self.marks.append(time.perf_counter())
        return self.reports

    def broadcast(self, answer: bytes | Exception | None) -> bytes:
        """As `StoreExchange.broadcast`."""
        self.marks.append(time.perf_counter())
        return super().broadcast(answer)


def measure(nodes: int, processes: int, scrambled: bool) -> dict[str, Any]:
    """One world: the report's and the answer's bytes, and rank 0's seconds."""
    world = nodes * LOCAL
    places: list[int] | range = random.Random(0).sample(range(world), world) if scrambled else range(world)
    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=TIMEOUT_S), wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ready, heard = context.Barrier(processes + 1), context.Queue()
    parts = [range(1 + index, world, processes) for index in range(processes)]
    others = [
        context.Process(target=simulate, args=(part, places, world, server.port, ready, heard), daemon=True)
        for part in parts
    ]
    for process in others:
        process.start()
    exchange = TimedExchange(server, 0, world, TIMEOUT_S)
    ready.wait(TIMEOUT_S)
    exchange.marks = [time.perf_counter()]
    found = exchanged(exchange, lambda: report(0, world, places[0]).encode())
    marks = [*exchange.marks, time.perf_counter()]
    answers = [heard.get(timeout=TIMEOUT_S) for _ in others]
    for process in others:
        process.join()
    grid = found.required_grid()
    assert (grid.nodes, grid.gpus_per_node, grid.gcds_per_gpu) == (nodes, 4, 2)
    assert grid.regular or scrambled
    return {
        "ranks": world,
        "numbering": "scrambled" if scrambled else "by node",
        "report_bytes": max(map(len, exchange.reports)),
        "answer_bytes": max(answers),
        "gather_s": marks[1] - marks[0],
        "grid_s": marks[2] - marks[1],
        "answer_s": marks[3] - marks[2],
    }


def connect(count: int) -> float:
    """Seconds until a store has so many connections, one after the other, both ends in this process.

    Each end asks for the other's name. Where no name service knows it, torch says so, and its timeouts are in the result.
    """
    server = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=TIMEOUT_S), wait_for_workers=False)
    started = time.perf_counter()
    clients = [TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False) for _ in range(count)]
    seconds = time.perf_counter() - started
    clients[-1].set("last", "1")
    return seconds


def main() -> None:
    """Measures every world and prints or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="1,48,9408", help="worlds, in nodes of 8 ranks (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="processes that stand for the ranks (%(default)s)")
    parser.add_argument("--report", type=Path, help="folder for a dated report")
    parser.add_argument("--connections", help="measure so many connections to a store instead, with commas")
    arguments = parser.parse_args()
    key = "nodes" if arguments.connections is None else "connections"
    try:
        worlds = [int(number) for number in getattr(arguments, key).split(",")]
    except ValueError:
        parser.error(f"--{key}: found {getattr(arguments, key)!r}, expected whole numbers with commas")
    if min(worlds) < 1 or arguments.processes < 1:
        parser.error(f"--{key} and --processes: expected at least 1")
    if key == "connections":
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if 2 * max(worlds) + 100 > most:
            parser.error(
                f"--connections: {max(worlds)} take two files each, and this process may open {most} (ulimit -Hn)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        for count in worlds:
            print(json.dumps({"connections": count, "seconds": connect(count)}), flush=True)
        return
    rows = []
    for nodes in worlds:
        for scrambled in (False, True):
            rows.append(measure(nodes, arguments.processes, scrambled))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.report:
        path = arguments.report / f"{datetime.date.today()}-discovery.md"
        path.write_text(_text(rows, arguments))
        print(f"report: {path}")


def _text(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    lines = [
        f"# Discovery of worlds of simulated ranks, {datetime.date.today()}",
        "",
        f"Machine: {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"hzero {__version__}.",
        "",
        f"One TCPStore holds a key for each rank. {arguments.processes} processes on the same cores take turns in being all "
        f"ranks but the first, over {arguments.processes} connections: what rank 0 reads, computes and writes, and how many "
        "bytes a rank sends and receives, is that of the whole world; how long it takes to accept a connection from every rank, "
        "which needs as many file descriptors (ulimit -n), is not measured. Ranks in no order at all make the answer as long as "
        "it can be.",
        "",
        "| ranks | numbered | a rank sends, bytes | and receives, bytes | gather, s | find the grid, s | answer, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['ranks']:,} | {row['numbering']} | {row['report_bytes']:,} | {row['answer_bytes']:,} | "
            f"{row['gather_s']:.2f} | {row['grid_s']:.2f} | {row['answer_s']:.2f} |"
        )
    again = f"python benchmarks/discovery.py --nodes {arguments.nodes} --processes {arguments.processes}"
    return "\n".join([*lines, "", f"Repeat with `{again}`.", ""])


if __name__ == "__main__":
    main()
