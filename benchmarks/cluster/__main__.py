"""``python -m benchmarks.cluster``: sets the emulated cluster up, measures it, runs commands on it, tears it down."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.cluster import counters, layout, owner
from benchmarks.cluster.check import check, print_rows
from benchmarks.cluster.namespace import occupants
from benchmarks.cluster.network import Network, check_tools, clear_unowned, ours
from benchmarks.cluster.ranks import run_command
from benchmarks.cluster.shape import Cluster
from hzero.config import BASE_TIERS
from hzero.validation import ConfigError

PROGRAM = "python -m benchmarks.cluster"
#: Frontier's 200, 75 (50 or 100) and 12.5 GB/s a GCD at 1 Mbit/s for 1 GB/s; four ranks share a node's 50.
SHAPE, RATES = "2x2x2", "200,75,50"
COMMANDS = {
    "up": "set the cluster up; it stays until `down`. Replaces one in which no process runs",
    "down": "tear down the cluster, also one that a killed process left behind, and end the processes in it",
    "status": "show the cluster, since when it is up, and the processes in it; status 1 if none is up",
    "counters": "bytes that every rank has sent by tier, and that went over the trunks",
    "check": "set up, measure every tier by TCP streams, tear down; status 1 where a rate does not hold",
    "run": "set up, start a command on every rank with RANK, WORLD_SIZE, MASTER_ADDR and so on, tear down",
}
_HELP = f"""examples:
  {PROGRAM} check --shape 4x2x2 --rates 200,75,50
  {PROGRAM} run --rates none -- python train.py
  {PROGRAM} up && nsenter --net=/run/netns/hzero-r0 bash

Needs Linux, root and iproute2. A command that is stopped by Ctrl-C or SIGTERM tears down; after SIGKILL, `down` or the next
command does."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit status; input that cannot be used is one line on stderr and status 2."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    argv, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, None)
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="An emulated cluster: network namespaces on this machine, a rate for every tier, bytes counted by tier.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, what in COMMANDS.items():
        usage = f"{PROGRAM} run [--shape NxPxG] [--rates GCD,GPU,NODE] -- COMMAND ..." if name == "run" else None
        sub = commands.add_parser(name, help=what, description=what, usage=usage)
        if name in ("up", "check", "run"):
            sub.add_argument("--shape", default=SHAPE, metavar="NxPxG", help=f"nodes x GPUs x GCDs (default {SHAPE})")
            sub.add_argument(
                "--rates",
                default=RATES,
                metavar="GCD,GPU,NODE",
                help="Mbit/s each way, of a rank inside its package, of a rank inside its node, of a node's trunk; each may "
                f"be none: not shaped; one none for all (default {RATES})",
            )
        if name == "check":
            sub.add_argument("--seconds", type=float, default=2.0, help="time of one measurement (default 2)")
    given = parser.parse_args(argv)
    if command is not None and given.command != "run":
        parser.error(f"{given.command} takes no --")
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        status = _run(given, command)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ConfigError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _run(given: argparse.Namespace, command: list[str] | None) -> int:
    if given.command == "up":
        with Network(Cluster.from_text(given.shape, given.rates), replace=True) as network:
            network.keep()
        first = network.cluster.namespace(0), network.cluster.address(0)
        print(f"up: {network.cluster}; rank 0 is in namespace {first[0]} at {first[1]}")
        return 0
    if given.command == "down":
        removed = clear_unowned()
        print("\n".join(f"removed: {what}" for what in removed) or "nothing was up")
        return 0
    if given.command == "status":
        return _status()
    if given.command == "counters":
        return _counters()
    cluster = Cluster.from_text(given.shape, given.rates)
    if given.command == "check":
        if not 0.1 <= given.seconds <= 600:
            raise ConfigError(f"--seconds: found {given.seconds}, expected 0.1 to 600")
        with Network(cluster):
            rows = check(cluster, given.seconds, lambda line: print(line, file=sys.stderr, flush=True))
            drops = counters.dropped(cluster)
        print_rows(cluster, rows)
        if drops:
            print(f"{drops:,} packets were dropped by full queues and sent again")
        return 0 if all(row.held for row in rows) else 1
    if not command:
        raise ConfigError("run: no COMMAND; expected `run [--shape ...] [--rates ...] -- COMMAND ...`")
    with Network(cluster):
        return run_command(cluster, command)


def _there() -> owner.Owner | None:
    """Who has a network or had one, where there is something of it."""
    return owner.read() if ours() else None


def _status() -> int:
    there, names = _there(), ours()
    if not names:
        print("nothing is up")
        return 1
    if there is None:
        print(f"{len(names)} namespaces that nobody has; `{PROGRAM} down` removes them")
        return 1
    kind = "in use" if there.live else "up" if there.kept else "left behind by a process that was killed"
    print(f"{kind}: {there.cluster}\nset up by process {there.pid}, {there.since}")
    if os.geteuid() == 0:
        for pid, name in sorted(occupants(names).items()):
            print(f"process {pid} runs in {name}")
    return 0


def _counters() -> int:
    check_tools()
    there = _there()
    if there is None:
        raise ConfigError(f"counters: nothing is up; `{PROGRAM} up` sets a cluster up")
    cluster = there.cluster
    print(f"bytes sent since {there.since}: {cluster.grid}")
    table = Table(box=SIMPLE_HEAD)
    for name in ("rank", "namespace", *BASE_TIERS):
        table.add_column(name, justify="left" if name == "namespace" else "right")
    for rank in range(cluster.world_size):
        by_tier = counters.sent(namespace=cluster.namespace(rank))
        cells = (f"{by_tier[tier]:,}" if tier in by_tier else "" for tier in BASE_TIERS)
        table.add_row(str(rank), cluster.namespace(rank), *cells)
    Console().print(table)
    if cluster.nodes > 1:
        for node, (out, into) in enumerate(counters.trunks(cluster)):
            print(f"trunk of {layout.node_namespace(node)}: {out:,} bytes out, {into:,} in")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
