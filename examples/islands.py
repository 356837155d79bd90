"""Trains islands of ranks that meet every few steps and go on when one dies, with hzero inside each and torchft between them.

Start a lighthouse, then each island, here of two ranks:

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 5000
    TORCHFT_LIGHTHOUSE=http://localhost:29510 ISLAND=0 torchrun --standalone --nproc-per-node=2 examples/islands.py
    TORCHFT_LIGHTHOUSE=http://localhost:29510 ISLAND=1 torchrun --standalone --nproc-per-node=2 examples/islands.py
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

import hzero

GPU = torch.cuda.is_available()
TOPOLOGY = "discover" if GPU else {"packages_per_node": 1, "devices_per_package": 2}
MICRO_BATCHES = 2


def train(steps: int, every: int, timeout: timedelta) -> None:
    """Takes steps of this island, which meets the others after every few of them. Rank 0 prints losses."""
    island, rank, device = int(os.environ["ISLAND"]), dist.get_rank(), "cuda" if GPU else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 256)).to(device)
    for layer in (model[1], model[3]):
        fully_shard(layer)
    fully_shard(model)
    hzero.fsdp.apply(model, topology=TOPOLOGY, accumulation=MICRO_BATCHES)  # as in one job: the island is its world
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    manager = Manager(
        pg=(ProcessGroupNCCL if GPU else ProcessGroupGloo)(timeout=timeout),
        min_replica_size=1,
        # An island that starts again takes the live weights of another one.
        load_state_dict=lambda state: (
            model.load_state_dict(state["model"]),
            optimizer.load_state_dict(state["optimizer"]),
        ),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"island_{island}",
        use_async_quorum=False,
        timeout=timeout,
        quorum_timeout=timeout,
        init_sync=False,  # all islands begin with equal weights
    )
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    text = torch.tensor(list(Path(__file__).read_bytes()), device=device)
    generator = torch.Generator().manual_seed(1000 * island + rank)  # each rank draws its own samples
    with DiLoCo(manager, [model], optimizer, outer, sync_every=every, pin_memory=GPU):
        for step in range(steps):
            for _ in range(MICRO_BATCHES):
                at = torch.randint(len(text) - 1, (64,), generator=generator).to(device)
                loss = cross_entropy(model(text[at]), text[at + 1])
                (loss / MICRO_BATCHES).backward()
            optimizer.step()
            optimizer.zero_grad()
            total = sum(float(param.detach().full_tensor().double().sum()) for param in model.parameters())
            if rank == 0:
                met = f"{manager.current_step()} meetings, the last of {manager.num_participants()} islands"
                print(f"island {island} step {step + 1}: loss {loss.item():.6f}; sum {total:.9f}; {met}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps of this island")
    parser.add_argument("--every", type=int, default=10, help="steps between two meetings")
    parser.add_argument("--timeout", type=int, default=30, help="maximum wait for other islands, in seconds")
    given = parser.parse_args()
    if GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if GPU else "gloo")
    train(given.steps, given.every, timedelta(seconds=given.timeout))
    dist.destroy_process_group()
