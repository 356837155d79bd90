"""Communication hooks of DDP on the emulated cluster, which take turns step by step: bytes by tier, time, loss.

    python -m benchmarks.cluster run -- python -m benchmarks.ddp_hooks --steps 60

A byte-level language model of 1.8 million float32 weights reads this Python's standard library.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import hzero
from benchmarks.cluster.counters import sent
from hzero.config import TIERS

LENGTH, BATCH, WIDTH, LAYERS = 64, 4, 192, 4
WITH_FEEDBACK = {"codecs": {"node": "int4", "gpu": "int8", "gcd": "int8"}, "error_feedback": ["node"]}


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, WIDTH)
        self.places = torch.nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.head(self.layers(self.embedding(tokens) + self.places, mask=mask, is_causal=True))


class _Scheme:
    """One way to average gradients, with a model of its own.

    Args:
        name: Which.
        topology: The grid of the ranks.
    """

    def __init__(self, name: str, topology: dict[str, int]) -> None:
        torch.manual_seed(1)
        self._net = _Net()
        # PowerSGD starts its second collective in a callback, which on gloo runs in another order on every rank.
        self._ddp = DistributedDataParallel(self._net, bucket_cap_mb=100 if name.startswith("PowerSGD") else 2)
        self._optimizer = torch.optim.AdamW(self._net.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.sent: dict[str, int] = dict.fromkeys(TIERS, 0)
        ours: dict[str, dict[str, Any]] = {
            "hzero, none": {},
            "hzero, int8": {"codecs": "int8"},
            "hzero, int4 between nodes": {**WITH_FEEDBACK, "gather": "int8"},
        }
        if name == "fp16_compress_hook":
            self._ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif name.startswith("PowerSGD"):
            state = powerSGD_hook.PowerSGDState(None, int(name[-1]), start_powerSGD_iter=5)
            self._ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif name in ours:
            own = hzero.collectives.DdpState({**ours[name], "topology": topology})
            self._ddp.register_comm_hook(own, hzero.collectives.ddp_hook)

    def step(self, tokens: torch.Tensor) -> None:
        """One step, between two barriers."""
        before = sent()
        dist.barrier()
        begun = time.perf_counter()
        logits = self._ddp(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        dist.barrier()
        self.seconds.append(time.perf_counter() - begun)
        self.losses.append(float(loss.detach()))
        for tier, count in sent().items():
            self.sent[tier] += count - before[tier]


def main() -> None:
    """Prints a row for each scheme as JSON, from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpus-per-node", type=int, default=2)
    parser.add_argument("--gcds-per-gpu", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    topology = {"gpus_per_node": given.gpus_per_node, "gcds_per_gpu": given.gcds_per_gpu}
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-m]*.py")))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    names = ["DDP", "fp16_compress_hook", "PowerSGD, rank 2", "PowerSGD, rank 8"]
    names += ["hzero, none", "hzero, int8", "hzero, int4 between nodes"]
    schemes = {name: _Scheme(name, topology) for name in names}
    generator = torch.Generator().manual_seed(given.seed * 1000 + dist.get_rank())
    for _ in range(given.steps):
        starts = torch.randint(0, len(tokens) - LENGTH - 1, (BATCH,), generator=generator)
        batch = torch.stack([tokens[start : start + LENGTH + 1] for start in starts]).long()
        for scheme in schemes.values():
            scheme.step(batch)
    for name, scheme in schemes.items():
        found = torch.tensor([*map(float, scheme.sent.values()), *scheme.losses], dtype=torch.float64)
        dist.all_reduce(found)
        losses = (found[len(TIERS) :] / dist.get_world_size()).tolist()
        if dist.get_rank() == 0:
            row = {
                "scheme": name,
                "step_s": round(statistics.median(scheme.seconds[10:]), 3),
                "loss": round(statistics.fmean(losses[-20:]), 4),
                **{f"{tier}_MB": round(float(size) / given.steps / 1e6, 3) for tier, size in zip(TIERS, found)},
            }
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
