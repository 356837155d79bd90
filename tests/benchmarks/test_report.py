"""Reports: rows that are read or refused, which of them count, and committed reports written again from committed rows."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import document
from benchmarks.report.__main__ import main
from benchmarks.report.results import Comparison, choose, read
from benchmarks.rows import RESULTS, StepsRow, line_of, parse_row, read_rows
from hzero.errors import ConfigError
from tests.ranks import ROOT

REPORTS = ROOT / "benchmarks" / "reports"
COMMITTED = sorted(path for path in REPORTS.glob("*.jsonl") if path.name[11:17] not in ("kernel", "groups"))
#: Every scheme of the main measurement.
MAIN = [
    row
    for row in read_rows(REPORTS / "2026-11-26-comparison.jsonl")[0]
    if isinstance(row, StepsRow) and row.suite == "main"
]


def changed(rows: Sequence[StepsRow], **values: Any) -> list[StepsRow]:
    """Rows of another take."""
    return [row.model_copy(update={"id": "later", "date": row.date + timedelta(days=1), **values}) for row in rows]


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


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"kind": "step"}, "kind: found 'step'; expected"),
    "format": ({"format": 1}, "found format 1, expected 2"),
    "unknown key": ({"peer": "topo"}, "found key 'peer'"),
    "date": ({"date": "yesterday"}, "date: found 'yesterday'"),
    "not a number": ({"step_s": [math.nan]}, "step_s.0: found nan"),
    "tier": ({"busiest": {"rack": 1.0}}, "busiest.rack"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_by_file_line_and_key(name: str, tmp_path: Path) -> None:
    change, message = BAD[name]
    bad = {**json.loads(line_of(MAIN[1])), **change}
    (tmp_path / RESULTS).write_text(f"{line_of(MAIN[0])}{json.dumps(bad)}\n")
    with pytest.raises(ConfigError) as refused:
        read([tmp_path])
    assert f"{tmp_path / RESULTS}:2" in str(refused.value)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_of_several_takes_whole_ones_then_more_schemes_more_rounds_newer_ones_count() -> None:
    def counted(comparison: Comparison) -> set[str]:
        return {row.id for row in comparison.results[0].rows}

    first, later = {MAIN[0].id}, changed(MAIN)
    assert counted(choose([*MAIN, *later])) == {"later"}
    torn = choose([*MAIN, *later[:-1]])
    assert counted(torn) == first
    assert torn.notes == (f"main was taken 2 times; the take of {MAIN[0].date:%Y-%m-%d %H:%M} counts.",)
    two = MAIN[0].config.model_copy(update={"schemes": [row.scheme for row in MAIN[:2]]})
    assert counted(choose([*MAIN, *changed(MAIN[:2], config=two)])) == first
    short = MAIN[0].config.model_copy(update={"rounds": 1})
    assert counted(choose([*MAIN, *changed(MAIN, config=short)])) == first
    assert choose(MAIN[:-1]).notes == (f"main has no row of {MAIN[-1].scheme}.",)


def test_wrong_input_is_one_line_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    Path("in", RESULTS).write_text("".join(map(line_of, MAIN)))
    Path("empty").mkdir()
    Path("file").write_text("")
    wrong = {
        "nowhere": "nowhere: cannot read: No such file",
        "empty": "empty/results.jsonl: cannot read",
        "file": "RESULTS: no rows in file",
        "in --name a/b": "--name: found 'a/b', expected letters",
        "in --date 21.11.2026": "--date: found '21.11.2026', expected a day",
        "in -o file": "--output: cannot write 'file'",
    }
    for arguments, message in wrong.items():
        assert main(arguments.split()) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error
    assert {path.name for path in Path().iterdir()} == {"in", "empty", "file"}
    assert main(["in", "--date", "2027-01-02", "--name", "first"]) == 0
    text = Path("in/report/2027-01-02-first.md").read_text()
    assert text.startswith("# Comparison on an emulated cluster, 2027-01-02") and "first-step-time.png" in text
    assert main(["in", "--date", "2027-01-02", "--name", "first"]) == 2  # never silently
    assert "exists; --overwrite replaces it" in capsys.readouterr().err
    assert main(["in", "--date", "2027-01-02", "--name", "first", "--overwrite"]) == 0
