"""Arguments of a command, its output, and sizes as people read them."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import reprlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

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


class _Output(io.FileIO):
    """The file of a standard stream. Output that cannot be written is lost, and the first reason is kept.

    Attributes:
        reason: Why output was lost; None if none was.
    """

    reason: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.reason = self.reason or error
            return memoryview(data).nbytes


def keep_streams() -> None:
    """Replaces stdout and stderr by streams that never raise, even on a full disk, if closed, or for an unencodable character.

    ``reconfigure`` would not do: it fails on the sockets that srun gives to ranks. Characters that the encoding lacks are
    written as escapes. Streams that other code has replaced stay. A closed descriptor is opened on the null device, since the
    next opened file would get its number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stock: TextIO | None = getattr(sys, name)
        if stock is not getattr(sys, f"__{name}__"):
            continue
        os.set_blocking(number, True)  # a parent may have made a non-blocking pipe, which loses output when full
        raw = _Output(number, "w", closefd=False)
        unbuffered = getattr(stock, "write_through", False)
        stream = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type]  # as Python itself does
            encoding=getattr(stock, "encoding", "utf-8"),
            errors="backslashreplace",
            line_buffering=True,  # so that a log shows the progress
            write_through=unbuffered,
        )
        setattr(sys, name, stream)


def lost_output() -> str:
    """The reason why stdout has lost output, such as a full disk. Empty without loss, or if the reader closed the pipe."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", getattr(sys.stdout, "buffer", None))
    reason = raw.reason if isinstance(raw, _Output) else None
    return "" if reason is None or isinstance(reason, BrokenPipeError) else reason.strerror or str(reason)
