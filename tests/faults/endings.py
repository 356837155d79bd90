"""Ends inside an accumulation window, in the way that the first argument names; the second one is a preset."""

from __future__ import annotations

import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group  # before hzero can replace it

torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")


def engine_of(preset: str) -> Any:
    topology = {"nodes": dist.get_world_size() // 2, "gpus_per_node": 1, "gcds_per_gpu": 2}
    block = {"preset": preset, "topology": topology}
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 500), torch.nn.GELU(), torch.nn.Linear(500, 8))
    return deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 3, "hzero": block},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        },
    )[0]


way, preset = sys.argv[1:]
engines = [engine_of(preset) for _ in range(2 if way == "engines" else 1)]
for number in range(5):
    for engine in engines:
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        if number == 4 and way == "one-raises" and dist.get_rank() == 1:
            raise ValueError("on rank 1")
        engine.backward((engine(x) - x.roll(1, 1)).square().mean())
        engine.step()
if dist.get_rank() == 0:
    print("trained", flush=True)
if way == "all-raise":
    raise ValueError("on all ranks")
if way == "bound":
    destroy_process_group()
elif way in ("destroy", "engines"):
    if way == "engines":
        engines[0].destroy()
    dist.destroy_process_group()
