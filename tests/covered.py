"""Which lines a test runs: coverage of processes that are forked from one another, by test."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import coverage

#: Names the file to which a process adds what it runs.
COVERAGE = "HZERO_CHECKS_COVERAGE"


@contextmanager
def covered(record: str, name: str) -> Iterator[None]:
    """Notes in files that begin with ``record`` which lines run in this process; nothing without one."""
    if not record:
        yield
        return
    recorder = coverage.Coverage(
        data_file=record, data_suffix=True, source_pkgs=["hzero"], config_file=False, context=name, messages=False
    )
    recorder.start()
    try:
        yield
    finally:
        recorder.stop()
        recorder.save()


def lines_by_test(folder: Path) -> dict[str, dict[str, list[int]]]:
    """Lines of each file, by test, from all that processes have noted in a folder."""
    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for path in folder.iterdir():
        data = coverage.CoverageData(basename=str(path))
        data.read()
        for file in data.measured_files():
            for line, names in data.contexts_by_lineno(file).items():
                for name in names:
                    found[name][file].add(line)
    return {name: {file: sorted(lines) for file, lines in files.items()} for name, files in found.items()}
