"""A script may end anywhere: a user sees its exit status and the error of the rank that caused it."""

from __future__ import annotations

import json
import signal
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
    assert statuses.pop("peers never come") == [3, -signal.SIGINT], ended  # as without hops
    assert list(statuses) == ["destroy", "bound", "engines", "nothing", *raised], ended
    assert all(found == [int(way in raised)] * 2 for way, found in statuses.items()), ended


def test_no_thread_of_hzero_outlives_the_script(ended: subprocess.CompletedProcess[str]) -> None:
    assert ended.stderr.count("threads at exit: []") == 15, ended.stderr  # not rank 1's, whose hop has not ended


def test_errors_are_those_of_the_script(ended: subprocess.CompletedProcess[str]) -> None:
    """A rank that waits for one that has ended names it, and its error, also if that one has served the store."""
    assert ended.stderr.count("ValueError: on all ranks") == 2, ended.stderr
    for rank, kind in enumerate(("ConfigError", "ValueError")):
        told = f"after step 1, micro-batch 1), which has ended with {kind}: on rank {rank} ("
        (line,) = [line for line in ended.stderr.splitlines() if told in line]
        assert f"waited for rank {rank} (host " in line, line
    assert "frozen or gone" not in ended.stderr and "terminate called" not in ended.stderr, ended.stderr


def test_hops_whose_peers_never_come_are_named(ended: subprocess.CompletedProcess[str]) -> None:
    """Rank 0 waits for its hop until the timeout, and rank 1, which an interrupt has ended, a moment."""
    lines = ended.stderr.splitlines()
    # Another rank may print between a line and its end.
    assert ended.stderr.count("hzero: the script has failed, so hops in flight are not waited for") == 1, ended.stderr
    (line,) = [line for line in lines if line.startswith("hzero: warning: in flight at the end of the script: ")]
    assert "from rank 1 (rank 0, " in line and "which has ended with KeyboardInterrupt" in line, line
