"""Lightning's Trainer and Fabric against plain ZeRO-3. Run by test_clients.py on 4 ranks.

Lightning allows DeepSpeed on CUDA devices alone; `_on_processors` lets processors pass.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import lightning
import torch
import torch.distributed as dist
from lightning.fabric.accelerators import CPUAccelerator as OfFabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import DeepSpeedStrategy as FabricStrategy
from lightning.pytorch.accelerators import CPUAccelerator as OfTrainer
from lightning.pytorch.strategies import DeepSpeedStrategy

import hzero
from hzero.manifest import NOTE
from tests.clients.cells import Run, assert_both, assert_equal, batches, llama, mean, samples
from tests.clients.config import ACCUMULATION, BATCH, LR, STEPS, config_of
from tests.deepspeed.training import shared_folder
from tests.ranks import LONG


@contextlib.contextmanager
def _on_processors() -> Iterator[None]:
    """DeepSpeed's strategies accept processors."""
    logging.getLogger("lightning").setLevel(logging.ERROR)
    with contextlib.ExitStack() as stack:
        for package, accelerator in (("fabric", OfFabric), ("pytorch", OfTrainer)):
            module = f"lightning.{package}.strategies.deepspeed"
            stack.enter_context(mock.patch(f"{module}.CUDAAccelerator", accelerator))
            stack.enter_context(mock.patch(f"{module}._validate_device_index_selection"))
        initialize = deepspeed.initialize
        # The arguments are the index of a device, which processors do not have.
        stack.enter_context(mock.patch.object(deepspeed, "initialize", lambda args, **keys: initialize(**keys)))
        yield


def _config(preset: str | None) -> dict[str, Any]:
    """The configuration without the keys that Lightning fills."""
    config = config_of(preset, hzero={"checkpoint": {}})
    return {key: value for key, value in config.items() if key not in ("optimizer", "gradient_accumulation_steps")}


def module_of(run: Run) -> Any:
    """A LightningModule that notes its losses and norms in ``run``."""

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=0.0)

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            run.losses.append(mean(loss))
            return loss

        def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
            self.log("eval_loss", self.model(**batch).loss, sync_dist=True)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            norm = self.trainer.strategy.deepspeed_engine.get_global_grad_norm()
            if norm is not None:
                run.norms.append(float(norm))

    return Module()


def loader_of(count: int, size: int, seed: int = 0) -> Any:
    """A loader of samples; Lightning shares them among the ranks."""
    rows = [{name: torch.tensor(row[name]) for name in row} for row in samples(count, seed)]
    return torch.utils.data.DataLoader(rows, batch_size=size)


def trained(preset: str | None, load: Path | None = None, save: Path | None = None, steps: int = STEPS) -> Run:
    """A training with Lightning's Trainer, until ``steps`` steps."""
    run = Run()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=DeepSpeedStrategy(config=_config(preset)),
        plugins=[TorchElasticEnvironment()],
        max_steps=steps,
        accumulate_grad_batches=ACCUMULATION,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=str(shared_folder()),
    )
    loaders = loader_of(STEPS * ACCUMULATION * BATCH * 4, BATCH), loader_of(32, 4, seed=1)
    trainer.fit(module_of(run), *loaders, ckpt_path=str(load) if load else None)
    if "eval_loss" in trainer.callback_metrics:
        run.evaluations.append(float(trainer.callback_metrics["eval_loss"]))
    if save is not None:
        trainer.save_checkpoint(str(save))
    return run.end(trainer.strategy.deepspeed_engine)


@functools.cache
def stock() -> Run:
    """Plain ZeRO-3."""
    return trained(None)


@_on_processors()
def check_lightning_trainer() -> None:
    """A DeepSpeedStrategy with the configuration as a dictionary; accumulation, clipping and validation."""
    assert_both(trained, stock())


@LONG
@_on_processors()
def check_lightning_checkpoints() -> None:
    """Written under hzero and read under plain ZeRO-3, and the reverse: both continue equally. Lightning restarts the data."""
    resumed: dict[str | None, Run] = {}
    for writer, reader in (("fit", None), (None, "fit")):
        file = shared_folder() / "half.ckpt"
        trained(writer, save=file, steps=STEPS // 2)
        dist.barrier()
        assert (hzero.newest_checkpoint(file.parent) == str(file)) and (file / "checkpoint" / NOTE).exists() == bool(
            writer
        )
        resumed[reader] = trained(reader, load=file)
    assert_equal(resumed["fit"], resumed[None])
    assert len(resumed[None].losses) == STEPS // 2 * ACCUMULATION
    assert resumed[None].losses[0] < stock().losses[0] - 0.1, "the checkpoint was not read"


def fabricated(preset: str | None) -> Run:
    """A training with Fabric, which calls the step of the ZeRO optimizer and never that of the engine."""
    fabric = lightning.Fabric(
        accelerator="cpu",
        devices=4,
        strategy=FabricStrategy(config=_config(preset)),
        plugins=[TorchElasticEnvironment()],
    )
    fabric.launch()
    model = llama()
    engine, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0))
    run, losses = Run(), []
    for micro, batch in enumerate(batches(STEPS * ACCUMULATION)):
        loss = engine(**batch).loss
        losses.append(mean(loss))
        fabric.backward(loss / ACCUMULATION)
        if micro % ACCUMULATION == ACCUMULATION - 1:
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append(sum(losses[-ACCUMULATION:]) / ACCUMULATION)
            run.norms.append(float(optimizer._global_grad_norm))
    return run.end(fabric.strategy.model)


@LONG
@_on_processors()
def check_lightning_fabric() -> None:
    """Fabric hands DeepSpeed an optimizer of torch."""
    assert_both(fabricated, fabricated(None))
