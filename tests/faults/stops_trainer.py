"""A Trainer that is stopped by a signal at one rank, in the folder of the first argument; a second launch resumes.

It evaluates, loads its best model at the end and keeps one checkpoint: none of that may delay the end or remove the save.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments

import hzero
from tests.clients.cells import llama, samples
from tests.clients.config import config_of

torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
folder, resumes = Path(sys.argv[1]), len(sys.argv) > 2
sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
arguments = TrainingArguments(
    output_dir=str(folder),
    deepspeed=config_of("lossless", hzero={"checkpoint": {}}, **sizes),
    per_device_train_batch_size=2,
    learning_rate=5e-3,
    max_grad_norm=0.7,
    num_train_epochs=2,
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=2,
    save_strategy="steps",
    save_steps=2,
    save_total_limit=1,
    load_best_model_at_end=True,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)


class Watch(TrainerCallback):
    """Sends the signal, and says what happens."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2 and dist.get_rank() == 1 and not resumes:
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        if dist.get_rank() == 0:
            print(f"evaluated after {state.global_step}", flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if dist.get_rank() == 0:
            print(f"training ends after {state.global_step}", flush=True)


trainer = Trainer(
    llama(),
    arguments,
    train_dataset=samples(12),
    eval_dataset=samples(4, seed=1),
    callbacks=[Watch(), hzero.StopAndSave()],
)
trainer.train(resume_from_checkpoint=hzero.newest_checkpoint(folder) if resumes else None)
if dist.get_rank() == 0:
    print("after train", flush=True)
dist.destroy_process_group()
