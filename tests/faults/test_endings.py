"""A script may end anywhere: its exit status and its own error are what a user sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.launch import run

#: Ways to end that reach the end of the interpreter, where a thread of gloo aborted the process. Two ranks, since each
#: imports everything.
REAL = ("destroy", "nothing", "one-raises")


def _end(way: str, preset: str, folder: Path, status: int = 0) -> str:
    real = way in REAL
    return run(
        "endings.py", way, preset, folder=folder, status=status, timeout=120, forked=not real, ranks=2 if real else 4
    )


@pytest.mark.parametrize("way", ["destroy", "bound", "engines", "nothing"])
def test_an_open_window_is_no_error(way: str, tmp_path: Path) -> None:
    preset = "topo" if way == "nothing" else "lossless"
    assert "trained" in _end(way, preset, tmp_path)


@pytest.mark.parametrize("way", ["all-raise", "one-raises"])
def test_an_exception_inside_a_window_keeps_its_status(way: str, tmp_path: Path) -> None:
    text = _end(way, "lossless", tmp_path, status=1)
    assert "ValueError: on " in text
    assert "SIGABRT" not in text and "terminate called" not in text, text
