"""Standard streams that never end a run, and consoles whose text cannot command the terminal."""

from __future__ import annotations

import io
import os
import select
import sys
from typing import TYPE_CHECKING, Any, TextIO

from hzero.validation import printable

if TYPE_CHECKING:
    from rich.console import Console

#: Columns of tables in a file or pipe.
WIDTH = 116
#: How long a full pipe may keep a writer that asked not to wait, in seconds.
_FULL_S = 10.0


class _Output(io.FileIO):
    """The file of a standard stream. Output that it cannot take is lost, and the first reason is kept.

    Attributes:
        reason: Why output was lost; None if none was.
    """

    reason: OSError | None = None

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        try:
            written = super().write(data)
            if written is None and select.select([], [self], [], _FULL_S)[1]:  # a parent made the pipe non-blocking
                written = super().write(data)
        except OSError as error:
            self.reason = self.reason or error
            return size
        return size if written is None else written


def keep_streams() -> None:
    """Replaces stdout and stderr by streams that never raise: not on a full disk, nor closed, nor for an encoding.

    Characters that the encoding lacks are written as escapes. Streams that someone else has replaced stay. A descriptor that
    is closed leads to the null device, since the next file that is opened would get its number.
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
        raw = _Output(number, "w", closefd=False)
        unbuffered = getattr(stock, "write_through", False)
        stream = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type]  # as Python itself does
            encoding=getattr(stock, "encoding", "utf-8"),
            errors="backslashreplace",
            line_buffering=getattr(stock, "line_buffering", True),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)


def lost_output() -> str:
    """Why stdout has lost output, such as a full disk; empty if it has not, or if its reader has gone, as ``| head`` does."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", getattr(sys.stdout, "buffer", None))
    reason = raw.reason if isinstance(raw, _Output) else None
    return "" if reason is None or isinstance(reason, BrokenPipeError) else reason.strerror or str(reason)


def console() -> Console:
    """A console for tables, as wide as the terminal; a file or pipe has room for a table.

    Text is no markup, and what it holds of characters that command a terminal is written as escapes.
    """
    from rich.console import Console

    class Escaping(Console):
        def render_str(self, text: str, **options: Any) -> Any:
            return super().render_str("\n".join(map(printable, text.split("\n"))), **options)

    wide = None if "COLUMNS" in os.environ or Console().is_terminal else WIDTH
    return Escaping(markup=False, emoji=False, highlight=False, width=wide)
