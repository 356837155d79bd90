"""DistributedDataParallel with gradients in codecs: torchrun --nproc-per-node=4 examples/ddp.py."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hzero


def train(steps: int, device: str = "cpu") -> list[float]:
    """Trains a small net, and returns the losses; prints the bytes of each tier on rank 0."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    model = DistributedDataParallel(net.to(device))
    state = hzero.comm.DdpState(
        {
            "codecs": {
                "inter_node": "int4",
                "intra_node": "int8",
            },  # gradients on their way to the sum; intra_package is not named: none
            "gather": {"inter_node": "int8", "intra_node": "int8"},  # the mean on its way back
            "error_feedback": ["inter_node"],
            "topology": {
                "packages_per_node": 2,
                "devices_per_package": 1,
            },  # leave it out on a real machine: it is discovered
        }
    )
    model.register_comm_hook(state, hzero.comm.ddp_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        inputs = torch.randn(32, 64, generator=generator).to(device)
        loss = (model(inputs) - inputs.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if dist.get_rank() == 0:
        for entry in state.communicator.wire_log.entries():
            share = entry.wire_bytes / entry.raw_bytes
            print(
                f"tier {entry.tier} with {entry.codec}: received {entry.wire_bytes:,} bytes, {share:.0%} of float32's"
            )
    return losses


def main() -> None:
    """Ranks stand for nodes of two devices each."""
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    losses = train(50, device)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
