"""Shell completion: ``hzero completion SHELL`` prints a script, with which the shell asks the command at every TAB.

Nothing runs at a TAB. A command's options come from the function ``parser`` in the module of the function that runs it, and
the possible values of an argument from `_VALUES`.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import argcomplete
from argcomplete.completers import DirectoriesCompleter, FilesCompleter

from hzero.arguments import Parser

SHELLS = ("bash", "zsh", "fish")
_EXAMPLES = """examples:
  hzero completion bash > ~/.local/share/bash-completion/completions/hzero
  hzero completion zsh > FOLDER/_hzero    of a FOLDER in $fpath, before compinit
  hzero completion fish > ~/.config/fish/completions/hzero.fish
  eval "$(hzero completion bash)"         this shell only"""


def parser() -> argparse.ArgumentParser:
    """Reads the command's arguments."""
    made = Parser(
        prog="hzero completion",
        description="Prints a script that completes commands, options, keys, presets and run folders of hzero.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("shell", metavar="SHELL", choices=SHELLS, help=" | ".join(SHELLS))
    return made


def run_completion(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments."""
    print(argcomplete.shellcode(["hzero"], shell=parser().parse_args(list(arguments)).shell))
    return 0


def complete(commands: Mapping[str, tuple[str, str]]) -> None:
    """Answers the shell and ends the process.

    Args:
        commands: By name, the function that runs each command, as ``module:function``, and its help.
    """
    # argcomplete's count, from 1, of the word with which the command begins; words before it are left out.
    begin = int(os.environ["_ARGCOMPLETE"])
    words = argcomplete.split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3][begin:]
    if words and words[0] in commands:
        os.environ["_ARGCOMPLETE"] = str(begin + 1)
        made = _parser_of(words[0], commands[words[0]][0])
    else:
        made = argparse.ArgumentParser(prog="hzero")
        made.add_argument("--version", action="store_true")
        names = made.add_subparsers()
        for name, (_, text) in commands.items():
            names.add_parser(name, help=text)
    for action in _actions(made):
        if isinstance(action.metavar, str) and action.metavar in _VALUES:
            action.completer = _VALUES[action.metavar]  # type: ignore[attr-defined]
    argcomplete.autocomplete(made)


def _parser_of(command: str, runs: str) -> argparse.ArgumentParser:
    if command == "train":
        from hydra._internal.utils import get_args_parser  # there is no public way to Hydra's own options

        made: argparse.ArgumentParser = get_args_parser()
        next(action for action in made._actions if action.dest == "overrides").metavar = "KEY=VALUE"
        return made
    of_module: Callable[[], argparse.ArgumentParser] = importlib.import_module(runs.partition(":")[0]).parser
    return of_module()


def _actions(made: argparse.ArgumentParser) -> list[argparse.Action]:
    """Arguments of a parser and of its subcommands."""
    found = list(made._actions)
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [inner for parser in action.choices.values() for inner in _actions(parser)]
    return found


def _runs(prefix: str, **_: Any) -> list[str]:
    """Folders in runs/ that hold metrics, and other folders."""
    found = [str(path.parent) for path in sorted(Path("runs").glob("*/metrics.jsonl"))]
    return [path for path in found if path.startswith(prefix)] or list(DirectoriesCompleter()(prefix))


def _nodes(prefix: str, **_: Any) -> list[str]:
    """Names of presets of a node, and files."""
    from hzero.topology.sources import PRESETS

    return [*PRESETS, "auto", *FilesCompleter()(prefix)]


def _overrides(prefix: str, parsed_args: argparse.Namespace, parser: argparse.ArgumentParser, **_: Any) -> list[str]:
    """Groups, options and keys of the trainer's configuration, as composed with the overrides before this one."""
    from hzero.settings.complete import matches

    before = parsed_args.overrides or []
    if parser.prog == "hzero plan":
        from hzero.commands.experiment import SHORT

        return matches(prefix, before, SHORT)
    return matches(prefix, before, {})


#: What completes an argument, by the name that its help shows.
_VALUES: dict[str, Callable[..., list[str]]] = {
    "RUN": _runs,
    "FOLDER": lambda prefix, **_: list(DirectoriesCompleter()(prefix)),
    "KEY=VALUE": _overrides,
    "SOURCE": _nodes,
    "auto|FILE|PRESET": _nodes,
    "PRESET|FILE": _nodes,
}
