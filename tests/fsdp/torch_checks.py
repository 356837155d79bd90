"""What PyTorch's own tests of fully_shard do, on gloo, with hzero and without: the same results.

The names are those of the tests in PyTorch's test/distributed/_composable/fsdp, which need GPUs. Run by test_fsdp.py on 4 ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard

import hzero.fsdp
from tests.fsdp.training import WORLD, mesh_of
from tests.ranks import LONG

WIDTH = 16
TOPOLOGY = {"gpus_per_node": 1, "gcds_per_gpu": 2}
Results = list[Any]


@dataclass
class Setting:
    """How the cases of one pass shard.

    Attributes:
        on: Whether hzero is applied.
    """

    on: bool

    def shard(self, model: Any, parts: Any = None, mesh: Any = None, **how: Any) -> Any:
        """Shards a model and its parts, by default its children."""
        how = {"mesh": mesh if mesh is not None else mesh_of(WORLD), **how}
        for part in model.children() if parts is None else parts:
            fully_shard(part, **how)
        fully_shard(model, **how)
        if self.on:
            hzero.fsdp.apply(model, "lossless", TOPOLOGY)
        else:
            model.set_reduce_scatter_unused_params(True)
        return model


def mlp(layers: int = 3, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(width, 2 * width + 1), nn.ReLU(), nn.Linear(2 * width + 1, width))
            for _ in range(layers)
        )
    )


def batch(step: int = 0, width: int = WIDTH) -> torch.Tensor:
    rank = dist.get_rank()
    return torch.randn(3, width, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(
    model: Any, run: Callable[[torch.Tensor], Any] | None = None, steps: int = 3, **of_optimizer: Any
) -> Results:
    """Losses, norms and final weights of some steps."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer, found = torch.optim.Adam(params, lr=1e-2, **of_optimizer), Results()
    for step in range(steps):
        loss = (run or model)(batch(step)).float().square().mean()
        loss.backward()
        found += [loss.detach(), *clipped(params)]
        optimizer.step()
        optimizer.zero_grad()
    return found + weights(model)


def clipped(params: list[nn.Parameter]) -> Results:
    meshes = {param.device_mesh for param in params if hasattr(param, "device_mesh")}
    return [nn.utils.clip_grad_norm_(params, 1.0).full_tensor()] if len(meshes) == 1 else []  # type: ignore[attr-defined]


def weights(model: nn.Module) -> Results:
    return [
        param.full_tensor().detach() if hasattr(param, "full_tensor") else param.detach()
        for param in model.parameters()
    ]


# ---- test_fully_shard_training ------------------------------------------------------------------------------------------


def train_parity_multi_group_unshard_async_op(own: Setting) -> Results:
    model = own.shard(mlp())
    model._set_unshard_async_op(True)
    return trained(model)


def non_root_forward_backward(own: Setting) -> Results:
    model = own.shard(mlp())
    found = trained(model, steps=1)
    return found + trained(model, lambda x: model(x) + model[1](x), steps=2)


def multi_forward_module(own: Setting) -> Results:
    model = own.shard(mlp())
    return trained(model, lambda x: model(x) + model(x + 1))


def explicit_prefetching(own: Setting) -> Results:
    model = own.shard(mlp(4))
    for place in range(3):
        model[place].set_modules_to_forward_prefetch(list(model[place + 1 : place + 3]))
        model[3 - place].set_modules_to_backward_prefetch([model[2 - place]])
    return trained(model)


def train_parity_shard_placement_fn_shard_largest_dim(own: Setting) -> Results:
    place = lambda param: Shard(param.shape.index(max(param.shape)))  # noqa: E731
    model = nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH * (1 + i % 2)) if i % 2 else nn.Linear(WIDTH, WIDTH) for i in range(2))
    )
    torch.manual_seed(3)
    for param in model.parameters():
        nn.init.normal_(param, std=0.1)
    return trained(own.shard(model, shard_placement_fn=place))


def one_f_one_b_microbatching(own: Setting) -> Results:
    model, found = own.shard(mlp(), reshard_after_forward=False), Results()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(2):
        model.set_is_last_backward(False)
        losses = [model(batch(micro)).square().mean() for micro in range(2)]
        for micro in range(3):
            if micro == 2:
                model.set_is_last_backward(True)
            losses[micro].backward()
            losses.append(model(batch(micro + 2)).square().mean())
        found += [loss.detach() for loss in losses]
        optimizer.step()
        optimizer.zero_grad()
    return found + weights(model)


def register_fsdp_forward_method_(own: Setting) -> Results:
    class Chatty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def say(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2

    model = own.shard(Chatty())
    register_fsdp_forward_method(model, "say")
    return trained(model, lambda x: model.say(x))


# ---- test_fully_shard_state_dict_, _clip_grad_norm_ ----------------------------------------------------------------------


def clip_grad_norm_1d(own: Setting) -> Results:
    model = own.shard(mlp())
    model(batch()).square().sum().backward()
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=kind).full_tensor() for kind in (2, 1)]
    return norms + [param.grad.full_tensor() for param in model.parameters()]


# ---- test_fully_shard_mixed_precision -------------------------------------------------------------------------------------


def _mixed(own: Setting, **policy: Any) -> Results:
    return trained(own.shard(mlp(), mp_policy=MixedPrecisionPolicy(**policy)))


def reduce_dtype_of_bfloat16(own: Setting) -> Results:
    return _mixed(own, reduce_dtype=torch.bfloat16)


def norm_modules_bf16(own: Setting) -> Results:
    model = nn.Sequential(mlp(1), nn.LayerNorm(WIDTH), mlp(1))
    return trained(
        own.shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    )


# ---- test_fully_shard_frozen, _autograd -----------------------------------------------------------------------------------


def train_mixed_requires_grad_across_groups(own: Setting) -> Results:
    model = mlp()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    return trained(own.shard(model), lambda x: model(x.requires_grad_()))


def unused_forward_output(own: Setting) -> Results:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = mlp(1), mlp(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.kept = self.second(x)
            return self.first(x)

    return trained(own.shard(Two()))


def nontensor_activations(own: Setting) -> Results:
    @dataclass
    class Made:
        value: torch.Tensor

    class Boxed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(1)

        def forward(self, x: Any) -> Made:
            return Made(self.inner(x.value if isinstance(x, Made) else x))

    model = nn.Sequential(Boxed(), Boxed())
    return trained(own.shard(model), lambda x: model(x).value)


# ---- test_fully_shard_comm, _grad_scaler, _ignore_params ------------------------------------------------------------------


def manual_reshard_after_backward_false(own: Setting) -> Results:
    model = own.shard(mlp())
    model.set_reshard_after_backward(False)
    found = Results()
    for micro in range(2):
        loss = model(batch(micro)).square().mean()
        loss.backward()
        found.append(loss.detach())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return found + [param.grad.full_tensor() for param in model.parameters()]


def set_gradient_divide_factor(own: Setting) -> Results:
    model = own.shard(mlp())
    for module in [model, *model]:
        module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        module.set_gradient_divide_factor(3.0)
    return trained(model)


def unshard_async(own: Setting) -> Results:
    model = own.shard(mlp())

    def run(x: torch.Tensor) -> torch.Tensor:
        handles = [part.unshard(async_op=True) for part in model]
        for handle in handles:
            handle.wait()
        return model(x)

    return trained(model, run)


def gradient_scaler(own: Setting) -> Results:
    model, scaler = own.shard(mlp()), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer, found = torch.optim.Adam(model.parameters(), lr=1e-2), Results()
    for step in range(3):
        loss = model(batch(step)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found + weights(model)


def ignored_params(own: Setting) -> Results:
    model = mlp()
    kept = {model[1][0].weight, model[1][0].bias}
    for param in kept:
        param.requires_grad_(False)
    return trained(own.shard(model, ignored_params=kept))


CASES: tuple[Callable[[Setting], Results], ...] = (
    train_parity_multi_group_unshard_async_op,
    non_root_forward_backward,
    multi_forward_module,
    explicit_prefetching,
    train_parity_shard_placement_fn_shard_largest_dim,
    one_f_one_b_microbatching,
    register_fsdp_forward_method_,
    clip_grad_norm_1d,
    reduce_dtype_of_bfloat16,
    norm_modules_bf16,
    train_mixed_requires_grad_across_groups,
    unused_forward_output,
    nontensor_activations,
    manual_reshard_after_backward_false,
    set_gradient_divide_factor,
    unshard_async,
    gradient_scaler,
    ignored_params,
)
#: Relative difference of results with sums in bfloat16, which are rounded once per tier.
COARSE = {
    "reduce_dtype_of_bfloat16": 2e-2,
}


def check_cases_of_pytorchs_own_tests() -> None:
    if LONG.args[0]:
        pytest.skip(LONG.kwargs["reason"])
    wrong = []
    for case in CASES:
        found, wanted = case(Setting(True)), case(Setting(False))
        tolerance = COARSE.get(case.__name__, 1e-5)
        for one, other in zip(found, wanted, strict=True):
            if not torch.allclose(one, other, rtol=tolerance, atol=tolerance):
                wrong.append((case.__name__, float((one - other).abs().max())))
                break
    assert not wrong, wrong
