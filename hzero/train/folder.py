"""The run's folder: its choice, its lock, its content, and what an interrupted start undoes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import itertools
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import yaml

from hzero.files import cannot_write, open_regular, read_small, replacing
from hzero.launcher import STARTED
from hzero.validation import ConfigError, PlainError

METRICS, SUMMARY, CONFIG, CHECKPOINTS, LOGS = "metrics.jsonl", "summary.json", "config.yaml", "checkpoints", "logs"
#: In a checkpoint's folder, once it is complete.
NOTE = "complete.json"
TRACE, PROFILE = "trace-rank0.json.gz", "profile-rank0.json.gz"
#: Texts that the model wrote; event files; configuration and tokenizer.
SAMPLES, MONITOR, MODEL = "samples.jsonl", "monitor", "model"
#: The state of the run, and a line for each of its jobs.
STATUS, HISTORY = "status.json", "history.jsonl"
#: Everything that a run writes, and that replacing a run removes.
OWN = (CONFIG, METRICS, SUMMARY, STATUS, HISTORY, TRACE, PROFILE, SAMPLES, MONITOR, MODEL, LOGS, CHECKPOINTS)
#: libyaml's loader where PyYAML has it: the one in Python takes 3 ms for the configuration of a run. A SafeLoader either way.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: Set in a job of Slurm's that hzero has made: the run's folder.
_JOB = "HZERO_JOB"
#: How long a job waits for the lock of its run's folder, in seconds: the file system may take minutes to notice that the node
#: of the last job has died. Less than ``launcher.start_timeout_s``, in which the other ranks wait.
_LOCK_WAIT_S = 240.0
#: Marks the folder as a run's. The running process holds a lock on it, which the kernel releases however the process ends.
_LOCK = ".hzero-run"
#: Until a run has begun: the run that it replaces, or the files that it changes of the run that it continues.
_REPLACED, _CONTINUED = ".replaced", ".continued"


class WriteError(PlainError):
    """A file of a run under way cannot be written. The message is one line that names it and the reason."""


def not_now(message: str) -> ConfigError | PlainError:
    """The error for a folder that cannot be used now. In a job it is no fault of the input: another start may help."""
    return PlainError(message) if _JOB in os.environ else ConfigError(message)


@contextlib.contextmanager
def must_write(path: Path) -> Iterator[None]:
    """Ends a run whose files cannot be written.

    Raises:
        WriteError: Instead of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise WriteError(cannot_write("run.dir", path, error)) from None


@contextlib.contextmanager
def may_write(path: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Goes on without a file that the training does not need, such as a sample, with a warning."""
    try:
        yield
    except OSError as error:
        warn(cannot_write("run.dir", path, error))


def holds_run(path: Path) -> bool:
    """Whether a folder holds a run, or what is left of one."""
    return all((path / name).is_file() for name in (_LOCK, CONFIG, METRICS)) or set_aside(path)


def set_aside(path: Path) -> bool:
    """Whether files wait here for a run to begin, or for `undo`."""
    return any((path / name).is_dir() for name in (_REPLACED, _CONTINUED))


def choose(directory: str, resume: Any, overwrite: bool, *, fixed: bool = False) -> Path:
    """The folder to use: as named, or with the next free number if it holds a run that must be kept. Writes nothing.

    ``resume=auto`` takes the run that has saved last: that of the named folder, or one that found it taken and has a number.
    With ``fixed`` it takes the named folder, as a job does, whose script, logs and status are there.

    Raises:
        ConfigError: Files of no run would be overwritten, or the two keys contradict each other.
    """
    path = Path(directory).expanduser()
    if overwrite and resume not in (False, None, "false"):
        raise ConfigError(
            f"run.overwrite: found true together with resume={resume}; one replaces the run, the other continues it"
        )
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run.dir: {str(path)!r} is a file")
    in_the_way = [name for name in OWN if (path / name).exists()]
    if in_the_way and not holds_run(path):
        raise ConfigError(
            f"run.dir: {str(path)!r} holds {', '.join(in_the_way)} that no run of hzero left; choose another folder"
        )
    if resume == "auto" and fixed:
        return path
    if resume == "auto":
        return max([path, *_numbered(path)], key=_saved_at)  # of several without a checkpoint the first
    if overwrite or not holds_run(path):
        return path
    others = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(other for other in others if not holds_run(other))


def _numbered(path: Path) -> Iterator[Path]:
    """Folders of the runs that were asked to use this one while it held another run."""
    for other in path.parent.glob(f"{glob.escape(path.name)}-*") if path.name else ():
        try:
            asked = read_config(other)["run"]["dir"]  # runs/gpt-4 may be no fourth runs/gpt
        except (OSError, ValueError, TypeError, LookupError):
            continue
        if re.fullmatch(r"-[0-9]{1,9}", other.name[len(path.name) :]) and Path(str(asked)).name == path.name:
            yield other


def read_config(path: Path) -> Any:
    """The configuration in a run's folder, whoever wrote it.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no YAML, larger than a mebibyte, nested deeply, or has references: a few bytes of either end a
            process, in libyaml's recursion or by their size written out.
    """
    with open_regular(path / CONFIG) as file:
        content, depth = file.read((1 << 20) + 1), 0
    try:
        for event in yaml.parse(content, _LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if len(content) > 1 << 20 or depth > 50 or isinstance(event, yaml.AliasEvent):
                raise ValueError("too large, nested too deeply, or with references")
        return yaml.load(content, _LOADER)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _saved_at(path: Path) -> float:
    """When a run has saved its newest checkpoint, in seconds; 0 for one without."""
    notes = (path / CHECKPOINTS).glob(f"*/{NOTE}") if holds_run(path) else ()
    with contextlib.suppress(OSError):
        return max((note.stat().st_mtime for note in notes), default=0.0)
    return 0.0


def lock(path: Path) -> TextIO:
    """Makes the folder if needed, and locks it until the returned file is closed or the process ends.

    Cleans up after a run that was killed before it began.

    Raises:
        ConfigError: Another run is under way in the folder, or it cannot be written. In a job a `PlainError`.
    """
    deadline = time.monotonic() + (_LOCK_WAIT_S if _JOB in os.environ else 0.2)  # `under_way` holds it for an instant
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = open(path / _LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - open as long as the claim
        try:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(0.2)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            file.close()
            raise not_now(f"run.dir: a run is under way in {str(path)!r} (process {owner})") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):  # else mounted without locks
                raise
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        if set_aside(path):
            undo(path)
        return file
    except OSError as error:
        raise not_now(f"run.dir: cannot write {str(path)!r}: {error.strerror or error}") from None


def under_way(path: Path) -> bool | None:
    """Whether a process holds the lock of a run's folder; None where this machine cannot tell.

    It takes the lock for an instant itself, shared; `lock` tries twice for that reason.
    """
    try:
        with open_regular(path / _LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no permission, or mounted without locks
        return None
    return False


def create(path: Path, config: str, overwrite: bool, last_step: int | None) -> None:
    """Writes the resolved configuration and cuts metrics after ``last_step``.

    With None the run starts anew, and existing metrics are kept under another name. Whatever is replaced or changed is set
    aside until `begun` or `undo`. The caller holds the lock.

    Raises:
        ConfigError: The folder cannot be written.
    """
    try:
        if overwrite:
            (path / _REPLACED).mkdir()
            for name in OWN:
                if (path / name).exists():
                    (path / name).rename(path / _REPLACED / name)
        elif holds_run(path):
            (path / _CONTINUED).mkdir()
            for name in (CONFIG, METRICS, SUMMARY, STATUS, SAMPLES):
                if (path / name).exists():
                    shutil.copy2(path / name, path / _CONTINUED / name)
        (path / LOGS).mkdir(exist_ok=True)
        (path / LOGS / STARTED).unlink(missing_ok=True)
        (path / CONFIG).write_text(config)
        (path / SUMMARY).unlink(missing_ok=True)
        rows = read_metrics(path)[0]
        if last_step is None and rows:
            others = (path / f"metrics.{number}.jsonl" for number in itertools.count(1))
            shutil.copy2(path / METRICS, next(other for other in others if not other.exists()))
        kept = [row for row in rows if last_step is not None and row["step"] <= last_step]
        with replacing(path / METRICS) as file:
            file.writelines(json.dumps(row) + "\n" for row in kept)
        if (path / SAMPLES).exists():
            _cut_samples(path / SAMPLES, last_step or 0)
    except OSError as error:
        with contextlib.suppress(OSError):
            undo(path)
        raise not_now(f"run.dir: cannot write {str(path)!r}: {error.strerror or error}") from None


def _cut_samples(path: Path, last_step: int) -> None:
    """Removes samples of steps that will be done again, and a line that was not finished."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    with replacing(path) as file, contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        file.writelines(line for line in lines if json.loads(line)["step"] <= last_step)


def begun(path: Path) -> None:
    """Removes what was set aside: the run has begun."""
    _remove(path / _REPLACED)
    _remove(path / _CONTINUED)


def undo(path: Path) -> None:
    """Undoes `create` for a run that could not begin: removes its files and restores those set aside.

    The logs of the attempt stay, as ``logs/failed`` if the run has logs of its own.
    """
    replaced, continued = path / _REPLACED, path / _CONTINUED
    for entry in continued.iterdir() if continued.is_dir() else ():
        os.replace(entry, path / entry.name)
    if not continued.is_dir():
        for name in OWN:
            if name != LOGS or not (replaced / LOGS).is_dir():
                _remove(path / name)
        if (path / LOGS).is_dir():
            _remove(replaced / LOGS / "failed")
            (path / LOGS).rename(replaced / LOGS / "failed")
        for entry in replaced.iterdir() if replaced.is_dir() else ():
            entry.rename(path / entry.name)
    _remove(replaced)
    _remove(continued)
    if [entry.name for entry in path.iterdir()] == [_LOCK]:
        with contextlib.suppress(OSError):  # a link to a folder stays
            (path / _LOCK).unlink()
            path.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


#: A key that a row has to have, by kind.
_KEY_OF = {"step": "loss", "eval": "loss_exact", "trace": "tiers", "save": "write_s", "audit": "signal_to_noise_db"}


def read_metrics(path: Path, last: int | None = None) -> tuple[list[dict[str, Any]], int]:
    """A run's metrics, and the number of lines that are torn or lack a required key.

    Args:
        path: The run's folder.
        last: How many bytes at the end of the file to read; None reads all of it.
    """
    rows, torn = [], 0
    lines: list[bytes] = []
    with contextlib.suppress(FileNotFoundError), open_regular(path / METRICS) as file:
        skipped = max(os.fstat(file.fileno()).st_size - last, 0) if last is not None else 0
        file.seek(skipped)
        lines = file.read().splitlines()[1 if skipped else 0 :]  # the first one may be cut
    for line in lines:
        try:
            row = json.loads(line)
            _ = row[_KEY_OF[row["kind"]]]
            if type(row["step"]) is int:
                rows.append(row)
            else:
                torn += 1
        except (ValueError, KeyError, TypeError, RecursionError):
            torn += 1
    return rows, torn


def finite(value: Any) -> Any:
    """The value with None in place of NaN and the infinities, which JSON cannot express."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Metrics:
    """Appends rows to ``metrics.jsonl``, each before the next step. While the disk is full they wait, and training goes on.

    Args:
        path: The run's folder.
        warn: Takes a line on rows that wait, and on rows that are lost.

    Raises:
        WriteError: The file cannot be opened.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path, self._warn, self._waiting = path / METRICS, warn, b""
        with must_write(self._path):
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - open as long as the run

    def add(self, row: dict[str, Any]) -> None:
        """Appends one row."""
        self._waiting += (json.dumps(finite(row)) + "\n").encode()
        with may_write(self._path, self._warn):
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]

    def close(self) -> None:
        """Closes the file."""
        with may_write(self._path, self._warn):
            self._file.close()
        if lost := self._waiting.count(b"\n"):
            self._warn(f"{str(self._path)!r} lacks the last {lost} rows")


def finished(path: Path) -> bool:
    """Whether the run in a folder came to its end."""
    try:
        return bool(json.loads(read_small(path / SUMMARY))["status"] == "finished")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Writes ``summary.json``. Raises `WriteError` if it cannot."""
    with must_write(path / SUMMARY), replacing(path / SUMMARY) as file:
        json.dump(finite(summary), file, indent=1)
