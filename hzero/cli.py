"""The ``hzero`` command."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence

from hzero import __version__
from hzero.config import ConfigError

COMMANDS = {
    "train": "train a GPT on text through the stage (a Hydra application)",
    "doctor": "what this machine runs hzero on, and whether that is what it could",
    "topology": "packages, links and NICs of a node, drawn (topology show FILE|auto|PRESET)",
    "bench": "bench links: bandwidth and latency of every tier; bench report: tables and plots of `make bench`",
    "plan": "memory, bytes and times of a model on a machine, before anything runs",
    "report": "plots and one HTML page of one or more runs",
}
_EXAMPLES = """examples:
  hzero train                                                   the main job: 8 ranks on this machine
  hzero train zero=mild train.steps=50 run.name=mild            another preset
  hzero plan model=gpt_neox_20b topology=frontier nodes=48
  hzero bench links --topology 2x2x2                            rates of every tier, for hzero plan --links links.json
  hzero report runs/default runs/mild

`hzero COMMAND --help` says more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit status; input that cannot be used is one line on stderr and status 2."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="hzero",
        description="A ZeRO stage for DeepSpeed: shard degrees and codecs for every tier of the machine.",
        epilog="commands:\n" + "".join(f"  {name:10}{text}\n" for name, text in COMMANDS.items()) + "\n" + _EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hzero {__version__}")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help=" | ".join(COMMANDS))
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="arguments of the command")
    parsed = parser.parse_args(argv)
    if parsed.command is None:
        parser.print_help()
        return 2
    try:
        status = _run(parsed.command, parsed.rest)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as of `| head`, which has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ConfigError as error:
        if not error.elsewhere:
            print(f"hzero: error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "tokenizers"):
            raise
        print(f'hzero: error: {error.name} is not installed; pip install "hzero[train]"', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(command: str, rest: list[str]) -> int:
    # Imported here: a plan needs no torch, and help needs nothing.
    if command == "train":
        from hzero.train import main as train

        return train(rest)
    if command == "plan":
        from hzero.train.plan_command import run_plan

        return run_plan(rest)
    if command == "report":
        from hzero.train.report import run_report

        return run_report(rest)
    if command == "topology":
        from hzero.topology.command import run_topology

        return run_topology(rest)
    if command == "doctor":
        from hzero.doctor import run_doctor

        return run_doctor(rest)
    if command == "bench":
        from hzero.bench import run_bench

        return run_bench(rest)
    near = difflib.get_close_matches(command, COMMANDS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ConfigError(f"unknown command {command!r}{hint} Possible: {', '.join(COMMANDS)}")


if __name__ == "__main__":
    raise SystemExit(main())
