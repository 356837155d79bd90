"""Figures as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from hzero.validation import printable


def size_text(count: float) -> str:
    """Bytes with a decimal unit, such as 1.50 kB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def clock(seconds: float) -> str:
    """Seconds as 1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def table_of(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table; columns whose name begins with * are aligned to the right. Cells cannot command the terminal."""
    table = Table(title=title)
    for name in head:
        table.add_column(name.lstrip("*"), justify="right" if name.startswith("*") else "left")
    for row in rows:
        table.add_row(*map(printable, row))
    return table


def show_table(console: Console, heads: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Prints a table without the columns in which no row states anything; nothing without rows."""
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
