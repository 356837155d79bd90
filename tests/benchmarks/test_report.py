"""Reports: rows that are read or refused, which of them count, and committed reports written again from committed rows."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest

from benchmarks.report import document
from benchmarks.report.results import read
from benchmarks.rows import line_of, parse_row, read_rows
from tests.ranks import ROOT

REPORTS = ROOT / "benchmarks" / "reports"
COMMITTED = sorted(path for path in REPORTS.glob("*.jsonl") if path.name[11:17] not in ("kernel", "groups"))


@pytest.mark.parametrize("rows", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_report_is_written_again(rows: Path) -> None:
    """Its figures are those of its rows, by today's code. Somebody may have added a remark."""
    images = [path.name for path in REPORTS.glob(f"{rows.stem}-*.png")]
    written = document(read([rows]), rows.stem, images).splitlines()
    committed = rows.with_suffix(".md").read_text().splitlines()
    other = [line for line in difflib.unified_diff(committed, written, n=0, lineterm="") if line.startswith("+")][1:]
    assert len(written) > 20 and not other, "\n".join(other)
    for row in read_rows(rows)[0]:
        assert parse_row(json.loads(line_of(row)), "here") == row
