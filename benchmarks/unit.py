"""All-gathers, median step and median ratio to the first scheme of a GPT of 14M parameters, in which nothing is marked.

Every scheme takes its turn: torchrun --standalone --nproc-per-node=8 benchmarks/unit.py; with slow links
python -m benchmarks.cluster run -- python benchmarks/unit.py.
"""
# ruff: noqa: D101, D102, D103

import os
import statistics
import time
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

HSDP, WIDTH, VOCAB, MICRO = "HSDP over the node", 384, 256, 2
# AHEAD: layers to prefetch; LENGTH: tokens of a rank.
ROUNDS, AHEAD, LENGTH = (int(os.environ.get(*one)) for one in (("ROUNDS", 9), ("AHEAD", 0), ("LENGTH", 128)))
SCHEMES = os.environ.get("SCHEMES")  # Names, separated by semicolons; all without it.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (6, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def gpt() -> Any:
    torch.manual_seed(0)
    blocks = (Block() for _ in range(8))
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False))


def loss(model: Any) -> torch.Tensor:
    ids = torch.randint(VOCAB, (1, LENGTH))
    return nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def zero3(leaf: bool = False, **block: str) -> Any:
    model, layer = gpt(), sum(param.numel() for param in Block().parameters())
    if leaf:
        deepspeed.utils.set_z3_leaf_modules(model, [Block])
    zero: dict[str, Any] = {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
    zero |= {"reduce_bucket_size": layer, "stage3_prefetch_bucket_size": AHEAD * layer}
    zero |= {"hzero": {**block, "topology": TOPOLOGY}} if block else {}
    config: dict[str, Any] = {"zero_optimization": zero, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": MICRO, "bf16": {"enabled": True}}
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    return lambda: [(engine.backward(loss(engine)), engine.step()) for _ in range(MICRO)]


def hsdp(shards: int, flags: bool = False) -> Any:
    model, mesh = (
        gpt(),
        dist.init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("out", "in")),
    )
    for part in (*model[1:-2], model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for index in range(MICRO):
            if flags:  # Without them FSDP2 reduces over the replicas in every micro-batch.
                model.set_is_last_backward(index == MICRO - 1)
                model.set_requires_all_reduce(index == MICRO - 1)
            (loss(model) / MICRO).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp() -> Any:
    model = nn.parallel.DistributedDataParallel(gpt())
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(MICRO):
            with torch.autocast("cpu", torch.bfloat16):
                output = loss(model) / MICRO
            output.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a build of minutes that ZeRO-3 does not use
deepspeed.init_distributed("gloo", verbose=False)
TOPOLOGY = {"nodes": 2, "packages_per_node": 2, "devices_per_package": dist.get_world_size() // 4}
NODE = dist.get_world_size() // 2
schemes: dict[str, Any] = {
    HSDP: lambda: hsdp(NODE, flags=True),
    "HSDP, no flags": lambda: hsdp(NODE),
    "HSDP over the package": lambda: hsdp(NODE // 2, flags=True),
    "HSDP over the package, no flags": lambda: hsdp(NODE // 2),
    "DDP": ddp,
    "ZeRO-3": zero3,
    "ZeRO-3, leaf modules": lambda: zero3(leaf=True),
}
for preset in ("lossless", "topo", "exact"):
    schemes |= {f"{preset}, {unit}": partial(zero3, preset=preset, unit=unit) for unit in ("module", "layer")}
steps = {name: schemes[name]() for name in (SCHEMES.split(";") if SCHEMES else schemes)}
counts, times = {}, {name: list[float]() for name in steps}
for name, step in steps.items():
    step()  # DeepSpeed records the order of its modules.
    every_thread = _ExperimentalConfig(profile_all_threads=True)  # hzero's lanes are threads
    with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread) as profiler:
        step()
    names = [event.name() for event in profiler.profiler.kineto_results.events()]
    # hzero's all-gathers over gloo are sends and receives.
    counts[name] = sum(name.startswith(("gloo:", "hzero: all_gather")) and "gather" in name for name in names)
for number in range(ROUNDS):
    for name, step in list(steps.items())[:: 1 if number % 2 else -1]:
        dist.barrier()
        times[name].append(-time.perf_counter())
        step()
        dist.barrier()
        times[name][-1] += time.perf_counter()
for name, gathers in counts.items() if dist.get_rank() == 0 else ():
    ratio = statistics.median(own / base for own, base in zip(times[name], times[next(iter(steps))], strict=True))
    print(f"{name:32}{gathers:5} all-gathers{statistics.median(times[name]):8.2f} s{ratio:8.2f}")
