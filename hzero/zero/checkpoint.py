"""Checkpoints of engines whose block has the key ``"checkpoint"``: whole or absent, for any number of ranks, without code.

DeepSpeed writes and reads its own files, by its own code and under its own names, so every tool of DeepSpeed takes them. It
does so through an object, the engine's checkpoint engine; `CheckpointFiles` is one. A save goes into a hidden folder beside
its place. Each rank hashes what it writes and keeps an error instead of raising it, since the others would wait for it in the
middle of DeepSpeed's collective save. Then the ranks compare: if all files are there, rank 0 writes their sizes and hashes into
the folder (`hzero.manifest`) and gives it its name; otherwise it removes the folder, and all ranks raise one error.

A load compares sizes and hashes first, each rank those of its share of the files, so that all ranks together read the
checkpoint once. Ranks of another number read what `hzero.zero.reshard` makes of the files.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed.runtime.engine
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from hzero.block import KEY
from hzero.collectives import blaming
from hzero.config import CheckpointConfig
from hzero.files import read_text, replacing
from hzero.manifest import NOTE, HashedFile, IncompleteError, Manifest, SaveError, complete_in, recover
from hzero.validation import ConfigError, from_rank_0, of_all_ranks, on_all_ranks, some
from hzero.zero.refusals import read_block
from hzero.zero.reshard import MODEL, OPTIMIZER, Layout, Resharding
from hzero.zero.safe_load import load, only_tensors

logger = logging.getLogger("hzero")


class CheckpointFiles(CheckpointEngine):
    """Writes and reads the files of an engine's checkpoints.

    Args:
        engine: The engine.
        config: The key ``checkpoint`` of its block.

    Raises:
        ConfigError: DeepSpeed's configuration asks for another writer, or for files that rank 0 cannot see.
    """

    def __init__(self, engine: Any, config: CheckpointConfig) -> None:
        super().__init__()
        stock = engine.checkpoint_engine
        if type(stock) is not TorchCheckpointEngine:
            raise ConfigError(
                f"{KEY}.checkpoint: found with DeepSpeed's {type(stock).__name__}; expected one of the two"
            )
        if engine.use_node_local_storage():
            raise ConfigError(
                f"{KEY}.checkpoint: found with checkpoint.use_node_local_storage, where no rank sees all files; expected false"
            )
        self.name = type(self).__name__
        self.config = config
        self._engine, self._stock = engine, stock
        self._folders: tuple[Path, Path] | None = None  # of the save under way: its place, and where it is written
        self._failure: str | None = None
        self._written: dict[str, tuple[int, str]] = {}
        self._resharding: Resharding | None = None
        # The one function that writes past this object, on rank 0.
        copy_scripts = engine._copy_recovery_script
        engine._copy_recovery_script = lambda path: self._attempt(path, lambda: copy_scripts(path))

    # ---- save -------------------------------------------------------------------------------------------------------

    def save_all(self, stock: Callable[[], Any], folder: Path, tag: str, latest: bool) -> Any:
        """Saves a checkpoint. Collective.

        Args:
            stock: DeepSpeed's save of that tag, which does not write ``latest``.
            folder: The folder that holds the tag's folder.
            tag: The tag.
            latest: Whether to write it into ``latest``.

        Raises:
            SaveError: A rank could not write. What was there before is still there.
        """
        target = folder / tag
        partial = target.with_name(f".{target.name}.partial")
        self._failure, self._written, self._folders = None, {}, (target, partial)
        try:
            if dist.get_rank() == 0:
                self._attempt(str(folder), lambda: recover(folder, clean=True))
            done = stock()
        finally:
            self._folders = None
        everyones: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        with blaming():
            dist.gather_object((self._failure, self._written), everyones)
            failure = from_rank_0(lambda: self._publish(target, partial, latest, everyones or []))
        if failure is not None:
            raise of_all_ranks(
                SaveError(f"{str(target)!r} could not be saved: {failure}; earlier checkpoints are unchanged")
            )
        return done

    def _publish(self, target: Path, partial: Path, latest: bool, everyones: Sequence[Any]) -> str | None:
        """On rank 0: gives what all ranks have written its name, or removes it and says why."""
        failures = [f"{failure} (rank {rank})" for rank, (failure, _) in enumerate(everyones) if failure is not None]
        if not failures:
            files = {name: file for _, written in everyones for name, file in written.items()}
            engine = self._engine
            note = Manifest(target, engine.global_steps, len(everyones), engine.train_batch_size(), time.time(), files)
            old = target.with_name(f".{target.name}.old.partial")
            try:
                note.write(partial)
                if target.exists():
                    target.rename(old)
                partial.rename(target)
            except OSError as error:
                failures = [f"{error.filename or partial}: {error.strerror or error} (rank 0)"]
            else:
                shutil.rmtree(old, ignore_errors=True)
                # From here on it is whole. A load finds it without `latest`, which tools of DeepSpeed read.
                with contextlib.suppress(OSError):
                    if latest:
                        with replacing(target.parent / "latest") as file:
                            file.write(target.name)
                return None
        shutil.rmtree(partial, ignore_errors=True)
        return some(failures, 1, "; ")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes a folder of the checkpoint."""
        self._attempt(path, lambda: os.makedirs(self._place(path), exist_ok=exist_ok))

    def save(self, state_dict: Any, path: str) -> None:
        """Writes a file."""
        if self._folders is None:  # an export of the weights
            self._stock.save(state_dict, path)
        else:
            self._attempt(path, lambda: self._write(state_dict, self._place(path)))

    def _write(self, state_dict: Any, path: Path) -> None:
        file = HashedFile(path)
        try:
            # A zip archive, of which a load maps the parts that it needs. The hash replaces its checksums.
            torch.save(state_dict, file)  # type: ignore[arg-type]
        finally:
            written = file.close()  # raises the error of the disk
        self._written[path.name] = written

    def _place(self, path: str) -> Path:
        """Where a file or folder of the checkpoint is written."""
        if self._folders is None:
            return Path(path)
        target, partial = self._folders
        return partial / Path(path).relative_to(target) if Path(path).is_relative_to(target) else Path(path)

    def _attempt(self, path: str, action: Callable[[], object]) -> None:
        if self._folders is None:
            action()
        elif self._failure is None:
            try:
                action()
            except Exception as error:
                reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}".splitlines()[0]
                self._failure = f"{getattr(error, 'filename2', None) or path}: {reason}"

    def create(self, info: Any) -> None:
        """DeepSpeed begins a save."""

    def commit(self, info: Any) -> bool:
        """DeepSpeed ends a save."""
        return True

    # ---- load -------------------------------------------------------------------------------------------------------

    def load_all(self, stock: Callable[[str | None], Any], folder: Path, tag: str | None, resumes: bool) -> Any:
        """Loads a checkpoint. Collective.

        Args:
            stock: DeepSpeed's load of a tag.
            folder: The folder that holds the tag's folder.
            tag: The tag; None: that of ``latest`` if it is complete, otherwise the newest complete one.
            resumes: Whether the training goes on, and not only weights are loaded.

        Raises:
            ConfigError: It is incomplete, holds code or other parameters, or no accumulation makes its batch.
        """
        tag, candidates = from_rank_0(lambda: self._candidates(folder, tag))
        if tag is None:
            return stock(None)  # says that there is nothing
        if candidates:
            index = newest_intact(candidates, self.config.verify)
            tag = candidates[index].folder.name if index else tag
            if resumes and self.config.same_batch:
                self._keep_batch(candidates[index])
        # Stock loads weights alone from the tag that `latest` names (deepspeedai/DeepSpeed#8499).
        name = "get_fp32_state_dict_from_zero_checkpoint"
        weights = functools.partial(getattr(deepspeed.runtime.engine, name), tag=tag)
        with (
            mock.patch.object(deepspeed.runtime.engine, name, weights),
            only_tensors(self.config.trust),
            self._reading(folder / tag, resumes),
        ):
            return stock(tag)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Reads a file."""
        if self._resharding is not None:
            return self._resharding.load(next(kind for kind in (MODEL, OPTIMIZER) if path.endswith(kind)))
        return load(path, map_location, self.config.trust)

    @staticmethod
    def _candidates(folder: Path, tag: str | None) -> tuple[str | None, list[Manifest]]:
        """On rank 0: the tag to load, and the notes of the checkpoints that may be loaded, best first.

        There are no notes of checkpoints that were written without the key, and no tag where there is no checkpoint.
        """
        recover(folder)
        if tag is not None:
            if (folder / tag / NOTE).exists():
                return tag, [Manifest.read(folder / tag)]
            if not (folder / tag).exists():
                raise IncompleteError(f"checkpoint: no folder {str(folder / tag)!r}{_beside(folder)}")
            logger.warning("hzero: %r was written without the key checkpoint: nothing is compared", str(folder / tag))
            return tag, []
        complete, latest = [path for path in complete_in(folder) if (path / NOTE).exists()], None
        with contextlib.suppress(ConfigError):
            latest = folder / read_text(folder / "latest").strip()
        if latest in complete:
            complete = complete[complete.index(latest) :]
        elif complete and latest is not None:
            logger.warning("hzero: %r is incomplete; skipped", str(latest))
        elif latest is not None and latest.exists() and not (latest / NOTE).exists():
            return latest.name, []
        elif not complete and any(folder.glob(f"*/{NOTE}")):
            raise IncompleteError(f"checkpoint: {str(folder)!r} holds no complete checkpoint{_beside(folder.parent)}")
        notes = [Manifest.read(path) for path in complete]
        return (notes[0].folder.name if notes else None), notes

    def _keep_batch(self, manifest: Manifest) -> None:
        """Adapts the accumulation, so that a step has as many samples as a step of the checkpoint's run.

        Raises:
            ConfigError: No accumulation does.
        """
        engine, wanted = self._engine, manifest.batch
        before = engine.gradient_accumulation_steps()
        if wanted == engine.train_batch_size():
            return
        accumulation = accumulation_for(
            manifest, engine.train_batch_size() // before, engine.train_micro_batch_size_per_gpu()
        )
        if any(of.__module__.split(".")[0] in ("lightning", "pytorch_lightning") for of in type(engine.module).__mro__):
            raise ConfigError(
                f"accumulate_grad_batches: found {before}, which makes {engine.train_batch_size()} samples in a step; expected "
                f"{accumulation}, for the {wanted} of {str(manifest.folder)!r}"
            )
        engine.set_train_batch_size(wanted)
        if (accelerate := sys.modules.get("accelerate.state")) is not None:
            shared = accelerate.GradientState._shared_state  # which counts micro-steps in Accelerate's loops
            if shared and shared["plugin_kwargs"].get("num_steps", 1) == before:
                shared["plugin_kwargs"]["num_steps"] = accumulation
        say_accumulation(before, accumulation, manifest)

    @contextlib.contextmanager
    def _reading(self, folder: Path, resumes: bool) -> Iterator[None]:
        """Inside, the engine loads what this rank would have written: its own files, or of another layout what they become."""
        engine, optimizer = self._engine, self._engine.optimizer
        written = len(list(folder.glob(f"*zero_pp_rank_*_mp_rank_00_{OPTIMIZER}")))
        group = getattr(optimizer, "dp_process_group", None)
        ranks = dist.get_world_size(group)
        if engine.mp_world_size > 1 or engine.zero_optimization_stage() == 1:
            if resumes and written not in (0, ranks):
                raise ConfigError(
                    f"checkpoint: {str(folder)!r} was written by {written} data-parallel ranks; found {ranks}; expected as many "
                    "with tensor parallelism or pipeline stages"
                )
        elif hasattr(optimizer, "fp16_groups"):  # not an engine without an optimizer
            layout = Layout(ranks, engine._get_zero_param_shapes())
            groups = [optimizer.sub_group_to_group_id[index] for index in range(len(optimizer.fp16_groups))]
            read = functools.partial(load, map_location="cpu", trust=self.config.trust)
            found = Resharding(folder, max(written, 1), layout, dist.get_rank(group), groups, read)
            self._resharding = None if found.old == layout else found
        try:
            with contextlib.ExitStack() as stack:
                if self._resharding is not None:
                    own = str(self._resharding.path(0, MODEL))  # this rank may have written none
                    stack.enter_context(mock.patch.object(engine, "_get_all_ckpt_names", return_value=[own]))
                yield
        finally:
            self._resharding = None


# ---- what all ranks decide together ----------------------------------------------------------------------------------


#: Checkpoints whose files this process has compared with their hashes, with the times of their notes.
_compared: set[tuple[Path, float]] = set()


def newest_intact(candidates: Sequence[Manifest], verify: bool) -> int:
    """The first of some checkpoints whose files are as they were written, the same on all ranks. Collective.

    Args:
        candidates: Their notes, the same on all ranks.
        verify: Whether to compare hashes; otherwise sizes.

    Returns:
        Its index.

    Raises:
        IncompleteError: None is.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    problem = ""
    for index, manifest in enumerate(candidates):
        key = manifest.folder.absolute(), manifest.written
        share = sorted(manifest.files)[rank::world]
        changes: list[Any] = [None] * world
        with blaming():
            dist.all_gather_object(changes, manifest.changed(share, hashes=verify and key not in _compared))
        changed = next((change for change in changes if change is not None), None)
        if changed is None:
            _compared.add(key)
            return index
        problem = problem or f"checkpoint: {str(manifest.folder)!r} is incomplete: {changed}"
        if rank == 0 and index + 1 < len(candidates):
            logger.warning("hzero: %r is incomplete: %s; skipped", str(manifest.folder), changed)
    folder = candidates[0].folder.parent
    raise IncompleteError(
        problem + from_rank_0(lambda: _beside(folder, candidates) or _beside(folder.parent, candidates))
    )


def _beside(folder: Path, but: Sequence[Manifest] = ()) -> str:
    """The end of a message that names the newest complete checkpoint in a folder, if there is another one."""
    tried = {one.folder for one in but} | {one.folder.parent for one in but}
    others = [path for path in complete_in(folder) if path not in tried]
    return f"; the newest complete one is {str(others[0])!r}" if others else "; there is no complete one beside it"


def accumulation_for(manifest: Manifest, at_once: int, micro_batch: int) -> int:
    """The accumulation that makes a step as large as those of a checkpoint's run.

    Args:
        manifest: The note of the checkpoint.
        at_once: Samples of all ranks in a micro-step.
        micro_batch: Those of one rank.

    Raises:
        ConfigError: No accumulation does; the message says what could.
    """
    if manifest.batch % at_once == 0:
        return manifest.batch // at_once
    ranks, possible = at_once // micro_batch, []
    if manifest.batch % micro_batch == 0:
        possible.append(
            f"{some(_divisors(manifest.batch // micro_batch), 20)} ranks with micro-batches of {micro_batch}"
        )
    if manifest.batch % ranks == 0:
        possible.append(f"micro-batches of {some(_divisors(manifest.batch // ranks), 20)} with {ranks} ranks")
    raise ConfigError(
        f"checkpoint: {str(manifest.folder)!r} was trained with {manifest.batch} samples in a step; found {ranks} ranks with "
        f"micro-batches of {micro_batch}, whose steps have a multiple of {at_once}; expected "
        f"{' or '.join(possible) or 'other ranks'}, or {KEY}.checkpoint.same_batch false"
    )


def say_accumulation(before: int, after: int, manifest: Manifest) -> None:
    """Says on rank 0 that the accumulation has been adapted."""
    if dist.get_rank() == 0:
        print(
            f"hzero: gradient_accumulation_steps {before} -> {after}, so that a step keeps the {manifest.batch} samples of "
            f"{str(manifest.folder)!r}",
            file=sys.stderr,
            flush=True,
        )


def _divisors(number: int) -> list[str]:
    return [str(count) for count in range(1, number + 1) if number % count == 0]


# ---- what `hzero.enable` puts around DeepSpeed's methods ---------------------------------------------------------------


def configures(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``DeepSpeedEngine._configure_checkpointing`` that lets `CheckpointFiles` write and read if the block has the key."""

    @functools.wraps(stock)
    def configure(engine: Any, *args: Any, **kwargs: Any) -> None:
        stock(engine, *args, **kwargs)
        config = read_block(engine._config._param_dict)
        if config is not None and config.checkpoint is not None:
            with on_all_ranks():
                engine.checkpoint_engine = CheckpointFiles(engine, config.checkpoint)

    return configure


def saves(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``DeepSpeedEngine.save_checkpoint`` by `CheckpointFiles.save_all`."""

    @functools.wraps(stock)
    def save_checkpoint(
        engine: Any,
        save_dir: Any,
        tag: Any = None,
        client_state: Any = None,
        save_latest: bool = True,
        *more: Any,
        **named: Any,
    ) -> Any:
        files, state = engine.checkpoint_engine, client_state or {}
        if not isinstance(files, CheckpointFiles) or not save_dir:
            return stock(engine, save_dir, tag, state, save_latest, *more, **named)
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        with on_all_ranks():
            save = functools.partial(stock, engine, save_dir, tag, state, False, *more, **named)
            return files.save_all(save, Path(save_dir), tag, save_latest)

    return save_checkpoint


def loads(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``DeepSpeedEngine.load_checkpoint`` by `CheckpointFiles.load_all`."""

    @functools.wraps(stock)
    def load_checkpoint(
        engine: Any,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        **more: Any,
    ) -> Any:
        files = engine.checkpoint_engine
        what = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        if not isinstance(files, CheckpointFiles) or engine.load_universal_checkpoint():
            return stock(engine, load_dir, tag, *what, **more)
        with on_all_ranks():
            return files.load_all(
                lambda chosen: stock(engine, load_dir, chosen, *what, **more),
                Path(load_dir),
                None if tag is None else str(tag),
                load_optimizer_states and not load_module_only,
            )

    return load_checkpoint
