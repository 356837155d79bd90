"""Contexts, forwards and steps over the parameters of two engines, of which one is hzero's or both: what stock makes of them.

Run by test_between_steps.py on 2 ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

from tests.deepspeed.training import block_of, ds_config, engine_of

Pair = tuple[str | None, str | None]
STOCK: Pair = (None, None)
PAIRS: tuple[Pair, ...] = ((None, "lossless"), ("lossless", "topo"), ("topo", None), (None, "topo"))


def _engine(preset: str | None, model: nn.Module, whole: bool = False, trains: bool = True):
    """An engine; ``whole`` keeps all parameters whole between uses, as Trainer's "auto" keeps norms and biases."""
    config = ds_config(
        block_of(preset) if preset else None,
        zero_optimization={"stage3_param_persistence_threshold": 10**6 if whole else 0},
        optimizer={"type": "SGD", "params": {"lr": 0.1}},
        gradient_clipping=0.0,
    )
    trained = [param for param in model.parameters() if param.requires_grad]
    if not (trains and trained):
        del config["optimizer"]
    return engine_of(config, model, model_parameters=trained if trains and trained else None)


def _linear(value: float | None, width: int = 9) -> nn.Linear:
    """A layer of an awkward size, all of one value or of random ones."""
    layer = nn.Linear(width, 7, bias=False)
    if value is not None:
        nn.init.constant_(layer.weight, value)
    return layer


def _step(owner, x: torch.Tensor) -> float:
    """Trains one step and returns the loss."""
    loss = owner(x).square().mean()
    owner.backward(loss)
    owner.step()
    return loss.item()


def _as_stock(figures: Callable[[Pair], list[float]], exact: float, lossy: float, absolute: bool) -> None:
    """Compares the figures of all pairs with those of stock, to relative differences."""
    want = figures(STOCK)
    for pair in PAIRS:
        rel, lenient = (lossy, 0.02) if "topo" in pair else (exact, 1e-6)
        assert figures(pair) == pytest.approx(want, rel=rel, abs=lenient if absolute else 0), pair


def check_weights_copied_into_the_other_engine() -> None:
    """By rank 0, in either direction, as a sync of a reference model does."""

    def copied(pair: Pair) -> list[float]:
        found = []
        for order in (1, -1):
            models = _linear(0.0), _linear(1.0)
            source, target = models[::order]
            target.weight.requires_grad_(False)
            engines = [_engine(preset, model, whole) for preset, model, whole in zip(pair, models, (False, True))]
            of_source, of_target = engines[::order]
            x = torch.ones(1, 9)
            found += [_step(of_source, x), of_target(x).mean().item()]
            with GatheredParameters([one.weight for one in models], modifier_rank=0):
                expected = source.weight.sum().item()
                if dist.get_rank() == 0:
                    target.weight.data.copy_(source.weight.data)
            after = of_target(x).sum().item()
            with GatheredParameters(target.weight):
                held = target.weight.sum().item()
            with GatheredParameters([one.weight for one in models]):
                exact = safe_get_full_fp32_param(source.weight).equal(source.weight.data)
            if pair != STOCK:
                assert exact and held == expected
                assert after == pytest.approx(expected, rel=0.02 if "topo" in pair else 1e-6)
            found.append(expected)
            for one in engines:
                one.destroy()
        return found

    _as_stock(copied, 1e-6, 0.02, False)


def check_a_context_that_changes_nothing_leaves_every_bit() -> None:
    """Also of parameters that a forward has just read decoded."""
    for pair in PAIRS:
        torch.manual_seed(1)
        models = _linear(None), _linear(None)
        originals = [one.weight.detach().clone() for one in models]
        engines = [_engine(preset, model, whole=True) for preset, model in zip(pair, models)]
        for one in engines:
            one(torch.ones(1, 9))
        for modifier in (0, None):
            with GatheredParameters([one.weight for one in models], modifier_rank=modifier):
                assert all(one.weight.data.equal(original) for one, original in zip(models, originals)), pair
        assert all(safe_get_full_fp32_param(one.weight).equal(was) for one, was in zip(models, originals)), pair
        for one in engines:
            one.destroy()


def check_a_request_for_both_whose_order_differs_between_ranks() -> None:
    """DeepSpeed's requests are sets. Layers of both models share a frozen weight, and each has a bias of its own."""
    name = "_PartitionedParameterCoordinator__all_gather_params_"
    requests, heads = getattr(PartitionedParameterCoordinator, name), set[bool]()

    def in_another_order(coordinator: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        params = sorted(params, key=lambda param: hasattr(param, "hzero_managed") != (dist.get_rank() == 0))
        if len({hasattr(param, "hzero_managed") for param in params}) == 2:
            heads.add(hasattr(params[0], "hzero_managed"))
        requests(coordinator, params, *args, **kwargs)

    def trained(pair: Pair) -> list[float]:
        torch.manual_seed(4)
        weight = nn.Parameter(torch.randn(9, 9), requires_grad=False)
        models = nn.Linear(9, 9), nn.Linear(9, 9)
        for model in models:
            model.weight = weight
        engines = [_engine(preset, model) for preset, model in zip(pair, models)]
        x = torch.linspace(-1, 1, 9).view(1, 9)
        found = [_step(one, x) for _ in range(3) for one in engines]
        for one in engines:
            one.destroy()
        return found

    with mock.patch.object(PartitionedParameterCoordinator, name, in_another_order):
        _as_stock(trained, 1e-5, 0.05, True)
    assert heads == {dist.get_rank() == 0}, "the first parameter of a request"


def check_an_engine_without_an_optimizer_reads_what_another_trains() -> None:
    """Made before or after it; after each step."""

    def watched(pair: Pair) -> list[float]:
        found = []
        for trains in ((True, False), (False, True)):
            torch.manual_seed(3)
            layers = _linear(None), _linear(None)
            layers[1].weight = layers[0].weight
            engines = [_engine(preset, layer, trains=how) for preset, layer, how in zip(pair, layers, trains)]
            trainer, reader = engines if trains[0] else engines[::-1]
            x = torch.linspace(-1, 1, 9).view(1, 9)
            for _ in range(3):
                _step(trainer, x)
                with torch.no_grad():
                    found.append(reader(x).square().sum().item())
            for one in engines:
                one.destroy()
        return found

    _as_stock(watched, 1e-5, 0.05, True)
