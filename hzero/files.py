"""Writes files whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from hzero.validation import ConfigError

#: Numbers of errors that say that a disk takes no more: full, over quota, read-only.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@contextlib.contextmanager
def refusing(key: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns an error of the file system into one line.

    Args:
        key: The key or option that names the place.
        path: The place, for errors that name no file.

    Raises:
        ConfigError: Names key, file and reason.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(cannot_write(key, path, error)) from None


def cannot_write(key: str, path: str | os.PathLike[str], error: OSError) -> str:
    """The line of `refusing`."""
    return f"{key}: cannot write {str(error.filename2 or error.filename or path)!r}: {error.strerror or error}"


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Opens a file that replaces ``path`` when the block ends without an exception, and is removed otherwise.

    Readers see the old content or the new, never a part. Several processes may write the same path; the last one wins.
    The content is on disk before the name changes, so a power cut also leaves one of the two.

    Args:
        path: The file to write or replace. Its folder must exist.
        mode: ``"w"`` for UTF-8 text, ``"wb"`` for bytes.

    Yields:
        The open file.

    Raises:
        OSError: The folder cannot be written, or the disk is full. It names ``path``, which is unchanged.
    """
    path = Path(path)
    name = ""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:50]}.", suffix=".partial")
        with os.fdopen(handle, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # only their owner may read mkstemp's files
        os.replace(name, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # errors of a write name no file
        raise
