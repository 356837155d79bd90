"""Accelerate against plain ZeRO-3. Run by test_clients.py on 4 ranks."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, PartialState, skip_first_batches
from accelerate.utils import DummyOptim
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from tests.clients.cells import Run, assert_both, assert_equal, assert_trains, llama, mean, samples
from tests.clients.config import ACCUMULATION, BATCH, STEPS, config_of
from tests.deepspeed.training import shared_folder
from tests.ranks import LONG


class Loop:
    """A training loop as Accelerate's users write it, with ``accumulate`` and a prepared loader.

    Args:
        config: DeepSpeed configuration, or the path of a file with it.
        model: What makes the model, once Accelerate knows the configuration.
        rows: Samples of the loader.
        batch_size: Samples of a rank's batch.
        accumulation: Micro-batches of a step.
    """

    def __init__(
        self,
        config: dict[str, Any] | str,
        model: Any = llama,
        rows: int = STEPS * ACCUMULATION * BATCH * 4,
        batch_size: int = BATCH,
        accumulation: int = ACCUMULATION,
    ) -> None:
        PartialState(cpu=True)  # else Accelerate sees no GPU, and one process; cpu=True of Accelerator would train DDP
        plugin = DeepSpeedPlugin(hf_ds_config=config)
        self.accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=accumulation)
        made = model()
        tensors = [{name: torch.tensor(row[name]) for name in row} for row in samples(rows)]
        loader = DataLoader(tensors, batch_size=batch_size)
        self.engine, self.optimizer, self.loader = self.accelerator.prepare(
            made, DummyOptim([param for param in made.parameters() if param.requires_grad]), loader
        )
        assert self.accelerator.num_processes == dist.get_world_size()
        self.run = Run()

    def train(self, first: int = 0, last: int = STEPS) -> list[float]:
        """Losses of the optimizer steps ``first`` to ``last``; the batches before them are skipped."""
        accumulation, losses, window = self.accelerator.gradient_accumulation_steps, [], 0.0
        for micro, batch in enumerate(skip_first_batches(self.loader, first * accumulation), start=1):
            with self.accelerator.accumulate(self.engine):
                loss = self.engine(**batch).loss
                window += mean(loss) / accumulation
                self.accelerator.backward(loss)
                assert self.accelerator.sync_gradients == (micro % accumulation == 0)
                if self.accelerator.sync_gradients:
                    self.run.norms.append(float(self.accelerator.clip_grad_norm_(self.engine.parameters(), 1.0)))
                    losses.append(window)
                    window = 0.0
                self.optimizer.step()
                self.optimizer.zero_grad()
            if len(losses) == last - first:
                break
        self.run.losses += losses
        return losses

    def end(self) -> Run:
        """What the loop has shown."""
        return self.run.end(self.engine)


def trained(preset: str | None, model: Any = llama) -> Run:
    """One training."""
    loop = Loop(config_of(preset), model)
    loop.train()
    return loop.end()


@functools.cache
def stock() -> Run:
    """Plain ZeRO-3."""
    return trained(None)


def check_accelerate_plugin_and_accumulate() -> None:
    """A DeepSpeedPlugin with the configuration as a dictionary."""
    assert_equal(trained("fit"), stock())


def check_accelerate_configuration_file() -> None:
    """A DeepSpeedPlugin with the path of a file, which has ``"auto"`` values."""
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"), "auto")
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    file = shared_folder() / "ds_config.json"
    if dist.get_rank() == 0:
        file.write_text(json.dumps(config_of("topo", **auto, zero_optimization=dict.fromkeys(sizes, "auto"))))
    dist.barrier()
    loop = Loop(str(file))
    loop.train()
    assert_trains(loop.end(), stock())


@LONG
def check_accelerate_from_pretrained_under_zero_init() -> None:
    """``from_pretrained`` partitions the model while it loads, before hzero sees it."""
    folder = shared_folder()
    if dist.get_rank() == 0:
        llama().save_pretrained(folder)
    dist.barrier()

    def loaded(folder: Path = folder) -> LlamaForCausalLM:
        model = LlamaForCausalLM.from_pretrained(folder)
        assert all(hasattr(param, "ds_id") for param in model.parameters()), "zero.Init was not in effect"
        return model

    assert_both(trained, stock(), model=loaded)
