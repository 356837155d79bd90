"""The report of a comparison: rows that are read or refused, arithmetic by hand, the committed report written again."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import document, write_report
from benchmarks.report.__main__ import main
from benchmarks.report.results import Comparison, choose, read
from benchmarks.report.series import series_of
from benchmarks.rows import Row, line_of, parse_row
from hzero.validation import ConfigError
from tests.benchmarks.rows import config, everything, long_run, main_rows, steps, write
from tests.ranks import ROOT

STEM = "2026-11-21-comparison"
COMMITTED = sorted(
    path for path in (ROOT / "benchmarks" / "reports").glob("*.jsonl") if path.name[11:17] not in ("kernel", "groups")
)
LATER = {"date": "2026-11-22T08:00:00+00:00"}


def _rows(contents: list[dict[str, Any]]) -> list[Row]:
    return [parse_row(content, "here") for content in contents]


def _comparison(contents: list[dict[str, Any]]) -> Comparison:
    return choose(_rows(contents))


def _text(contents: list[dict[str, Any]]) -> str:
    return document(_comparison(contents), STEM, [])


def _cells(text: str, part: str, start: str) -> list[str]:
    """Cells of the first line that starts so, behind a part's first words."""
    line = next(line for line in text[text.index(part) :].splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.strip("|").split(" | ")]


# --- rows ---


def test_rows_are_read_as_they_were_written() -> None:
    for row in _rows(everything()):
        assert parse_row(json.loads(line_of(row)), "here") == row


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"kind": "step"}, "kind: unknown value 'step'; did you mean 'steps'?"),
    "format": ({"format": 1}, "found format 1, expected 2"),
    "unknown key": ({"peer": "topo"}, "unknown key 'peer'"),
    "date": ({"date": "yesterday"}, "date: found 'yesterday'"),
    "not a number": ({"step_s": [math.nan]}, "step_s.0: found nan"),
    "tier": ({"busiest": {"rack": 1.0}}, "busiest.rack"),
    "rates": ({"config": config(node_rate=0)}, "cluster.rates_mbit.node: found 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_by_file_line_and_key(name: str, tmp_path: Path) -> None:
    change, message = BAD[name]
    folder = write(tmp_path, [steps("zero3"), {**steps("topo"), **change}])
    with pytest.raises(ConfigError) as refused:
        read([folder])
    assert f"{folder / 'results.jsonl'}:2" in str(refused.value)
    assert message in str(refused.value) and "\n" not in str(refused.value)


# --- which rows count ---


def test_of_several_takes_whole_ones_then_more_schemes_more_rounds_newer_ones_count() -> None:
    double = main_rows(scale=2.0, id="later", **LATER)

    def fastest(contents: list[dict[str, Any]]) -> float:
        return min(row.median_s for row in _comparison(contents).results[0].rows)

    assert fastest(main_rows() + double) == 2.5
    assert fastest(main_rows() + double[:-1]) == 1.25  # the last scheme is missing
    few = config(schemes=["topo", "zero3"])
    assert (
        fastest(main_rows() + [steps(one, scale=2.0, config=few, id="few", **LATER) for one in few["schemes"]]) == 1.25
    )
    assert fastest(main_rows() + main_rows(scale=2.0, config=config(rounds=2), id="short", **LATER)) == 1.25
    notes = _comparison(main_rows() + double[:-1]).notes
    assert notes == ("main was taken 2 times; the take of 2026-11-21 18:02 counts.",)
    assert _comparison(main_rows()[:-1]).notes == ("main has no row of topo.",)


# --- arithmetic ---


def test_tables_have_the_figures_of_the_rows() -> None:
    text = _text(everything())
    # DeepSpeed 4.0 s, topo 1.25 s; 64 tokens x 8 ranks x 2. Busiest link: 1.1 of an even part of 20, 10 and 4 MB over
    # 8 links of 200 Mbit/s, 8 of 75 and 2 trunks of 50. Both cores are busy for 0.5 s.
    assert _cells(text, "## Step time", "hzero topo")[1:] == [
        *("1.250", "1.125", "1.500", "0.312", "819", "0.110 / 0.147 / 0.352", "0.500 *", "3.5000")
    ]
    assert _cells(text, "## Step time", "DeepSpeed ZeRO-3")[7] == "0.500"
    assert _cells(text, "## Bytes", "hzero lossless")[1:] == [
        *("40.80 / 40.00 / 30.00 (+2.0%)", "20.40 / 20.00 / 15.00 (+2.0%)", "8.16 / 8.00 / 6.00 (+2.0%)", "1.80")
    ]
    assert _cells(text, "## Memory", "PyTorch DDP")[3:] == ["12.00 MB", "15.00 MB", "0 B", "–"]
    assert _cells(text, "## Accumulation", "hzero topo")[3] == "**1.875** (1.688–2.250) *"
    assert _cells(text, "## Bandwidth", "scheme")[1:] == ["15 Mbit/s", "50 Mbit/s (main)", "150 Mbit/s"]
    assert _cells(text, "## Codecs", "topo, weights-int4")[1:5] == ["1.125", "1.012", "1.350", "0.900"]
    assert _cells(text, "## Losses", "hzero topo")[1:] == [
        *("0: 4.0300, 1: 4.0700", "4.0500", "0: +0.0300, 1: +0.0500", "+0.0400 (+1.00%)")
    ]


def _points(contents: list[dict[str, Any]], suite: str) -> list[tuple[Any, str]]:
    series = series_of(_comparison(contents), suite)
    assert series is not None
    return [(value, result.suite) for value, result in series.points]


def test_series_borrow_points_that_differ_along_the_axis_alone() -> None:
    rows = everything()
    assert _points(rows, "accumulation") == [(1, "accumulation"), (2, "main"), (4, "accumulation"), (8, "accumulation")]
    assert _points(rows, "sweep") == [(15, "sweep"), (50, "main"), (150, "sweep")]
    assert [value for value, _ in _points(rows, "reduce_scatter")] == ["gloo", "all_to_all", "ring"]
    for row in rows:
        if row["suite"] == "main":
            row["config"] = copy.deepcopy(row["config"])
            row["config"]["train"]["dtype"] = "fp32"
    assert [value for value, _ in _points(rows, "sweep")] == [15, 150]
    rows.append(steps("topo", "sweep", "node-none", config=config(node_rate=None, schemes=["topo"])))
    assert [value for value, _ in _points(rows, "sweep")] == [15, 150, math.inf]


# --- the report ---


def test_committed_rows_are_readable(tmp_path: Path) -> None:
    """Whoever has a published report can have its tables again."""
    for rows in COMMITTED:
        document(read([rows]), STEM, [])
    smallest = min(COMMITTED, key=lambda path: path.stat().st_size)
    files = write_report([smallest], tmp_path, name="again")[1]
    text = files[0].read_text()
    assert all(file.is_file() for file in files) and "**Not measured on AMD GPUs.**" in text
    assert set(re.findall(r"\]\(([^)]+)\)", text)) == {file.name for file in files[1:]}


def test_what_was_not_measured_is_left_out() -> None:
    text = _text(long_run(0, {"topo": 4.0}))
    assert re.findall(r"^## (.*)", text, re.MULTILINE) == ["Losses", "Measurements"]
    text = _text([steps("topo", "one", "one,train.seed=3", config=config(schemes=["topo"]))])
    assert re.findall(r"^## (.*)", text, re.MULTILINE) == ["Step time", "Bytes", "Memory", "Measurements"]
    assert "{{" not in text and "\n- " not in text


def test_wrong_input_is_one_line_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("in"), long_run(0, {"topo": 4.0}))
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
    assert (
        Path("in/report/2027-01-02-first.md").read_text().startswith("# Comparison on an emulated cluster, 2027-01-02")
    )
    assert main(["in", "--date", "2027-01-02", "--name", "first"]) == 2  # never silently
    assert "exists; --overwrite replaces it" in capsys.readouterr().err
    assert main(["in", "--date", "2027-01-02", "--name", "first", "--overwrite"]) == 0
