"""The run's folder: which one, what is in it, and metrics that survive an interruption."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, TextIO

from hzero.config import ConfigError

METRICS, SUMMARY, CONFIG = "metrics.jsonl", "summary.json", "config.yaml"


def holds_run(path: Path) -> bool:
    """Whether a folder holds a run, or what is left of one."""
    return (path / CONFIG).exists() or (path / METRICS).exists()


def choose(directory: str, resume: Any, overwrite: bool) -> Path:
    """The folder to use: as named, or with the next free number where it holds a run that is not to be touched.

    Nothing is written or deleted here.

    Raises:
        ConfigError: There is something there that is no run.
    """
    path = Path(directory).expanduser()
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run.dir: {str(path)!r} is a file")
    if overwrite and path.is_dir() and any(path.iterdir()) and not holds_run(path):
        raise ConfigError(f"run.overwrite: {str(path)!r} is not empty and holds no run; not deleting it")
    if resume == "auto" or overwrite or not holds_run(path):
        return path
    number = 2
    while holds_run(path.with_name(f"{path.name}-{number}")):
        number += 1
    return path.with_name(f"{path.name}-{number}")


def create(path: Path, config: str, overwrite: bool, last_step: int | None) -> None:
    """Makes the folder, writes the resolved configuration, and cuts metrics after ``last_step`` (None: all of them).

    Raises:
        ConfigError: The folder cannot be written.
    """
    try:
        if overwrite and path.is_dir():
            shutil.rmtree(path)
        (path / "logs").mkdir(parents=True, exist_ok=True)
        (path / CONFIG).write_text(config)
        (path / SUMMARY).unlink(missing_ok=True)
        kept = [row for row in read_metrics(path)[0] if last_step is not None and row["step"] <= last_step]
        partial = path / (METRICS + ".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
        partial.rename(path / METRICS)
    except OSError as error:
        raise ConfigError(f"run.dir: cannot write {str(path)!r}: {error.strerror}") from None


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Rows of a run's metrics and the number of lines that could not be read (a torn last one)."""
    rows, torn = [], 0
    file = path / METRICS
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
            int(row["step"])
            rows.append(row)
        except (ValueError, KeyError, TypeError):
            torn += 1
    return rows, torn


class Metrics:
    """Appends rows to ``metrics.jsonl``, each on disk before the next step."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = open(path / METRICS, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the run

    def add(self, row: dict[str, Any]) -> None:
        """Appends one row."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Writes ``summary.json`` in one move."""
    partial = path / (SUMMARY + ".partial")
    partial.write_text(json.dumps(summary, indent=1))
    os.replace(partial, path / SUMMARY)
