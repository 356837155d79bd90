"""Arguments of a command, its output, and sizes as people read them."""

from __future__ import annotations

import argparse
import contextlib
import io
import reprlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from hzero.errors import ConfigError, one_of


class Parser(argparse.ArgumentParser):
    """The parser of a command's arguments. Its errors are `ConfigError`.

    Args:
        prog: The command.
        text: Its help: the docstring of its module. The first paragraph precedes the list of options, and the rest follows it.
    """

    def __init__(self, prog: str, text: str | None) -> None:
        about, _, more = (text or "").partition("\n\n")
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=about, epilog=more, formatter_class=formatter)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raises `ConfigError` for an argument with a NUL, which no file or folder can have in its name."""
        for option, text in zip(["", *args], args):
            key, equals, value = text.partition("=")
            if "\0" in text:
                key = key if equals else option if option.startswith("-") else self.prog
                raise ConfigError(f"{key}: found {reprlib.repr(value or text)}; expected a text without NUL")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raises `ConfigError` with the nearest option, instead of printing the usage and exiting."""
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            options = [name for action in self._actions for name in action.option_strings]
            raise one_of(self.prog, unknown.split()[0], options, "argument")
        raise ConfigError(f"{self.prog}: {' '.join(message.split())}; see `{self.prog} --help`")


def positive(kind: Callable[[str], float], most: float) -> Callable[[str], float]:
    """The ``type`` of a numeric argument that must be more than 0 and at most ``most``."""

    def read(text: str) -> float:
        with contextlib.suppress(ValueError):
            if 0 < (value := kind(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(f"found {text[:40]!r}; expected more than 0 and at most {most:,.0f}")

    return read


def keep_lines() -> None:
    """Writes output line by line, so that a log shows the progress, and characters that its encoding lacks as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)


def size_text(count: float) -> str:
    """Formats bytes with a decimal unit, such as 1.50 kB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
