"""Complete checkpoints: each has a note, written last, with the size and hash of every file.

This module imports neither torch nor DeepSpeed; `hzero.deepspeed.checkpoint` writes the notes and compares hashes on all ranks.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from hzero.errors import ConfigError, PlainError
from hzero.files import read_json, read_text, regular, replacing

logger = logging.getLogger("hzero")

#: Name of the note.
NOTE = "complete.json"
#: Trainer writes it last, after the states of random numbers.
_TRAINER_STATE = "trainer_state.json"
_TRAINER = re.compile(r"checkpoint-(\d+)")
_PIECE = 1 << 22


def _sealed(body: str) -> str:
    """A JSON object with the SHA-256 of its other members as the first one."""
    return f'{{\n "sha256": "{hashlib.sha256(body[1:].encode()).hexdigest()}",{body[1:]}'


class SaveError(PlainError):
    """A checkpoint could not be saved. The previous checkpoint still exists. All ranks raise this, and rank 0 reports it."""


class IncompleteError(ConfigError):
    """A checkpoint is incomplete, or its files have changed."""


class Manifest(BaseModel, frozen=True):
    """The note of a checkpoint.

    Attributes:
        folder: The folder that DeepSpeed wrote, named after its tag.
        step: Optimizer steps done.
        batch: Samples of all ranks in a step.
        written: Time of writing, in seconds since the epoch.
        files: Size and SHA-256 of each file, by name.
        beside: Sizes of the files that Trainer wrote next to the folder, by name.
    """

    folder: Path
    step: int
    batch: int
    written: float
    files: dict[str, tuple[int, str]]
    beside: dict[str, int] = {}

    def write(self) -> None:
        """Writes the note next to the files, atomically.

        Raises:
            OSError: The note cannot be written, or the size of a file has changed.
        """
        if changed := self.changed(hashes=False):
            raise OSError(0, changed, str(self.folder))
        with replacing(self.folder / NOTE) as file:
            file.write(_sealed(self.model_dump_json(exclude={"folder"}, indent=1)))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads the note of a checkpoint.

        Raises:
            IncompleteError: The note is missing or damaged.
        """
        try:
            text = read_text(folder / NOTE, links=False)
            body = "{" + text[len(_sealed("{")) :]
            if text != _sealed(body):
                raise ValueError("checksum")
            found = cls(**{**json.loads(body), "folder": folder})
            if not found.files or any(Path(name).name != name for name in (*found.files, *found.beside)):
                raise ValueError("names")
            return found
        except (ValueError, TypeError, RecursionError):
            raise IncompleteError(f"{str(folder)!r} is incomplete: its {NOTE} cannot be read, or has changed") from None

    def changed(self, names: Iterable[str] | None = None, *, hashes: bool = True) -> str | None:
        """Describes the first file that has changed; None if none has.

        Args:
            names: Files to compare; None: all, including the files next to the folder.
            hashes: Whether to compare hashes in addition to sizes.
        """
        entries = {name: self.files[name] for name in (self.files if names is None else names)}
        if names is None:
            entries |= {f"../{name}": (size, "") for name, size in self.beside.items()}
        for name, (size, digest) in entries.items():
            try:
                with open(regular(self.folder / name), "rb", buffering=0) as file:
                    if (found := os.fstat(file.fileno()).st_size) != size:
                        return f"{name} has {found} bytes instead of {size}"
                    if hashes and digest and _hash_of(file) != digest:
                        return f"{name} has changed: its hash differs"
            except OSError as error:
                return f"{name} cannot be read: {error.strerror or error}"
        return None


def newest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The newest complete checkpoint in a folder, for Trainer's ``resume_from_checkpoint`` or Accelerate's ``load_state``.

    A checkpoint is complete if it was written with the block's key ``"checkpoint"`` and its files still have their sizes. It
    may come from Trainer (``checkpoint-20``), ``Accelerator.save_state``, Lightning or ``engine.save_checkpoint``. A
    checkpoint without a note is returned, with a warning, if no checkpoint is complete, or if Trainer has finished it at a
    later step. Hashes are compared later, by the engine's `load_checkpoint`.

    Args:
        folder: The folder with the checkpoints, such as Trainer's ``output_dir``. It may not exist yet.

    Returns:
        The path, or None if there is no complete checkpoint.
    """
    complete = complete_in(Path(folder))
    newest = without_note(Path(folder), complete)
    if newest is None:
        return next(map(str, complete), None)
    logger.warning("hzero: %r was written without the key checkpoint, so it may be incomplete", str(newest))
    return str(newest)


def without_note(folder: Path, complete: Mapping[Path, Manifest]) -> Path | None:
    """The newest checkpoint that was written without the key, or None if a complete one is preferred.

    If there are complete checkpoints, only Trainer's are compared with them: their names contain the step, and their last
    file proves that they are whole. File times are not compared, since they change when a folder is copied.

    Args:
        folder: The folder with the checkpoints.
        complete: Result of `complete_in`.
    """
    others = [
        path
        for path in _children(folder)
        for inner in (path, *_children(path))
        if not (inner / NOTE).exists() and any(inner.glob("*model_states.pt"))
    ]
    if not complete:
        return max(others, key=lambda path: path.stat().st_mtime, default=None)
    first = next(iter(complete.values())).step + 1
    steps = [(int(found[1]), path) for path in others if (found := _TRAINER.fullmatch(path.name))]
    return max(((step, path) for step, path in steps if step >= first and not _unfinished(path)), default=(0, None))[1]


def complete_in(folder: Path) -> dict[Path, Manifest]:
    """The complete checkpoints in a folder with their newest notes, newest first. Compares the sizes of files."""
    found: list[tuple[Path, Manifest]] = []
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
            found.append((path, max(notes, key=_age)))
    return dict(sorted(found, key=lambda one: (_age(one[1]), one[0]), reverse=True))


def _age(note: Manifest) -> tuple[int, float]:
    return note.step, note.written


def notes_in(path: Path) -> list[Manifest]:
    """The note in a folder, or the notes of all tags in it."""
    return [Manifest.read(inner) for inner in (path, *_children(path)) if (inner / NOTE).exists()]


def location(place: Path) -> Path:
    """The path of a checkpoint: its place, or the hidden name if a save was killed before it renamed the folder.

    A running save is in the same state for a moment. So a load reads from this path, and renames nothing.
    """
    return hidden(place) if (hidden(place) / NOTE).exists() else place


def hidden(place: Path) -> Path:
    """The hidden name under which a save writes. Once the note is written, the folder replaces the one in its place."""
    return place.with_name(f".{place.name}.partial")


def publish(place: Path) -> None:
    """Renames a complete checkpoint to its place, and removes the previous one.

    Raises:
        OSError: The folder cannot be changed.
    """
    os.stat(hidden(place) / NOTE)
    if place.exists():
        shutil.rmtree(place)
    hidden(place).rename(place)


def recover(folder: Path) -> None:
    """Cleans up after killed saves: publishes their complete checkpoints, and removes incomplete ones.

    Only the run that saves in this folder may call it.

    Args:
        folder: The folder with the checkpoints.

    Raises:
        OSError: The folder cannot be changed.
    """
    for path in folder.glob(".*.partial"):
        if (path / NOTE).exists():
            publish(_place(path))
        else:
            shutil.rmtree(path, ignore_errors=True)


def _place(path: Path) -> Path:
    """The place of a checkpoint that may have a hidden name."""
    return path.with_name(re.sub(r"^\.(.+)\.partial$", r"\1", path.name))


def _unfinished(path: Path) -> str | None:
    """The reason why a checkpoint is unfinished; None if it is finished. Trainer writes its files after DeepSpeed's."""
    for inner in _children(path):
        if inner.name.startswith("."):
            return f"a save was killed before it renamed {inner.name!r} to {_place(inner).name!r}; rename it to use it"
    if _TRAINER.fullmatch(path.name) and not (path / NOTE).exists():  # a tag of DeepSpeed may have such a name, too
        try:
            int(read_json(path / _TRAINER_STATE, links=False)["global_step"])
        except (ConfigError, ValueError, TypeError, KeyError):
            return f"Trainer has not written {_TRAINER_STATE}"
    return None


def _children(folder: Path) -> list[Path]:
    """Folders in a folder. A complete checkpoint with a hidden name replaces the folder in its place."""
    try:
        places = {_place(path) for path in folder.iterdir() if path.is_dir()}
    except OSError:
        return []
    paths = (location(place) for place in sorted(places) if not place.name.startswith("."))
    return [path for path in paths if path.is_dir()]


def _hash_of(file: io.RawIOBase) -> str:
    digest = hashlib.sha256()
    while piece := file.read(_PIECE):
        digest.update(piece)
    return digest.hexdigest()


class HashedFile(io.BufferedWriter):
    """A new file that hashes its content while it is written.

    Attributes:
        hash: SHA-256 of the content.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "wb", opener=regular))
        self.hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        """Writes and hashes bytes."""
        self.hash.update(data)
        return super().write(data)


def reason_of(error: BaseException) -> str:
    """The reason of a failed write. On a full disk, ``torch.save`` raises only a position in its archive."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return getattr(cause, "strerror", None) or f"{type(error).__name__}: {error}".splitlines()[0]
