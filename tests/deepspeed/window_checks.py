"""Accumulation windows: readers before the end, late reductions, errors. Run by test_stage.py on 4 ranks."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

import hzero
from hzero.comm import HopError
from hzero.comm.runtime import Collective
from tests.deepspeed.training import (
    AwkwardNet,
    assert_losses,
    assert_masters,
    batch,
    block_of,
    ds_config,
    engine_of,
    masters_of,
    mean_gradient_norm,
    train,
)


def check_early_gradient_readers_are_told() -> None:
    """Before the boundary a reader gets an error that says when to come, and then DDP's gradient."""
    for managed in (True, False):
        config = ds_config(block_of("lossless"), 2, gradient_clipping=0.0, managed_gradient_accumulation=managed)
        engine, reference = engine_of(config), AwkwardNet()
        for micro in range(2):
            engine.backward(engine(batch(0, micro)))
            (reference(batch(0, micro)) / 2).backward()
            if micro == 0:
                for read in (
                    lambda engine=engine: safe_get_full_grad(engine.module.up.weight),
                    engine.optimizer.get_fp32_grad_partitions,
                ):
                    with pytest.raises(RuntimeError, match="boundary"):
                        read()
                if managed:
                    engine.step()
        if not managed:
            with pytest.raises(RuntimeError, match="finalize_gradient_accumulation_boundary"):
                safe_get_full_grad(engine.module.up.weight)
            engine.optimizer.finalize_gradient_accumulation_boundary()
        dist.all_reduce(reference.up.weight.grad)
        want = reference.up.weight.grad / dist.get_world_size()
        torch.testing.assert_close(safe_get_full_grad(engine.module.up.weight).float(), want)
        engine.step()
        engine.destroy()


def check_a_boundary_that_fails_delivers_nothing() -> None:
    """All or nothing: after an error between nodes no parameter has a new gradient, and the window is given up."""
    block = block_of("lossless", boundary_message_bytes=0)
    engine = engine_of(ds_config(block, 2, zero_optimization={"stage": 3, "reduce_bucket_size": 300}))
    train(engine, 1, 2)
    crossed, start = [], Collective.start

    def failing(collective: Collective, *arguments: Any) -> Any:
        crossed.append("gradients" in str(collective) and "'inter_node'" in str(collective))
        if crossed[-1] and sum(crossed) == 2:
            raise HopError("the second bucket between nodes")
        return start(collective, *arguments)

    engine.backward(engine(batch(1, 0)))
    engine.step()
    with mock.patch.object(Collective, "start", failing), pytest.raises(HopError, match="second bucket"):
        engine.backward(engine(batch(1, 1)))
    _assert_given_up(engine, HopError)
    engine.destroy()


def _assert_given_up(engine: Any, cause: type[BaseException]) -> None:
    """Nothing of the window is kept, using the rest of it is an error, and ``zero_grad`` begins a new one."""
    gradients = hzero.state(engine).gradients
    before = masters_of(engine)
    for go_on in (engine.optimizer.step, lambda: engine.backward(engine(batch(2, 0)))):
        with pytest.raises(RuntimeError, match="lost by an error") as told:
            go_on()
        assert isinstance(told.value.__cause__, cause)
    assert_masters(engine, before)
    engine.optimizer.zero_grad()
    assert not gradients.waiting


def check_an_error_before_any_hop_gives_up_the_window() -> None:
    """Of the second of two buckets, on one rank or on all: its gradients have been taken and are gone."""
    for preset in ("lossless", "replica"):
        engine = engine_of(ds_config(block_of(preset), zero_optimization={"stage": 3, "reduce_bucket_size": 300}))
        train(engine, 1)
        gradients = hzero.state(engine).gradients
        micro, calls = gradients._accumulate, itertools.count()

        def failing(*arguments: Any, micro: Any = micro, calls: Any = calls, **keywords: Any) -> None:
            if next(calls) == 1:
                raise MemoryError("for the second bucket")
            micro(*arguments, **keywords)

        with mock.patch.object(gradients, "_accumulate", failing), pytest.raises(MemoryError, match="second bucket"):
            engine.backward(engine(batch(1, 0)))
        _assert_given_up(engine, MemoryError)
        engine.destroy()


def check_reductions_under_way_leave_newer_gradients_alone() -> None:
    """A micro-step, then several backwards with one reduction and a reader in between, in one window."""
    for preset in ("zero3", "hpz", "lossless"):
        zero = {"stage": 3, "reduce_bucket_size": 300}
        config = ds_config(block_of(preset), 2, gradient_clipping=0.0, zero_optimization=zero)
        engine, reference = engine_of(config), AwkwardNet()
        engine.backward(engine(batch(0, 0)))
        engine.step()
        with engine.coalesce_grad_reduction():
            for micro in (1, 2):
                engine.backward(engine(batch(0, micro)))
                if micro == 1 and preset != "lossless":
                    safe_get_full_grad(engine.module.up.weight)
        engine.step()
        for micro in range(3):
            (reference(batch(0, micro)) / 2).backward()
        assert_losses([engine.get_global_grad_norm()], [mean_gradient_norm(reference)], 1e-4, f"norms of {preset}")
        engine.destroy()


def check_sums_of_a_window_have_the_right_bits() -> None:
    """In bfloat16, with buckets smaller than a parameter. All ranks have the same batches, so sums over ranks are exact.

    Partial sums are float32 and rounded once. DeepSpeed rounds each sum of two micro-steps, as does one reduction of several
    backwards.
    """
    changes: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, "reduce_bucket_size": 300}}
    stock, micros = engine_of(ds_config(**changes)), list[list[torch.Tensor]]()
    for micro in range(4):
        stock.backward(stock(batch(0, micro, rank=0)))
        micros.append(
            [safe_get_full_grad(param).bfloat16() for param in stock.module.parameters() if param.requires_grad]
        )
        stock.optimizer.zero_grad()
    stock.destroy()
    each = [functools.reduce(torch.add, parts) for parts in zip(*micros)]
    once = [functools.reduce(torch.add, [part.float() for part in parts]).bfloat16() for parts in zip(*micros)]
    assert not all(map(torch.equal, once, each))
    for preset, coalesced in itertools.product(("zero3", "lossless"), (False, True)):
        engine = engine_of(ds_config(block_of(preset), **changes))
        with engine.coalesce_grad_reduction() if coalesced else contextlib.nullcontext():
            for micro in range(4):
                loss = engine(batch(0, micro, rank=0))
                engine.set_gradient_accumulation_boundary(micro == 3)
                engine.backward(loss)
        found = [safe_get_full_grad(param) for param in engine.module.parameters() if param.requires_grad]
        for one, want in zip(found, once if preset == "lossless" and not coalesced else each, strict=True):
            assert torch.equal(one.float(), want.float()), (preset, coalesced, one - want)
        engine.destroy()
