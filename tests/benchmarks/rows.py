"""Rows of a committed comparison."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from benchmarks.rows import StepsRow, read_rows
from tests.ranks import ROOT

#: Every scheme of the main measurement.
MAIN = [
    row
    for row in read_rows(ROOT / "benchmarks" / "reports" / "2026-11-26-comparison.jsonl")[0]
    if isinstance(row, StepsRow) and row.suite == "main"
]


def changed(rows: Sequence[StepsRow], **values: Any) -> list[StepsRow]:
    """Rows of another take."""
    return [row.model_copy(update={"id": "later", "date": row.date + timedelta(days=1), **values}) for row in rows]
