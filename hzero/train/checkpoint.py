"""Checkpoints of a run: stock DeepSpeed folders, each with a note that marks it complete and identifies its run."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hzero.files import replacing
from hzero.settings import architecture
from hzero.settings.settings import Settings
from hzero.train.folder import NOTE
from hzero.validation import ConfigError

_TAG = re.compile(r"step_(\d+)$")


@dataclass(frozen=True)
class Identity:
    """Properties that a checkpoint and the run that loads it must share.

    Attributes:
        model: Hash of the model's shape.
        data: Hash of the tokenised text, the share of it that is kept for evaluation, and whether examples are packed.
        seed: Of weights and batches.
        world_size: Ranks; ZeRO-3 writes one file per rank.
        dtype: Type of the weights.
    """

    model: str
    data: str
    seed: int
    world_size: int
    dtype: str


def identity_of(settings: Settings, data_key: str) -> Identity:
    """The identity of a run's checkpoints."""
    model = settings["model"]
    # The other keys of the group fix the shape of a GPT-NeoX.
    shape = (
        architecture.shape_of(model)
        if architecture.is_general(model)
        else {key: value for key, value in sorted(model.items()) if key not in ("name", "zero_init")}
    )
    return Identity(
        model=hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16],
        data=f"{data_key} {settings['data']['eval_share']}{'' if settings['data']['packing'] else ' unpacked'}",
        seed=settings["train"]["seed"],
        world_size=settings.world_size,
        dtype=settings.dtype,
    )


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        folder: The folder that DeepSpeed wrote, named after its tag.
        step: Optimizer steps done.
        identity: Of the run that wrote it.
    """

    folder: Path
    step: int
    identity: Identity


def tag_of(step: int) -> str:
    """Name of the checkpoint of a step."""
    return f"step_{step:06d}"


def publish(folder: Path, step: int, identity: Identity, keep: int) -> None:
    """Marks a checkpoint that all ranks have written as complete, and removes the oldest beyond ``keep``.

    The note lists every file with its size and is put in place in one move, so that an interruption at any moment
    leaves either a complete checkpoint or one that `find` skips.
    """
    files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    note = {"step": step, "identity": asdict(identity), "files": files}
    for path, text in ((folder / NOTE, json.dumps(note, indent=1)), (folder.parent / "latest", folder.name)):
        with replacing(path) as file:
            file.write(text)
    tags = [path for _, path in _tags(folder.parent)]
    kept = [path for path in tags if (path / NOTE).exists()][-keep:]
    for old in tags[: tags.index(folder)]:
        if old not in kept:
            withdraw(old)
            shutil.rmtree(old, ignore_errors=True)


def withdraw(folder: Path) -> None:
    """Unmarks a checkpoint that is about to be written again, or removed."""
    (folder / NOTE).unlink(missing_ok=True)


def _tags(folder: Path) -> list[tuple[int, Path]]:
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _TAG.match(path.name)
        if match and path.is_dir():
            found.append((int(match.group(1)), path))
    return sorted(found)


def read(folder: Path) -> Checkpoint:
    """Reads a checkpoint's note and checks its files against it.

    Raises:
        ConfigError: It is torn or no checkpoint; the message says what is missing.
    """
    try:
        note = json.loads((folder / NOTE).read_text())
        identity, files, step = Identity(**note["identity"]), dict(note["files"]), int(note["step"])
    except FileNotFoundError:
        raise ConfigError(f"resume: {str(folder)!r} is not a complete checkpoint: it has no {NOTE}") from None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise ConfigError(f"resume: {str(folder)!r} is torn: its {NOTE} cannot be read") from None
    for name, size in files.items():
        try:
            path = folder / name
            found = path.stat().st_size if path.is_file() else None
        except OSError:  # a name that no file can have
            found = None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise ConfigError(f"resume: {str(folder)!r} is torn: {name[:200]} {state}")
    return Checkpoint(folder, step, identity)


def newest(folder: Path, warn: Any = lambda message: None) -> Checkpoint | None:
    """The newest complete checkpoint of a ``checkpoints`` folder; newer ones are skipped, with a warning.

    Raises:
        ConfigError: No checkpoint is complete, but some were.
    """
    torn: ConfigError | None = None
    for _, path in reversed(_tags(folder)):
        try:
            return read(path)
        except ConfigError as error:
            if (path / NOTE).exists():
                torn = torn or error
            warn(f"{error}; skipped")
    if torn is not None:
        raise ConfigError(f"{torn}, and there is no other")
    return None


def find(resume: Any, run_dir: Path, identity: Identity, warn: Any = lambda message: None) -> Checkpoint | None:
    """The checkpoint that ``resume`` asks for.

    Args:
        resume: False; ``"auto"`` for the newest of this run, if it has one; or the path of a checkpoint, of a
            ``checkpoints`` folder or of a run.
        run_dir: This run's folder.
        identity: Of this run.
        warn: Takes a line on each torn checkpoint that is skipped.

    Raises:
        ConfigError: The checkpoint is missing or torn, or another model, text, world, type or seed wrote it.
    """
    if resume in (False, None, "false"):
        return None
    if resume == "auto":
        try:
            found = newest(run_dir / "checkpoints", warn)
        except ConfigError as error:
            raise ConfigError(f"{error}; run.overwrite=true instead of resume starts the run anew") from None
    else:
        path = Path(resume).expanduser()
        if not path.is_dir():
            raise ConfigError(f"resume: no folder {resume!r}; possible: false, auto or a path")
        if _TAG.match(path.name):
            found = read(path)
        else:
            inside = path / "checkpoints"
            found = newest(inside if inside.is_dir() else path, warn)
            if found is None:
                raise ConfigError(f"resume: no complete checkpoint below {resume!r}")
    if found is not None:
        _compare(found, identity)
    return found


def _compare(found: Checkpoint, identity: Identity) -> None:
    said = {
        "model": "was saved by a model of another shape (the model group differs)",
        "data": "was trained on other text (data.path, data.max_bytes, data.eval_share, data.packing or the tokenizer differ)",
        "seed": f"was trained with train.seed={found.identity.seed}, not {identity.seed}",
        "world_size": f"was saved by {found.identity.world_size} ranks, and this run has {identity.world_size}",
        "dtype": f"was trained in {found.identity.dtype}, not {identity.dtype}",
    }
    for name, message in said.items():
        if getattr(found.identity, name) != getattr(identity, name):
            raise ConfigError(f"resume: {str(found.folder)!r} {message}")
