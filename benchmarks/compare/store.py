"""Store: the results folder. All rows of a measurement are written together once it is whole."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rows import RESULTS, Row, line_of, read_rows
from hzero.errors import ConfigError


class Store:
    """The rows in ``results.jsonl``, and next to it ``traces/``, ``logs/``, ``convergence/`` and ``report/``.

    Args:
        folder: Created if missing.

    Raises:
        ConfigError: The folder cannot be written, or the rows in it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().resolve()
        self.path = self.folder / RESULTS
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(self.path, "ab"):
                pass
        except OSError as error:
            raise ConfigError(f"results: cannot write below {str(folder)!r}: {error.strerror}") from None
        self._rows = Counter(row.id for row in read_rows(self.path)[0])

    @property
    def empty(self) -> bool:
        """Whether no row is stored."""
        return not self._rows

    def has(self, identity: str, rows: int) -> bool:
        """Whether all rows of the measurement with this digest are stored."""
        return self._rows[identity] >= rows

    def add(self, rows: Sequence[Row]) -> None:
        """Appends the rows of one measurement."""
        text = "".join(map(line_of, rows))
        with open(self.path, "r+b") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a torn line must not swallow the first of ours
                    text = "\n" + text
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        self._rows.update(row.id for row in rows)

    def logs(self, name: str) -> Path:
        """An empty folder for the logs of a measurement."""
        folder = self.folder / "logs" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in folder.iterdir():
            left.unlink()
        return folder
