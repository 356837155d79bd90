"""The parser of the commands' arguments: it refuses them as everything else is refused, on one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

from hzero.validation import ConfigError, nearest


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` whose errors are `ConfigError`: the command, what was found, and what is possible."""

    def error(self, message: str) -> NoReturn:
        """Raises `ConfigError` instead of argparse's usage and exit, with the option or key that may have been meant."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown == message:
            raise ConfigError(f"{self.prog}: {' '.join(message.split())}; see `{self.prog} --help`")
        first = unknown.split()[0]
        options = [name for action in self._actions for name in action.option_strings]
        near = nearest(first, options, 0.75) if first.startswith("-") else None
        message = f"unknown argument {first!r}" + (f"; did you mean {near!r}?" if near else ".")
        if not near and first.startswith("-") and any(action.dest == "overrides" for action in self._actions):
            message = f"unknown option {first!r}; keys are given as KEY=VALUE, as in train.steps=10."
        raise ConfigError(f"{self.prog}: {message} `{self.prog} --help` lists what is possible")
