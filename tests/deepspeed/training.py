"""A small model of awkward sizes, and loops that train it under DDP, stock ZeRO-3 and hzero."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch.nn import functional as F  # noqa: N812

import hzero
from tests.rank_main import DEVICE, TRANSPORT, same_on_all_ranks

#: The optimizer on the host.
OFFLOAD: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
}
LR, CLIP, VOCAB, WIDTH, INNER = 3e-3, 0.5, 37, 13, 29
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
#: The machine of these ranks: nodes, packages of a node, devices of a package. 4 ranks have a boundary between nodes and packages
#: of two devices, which most checks need; 8 have a tier between them too; 6 is not a power of two.
LAYOUT = {2: (2, 1, 1), 4: (2, 1, 2), 6: (3, 1, 2), 8: (2, 2, 2)}.get(WORLD, (1, 1, 1))
#: The block's key `order` in these checks, which is one for all engines of a process.
ORDER = os.environ.get("HZERO_CHECKS_ORDER", "")
TOPOLOGY = dict(zip(("nodes", "packages_per_node", "devices_per_package"), LAYOUT))


class AwkwardNet(torch.nn.Module):
    """Tied, frozen, 1-D, single-element and odd-sized parameters; optionally re-entrant checkpointing."""

    def __init__(self, seed: int = 0, checkpointing: str = "none", width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.checkpointing = checkpointing
        self.embed = torch.nn.Embedding(VOCAB, width)
        self.up = torch.nn.Linear(width, inner)
        self.norm = torch.nn.LayerNorm(inner)
        self.down = torch.nn.Linear(inner, width)
        self.frozen = torch.nn.Linear(width, width, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.gain = torch.nn.Parameter(torch.ones(1))
        self.tilt = torch.nn.Parameter(torch.zeros(3))
        self.head = torch.nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def block(self, x: torch.Tensor) -> torch.Tensor:
        """One residual block."""
        return x + self.down(torch.relu(self.norm(self.up(x)))) + self.frozen(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean next-token loss, a scalar, of int64 ``[batch, length]``."""
        x = self.embed(tokens[:, :-1])
        if self.checkpointing == "none":
            x = self.block(x)
        else:
            x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=self.checkpointing == "reentrant")
        x = x * self.gain + self.tilt.sum()
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int, micro: int, rank: int | None = None, size: int = 2, length: int = 9) -> torch.Tensor:
    """Deterministic tokens, int64 ``[size, length]``, other ones for every step, micro-batch and rank."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(step * 10_007 + micro * 101 + rank)
    start = torch.randint(0, VOCAB, (size, 1), generator=generator)
    noise = torch.randint(0, 3, (size, length), generator=generator)
    return ((start + torch.arange(length) * 2 + noise) % VOCAB).to(DEVICE)


def mean_over_ranks(loss: torch.Tensor) -> float:
    """The mean of a scalar over all ranks, in float64."""
    return means_over_ranks([loss])[0]


def means_over_ranks(losses: Sequence[torch.Tensor]) -> list[float]:
    """The mean of each scalar over all ranks, in float64; one message for all of them."""
    values = torch.stack([loss.detach().double() for loss in losses])
    dist.all_reduce(values)
    return (values / dist.get_world_size()).tolist()


def ds_config(block: dict[str, Any] | None = None, accumulation: int = 1, **changes: Any) -> dict[str, Any]:
    """A DeepSpeed configuration for these tests; ``changes`` are merged one level deep."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LR, "betas": [0.9, 0.99], "weight_decay": 0.01, "torch_adam": True},
        },
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    for key, value in changes.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    if block is not None:
        config["hzero"] = block if TRANSPORT == "torch" else {"transport": TRANSPORT, **block}
    return config


def engine_of(config: dict[str, Any] | Path, model: torch.nn.Module | None = None, **kwargs: Any) -> Any:
    """An engine; stock where the configuration has no block."""
    model = AwkwardNet() if model is None else model
    kwargs.setdefault("model_parameters", [p for p in model.parameters() if p.requires_grad])
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = config if isinstance(config, dict) else str(config)
    return hzero.initialize(model=model, config=config, **kwargs)[0]


def train(
    engine: Any,
    steps: int,
    accumulation: int = 1,
    first: int = 0,
    norms: list[float] | None = None,
    managed: bool = True,
    loss_of: Callable[[Any, int, int], torch.Tensor] = lambda engine, step, micro: engine(batch(step, micro)),
) -> list[float]:
    """Losses of ``steps`` optimizer steps, each the mean over ranks and micro-batches.

    ``norms`` takes the norm of every step's gradients: with clipping and AdamW losses do not show their scale. ``managed``:
    ``step`` is called after every micro-batch, and not only at the end of a window. ``loss_of`` gives the loss of an engine in a
    step's micro-batch.
    """
    losses = []
    for step in range(first, first + steps):
        total = torch.zeros((), dtype=torch.float64, device=DEVICE)
        for micro in range(accumulation):
            loss = loss_of(engine, step, micro)
            total += loss.detach().double() / accumulation
            engine.backward(loss)
            if managed or micro == accumulation - 1:
                engine.step()
        losses.append(total)
        if norms is not None:
            norms.append(float(engine.get_global_grad_norm()))
    return means_over_ranks(losses)


def assert_losses(got: list[float], want: list[float], tolerance: float = 1e-5, what: str = "losses") -> None:
    """Asserts that two runs agree to a relative tolerance at every step."""
    worst = max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))
    assert worst <= tolerance, f"{what} differ by {worst:.2e} relative:\n{got}\n{want}"


def block_of(preset: str, **changes: Any) -> dict[str, Any]:
    """The block of a preset on the machine of these ranks. Audits have tests of their own, and would take time in all others."""
    order = {"order": ORDER} if ORDER else {}
    return {"preset": preset, "topology": TOPOLOGY, "guard": {"every": 0}, **order, **changes}


def shared_folder() -> Path:
    """One folder that all ranks know."""
    name = [tempfile.mkdtemp(dir=os.environ["HZERO_CHECKS_OUT"])] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(name, 0)
    return Path(name[0])


def read_of(engine: Any) -> dict[str, torch.Tensor]:
    """What forward reads, parameter by parameter; the same on all ranks, or this fails."""
    found = {}
    for name, param in engine.module.named_parameters():
        hzero.state(engine).gather([param]).wait()
        found[name] = param.detach().clone()
        param.partition()
    assert same_on_all_ranks(list(found.values()))
    return found


def assert_masters(engine: Any, want: dict[str, torch.Tensor]) -> None:
    """Asserts that an engine's exact weights have these bits."""
    for name, master in masters_of(engine).items():
        assert torch.equal(master, want[name]), name


def masters_of(engine: Any) -> dict[str, torch.Tensor]:
    """Exact float32 weights by name."""
    return {
        name: safe_get_full_fp32_param(param).clone()
        for name, param in engine.module.named_parameters()
        if param.requires_grad
    }
