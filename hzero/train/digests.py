"""Hashes of files (XXH3, 128 bits), by which a change that keeps a file's size is found. They are no protection from intent."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import stat
import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import xxhash

from hzero.files import read_small
from hzero.formatting import size_text
from hzero.progress import Progress

#: Key of the hashes of a folder's files in its note, and of the hash of the note itself.
HASHES, SEAL = "xxh3_128", "seal"
#: Bytes that are read at once, and threads that read: hashing takes 0.1 s per GB, so what is read from matters.
_CHUNK, _THREADS = 1 << 22, 8
#: Bytes that are written at once, of which direct writes take whole blocks only; and the flag for those, where there is one.
_PIECE, _BLOCK, _DIRECT = 4 << 20, 4096, getattr(os, "O_DIRECT", 0)


class HashedFile:
    """A new file that hashes what is written to it, for ``torch.save``, which writes from the first byte to the last.

    It goes past the kernel's page cache where the file system can (``O_DIRECT``): filling the cache takes more of a core than
    all the rest of a save, and memory that training may want.

    An error of the disk is kept and what follows it is dropped: where ``write`` raises, torch reports a position in its
    archive in place of the reason.

    Args:
        path: The file, which is replaced.
        direct: False writes through the page cache.

    Attributes:
        size: Bytes written.
    """

    #: Pieces of memory of files that are closed, for the next ones: fresh memory takes longer than copying into it.
    _free: ClassVar[list[mmap.mmap]] = []

    def __init__(self, path: str | os.PathLike[str], direct: bool = True) -> None:
        self.size = 0
        self._hash = xxhash.xxh3_128()
        self._error: OSError | None = None
        self._piece = self._free.pop() if self._free else mmap.mmap(-1, _PIECE)  # at a page, as direct writes must be
        self._filled = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._file = os.open(path, flags | (_DIRECT if direct else 0), 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._file = os.open(path, flags, 0o666)

    def write(self, data: Any) -> int:
        """Writes and hashes bytes."""
        whole = memoryview(data).cast("B")
        length = len(whole)
        rest = np.frombuffer(whole, np.uint8) if length else np.empty(0, np.uint8)
        self._hash.update(whole)
        self.size += length
        piece = np.frombuffer(self._piece, np.uint8)
        while len(rest) and self._error is None:
            part = rest[: _PIECE - self._filled]
            piece[self._filled : self._filled + len(part)] = part  # numpy leaves Python's lock alone meanwhile
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == _PIECE:
                self._flush()
        return length

    def flush(self) -> None:
        """Does nothing: `close` flushes."""

    def close(self) -> str:
        """Brings the file onto the disk and closes it: some file systems report only then that it is full.

        Returns:
            The hash, in hexadecimal.

        Raises:
            OSError: Now, or while it was written.
        """
        try:
            try:
                if self._error is None:
                    self._through_the_cache()  # the end of a file is no whole number of blocks
                    self._flush()
                if self._error is None:
                    os.fsync(self._file)
            finally:
                os.close(self._file)
                self._free.append(self._piece)
        except OSError as error:
            self._error = self._error or error
        if self._error is not None:
            raise self._error
        return self._hash.hexdigest()

    def _flush(self) -> None:
        with memoryview(self._piece) as piece:
            done = 0
            while done < self._filled and self._error is None:
                try:
                    done += os.write(self._file, piece[done : self._filled])
                except OSError as error:
                    if error.errno != errno.EINVAL or not self._through_the_cache():
                        self._error = error
                if done % _BLOCK:  # a disk that is nearly full took a part; the next write says why
                    self._through_the_cache()
        self._filled = 0

    def _through_the_cache(self) -> bool:
        """Writes what follows through the page cache. Returns whether it went past it before."""
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~_DIRECT)
        return bool(flags & _DIRECT)


def of_file(path: Path, seen: Any = lambda count: None) -> str:
    """The hash of a file.

    Args:
        path: The file.
        seen: Is called with the number of bytes of each piece that has been read; what it raises ends the reading.
    """
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)
            seen(len(piece))
    return digest.hexdigest()


def first_changed(folder: Path, sizes: Mapping[str, int], hashes: Mapping[str, str]) -> str | None:
    """Compares the files of a folder with what was noted of them; several at once, with progress.

    At the first that differs, and at Ctrl-C, the others are read no further than the piece at hand, which nobody waits for.

    Args:
        folder: The folder.
        sizes: Bytes of each file.
        hashes: Hash of each; without one a file's size alone is compared.

    Returns:
        A file that differs, and how; None if none does.
    """
    for name, size in sizes.items():
        try:
            status = os.stat(folder / name)
            found = status.st_size if stat.S_ISREG(status.st_mode) else None
        except (FileNotFoundError, NotADirectoryError):
            found = None
        except (OSError, ValueError) as error:  # ValueError: no name of a file
            return f"{name[:200]} cannot be read: {getattr(error, 'strerror', None) or error}"
        if found != size:
            return f"{name} is missing" if found is None else f"{name} has {found} bytes instead of {size}"
    if not hashes:
        return None
    total, done, lock = sum(sizes[name] for name in hashes), 0, threading.Lock()
    pool, stop = ThreadPoolExecutor(_THREADS), threading.Event()
    with Progress(total) as progress:

        def seen(count: int) -> None:
            nonlocal done
            if stop.is_set():
                raise CancelledError
            with lock:
                done += count
                progress.update(done, f"checking {folder.name}: {size_text(done)} of {size_text(total)}")

        def check(name: str) -> str | None:
            try:
                same = of_file(folder / name, seen) == hashes[name]
            except OSError as error:
                return f"{name} cannot be read: {error.strerror or error}"
            return None if same else f"{name} is not what was written: its hash differs"

        try:
            checks = as_completed([pool.submit(check, name) for name in hashes])
            if changed := next((changed for checked in checks if (changed := checked.result())), None):
                return changed
            pool.shutdown()  # its threads have done their work; ranks are forked from a process without them
            return None
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)


def read_note(path: Path) -> dict[str, Any]:
    """Reads the note of a checkpoint or of a cache's entry, whoever wrote it.

    Raises:
        OSError: It is missing, or no regular file.
        ValueError: It is no JSON, too large, or its step is not the number at the end of its folder's name.
        TypeError, OverflowError, RecursionError: It is nothing that was written here.
    """
    note: dict[str, Any] = json.loads(read_small(path))
    if "step" in note and int(note["step"]) != int(path.parent.name.rpartition("_")[2]):
        raise ValueError(f"the step is {note['step']}")
    return note


def sealed(note: Mapping[str, Any]) -> dict[str, Any]:
    """A note, which JSON can express, with a hash of itself in place of any that it has."""
    return {**note, SEAL: _of_note(note)}


def holds(note: Mapping[str, Any]) -> bool:
    """Whether a note lists files of its folder and is as `sealed` left it; before notes were sealed they had no hashes."""
    files, hashes = note.get("files"), note.get(HASHES, {})
    if not files or any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        return False
    if SEAL not in note and not hashes:
        return True
    return bool(hashes.keys() == files.keys() and note.get(SEAL) == _of_note(note))


def _of_note(note: Mapping[str, Any]) -> str:
    content = {key: value for key, value in note.items() if key != SEAL}
    return str(xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode()))
