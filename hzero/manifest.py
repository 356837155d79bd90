"""Which checkpoints are complete: a note in each, with the size and hash of every file, that is written last.

This module imports neither torch nor DeepSpeed; `hzero.zero.checkpoint` writes the notes and compares hashes on all ranks.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hzero.files import read_json, replacing
from hzero.validation import ConfigError, PlainError

logger = logging.getLogger("hzero")

#: Name of the note.
NOTE = "complete.json"
#: Trainer writes it last, after the states of random numbers.
_TRAINER_STATE = "trainer_state.json"
_PIECE = 1 << 22


class SaveError(PlainError):
    """A checkpoint could not be saved. The one before it is still there. All ranks raise it, and rank 0 reports it."""


class IncompleteError(ConfigError):
    """A checkpoint is incomplete, or is not what was written."""


class Manifest(BaseModel, frozen=True):
    """The note of a checkpoint.

    Attributes:
        folder: The folder that DeepSpeed wrote, named after its tag.
        step: Optimizer steps done.
        ranks: Ranks that wrote it.
        batch: Samples of all ranks in a step.
        written: When, in seconds of the clock.
        files: Size and SHA-256 of each file, by name.
    """

    folder: Path
    step: int
    ranks: int
    batch: int
    written: float
    files: dict[str, tuple[int, str]]

    def write(self) -> None:
        """Writes the note beside the files, in one move.

        Raises:
            OSError: The note cannot be written, or a file has not the size with which it was written.
        """
        if changed := self.changed(hashes=False):
            raise OSError(0, changed, str(self.folder))
        with replacing(self.folder / NOTE) as file:
            file.write(self.model_dump_json(exclude={"folder"}, indent=1))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads the note of a checkpoint.

        Raises:
            IncompleteError: It is missing or damaged.
        """
        if not (folder / NOTE).exists():
            raise IncompleteError(f"{str(folder)!r} is incomplete: it has no {NOTE}")
        try:
            found = cls(**{**read_json(folder / NOTE), "folder": folder})
            if not found.files or any(Path(name).name != name for name in found.files):
                raise ValueError("names")
            return found
        except (ValueError, TypeError):
            raise IncompleteError(f"{str(folder)!r} is incomplete: its {NOTE} cannot be read") from None

    def changed(self, names: Iterable[str] | None = None, *, hashes: bool = True) -> str | None:
        """Says which file is not as it was written, and how; None if all are.

        Args:
            names: Files to look at; None: all.
            hashes: Whether to read and hash them; otherwise their sizes are compared.
        """
        for name in self.files if names is None else names:
            size, digest = self.files[name]
            try:
                found = (self.folder / name).stat().st_size
                if found != size:
                    return f"{name} has {found} bytes instead of {size}"
                if hashes and _hash_of(self.folder / name) != digest:
                    return f"{name} is not what was written: its hash differs"
            except OSError as error:
                return f"{name} cannot be read: {error.strerror or error}"
        return None


def newest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The newest complete checkpoint in a folder: what ``resume_from_checkpoint`` of Trainer and ``load_state`` take.

    Complete are checkpoints that were written with the block's key ``"checkpoint"`` and whose files still have their sizes:
    those of Trainer (``checkpoint-20``), of ``Accelerator.save_state``, of Lightning and of ``engine.save_checkpoint``. If
    there are none, but others, written without the key, the newest of those is taken, with a warning. `load_checkpoint` of
    the engine compares hashes.

    Args:
        folder: The folder that holds checkpoints, such as Trainer's ``output_dir``. It may not exist yet.

    Returns:
        The path, or None if there is no complete checkpoint.
    """
    if found := complete_in(Path(folder)):
        return str(found[0])
    others = [
        path
        for path in _children(Path(folder))
        for inner in (path, *_children(path))
        if not (inner / NOTE).exists() and any(inner.glob("*model_states.pt"))
    ]
    if not others:
        return None
    newest = str(max(others, key=lambda path: path.stat().st_mtime))
    logger.warning(
        "hzero: %r was written without the key checkpoint, so that nothing says whether it is complete", newest
    )
    return newest


def complete_in(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, the newest first, by their notes and the sizes of their files."""
    found = []
    for path in _children(folder):
        try:
            notes = notes_in(path)
            for problem in (*(note.changed(hashes=False) for note in notes), _unfinished(path) if notes else None):
                if problem is not None:
                    raise IncompleteError(f"{str(path)!r} is incomplete: {problem}")
        except IncompleteError as error:
            logger.warning("hzero: %s; skipped", error)
            continue
        if notes:
            found.append((max((note.step, note.written) for note in notes), path))
    return [path for _, path in sorted(found, reverse=True)]


def notes_in(path: Path) -> list[Manifest]:
    """The note in a folder, or those of all tags in it."""
    return [Manifest.read(inner) for inner in (path, *_children(path)) if (inner / NOTE).exists()]


def recover(folder: Path, clean: bool = False) -> None:
    """Gives a save its name that was killed while it replaced a checkpoint of the same tag.

    Args:
        folder: The folder that holds checkpoints.
        clean: Whether to remove what other saves have left that were cut short. Only the run that saves there may.

    Raises:
        OSError: The folder cannot be changed.
    """
    for old in folder.glob(".*.old.partial"):
        name = old.name[1:].removesuffix(".old.partial")
        new, place = folder / f".{name}.partial", folder / name
        if (new / NOTE).exists() and not place.exists():
            new.rename(place)
    for path in folder.glob(".*.partial") if clean else ():
        shutil.rmtree(path, ignore_errors=True)


def _unfinished(path: Path) -> str | None:
    """What Trainer has not written of a checkpoint: its own files come after DeepSpeed's."""
    if re.fullmatch(r"checkpoint-\d+", path.name):
        try:
            read_json(path / _TRAINER_STATE)
        except ConfigError:
            return f"Trainer has not written {_TRAINER_STATE}"
    return None


def _children(folder: Path) -> list[Path]:
    """Folders in a folder, without those of saves that have not ended."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return []


def _hash_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


class HashedFile:
    """A new file that hashes what ``torch.save`` writes to it.

    An error of the disk is kept, and what follows is dropped: where ``write`` raises, torch reports a position in its archive
    instead of the reason.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._size, self._hash = 0, hashlib.sha256()
        self._error: OSError | None = None
        self._file = open(path, "wb")  # noqa: SIM115 - `close` closes it

    def write(self, data: Any) -> int:
        """Writes and hashes bytes."""
        length = memoryview(data).nbytes
        self._hash.update(data)
        self._size += length
        try:
            if self._error is None:
                self._file.write(data)
        except OSError as error:
            self._error = error
        return length

    def flush(self) -> None:
        """Does nothing: `close` brings the file onto the disk."""

    def close(self) -> tuple[int, str]:
        """Brings the file onto the disk: some file systems report only then that it is full.

        Returns:
            Size and SHA-256.

        Raises:
            OSError: Now, or while it was written.
        """
        with self._file:
            if self._error is not None:
                raise self._error
            self._file.flush()
            os.fsync(self._file.fileno())
        return self._size, self._hash.hexdigest()
