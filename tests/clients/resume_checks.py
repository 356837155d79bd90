"""Trainings that resume on other ranks: 4, then 2, then 6. Run by test_resume.py once on each world.

The four ranks also train to the end. What all show is compared with that.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import Trainer

import hzero
from tests.clients.accelerate_checks import Loop
from tests.clients.cells import llama, reset
from tests.clients.config import config_of
from tests.clients.trainer_checks import trainer_of
from tests.deepspeed.checkpoint_checks import small_disk
from tests.deepspeed.training import assert_losses

#: Samples in a step on every world, with micro-batches of one; steps in all, and the first and last of each world.
BATCH, STEPS, PARTS = 12, 6, {4: (0, 2), 2: (2, 4), 6: (4, 6)}
#: None of them loses anything, so that losses are equal.
PRESETS = {4: "fit", 2: "zero3", 6: "zero1"}
#: Of losses, relative: sums have another order on other ranks.
TOLERANCE = 2e-5


def _folder(name: str) -> Path:
    return Path(os.environ["HZERO_RESUME_FOLDER"]) / name


def _config(preset: str, accumulation: int | str, micro_batch: int | str = 1) -> dict[str, Any]:
    block = {"checkpoint": {}, "topology": "discover"}
    sizes = {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": accumulation}
    return config_of(preset, hzero=block, **sizes)


def _compare(name: str, losses: list[float], first: int, last: int) -> None:
    """Compares losses of steps ``first`` to ``last`` with those of the run without an interruption, which it writes first."""
    file = _folder(f"{name}.json")
    if not file.exists():
        assert (first, last) == (0, STEPS)
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_text(json.dumps(losses))
        dist.barrier()
        assert losses[-1] < losses[0] - 0.1
        return
    assert_losses(losses, json.loads(file.read_text())[first:last], TOLERANCE, f"losses of {name}")


def _damage(checkpoint: Path) -> None:
    """Cuts off a file, as a job does that dies while it writes."""
    if dist.get_rank() == 0:
        os.truncate(next(checkpoint.rglob("*rank_0*optim_states.pt")), 99)
    dist.barrier()


# ---- Trainer ---------------------------------------------------------------------------------------------------------


def _trainer(folder: Path, last: int, preset: str, accumulation: int = 3, **changes: Any) -> Trainer:
    saves = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": accumulation, "max_steps": STEPS}
    config = {**_config(preset, "auto", "auto"), "train_batch_size": "auto"}
    config["optimizer"]["params"]["lr"] = "auto"
    arguments = {"lr_scheduler_type": "linear", **sizes, **saves, **changes}
    return trainer_of(config, folder, callbacks=[_StopAt(last)], rows=STEPS * BATCH, **arguments)


class _StopAt(hzero.StopAndSave):
    """Ends a training after a step, as a signal would, and lets the check continue."""

    def __init__(self, step: int) -> None:
        super().__init__(signals=())
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step < state.max_steps and dist.get_rank() == dist.get_world_size() - 1:
            self._remember(10, None)
        super().on_step_end(args, state, control, **kwargs)

    def _leave(self) -> None:  # type: ignore[override]
        """The process stays."""


def check_trainer_goes_on() -> None:
    """Saves every step, is stopped, and resumes from the newest complete checkpoint, shuffled as the others."""
    world, folder = dist.get_world_size(), _folder("trainer")

    def losses(trainer: Trainer, first: int) -> list[float]:
        found = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
        trainer.model_wrapped.destroy()
        reset()
        return [found[step] for step in sorted(found) if step > first]

    def kept() -> list[str]:
        dist.barrier()
        return sorted(path.name for path in folder.glob("checkpoint-*"))

    if world == 4:
        whole = _trainer(_folder("whole"), STEPS, PRESETS[4], save_strategy="no")
        whole.train()
        _compare("Trainer", losses(whole, 0), 0, STEPS)
        blocked = folder / "checkpoint-3" / "rng_state_2.pth"  # which rank 2 cannot write then
        if dist.get_rank() == 0:
            blocked.mkdir(parents=True)
        trainer = _trainer(folder, STEPS, PRESETS[4], save_total_limit=3)  # it counts that folder
        with pytest.raises(hzero.SaveError, match=r"checkpoint-3' could not be saved: .*rank 2"):
            trainer.train()
        _compare("Trainer", losses(trainer, 0), 0, 3)
        assert kept() == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
        assert hzero.newest_checkpoint(folder) == str(folder / "checkpoint-2")
        return
    if world == 2:
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "checkpoint-3")
        _damage(folder / "checkpoint-2")
        assert hzero.newest_checkpoint(folder) == str(folder / "checkpoint-1")
        trainer = _trainer(folder, 4, PRESETS[2], 1)  # six micro-batches are needed
        trainer.train(resume_from_checkpoint=True)
        assert trainer.args.gradient_accumulation_steps == 6
        _compare("Trainer", losses(trainer, 1), 1, 4)
        assert kept() == ["checkpoint-3", "checkpoint-4"]
        return
    if dist.get_rank() == 0:
        shutil.copytree(folder / "checkpoint-4", folder / "checkpoint-5")
        (folder / "checkpoint-5" / "trainer_state.json").unlink()  # killed before Trainer had written it
    dist.barrier()
    trainer = _trainer(folder, 6, PRESETS[6], 2)
    # A script has taken it by get_last_checkpoint.
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-5"))
    assert trainer.args.gradient_accumulation_steps == 2
    _compare("Trainer", losses(trainer, 4), 4, 6)


# ---- Accelerate ------------------------------------------------------------------------------------------------------


def check_accelerate_goes_on() -> None:
    """``save_state`` and ``load_state``; the loop skips the batches that have been trained."""
    world, folder = dist.get_world_size(), _folder("accelerate")
    first, last = PARTS[world]
    accumulation, model = (3, llama) if world == 4 else (1, functools.partial(llama, seed=1))
    loop = Loop(_config(PRESETS[world], accumulation), model, STEPS * BATCH, 1, accumulation)
    if first:
        newest = hzero.newest_checkpoint(folder)
        assert newest == str(folder / f"step_{first}")
        loop.accelerator.load_state(newest)
        assert loop.accelerator.gradient_accumulation_steps == BATCH // world
    losses = loop.train(first, last)
    loop.accelerator.save_state(str(folder / f"step_{last}"))
    if world == 4:
        losses += loop.train(last, STEPS)
    _compare("Accelerate", losses, first, first + len(losses))
    if world == 4:
        _keeps_one_by_numbers(loop.accelerator)
    loop.end()


def _keeps_one_by_numbers(accelerator: Any) -> None:
    """With a limit of one, a save that fails leaves the checkpoint before; Accelerate would have removed it first."""
    names, folder = accelerator.project_configuration, _folder("numbered") / "checkpoints"
    names.project_dir, names.automatic_checkpoint_naming = str(folder.parent), True
    names.total_limit, names.iteration = 1, 0
    accelerator.save_state()
    with small_disk(2, 500), pytest.raises(hzero.SaveError, match=r"\(rank 2\)"):
        accelerator.save_state()
    assert hzero.newest_checkpoint(folder) == str(folder / "checkpoint_0")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "checkpoint_1")
    dist.barrier()
    accelerator.save_state()
    dist.barrier()
    assert [path.name for path in folder.iterdir()] == ["checkpoint_1"]
    accelerator.load_state()  # the newest complete one
    names.automatic_checkpoint_naming = False


# ---- a plain script --------------------------------------------------------------------------------------------------
