"""What tests of job scripts share: a job that breaks no rule, and stand-ins for Slurm's commands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def tool(folder: Path, name: str, text: str) -> None:
    """A stand-in for a command of Slurm's."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # no column of a table is left out


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides of a job that breaks no rule of Frontier."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))  # no command of Slurm's
    (tmp_path / "env.tar.gz").touch()
    (tmp_path / "env.sif").touch()
    return ["experiment=paper_20b", "nodes=48", "machine=frontier", "account=abc123", "environment=env.tar.gz"]
