"""Checkpoints of engines whose block has the key ``"checkpoint"``: whole or absent, for any number of ranks, without code.

DeepSpeed writes and reads its own files, by its own code and under its own names, so every tool of DeepSpeed takes them. It
does so through an object, the engine's checkpoint engine; `CheckpointFiles` is one. A save goes into a hidden folder beside
its place. Each rank hashes what it writes and keeps an error instead of raising it, since the others would wait for it in the
middle of DeepSpeed's collective save. Then the ranks compare: if all files are there, rank 0 writes their sizes and hashes into
the folder (`hzero.manifest`) and gives it its name; otherwise it removes the folder, and all ranks raise one error.

A load compares sizes and hashes first, each rank those of its share of the files, so that all ranks together read the
checkpoint once. Ranks of another number read what `Resharding` makes of the files.

The files are pickles, which may name any function of Python to be called. So a load accepts tensors and plain types only.
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

from hzero.block import KEY
from hzero.codecs.formats import chunk_numel
from hzero.comm import blaming
from hzero.config import CheckpointConfig
from hzero.files import read_text, replacing
from hzero.manifest import (
    NOTE,
    HashedFile,
    IncompleteError,
    Manifest,
    SaveError,
    complete_in,
    hidden,
    location,
    newest_checkpoint,
    notes_in,
    publish,
    reason_of,
    recover,
    without_note,
)
from hzero.validation import ConfigError, attributes, first_of_ranks, from_rank_0, of_all_ranks, on_all_ranks, some

logger = logging.getLogger("hzero")
#: Ends of the names of a rank's two files.
MODEL, OPTIMIZER = "model_states.pt", "optim_states.pt"
_GROUPS, _STATE, _FROZEN = "fp32_flat_groups", "optimizer_state_dict", "frozen_param_fragments"


class CheckpointFiles(TorchCheckpointEngine):  # type: ignore[misc]
    """Writes and reads the files of an engine's checkpoints.

    Args:
        engine: The engine.
        config: The key ``checkpoint`` of its block.

    Raises:
        ConfigError: DeepSpeed's configuration asks for another writer.
    """

    def __init__(self, engine: Any, config: CheckpointConfig) -> None:
        stock = engine.checkpoint_engine
        if type(stock) is not TorchCheckpointEngine:
            raise ConfigError(
                f"{KEY}.checkpoint: found with DeepSpeed's {type(stock).__name__}; expected one of the two"
            )
        self.__dict__.update(vars(stock))
        self.config = config
        self._engine, self._stock_save, self._stock_load = engine, engine.save_checkpoint, engine.load_checkpoint
        self._saving = False
        self._failure: str | None = None
        self._written: dict[str, tuple[int, str]] = {}
        self._resharding: Resharding | None = None
        # The one function that writes past this object, on rank 0.
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
        exclude_frozen_parameters: bool = False,  # Trainer looks for it in the signature
    ) -> Any:
        """``DeepSpeedEngine.save_checkpoint``, whole or not at all. Collective.

        Raises:
            SaveError: A rank could not write. What was there before is still there.
        """
        folder = Path(save_dir or "")
        tag = f"global_step{self._engine.global_steps}" if tag is None else str(tag)
        partial = hidden(folder / tag)
        # Before any rank writes: a complete checkpoint may have the name under which they write.
        from_rank_0(lambda: recover(partial.parent))
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
        """On rank 0: gives what all ranks have written its name, or removes it and says why."""
        failures = [f"{failure} (rank {rank})" for rank, (failure, _) in enumerate(everyones) if failure is not None]
        target = folder / tag
        try:
            if not failures:
                if latest:  # a load that finds nothing of this name takes the newest
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
                publish(target)
        except OSError as error:
            failures = [f"{error.filename or partial}: {error.strerror or error} (rank 0)"]
        if failures:
            if location(target) == target:  # otherwise it is complete, and the next save gives it its name
                shutil.rmtree(partial, ignore_errors=True)
            raise SaveError(
                f"{str(target)!r} could not be saved: {some(failures, 1, '; ')}; earlier checkpoints are unchanged"
            )

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Makes a folder of the checkpoint."""
        self._attempt(path, lambda: os.makedirs(path, exist_ok=exist_ok))

    def save(self, state_dict: Any, path: str) -> None:
        """Writes a file."""
        if self._saving:
            self._attempt(path, lambda: self._write(state_dict, Path(path)))
        else:  # an export of the weights
            super().save(state_dict, path)

    def _write(self, state_dict: Any, path: Path) -> None:
        with HashedFile(path) as file:
            # A zip archive, of which a load maps the parts that it needs. The hash replaces its checksums.
            torch.save(state_dict, file)
            file.flush()
            os.fsync(file.fileno())  # some file systems report only then that they are full
            self._written[path.name] = file.tell(), file.hash.hexdigest()

    def _attempt(self, path: str | os.PathLike[str], action: Callable[[], object]) -> None:
        """While a checkpoint is saved: keeps an error, and does nothing after one."""
        if not self._saving:
            action()
        elif self._failure is None:
            try:
                action()
            except Exception as error:
                self._failure = f"{Path(getattr(error, 'filename2', None) or path).name}: {reason_of(error)}"

    # ---- load -------------------------------------------------------------------------------------------------------

    @on_all_ranks()
    def load_checkpoint(self, load_dir: Any, *args: Any, **kwargs: Any) -> Any:
        """``DeepSpeedEngine.load_checkpoint`` of a complete checkpoint, on any number of ranks. Collective.

        Without a tag it takes that of ``latest`` if it is complete, or was written without the key after the complete ones;
        otherwise the newest complete one.

        Raises:
            ConfigError: It is incomplete, holds code, other parameters or another optimizer's states, or no accumulation makes
                its batch.
        """
        call = inspect.signature(self._stock_load).bind(load_dir, *args, **kwargs)
        call.apply_defaults()
        what = call.arguments
        folder, resumes = Path(load_dir), what["load_optimizer_states"] and not what["load_module_only"]
        tag, notes = from_rank_0(lambda: self._candidates(folder, what["tag"] and str(what["tag"])))
        if notes:
            note = newest_intact(notes, self.config.verify)
            tag = os.path.relpath(note.folder, folder)
            if resumes and self.config.same_batch:
                self._keep_batch(note)
        elif tag is None:
            return self._stock_load(load_dir)  # says that there is nothing
        what["tag"] = tag
        engine, name = deepspeed.runtime.engine, "get_fp32_state_dict_from_zero_checkpoint"
        resharding = self._other_sharding(folder / tag, resumes)
        # Stock loads weights alone from the tag that `latest` names (deepspeedai/DeepSpeed#8499).
        weights = functools.partial(getattr(engine, name), tag=tag)
        values: list[tuple[Any, str, Any]] = [(engine, name, weights), (self, "_resharding", resharding)]
        if resharding is not None:
            model = str(resharding.path(0, MODEL))  # this rank may have written none
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
        """On rank 0: the notes of the checkpoints that may be loaded, best first, or the tag of one that has no note."""
        named, changed = None, 0.0
        with contextlib.suppress(ConfigError, OSError):
            if latest := read_text(folder / "latest").strip():
                named, changed = location(folder / latest), (folder / "latest").stat().st_mtime
        place = location(folder / tag) if tag is not None else named
        if tag is None:
            complete = [note for path, note in complete_in(folder).items() if note.folder == path]
            folders = [note.folder for note in complete]
            if named in folders:
                return None, complete[folders.index(named) :]
            without = named is not None and not (named / NOTE).exists() and any(named.glob(f"*{MODEL}"))
            # DeepSpeed names a checkpoint when it is written, so the later of the two is the newer checkpoint.
            if not without or any(note.written > changed for note in complete):
                if without:
                    logger.warning("hzero: %r was written without the key checkpoint; skipped", str(named))
                if not complete and any(folder.glob(f"*/{NOTE}")):
                    raise IncompleteError(f"checkpoint: {str(folder)!r} holds no complete checkpoint{_beside(folder)}")
                if complete or named is None:
                    return None, complete
        assert place is not None
        if (place / NOTE).exists():
            return None, [Manifest.read(place)]
        if not place.exists():
            raise IncompleteError(f"checkpoint: no folder {str(place)!r}{_beside(folder)}")
        logger.warning("hzero: %r was written without the key checkpoint: nothing is compared", str(place))
        return os.path.relpath(place, folder), []

    def _keep_batch(self, note: Manifest) -> None:
        """Adapts the accumulation, so that a step has as many samples as a step of the checkpoint's run.

        Raises:
            ConfigError: No accumulation does.
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
            shared = accelerate.GradientState._shared_state  # which counts micro-steps in Accelerate's loops
            if shared and shared["plugin_kwargs"].get("num_steps", 1) == before:
                shared["plugin_kwargs"]["num_steps"] = accumulation

    def _other_sharding(self, folder: Path, resumes: bool) -> Resharding | None:
        """What reads a checkpoint of another sharding as if these ranks had written it; None for one of theirs."""
        engine, optimizer = self._engine, self._engine.optimizer
        written = len(list(folder.glob(f"*zero_pp_rank_*_mp_rank_00_{OPTIMIZER}")))
        # With tensor groups or stages DeepSpeed refuses other ranks; without an optimizer it loads on any.
        if engine.mp_world_size > 1 or not hasattr(optimizer, "fp16_groups"):
            return None
        group = optimizer.dp_process_group
        sharding = Sharding.of(dist.get_world_size(group), engine._get_zero_param_shapes())
        groups = [optimizer.sub_group_to_group_id[index] for index in range(len(optimizer.fp16_groups))]
        read = functools.partial(load, map_location="cpu", trust=self.config.trust)
        found = Resharding(folder, sharding, dist.get_rank(group), groups, read)
        if resumes and written not in (0, found.old.world_size):  # DeepSpeed would begin with a new optimizer
            raise IncompleteError(
                f"checkpoint: {str(folder)!r} is incomplete: it has {written} of {found.old.world_size} files *{OPTIMIZER}"
            )
        return None if found.old == sharding else found


# ---- another sharding -----------------------------------------------------------------------------------------------------
#
# ZeRO-3 cuts every parameter, and every state of the optimizer, into as many equal parts as there are ranks, in the order of
# ranks; a rank's file holds its parts one after the other, in the order of `param_shapes`. So the part of a rank of this world is
# a run of elements that few neighbouring files hold, at the same places for all parameters. They are mapped, and no more than
# these elements is read: all ranks together read the checkpoint once, and nothing is written.
#
# What DeepSpeed loads is built here, not loaded here: its own strict load does the rest, so parameter groups keep their own
# hyperparameters.
#
# DeepSpeed's universal checkpoints would be no simpler. ``ds_to_universal`` has to run between the two trainings and writes a
# second copy, one folder per parameter and state. The load needs ``load_universal`` in the configuration, gives all groups the
# hyperparameters of the first one, restores Adam's two moments only (stage3.py), and reads pickles without ``weights_only``.


@dataclass(frozen=True)
class Sharding:
    """How ranks have cut parameters.

    Attributes:
        world_size: Ranks.
        counts: Elements of every parameter.
        places: For every parameter its sub-group, and where its part begins in the sub-group's flat tensor.
        sizes: Elements of the flat tensors.
    """

    world_size: int
    counts: dict[str, int]
    places: dict[str, tuple[int, int]]
    sizes: list[int]

    @classmethod
    def of(cls, world_size: int, shapes: Sequence[dict[str, Sequence[int]]]) -> Sharding:
        """The sharding of DeepSpeed's sub-groups, of which each gives the shapes of its parameters by name, in their order."""
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
    """Fills a rank's part of a parameter from the parts of another world; padding stays as it is.

    Args:
        into: The part, flat.
        count: Elements of the parameter.
        old_world: Ranks of the other world.
        world_size: Ranks of this one.
        rank: This rank.
        source: The flat part of a rank of the other world.
    """
    size, step = chunk_numel(count, world_size), chunk_numel(count, old_world)
    first, last = min(rank * size, count), min((rank + 1) * size, count)
    for old in range(first // step, -(-last // step)):
        begin, end = max(first, old * step), min(last, (old + 1) * step)
        into[begin - first : end - first] = source(old)[begin - old * step : end - old * step]


class Resharding:
    """The two files that this rank would have written of a checkpoint of another sharding.

    Args:
        folder: The checkpoint.
        sharding: Of this world.
        rank: This rank.
        param_groups: For every sub-group of this world its parameter group.
        load: Loads a file by its path; with ``mmap=True`` its tensors are read where they are used.

    Attributes:
        old: The sharding of the checkpoint.

    Raises:
        ConfigError: The checkpoint is of other parameters.
    """

    def __init__(
        self, folder: Path, sharding: Sharding, rank: int, param_groups: Sequence[int], load: Callable[..., Any]
    ) -> None:
        self._folder, self._sharding, self._rank, self._param_groups = folder, sharding, rank, list(param_groups)
        self._load, self._files = load, dict[tuple[int, str], Any]()
        model = self._file(0, MODEL)  # all ranks read this one; other files may be of a larger world
        self.old = Sharding.of(int(model["dp_world_size"]), model["param_shapes"])
        self._first = rank % self.old.world_size  # so that not all ranks read the same large file
        missing = sorted(self.old.counts.items() ^ sharding.counts.items())
        if missing:
            names = some(list(dict.fromkeys(name for name, _ in missing)), 4)
            raise ConfigError(f"checkpoint: {str(folder)!r} holds other parameters than the model: {names}")

    def path(self, rank: int, kind: str) -> Path:
        """The file that a rank of the other world has written; files of bf16 runs have a prefix of their own."""
        found = sorted(self._folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_{kind}"))
        if len(found) != 1:
            raise ConfigError(
                f"checkpoint: {str(self._folder)!r} has {len(found)} files *zero_pp_rank_{rank}_mp_rank_00_{kind}"
            )
        return found[0]

    def load(self, kind: str) -> Any:
        """What this rank's file of a kind would hold."""
        return self._model() if kind == MODEL else self._optimizer()

    def _file(self, rank: int, kind: str) -> Any:
        if (rank, kind) not in self._files:
            self._files[rank, kind] = self._load(str(self.path(rank, kind)), mmap=True)
        return self._files[rank, kind]

    def _part(self, count: int, dtype: torch.dtype, source: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """This rank's part of a parameter; see `cut`."""
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
        """Elements of a tensor of a sub-group, as a rank of the other world has written it."""
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
                    states[index].setdefault(key, value)  # of the whole sub-group, such as the step
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
    """Of a sub-group the masters (None), and the states of the optimizer by name."""
    return {None: zero[_GROUPS][index], **zero[_STATE]["state"].get(index, {})}


# ---- what all ranks decide together ----------------------------------------------------------------------------------

#: Checkpoints whose files this process has compared with their hashes, with the times of their notes.
_compared: set[tuple[Path, float]] = set()


def newest_intact(candidates: Sequence[Manifest], verify: bool) -> Manifest:
    """The first of some checkpoints whose files are as they were written, the same on all ranks. Collective.

    Args:
        candidates: Their notes, the same on all ranks.
        verify: Whether to compare hashes; otherwise sizes.

    Raises:
        IncompleteError: None is.
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
    """The end of a message that names the newest complete checkpoint in a folder, or else around it."""
    for place in (folder, folder.parent):
        for path in complete_in(place):
            if path not in (folder, *tried):
                return f"; the newest complete one is {str(path)!r}"
    return "; there is no complete one beside it"


def accumulation_for(note: Manifest, before: int, batch: int, micro_batch: int) -> int:
    """The accumulation that makes a step as large as those of a checkpoint's run; rank 0 says so.

    Args:
        note: Of the checkpoint.
        before: The accumulation in effect.
        batch: Samples of all ranks in a step with it.
        micro_batch: Samples of a rank in a micro-step.

    Raises:
        ConfigError: No accumulation does.
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
# Trainer reads a checkpoint's step and batches before it has an engine, takes the checkpoint with the highest number whether or
# not it is complete (``get_last_checkpoint``), and then calls ``deepspeed_load_checkpoint``, which loads the tag that ``latest``
# names in that folder. When the engine loads, it is too late to choose another checkpoint or accumulation, so both are chosen
# at the beginning of ``train``.
#
# Each rank's random state is a file of its own in both clients (``rng_state_3.pth``, ``random_states_3.pkl``), without which
# ranks that are new go on with the seed of the script. Dropout then draws other numbers than in the run that saved, as it would
# from the start on another number of ranks. The order of samples does not depend on it: Accelerate's sampler is seeded by the
# seed and the epoch.


def follow_trainer(trainer: Any, config: CheckpointConfig) -> None:
    """Makes ``trainer.train`` choose a complete checkpoint and keep its batch, and its saves fail on all ranks alike.

    Args:
        trainer: A ``transformers.Trainer``, or what is derived from it.
        config: The key ``checkpoint``.
    """
    stock_train, stock_rng = trainer.train, trainer._save_rng_state

    @functools.wraps(stock_train)
    def train(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        with on_all_ranks():
            if resume_from_checkpoint:
                notes = from_rank_0(lambda: _candidates_of_trainer(trainer.args.output_dir, resume_from_checkpoint))
                if notes:  # without a note, the engine says what it is
                    note = newest_intact(notes, config.verify)
                    resume_from_checkpoint = str(note.folder.parent)
                    if config.same_batch:
                        _keep_batch_of_trainer(trainer, note)
        return stock_train(resume_from_checkpoint, *args, **kwargs)

    @functools.wraps(stock_rng)
    def save_rng_state(output_dir: str) -> None:
        # The last files of other ranks than 0. Rank 0 then writes Trainer's state, and removes older checkpoints.
        save_together(output_dir, lambda: stock_rng(output_dir))
        save_together(output_dir, lambda: _note_files_beside(Path(output_dir)))

    trainer.train, trainer._save_rng_state = train, save_rng_state


def save_together(place: str, save: Callable[[], object]) -> None:
    """Calls ``save`` on every rank. Collective.

    Args:
        place: The folder of what is saved, for the message.
        save: Writes this rank's files, without collectives.

    Raises:
        SaveError: On all ranks, if one of them could not write.
    """
    failure = None
    try:
        save()
    except Exception as error:  # of many kinds: torch, safetensors and tokenizers have their own
        failure = f"{reason_of(error)} (rank {dist.get_rank()})"
    with blaming():
        failure = first_of_ranks(failure)
    if failure is not None:
        raise of_all_ranks(SaveError(f"{place!r} could not be saved: {failure}; earlier checkpoints are unchanged"))


def _note_files_beside(folder: Path) -> None:
    if dist.get_rank() == 0 and (note := max(notes_in(folder), key=lambda note: note.written, default=None)):
        files = (*folder.glob("rng_state*.pth"), *folder.glob("scheduler.pt"))
        note.model_copy(update={"beside": {file.name: file.stat().st_size for file in files}}).write()


def _candidates_of_trainer(output_dir: str, asked: Any) -> list[Manifest]:
    """The notes of the checkpoints from which Trainer may resume, best first.

    One that is incomplete gives way to the newest complete one if Trainer has chosen it, or a script by ``get_last_checkpoint``:
    then it has the highest number in its folder.
    """
    from transformers.trainer_utils import get_last_checkpoint

    folder = Path(output_dir) if asked is True else Path(asked).parent
    complete, last = complete_in(folder), get_last_checkpoint(str(folder)) if folder.is_dir() else None
    newest = without_note(folder, complete)
    if asked is not True and Path(asked) != Path(last or ""):
        complete = {path: note for path, note in complete.items() if path == Path(asked)}
    elif last is not None and not complete and newest is None:
        raise IncompleteError(f"resume_from_checkpoint: {str(folder)!r} holds no complete checkpoint")
    elif last is not None and newest == Path(last):
        return []
    return list(complete.values())


def _keep_batch_of_trainer(trainer: Any, note: Manifest) -> None:
    """Adapts Trainer's accumulation, as `CheckpointFiles` does that of other loops."""
    args, before = trainer.args, trainer.args.gradient_accumulation_steps
    # DeepSpeed, whose number the note has, counts every rank of AutoTP's tensor groups.
    batch = trainer.get_total_train_batch_size(args) * getattr(trainer, "get_tp_size", lambda: 1)()
    if batch == note.batch:
        return
    accumulation = accumulation_for(note, before, batch, args.per_device_train_batch_size)
    config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    config["gradient_accumulation_steps"] = args.gradient_accumulation_steps = accumulation
    if "train_batch_size" in config:
        config["train_batch_size"] = note.batch
    if trainer.accelerator.gradient_accumulation_steps == before:  # in some releases Trainer leaves it at 1
        trainer.accelerator.gradient_accumulation_steps = accumulation


def follow_accelerator(accelerator: Any, config: CheckpointConfig) -> None:
    """Makes ``load_state`` take complete checkpoints, run no code, and begin a window of accumulation on all ranks alike.

    And makes ``save_state`` remove checkpoints beyond ``total_limit`` after it has saved, where Accelerate does so before.

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
                # Of a run that has gone back, the new one has fewer steps than older ones.
                others = [path for path in complete_in(_automatic(accelerator)) if path != Path(saved)]
                for path in others[max(limit, 1) - 1 :]:
                    shutil.rmtree(path, ignore_errors=True)
        return saved

    @functools.wraps(stock_load)
    def load_state(input_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        with on_all_ranks():
            if input_dir is None and names.automatic_checkpoint_naming:  # Accelerate takes the highest number
                input_dir = from_rank_0(lambda: newest_checkpoint(_automatic(accelerator)))
            with only_tensors(config.trust):
                stock_load(input_dir, *args, **kwargs)
        # Accelerate reads this count of micro-steps from the file of a rank's random state, which new ranks do not have; and
        # it is that of another accumulation.
        accelerator.step = 0

    accelerator.save_state, accelerator.load_state = save_state, load_state


def _automatic(accelerator: Any) -> Path:
    """Where Accelerate saves by numbers."""
    return Path(accelerator.project_dir) / "checkpoints"


# ---- loading without running code ------------------------------------------------------------------------------------

#: What DeepSpeed's own files need beyond tensors and Python's plain types.
_ALLOWED = (
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


@contextlib.contextmanager
def only_tensors(trust: bool, what: str = "the checkpoint") -> Iterator[None]:
    """Makes every ``torch.load`` accept nothing but tensors, plain types and `_ALLOWED`, whatever its caller asks for.

    DeepSpeed asks for ``weights_only=False`` wherever it loads; torch's own variable overrules it.

    Args:
        trust: True changes nothing.
        what: Begins the error.

    Raises:
        ConfigError: A file needs more.
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
        trust: Whether it may hold more than tensors.
        mmap: Whether tensors of a zip archive are read where they are used, and not all at once.

    Raises:
        ConfigError: It needs more than `_ALLOWED`, is damaged, or is no file of torch.
    """
    if not os.path.isfile(path):  # torch would wait for a pipe
        raise ConfigError(f"{path!r} is missing, as after a run in another type of weights, or no regular file")
    try:
        with only_tensors(trust, repr(path)):
            return torch.load(path, map_location, weights_only=not trust, mmap=mmap and zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise _refusal(repr(path), error) from None


def _refusal(what: str, error: Exception) -> ConfigError:
    if found := re.search(r"GLOBAL ([\w.]+)", str(error)):  # as torch names what it refuses
        return ConfigError(
            f'{what} needs {found[1]}, which is no tensor and could run code, so it is not loaded; "checkpoint": '
            '{"trust": true} loads it all the same, if you trust whoever wrote it'
        )
    reason = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return ConfigError(f"{what} cannot be loaded as tensors: {reason.splitlines()[0][:200]}")
