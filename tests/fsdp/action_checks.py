"""What users do to weights and gradients, drawn at random at any moment of the loop, against FSDP2 alone. Run on 4 ranks."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils import clip_grad_norm_, get_total_norm

import hzero.fsdp
from hzero import ConfigError
from tests.parity.compare import WORLD
from tests.parity.fsdp import mesh_of
from tests.rank_main import same_on_all_ranks

#: Number of sequences with `lossless`, of which the first ones also run with codecs.
SEQUENCES = int(os.environ.get("HZERO_SEQUENCES", "12"))
ACTIONS = 14
TOPOLOGY = {"packages_per_node": 1, "devices_per_package": 2}


class Codes(nn.Module):
    """Frozen numbers of several dtypes, as of quantised layers."""

    def __init__(self) -> None:
        super().__init__()
        # FSDP2 of older torch shards floating-point numbers only.
        dtype = torch.uint8 if torch.__version__ >= "2.13" else torch.bfloat16
        codes, halves = torch.randint(0, 255, (7, 3)).to(dtype), torch.randn(5, 2, dtype=torch.bfloat16)
        self.codes, self.halves = nn.Parameter(codes, requires_grad=False), nn.Parameter(halves, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.codes.float() / 255).mean() + self.halves.float().mean()


class Net(nn.Module):
    """Layers whose rows do not divide by 4: some ranks have short shards or none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 9), nn.Linear(9, 5), nn.Linear(5, 8)])
        self.frozen = nn.ModuleList([Codes(), Codes()])
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        for frozen in self.frozen:
            x = frozen(x)
        return (x * self.scale).square().mean()


def floats(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value.dtype == torch.float32}


class Loop:
    """A model in a loop whose next action is drawn. The same seed draws the same actions."""

    def __init__(self, seed: int, block: dict[str, Any] | None) -> None:
        self.draw, self.seen, self.taken, self.batches = random.Random(seed), [], [], itertools.count()
        torch.manual_seed(seed)
        self.model = Net()
        mesh = mesh_of(WORLD)
        for layer in (*self.model.layers, self.model.frozen[0]):
            fully_shard(layer, mesh=mesh)  # the root has the parameters of the others
        fully_shard(self.model, mesh=mesh)
        accumulation, kind = (
            self.draw.choice([None, None, 1, 2, 3]),
            self.draw.choice(["sgd", "foreach", "adam", "fused adam"]),
        )
        self.state = (
            None
            if block is None
            else hzero.fsdp.apply(self.model, topology=TOPOLOGY, accumulation=accumulation, **block)
        )
        self.params = [param for param in self.model.parameters() if param.dtype == torch.float32]
        if "adam" in kind:
            adam = torch.optim.AdamW(self.params, lr=0.02, eps=0.01, fused=kind == "fused adam")
            self.optimizer: torch.optim.Optimizer = adam
        else:
            self.optimizer = torch.optim.SGD(self.params, lr=0.3, momentum=0.5, foreach=kind == "foreach")
        self.first = floats(self.model.state_dict())  # views of the shards
        self.average = [param.detach().clone() for param in self.params]

    def run(self, actions: int) -> None:
        evaluate(self)  # the first forward makes its module FSDP2's root
        for _ in range(actions):
            weighted = [backward] * 6 + [step] * 4 + EVERY
            action = self.draw.choice(weighted)
            self.taken.append(action.__name__)
            action(self)
        for action in (backward, step, evaluate):
            action(self)

    def loss(self) -> torch.Tensor:
        """Each rank has a batch of its own."""
        batch = torch.Generator().manual_seed(100 * next(self.batches) + dist.get_rank())
        loss: torch.Tensor = self.model(torch.randn(3, 6, generator=batch))
        self.note(loss)
        return loss

    def note(self, value: torch.Tensor) -> None:
        self.seen.append(float(value.detach()))

    def some(self) -> nn.Parameter:
        return self.draw.choice(self.params)

    def grads(self) -> list[torch.Tensor]:
        return [param.grad for param in self.params if param.grad is not None]


# ---- the loop -------------------------------------------------------------------------------------------------------


def backward(loop: Loop) -> None:
    loop.loss().backward()


def step(loop: Loop) -> None:
    loop.optimizer.step()
    if loop.draw.random() < 0.9:
        loop.optimizer.zero_grad(set_to_none=loop.draw.random() < 0.5)


def step_with_closure(loop: Loop) -> None:
    def closure() -> float:
        loop.optimizer.zero_grad()
        loss = loop.loss()
        loss.backward()
        return loss.item()

    loop.optimizer.step(closure)


def evaluate(loop: Loop) -> None:
    loop.model.eval()
    with torch.no_grad():
        loop.loss()
    loop.model.train()


def skip_backward(loop: Loop) -> None:
    loop.loss()


def write_before_backward(loop: Loop) -> None:
    loss = loop.loss()
    loop.some().data.mul_(0.9)
    loss.backward()


def one_layer(loop: Loop) -> None:
    layer = loop.draw.choice(list(loop.model.layers))
    with torch.no_grad():
        loop.note(layer(torch.ones(1, layer.in_features)).sum())


def zero_grad(loop: Loop) -> None:
    loop.optimizer.zero_grad(set_to_none=loop.draw.random() < 0.5)


def fail_and_retry(loop: Loop) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    handle = loop.model.layers[0].register_forward_pre_hook(fail)
    with contextlib.suppress(ArithmeticError):
        loop.model(torch.ones(1, 6))
    handle.remove()
    if hasattr(FSDPModule, "reset_iter_state"):
        loop.model.reset_iter_state()  # type: ignore[operator]


def freeze(loop: Loop) -> None:
    for layer in loop.model.layers:
        layer.reshard()
    loop.model.reshard()  # type: ignore[operator]
    param = loop.draw.choice(loop.params[:-1])
    param.requires_grad_(not param.requires_grad)


# ---- weights --------------------------------------------------------------------------------------------------------


def lerp(loop: Loop) -> None:
    with torch.no_grad():
        for param, average in zip(loop.params, loop.average):
            param.lerp_(average, 0.3)


def write_data(loop: Loop) -> None:
    loop.some().data.mul_(0.8)


def write_local(loop: Loop) -> None:
    with torch.no_grad():
        loop.some().to_local()[:1].add_(0.1)  # type: ignore[operator]


def write_foreach(loop: Loop) -> None:
    with torch.no_grad():
        torch._foreach_mul_(loop.params, 0.95)


def swap_data(loop: Loop) -> None:
    param = loop.some()
    param.data = param.data * 0.9


def swap_local(loop: Loop) -> None:
    local = loop.some().to_local()  # type: ignore[operator]
    local.data = local.data * 0.9


def write_state_dict(loop: Loop) -> None:
    for value in loop.draw.sample(list(floats(loop.model.state_dict()).values()), 2):
        value.mul_(0.9)


def write_first_state_dict(loop: Loop) -> None:
    loop.first[loop.draw.choice(list(loop.first))].mul_(0.9)


def load(loop: Loop) -> None:
    found = loop.model.state_dict()
    loop.model.load_state_dict({**found, **{name: value * 0.9 for name, value in floats(found).items()}})


def set_state_dict(loop: Loop) -> None:
    found = get_model_state_dict(loop.model)
    set_model_state_dict(loop.model, {**found, **{name: value * 0.9 for name, value in floats(found).items()}})


def step_by_hand(loop: Loop) -> None:
    having, one_by_one = [param for param in loop.params if param.grad is not None], loop.draw.random() < 0.5
    with torch.no_grad():
        if one_by_one:
            for param in having:
                param.data -= 0.1 * param.grad
        elif having:
            torch._foreach_add_(having, [param.grad for param in having], alpha=-0.1)
    for param in loop.params:
        param.grad = None


# ---- gradients ------------------------------------------------------------------------------------------------------


def log_norm(loop: Loop) -> None:
    for gradient in loop.grads()[:2]:
        loop.note(gradient.full_tensor().norm())  # type: ignore[operator]


def log_local(loop: Loop) -> None:
    for gradient in loop.grads():
        loop.note(gradient.to_local().sum() if dist.get_rank() else gradient._local_tensor.sum())  # type: ignore[operator]


def clip(loop: Loop) -> None:
    trained = [param for param in loop.params if param.grad is not None]
    norm = clip_grad_norm_(trained, 0.1) if trained else torch.zeros(())
    loop.note(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def total_norm(loop: Loop) -> None:
    if loop.grads():
        loop.note(get_total_norm(loop.grads()).full_tensor())  # type: ignore[attr-defined]


def mask(loop: Loop) -> None:
    for gradient in loop.grads():
        gradient.to_local()[:1].zero_()  # type: ignore[operator]


def clean(loop: Loop) -> None:
    for gradient in loop.grads():
        gradient.copy_(torch.where(gradient.isfinite(), gradient, torch.zeros_like(gradient)))


def halve(loop: Loop) -> None:
    for gradient in loop.grads():
        gradient.data.mul_(0.5)


def drop_one(loop: Loop) -> None:
    loop.some().grad = None


def zero_one(loop: Loop) -> None:
    if (gradient := loop.some().grad) is not None:
        gradient.zero_()


def replace_gradient(loop: Loop) -> None:
    if (gradient := (param := loop.some()).grad) is not None:
        param.grad = gradient.clone() * 2


EVERY: list[Callable[[Loop], None]] = [
    *(step_with_closure, evaluate, skip_backward, write_before_backward, one_layer, zero_grad, fail_and_retry, freeze),
    *(lerp, write_data, write_local, write_foreach, swap_data, swap_local),
    *(write_state_dict, write_first_state_dict, load, set_state_dict, step_by_hand),
    *(log_norm, log_local, clip, total_norm, mask, clean, halve, drop_one, zero_one, replace_gradient),
]


def check_actions_at_random_give_what_fsdp2_gives() -> None:
    for seed in range(SEQUENCES):
        stock, own = Loop(seed, None), Loop(seed, {"preset": "lossless", "guard": {"every": 3}})
        stock.run(ACTIONS)
        try:
            own.run(ACTIONS)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {own.taken}") from error
        near = [
            math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-7)
            for one, other in zip(own.seen, stock.seen, strict=True)
        ]
        assert all(near), f"seed {seed}: {own.taken}; {own.seen}; {stock.seen}"
        weights = [(one.to_local(), other.to_local()) for one, other in zip(own.params, stock.params)]  # type: ignore[operator]
        assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in weights), (
            f"seed {seed}: {own.taken}"
        )
        assert own.state is not None
        own.state.close()


def check_ranks_stay_equal_under_actions_at_random() -> None:
    for seed, preset in itertools.product(range(SEQUENCES // 4), ("topo", "exact")):
        loop = Loop(seed, {"preset": preset})
        loop.run(ACTIONS)
        whole = []
        for module in (*loop.model.layers, loop.model):
            module.unshard()  # type: ignore[operator]
            whole += [param.detach().clone() for param in module.parameters() if not hasattr(param, "placements")]
            module.reshard()  # type: ignore[operator]
        assert len(whole) > len(loop.params) and same_on_all_ranks(whole), f"{preset}, seed {seed}: {loop.taken}"
        assert loop.state is not None
        loop.state.close()


# ---- loops of other shapes ------------------------------------------------------------------------------------------


def muon(loop: Loop) -> None:
    """Two optimizers, one of which needs matrices."""
    matrices = torch.optim.Muon([param for param in loop.params if param.ndim == 2], lr=0.02)
    others = torch.optim.AdamW([param for param in loop.params if param.ndim == 1], lr=0.01)
    for _ in range(3):
        backward(loop)
        backward(loop)
        for optimizer in (matrices, others):
            optimizer.step()
            optimizer.zero_grad()


def compiled_step(loop: Loop) -> None:
    adam = torch.optim.AdamW(loop.params, lr=torch.tensor(0.01))
    compiled = torch.compile(lambda: adam.step(), backend="eager")
    for _ in range(3):
        backward(loop)
        compiled()
        adam.zero_grad()


def scaled(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for micro in range(5):
        scaler.scale(loop.loss()).backward()
        if micro % 2 or micro == 4:  # a short last window
            scaler.unscale_(loop.optimizer)
            clip(loop)
            scaler.step(loop.optimizer)
            scaler.update()
            loop.optimizer.zero_grad()


def sharpness_aware(loop: Loop) -> None:
    """Weights are moved along the gradient inside a step, and back."""
    for _ in range(3):
        backward(loop)
        kept = [param.detach().clone() for param in loop.params]
        with torch.no_grad():
            torch._foreach_add_(loop.params, loop.grads(), alpha=0.05)
        loop.optimizer.zero_grad()
        backward(loop)
        for param, value in zip(loop.params, kept):
            param.data.copy_(value)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def swapped_tensors(loop: Loop) -> None:
    backward(loop)
    param = loop.params[1]
    torch.utils.swap_tensors(param, nn.Parameter(param.detach() * 0.5))
    evaluate(loop)


def check_loops_of_other_shapes_give_what_fsdp2_gives() -> None:
    for loop_of in (muon, compiled_step, scaled, sharpness_aware, swapped_tensors):
        stock, own = Loop(0, None), Loop(0, {"preset": "lossless"})
        for loop in (stock, own):
            loop_of(loop)
            evaluate(loop)
        near = [math.isclose(one, other, rel_tol=2e-6) for one, other in zip(own.seen, stock.seen, strict=True)]
        assert all(near), f"{loop_of.__name__}: {own.seen}; {stock.seen}"
        assert own.state is not None
        own.state.close()


def check_the_environment_applies_hzero() -> None:
    """In the first forward of a root, once. Wrong values and uses are one error."""
    stock = Loop(1, None)
    stock.run(ACTIONS)
    block = json.dumps({"preset": "lossless", "topology": TOPOLOGY})
    with mock.patch.dict(os.environ, HZERO_FSDP=block):
        loop = Loop(1, None)
        loop.run(ACTIONS)
        assert all(
            math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-7)
            for one, other in zip(loop.seen, stock.seen, strict=True)
        )
        with pytest.raises(ConfigError, match=r"hzero\.fsdp\.apply already"):
            hzero.fsdp.apply(loop.model)
        applied = Loop(1, {"preset": "topo"})
        evaluate(applied)
        assert applied.state is not None
        applied.state.close()
    for value, message in (
        ("tpo", "HZERO_FSDP.preset: found 'tpo'.*did you mean 'topo'"),
        ('{"preset": ', "HZERO_FSDP: found .*; expected a preset or a JSON object"),
        ('{"unit": "layer"}', "HZERO_FSDP: unit: found 'layer'"),
    ):
        with mock.patch.dict(os.environ, HZERO_FSDP=value), pytest.raises(ConfigError, match=message):
            evaluate(Loop(1, None))
