"""torchtitan's trainer and its Llama on CPUs: feature_checks.py runs them with hzero and without it.

torchtitan is made for GPUs. All that is patched for CPUs: the name of the device, kernels of Triton, statistics of
memory, and the timeouts after the first step.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import hzero.fsdp

# Kernels of Triton, which torch for CPUs does not have.
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = mock.MagicMock()
with mock.patch("torch._utils._get_available_device_type", return_value="cpu"):  # torchtitan reads it once
    from torchtitan.components import metrics
    from torchtitan.components.loss import ChunkedLossWrapper
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.config.configs import DebugConfig
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry, parallelize_llama
    from torchtitan.trainer import Trainer

STEPS, LENGTH, BATCH, ACCUMULATION = 20, 16, 2, 2


def tokens(dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> Iterator[Any]:
    """Counts up from random tokens, others on each rank, the same in each run."""
    generator = torch.Generator().manual_seed(dp_rank)
    while True:
        row = torch.randint(0, 50, (local_batch_size, 1), generator=generator) + torch.arange(seq_len + 1)
        yield {"input": row[:, :-1]}, row[:, 1:]


def train(block: dict[str, Any] | None) -> tuple[Sequence[float], Sequence[float], list[hzero.fsdp.FsdpState]]:
    """Losses and norms of torchtitan's trainer, and hzero's states."""
    states, logged = [], []

    def parallelize(model: torch.nn.Module, **how: Any) -> torch.nn.Module:
        model = parallelize_llama(model, **how)
        if block is not None:
            states.append(hzero.fsdp.apply(model, accumulation=ACCUMULATION, **block))
        for module in model.modules() if block is None else ():
            if isinstance(module, FSDPModule):  # gloo cannot multiply by torchtitan's factor, which is 1
                module.set_force_sum_reduction_for_comms(True)
        return model

    spec = model_registry("debugmodel", attn_backend="varlen")
    spec.parallelize_fn, spec.model.layers = parallelize, spec.model.layers[:2]
    for layer in spec.model.layers:  # the other kinds of attention need CUDA or a compiler
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = Trainer.Config(
        model_spec=spec,
        dump_folder=tempfile.mkdtemp(),
        tokenizer=types.SimpleNamespace(build=lambda **_: None),
        dataloader=types.SimpleNamespace(build=tokens),
        loss=ChunkedLossWrapper.Config(num_chunks=2),
        metrics=metrics.MetricsProcessor.Config(log_freq=1),
        optimizer=default_adamw(),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        activation_checkpoint=None,  # takes a quarter of the time
        training=TrainingConfig(
            steps=STEPS,
            seq_len=LENGTH,
            local_batch_size=BATCH,
            global_batch_size=BATCH * ACCUMULATION * dist.get_world_size(),
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),  # spmd_types needs torch after 2.13
        debug=DebugConfig(seed=1),
    )
    memory = types.SimpleNamespace(  # torch.cpu has no statistics
        device_name="CPU",
        get_peak_stats=lambda: metrics.DeviceMemStats(0, 0, 0, 0, 0, 0),
        reset_peak_stats=lambda: None,
    )
    log = lambda self, step, loss, largest, norm, **_: logged.append((loss, norm))  # noqa: E731
    unslept = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=id)  # it would sleep 2 s at the end
    with (
        mock.patch.object(metrics, "build_device_memory_monitor", return_value=memory),
        mock.patch.object(metrics.MetricsProcessor, "log", log),
        mock.patch("torchtitan.distributed.utils.set_pg_timeouts"),  # has a barrier of a device with a number
        mock.patch("torchtitan.trainer.time", unslept),
    ):
        trainer = config.build()
        trainer.train()
    trainer.close()
    gc.enable()  # torchtitan collects garbage itself
    losses, norms = zip(*logged, strict=True)
    return losses, norms, states
