"""Trains a small byte model under DeepSpeed with hzero: torchrun --nproc-per-node=4 examples/train.py."""

from pathlib import Path

import deepspeed
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hzero

GPU = torch.cuda.is_available()
# On GPUs hzero discovers where the ranks sit. CPU ranks stand for two nodes with one MI250X (two GCDs) each.
TOPOLOGY = "discover" if GPU else {"packages_per_node": 1, "devices_per_package": 2}
CONFIG = {
    "train_micro_batch_size_per_gpu": 64,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
    "bf16": {"enabled": GPU},
    "zero_optimization": {"stage": 3, "hzero": {"topology": TOPOLOGY}},
}

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # CPUs would compile it; stage 3 does not use it
deepspeed.init_distributed("nccl" if GPU else "gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 256))
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)

rank = torch.distributed.get_rank()
text = torch.tensor(list(Path(__file__).read_bytes()), device=engine.device)
torch.manual_seed(rank)  # each rank draws its own samples
for step in range(10):
    for _ in range(engine.gradient_accumulation_steps()):
        at = torch.randint(len(text) - 1, (64,))
        loss = cross_entropy(engine(text[at]).float(), text[at + 1])
        engine.backward(loss)
        engine.step()
    if rank == 0:
        print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)

state = hzero.state(engine)  # None without the block
if state:
    state.settle()  # on all ranks: the log counts hops that have ended
    for hop in state.wire_log.entries() if rank == 0 else ():
        print(f"{hop.role} over tier {hop.tier} with {hop.codec}: received {hop.wire_bytes:,} bytes")
torch.distributed.destroy_process_group()
