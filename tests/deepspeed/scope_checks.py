"""Shard scopes by pattern, in layers whose experts are one parameter. Run by test_stage.py on 4 ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

import hzero
from hzero.tools.plan.collectives import step_traffic
from hzero.tools.plan.memory import held_states
from tests.deepspeed.training import (
    VOCAB,
    assert_losses,
    block_of,
    ds_config,
    engine_of,
    shared_folder,
    train,
)

WIDTH, TOLERANCE = 13, 1e-6
#: Stock's buffers: nothing is kept for its next use, and a layer is gathered when it is needed.
NOTHING_KEPT = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0, "sub_group_size": 700}
SETTINGS: dict[str, dict[str, Any]] = {
    "experts over the world": block_of(
        "lossless",
        shard={"except": {"*experts*": {"weights": "world", "gradients": "node"}}},
        error_feedback=["inter_node"],
        guard={"every": 1},
    ),
    "four scopes": block_of(
        "zero3",
        shard={
            "except": {
                "*norm*": {"weights": "device", "gradients": "device"},
                "*.experts.gate_up": {"weights": "package", "gradients": "device"},
                "*experts*": {"weights": "package"},
                "*": {"gradients": "node"},
            }
        },
        guard={"every": 1},
    ),
}


class Experts(torch.nn.Module):
    """All experts of a layer in two parameters."""

    def __init__(self, experts: int = 5, inner: int = 7) -> None:
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.randn(experts, WIDTH, inner) * 0.3)
        self.down = torch.nn.Parameter(torch.randn(experts, inner, WIDTH) * 0.3)

    def forward(self, x: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Tokens ``[batch, length, width]`` through all experts, by their shares ``[batch, length, experts]``."""
        hidden = torch.einsum("btw,ewi->btei", x, self.gate_up).relu()
        return torch.einsum("btei,eiw,bte->btw", hidden, self.down, shares)


class Layer(torch.nn.Module):
    """A mixer, and experts that a router weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.router, self.experts = torch.nn.Linear(WIDTH, 5, bias=False), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The tokens, ``[batch, length, width]``."""
        x = x + self.mixer(self.norm(x)).cumsum(1) / 9
        return x + self.experts(x, self.router(x).softmax(-1))


class Mixture(torch.nn.Module):
    """A small decoder with experts."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(VOCAB, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss of the next token."""
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def _engine(block: dict[str, Any] | None, accumulation: int, seed: int = 0) -> Any:
    zero = {"zero_optimization": NOTHING_KEPT}
    return engine_of(ds_config(block, accumulation, **zero), Mixture(seed))


def check_scopes_by_pattern_give_stocks_losses_and_the_plans_bytes_and_memory() -> None:
    """Accumulation 1 and 3. Each setting, and stock, continues the one before from its checkpoint."""
    folder = shared_folder()
    for accumulation in (1, 3):
        stock, norms = _engine(None, accumulation), list[float]()
        losses = train(stock, 4, accumulation, norms=norms)
        stock.destroy()
        for number, (name, block) in enumerate([*SETTINGS.items(), ("stock", None)]):
            # The last step starts from the same weights as the first step of the next engine.
            engine, found, first = _engine(block, accumulation, number), list[float](), number
            if number:
                engine.load_checkpoint(str(folder), tag=f"{accumulation} {number - 1}")
            got = train(engine, 1, accumulation, first, found)
            engine.save_checkpoint(str(folder), tag=f"{accumulation} {number}")
            if block is not None:
                _assert_planned(engine, accumulation, first + 1, got, found)
            what = f"{name}, accumulation {accumulation}"
            assert_losses(got, losses[first : first + len(got)], TOLERANCE, f"losses of {what}")
            assert_losses(found, norms[first : first + len(got)], TOLERANCE, f"norms of {what}")
            engine.destroy()


def _assert_planned(engine: Any, accumulation: int, step: int, losses: list[float], norms: list[float]) -> None:
    """Trains one more step, in which bytes and memory are those of the plan and no message has two scopes."""
    state, gathers = hzero.state(engine), Counter[str]()
    unshard = state.weights.unshard

    def counting(params: Any, into: Any = None) -> Any:
        started = unshard(params, into)
        for same, _ in started:
            assert len({param.route for param in same}) == 1
            gathers.update(param.name for param in same)
        assert len(started) <= len({param.route for param in params})
        return started

    state.settle()
    state.wire_log.reset()
    state.weights.unshard = counting
    losses += train(engine, 1, accumulation, step, norms)
    state.settle()
    grid, params = state.plan.grid, dict(engine.module.named_parameters())
    names, numels = [(name,) for name in params], [param.ds_numel for param in params.values()]
    planned = Counter[Any]()
    for own, numel, (name,) in zip(state.plan.plans_of(names), numels, names, strict=True):
        times = gathers[name] / accumulation
        for row in step_traffic(own, grid, [numel], itemsize=4, accumulation=accumulation, fetches=times):
            planned[row.role, row.tier] += row.wire_bytes
    logged = Counter[Any]()
    for entry in state.wire_log.entries():
        logged[entry.role, entry.tier] += entry.wire_bytes
    assert logged == +planned, (logged, planned)
    for row in step_traffic(state.plan, grid, numels, itemsize=4, accumulation=accumulation, names=names):
        assert row.role == "weights" or row.wire_bytes == logged[row.role, row.tier], row
    measured = state.memory(engine.optimizer)
    states = held_states(state.plan, numels, 4, accumulation, names)
    assert {name: measured[name] for name in states} == {name: one.bytes for name, one in states.items()}
    assert bool(measured["gradient accumulation buffers"]) == (accumulation > 1)
