"""Markdown of the report: tables, numbers with their units, parts that unfold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hzero.config import TIERS
from hzero.train.summary import size_text

#: Stands where nothing was measured.
NONE = "–"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table.

    Args:
        head: Titles of the columns.
        rows: Cells.
        left: Columns from the first on that are aligned left.
    """
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    lines = [head, rule, *rows]
    return "\n".join("| " + " | ".join(cell(text) for text in line) + " |" for line in lines)


def cell(text: str) -> str:
    """Text that breaks no table and is no HTML."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def seconds(value: float | None) -> str:
    """Seconds, without the unit."""
    return NONE if value is None else f"{value:.3f}"


def ratio(value: float | None) -> str:
    """A quotient."""
    return NONE if value is None else f"{value:.3f}"


def loss(value: float | None) -> str:
    """A loss in nats a token; None is one that was not finite."""
    return "not finite" if value is None else f"{value:.4f}"


def count(value: float) -> str:
    """A number of things a second."""
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def size(value: float | None) -> str:
    """Bytes with a unit."""
    return NONE if value is None else size_text(value)


def names(labels: Sequence[str]) -> str:
    """Names in a sentence."""
    return " and ".join([", ".join(labels[:-1]), labels[-1]] if len(labels) > 1 else labels)


def by_tier(values: Mapping[Any, float] | None, form: Callable[[float], str]) -> str:
    """A value a tier, innermost first, in one cell."""
    return ", ".join(f"{tier} {form(values[tier])}" for tier in TIERS if tier in values) if values else NONE
