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
import math
import os
import pickle
import pkgutil
import re
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed.runtime.engine
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from hzero import manifest
from hzero.block import KEY
from hzero.calls import attributes
from hzero.codecs.formats import chunk_numel
from hzero.comm import blaming
from hzero.config import CheckpointConfig
from hzero.errors import ConfigError, first_of_ranks, from_rank_0, of_all_ranks, on_all_ranks, some
from hzero.files import read_text, regular, replacing
from hzero.manifest import HashedFile, IncompleteError, Manifest, SaveError

logger = logging.getLogger("hzero")
#: Suffixes of the names of a rank's two files.
MODEL, OPTIMIZER = "model_states.pt", "optim_states.pt"
_GROUPS, _STATE, _FROZEN = "fp32_flat_groups", "optimizer_state_dict", "frozen_param_fragments"


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
            raise ConfigError(f"{KEY}.checkpoint: found with {type(stock).__name__} of DeepSpeed; expected either")
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
            shared = accelerate.GradientState._shared_state  # it counts micro-steps in Accelerate's loops
            if shared and shared["plugin_kwargs"].get("num_steps", 1) == before:
                shared["plugin_kwargs"]["num_steps"] = accumulation

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


# ---- another sharding -----------------------------------------------------------------------------------------------------
#
# ZeRO-3 divides every parameter and optimizer state into one equal part for each rank, in the order of ranks. A rank's file has
# its parts one after the other, in the order of `param_shapes`. So the part of a rank in this world is a range of elements in
# few neighbouring files, at the same places for all parameters. The files are mapped, and only these elements are read. All ranks
# together read the checkpoint once, and no file is written.
#
# This code builds the objects that DeepSpeed loads. DeepSpeed's strict load does the rest, so each parameter group keeps its
# hyperparameters.
#
# DeepSpeed's universal checkpoints would not be simpler. ``ds_to_universal`` must run between the two trainings, and writes a
# second copy with one folder per parameter and state. The load needs ``load_universal`` in the configuration. It gives all groups
# the hyperparameters of the first one, restores only Adam's two moments (stage3.py) and reads pickles without ``weights_only``.


@dataclass(frozen=True)
class Sharding:
    """How parameters are divided among ranks.

    Attributes:
        world_size: Number of ranks.
        counts: Number of elements of each parameter, by name.
        places: Sub-group of each parameter, and start of its part in the sub-group's flat tensor, by name.
        sizes: Number of elements of each flat tensor.
    """

    world_size: int
    counts: dict[str, int]
    places: dict[str, tuple[int, int]]
    sizes: list[int]

    @classmethod
    def of(cls, world_size: int, shapes: Sequence[dict[str, Sequence[int]]]) -> Sharding:
        """Returns the sharding of sub-groups. An element of ``shapes`` has a sub-group's shapes by name, in order."""
        found = cls(world_size, {}, {}, [0] * len(shapes))
        for index, group in enumerate(shapes):
            for name, shape in group.items():
                found.counts[name] = math.prod(shape)
                found.places[name] = index, found.sizes[index]
                found.sizes[index] += chunk_numel(found.counts[name], world_size)
        return found


def cut(
    into: torch.Tensor, count: int, old_world: int, world_size: int, rank: int, source: Callable[[int], torch.Tensor]
) -> None:
    """Fills a rank's part of a parameter from the parts of another world. Padding does not change.

    Args:
        into: The part to fill, flat.
        count: Number of elements of the parameter.
        old_world: Size of the other world.
        world_size: Size of this world.
        rank: This rank.
        source: Returns the flat part of a rank of the other world.
    """
    size, step = chunk_numel(count, world_size), chunk_numel(count, old_world)
    first, last = min(rank * size, count), min((rank + 1) * size, count)
    for old in range(first // step, -(-last // step)):
        begin, end = max(first, old * step), min(last, (old + 1) * step)
        into[begin - first : end - first] = source(old)[begin - old * step : end - old * step]


class Resharding:
    """Builds this rank's two files from a checkpoint with another sharding.

    Args:
        folder: The checkpoint.
        sharding: The sharding of this world.
        rank: This rank.
        param_groups: The parameter group of each sub-group of this world.
        load: Loads a file by its path. With ``mmap=True`` tensors are read when they are used.

    Attributes:
        old: The sharding of the checkpoint.

    Raises:
        ConfigError: The checkpoint has other parameters.
    """

    def __init__(
        self, folder: Path, sharding: Sharding, rank: int, param_groups: Sequence[int], load: Callable[..., Any]
    ) -> None:
        self._folder, self._sharding, self._rank, self._param_groups = folder, sharding, rank, list(param_groups)
        self._load, self._files = load, dict[tuple[int, str], Any]()
        model = self._file(0, MODEL)  # all ranks read this file, since others may be left from a larger world
        self.old = Sharding.of(int(model["dp_world_size"]), model["param_shapes"])
        self._first = rank % self.old.world_size  # so that not all ranks read the same large file
        if differing := dict(sorted(self.old.counts.items() ^ sharding.counts.items())):
            raise ConfigError(
                f"checkpoint: found other parameters in {str(folder)!r} than in the model: {some(list(differing), 4)}; expected "
                "the model, and the expert_parallel, of the run that saved it"
            )

    def path(self, rank: int, kind: str) -> Path:
        """Returns the path of the file that a rank of the other world has written. Files of bf16 runs have a prefix."""
        found = sorted(self._folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_{kind}"))
        if len(found) != 1:
            raise ConfigError(
                f"checkpoint: {str(self._folder)!r} has {len(found)} files *zero_pp_rank_{rank}_mp_rank_00_{kind}; expected 1"
            )
        return found[0]

    def load(self, kind: str) -> Any:
        """Returns the content of this rank's file of a kind (`MODEL` or `OPTIMIZER`)."""
        return self._model() if kind == MODEL else self._optimizer()

    def _file(self, rank: int, kind: str) -> Any:
        if (rank, kind) not in self._files:
            self._files[rank, kind] = self._load(str(self.path(rank, kind)), mmap=True)
        return self._files[rank, kind]

    def _part(self, count: int, dtype: torch.dtype, source: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Returns this rank's part of a parameter. See `cut`."""
        part = torch.zeros(chunk_numel(count, self._sharding.world_size), dtype=dtype)
        cut(part, count, self.old.world_size, self._sharding.world_size, self._rank, source)
        return part

    def _model(self) -> dict[str, Any]:
        saved = self._file(self._first, MODEL)
        fragments, shapes = saved.get(_FROZEN), saved.get("frozen_param_shapes") or {}
        if fragments is not None:
            fragments = {
                name: self._part(math.prod(shape), fragments[name].dtype, functools.partial(self._frozen, name))
                for name, shape in shapes.items()
            }
        return {**saved, "dp_world_size": self._sharding.world_size, _FROZEN: fragments}

    def _frozen(self, name: str, rank: int) -> torch.Tensor:
        return self._file(rank, MODEL)[_FROZEN][name]  # type: ignore[no-any-return]

    def _run(self, index: int, key: str | None, start: int, end: int, rank: int) -> torch.Tensor:
        """Returns elements of a sub-group's tensor from the file of a rank of the other world."""
        return _tensors(self._file(rank, OPTIMIZER)[_STATE], index)[key][start:end]  # type: ignore[no-any-return]

    def _optimizer(self) -> dict[str, Any]:
        saved = self._file(self._first, OPTIMIZER)
        zero = saved[_STATE]
        stock, old, new = zero[_STATE], self.old, self._sharding
        group_of = {index: number for number, group in enumerate(stock["param_groups"]) for index in group["params"]}
        states: list[dict[str | None, Any]] = [{None: torch.zeros(size)} for size in new.sizes]
        for name, (index, at) in new.places.items():
            (was, start), count = old.places[name], old.counts[name]
            if group_of[was] != self._param_groups[index]:
                raise ConfigError(
                    f"checkpoint: {name} is in group {self._param_groups[index]} of the optimizer, and was in group "
                    f"{group_of[was]}"
                )
            end = start + chunk_numel(count, old.world_size)
            for key, value in _tensors(zero, was).items():
                if not torch.is_tensor(value) or not value.dim() or value.numel() != old.sizes[was]:
                    states[index].setdefault(key, value)  # a state of the whole sub-group, such as the step
                    continue
                into = states[index].setdefault(key, torch.zeros(new.sizes[index], dtype=value.dtype))
                part = self._part(count, value.dtype, functools.partial(self._run, was, key, start, end))
                into[at : at + part.numel()] = part
        flat = [state.pop(None) for state in states]
        groups = [
            {**group, "params": [index for index, of in enumerate(self._param_groups) if of == number]}
            for number, group in enumerate(stock["param_groups"])
        ]
        optimizer = {
            **stock,
            "state": {index: state for index, state in enumerate(states) if state},
            "param_groups": groups,
        }
        return {**saved, _STATE: {**zero, "partition_count": new.world_size, _STATE: optimizer, _GROUPS: flat}}


def _tensors(zero: dict[str, Any], index: int) -> dict[str | None, Any]:
    """Returns a sub-group's masters, by the key None, and its optimizer states by name."""
    return {None: zero[_GROUPS][index], **zero[_STATE]["state"].get(index, {})}


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
        micro_batch: Samples of one rank in a micro-step.

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


# ---- Trainer and Accelerate --------------------------------------------------------------------------------------------
#
# Trainer reads a checkpoint's step and batches before it has an engine. It takes the checkpoint with the highest number, even if
# it is incomplete (``get_last_checkpoint``). Then it calls ``deepspeed_load_checkpoint``, which loads the tag in ``latest`` of
# that folder. When the engine loads, it is too late to choose another checkpoint or accumulation. So both are chosen at the
# beginning of ``train``.
#
# Both clients save the random state of each rank in a separate file (``rng_state_3.pth``, ``random_states_3.pkl``). New ranks
# have no such file and continue with the seed of the script. Dropout then draws other numbers than in the saved run, as it does
# with any other number of ranks. The order of samples does not change, since Accelerate's sampler uses the seed and the epoch.


def follow_trainer(trainer: Any, config: CheckpointConfig) -> None:
    """Makes ``trainer.train`` choose a complete checkpoint and keep its batch size. A failed save raises on all ranks.

    Args:
        trainer: A ``transformers.Trainer``, or an object of a derived class.
        config: The key ``checkpoint``.
    """
    stock_train, stock_rng = trainer.train, trainer._save_rng_state

    @functools.wraps(stock_train)
    def train(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        with on_all_ranks():
            if resume_from_checkpoint:
                notes = from_rank_0(lambda: _candidates_of_trainer(trainer.args.output_dir, resume_from_checkpoint))
                if notes:  # for a checkpoint without a note the engine decides
                    note = newest_intact(notes, config.verify)
                    resume_from_checkpoint = str(note.folder.parent)
                    if config.same_batch:
                        _keep_batch_of_trainer(trainer, note)
        return stock_train(resume_from_checkpoint, *args, **kwargs)

    @functools.wraps(stock_rng)
    def save_rng_state(output_dir: str) -> None:
        # Other ranks than 0 write no file after this one. Rank 0 then writes Trainer's state and removes older checkpoints.
        save_together(output_dir, lambda: stock_rng(output_dir))
        save_together(output_dir, lambda: _note_files_beside(Path(output_dir)))

    trainer.train, trainer._save_rng_state = train, save_rng_state


def save_together(place: str, save: Callable[[], object]) -> None:
    """Calls ``save`` on every rank. Collective.

    Args:
        place: The saved folder or file, for the message.
        save: Writes this rank's files, without collectives.

    Raises:
        SaveError: A rank could not write. All ranks raise it.
    """
    failure = None
    try:
        save()
    except Exception as error:  # torch, safetensors and tokenizers raise errors of many types
        failure = f"{manifest.reason_of(error)} (rank {dist.get_rank()})"
    with blaming():
        failure = first_of_ranks(failure)
    if failure is not None:
        raise of_all_ranks(SaveError(f"{place!r} could not be saved: {failure}; earlier checkpoints are unchanged"))


def _note_files_beside(folder: Path) -> None:
    if dist.get_rank() == 0 and (note := max(manifest.notes_in(folder), key=lambda note: note.written, default=None)):
        files = (*folder.glob("rng_state*.pth"), *folder.glob("scheduler.pt"))
        note.model_copy(update={"beside": {file.name: file.stat().st_size for file in files}}).write()


def _candidates_of_trainer(output_dir: str, asked: Any) -> list[Manifest]:
    """Returns the notes of the checkpoints from which Trainer may resume, best first.

    Trainer, or a script that calls ``get_last_checkpoint``, chooses the checkpoint with the highest number in its folder. If that
    one is incomplete, the newest complete one replaces it.
    """
    from transformers.trainer_utils import get_last_checkpoint

    folder = Path(output_dir) if asked is True else Path(asked).parent
    complete, last = manifest.complete_in(folder), get_last_checkpoint(str(folder)) if folder.is_dir() else None
    newest = manifest.without_note(folder, complete)
    if asked is not True and Path(asked) != Path(last or ""):
        complete = {path: note for path, note in complete.items() if path == Path(asked)}
    elif last is not None and not complete and newest is None:
        raise IncompleteError(f"resume_from_checkpoint: {str(folder)!r} has no complete checkpoint")
    elif last is not None and newest == Path(last):
        return []
    return list(complete.values())


def _keep_batch_of_trainer(trainer: Any, note: Manifest) -> None:
    """Changes Trainer's accumulation. For other loops `CheckpointFiles` does the same."""
    args, before = trainer.args, trainer.args.gradient_accumulation_steps
    # The note has DeepSpeed's batch size, which counts every rank of AutoTP's tensor groups.
    batch = trainer.get_total_train_batch_size(args) * getattr(trainer, "get_tp_size", lambda: 1)()
    if batch == note.batch:
        return
    accumulation = accumulation_for(note, before, batch, args.per_device_train_batch_size)
    config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    config["gradient_accumulation_steps"] = args.gradient_accumulation_steps = accumulation
    if "train_batch_size" in config:
        config["train_batch_size"] = note.batch
    if trainer.accelerator.gradient_accumulation_steps == before:  # some releases of Trainer leave it at 1
        trainer.accelerator.gradient_accumulation_steps = accumulation


def follow_accelerator(accelerator: Any, config: CheckpointConfig) -> None:
    """Makes ``load_state`` load complete checkpoints without running code, and begin a new window on all ranks.

    It also makes ``save_state`` remove checkpoints beyond ``total_limit`` after the save. Accelerate removes them before it.

    Args:
        accelerator: An ``accelerate.Accelerator`` that uses DeepSpeed.
        config: The key ``checkpoint``.
    """
    names, stock_save, stock_load = accelerator.project_configuration, accelerator.save_state, accelerator.load_state

    @functools.wraps(stock_save)
    def save_state(*args: Any, **kwargs: Any) -> Any:
        limit = names.total_limit
        with attributes((names, "total_limit", None)):
            saved = stock_save(*args, **kwargs)
        if names.automatic_checkpoint_naming and limit is not None:
            dist.barrier()  # all ranks have written their random states
            if dist.get_rank() == 0:
                # A run that has resumed from an older checkpoint may have fewer steps than others, so the new one is excluded.
                others = [path for path in manifest.complete_in(_automatic(accelerator)) if path != Path(saved)]
                for path in others[max(limit, 1) - 1 :]:
                    shutil.rmtree(path, ignore_errors=True)
        return saved

    @functools.wraps(stock_load)
    def load_state(input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        with on_all_ranks():
            if input_dir is None and names.automatic_checkpoint_naming:  # Accelerate would load the highest number
                input_dir = from_rank_0(lambda: manifest.newest_checkpoint(_automatic(accelerator)))
            with only_tensors(config.trust):
                stock_load(input_dir, *args, **kwargs)
        # Accelerate reads this count of micro-steps from the file of a rank's random state. New ranks do not have one, and the
        # count may belong to another accumulation.
        accelerator.step = 0

    accelerator.save_state, accelerator.load_state = save_state, load_state


def _automatic(accelerator: Any) -> Path:
    """Returns the folder in which Accelerate saves numbered checkpoints."""
    return Path(accelerator.project_dir) / "checkpoints"


# ---- loading without running code ------------------------------------------------------------------------------------

#: Classes that DeepSpeed's files need, besides tensors and plain Python types.
_ALLOWED = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


@contextlib.contextmanager
def only_tensors(trust: bool, what: str = "the checkpoint") -> Iterator[None]:
    """Context in which every ``torch.load`` accepts only tensors, plain types and `_ALLOWED`.

    DeepSpeed always loads with ``weights_only=False``. A variable of torch overrides this argument.

    Args:
        trust: If True, the context has no effect.
        what: Start of the error message.

    Raises:
        ConfigError: A file needs other classes or functions.
    """
    if trust:
        yield
        return
    forbids, forces = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = {name: os.environ.pop(name, None) for name in (forbids, forces)}
    os.environ[forces] = "1"
    torch.serialization.add_safe_globals([pkgutil.resolve_name(name) for name in _ALLOWED])
    try:
        yield
    except pickle.UnpicklingError as error:
        raise _refusal(what, error) from None
    finally:
        del os.environ[forces]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def load(path: str, map_location: Any, trust: bool, *, mmap: bool = False) -> Any:
    """``torch.load`` of a checkpoint's file.

    Args:
        path: The file.
        map_location: As for ``torch.load``.
        trust: Whether the file may contain code.
        mmap: Whether tensors of a zip archive are read when they are used, instead of all at once.

    Raises:
        ConfigError: The file needs classes or functions that are not in `_ALLOWED`, is damaged, or is not a file of torch.
    """
    try:
        os.close(regular(path))  # torch would wait for a pipe
    except OSError as error:
        missing = "; a run with another dtype has other names" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{path!r} cannot be read: {(error.strerror or '').lower()}{missing}") from None
    try:
        with only_tensors(trust, repr(path)):
            return torch.load(path, map_location, weights_only=not trust, mmap=mmap and zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise _refusal(repr(path), error) from None


def _refusal(what: str, error: Exception) -> ConfigError:
    if found := re.search(r"GLOBAL ([\w.]+)", str(error)):  # torch's message has the refused name
        return ConfigError(
            f'{what} needs {found[1]}, which is not a tensor and could run code, so it is not loaded; "checkpoint": '
            '{"trust": true} loads it, if you trust its author'
        )
    reason = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return ConfigError(f"{what} cannot be loaded as tensors: {reason.splitlines()[0][:200]}")
