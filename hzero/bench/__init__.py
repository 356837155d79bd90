"""``hzero bench``: measures the links of the machine that it runs on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hzero.validation import one_of

COMMANDS = {"links": "measure bandwidth and latency of every tier, and every hop with and without codecs"}
_HELP = """usage: hzero bench COMMAND ...

commands:
{commands}

`hzero bench COMMAND --help` shows the options of a command."""


def parser() -> argparse.ArgumentParser:
    """The options of all subcommands, for completion."""
    from hzero.bench import settings

    made = argparse.ArgumentParser(prog="hzero bench")
    commands = made.add_subparsers()
    commands.add_parser("links", parents=[settings.parser()], add_help=False, help=COMMANDS["links"])
    return made


def run_bench(arguments: Sequence[str]) -> int:
    """Runs a subcommand on its arguments. Raises `ConfigError` for input that cannot be used."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP.format(commands="\n".join(f"  {name:8}{text}" for name, text in COMMANDS.items())))
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        raise one_of("hzero bench", arguments[0], COMMANDS, "command")
    from hzero.bench.links import run_links

    return run_links(arguments[1:])
