"""Store: the results folder. One JSON object a line; a measurement's lines are written together, when all of it is there."""

from __future__ import annotations

import datetime
import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.compare.machine import machine
from hzero.config import ConfigError

FORMAT = 1


class Store:
    """Results and what lies beside them: ``results.jsonl``, ``traces/``, ``logs/``, ``convergence/``.

    Args:
        folder: Made if it is not there.

    Raises:
        ConfigError: It cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().resolve()
        self.path = self.folder / "results.jsonl"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab"):
                pass
        except OSError as error:
            raise ConfigError(f"results: cannot write below {str(folder)!r}: {error.strerror}") from None
        self._rows: Counter[str] = Counter()
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                self._rows[json.loads(line)["id"]] += 1
            except (ValueError, KeyError, TypeError):
                continue  # the end of a line that was being written when the machine went down

    def has(self, identity: str, rows: int) -> bool:
        """Whether all rows of the measurement of this digest are there."""
        return self._rows[identity] >= rows

    def add(self, rows: Iterable[dict[str, Any]], identity: str) -> None:
        """Appends the rows of one measurement, with date and machine."""
        common = {
            "format": FORMAT,
            "id": identity,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
        }
        lines = [json.dumps({**row, **common}) + "\n" for row in rows]
        text = "".join(lines)
        with open(self.path, "r+b") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a torn line must not swallow the first of ours
                    text = "\n" + text
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        self._rows[identity] += len(lines)

    def logs(self, name: str) -> Path:
        """An empty folder for the logs of a measurement."""
        folder = self.folder / "logs" / name
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.iterdir():
            left.unlink()
        return folder
