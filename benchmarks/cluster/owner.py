"""Owner: who has the one emulated network of this machine. A locked file, which also says what is set up.

The lock is flock(2)'s, so it ends with its process however that ends. What the file says outlives it: that a network was to
stay (``up``), or what a process that was killed has left behind.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cluster.shape import Cluster
from hzero.validation import ConfigError


@dataclass(frozen=True)
class Owner:
    """What the file says.

    Attributes:
        pid: Process that set the network up.
        since: When, in ISO 8601.
        kept: Whether the network was to stay when that process ended.
        cluster: What was set up.
        live: Whether the process still holds the lock.
    """

    pid: int
    since: str
    kept: bool
    cluster: Cluster
    live: bool


def path() -> Path:
    """The file: under /run, which a restart of the machine clears as it does the network.

    Only root writes it, so others, who may not, look where root would have written.
    """
    folder = Path("/run")
    there = folder.is_dir() and (os.geteuid() != 0 or os.access(folder, os.W_OK))
    return (folder if there else Path(tempfile.gettempdir())) / "hzero-cluster.lock"


def read() -> Owner | None:
    """Who has a network, or had one that was not torn down; None where there is none."""
    try:
        with open(path()) as file:
            return _parse(file.read(), live=_locked(file.fileno()))
    except OSError:
        return None


class Lock:
    """The right to set a network up, held until `release` or until the process ends."""

    def __init__(self) -> None:
        self._handle: int | None = None

    @property
    def held(self) -> bool:
        """Whether this object has the lock."""
        return self._handle is not None

    def take(self) -> None:
        """Takes the lock.

        Raises:
            ConfigError: Another process has it (named), or the file cannot be opened.
        """
        try:
            handle = os.open(path(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise ConfigError(f"{path()}: {error.strerror}") from None
        if not _taken(handle):
            other = _parse(os.pread(handle, 1 << 16, 0).decode(errors="replace"), live=True)
            os.close(handle)
            who = f"process {other.pid} since {other.since} ({other.cluster})" if other else "another process"
            raise ConfigError(f"emulated network: in use by {who}; wait for it, or end it: it clears up") from None
        self._handle = handle

    def write(self, cluster: Cluster, *, kept: bool) -> None:
        """Says what is set up, and by whom."""
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        self._replace(json.dumps({"pid": os.getpid(), "since": now, "kept": kept, "cluster": cluster.model_dump()}))

    def erase(self) -> None:
        """Says that nothing is set up."""
        self._replace("")

    def release(self) -> None:
        """Gives the lock back. The file stays: removing it would let two processes lock two files of one name."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _replace(self, text: str) -> None:
        assert self._handle is not None
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, text.encode(), 0)


def _taken(handle: int) -> bool:
    """Locks the file, if it is free in a moment: `read` locks it too, for microseconds."""
    for attempt in range(5):
        time.sleep(0.02 * attempt)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(handle, fcntl.LOCK_UN)
    return False


def _parse(text: str, *, live: bool) -> Owner | None:
    try:
        said = json.loads(text)
        cluster = Cluster.model_validate(said["cluster"])
        return Owner(int(said["pid"]), str(said["since"]), bool(said["kept"]), cluster, live)
    except (ValueError, KeyError, TypeError):  # nothing, or nothing of ours, is written there (ConfigError: ValueError)
        return None
