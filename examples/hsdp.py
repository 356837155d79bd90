"""FSDP2 inside each node, gradients averaged across nodes in int8: torchrun --nproc-per-node=4 examples/hsdp.py."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import hzero


def train(steps: int, codec: str = "int8", devices: int = 2) -> tuple[list[float], list[hzero.comm.WireEntry]]:
    """Trains on nodes of so many devices, and returns the losses and the bytes between nodes."""
    shape = dist.get_world_size() // devices, devices
    mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("node", "device"))
    torch.manual_seed(0)  # equal weights on all nodes; if you load them, broadcast them over mesh["node"]
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    fully_shard(
        model, mesh=mesh["device"]
    )  # with the mesh of two dimensions FSDP2 would average them itself, in float32
    block = {
        "codecs": codec,
        "topology": {"packages_per_node": 1, "devices_per_package": 1},
    }  # the group has one device of each node
    nodes = hzero.comm.Communicator(block, mesh["node"].get_group(), uses=("sums", "copies"))
    model.set_all_reduce_hook(lambda gradients: gradients.copy_(nodes.all_reduce(gradients, "mean")))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    torch.manual_seed(dist.get_rank())
    for _ in range(steps):
        inputs = torch.randn(32, 64)
        loss = (model(inputs) - inputs.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, nodes.wire_log.entries()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(train(50))
    dist.destroy_process_group()
