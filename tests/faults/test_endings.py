"""A script may end anywhere: a user sees its exit status and the error of the rank that caused it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import environment


@pytest.fixture(scope="module")
def ended() -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("endings.py")
    return subprocess.run(
        [sys.executable, script], env=environment(TORCHDYNAMO_DISABLE="1"), capture_output=True, text=True, timeout=300
    )


def test_an_open_window_changes_no_status(ended: subprocess.CompletedProcess[str]) -> None:
    statuses = dict(json.loads(line) for line in ended.stdout.splitlines() if line.startswith("["))
    raised = ("all raise", "rank 0 raises", "rank 1 raises")
    assert list(statuses) == ["destroy", "bound", "engines", "nothing", *raised], ended
    assert all(found == [int(way in raised)] * 2 for way, found in statuses.items()), ended


def test_no_thread_of_hzero_outlives_the_script(ended: subprocess.CompletedProcess[str]) -> None:
    assert ended.stderr.count("threads at exit: []") == 14, ended.stderr


def test_errors_are_those_of_the_script(ended: subprocess.CompletedProcess[str]) -> None:
    """A rank that waits for one that has ended names it, and its error, also if that one has served the store."""
    assert ended.stderr.count("ValueError: on all ranks") == 2, ended.stderr
    for rank, kind in enumerate(("ConfigError", "ValueError")):
        (line,) = [line for line in ended.stderr.splitlines() if f"waited for rank {rank} (host " in line]
        assert f"after step 1, micro-step 1), which has ended with {kind}: on rank {rank} (" in line, line
    assert "frozen or gone" not in ended.stderr and "terminate called" not in ended.stderr, ended.stderr
