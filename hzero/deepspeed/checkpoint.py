"""Checkpoints of engines whose block has the key ``"checkpoint"``: complete or absent, for any number of ranks, without code.

DeepSpeed's code writes and reads the files, with DeepSpeed's names, so every tool of DeepSpeed can read them. DeepSpeed accesses
files through the engine's checkpoint engine. `CheckpointFiles` is one. A save writes into a hidden folder beside the target.
Each rank hashes the bytes that it writes. It keeps an error instead of raising it, since the other ranks would wait for it in
DeepSpeed's collective save. Then the ranks compare results. If all files are complete, rank 0 writes their sizes and hashes into
the folder (`hzero.manifest`) and renames it. Otherwise rank 0 removes the folder, and all ranks raise the same error.

A load first compares sizes and hashes. Each rank compares its share of the files, so all ranks together read the checkpoint
once. With another number of ranks, `Resharding` reads the files.

The files are pickles, which can call any Python function when they are loaded. So a load accepts only tensors and plain types.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed.runtime.engine
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from hzero import manifest
from hzero.block import KEY
from hzero.calls import attributes
from hzero.comm import blaming
from hzero.config import CheckpointConfig
from hzero.deepspeed.resharding import MODEL, OPTIMIZER, Resharding, Sharding
from hzero.deepspeed.safe_loading import load, only_tensors
from hzero.errors import ConfigError, first_of_ranks, from_rank_0, on_all_ranks, some
from hzero.files import read_text, replacing
from hzero.manifest import HashedFile, IncompleteError, Manifest, SaveError

logger = logging.getLogger("hzero")


class CheckpointFiles(TorchCheckpointEngine):  # type: ignore[misc]
    """Writes and reads the files of an engine's checkpoints.

    Args:
        engine: The engine.
        config: The key ``checkpoint`` of its block.

    Raises:
        ConfigError: DeepSpeed's configuration selects another checkpoint engine.
    """

    def __init__(self, engine: Any, config: CheckpointConfig) -> None:
        stock = engine.checkpoint_engine
        if type(stock) is not TorchCheckpointEngine:
            raise ConfigError(
                f"{KEY}.checkpoint: found with DeepSpeed's {type(stock).__name__}, which also writes the files; expected one of "
                "them: remove the key, or DeepSpeed's checkpoint engine"
            )
        self.__dict__.update(vars(stock))
        self.config = config
        self._engine, self._stock_save, self._stock_load = engine, engine.save_checkpoint, engine.load_checkpoint
        self._saving = False
        self._failure: str | None = None
        self._written: dict[str, tuple[int, str]] = {}
        self._resharding: Resharding | None = None
        # The only function that writes a file without this object, on rank 0.
        copy_scripts = engine._copy_recovery_script
        engine._copy_recovery_script = lambda path: self._attempt(path, lambda: copy_scripts(path))

    # ---- save -------------------------------------------------------------------------------------------------------

    @on_all_ranks()
    def save_checkpoint(
        self,
        save_dir: Any,
        tag: Any = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,  # Trainer checks the signature for it
    ) -> Any:
        """``DeepSpeedEngine.save_checkpoint``, which saves a complete checkpoint or none. Collective.

        Raises:
            SaveError: A rank could not write. Earlier checkpoints are unchanged.
        """
        folder = Path(save_dir or "")
        tag = f"global_step{self._engine.global_steps}" if tag is None else str(tag)
        partial = manifest.hidden(folder / tag)
        # Before any rank writes, since a complete checkpoint may still have the hidden name.
        from_rank_0(lambda: manifest.recover(partial.parent))
        self._failure, self._written = None, {}
        place, state = str(partial.relative_to(folder)), client_state or {}
        with attributes((self, "_saving", True)):
            done = self._stock_save(save_dir, place, state, False, exclude_frozen_parameters)
        everyones: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        with blaming():
            dist.gather_object((self._failure, self._written), everyones)
            from_rank_0(lambda: self._publish(folder, tag, partial, save_latest, everyones or []))
        return done

    def _publish(self, folder: Path, tag: str, partial: Path, latest: bool, everyones: Sequence[Any]) -> None:
        """Renames the hidden folder if all ranks have written their files. Otherwise removes it and raises. Rank 0 only."""
        failures = [f"{failure} (rank {rank})" for rank, (failure, _) in enumerate(everyones) if failure is not None]
        target = folder / tag
        try:
            if not failures:
                if latest:  # if this checkpoint is missing later, a load takes the newest
                    with replacing(folder / "latest") as file:
                        file.write(tag)
                note = Manifest(
                    folder=partial,
                    step=self._engine.global_steps,
                    batch=self._engine.train_batch_size(),
                    written=time.time(),
                    files={name: file for _, written in everyones for name, file in written.items()},
                )
                note.write()
                manifest.publish(target)
        except OSError as error:
            failures = [f"{error.filename or partial}: {error.strerror or error} (rank 0)"]
        if failures:
            if manifest.location(target) == target:  # otherwise it is complete, and the next save renames it
                shutil.rmtree(partial, ignore_errors=True)
            raise SaveError(
                f"{str(target)!r} could not be saved: {some(failures, 1, '; ')}; earlier checkpoints are unchanged"
            )

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Creates a folder of the checkpoint."""
        self._attempt(path, lambda: os.makedirs(path, exist_ok=exist_ok))

    def save(self, state_dict: Any, path: str) -> None:
        """Writes a file."""
        if self._saving:
            self._attempt(path, lambda: self._write(state_dict, Path(path)))
        else:  # DeepSpeed exports the weights
            super().save(state_dict, path)

    def _write(self, state_dict: Any, path: Path) -> None:
        with HashedFile(path) as file:
            # A zip archive, so that a load can map the parts that it needs. The hash replaces the archive's checksums.
            torch.save(state_dict, file)
            file.flush()
            os.fsync(file.fileno())  # some file systems report only here that they are full
            self._written[path.name] = file.tell(), file.hash.hexdigest()

    def _attempt(self, path: str | os.PathLike[str], action: Callable[[], object]) -> None:
        """Runs an action. During a save it keeps an error instead of raising it, and skips all later actions."""
        if not self._saving:
            action()
        elif self._failure is None:
            try:
                action()
            except Exception as error:
                self._failure = f"{Path(getattr(error, 'filename2', None) or path).name}: {manifest.reason_of(error)}"

    # ---- load -------------------------------------------------------------------------------------------------------

    @on_all_ranks()
    def load_checkpoint(self, load_dir: Any, *args: Any, **kwargs: Any) -> Any:
        """``DeepSpeedEngine.load_checkpoint`` of a complete checkpoint, on any number of ranks. Collective.

        Without a tag it loads the checkpoint named in ``latest``, if that checkpoint is complete. It also loads it if it is newer
        than all complete ones and was written without the key ``checkpoint``. Otherwise it loads the newest complete one.

        Raises:
            ConfigError: The checkpoint is incomplete, or has code, other parameters or the states of another optimizer. It is
                also raised if no accumulation gives the checkpoint's batch size.
        """
        call = inspect.signature(self._stock_load).bind(load_dir, *args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        folder, resumes = Path(load_dir), given["load_optimizer_states"] and not given["load_module_only"]
        tag, notes = from_rank_0(lambda: self._candidates(folder, given["tag"] and str(given["tag"])))
        if notes:
            note = newest_intact(notes, self.config.verify)
            tag = os.path.relpath(note.folder, folder)
            if resumes and self.config.same_batch:
                self._keep_batch(note)
        elif tag is None:
            return self._stock_load(load_dir)  # stock reports that there is no checkpoint
        given["tag"] = tag
        engine, name = deepspeed.runtime.engine, "get_fp32_state_dict_from_zero_checkpoint"
        resharding = self._other_sharding(folder / tag, resumes)
        # Stock would load weights without optimizer states from the tag in `latest` (deepspeedai/DeepSpeed#8499).
        weights = functools.partial(getattr(engine, name), tag=tag)
        values: list[tuple[Any, str, Any]] = [(engine, name, weights), (self, "_resharding", resharding)]
        if resharding is not None:
            model = str(resharding.path(0, MODEL))  # the checkpoint may have no file of this rank
            values.append((self._engine, "_get_all_ckpt_names", lambda *_: [model]))
        with attributes(*values), only_tensors(self.config.trust):
            return self._stock_load(*call.args, **call.kwargs)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Reads a file."""
        if self._resharding is not None:
            return self._resharding.load(next(kind for kind in (MODEL, OPTIMIZER) if path.endswith(kind)))
        return load(path, map_location, self.config.trust)

    @staticmethod
    def _candidates(folder: Path, tag: str | None) -> tuple[str | None, list[Manifest]]:
        """Returns the notes of the checkpoints that may be loaded, best first, or the tag of one without a note. Rank 0 only."""
        named, changed = None, 0.0
        with contextlib.suppress(ConfigError, OSError):
            if latest := read_text(folder / "latest", links=False).strip():
                named, changed = manifest.location(folder / latest), (folder / "latest").stat().st_mtime
        place = manifest.location(folder / tag) if tag is not None else named
        if tag is None:
            complete = [note for path, note in manifest.complete_in(folder).items() if note.folder == path]
            folders = [note.folder for note in complete]
            if named in folders:
                return None, complete[folders.index(named) :]
            without = named is not None and not (named / manifest.NOTE).exists() and any(named.glob(f"*{MODEL}"))
            # DeepSpeed writes `latest` right after a checkpoint, so the later file belongs to the newer checkpoint.
            if not without or any(note.written > changed for note in complete):
                if without:
                    logger.warning("hzero: %r was written without the key checkpoint; skipped", str(named))
                if not complete and any(folder.glob(f"*/{manifest.NOTE}")):
                    raise IncompleteError(f"checkpoint: {str(folder)!r} has no complete checkpoint{_beside(folder)}")
                if complete or named is None:
                    return None, complete
        assert place is not None
        if (place / manifest.NOTE).exists():
            return None, [Manifest.read(place)]
        if not place.exists():
            raise IncompleteError(f"checkpoint: no folder {str(place)!r}{_beside(folder)}")
        logger.warning("hzero: %r was written without the key checkpoint, so its files are not verified", str(place))
        return os.path.relpath(place, folder), []

    def _keep_batch(self, note: Manifest) -> None:
        """Changes the accumulation, so that a step has as many samples as in the checkpoint's run.

        Raises:
            ConfigError: No accumulation gives this number of samples.
        """
        engine = self._engine
        before, batch = engine.gradient_accumulation_steps(), engine.train_batch_size()
        if note.batch == batch:
            return
        if any(of.__module__.split(".")[0] in ("lightning", "pytorch_lightning") for of in type(engine.module).__mro__):
            raise ConfigError(
                f"accumulate_grad_batches: found {before}, which makes {batch} samples in a step; expected "
                f"{note.batch * before / batch:g}, for the {note.batch} of {str(note.folder)!r}"
            )
        accumulation = accumulation_for(note, before, batch, engine.train_micro_batch_size_per_gpu())
        engine.set_train_batch_size(note.batch)
        if (accelerate := sys.modules.get("accelerate.state")) is not None:
            shared = accelerate.GradientState()  # it counts micro-batches in Accelerate's loops
            if shared.num_steps == before:
                shared.plugin_kwargs["num_steps"] = accumulation

    def _other_sharding(self, folder: Path, resumes: bool) -> Resharding | None:
        """Returns a `Resharding` if other ranks have written the checkpoint. None: DeepSpeed can load the files directly."""
        engine, optimizer = self._engine, self._engine.optimizer
        written = len(list(folder.glob(f"*zero_pp_rank_*_mp_rank_00_{OPTIMIZER}")))
        # With tensor or pipeline parallelism DeepSpeed refuses other ranks. Without an optimizer it loads on any.
        if engine.mp_world_size > 1 or not hasattr(optimizer, "fp16_groups"):
            return None
        group = optimizer.dp_process_group
        sharding = Sharding.of(dist.get_world_size(group), engine._get_zero_param_shapes())
        groups = [optimizer.sub_group_to_group_id[index] for index in range(len(optimizer.fp16_groups))]
        read = functools.partial(load, map_location="cpu", trust=self.config.trust)
        found = Resharding(folder, sharding, dist.get_rank(group), groups, read)
        if resumes and written not in (0, found.old.world_size):  # DeepSpeed would continue with a new optimizer
            raise IncompleteError(
                f"checkpoint: {str(folder)!r} is incomplete: it has {written} of {found.old.world_size} files *{OPTIMIZER}"
            )
        return None if found.old == sharding else found


# ---- decisions of all ranks ------------------------------------------------------------------------------------------

#: Checkpoints whose hashes this process has compared: folder and time of the note.
_compared: set[tuple[Path, float]] = set()


def newest_intact(candidates: Sequence[Manifest], verify: bool) -> Manifest:
    """Returns the first checkpoint whose files are unchanged since the save, the same on all ranks. Collective.

    Args:
        candidates: Notes of the checkpoints, the same on all ranks.
        verify: Whether to compare hashes. If False, only sizes are compared.

    Raises:
        IncompleteError: All checkpoints are incomplete or have changed.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    problems = []
    for note in candidates:
        key, share = (note.folder.absolute(), note.written), sorted(note.files)[rank::world]
        with blaming():
            change = first_of_ranks(note.changed(share, hashes=verify and key not in _compared))
        if change is None:
            _compared.add(key)
            return note
        problems.append(f"checkpoint: {str(note.folder)!r} is incomplete: {change}")
        if rank == 0 and note is not candidates[-1]:
            logger.warning("hzero: %s; skipped", problems[-1])
    tried = [note.folder for note in candidates]
    raise IncompleteError(problems[0] + from_rank_0(lambda: _beside(tried[0].parent, *tried)))


def _beside(folder: Path, *tried: Path) -> str:
    """Returns the end of a message, with the newest complete checkpoint in a folder or in its parent."""
    for place in (folder, folder.parent):
        for path in manifest.complete_in(place):
            if path not in (folder, *tried):
                return f"; the newest complete one is {str(path)!r}"
    return "; there is no other complete one"


def accumulation_for(note: Manifest, before: int, batch: int, micro_batch: int) -> int:
    """Returns the accumulation that gives a step as many samples as in a checkpoint's run. Rank 0 logs the change.

    Args:
        note: The note of the checkpoint.
        before: The current accumulation.
        batch: Samples of all ranks in a step with ``before``.
        micro_batch: Samples of one rank in a micro-batch.

    Raises:
        ConfigError: No accumulation gives this number of samples.
    """
    at_once = batch // before
    if note.batch % at_once:
        raise ConfigError(
            f"checkpoint: {str(note.folder)!r} was trained with {note.batch} samples in a step; found "
            f"{at_once // micro_batch} ranks with micro-batches of {micro_batch}, which is {at_once} at once; expected a divisor "
            f"of {note.batch}, or {KEY}.checkpoint.same_batch false"
        )
    after = note.batch // at_once
    if dist.get_rank() == 0:
        kept = f"so that a step keeps the {note.batch} samples of {str(note.folder)!r}"
        logger.warning("hzero: gradient_accumulation_steps %d -> %d, %s", before, after, kept)
    return after
