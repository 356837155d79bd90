"""Checkpoints of a run: stock DeepSpeed folders, each with a note that marks it complete and identifies its run."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hzero.files import read_small, replacing
from hzero.settings import architecture
from hzero.settings.settings import Settings
from hzero.train import digests, safe_load
from hzero.train.folder import NOTE
from hzero.validation import ConfigError, some

_TAG = re.compile(r"step_(\d+)$")

#: Keys of the model that say where it is computed, and not which one it is.
_LAYOUT = ("name", "zero_init", "tensor_parallel", "sequence_parallel", "pipeline_parallel")


@dataclass(frozen=True)
class Identity:
    """What a checkpoint tells of its run. Model, data, seed and type are those of the run that loads it; the ranks need not be.

    Attributes:
        model: Hash of the model's shape.
        data: Hash of the tokenised text, the share of it that is kept for evaluation, and whether examples are packed.
        seed: Of weights and batches.
        world_size: Ranks; ZeRO-3 writes two files per rank, ZeRO-1 with pipeline stages others.
        dtype: Type of the weights.
        sequences: Of all ranks in a step; None for a checkpoint of an earlier release.
        tensor_parallel: Ranks that share every layer.
        pipeline_parallel: Stages among which the layers are divided.
    """

    model: str
    data: str
    seed: int
    world_size: int
    dtype: str
    sequences: int | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1


def identity_of(settings: Settings, data_key: str) -> Identity:
    """The identity of a run's checkpoints."""
    model, train = settings["model"], settings["train"]
    shape = (
        architecture.shape_of(model)
        if architecture.is_general(model)
        else {key: value for key, value in sorted(model.items()) if key not in _LAYOUT}
    )
    return Identity(
        model=hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16],
        data=f"{data_key} {settings['data']['eval_share']}{'' if settings['data']['packing'] else ' unpacked'}",
        seed=train["seed"],
        world_size=settings.world_size,
        dtype=settings.dtype,
        sequences=settings.readers.data * train["micro_batch"] * train["grad_accumulation"],
        tensor_parallel=settings.layout.tensor,
        pipeline_parallel=settings.layout.pipeline,
    )


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        folder: The folder that DeepSpeed wrote, named after its tag.
        step: Optimizer steps done.
        identity: Of the run that wrote it.
        bytes: Of all its files.
        good: Whether the steps that came after it were finite; None if none has come. Earlier releases do not say, and count
            as good.
    """

    folder: Path
    step: int
    identity: Identity
    bytes: int
    good: bool | None


def tag_of(step: int) -> str:
    """Name of the checkpoint of a step."""
    return f"step_{step:06d}"


def publish(
    folder: Path,
    step: int,
    identity: Identity,
    keep: int,
    written: Mapping[str, tuple[int, str]],
    *,
    good: bool | None = None,
    keep_s: float = 0.0,
    given_up: Sequence[Path] = (),
) -> int:
    """Marks a checkpoint that all ranks have written as complete, and removes the oldest beyond ``keep``.

    The note lists every file with its size and hash and is put in place in one move, so that an interruption at any moment
    leaves either a complete checkpoint or one that `find` skips.

    Args:
        folder: The checkpoint.
        step: Optimizer steps done.
        identity: Of the run.
        keep: Complete checkpoints that are kept, and the newest good one beside them.
        written: Size and hash of what the ranks have written, by name. Other files are read to be hashed.
        good: Whether a finite step has come after it already.
        keep_s: Age in seconds below which complete checkpoints are kept as well.
        given_up: Others, which are removed once this one is whole.

    Returns:
        Bytes of all files.

    Raises:
        OSError: The note cannot be written, or a file is not as it was written. The checkpoint is not marked.
    """
    for name, (size, _) in written.items():
        if (folder / name).stat().st_size != size:
            raise OSError(errno.EIO, f"the file system has lost part of {size} bytes", str(folder / name))
    files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    hashes = {name: written[name][1] if name in written else digests.of_file(folder / name) for name in files}
    note = {"step": step, "identity": asdict(identity), "good": good, "files": files, digests.HASHES: hashes}
    text = json.dumps(digests.sealed(note), indent=1)
    with replacing(folder / NOTE) as file:
        file.write(text)
    # From here on it is whole, and no error may have it removed. DeepSpeed's tools read `latest`, which every save writes.
    with contextlib.suppress(OSError), replacing(folder.parent / "latest") as file:
        file.write(folder.name)
    _remove_all(path for path in given_up if path.name != folder.name)
    with contextlib.suppress(OSError):
        _rotate(folder, keep, keep_s)
    return sum(files.values())


def judge(folder: Path, good: bool, keep: int, keep_s: float = 0.0) -> None:
    """Notes whether the steps that came after a checkpoint were finite; with them, older ones beyond ``keep`` may go.

    Raises:
        OSError: The note is damaged or cannot be written; it stays as it was.
    """
    try:
        note = json.loads(read_small(folder / NOTE))
        whole = isinstance(note, dict) and digests.holds(note)
    except ValueError:
        whole = False
    if not whole:
        raise OSError(errno.EIO, "the note is not as it was written", str(folder / NOTE))
    with replacing(folder / NOTE) as file:
        file.write(json.dumps(digests.sealed({**note, "good": good}), indent=1))
    _rotate(folder, keep, keep_s)


def later_than(folder: Path) -> list[Path]:
    """The checkpoints of later steps, complete or not, beside the one from which a run goes on: of an earlier life of the run.

    Each could be taken for the newest one, or for the newest good one.
    """
    tags = [path for _, path in _tags(folder.parent)]
    return tags[tags.index(folder) + 1 :] if folder in tags else []


def _rotate(newest: Path, keep: int, keep_s: float) -> None:
    """Removes checkpoints before ``newest``: torn ones, and whole ones but ``keep``, the newest good one and young ones."""
    tags = [path for _, path in _tags(newest.parent)]
    if newest not in tags:  # somebody has removed it
        return
    older = tags[: tags.index(newest)]
    complete = [path for path in (*older, newest) if (path / NOTE).exists()]
    kept = {*complete[-keep:], *[path for path in complete if _is_good(path)][-1:]}
    kept |= {path for path in complete if keep_s and _age_s(path) < keep_s}
    _remove_all(path for path in older if path not in kept)


def _remove_all(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # one too many is no reason to stop
            remove(folder)


def remove(folder: Path) -> None:
    """Removes a checkpoint, its note first; it may not be there.

    Raises:
        OSError: It cannot be removed.
    """
    if folder.is_dir():
        (folder / NOTE).unlink(missing_ok=True)
        shutil.rmtree(folder)


def _age_s(folder: Path) -> float:
    """Seconds since a complete checkpoint was noted."""
    try:
        return time.time() - (folder / NOTE).stat().st_mtime
    except OSError:
        return math.inf


def _is_good(folder: Path) -> bool:
    """Whether a complete checkpoint is known to be good, by its note alone."""
    try:
        return bool(json.loads(read_small(folder / NOTE)).get("good", True))
    except (OSError, ValueError, AttributeError):
        return False


def _tags(folder: Path) -> list[tuple[int, Path]]:
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _TAG.match(path.name)
        if match and path.is_dir():
            found.append((int(match.group(1)), path))
    return sorted(found)


def read(folder: Path, *, hashes: bool = True, warn: Any = lambda message: None) -> Checkpoint:
    """Reads a checkpoint's note and checks its files against it.

    Args:
        folder: The checkpoint.
        hashes: Whether to read the files and compare their hashes; otherwise their sizes alone.
        warn: Takes a line on a checkpoint without hashes, of an earlier release.

    Raises:
        ConfigError: It is torn, damaged or no checkpoint; the message says what is missing.
    """
    try:
        note = digests.read_note(folder / NOTE)
        identity, step = Identity(**note["identity"]), int(note["step"])
        sizes = {str(name): int(size) for name, size in note["files"].items()}
        noted = {str(name): str(digest) for name, digest in note.get(digests.HASHES, {}).items()}
        if not digests.holds(note) or type(identity.sequences) not in (int, type(None)) or identity.sequences == 0:
            raise ValueError("changed")
    except FileNotFoundError:
        raise ConfigError(f"resume: {str(folder)!r} is not a complete checkpoint: it has no {NOTE}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ConfigError(f"resume: {str(folder)!r} is torn: its {NOTE} cannot be read") from None
    if not noted:
        warn(f"{str(folder)!r} was written by an earlier release, without hashes: only sizes of files are compared")
    if changed := digests.first_changed(folder, sizes, noted if hashes else {}):
        raise ConfigError(f"resume: {str(folder)!r} is torn: {changed}")
    good = note.get("good", True)
    return Checkpoint(folder, step, identity, sum(sizes.values()), good if good is None else bool(good))


def newest(folder: Path, warn: Any = lambda message: None) -> Checkpoint | None:
    """The newest complete checkpoint of a ``checkpoints`` folder that did not diverge; newer ones are skipped, with a warning.

    Raises:
        ConfigError: None is left, but some were complete.
    """
    torn: ConfigError | None = None
    for _, path in reversed(_tags(folder)):
        try:
            found = read(path, warn=warn)
            if found.good is False:
                raise ConfigError(f"resume: {str(path)!r}: the steps around it were not finite")
            return found
        except ConfigError as error:
            if (path / NOTE).exists():
                torn = torn or error
            warn(f"{error}; skipped")
    if torn is not None:
        raise ConfigError(f"{torn}, and there is no other")
    return None


def find(
    resume: Any, run_dir: Path, identity: Identity, *, trust: bool, warn: Any = lambda message: None
) -> Checkpoint | None:
    """The checkpoint that ``resume`` asks for, with all its files read and compared with their hashes.

    Args:
        resume: False; ``"auto"`` for the newest of this run, if it has one; or the path of a checkpoint, of a
            ``checkpoints`` folder or of a run.
        run_dir: This run's folder.
        identity: Of this run.
        trust: Whether its files may hold more than tensors.
        warn: Takes a line on each torn checkpoint that is skipped, and on one without hashes.

    Raises:
        ConfigError: The checkpoint is missing or torn, could run code, or another model, text, world, type or seed wrote it.
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
            found = read(path, warn=warn)
            if found.good is False:
                warn(f"resume: {str(path)!r}: the steps around it were not finite")
        else:
            inside = path / "checkpoints"
            found = newest(inside if inside.is_dir() else path, warn)
            if found is None:
                raise ConfigError(f"resume: no complete checkpoint below {resume!r}")
    if found is not None:
        _compare(found, identity)
        if not trust:
            safe_load.refuse_code(found.folder, safe_load.TRUST)
    return found


def with_its_batch(settings: Settings, found: Checkpoint) -> Settings:
    """The settings, with the accumulation that makes a step of this run's ranks as large as a step of the checkpoint's run.

    Raises:
        ConfigError: No accumulation does; the message says which ranks and micro-batches could.
    """
    wanted, train, world = found.identity.sequences, settings["train"], settings.readers.data
    at_once = train["micro_batch"] * world
    if wanted is None or wanted == at_once * train["grad_accumulation"]:
        return settings
    if wanted % at_once:
        size = train["micro_batch"]
        possible = [f"{some(_divisors(wanted // size), 20)} ranks" if wanted % size == 0 else "other ranks"]
        if wanted % world == 0:
            possible.append(f"train.micro_batch={some(_divisors(wanted // world), 20)} with {world} ranks")
        raise ConfigError(
            f"resume: {str(found.folder)!r} was trained with {wanted} sequences in a step, which {world} ranks with "
            f"train.micro_batch={size} cannot do; possible: {'; '.join(possible)}"
        )
    return settings.with_accumulation(wanted // at_once)


def _divisors(number: int) -> list[str]:
    return [str(count) for count in range(1, number + 1) if number % count == 0]


def _compare(found: Checkpoint, identity: Identity) -> None:
    said = {
        "model": "was saved by a model of another shape (the model group differs)",
        "data": "was trained on other text (data.path, data.max_bytes, data.eval_share, data.packing or the tokenizer differ)",
        "seed": f"was trained with train.seed={found.identity.seed}, not {identity.seed}",
        **{
            key: f"was trained with model.{key}={getattr(found.identity, key)}, and goes on with the same alone; found "
            f"{getattr(identity, key)}"
            for key in ("tensor_parallel", "pipeline_parallel")
        },
        "dtype": f"was trained in {found.identity.dtype}, not {identity.dtype}",
    }
    for name, message in said.items():
        if getattr(found.identity, name) != getattr(identity, name):
            raise ConfigError(f"resume: {str(found.folder)!r} {message}")
    divided = identity.tensor_parallel > 1 or identity.pipeline_parallel > 1
    if divided and found.identity.world_size != identity.world_size:
        raise ConfigError(
            f"resume: {str(found.folder)!r} was written by {found.identity.world_size} ranks with tensor or pipeline "
            f"parallelism, and goes on with as many alone; found {identity.world_size}"
        )
