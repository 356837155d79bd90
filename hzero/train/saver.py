"""Saves of a run, on all ranks together: one that fails leaves the checkpoint before it, and the run goes on."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hzero.formatting import size_text
from hzero.launcher import on_rank_0
from hzero.train import checkpoint
from hzero.train.checkpoint_engine import TrainerCheckpointEngine
from hzero.train.folder import WriteError


class Saver:
    """Saves an engine's checkpoints.

    Args:
        engine: The engine.
        folder: The run's folder of checkpoints.
        identity: Of the run.
        keep: Complete checkpoints that are kept.
        max_failures: Saves in a row that may fail.
        trust: Whether checkpoints may hold more than tensors.
    """

    def __init__(
        self,
        engine: Any,
        folder: Path,
        identity: checkpoint.Identity,
        *,
        keep: int,
        max_failures: int,
        trust: bool,
    ) -> None:
        self._engine, self._folder, self._identity = engine, folder, identity
        self._keep, self._max_failures = keep, max_failures
        self._files = TrainerCheckpointEngine(engine, trust)
        self._failures = 0
        self._unjudged: list[Path] = []
        self._bytes: int | None = None
        self._saved_s = 0.0

    @property
    def longest_s(self) -> float:
        """Seconds of the longest save so far; before the first an estimate, from 100 MB/s for every rank."""
        return self._saved_s or 10.0 + self._states() / 1e8

    def load(self, found: checkpoint.Checkpoint) -> None:
        """Loads a checkpoint of any number of ranks. Collective."""
        with self._files.reading(found.folder, found.identity.world_size):
            self._engine.load_checkpoint(str(found.folder.parent), tag=found.folder.name)
        self._bytes = found.bytes
        if found.good is None and dist.get_rank() == 0 and found.folder.parent == self._folder:
            self._unjudged.append(found.folder)

    def save(self, step: int, *, last: bool = False) -> str | None:
        """Saves a checkpoint, good or not as `judge` will say; the newest good one is never removed. Collective.

        Args:
            step: Optimizer steps done.
            last: Whether the run ends with it, so that nothing is saved if this is not.

        Returns:
            Why nothing was saved, the same on all ranks; None if it was.

        Raises:
            WriteError: It failed and is the last, or as many in a row have failed as may.
        """
        began, target = time.monotonic(), self._folder / checkpoint.tag_of(step)
        everyones: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
        failure = on_rank_0(lambda: self._prepare(target))
        if failure is None:
            self._files.begin()
            self._engine.save_checkpoint(str(self._folder), tag=target.name, save_latest=False)
            mine = (self._files.written, self._files.failure)
            dist.gather_object(mine, everyones if dist.get_rank() == 0 else None)
            failure = on_rank_0(lambda: self._conclude(target, step, everyones))
        if failure is None:
            self._failures, self._saved_s = 0, max(self._saved_s, time.monotonic() - began)
            return None
        self._failures += 1
        said = f"the checkpoint of step {step} could not be saved: {failure}"
        if last:
            said += "; the run ends without it"
        elif self._failures >= self._max_failures:
            said += f"; {self._failures} saves in a row have failed (checkpoint.max_failures)"
        else:
            return said
        error = WriteError(said)
        error.elsewhere = dist.get_rank() != 0
        raise error

    def judge(self, good: bool) -> None:
        """Notes whether checkpoints have proved good: whether a step or an evaluation that came after them was finite."""
        for folder in self._unjudged:  # on rank 0 alone
            with contextlib.suppress(OSError):  # it is gone, or the disk is full: then it stays as it is
                checkpoint.judge(folder, good, self._keep)
        self._unjudged.clear()

    def _prepare(self, target: Path) -> str | None:
        """On rank 0: makes room for a checkpoint, and finds out whether there is enough."""
        try:
            checkpoint.remove(target)  # an earlier life of the run may have left one
            self._folder.mkdir(exist_ok=True)
            usage = shutil.disk_usage(self._folder)
        except OSError as error:
            return f"{error.filename or self._folder}: {error.strerror or error}"
        needed = self._bytes or self._states() * dist.get_world_size()
        if usage.total and usage.free < needed:
            return f"{self._folder}: it takes {size_text(needed)}, and {size_text(usage.free)} are free"
        return None

    def _states(self) -> int:
        """Bytes of this rank's share of the float32 weights and the optimizer's states."""
        zero = self._engine.optimizer
        tensors = [*zero.fp32_partitioned_groups_flat, *(v for s in zero.optimizer.state.values() for v in s.values())]
        return sum(tensor.nbytes for tensor in tensors if torch.is_tensor(tensor))

    def _conclude(self, target: Path, step: int, everyones: list[Any]) -> str | None:
        """On rank 0: publishes what all ranks have written; removes it where one has not."""
        failures = [f"{failure} (rank {rank})" for rank, (_, failure) in enumerate(everyones) if failure is not None]
        if not failures:
            written = {name: digest for files, _ in everyones for name, digest in files.items()}
            try:
                self._bytes = checkpoint.publish(target, step, self._identity, self._keep, written)
                self._unjudged.append(target)
                return None
            except OSError as error:
                failures = [f"{error.filename or target / checkpoint.NOTE}: {error.strerror or error} (rank 0)"]
        more = f" and {len(failures) - 1} other ranks" if len(failures) > 1 else ""
        try:
            checkpoint.remove(target)
        except OSError as error:
            return f"{failures[0]}{more}; what was written cannot be removed: {error.strerror or error}"
        return failures[0] + more
