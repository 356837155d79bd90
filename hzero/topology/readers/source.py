"""The text of a file or of a command, with limits, and the numbers in it. All readers start here."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hzero.validation import ConfigError

#: The sources of `hzero.topology.readers.read_file`, for messages.
READABLE = (
    "an XML dump of RCCL or NCCL (NCCL_TOPO_DUMP_FILE), the output of nvidia-smi topo -m, a declared machine (YAML or "
    "JSON), or a folder with class/kfd (/sys or a copy of it)"
)

#: Largest file that is read, bytes. A dump of a node of 16 devices has 18 kB.
MAX_BYTES = 8 * 2**20

_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")


def read_text(path: Path, limit: int = MAX_BYTES) -> str:
    """All of a regular file of UTF-8.

    Raises:
        ConfigError: It is missing, no regular file, unreadable, larger than ``limit`` bytes, or not UTF-8.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe could wait for ever
            raise ConfigError(f"{path}: is not a regular file")
        content = read_bytes(path, limit + 1)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {_reason(error)}") from None
    if len(content) > limit:
        raise ConfigError(f"{path}: larger than {limit} bytes, the limit for a topology file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8") from None


def read_bytes(path: Path, limit: int) -> bytes:
    """The first bytes of a file; never waits for another process, whatever kind of file it is. Raises `OSError`."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        return file.read(limit) or b""


def run(command: Sequence[str], timeout_s: float = 30.0) -> str:
    """The output of a command.

    Raises:
        ConfigError: It is not installed, fails, or takes longer than ``timeout_s``.
    """
    name = " ".join(command)
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(f"{name}: cannot be run: {_reason(error)}") from None
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and no wait: a tool that is stuck in the driver never ends
        raise ConfigError(f"{name}: no answer within {timeout_s:g} s") from None
    if process.returncode:
        lines = (errors or output).strip().splitlines() or ["no message"]
        raise ConfigError(f"{name}: failed with exit status {process.returncode}: {lines[-1][:200]}")
    return output


def integer(text: object, where: str, what: str, low: int, high: int) -> int:
    """A decimal integer from ``low`` to ``high``. Raises `ConfigError` with file, place and ``what``."""
    found = str(text).strip()
    if not _INTEGER.fullmatch(found) or not low <= int(found) <= high:
        raise ConfigError(f"{where}: found {what} {shown(text)}, expected an integer from {low} to {high}")
    return int(found)


def shown(value: object) -> str:
    """A value, short enough for a line of a message."""
    text = str(value)
    return repr(text if len(text) <= 40 else text[:40] + "...")


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
