"""What the block's key ``"checkpoint"`` changes in Trainer and Accelerate, beyond the engine's own save and load.

Trainer reads a checkpoint's step and batches before it has an engine, takes the checkpoint with the highest number whether or
not it is complete (``get_last_checkpoint``), and then calls ``deepspeed_load_checkpoint``, which loads the tag that ``latest``
names in that folder. When the engine loads, it is too late to choose another checkpoint or accumulation, so both are chosen
at the beginning of ``train``.

Each rank's random state is a file of its own in both clients (``rng_state_3.pth``, ``random_states_3.pkl``), without which
ranks that are new go on with the seed of the script. Dropout then draws other numbers than in the run that saved, as it would
from the start on another number of ranks. The order of samples does not depend on it: Accelerate's sampler is seeded by the
seed and the epoch.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hzero.comm import blaming
from hzero.config import CheckpointConfig
from hzero.deepspeed.checkpoint import accumulation_for, newest_intact, only_tensors
from hzero.manifest import IncompleteError, Manifest, SaveError, complete_in, newest_checkpoint, notes_in, without_note
from hzero.validation import from_rank_0, of_all_ranks, on_all_ranks

# ---- Trainer ---------------------------------------------------------------------------------------------------------


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
                notes = from_rank_0(lambda: _candidates(trainer.args.output_dir, resume_from_checkpoint))
                if notes:  # without a note, the engine says what it is
                    note = newest_intact(notes, config.verify)
                    resume_from_checkpoint = str(note.folder.parent)
                    if config.same_batch:
                        _keep_batch(trainer, note)
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
    failures: list[str | None] = [None] * dist.get_world_size()
    failure = None
    try:
        save()
    except Exception as error:  # of many kinds: torch, safetensors and tokenizers have their own
        failure = f"{getattr(error, 'strerror', None) or error} (rank {dist.get_rank()})"
    with blaming():
        dist.all_gather_object(failures, failure)
    for failure in filter(None, failures):
        raise of_all_ranks(SaveError(f"{place!r} could not be saved: {failure}; earlier checkpoints are unchanged"))


def _note_files_beside(folder: Path) -> None:
    if dist.get_rank() == 0 and (note := max(notes_in(folder), key=lambda note: note.written, default=None)):
        files = (*folder.glob("rng_state*.pth"), *folder.glob("scheduler.pt"))
        note.model_copy(update={"beside": {file.name: file.stat().st_size for file in files}}).write()


def _candidates(output_dir: str, asked: Any) -> list[Manifest]:
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


def _keep_batch(trainer: Any, note: Manifest) -> None:
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


# ---- Accelerate ------------------------------------------------------------------------------------------------------


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
        limit, names.total_limit = names.total_limit, None
        try:
            saved = stock_save(*args, **kwargs)
        finally:
            names.total_limit = limit
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
