"""Standard streams that never end a run, consoles whose text cannot command the terminal, and figures as people read them."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from hzero.validation import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Columns of tables in a file or pipe.
WIDTH = 116


class _Output(io.FileIO):
    """The file of a standard stream. Output that it cannot take is lost, and the first reason is kept.

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
        os.set_blocking(number, True)  # a parent may have made a pipe that loses what it has no room for
        raw = _Output(number, "w", closefd=False)
        unbuffered = getattr(stock, "write_through", False)
        stream = io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw),  # type: ignore[arg-type]  # as Python itself does
            encoding=getattr(stock, "encoding", "utf-8"),
            errors="backslashreplace",
            line_buffering=True,  # a log shows how far a run has come
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


def size_text(count: float) -> str:
    """Bytes with a decimal unit, such as 1.50 kB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def table_of(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table; columns whose name begins with * are aligned to the right. Cells cannot command the terminal."""
    from rich.table import Table

    table = Table(title=title)
    for name in head:
        table.add_column(name.lstrip("*"), justify="right" if name.startswith("*") else "left")
    for row in rows:
        table.add_row(*map(printable, row))
    return table


def show_table(console: Console, heads: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Prints a table without the columns in which no row states anything; nothing without rows."""
    from rich import box
    from rich.table import Table

    kept = [column for column in range(len(heads)) if any(row[column] not in (None, "") for row in rows)]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title=title or None, title_justify="left")
    for column in kept:
        numbers = all(isinstance(row[column], (int, float, type(None))) for row in rows)
        table.add_column(heads[column], justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        cells = ("-" if row[column] in (None, "") else row[column] for column in kept)
        table.add_row(*(f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in cells))
    if rows:
        console.print(table)
        console.print()
