"""The paper's table: every scheme has its codecs in both layouts; a run of the smallest job, and its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rows import RESULTS, LayoutRow, read_rows
from tests.forks import run_forked
from tests.ranks import LONG


@LONG
def test_a_run_is_stored_once_and_reported(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the train extra is not installed")
    command = ["-m", "benchmarks.hybrid", "--on", "machine", "--steps", "2", "--layers", "2"]
    command += ["--sequences", "8", "--seeds", "4", "--schemes", "hybrid", "--layouts", "tp2-pp2-dp2"]
    command += ["--eval-batches", "2", "--results", str(tmp_path)]
    status, out, errors = run_forked(*command, folder=tmp_path)
    assert status == 0, out + errors
    (row,) = read_rows(tmp_path / RESULTS)[0]
    assert isinstance(row, LayoutRow) and row.evaluation is not None and 6 < row.evaluation < 8
    assert len(row.step_s) == 2 and row.losses[0] is not None and 6 < row.losses[0] < 8
    assert {"tensor", "pipeline", "gradients", "optimizer"} <= {one.role for one in row.sent}
    assert "## Codecs by parallel dimension" in next((tmp_path / "report").glob("*-hybrid.md")).read_text()
    status, out, errors = run_forked(*command, folder=tmp_path)
    assert status == 0 and ": there" in out and len(read_rows(tmp_path / RESULTS)[0]) == 1
