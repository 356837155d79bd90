"""Reads files whole, writes them whole or not at all, and checks that other users cannot change a file."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import reprlib
import secrets
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from hzero.errors import ConfigError

#: Maximum size of a file that is read whole, in bytes, unless the caller sets another.
MAX_BYTES = 1 << 26
#: Flags of a file that must not exist yet.
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL


def cache_folder() -> Path:
    """Folder for compiled kernels and prepared texts: ``$XDG_CACHE_HOME/hzero``, or ``~/.cache/hzero``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "hzero"


def regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, links: bool = False) -> int:
    """Opens a regular file in a folder that others may have prepared. Also an ``opener`` of `open`.

    Never waits for another process, never follows a link, and never returns a device or a pipe.

    Args:
        path: The file.
        flags: As for `os.open`.
        links: Whether to follow links, for paths that the user has given.

    Returns:
        The file descriptor.

    Raises:
        OSError: The file cannot be opened, is a link or is not a regular file. The error names it.
    """
    # Opening a pipe waits for its other end, and opening a terminal could make it the process's own.
    flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    try:
        # Opening a device may have side effects, so its kind is read before and, since it may change, after.
        with contextlib.suppress(FileNotFoundError):
            _check_kind(path, os.stat(path, follow_symlinks=links).st_mode)
        file = os.open(path, flags, 0o644)
    except ValueError as error:  # a name that no file can have
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from None
    try:
        _check_kind(path, os.fstat(file).st_mode)
    except OSError:
        os.close(file)
        raise
    return file


def _check_kind(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"
        raise OSError(errno.EINVAL, kind, os.fspath(path))


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
        name = str(error.filename2 or error.filename or path)
        raise ConfigError(f"{key}: cannot write {name!r}: {error.strerror or error}") from None


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Opens a file that replaces ``path`` when the block ends. An exception removes it instead.

    Readers see the old content or the new content, never a part. Several processes may write the same path; the last one wins.
    The content is on disk before the name changes, so this also holds after a power failure. The umask decides who may read
    the file. Only this user may write it.

    Args:
        path: The file to write or replace. Its folder must exist.
        mode: ``"w"`` for UTF-8 text, ``"wb"`` for bytes.

    Yields:
        The open file.

    Raises:
        OSError: The folder cannot be written, or the disk is full. The error names ``path``, which is unchanged.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name[:50]}.{secrets.token_hex(4)}.partial")
    try:
        encoding = None if "b" in mode else "utf-8"
        with open(regular(partial, _NEW), mode, encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(ValueError):  # a name that no file can have
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # an error of a write names no file
        raise


def expanded(path: str | os.PathLike[str]) -> Path:
    """Replaces ``~`` or ``~user`` by the home folder. Raises `ConfigError` if the user does not exist."""
    if "\0" in os.fspath(path):
        raise ConfigError(f"{os.fspath(path)!r}: found a NUL; expected the name of a file or folder")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{os.fspath(path)}: found no home for {Path(path).parts[0]!r}; expected a user") from None


def read_whole(path: str | os.PathLike[str], limit: int = MAX_BYTES, links: bool = True) -> bytes:
    """Reads a file with `regular`.

    Raises:
        ConfigError: The file is missing, not a regular file, not readable, or larger than ``limit`` bytes.
    """
    try:
        with open(regular(path, links=links), "rb") as file:
            content = file.read(limit + 1) or b""
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)}: cannot be read: {(error.strerror or str(error)).lower()}") from None
    if len(content) > limit:
        raise ConfigError(f"{os.fspath(path)}: larger than {limit:,} bytes, the limit")
    return content


def read_text(path: str | os.PathLike[str], limit: int = MAX_BYTES, links: bool = True) -> str:
    """Reads a regular file in UTF-8, without its byte order mark. Raises `ConfigError` as `read_whole` does."""
    try:
        return read_whole(path, limit, links).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{os.fspath(path)}: byte {error.start} is not UTF-8") from None


def read_json(
    path: str | os.PathLike[str],
    parse: Callable[[str], Any] = json.loads,
    limit: int = MAX_BYTES,
    links: bool = True,
) -> dict[str, Any]:
    """Reads the object in a JSON file. Raises `ConfigError` as `read_text` does, or with the position of invalid JSON."""
    text = read_text(path, limit, links)
    try:
        found = parse(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{os.fspath(path)}: is not valid JSON: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{os.fspath(path)}: found {reprlib.repr(found)}; expected a JSON object")
    return found


def distrust(path: Path) -> str:
    """The reason not to trust a file: users other than this one and root can change it. Empty if they cannot.

    Other users must not be able to replace the file in its folder either. A folder with the sticky bit, such as ``/tmp``, is
    fine. A symbolic link is not trusted.
    """
    try:
        around, found = path.parent.stat().st_mode, path.lstat()
    except FileNotFoundError:  # not written yet
        return ""
    except OSError as error:
        return f"{str(path)!r} cannot be read: {error.strerror}"
    if around & 0o002 and not around & stat.S_ISVTX:
        return f"{str(path.parent)!r} can be written by others (mode {around & 0o777:o})"
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
        kind = f"mode {stat.filemode(found.st_mode)} of user {found.st_uid}"
        return f"{str(path)!r} is no regular file that only you or root can write ({kind})"
    return ""
