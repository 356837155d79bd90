"""Between and inside steps a script sees what stock ZeRO-3 shows it, or better. Run by test_between_steps.py on 2 ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import GatheredParameters

import hzero
from tests.deepspeed.training import OFFLOAD, block_of, ds_config, engine_of, train

#: Relative difference from stock; int8 weights and int4 gradients of so small a model.
TOLERANCE = {"lossless": 1e-5, "topo": 0.1}


def _engine(
    preset: str | None, accumulation: int = 1, offload: bool = False, kept: int = 0, trained: str = "",
    block: dict[str, Any] | None = None, **zero: Any,
) -> Any:  # fmt: skip
    """An engine of three layers.

    Args:
        preset: Of hzero; None is stock.
        accumulation: Micro-batches of a step.
        offload: Whether the optimizer's states are on the host.
        kept: Persistence threshold.
        trained: Prefix of the parameters that the optimizer holds.
        block: More keys of the block.
        zero: More keys of ``zero_optimization``.
    """
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 17), torch.nn.GELU(), torch.nn.Linear(17, 17), torch.nn.GELU(), torch.nn.Linear(17, 8)]
    model = torch.nn.Sequential(*layers)
    changes = {"zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.0}
    held = [param for name, param in model.named_parameters() if name.startswith(trained)]
    zero |= {"stage3_param_persistence_threshold": kept, **(OFFLOAD["zero_optimization"] if offload else {})}
    given = block_of(preset, **(block or {})) if preset else None
    config = ds_config(given, accumulation, zero_optimization=zero, **changes)
    return engine_of(config, model, model_parameters=held)


def _loss(engine: Any, number: int, _: int = 0) -> torch.Tensor:
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    return (engine(x) - x.roll(1, 1)).square().mean()


def _train(engine: Any, first: int, micros: int) -> list[float]:
    """Losses of micro-batches."""
    return train(engine, micros, first=first, loss_of=_loss)


def _assert_near(got: list[float], want: list[float], tolerance: float) -> None:
    assert got == pytest.approx(want, rel=tolerance, abs=tolerance / 100)


def _whole(param: torch.Tensor) -> torch.Tensor:
    with GatheredParameters([param]):
        return param.detach().float().clone()


def check_a_frozen_parameter_gets_a_zero_gradient() -> None:
    """How far a layer moves by weight decay and momentum while it is frozen; then it trains again.

    With and without offload, as stock without offload: stock with offload applies the last gradient for ever.
    """

    def moved(preset: str | None, accumulation: int, offload: bool) -> list[float]:
        engine = _engine(preset, accumulation, offload)
        layer, found = engine.module[0], []
        _train(engine, 0, 2 * accumulation)
        before = _whole(layer.weight)
        for step in (2, 3, 4):
            layer.requires_grad_(step == 4)
            _train(engine, step * accumulation, accumulation)
            found.append(float((_whole(layer.weight) - before).norm()))
        engine.destroy()
        return found

    for accumulation in (1, 3):
        want = moved(None, accumulation, False)
        for (preset, tolerance), offload in itertools.product(TOLERANCE.items(), (False, True)):
            _assert_near(moved(preset, accumulation, offload), want, tolerance)


def check_a_gradient_from_before_the_freezing_counts() -> None:
    """As in torch, whose optimizers apply it; stock drops it without offload.

    The norm of a step whose second micro-batch no longer reaches a layer, and where the layer is afterwards.
    """
    found = {}
    for preset, offload in itertools.product(TOLERANCE, (False, True)):
        engine = _engine(preset, 2, offload)
        _train(engine, 0, 1)
        engine.module[0].requires_grad_(False)
        _train(engine, 1, 1)
        found[preset, offload] = [float(engine.get_global_grad_norm()), *_whole(engine.module[0].weight)[0].tolist()]
        engine.destroy()
    for preset, tolerance in TOLERANCE.items():
        _assert_near(found[preset, False], found[preset, True], 1e-5)
        _assert_near(found[preset, True], found["lossless", True], 10 * tolerance)


def check_parameters_kept_whole_are_there_between_steps() -> None:
    """What a script reads between a step and the next forward, and after it has used GatheredParameters."""
    for kept in (20, 10**6):
        want: list[float] = []
        for preset, tolerance in {None: 0.0, **TOLERANCE}.items():
            engine, read = _engine(preset, kept=kept), []
            for step in range(3):
                _train(engine, step, 1)
                params = dict(engine.module.named_parameters())
                seen = {name: params[name].detach().clone() for name in params if "bias" in name or kept != 20}
                read += [float(value.double().norm()) for value in seen.values()]
                exact = {name: _whole(params[name]) for name in seen}
                # The decoded are those that forward reads, and never written back.
                assert preset == "topo" or all(torch.equal(seen[name], exact[name]) for name in seen)
            assert all(read)
            read += _train(engine, 3, 2)
            want = want or read
            _assert_near(read, want, tolerance)
            engine.destroy()


def check_the_guard_knows_what_the_optimizer_holds() -> None:
    want: list[float] = []
    for preset, tolerance in {None: 0.0, **TOLERANCE}.items():
        engine = _engine(preset, trained="4.", block={"guard": {"discarded_steps": 2}})
        losses = _train(engine, 0, 2)
        want = want or losses
        _assert_near(losses, want, tolerance)

        def spoil(engine: Any = engine) -> None:
            train(engine, 2, first=2, loss_of=lambda engine, number, _: _loss(engine, number) * float("nan"))

        if preset is None:
            spoil()  # stock drops the steps in silence
        else:
            with pytest.raises(hzero.DivergenceError, match=r"gradients of 2 of 2 parameters: 4\.weight, 4\.bias"):
                spoil()
        engine.destroy()


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise MemoryError("in the middle of backward")


def check_zero_grad_after_an_exception_in_backward_begins_anew() -> None:
    """Losses and norms where an exception has ended a backward are those where that micro-batch never was."""

    def losses(preset: str | None, accumulation: int, bucket: int, whose: str, breaks: bool) -> list[float]:
        engine = _engine(preset, accumulation, reduce_bucket_size=bucket)
        found = _train(engine, 0, accumulation)
        if breaks:
            hook = engine.module[1].register_forward_hook(lambda module, args, output: _Broken.apply(output))
            with pytest.raises(MemoryError):
                engine.backward(_loss(engine, 90))
            hook.remove()
            (engine if whose == "engine" else engine.optimizer).zero_grad()
        found += [*_train(engine, accumulation, 2 * accumulation), float(engine.get_global_grad_norm())]
        engine.destroy()
        return found

    cases = [(1, 10**8, "optimizer"), (1, 100, "engine"), (2, 10**8, "engine"), (2, 100, "optimizer")]
    stock = losses(None, *cases[0], False)
    for preset, tolerance in TOLERANCE.items():
        for case in cases if preset == "lossless" else cases[::3]:
            want = losses(preset, *case, False)
            _assert_near(losses(preset, *case, True), want, 1e-6 if preset == "lossless" else tolerance)
            if case == cases[0]:
                _assert_near(want, stock, tolerance)
