"""Gradients: accumulation windows, readers, late reductions, errors. Run by test_stage.py on 4 ranks."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad

import hzero
from hzero.comm import HopError
from hzero.comm.runtime import PreparedHop
from hzero.engine.engine import Engine
from tests.comm.faulty import FaultyRuntime
from tests.deepspeed.race_detector import recording
from tests.deepspeed.training import (
    INNER,
    WIDTH,
    AwkwardNet,
    assert_masters,
    batch,
    block_of,
    ds_config,
    engine_of,
    masters_of,
    train,
)


def check_fp16_skips_a_step_and_goes_on() -> None:
    """An overflow skips the step, keeps payloads valid, clears the window, and training stays finite."""
    # DeepSpeed does not allow fp16 on processors, though torch can; the loss scaler is what is tested here.
    get_accelerator().is_fp16_supported = lambda: True
    fp16 = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 100}
    for preset in ("lossless", "topo"):
        engine = engine_of(ds_config(block_of(preset), 1, fp16=fp16))
        before, scale = masters_of(engine), engine.optimizer.loss_scale
        train(engine, 1)
        assert engine.optimizer.overflow and engine.optimizer.loss_scale < scale
        assert_masters(engine, before)
        hzero.state(engine).settle()
        refreshed = hzero.state(engine).wire_log.entries()
        train(engine, 1, first=1)
        node = [e.hops for e in refreshed if (e.role, e.tier) == ("weights", "inter_node")]
        again = [
            e.hops for e in hzero.state(engine).wire_log.entries() if (e.role, e.tier) == ("weights", "inter_node")
        ]
        assert node == again, "a skipped step must leave the secondary partitions valid"
        losses = train(engine, 16, first=2)
        assert not engine.optimizer.overflow and losses[-1] < losses[0]
        engine.destroy()


def check_fp16_sums_of_large_gradients_are_finite() -> None:
    """Float16 ends at 65,504: the mean over ranks is representable, and their sum is not."""
    get_accelerator().is_fp16_supported = lambda: True
    for preset in ("zero3", "lossless", "zero1"):
        config = ds_config(block_of(preset), fp16={"enabled": True, "loss_scale": 1}, gradient_clipping=0.0)
        engine = engine_of(config, torch.nn.Linear(5, 3, bias=False))
        engine.backward(engine(torch.full((1, 5), 4e4, dtype=torch.float16)).sum())
        found = safe_get_full_grad(engine.module.weight)
        torch.testing.assert_close(found.float(), torch.full((3, 5), 4e4), rtol=1e-3, atol=0.0)
        engine.destroy()


def check_a_message_that_arrives_changed_is_never_stepped() -> None:
    """With a checksum, on processors and as on a device, which compares before the step.

    All ranks have the fault, so that all stop at the same place.
    """
    changed = "arrived changed from rank"
    config = ds_config(block_of("topo", checksum=True))
    with mock.patch.object(sys.modules[Engine.__module__], "Runtime", FaultyRuntime):
        for device in (contextlib.nullcontext(), recording()):
            with device:
                engine = engine_of(config)
                train(engine, 1)
                before = masters_of(engine)
                collectives = hzero.state(engine)._runtime
                collectives.spares = lambda lane, what: lane[1] != "inter_node" or "gradients" not in what
                collectives.faults = ["flip"]
                loss = engine(batch(1, 0))
                with pytest.raises(HopError, match=rf"gradients of \d+ parameters .* on tier 'inter_node' .*{changed}"):
                    engine.backward(loss)
                collectives.faults = []
                with pytest.raises(RuntimeError, match="lost by an error"):  # the script continues after it
                    engine.optimizer.step()
                assert_masters(engine, before)
                engine.destroy()


def check_the_guard_ends_training_that_diverges() -> None:
    """By name of the parameters, on all ranks, with the weights of the last good step, from which training can continue."""
    model = AwkwardNet()
    engine = engine_of(ds_config(block_of("topo", guard=2), 1), model)
    train(engine, 2)
    good = masters_of(engine)
    rank, spoil = dist.get_rank(), [True]
    one = torch.zeros(INNER, WIDTH)
    one[0, 0] = float("nan")  # in the shard of one rank, and all must name it
    model.up.weight.register_hook(lambda grad: grad + one if spoil[0] and rank == 3 else grad)
    train(engine, 1, first=2)
    assert engine.optimizer.overflow
    with pytest.raises(hzero.DivergenceError) as caught:
        train(engine, 1, first=3)
    message = str(caught.value)
    assert "2 steps in a row (guard: 2); the last is step 4 of this engine" in message
    assert "Not finite in the gradients of 1 of 9 parameters: up.weight. " in message
    assert "Not finite in the weights of 0 of 9 parameters. " in message
    assert re.search(r"gradients/\w+ [\d.]+ dB", message)  # what codecs lose
    assert_masters(engine, good)
    spoil[0] = False
    train(engine, 1, first=4)
    spoil[0] = True
    train(engine, 1, first=5)  # the count began again
    engine.destroy()


def check_a_step_before_the_boundary_takes_what_has_come() -> None:
    """The optimizer's own ``step``, after the first of two micro-batches: as in stock, where shards have been delivered."""
    masters = []
    for block in (None, block_of("lossless")):
        engine = engine_of(ds_config(block, 2))
        engine.backward(engine(batch(0, 0)))
        engine.optimizer.step()
        masters.append(masters_of(engine))
        engine.destroy()
    for name, want in masters[0].items():
        torch.testing.assert_close(masters[1][name], want, rtol=1e-5, atol=1e-6)


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
    crossed, start = [], PreparedHop.start

    def failing(collective: PreparedHop, *arguments: Any) -> Any:
        crossed.append("gradients" in str(collective) and "'inter_node'" in str(collective))
        if crossed[-1] and sum(crossed) == 2:
            raise HopError("the second bucket between nodes")
        return start(collective, *arguments)

    engine.backward(engine(batch(1, 0)))
    engine.step()
    with mock.patch.object(PreparedHop, "start", failing), pytest.raises(HopError, match="second bucket"):
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


def check_sums_of_a_window_have_the_right_bits() -> None:
    """In bfloat16, with buckets smaller than a parameter. All ranks have the same batches, so sums over ranks are exact.

    Partial sums are float32 and rounded once. DeepSpeed rounds each sum of two micro-batches, as does one reduction of several
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


def check_every_rank_rounds_its_gradients_by_itself() -> None:
    """The noise of a mean over four ranks is below that over two. All ranks have the same batch."""
    reference = AwkwardNet()
    reference(batch(0, 0, rank=0)).backward()
    exact = torch.cat([param.grad.flatten() for param in reference.parameters() if param.grad is not None])
    codec, errors = {"codec": "int4", "rounding": "stochastic"}, []
    for nodes, devices in ((2, 2), (4, 1)):
        topology = {"nodes": nodes, "packages_per_node": 1, "devices_per_package": devices}
        block = block_of("zero3", topology=topology, codecs={"gradients": {"inter_node": codec}})
        engine = engine_of(ds_config(block, gradient_clipping=0.0))
        engine.backward(engine(batch(0, 0, rank=0)))
        found = [safe_get_full_grad(param) for param in engine.module.parameters() if param.requires_grad]
        errors.append(float((torch.cat([one.flatten() for one in found]) - exact).norm()))
        engine.destroy()
    assert 0 < errors[1] < 0.85 * errors[0], errors
