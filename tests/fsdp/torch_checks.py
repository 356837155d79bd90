"""PyTorch's own tests of fully_shard, written again for gloo: with hzero and without it the results are the same.

A check has the name of the test in PyTorch's test/distributed/_composable/fsdp/test_fully_shard_*.py that does the same. Its own
runner skips most of them without GPUs. Run by test_fsdp.py on 4 ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hzero.fsdp
from tests.parity.compare import WORLD
from tests.parity.fsdp import mesh_of
from tests.parity.zoo import VOCAB, Net

WIDTH = 16
TOPOLOGY = {"packages_per_node": 1, "devices_per_package": 2}
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
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


def both(case: Callable[[Sharder], Results], tolerance: float = 1e-6) -> Callable[[], None]:
    """A check that a case has the same results with hzero and without it."""

    def run(on: bool) -> Results:
        shard = Sharder(on)
        found = case(shard)
        for state in shard.states:
            state.close()
        return [one.float() if isinstance(one, torch.Tensor) else one for one in found]

    def check() -> None:
        torch.testing.assert_close(run(True), run(False), rtol=tolerance, atol=tolerance)

    return check


def sharded(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def mlp(width: int = WIDTH, inner: int = 2 * WIDTH + 1, count: int = 2) -> nn.Sequential:
    torch.manual_seed(1)
    linears = ((nn.Linear(width, inner), nn.Linear(inner, width)) for _ in range(count))
    return nn.Sequential(*(nn.Sequential(one, nn.ReLU(), other) for one, other in linears))


def text(**how: Any) -> Net:
    torch.manual_seed(1)
    return Net(**how)


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


def gradients(model: nn.Module) -> Results:
    return [param.grad.full_tensor() for param in model.parameters()]


def each(make: Callable[..., Results], *options: Any) -> Results:
    """The results of each of some options, or of tuples of them."""
    return [one for chosen in options for one in make(*chosen if isinstance(chosen, tuple) else (chosen,))]


# ---- training -----------------------------------------------------------------------------------------------------------


@both
def check_train_parity_single_group_shard_dim0(shard: Sharder) -> Results:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 15), nn.ReLU(), nn.Linear(15, 3))
    return trained(shard(model, ()), batches=functools.partial(rows, width=7))


@both
def check_train_parity_multi_group(shard: Sharder) -> Results:
    return each(lambda after: trained(shard(mlp(), reshard_after_forward=after)), False, 2)


@both
def check_train_parity_multi_group_cpu_offload_eager(shard: Sharder) -> Results:
    return trained(shard(mlp(), offload_policy=CPUOffloadPolicy(pin_memory=False)))


@both
def check_train_parity_multi_group_unshard_async_op(shard: Sharder) -> Results:
    model = shard(mlp())
    model._set_unshard_async_op(True)
    return trained(model)


@both
def check_train_parity_shard_placement_fn_shard_largest_dim(shard: Sharder) -> Results:
    place = lambda param: Shard(param.shape.index(max(param.shape)))  # noqa: E731
    return trained(shard(mlp(inner=2 * WIDTH), shard_placement_fn=place))


@both
def check_non_root_forward_backward(shard: Sharder) -> Results:
    model = shard(mlp())
    return trained(model) + trained(model, lambda x: model[0](x))


@both
def check_multi_forward_module(shard: Sharder) -> Results:
    model = shard(mlp())
    return trained(model, lambda x: model(x) + model[1](x) + model[1](x + 1))


@both
def check_explicit_prefetching(shard: Sharder) -> Results:
    model = shard(mlp(count=3))
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[1], model[0]])
    return trained(model)


@both
def check_train_parity_with_activation_checkpointing(shard: Sharder) -> Results:
    def train(wrap: Callable[[nn.Module], nn.Module], after: bool) -> Results:
        model = text()
        for place, block in enumerate(model.blocks):
            model.blocks[place] = wrap(block)
        first, *others = model.blocks
        shard(model, (first, others, model.embed, model.head), reshard_after_forward=after)
        model.embed.set_unshard_in_backward(False)  # the backward of an embedding does not read its weights
        return trained(model, batches=tokens)

    return each(train, (checkpoint, True), (checkpoint_wrapper, False))


@both
def check_train_parity_with_shared_params(shard: Sharder) -> Results:
    model = text(tied=True)
    for block in model.blocks:
        checkpoint(block)
    return trained(shard(model, model.blocks, reshard_after_forward=False), batches=tokens)


@both
def check_train_shared_params_uneven_shard(shard: Sharder) -> Results:
    model = text(tied=True)
    return trained(shard(model, [[model.embed, model.head]]), batches=tokens)


@both
def check_register_fsdp_forward_method(shard: Sharder) -> Results:
    class Chatty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def say(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2

    model = shard(Chatty())
    register_fsdp_forward_method(model, "say")
    return trained(model, lambda x: model.say(x))


@both
def check_share_comm_context(shard: Sharder) -> Results:
    """Layers without a common root."""
    model = mlp()
    for layer in model:
        fully_shard(layer, mesh=mesh_of(WORLD))
        layer._get_fsdp_state()._lazy_init()
    share_comm_ctx(list(model))
    return trained(shard.apply(model))


@both
def check_gradient_accumulation(shard: Sharder) -> Results:
    def train(flagged: slice | None, kept: bool) -> Results:
        model = shard(nn.Sequential(*mlp(), nn.Linear(WIDTH, WIDTH)), reshard_after_forward=not kept)

        def run(x: torch.Tensor) -> torch.Tensor:
            for micro in range(3):
                for module in [model] if flagged is None else model[flagged]:
                    module.set_requires_gradient_sync(micro == 2)
                    module.set_reshard_after_backward(micro == 2 or not kept)
                loss = model(x + micro).square().mean()
                loss.backward()
            return loss.detach()

        return trained(model, run)

    return each(train, (None, True), (slice(2, 3), False), (slice(0, 1), False))


@both
def check_1f1b_microbatching(shard: Sharder) -> Results:
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


# ---- training, composed with others ------------------------------------------------------------------------------------


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


@both
def check_partial_group_forward_then_standalone(shard: Sharder) -> Results:
    def train(tied: bool, after: bool, policy: MixedPrecisionPolicy) -> Results:
        model = Chunked(tied)
        shard(model, model.parts(), reshard_after_forward=after, mp_policy=policy)
        return trained(model, functools.partial(in_chunks, model), tokens)

    coarse = MixedPrecisionPolicy(torch.float32, output_dtype=torch.bfloat16)
    return each(train, (False, True, MixedPrecisionPolicy()), (True, False, coarse))


@both
def check_partial_group_forward_grad_accum_chunked(shard: Sharder) -> Results:
    model = Chunked()
    shard(model, model.parts())

    def run(x: torch.Tensor) -> torch.Tensor:
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            model.set_is_last_backward(micro == 2)
            losses = in_chunks(model, (x + micro) % VOCAB)
        return losses

    return trained(model, run, tokens)


@both
def check_partial_group_reshard_toggle(shard: Sharder) -> Results:
    model = Chunked()
    shard(model, model.parts())
    return trained(model, functools.partial(in_chunks, model, kept=True), tokens)


@both
def check_double_partial_forward_then_backward(shard: Sharder) -> Results:
    model = Chunked()
    shard(model, model.parts())
    return trained(model, lambda x: model(x, skip=True) + model(x.flip(0), skip=True), tokens)


@both
def check_reset_iter_state_after_exception(shard: Sharder) -> Results:
    model = Chunked()
    shard(model, model.parts())
    handle = model.body.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(tokens())
    handle.remove()
    model.reset_iter_state()
    return trained(model, batches=tokens)


@both
def check_double_forward_with_nested_fsdp_and_checkpoint(shard: Sharder) -> Results:
    model = mlp()
    for layer in model:
        checkpoint(layer)
    shard(model, [part for layer in model for part in (layer[0], layer[2], layer)])
    return trained(model, lambda x: model(x) - model(x + 1))


@both
def check_2d_mlp(shard: Sharder) -> Results:
    model = mlp()
    for layer in model:
        checkpoint(layer)
    return trained(with_tensor_groups(shard, model))


def with_tensor_groups(shard: Sharder, model: nn.Module) -> Any:
    mesh = mesh_of(WORLD, tensor=2)
    for layer in model.children():
        plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
        parallelize_module(layer, mesh["tensor"], plan)
    return shard(model, mesh=mesh["data"])


# ---- mixed_precision ----------------------------------------------------------------------------------------------------


@functools.partial(both, tolerance=2e-2)
def check_compute_dtype(shard: Sharder) -> Results:
    """Sums in 16 bits, which are rounded once per tier."""
    policies = MixedPrecisionPolicy(param_dtype=torch.bfloat16), MixedPrecisionPolicy(param_dtype=torch.float16)
    return each(lambda policy: trained(shard(mlp(), mp_policy=policy)), *policies)


@functools.partial(both, tolerance=2e-2)
def check_reduce_dtype(shard: Sharder) -> Results:
    def train(policy: MixedPrecisionPolicy, after: Any) -> Results:
        model = shard(mlp(), mp_policy=policy, reshard_after_forward=after)
        return trained(model)

    return each(train, (BFLOAT16, 2), (MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), False))


@both
def check_grad_acc_with_reduce_dtype(shard: Sharder) -> Results:
    model = shard(mlp(), mp_policy=BFLOAT16, reshard_after_forward=False)

    def run(x: torch.Tensor) -> torch.Tensor:
        for micro in range(4):
            model.set_requires_gradient_sync(micro == 3)
            model.set_reshard_after_backward(micro == 3)
            loss = model(x + micro).square().mean()
            loss.backward()
        return loss.detach()

    return trained(model, run)


@both
def check_float16_on_one_submodule(shard: Sharder) -> Results:
    model = mlp()
    half = MixedPrecisionPolicy(torch.float16, torch.float32, output_dtype=torch.float32)
    fully_shard(model[1], mesh=mesh_of(WORLD), mp_policy=half)
    return trained(shard(model, (model[0],)))


@both
def check_norm_modules_bf16(shard: Sharder) -> Results:
    model = nn.Sequential(*mlp(count=1), nn.LayerNorm(WIDTH), *mlp(count=1))
    return trained(shard(model, mp_policy=BFLOAT16))


# ---- state_dict ---------------------------------------------------------------------------------------------------------


@both
def check_dp_state_dict_save_load(shard: Sharder) -> Results:
    def load(width: int, after: bool) -> Results:
        model = shard(mlp(width), reshard_after_forward=after)
        return loaded(model, functools.partial(rows, width=width))

    return each(load, (3, True), (5, False))


def loaded(model: Any, batches: Callable[[], torch.Tensor] = rows) -> Results:
    """What forwards read before and after a state is loaded, and the state."""
    found = [model(batches())]
    state = model.state_dict()  # reshards what the forward has left
    assert all(isinstance(value, DTensor) for value in state.values())
    found += [value.full_tensor() for value in state.values()]
    model.load_state_dict({name: value.detach().clone().fill_(dist.get_rank() / 8) for name, value in state.items()})
    return found + [model(batches())] + [value.full_tensor() for value in model.state_dict().values()]


@both
def check_cached_state_dict(shard: Sharder) -> Results:
    """A state that is read once follows the training."""
    model = shard(mlp())
    state = model.state_dict()
    return trained(model) + [value.full_tensor() for value in state.values()]


@both
def check_dp_state_dict_cpu_offload(shard: Sharder) -> Results:
    """Parameters on no device, which are loaded one after the other."""
    model = shard(mlp().to("meta"), offload_policy=CPUOffloadPolicy(pin_memory=False))
    torch.manual_seed(2)
    for name, param in model.named_parameters():
        value = distribute_tensor(torch.randn(param.size()), param.device_mesh, param.placements)
        model.load_state_dict({name: value}, assign=True, strict=False)
    return [model(rows()), *whole(model), *trained(model)]


@both
def check_dp_tp_state_dict_save_load(shard: Sharder) -> Results:
    model = with_tensor_groups(shard, mlp())
    return trained(model) + loaded(model)


@both
def check_rank0_offload_full_state_dict(shard: Sharder) -> Results:
    model = shard(mlp())
    found = trained(model)
    state = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
    return found + (list(state.values()) if dist.get_rank() == 0 else [])


# ---- clip_grad_norm_ ----------------------------------------------------------------------------------------------------


@both
def check_clip_grad_norm_1d(shard: Sharder) -> Results:
    return clipped(shard(mlp()), (2, 1, float("inf")))


@both
def check_clip_grad_norm_2d(shard: Sharder) -> Results:
    return clipped(with_tensor_groups(shard, mlp()), (2, 1, 3, float("inf")))


def clipped(model: Any, kinds: Sequence[float]) -> Results:
    """Norms of each kind, and gradients clipped by them."""
    found = Results()
    for kind in kinds:
        model(rows()).square().sum().backward()
        found += [norm_of(model, kind), *gradients(model)]
        model.zero_grad()
    return found


# ---- frozen -------------------------------------------------------------------------------------------------------------


@both
def check_train_mixed_requires_grad_per_group(shard: Sharder) -> Results:
    """Only biases are trained; the others are frozen before hzero is applied, or after it."""

    def train(after: Any, before: bool) -> Results:
        model = mlp()
        for layer in model:
            checkpoint(layer)
        if not before:
            shard(model, reshard_after_forward=after)
        for name, param in model.named_parameters():
            param.requires_grad_("bias" in name)
        return trained(shard(model, reshard_after_forward=after) if before else model)

    return each(train, (False, True), (2, False))


@both
def check_train_mixed_requires_grad_across_groups(shard: Sharder) -> Results:
    def train(after: Any, unfreezes: bool) -> Results:
        model = shard(mlp(), reshard_after_forward=after)
        frozen = list(model[1].parameters())  # the shards, which a forward may replace by whole parameters
        for param in frozen:
            param.requires_grad_(False)
        found = trained(model)
        with torch.no_grad():
            found.append(model(rows(3)))
        for param in frozen:
            param.requires_grad_(unfreezes)
        return found + trained(model)

    return each(train, (False, True), (2, False))


@both
def check_multi_forward_mixed_requires_grad(shard: Sharder) -> Results:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model[1].requires_grad_(False)
    first, frozen, other = shard(model)

    def run(x: torch.Tensor) -> torch.Tensor:
        x = first(x)
        for _ in range(3):
            x = frozen(other(x).relu())
            with torch.no_grad():
                x += other(x).relu()
        return x

    model.forward = run
    return trained(model)


# ---- autograd -----------------------------------------------------------------------------------------------------------


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, both: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x) if both else x


@both
def check_unused_forward_output(shard: Sharder) -> Results:
    model = shard(Double(), reshard_after_forward=2)
    return trained(model, lambda x: torch.mul(*model(x))) + trained(model, lambda x: model(x)[0])


@both
def check_unused_forward_module(shard: Sharder) -> Results:
    model = shard(Double())
    return trained(model, lambda x: model(x, both=False)[0])


# ---- comm, grad_scaler, ignore_params -----------------------------------------------------------------------------------


@both
def check_manual_reshard_with_reshard_after_forward_false(shard: Sharder) -> Results:
    model = shard(mlp(), reshard_after_forward=False)

    def run(x: torch.Tensor) -> torch.Tensor:
        made = model(x)
        for module in sharded(model):
            module.reshard()
        return made

    return trained(model, run)


@both
def check_set_reduce_scatter_divide_factor(shard: Sharder) -> Results:
    model = shard(mlp())
    for module in sharded(model):
        module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        module.set_gradient_divide_factor(2.0 * WORLD)
    return trained(model)


@both
def check_unshard_async(shard: Sharder) -> Results:
    model = shard(mlp())

    def run(x: torch.Tensor) -> torch.Tensor:
        handles = [part.unshard(async_op=True) for part in model]
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        for handle in handles:
            handle.wait()
        return model(x)

    return trained(model, run)


@both
def check_gradient_scaler(shard: Sharder) -> Results:
    def train(infinite: bool) -> Results:
        model, scaler = shard(mlp()), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimizer, found = torch.optim.Adam(model.parameters(), lr=1e-2), Results()
        for step in range(3):
            loss = model(rows(step)).square().mean()
            scaler.scale(loss).backward()
            if infinite and step == 1 and dist.get_rank() == 1:
                model[0][0].weight.grad.to_local()[0, 0] = float("inf")
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found += [loss.detach(), scaler.get_scale()]
        return found + whole(model)

    return each(train, True, False)


@both
def check_ddp_a_fsdp_b_ddp_c(shard: Sharder) -> Results:
    """DDP outside of a sharded module, and for what that ignores."""
    model = mlp()
    ignored = set(model[1][0].parameters())
    shard(model[1], [model[1][2]], ignored_params=ignored)
    names = [f"1.{name}" for name, param in model[1].named_parameters() if param not in ignored]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return trained(nn.parallel.DistributedDataParallel(model))


def check_train_parity_hsdp_is_refused() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(hzero.ConfigError, match="mesh of replicas"):
        Sharder(True)(mlp(), mesh=mesh)


def check_to_float64_after_init_is_refused() -> None:
    model = fully_shard(mlp(), mesh=mesh_of(WORLD))
    with pytest.raises(hzero.ConfigError, match=r"parameters of torch\.float64"):
        Sharder(True).apply(model.to(torch.float64))
