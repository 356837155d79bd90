"""A refused configuration ends a job on four ranks with one line, before a model is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.launch import run


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("init", "hzero: found key 'presett'; expected"),
        ("world", "hzero.topology: nodes=3 x packages_per_node=1 x devices_per_package=1 is 3 ranks, but the world has 4"),
    ],
)  # fmt: skip
def test_one_line_from_rank_0(way: str, says: str, tmp_path: Path) -> None:
    output = run("refused.py", way, str(tmp_path / "file"), folder=tmp_path, status=1)
    lines = [line for line in output.splitlines() if "hzero: error:" in line]
    assert len(lines) == 1 and lines[0].startswith(f"hzero: error: {says}"), output
    assert "is made" not in output
    assert 'refused.py", line' not in output, "a rank shows its traceback"
    # torchrun's own table names rank 0 as the cause.
    assert "rank      : 0 (local_rank: 0)" in output.partition("Root Cause")[2], output
