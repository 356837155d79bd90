"""Figures as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
