"""How DeepSpeed writes and reads the files of the trainer's checkpoints: hashed, without running code, and never torn apart."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

from hzero.train import digests, safe_load
from hzero.train.reshard import MODEL, OPTIMIZER, Resharding, resharding
from hzero.validation import ConfigError


class TrainerCheckpointEngine(CheckpointEngine):
    """Writes files with their hashes, and keeps an error of the disk instead of raising it.

    A rank that raised would leave DeepSpeed's collective save, in which the others then wait for it. So a rank whose disk
    is full goes on to the end, writes no more, and says so in ``failure``; the ranks compare theirs afterwards.

    Args:
        engine: The engine, which saves and loads by this object from now on.
        trust: Whether files may hold more than tensors.

    Attributes:
        written: Of this rank's files of the last save: size and hash, by name.
        failure: Why this rank could not write one of them; None if it has written all.

    Raises:
        ConfigError: DeepSpeed's configuration asks for another engine.
    """

    def __init__(self, engine: Any, trust: bool) -> None:
        stock = engine.checkpoint_engine
        if type(stock) is not TorchCheckpointEngine:
            raise ConfigError(
                f"deepspeed: found a configuration of {type(stock).__name__} (checkpoint.writer, datastates_ckpt), and the "
                "trainer writes checkpoints itself"
            )
        super().__init__()
        self.name = type(self).__name__
        self.written: dict[str, tuple[int, str]] = {}
        self.failure: str | None = None
        self._engine = engine
        self._resharding: Resharding | None = None
        self._trust, self._zipped = trust, stock.zipfile_serialization
        # The one file that DeepSpeed writes past its checkpoint engine, on rank 0.
        copy_scripts = engine._copy_recovery_script
        engine._copy_recovery_script = lambda save_path: self._try(save_path, lambda: copy_scripts(save_path))
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
        names = self._engine._get_all_ckpt_names
        if self._resharding is not None:
            path = str(self._resharding.path(0, MODEL))  # this rank may have written none
            self._engine._get_all_ckpt_names = lambda checkpoints_path, tag: [path]
        try:
            yield
        finally:
            self._engine._get_all_ckpt_names, self._resharding = names, None

    def begin(self) -> None:
        """Forgets the last save."""
        self.written, self.failure = {}, None

    def create(self, info: CheckpointCommitInfo) -> None:
        """DeepSpeed begins to write files, after it has made the folder."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes a folder of the checkpoint."""
        self._try(path, lambda: os.makedirs(path, exist_ok=exist_ok))

    def save(self, state_dict: Any, path: str) -> None:
        """Writes a file, whole or not at all."""

        def write() -> None:
            file = digests.HashedFile(path)
            try:
                torch.save(state_dict, file, _use_new_zipfile_serialization=self._zipped)  # type: ignore[arg-type]
            finally:
                digest = file.close()  # its reason says more than torch's
            self.written[Path(path).name] = (file.size, digest)

        self._try(path, write)
        if self.failure is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Reads a file. Raises `ConfigError` if it holds more than tensors."""
        if self._resharding is not None:
            return self._resharding.load(next(kind for kind in (MODEL, OPTIMIZER) if path.endswith(kind)))
        return safe_load.load(path, map_location, self._trust)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """The save ends. Whether all ranks have written theirs is for the trainer to find out."""
        return True

    def _try(self, path: str, action: Callable[[], object]) -> None:
        if self.failure is not None:
            return
        try:
            action()
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
            self.failure = f"{getattr(error, 'filename2', None) or path}: {reason}"
