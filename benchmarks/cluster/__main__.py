"""``python -m benchmarks.cluster``: runs commands on the emulated cluster."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from benchmarks.cluster.network import Network, clear_left
from benchmarks.cluster.ranks import run_command
from benchmarks.cluster.shape import Cluster
from hzero.errors import ConfigError

PROGRAM = "python -m benchmarks.cluster"
#: Frontier's 200, 75 (50 or 100) and 12.5 GB/s a GCD at 1 Mbit/s for 1 GB/s; four ranks share a node's 50.
SHAPE, RATES = "2x2x2", "200,75,50"
COMMANDS = {
    "run": "set up, start a command on every rank with RANK, WORLD_SIZE, MASTER_ADDR and so on, tear down",
    "down": "tear down the remains of a killed process, and end the processes in them",
}
_HELP = f"""examples:
  {PROGRAM} run --rates none -- python train.py

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
        if name == "down":
            continue
        sub.add_argument("--shape", default=SHAPE, metavar="NxPxG", help=f"nodes x GPUs x GCDs (default {SHAPE})")
        rates = (
            "Mbit/s each way, of a rank inside its package and inside its node, and of a node's trunk; none: no limit"
        )
        sub.add_argument("--rates", default=RATES, metavar="GCD,GPU,NODE", help=f"{rates} (default {RATES})")
    given = parser.parse_args(argv)
    if command is not None and given.command != "run":
        parser.error(f"{given.command} takes no --")
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        return _run(given, command)
    except ConfigError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _run(given: argparse.Namespace, command: list[str] | None) -> int:
    if given.command == "down":
        removed = clear_left()
        print("\n".join(f"removed: {what}" for what in removed) or "nothing was up")
        return 0
    cluster = Cluster.from_text(given.shape, given.rates)
    if not command:
        raise ConfigError("run: no COMMAND; expected `run [--shape ...] [--rates ...] -- COMMAND ...`")
    with Network(cluster):
        return run_command(cluster, command)


if __name__ == "__main__":
    raise SystemExit(main())
