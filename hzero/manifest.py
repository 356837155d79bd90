"""Which checkpoints are complete: a note in each, with the size and hash of every file, that is written last.

This module imports neither torch nor DeepSpeed; `hzero.zero.checkpoint` writes the notes and compares hashes on all ranks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Manifest:
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
    files: Mapping[str, tuple[int, str]]

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.files.values())

    def write(self, folder: Path) -> None:
        """Writes the note into a folder that holds all the files, in one move.

        Raises:
            OSError: The note cannot be written, or a file has not the size with which it was written.
        """
        if changed := self.changed(hashes=False, folder=folder):
            raise OSError(0, changed, str(folder))
        note: dict[str, Any] = {"step": self.step, "ranks": self.ranks, "batch": self.batch, "written": self.written}
        note["files"] = {name: list(file) for name, file in sorted(self.files.items())}
        with replacing(folder / NOTE) as file:
            file.write(json.dumps({**note, "seal": _seal(note)}, indent=1))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads the note of a checkpoint.

        Raises:
            IncompleteError: It is missing or damaged.
        """
        if not (folder / NOTE).exists():
            raise IncompleteError(f"{str(folder)!r} is incomplete: it has no {NOTE}")
        try:
            note = read_json(folder / NOTE)
            if note.pop("seal") != _seal(note):
                raise ValueError("changed")
            files = {str(name): (int(size), str(digest)) for name, (size, digest) in note.pop("files").items()}
            if not files or any(Path(name).name != name for name in files):
                raise ValueError("names")
            return cls(folder, int(note["step"]), int(note["ranks"]), int(note["batch"]), float(note["written"]), files)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise IncompleteError(f"{str(folder)!r} is incomplete: its {NOTE} cannot be read") from None

    def changed(
        self, names: Iterable[str] | None = None, *, hashes: bool = True, folder: Path | None = None
    ) -> str | None:
        """Says which file is not as it was written, and how; None if all are.

        Args:
            names: Files to look at; None: all.
            hashes: Whether to read and hash them; otherwise their sizes are compared.
            folder: Where they are; None: in the checkpoint.
        """
        for name in self.files if names is None else names:
            size, digest = self.files[name]
            path = (folder or self.folder) / name
            try:
                found = path.stat().st_size
                if found != size:
                    return f"{name} has {found} bytes instead of {size}"
                if hashes and _hash_of(path) != digest:
                    return f"{name} is not what was written: its hash differs"
            except FileNotFoundError:
                return f"{name} is missing"
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
    found = complete_in(Path(folder))
    if found:
        return str(found[0])
    others = [
        path
        for path in _children(Path(folder))
        for inner in (path, *_children(path))
        if not (inner / NOTE).exists() and any(inner.glob("*model_states.pt"))
    ]
    if not others:
        return None
    newest = max(others, key=lambda path: path.stat().st_mtime)
    logger.warning(
        "hzero: %r was written without the key checkpoint, so that nothing says whether it is complete", str(newest)
    )
    return str(newest)


def complete_in(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, the newest first, by their notes and the sizes of their files."""
    found = []
    for path in _children(folder):
        try:
            manifests = [Manifest.read(path)] if (path / NOTE).exists() else list(manifests_in(path))
            if manifests and not any(manifest.changed(hashes=False) for manifest in manifests) and _is_whole(path):
                found.append((max((one.step, one.written) for one in manifests), path))
        except IncompleteError as error:
            logger.warning("hzero: %s; skipped", error)
    return [path for _, path in sorted(found, reverse=True)]


def manifests_in(path: Path) -> Iterable[Manifest]:
    """The notes of all tags in a folder."""
    return (Manifest.read(inner) for inner in _children(path) if (inner / NOTE).exists())


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


def _is_whole(path: Path) -> bool:
    """Whether a client has written its own files, which come after DeepSpeed's."""
    if not re.fullmatch(r"checkpoint-\d+", path.name):
        return True
    try:
        return isinstance(read_json(path / _TRAINER_STATE), dict)
    except ConfigError:
        logger.warning("hzero: %r is incomplete: Trainer has not written %s; skipped", str(path), _TRAINER_STATE)
        return False


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


def _seal(note: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()


class HashedFile:
    """A new file that hashes what ``torch.save`` writes to it.

    An error of the disk is kept, and what follows is dropped: where ``write`` raises, torch reports a position in its archive
    instead of the reason.

    Attributes:
        size: Bytes written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.size = 0
        self._hash = hashlib.sha256()
        self._error: OSError | None = None
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - `close` closes it

    def write(self, data: Any) -> int:
        """Writes and hashes bytes."""
        rest = memoryview(data).cast("B")
        length = len(rest)
        self._hash.update(rest)
        self.size += length
        while rest and self._error is None:
            try:
                rest = rest[self._file.write(rest) :]
            except OSError as error:
                self._error = error
        return length

    def flush(self) -> None:
        """Does nothing: nothing is kept back."""

    def close(self) -> tuple[int, str]:
        """Brings the file onto the disk: some file systems report only then that it is full.

        Returns:
            Size and SHA-256.

        Raises:
            OSError: Now, or while it was written.
        """
        with self._file:
            if self._error is None:
                os.fsync(self._file.fileno())
        if self._error is not None:
            raise self._error
        return self.size, self._hash.hexdigest()
