"""Trains under stock ZeRO-3, `lossless` and `topo` on 16 ranks, 8 nodes in 2 groups, and prints what rank 0 has seen."""

from __future__ import annotations

import json
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import hzero
from hzero.sharding.traffic import plan_traffic

TOPOLOGY = {"nodes": 8, "gpus_per_node": 2, "gcds_per_gpu": 1, "nodes_per_group": 4}
STEPS, ACCUMULATION = 3, 2


class Net(torch.nn.Module):
    """Sizes that 16 does not divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(37, 13)
        self.up, self.norm = torch.nn.Linear(13, 257), torch.nn.LayerNorm(257)
        self.down = torch.nn.Linear(257, 37)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token, ``[batch, length, 37]``."""
        return self.down(self.norm(torch.relu(self.up(self.embed(tokens)))))


def train(preset: str | None) -> dict[str, Any]:
    """Losses and gradient norms of a few steps; of a preset also bytes, and whether all ranks compute the same bits."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        # Parameters that are kept whole would be refreshed once more, after the last step.
        "zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "steps_per_print": 10**9,
    }
    if preset is not None:
        config["hzero"] = {"preset": preset, "topology": TOPOLOGY, "guard": {"every": 0}, "canary": {"every_steps": 0}}
    model = Net()
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    losses, norms = [], []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(ACCUMULATION):
            generator = torch.Generator().manual_seed(1000 * step + 100 * micro + dist.get_rank())
            tokens = torch.randint(0, 37, (2, 9), generator=generator)
            logits = engine(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            engine.backward(loss)
            engine.step()
            total += loss.detach().double() / ACCUMULATION
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
        norms.append(float(engine.get_global_grad_norm()))
    seen: dict[str, Any] = {"losses": losses, "norms": norms}
    if preset is not None:
        state = hzero.state(engine)
        state.settle()
        numels = [param.ds_numel for param in model.parameters()]
        planned = plan_traffic(state.plan, numels, itemsize=4, accumulation=ACCUMULATION, comm_itemsize=4)
        logged = {(entry.role, entry.tier): entry.wire_bytes for entry in state.wire_log.entries()}
        codecs = {f"{entry.role} {entry.tier}": entry.codec for entry in state.wire_log.entries()}
        far = [row for row in planned if row.used and row.tier in ("node", "group")]
        bytes_of = {f"{row.role} {row.tier}": (logged[row.role, row.tier], STEPS * row.wire_bytes) for row in far}
        seen |= {"bytes": bytes_of, "codecs": {name: codecs[name] for name in bytes_of}}
        with torch.no_grad():
            mine = engine(torch.arange(36).view(4, 9)).flatten()
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        seen["same bits"] = all(torch.equal(mine, other) for other in every)
    engine.destroy()
    return seen


deepspeed.init_distributed("gloo")
result = {str(preset): train(preset) for preset in (None, "lossless", "topo")}
if dist.get_rank() == 0:
    print("RESULT " + json.dumps(result))
dist.destroy_process_group()
