"""Trains a small byte model under PyTorch's FSDP2 with hzero: torchrun --nproc-per-node=4 examples/fsdp.py."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import hzero

GPU = torch.cuda.is_available()
# On GPUs hzero discovers where the ranks sit. CPU ranks stand for nodes with one MI250X (two GCDs) each.
TOPOLOGY = "discover" if GPU else {"packages_per_node": 1, "devices_per_package": 2}
MICRO_BATCHES = 2


def train(steps: int) -> list[float]:
    """Trains, and returns the losses; rank 0 prints them, and the bytes of each tier."""
    mesh = dist.device_mesh.init_device_mesh("cuda" if GPU else "cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 256))
    for layer in (model[1], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = hzero.fsdp.apply(model, topology=TOPOLOGY, accumulation=MICRO_BATCHES)  # the one line of hzero
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    text = torch.tensor(list(Path(__file__).read_bytes()), device=mesh.device_type)
    torch.manual_seed(dist.get_rank())  # each rank draws its own samples
    losses = []
    for step in range(steps):
        for _ in range(MICRO_BATCHES):
            at = torch.randint(len(text) - 1, (64,))
            loss = cross_entropy(model(text[at]), text[at + 1])
            (loss / MICRO_BATCHES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {losses[-1]:.3f}", flush=True)
    state.settle()
    for hop in state.wire_log.entries() if dist.get_rank() == 0 else ():
        print(f"{hop.role} over tier {hop.tier} with {hop.codec}: received {hop.wire_bytes:,} bytes")
    return losses


if __name__ == "__main__":
    if GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if GPU else "gloo")
    train(10)
    dist.destroy_process_group()
