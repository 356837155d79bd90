"""How DeepSpeed writes and reads the files of the trainer's checkpoints: copied, hashed, without running code, never torn."""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from hzero.train import digests, safe_load
from hzero.train.reshard import MODEL, OPTIMIZER, Resharding, resharding
from hzero.train.writer import HostCopy
from hzero.validation import ConfigError


class Written(NamedTuple):
    """What has become of a rank's files.

    Attributes:
        files: Size and hash of every file written, by name.
        failure: Why one could not be written; None if all were.
    """

    files: dict[str, tuple[int, str]]
    failure: str | None


class TrainerCheckpointEngine(CheckpointEngine):
    """Copies what DeepSpeed saves, for `write` to write with hashes, and keeps an error instead of raising it.

    A rank that raised would leave DeepSpeed's collective save, in which the others then wait for it. So a rank whose disk
    or memory is full writes no more and says so; the ranks compare theirs afterwards.

    Args:
        engine: The engine, which saves and loads by this object from now on.
        trust: Whether files may hold more than tensors.
        direct: Whether they are written past the page cache where the file system can.

    Attributes:
        copied_bytes: Host memory that the copies of the save take, until its files are written.
        copy_s: Seconds that copying took.

    Raises:
        ConfigError: DeepSpeed's configuration asks for another engine.
    """

    def __init__(self, engine: Any, trust: bool, direct: bool = True) -> None:
        stock = engine.checkpoint_engine
        if type(stock) is not TorchCheckpointEngine:
            raise ConfigError(
                f"deepspeed: found a configuration of {type(stock).__name__} (checkpoint.writer, datastates_ckpt), and the "
                "trainer writes checkpoints itself"
            )
        super().__init__()
        self.name = type(self).__name__
        self.copied_bytes, self.copy_s = 0, 0.0
        # Of every entry of an archive, which takes more of a core than writing it does; the hash of the file finds more.
        torch.serialization.set_crc32_options(False)
        self._tasks: list[Callable[[], object]] = []
        self._writing: str | None = None
        self._failure: str | None = None
        self._written: dict[str, tuple[int, str]] = {}
        self._engine = engine
        self._resharding: Resharding | None = None
        self._trust, self._direct, self._zipped = trust, direct, stock.zipfile_serialization
        # The one file that DeepSpeed writes past its checkpoint engine, on rank 0.
        copy_scripts = engine._copy_recovery_script
        engine._copy_recovery_script = lambda save_path: self._later(save_path, lambda: copy_scripts(save_path))
        engine.checkpoint_engine = self

    @contextlib.contextmanager
    def reading(self, folder: Path, world_size: int) -> Iterator[None]:
        """Inside, the engine loads a checkpoint that ranks of any number have written.

        Of this layout, every rank loads its own files; of another one, what `Resharding` makes of theirs.

        Args:
            folder: The checkpoint.
            world_size: Ranks that wrote it.
        """
        load = functools.partial(safe_load.load, map_location="cpu", trust=self._trust)
        self._resharding = resharding(self._engine, folder, world_size, load)
        names, module = self._engine._get_all_ckpt_names, self._engine.module
        layers = getattr(module, "ckpt_layer_path_list", None)
        if self._resharding is not None:
            own = str(self._resharding.path(0, MODEL))  # this rank may have written none
            self._engine._get_all_ckpt_names = lambda path, tag: [own]
        else:  # stock looks for files by a pattern of which the folder's name is a part, whatever characters it has
            self._engine._get_all_ckpt_names = lambda path, tag: names(glob.escape(path), tag)
        if layers is not None:  # of pipeline stages
            module.ckpt_layer_path_list = lambda path, index: layers(glob.escape(path), index)
        try:
            yield
        finally:
            self._engine._get_all_ckpt_names, self._resharding = names, None
            if layers is not None:
                module.ckpt_layer_path_list = layers

    def preserves_storage_sharing(self) -> bool:
        """Whether DeepSpeed has to copy tensors that are parts of larger ones: no, `save` does."""
        return False

    def begin(self) -> None:
        """Forgets the last save, whose files have been written."""
        self._tasks, self._written, self._failure = [], {}, None
        self.copied_bytes, self.copy_s = 0, 0.0

    def create(self, info: CheckpointCommitInfo) -> None:
        """DeepSpeed begins to write files, after it has made the folder."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes a folder of the checkpoint."""
        self._try(path, lambda: os.makedirs(path, exist_ok=exist_ok))

    def save(self, state_dict: Any, path: str) -> None:
        """Copies what is to be written."""
        self._try(path, lambda: self._copy(state_dict, path))

    def write(self) -> Written:
        """Writes the files, each whole or not at all. May be called on another thread."""
        while self._tasks:
            self._tasks.pop(0)()  # and frees the copy
        self._writing = None
        return Written(self._written, self._failure)

    @property
    def writing(self) -> str | None:
        """The file that is being written."""
        return self._writing

    def load(self, path: str, map_location: Any = None) -> Any:
        """Reads a file. Raises `ConfigError` if it holds more than tensors."""
        if self._resharding is not None:
            return self._resharding.load(next(kind for kind in (MODEL, OPTIMIZER) if path.endswith(kind)))
        return safe_load.load(path, map_location, self._trust)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """DeepSpeed's save ends. The files are written later."""
        return True

    def _copy(self, state_dict: Any, path: str) -> None:
        began, copies = time.perf_counter(), HostCopy()
        host = copies.of(state_dict)
        copies.wait()
        self.copied_bytes += copies.bytes
        self.copy_s += time.perf_counter() - began
        self._later(path, functools.partial(self._write, host, path))

    def _write(self, host: Any, path: str) -> None:
        try:
            file = digests.HashedFile(path, self._direct)
            try:
                torch.save(host, file, _use_new_zipfile_serialization=self._zipped)  # type: ignore[arg-type]
            finally:
                digest = file.close()  # its reason says more than torch's
            self._written[Path(path).name] = (file.size, digest)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise

    def _later(self, path: str, action: Callable[[], object]) -> None:
        self._tasks.append(lambda: self._try(path, action))

    def _try(self, path: str, action: Callable[[], object]) -> None:
        if self._failure is not None:
            return
        self._writing = path
        try:
            action()
        except (OSError, RuntimeError, MemoryError) as error:
            reason = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
            self._failure = f"{getattr(error, 'filename2', None) or path}: {reason}"
