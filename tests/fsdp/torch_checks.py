"""PyTorch's own tests of fully_shard, written again for gloo: with hzero and without it the results are the same.

A row has the name of the test in PyTorch's test/distributed/_composable/fsdp/test_fully_shard_*.py that does the same. Its own
runner skips most of them without GPUs. Tests that rows of tests/parity or action_checks.py repeat are left out. Run by
test_fsdp.py on 4 ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hzero.fsdp
from tests.parity.compare import WORLD
from tests.parity.fsdp import mesh_of
from tests.parity.zoo import VOCAB

WIDTH = 16
TOPOLOGY = {"packages_per_node": 1, "devices_per_package": 2}
Results = list[Any]


class Sharder:
    """Shards the models of a case.

    Attributes:
        on: Whether hzero is applied.
        states: Those of hzero.
    """

    def __init__(self, on: bool) -> None:
        self.on, self.states = on, list[hzero.fsdp.FsdpState]()

    def __call__(self, model: Any, parts: Iterable[Any] | None = None, **how: Any) -> Any:
        """Calls ``fully_shard`` for parts of a model, by default its children, and for the model."""
        how = {"mesh": mesh_of(WORLD), **how}
        for part in [*(model.children() if parts is None else parts), model]:
            fully_shard(part, **how)
        return self.apply(model)

    def apply(self, model: Any) -> Any:
        if self.on:
            self.states.append(hzero.fsdp.apply(model, "lossless", TOPOLOGY))
        else:  # as hzero does
            for module in sharded(model):
                module.set_reduce_scatter_unused_params(True, recurse=False)
        return model


def both(case: Callable[[Sharder], Results]) -> Callable[[], None]:
    """A check that a case has the same results with hzero and without it."""

    def run(on: bool) -> Results:
        shard = Sharder(on)
        found = case(shard)
        for state in shard.states:
            state.close()
        return [one.float() if isinstance(one, torch.Tensor) else one for one in found]

    def check() -> None:
        torch.testing.assert_close(run(True), run(False), rtol=1e-6, atol=1e-6)

    return check


def sharded(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def mlp(width: int = WIDTH, inner: int = 2 * WIDTH + 1, count: int = 2) -> nn.Sequential:
    torch.manual_seed(1)
    linears = ((nn.Linear(width, inner), nn.Linear(inner, width)) for _ in range(count))
    return nn.Sequential(*(nn.Sequential(one, nn.ReLU(), other) for one, other in linears))


def rows(step: int = 0, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def tokens(step: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def trained(
    model: Any,
    run: Callable[[torch.Tensor], torch.Tensor] | None = None,
    batches: Callable[[int], torch.Tensor] = rows,
    steps: int = 2,
) -> Results:
    """Losses, norms and final weights of some steps. ``run`` may do its backwards itself."""
    # SGD, whose steps are no larger for errors of rounding than for gradients.
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), Results()
    for step in range(steps):
        loss = (run or model)(batches(step)).float().square().mean()
        if loss.requires_grad:
            loss.backward()
        found += [loss.detach(), norm_of(model)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return found + whole(model)


def norm_of(model: nn.Module, kind: float = 2.0) -> Any:
    norm: Any = nn.utils.clip_grad_norm_((one for one in model.parameters() if isinstance(one, DTensor)), 0.1, kind)
    return norm.full_tensor()


def whole(model: nn.Module) -> Results:
    return [one.full_tensor().detach() if isinstance(one, DTensor) else one.detach() for one in model.parameters()]


def each(make: Callable[..., Results], *options: Any) -> Results:
    """The results of each of some options, or of tuples of them."""
    return [one for chosen in options for one in make(*chosen if isinstance(chosen, tuple) else (chosen,))]


# ---- layers in other orders ---------------------------------------------------------------------------------------------


def largest_dim(shard: Sharder) -> Results:
    place = lambda param: Shard(param.shape.index(max(param.shape)))  # noqa: E731
    return trained(shard(mlp(inner=2 * WIDTH), shard_placement_fn=place))


def forward_method(shard: Sharder) -> Results:
    class Chatty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def say(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2

    model = shard(Chatty())
    register_fsdp_forward_method(model, "say")
    return trained(model, lambda x: model.say(x))


def without_common_root(shard: Sharder) -> Results:
    model = mlp()
    for layer in model:
        fully_shard(layer, mesh=mesh_of(WORLD))
        layer._get_fsdp_state()._lazy_init()
    share_comm_ctx(list(model))
    return trained(shard.apply(model))


def nested(shard: Sharder) -> Results:
    model = mlp()
    for layer in model:
        checkpoint(layer)
    shard(model, [part for layer in model for part in (layer[0], layer[2], layer)])
    return trained(model, lambda x: model(x) - model(x + 1))


# ---- accumulation -------------------------------------------------------------------------------------------------------


def one_forward_one_backward(shard: Sharder) -> Results:
    """Forwards ahead of backwards."""
    model = shard(mlp(), reshard_after_forward=False)

    def run(x: torch.Tensor) -> torch.Tensor:
        handles = [module.unshard(async_op=True) for module in sharded(model)]
        for handle in filter(None, handles):
            handle.wait()
        losses = [model(x + micro).square().mean() for micro in range(2)]
        for micro in range(3):
            model.set_is_last_backward(micro == 2)
            model.set_requires_gradient_sync(micro == 2)
            model.set_reshard_after_backward(micro == 2)
            losses[micro].backward()
            if micro == 0:
                losses.append(model(x + 2).square().mean())
        return torch.stack(losses).detach()

    return trained(model, run)


class Chunked(nn.Module):
    """A model whose head may be left out, to be called for parts of its input, as torchtitan does."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.body = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, skip: bool = False) -> torch.Tensor:
        hidden = self.norm(self.body(self.embed(tokens)))
        return hidden if skip else self.head(hidden)

    def parts(self) -> list[Any]:
        if self.head.weight is self.embed.weight:
            return [self.body, [self.embed, self.norm, self.head]]
        return [self.embed, self.body, [self.norm, self.head]]


def in_chunks(model: Chunked, x: torch.Tensor, kept: bool = False) -> torch.Tensor:
    """A forward and backward that calls the head for two chunks, keeping its weights between them if ``kept``."""
    hidden, losses, back = model(x, skip=True), [], []
    if kept:
        model.head.set_reshard_after_forward(False)
        model.head.set_reshard_after_backward(False)
    for chunk in hidden.detach().chunk(2, dim=1):
        chunk = chunk.contiguous().requires_grad_()
        losses.append(model.head(chunk).float().square().mean())
        losses[-1].backward()
        back.append(chunk.grad)
    if kept:
        model.head.set_reshard_after_forward(True)
        model.head.set_reshard_after_backward(True)
        model.head.reshard()
    hidden.backward(torch.cat(back, dim=1).to(hidden.dtype))
    return torch.stack(losses).detach()


def in_chunks_of(shard: Sharder, kept: bool = False, **how: Any) -> Results:
    tied = how.pop("tied", False)
    model = Chunked(tied)
    shard(model, model.parts(), **how)
    return trained(model, functools.partial(in_chunks, model, kept=kept), tokens)


def partial_forwards(shard: Sharder) -> Results:
    model = Chunked()
    shard(model, model.parts())
    return trained(model, lambda x: model(x, skip=True) + model(x.flip(0), skip=True), tokens)


# ---- dtypes, norms, frozen layers, other wrappers -----------------------------------------------------------------------


def clipped(shard: Sharder) -> Results:
    """Norms of each kind beside tensor groups, and gradients clipped by them."""
    model, mesh = mlp(), mesh_of(WORLD, tensor=2)
    for layer in model.children():
        parallelize_module(
            layer, mesh["tensor"], {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
        )
    shard(model, mesh=mesh["data"])
    found = Results()
    for kind in (2, 1, 3, float("inf")):
        model(rows()).square().sum().backward()
        found += [norm_of(model, kind), *(param.grad.full_tensor() for param in model.parameters())]
        model.zero_grad()
    return found


def divide_factor(shard: Sharder) -> Results:
    model = shard(mlp())
    for module in sharded(model):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        module.set_gradient_divide_factor(2.0 * WORLD)
    return trained(model)


def beside_ddp(shard: Sharder) -> Results:
    """DDP outside of a sharded module, and for what that ignores."""
    model = mlp()
    ignored = set(model[1][0].parameters())
    shard(model[1], [model[1][2]], ignored_params=ignored)
    names = [f"1.{name}" for name, param in model[1].named_parameters() if param not in ignored]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return trained(nn.parallel.DistributedDataParallel(model))


COARSE = MixedPrecisionPolicy(torch.float32, output_dtype=torch.bfloat16)
ROWS = {
    "train_parity_shard_placement_fn_shard_largest_dim": both(largest_dim),
    "register_fsdp_forward_method": both(forward_method),
    "share_comm_context": both(without_common_root),
    "1f1b_microbatching": both(one_forward_one_backward),
    "partial_group_forward_then_standalone": both(in_chunks_of),
    "partial_group_forward_tied": both(
        functools.partial(in_chunks_of, tied=True, reshard_after_forward=False, mp_policy=COARSE)
    ),
    "partial_group_reshard_toggle": both(functools.partial(in_chunks_of, kept=True)),
    "double_partial_forward_then_backward": both(partial_forwards),
    "double_forward_with_nested_fsdp_and_checkpoint": both(nested),
    "clip_grad_norm_2d": both(clipped),
    "set_reduce_scatter_divide_factor": both(divide_factor),
    "ddp_a_fsdp_b_ddp_c": both(beside_ddp),
}
