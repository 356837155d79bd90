"""Saves of a run, on all ranks together: one that fails leaves the checkpoint before it, and the run goes on.

A save copies the states to the host's memory, and training goes on while a thread of every rank writes (`hzero.train.writer`).
Whether all have written, the ranks learn in a message that they exchange anyway, at the end of each step (`Saver.ready`). Then
their hashes meet on rank 0, whose thread publishes the checkpoint, and at the end of a later step all ranks learn its result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import socket
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone  # the builtin one from Python 3.11 on
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from hzero.formatting import size_text
from hzero.launcher import on_rank_0
from hzero.train import checkpoint
from hzero.train.checkpoint_engine import TrainerCheckpointEngine, Written
from hzero.train.folder import WriteError
from hzero.train.writer import Writer
from hzero.validation import ConfigError, some
from hzero.zero.state import optimizer_bytes

#: Seconds between two questions of ranks that wait for each other's files.
_ASK_S = 0.1
#: Of a parameter group, beside the learning rate, which every step sets.
_HYPERPARAMETERS = ("betas", "weight_decay")


@dataclasses.dataclass
class _UnderWay:
    """The save under way.

    Attributes:
        target: The checkpoint.
        step: Optimizer steps done.
        began: When it began, by the monotonic clock.
        row: What is known of it for the metrics.
        written: What this rank's thread has written.
        result: Once all have written, on rank 0: why the checkpoint was not published, or None.
        published: Whether all have written, so that rank 0 publishes it.
        good: Whether the steps since were finite, if one was.
    """

    target: Path
    step: int
    began: float
    row: dict[str, Any]
    written: Future[Written]
    result: Future[str | None] | None = None
    published: bool = False
    good: bool | None = None

    @property
    def waits_for(self) -> Future[Any] | None:
        """What this rank does next for it; None once the rest is rank 0's."""
        return self.result if self.published else self.written


class Saver:
    """Saves an engine's checkpoints.

    Args:
        engine: The engine.
        folder: The run's folder of checkpoints.
        identity: Of the run.
        keep: Complete checkpoints that are kept.
        keep_s: Age in seconds below which others are kept as well.
        max_failures: Saves in a row that may fail.
        trust: Whether checkpoints may hold more than tensors.
        timeout_s: How long to wait for a save under way, in seconds.
        direct: Whether files are written past the page cache where the file system can.

    Attributes:
        rows: Of the saves that were published since somebody took them, for the metrics, on rank 0.
    """

    def __init__(
        self,
        engine: Any,
        folder: Path,
        identity: checkpoint.Identity,
        *,
        keep: int,
        keep_s: float = 0.0,
        max_failures: int,
        trust: bool,
        timeout_s: float = 600.0,
        direct: bool = True,
    ) -> None:
        self._engine, self._folder, self._identity = engine, folder, identity
        self._keep, self._keep_s = keep, keep_s
        self._max_failures, self._timeout_s = max_failures, timeout_s
        self._files, self._writer = TrainerCheckpointEngine(engine, trust, direct), Writer()
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._failures = 0
        self._under_way: _UnderWay | None = None
        self._unjudged: list[Path] = []  # published; the writer of rank 0 adds to them
        self._given_up: list[Path] = []  # of an earlier life of the run
        self._bytes: int | None = None
        self._saved_s = 0.0
        self.rows: list[dict[str, Any]] = []

    @property
    def longest_s(self) -> float:
        """Seconds of the longest save so far; before the first an estimate, from 100 MB/s for every rank."""
        return self._saved_s or 10.0 + (self._states() + self._weights()) / 1e8

    @property
    def busy(self) -> bool:
        """Whether a save is under way. The same on all ranks."""
        return self._under_way is not None

    @property
    def ready(self) -> bool:
        """Whether this rank has done what the save under way waits for; all ranks' go to `advance`."""
        work = self._under_way
        if work is None:
            return False
        return work.waits_for is None or work.waits_for.done()

    def load(self, found: checkpoint.Checkpoint) -> None:
        """Loads a checkpoint of any number of ranks; hyperparameters stay those of the run that goes on. Collective.

        Raises:
            ConfigError: DeepSpeed finds nothing to load in it.
        """
        optimizer = self._engine.optimizer
        own = [{key: group[key] for key in _HYPERPARAMETERS if key in group} for group in optimizer.param_groups]
        with self._files.reading(found.folder, found.identity.world_size):
            loaded, _ = self._engine.load_checkpoint(str(found.folder.parent), tag=found.folder.name)
        if loaded is None:
            raise ConfigError(f"resume: DeepSpeed finds nothing to load in {str(found.folder)!r}")
        for group, values in zip(optimizer.param_groups, own, strict=True):
            group.update(values)
        optimizer.clip_grad = self._engine.gradient_clipping()  # ZeRO-1 takes the checkpoint's
        self._bytes = found.bytes
        if self._rank == 0 and found.folder.parent.resolve() == self._folder.resolve():
            self._given_up = checkpoint.later_than(found.folder)
            if found.good is None:
                self._unjudged.append(found.folder)

    def save(self, step: int, *, last: bool = False) -> list[str]:
        """Begins to save a checkpoint, good or not as `judge` will say; the newest good one is never removed. Collective.

        Waits for the save before it, so that at most one is under way, which takes as much host memory as the states.

        Args:
            step: Optimizer steps done.
            last: Whether the run ends with it, so that nothing is saved if this is not.

        Returns:
            Why this save, and the one before, have failed, the same on all ranks; empty if they have not.

        Raises:
            WriteError: It failed and is the last, or as many in a row have failed as may.
        """
        entered = time.monotonic()
        failures = self.settle()
        if self._under_way is not None:
            if last:
                self._failed(step, f"that of step {self._under_way.step} is still being written", last)
            return failures
        began, target = time.monotonic(), self._folder / checkpoint.tag_of(step)
        if (failure := on_rank_0(lambda: self._prepare(target))) is not None:
            return [*failures, self._failed(step, failure, last)]
        self._files.begin()
        self._engine.save_checkpoint(str(self._folder), tag=target.name, save_latest=False)
        row = {"kind": "save", "step": step, "copy_s": self._files.copy_s, "host_bytes": self._files.copied_bytes}
        self._under_way = _UnderWay(target, step, began, row, self._writer.submit(self._files.write))
        row["blocked_s"] = time.monotonic() - entered
        return failures

    def advance(self, ready: bool, *, last: bool = False) -> list[str]:
        """Goes on with the save under way once all ranks are ready. Collective if they are.

        Args:
            ready: Whether all ranks are `ready`, the same on all.
            last: As for `save`.

        Returns:
            Why the save has failed, the same on all ranks; empty if it has not, or not yet.

        Raises:
            WriteError: As of `save`.
        """
        work = self._under_way
        if work is None or not ready:
            return []
        if not work.published:
            everyones: list[Any] = [None] * self._world if self._rank == 0 else []
            dist.gather_object(work.written.result(), everyones if self._rank == 0 else None)
            work.published = True
            if self._rank == 0:
                work.result = self._writer.submit(lambda: self._conclude(work, everyones))
            return []
        failure = on_rank_0(lambda: work.result.result() if work.result is not None else None)
        self._under_way = None
        if failure is not None:
            return [self._failed(work.step, failure, last)]
        seconds = time.monotonic() - work.began
        self._failures, self._saved_s = 0, max(self._saved_s, seconds)
        if self._rank == 0:
            self.rows.append({**work.row, "write_s": seconds, "bytes": self._bytes})
        return []

    def settle(self, *, last: bool = False) -> list[str]:
        """Waits for the save under way. Collective.

        Returns:
            As of `advance`; after the timeout that it is not done, and by whom.

        Raises:
            WriteError: As of `save`.
        """
        deadline = time.monotonic() + self._timeout_s
        failures: list[str] = []
        device = get_accelerator().current_device_name()
        while (work := self._under_way) is not None and not failures:
            if work.waits_for is not None:
                with contextlib.suppress(NotDone):
                    work.waits_for.exception(_ASK_S)
            mine, late = self.ready, self._rank == 0 and time.monotonic() > deadline
            flags = torch.tensor([mine, late], dtype=torch.float32, device=device)
            dist.all_reduce(flags)
            ready, over = flags.tolist()
            if ready < self._world and over:
                return [self._failed(work.step, self._late(mine), last)]
            failures = self.advance(ready == self._world, last=last)
        return failures

    def judge(self, good: bool) -> None:
        """Notes whether checkpoints have proved good: whether a step or an evaluation that came after them was finite.

        One that is under way is published as good, or, after a step that was not finite, with the next verdict.
        """
        if self._under_way is not None and self._under_way.good is None:
            self._under_way.good = good
        if self._rank == 0 and (self._unjudged or not good):

            def note() -> None:
                for folder in self._unjudged:
                    with contextlib.suppress(OSError):  # it is gone, or the disk is full: then it stays as it is
                        checkpoint.judge(folder, good, self._keep, self._keep_s)
                self._unjudged.clear()

            noted = self._writer.submit(note)
            if not good:  # the run ends
                with contextlib.suppress(NotDone):
                    noted.result(self._timeout_s)

    def close(self) -> None:
        """Waits until all is noted."""
        with contextlib.suppress(NotDone):
            self._writer.submit(lambda: None).result(self._timeout_s)

    def _failed(self, step: int, failure: str, last: bool) -> str:
        self._failures += 1
        said = f"the checkpoint of step {step} could not be saved: {failure}"
        if last:
            said += "; the run ends without it"
        elif self._failures >= self._max_failures:
            said += f"; {self._failures} saves in a row have failed (checkpoint.max_failures)"
        else:
            return said
        error = WriteError(said)
        error.elsewhere = self._rank != 0
        raise error

    def _late(self, ready: bool) -> str:
        """What a save that is not done waits for. Collective."""
        doing = self._files.writing or f"{checkpoint.NOTE}, or removes older checkpoints"
        mine = None if ready else (socket.gethostname(), doing)
        everyones: list[Any] = [None] * self._world
        dist.all_gather_object(everyones, mine)
        found = [f"rank {rank} on {who[0]} writes {who[1]}" for rank, who in enumerate(everyones) if who is not None]
        return f"it is not written after {self._timeout_s:g} s (checkpoint.timeout_s): {some(found, 4, '; ')}"

    def _prepare(self, target: Path) -> str | None:
        """On rank 0: makes room for a checkpoint, and finds out whether there is enough."""
        try:
            checkpoint.remove(target)  # an earlier life of the run may have left one
            self._folder.mkdir(exist_ok=True)
            usage = shutil.disk_usage(self._folder)
        except OSError as error:
            return f"{error.filename or self._folder}: {error.strerror or error}"
        mpu = self._engine.mpu
        parts = 1 if mpu is None else self._world // mpu.get_data_parallel_world_size()  # stages and tensor ranks
        needed = self._bytes or self._states() * self._world + self._weights() * parts
        if usage.total and usage.free < needed:
            return f"{self._folder}: it takes {size_text(needed)}, and {size_text(usage.free)} are free"
        return None

    def _states(self) -> int:
        """Bytes of this rank's share of the float32 weights and the optimizer's states."""
        return optimizer_bytes(self._engine.optimizer)

    def _weights(self) -> int:
        """Bytes of the weights that one rank writes: of its pipeline stage and tensor part. With ZeRO-3 next to none is whole."""
        return sum(param.nbytes for param in self._engine.module.parameters())

    def _conclude(self, work: _UnderWay, everyones: list[Written]) -> str | None:
        """On rank 0, by its writer: publishes what all ranks have written; removes it where one has not."""
        failures = [
            f"{found.failure} (rank {rank})" for rank, found in enumerate(everyones) if found.failure is not None
        ]
        if not failures:
            written = {name: digest for found in everyones for name, digest in found.files.items()}
            try:
                self._bytes = checkpoint.publish(
                    work.target,
                    work.step,
                    self._identity,
                    self._keep,
                    written,
                    good=work.good or None,
                    keep_s=self._keep_s,
                    given_up=self._given_up,
                )
                self._given_up = []
                if not work.good:
                    self._unjudged.append(work.target)
                return None
            except OSError as error:
                failures = [f"{error.filename or work.target / checkpoint.NOTE}: {error.strerror or error} (rank 0)"]
        more = f" and {len(failures) - 1} other ranks" if len(failures) > 1 else ""
        try:
            checkpoint.remove(work.target)
        except OSError as error:
            return f"{failures[0]}{more}; what was written cannot be removed: {error.strerror or error}"
        return failures[0] + more
