"""A ZeRO stage for DeepSpeed that shards each kind of state over its own level of the machine.

Examples:
  hzero train                                             the main job: 8 ranks on this machine
  hzero train zero=mild train.steps=50 run.name=mild      another preset
  hzero train model=hf model.path=FOLDER data=text data.path=book.txt     start from a model's weights
  hzero plan model=gpt_neox_20b topology=frontier nodes=48
  hzero links --topology 2x2x2                            rates of every tier, for hzero plan --links links.json
  hzero doctor ds_config.json                             a DeepSpeed configuration as it will be used

`hzero COMMAND --help` shows the options of a command.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pkgutil
import signal
import sys
from collections.abc import Sequence

from hzero import __version__
from hzero.errors import ConfigError, of_file, one_of, report
from hzero.tools.terminal import Parser, keep_streams, lost_output

#: Function and help of each command. The function is imported when the command runs: a plan needs no torch.
COMMANDS = {
    "train": (
        "hzero.tools.commands.train:run_train",
        "train a language model with Hugging Face's Trainer (with Hydra)",
    ),
    "data": (
        "hzero.tools.data.prepare:run_data",
        "turn a corpus into token ids that training maps, on all cores or nodes",
    ),
    "run": ("hzero.run:run_script", "run a script whose DeepSpeed configuration has the block, without a change of it"),
    "plan": ("hzero.tools.plan.command:run_plan", "compute memory, bytes and a predicted step of a model on a machine"),
    "doctor": (
        "hzero.tools.commands.doctor:run_doctor",
        "check this machine, its ranks, and a DeepSpeed configuration",
    ),
    "topology": ("hzero.tools.commands.topology:run_topology", "show the packages, links and NICs of a node"),
    "links": ("hzero.tools.commands.links:run_links", "measure bandwidth and latency of every tier"),
}
#: Modules of the extras that a command needs. They are looked up first, since some are used last.
NEEDS = {
    "train": ("hydra", "transformers", "accelerate", "datasets"),
    "data": ("hydra", "transformers", "datasets", "rich", "distributed"),
    "plan": ("hydra", "transformers", "rich"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status. Invalid input gives one line on stderr and status 2."""
    keep_streams()
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if argv[:1] == ["run"]:
        from hzero.run import run_script

        return run_script(argv[1:])  # errors of the user's script must pass through
    commands = "\n".join(f"  {name:12}{text}" for name, (_, text) in COMMANDS.items())
    parser = Parser("hzero", f"{__doc__}\ncommands:\n{commands}")
    parser.add_argument("--version", action="version", version=f"hzero {__version__}")
    parser.add_argument("command", nargs="?", metavar="COMMAND", help=" | ".join(COMMANDS))
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="arguments of the command")
    signalled = arguments is None and argv[:1] == ["train"]
    if signalled:
        from hzero.tools.launch import UNFINISHED

        # A batch system's signal may arrive in the seconds before training has a handler. Nothing is lost then, so the status
        # is "unfinished". `os._exit`, since a destructor would swallow an exception.
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(UNFINISHED))
    try:
        parsed = parser.parse_args(argv)
        if parsed.command is None:
            parser.print_help()
            return 2
        if parsed.command not in COMMANDS:
            raise one_of("COMMAND", parsed.command, COMMANDS)
        missing = [name for name in NEEDS.get(parsed.command, ()) if importlib.util.find_spec(name) is None]
        if missing:
            extra = "data,train" if parsed.command == "data" else "train"
            needed = f'".[{extra}]" in a checkout of hzero'
            if parsed.command == "plan":  # hydra-core's antlr4 runtime is not axolotl's
                needed = "hydra-core transformers rich in its own environment"
            raise ConfigError(f"{parsed.command}: {missing[0]} is not installed; run pip install {needed}")
        status = int(pkgutil.resolve_name(COMMANDS[parsed.command][0])(parsed.rest))
        if why := lost_output():
            print(f"hzero: warning: output is lost: {why.lower()}", file=sys.stderr)
            # A run writes its results to files. The output of the other commands is their result.
            return status if parsed.command == "train" else status or 1
        return status
    except ConfigError as error:
        if not error.reported_elsewhere:
            report(error)
        return 2
    except OSError as error:
        report(of_file(error))
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        # The process takes a second to end. A batch system's signal must not change the status now.
        if signalled:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)


if __name__ == "__main__":
    raise SystemExit(main())
