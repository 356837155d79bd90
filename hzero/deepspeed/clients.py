"""Trainer and Accelerate: their saves and loads use complete checkpoints.

Trainer reads a checkpoint's step and batches before it has an engine. It takes the checkpoint with the highest number, even if
it is incomplete (``get_last_checkpoint``). Then it calls ``deepspeed_load_checkpoint``, which loads the tag in ``latest`` of
that folder. When the engine loads, it is too late to choose another checkpoint or accumulation. So both are chosen at the
beginning of ``train``.

Both clients save the random state of each rank in a separate file (``rng_state_3.pth``, ``random_states_3.pkl``). New ranks
have no such file and continue with the seed of the script. Dropout then draws other numbers than in the saved run, as it does
with any other number of ranks. The order of samples does not change, since Accelerate's sampler uses the seed and the epoch.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hzero import manifest
from hzero.calls import attributes
from hzero.comm import blaming
from hzero.config import CheckpointConfig
from hzero.deepspeed.checkpoint import accumulation_for, newest_intact
from hzero.deepspeed.safe_loading import only_tensors
from hzero.errors import first_of_ranks, from_rank_0, of_all_ranks, on_all_ranks
from hzero.manifest import IncompleteError, Manifest, SaveError


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
        # Accelerate reads this count of micro-batches from the file of a rank's random state. New ranks do not have one, and the
        # count may belong to another accumulation.
        accelerator.step = 0

    accelerator.save_state, accelerator.load_state = save_state, load_state


def _automatic(accelerator: Any) -> Path:
    """Returns the folder in which Accelerate saves numbered checkpoints."""
    return Path(accelerator.project_dir) / "checkpoints"
