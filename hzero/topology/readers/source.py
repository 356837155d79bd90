"""Source: the text of a file or of a command, with limits, and the numbers in it. All readers start here."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hzero.topology.machine import TopologyError

#: Largest file that is read, bytes. A dump of a node of 16 devices has 18 kB.
MAX_BYTES = 32 * 2**20
#: Longest wait for a vendor's tool, seconds.
TIMEOUT_S = 30.0

_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")


def read_text(path: Path, most: int = MAX_BYTES) -> str:
    """All of a regular file of UTF-8.

    Args:
        path: The file.
        most: Bytes it may have.

    Raises:
        TopologyError: It is missing, no regular file, unreadable, larger than ``most``, or not UTF-8.
    """
    try:
        mode = path.stat()
        if stat.S_ISDIR(mode.st_mode):
            raise TopologyError(f"{path}: is a directory, expected a file")
        if not stat.S_ISREG(mode.st_mode):  # to open a pipe could wait for ever
            raise TopologyError(f"{path}: is no regular file")
        content = read_bytes(path, most + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, TopologyError):
            raise
        raise TopologyError(f"{path}: cannot be read: {_reason(error)}") from None
    if len(content) > most:
        raise TopologyError(f"{path}: has more than {most} bytes, no topology is that large")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TopologyError(f"{path}: byte {error.start} is not UTF-8") from None


def read_bytes(path: Path, most: int) -> bytes:
    """The first bytes of a file; never waits for another process, whatever kind of file it is. Raises `OSError`."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        return file.read(most) or b""


def run(command: Sequence[str], timeout_s: float = TIMEOUT_S) -> str:
    """What a command prints.

    Raises:
        TopologyError: It is not installed, fails, or takes longer than ``timeout_s``.
    """
    name = " ".join(command)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError as error:
        raise TopologyError(f"{name}: cannot be run: {_reason(error)}") from None
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _stop(process)
        raise TopologyError(f"{name}: no answer within {timeout_s:g} s") from None
    if process.returncode:
        lines = (errors or output).decode(errors="replace").strip().splitlines() or ["no message"]
        raise TopologyError(f"{name}: failed with exit status {process.returncode}: {lines[-1][:200]}")
    return output.decode(errors="replace")


def integer(text: object, where: str, what: str, low: int, high: int) -> int:
    """A decimal integer between two bounds.

    Args:
        text: As the source writes it.
        where: File and place, for messages.
        what: What it counts, for messages.
        low: Smallest possible value.
        high: Largest possible value.

    Raises:
        TopologyError: It is none.
    """
    found = str(text).strip() if isinstance(text, (str, int)) and not isinstance(text, bool) else ""
    if not _INTEGER.fullmatch(found) or not low <= int(found) <= high:
        raise TopologyError(f"{where}: found {what} {shown(text)}, expected an integer from {low} to {high}")
    return int(found)


def shown(value: object) -> str:
    """What was found, short enough for a line of a message."""
    text = value if isinstance(value, str) else type(value).__name__ if isinstance(value, (dict, list)) else str(value)
    return repr(text if len(text) <= 40 else text[:40] + "...")


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a command with its children. One that is stuck in the driver cannot be waited for."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=1.0)
    except (ProcessLookupError, subprocess.TimeoutExpired):
        pass
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
