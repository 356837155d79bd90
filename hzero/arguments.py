"""The parser of the commands' arguments: it refuses them as everything else is refused, on one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

from hzero.validation import ConfigError, nearest


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` whose errors are `ConfigError`: the command, what was found, and what is possible."""

    def error(self, message: str) -> NoReturn:
        """Raises `ConfigError` in place of argparse's usage and exit."""
        raise refused(self, message)


def refused(parser: argparse.ArgumentParser, message: str) -> ConfigError:
    """What argparse says as our error, with the option, or the key of the trainer, that may have been meant."""
    unknown = message.removeprefix("unrecognized arguments: ")
    if unknown != message:
        first = unknown.split()[0]
        options = [name for action in parser._actions for name in action.option_strings]
        near = nearest(first, options, 0.75) if first.startswith("-") else None
        message = f"unknown argument {first!r}" + (f"; did you mean {near!r}?" if near else ".")
        if not near and first.startswith("-") and any(action.dest == "overrides" for action in parser._actions):
            message = f"unknown option {first!r}; keys are given as KEY=VALUE, as in train.steps=10."
        return ConfigError(f"{parser.prog}: {message} `{parser.prog} --help` lists what is possible")
    return ConfigError(f"{parser.prog}: {' '.join(message.split())}; see `{parser.prog} --help`")
