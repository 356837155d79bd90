"""Trains a small model in several ways and prints, as JSON lines of rank 0, figures that do not depend on hzero.

Args: stock, or presets of hzero; one line is printed for each pair of a preset and a function ``trial_*``. ``PRESET:TRIAL``
runs one trial only.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")


def engine_of(
    preset: str,
    *,
    accumulation: int = 1,
    offload: bool = False,
    kept: int | None = 0,
    trained: str = "",
    block: dict[str, Any] | None = None,
    **zero: Any,
) -> Any:
    """An engine of three layers.

    Args:
        preset: Of hzero, or stock.
        accumulation: Micro-batches of a step.
        offload: Whether the optimizer's states are on the host.
        kept: Persistence threshold; None leaves the key out.
        trained: Prefix of the parameters that the optimizer holds.
        block: More keys of the block.
        zero: More keys of ``zero_optimization``.
    """
    zero = {"stage": 3, **zero}
    if kept is not None:
        zero["stage3_param_persistence_threshold"] = kept
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if preset != "stock":
        topology = {"nodes": 2, "gpus_per_node": 1, "gcds_per_gpu": 1}
        zero["hzero"] = {"preset": preset, "topology": topology, **(block or {})}
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 17), torch.nn.GELU(), torch.nn.Linear(17, 17), torch.nn.GELU(), torch.nn.Linear(17, 8)
    )
    return deepspeed.initialize(
        model=model,
        model_parameters=[param for name, param in model.named_parameters() if name.startswith(trained)],
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulation,
            "zero_optimization": zero,
            "zero_force_ds_cpu_optimizer": False,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "steps_per_print": 10**9,
        },
    )[0]


def loss_of(engine: Any, number: int) -> Any:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    return (engine(x) - x.roll(1, 1)).square().mean()


def mean(loss: torch.Tensor) -> float:
    value = loss.detach().double().clone()
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


def train(engine: Any, first: int, micros: int) -> list[float]:
    losses = []
    for number in range(first, first + micros):
        loss = loss_of(engine, number)
        engine.backward(loss)
        engine.step()
        losses.append(mean(loss))
    return losses


def whole(param: torch.Tensor) -> torch.Tensor:
    with deepspeed.zero.GatheredParameters([param]):
        return param.detach().float().clone()


def trial_freeze(preset: str) -> dict[str, Any]:
    """How far a layer moves by weight decay and momentum while it is frozen; then it trains again."""
    result = {}
    for accumulation, offload in itertools.product((1, 3), (False, True) if preset != "stock" else (False,)):
        engine = engine_of(preset, accumulation=accumulation, offload=offload)
        layer = engine.module[0]
        train(engine, 0, 2 * accumulation)
        before, moved = whole(layer.weight), []
        layer.requires_grad_(False)
        for step in (2, 3, 4):
            if step == 4:
                layer.requires_grad_(True)
            train(engine, step * accumulation, accumulation)
            moved.append(float((whole(layer.weight) - before).norm()))
        result[f"{accumulation} {offload}"] = moved
        engine.destroy()
    return result


def trial_freeze_inside_a_window(preset: str) -> dict[str, Any]:
    """The norm of a step whose second micro-batch no longer reaches a layer, and where the layer is afterwards."""
    result = {}
    for offload in (False, True):
        engine = engine_of(preset, accumulation=2, offload=offload)
        train(engine, 0, 1)
        engine.module[0].requires_grad_(False)
        train(engine, 1, 1)
        result[str(offload)] = [float(engine.get_global_grad_norm()), *whole(engine.module[0].weight)[0].tolist()]
        engine.destroy()
    return result


def trial_kept_whole(preset: str) -> dict[str, Any]:
    """Sums of what a script reads between a step and the next forward, and after it has used GatheredParameters."""
    result = {}
    for kept in (None, 20, 10**6):
        engine, read = engine_of(preset, kept=kept), []
        for step in range(3):
            train(engine, step, 1)
            params = dict(engine.module.named_parameters())
            seen = {name: params[name].detach().clone() for name in params if "bias" in name or kept != 20}
            read.append([float(value.double().norm()) for value in seen.values()])
            exact = {name: whole(params[name]) for name in seen}
            worst = max(float((seen[name] - exact[name]).abs().max()) for name in seen)
        result[str(kept)] = {"read": read, "off": worst, "losses": train(engine, 3, 2)}
        engine.destroy()
    return result


def trial_optimizer_of_a_part(preset: str) -> dict[str, Any]:
    """The error of the guard, where it ends such a training."""
    message = ""
    engine = engine_of(preset, trained="4.", block={"guard": {"discarded_steps": 2}})
    losses = train(engine, 0, 2)
    try:
        for number in (2, 3):
            engine.backward(loss_of(engine, number) * float("nan"))
            engine.step()
    except RuntimeError as error:
        message = f"{type(error).__name__}: {error}"
    return {"losses": losses, "message": message}


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise MemoryError("in the middle of backward")


def trial_cut_short(preset: str) -> dict[str, Any]:
    """Losses and norms where an exception has ended a backward, and where that micro-batch never was."""
    result: dict[str, Any] = {}
    cases = [(1, 10**8, "optimizer"), (1, 100, "engine"), (2, 10**8, "engine"), (2, 100, "optimizer")]
    for accumulation, bucket, whose in {"stock": cases[:1], "topo": cases[::3]}.get(preset, cases):
        for breaks in (False, True) if preset != "stock" else (False,):
            engine = engine_of(preset, accumulation=accumulation, reduce_bucket_size=bucket)
            losses = train(engine, 0, accumulation)
            if breaks:
                hook = engine.module[1].register_forward_hook(lambda module, args, output: _Broken.apply(output))
                try:
                    engine.backward(loss_of(engine, 90))
                    raise AssertionError("nothing has broken")
                except MemoryError:
                    hook.remove()
                (engine if whose == "engine" else engine.optimizer).zero_grad()
            losses += train(engine, accumulation, 2 * accumulation)
            key = f"{accumulation} {bucket} {whose} {breaks}"
            result[key] = [*losses, float(engine.get_global_grad_norm())]
            engine.destroy()
    return result


def trial_inference_mode(preset: str) -> dict[str, Any]:
    """Losses with evaluations under inference mode between steps and inside them; of stock without any."""
    result: dict[str, Any] = {}
    cases = [(0, False, True), (0, False, False), (10**6, False, True), (0, True, True)]
    for kept, exact, training in cases if preset != "stock" else cases[:1]:
        engine = engine_of(preset, accumulation=2, kept=kept, block={"exact_evaluation": exact})
        losses = []
        for micro in range(6):
            if preset != "stock":
                engine.train(training)
                with torch.inference_mode():
                    engine(engine(torch.ones(1, 8)))
                engine.train()
            losses += train(engine, micro, 1)
        result[f"{kept} {exact} {training}"] = losses
        engine.destroy()
    return result


for argument in sys.argv[1:]:
    one, _, only = argument.partition(":")
    for title, trial in [(title, value) for title, value in globals().items() if title.startswith(f"trial_{only}")]:
        outcome = trial(one)
        if dist.get_rank() == 0:
            print(json.dumps({"preset": one, "trial": title.removeprefix("trial_"), **outcome}), flush=True)
dist.destroy_process_group()
