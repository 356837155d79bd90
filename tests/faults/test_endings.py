"""A script may end anywhere: its exit status, and the error of whoever caused it, are what a user sees."""

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


@pytest.mark.parametrize(
    ("way", "status"),
    [
        ("destroy", 0),
        ("bound", 0),
        ("engines", 0),
        ("nothing", 0),
        ("all raise", 1),
        ("rank 0 raises", 1),
        ("rank 1 raises", 1),
    ],
)
def test_an_open_window_changes_no_status(ended: subprocess.CompletedProcess[str], way: str, status: int) -> None:
    statuses = dict(json.loads(line) for line in ended.stdout.splitlines() if line.startswith("["))
    assert statuses[way] == [status] * 2, ended


def test_errors_are_those_of_the_script(ended: subprocess.CompletedProcess[str]) -> None:
    """A rank that waits for one that has ended names it, and its error, also if that one has served the store."""
    assert ended.stderr.count("ValueError: on all ranks") == 2, ended.stderr
    for rank, kind in enumerate(("ConfigError", "ValueError")):
        (line,) = [line for line in ended.stderr.splitlines() if f"waited for rank {rank} (host " in line]
        assert f"after step 1, micro-step 1), which has ended with {kind}: on rank {rank} (" in line, line
    assert "frozen or gone" not in ended.stderr and "terminate called" not in ended.stderr, ended.stderr
