"""A script may end anywhere: its exit status and its own error are what a user sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.launch import run


@pytest.mark.parametrize("way", ["destroy", "bound", "engines", "exit", "nothing"])
def test_an_open_window_is_no_error(way: str, tmp_path: Path) -> None:
    """A thread of gloo aborted the process where a hop was under way at its end."""
    assert "trained" in run("endings.py", way, "topo" if way == "nothing" else "lossless", folder=tmp_path)


@pytest.mark.parametrize("way", ["all-raise", "one-raises"])
def test_an_exception_inside_a_window_keeps_its_status(way: str, tmp_path: Path) -> None:
    text = run("endings.py", way, "lossless", folder=tmp_path, status=1, timeout=120)
    assert "ValueError: on " in text
    assert "SIGABRT" not in text and "terminate called" not in text, text
