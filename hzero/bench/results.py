"""Results of a comparison: one JSON object a line in ``results.jsonl``, traces beside it."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hzero.bench.rows import ConvergenceRow, StepsRow
from hzero.config import ConfigError, one_of

#: File of a results folder that holds the rows.
RESULTS = "results.jsonl"
Row = StepsRow | ConvergenceRow
_KINDS: dict[str, type[StepsRow] | type[ConvergenceRow]] = {"steps": StepsRow, "convergence": ConvergenceRow}


def read_results(paths: Sequence[Path]) -> tuple[list[Row], list[str]]:
    """Reads results, rows that are there twice only once.

    Args:
        paths: Results folders, or files of rows.

    Returns:
        The rows in order, and notes on what was left out.

    Raises:
        ConfigError: There is no such file, a line is no row, or there are no rows at all.
    """
    rows: list[Row] = []
    notes: list[str] = []
    for path in paths:
        file = path / RESULTS if path.is_dir() else path
        found, torn = _read_file(file)
        notes += [f"Line {number} of {file.name} is torn, as of a run that was ended, and left out." for number in torn]
        rows += [row for row in found if all(row.content != other.content for other in rows)]
    if not rows:
        raise ConfigError(f"RESULTS: no rows in {', '.join(repr(str(path)) for path in paths)}")
    return rows, notes


def _read_file(file: Path) -> tuple[list[Row], list[int]]:
    """Rows of a file, and the numbers of its torn lines: the last of a run, or of one that was taken up again."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        if file.parent.is_dir() and file.name == RESULTS:
            raise ConfigError(f"RESULTS: {str(file.parent)!r} holds no {RESULTS}") from None
        raise ConfigError(f"RESULTS: no folder or file {str(file)!r}") from None
    except OSError as error:
        raise ConfigError(f"RESULTS: cannot read {str(file)!r}: {error.strerror}") from None
    texts = data.split(b"\n")
    found: list[Row] = []
    torn: list[int] = []
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            if number == len(texts) or _is_torn(text, error):
                torn.append(number)
                continue
            raise ConfigError(f"{file}:{number}: is no JSON: {' '.join(str(error).split())}") from None
        found.append(parse_row(content, file.parent, f"{file}:{number}"))
    return found, torn


def _is_torn(text: bytes, error: Exception) -> bool:
    """Whether a line is the beginning of an object."""
    at_end = isinstance(error, json.JSONDecodeError) and error.pos >= len(error.doc.rstrip())
    return text.startswith(b"{") and (at_end or not text.rstrip().endswith(b"}"))


def parse_row(content: Any, folder: Path, where: str) -> Row:
    """Checks a row.

    Args:
        content: The object of a line.
        folder: What the trace that it names is relative to.
        where: File and line, for messages.

    Raises:
        ConfigError: It is no row; the message names the key.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: found {reprlib.repr(content)}, expected an object")
    kind = content.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise one_of(f"{where}: kind", kind, _KINDS)
    try:
        return _KINDS[kind].model_validate({**content, "content": content, "folder": folder})
    except (ValidationError, OverflowError) as error:
        raise ConfigError(f"{where}: {_first_of(error)}") from None


def _first_of(error: ValidationError | OverflowError) -> str:
    if isinstance(error, OverflowError):
        return f"a number is too large: {error}"
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ValueError):
        return " ".join(str(cause).split())
    if first["type"] == "missing":
        return f"{key}: missing"
    message = f"{key}: found {reprlib.repr(first.get('input'))}; {first['msg'][0].lower()}{first['msg'][1:]}"
    return " ".join(message.split())
