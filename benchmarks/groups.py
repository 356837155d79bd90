"""Losses of preset `topo` with and without groups of nodes, on 16 ranks that are declared as 8 nodes in 2 groups.

    torchrun --nproc-per-node=16 -m benchmarks.groups --out losses.jsonl

A byte-level language model of 29,000 float32 weights predicts the next byte of this Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import hzero

CONTEXT, BATCH, WIDTH, INNER = 8, 8, 16, 64
#: Steps whose mean loss is compared.
LAST = 100
SCHEMES: dict[str, int | None] = {"no groups": None, "2 groups of 4 nodes": 4}


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, WIDTH)
        self.up = torch.nn.Linear(CONTEXT * WIDTH, INNER)
        self.down = torch.nn.Linear(INNER, 256)

    def forward(self, contexts: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        logits = self.down(torch.nn.functional.gelu(self.up(self.embedding(contexts).flatten(1))))
        return torch.nn.functional.cross_entropy(logits, following)


def _losses(group: int | None, seed: int, steps: int, tokens: torch.Tensor) -> list[float]:
    """Mean loss of all ranks at every step."""
    torch.manual_seed(seed)
    topology = {"nodes": 8, "gpus_per_node": 2, "gcds_per_gpu": 1, "nodes_per_group": group}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.01, "torch_adam": True}},
        "steps_per_print": 10**9,
        "hzero": {"preset": "topo", "topology": topology},
    }
    model = _Net()
    engine = hzero.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    generator = torch.Generator().manual_seed(seed * 1000 + dist.get_rank())
    losses = []
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - CONTEXT - 1, (BATCH,), generator=generator)
        windows = torch.stack([tokens[start : start + CONTEXT + 1] for start in starts]).long()
        loss = engine(windows[:, :-1], windows[:, -1])
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    engine.destroy()
    return (mean / dist.get_world_size()).tolist()


def main() -> None:
    """Writes a row for each scheme and seed as JSON, from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-m]*.py")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    for seed in range(given.seeds):
        for scheme, group in SCHEMES.items():
            begun = time.perf_counter()
            losses = _losses(group, seed, given.steps, tokens)
            row = {"scheme": scheme, "seed": seed, "steps": given.steps, "loss": statistics.fmean(losses[-LAST:])}
            row |= {"seconds": round(time.perf_counter() - begun, 1), "losses": [round(one, 5) for one in losses]}
            if dist.get_rank() == 0:
                with given.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
