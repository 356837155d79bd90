"""Gradients inside DeepSpeed. Run by test_stage.py on 4 ranks."""

from __future__ import annotations

import contextlib
import re
import sys
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu
from deepspeed.utils import groups

import hzero
from hzero.comm import HopError
from hzero.engine.engine import Engine
from tests.comm.faulty import FaultyCollectives
from tests.deepspeed.race_detector import recording
from tests.deepspeed.training import (
    INNER,
    LR,
    OFFLOAD,
    WIDTH,
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


class _Sometimes(torch.nn.Module):
    """A layer used in some micro-steps and steps only, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.always = torch.nn.Linear(5, 7)
        self.sometimes = torch.nn.Linear(7, 7)
        self.never = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        y = self.always(x)
        return (self.sometimes(y) if use else y).square().mean()


def _sometimes_batch(step: int, micro: int) -> tuple[torch.Tensor, bool]:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step * 100 + micro * 10 + dist.get_rank()))
    return x, (step % 3 == 0 and micro == 0) or (step % 3 == 1 and micro == 1)


def check_a_window_given_up_leaves_nothing() -> None:
    """After ``zero_grad`` instead of a step, neither its gradients nor their norms count, on the host and on the device."""
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0.05}
    x = _sometimes_batch(0, 0)[0]
    reference = _Sometimes()
    reference(x, False).backward()
    norm = mean_gradient_norm(reference)
    for preset, changes in (("lossless", {}), ("lossless", OFFLOAD), ("hpz", OFFLOAD)):
        engine = engine_of(ds_config(block_of(preset), 1, **sgd, **changes), _Sometimes())
        engine.backward(engine(x, True))
        engine.optimizer.zero_grad()
        engine.backward(engine(x, False))
        engine.step()
        assert abs(float(engine.get_global_grad_norm()) / norm - 1) < 1e-4, (preset, changes)
        engine.destroy()


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
        assert node == again, "a skipped step must leave the resident payloads valid"
        losses = train(engine, 16, first=2)
        assert not engine.optimizer.overflow and losses[-1] < losses[0]
        engine.destroy()


def check_sequence_parallelism_has_the_gradients_of_whole_sequences() -> None:
    """Ulysses: two ranks share a sequence. Norms are those of stock ZeRO-3 and of one rank with whole sequences."""

    def half(step: int) -> torch.Tensor:
        place = dist.get_rank() % 2
        return batch(step, 0, rank=dist.get_rank() // 2)[:, 4 * place : 4 * place + 5]

    reference = AwkwardNet()
    trainable = [param for param in reference.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=LR, betas=(0.9, 0.99), weight_decay=0.01)
    want = []
    for step in range(3):
        sequences = dist.get_world_size() // 2
        sum(reference(batch(step, 0, rank=sequence)) / sequences for sequence in range(sequences)).backward()
        want.append(float(torch.nn.utils.clip_grad_norm_(trainable, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    for block in (None, block_of("lossless"), block_of("zero3")):
        try:
            deepspeed.init_distributed("gloo", verbose=False)
            mpu.initialize_sequence_parallel(sequence_parallel_size=2)
            engine = engine_of(ds_config(block), mpu=mpu)
            norms: list[float] = []
            train(engine, 3, norms=norms, loss_of=lambda engine, step, _: engine(half(step)))
            assert engine.sequence_parallel_size == 2
            assert_losses(norms, want, 1e-4, f"gradient norms of {block}")
            engine.destroy()
        finally:
            mpu._release_sequence_parallel_groups()
            groups.mpu = None


def check_a_message_that_arrives_changed_is_never_stepped() -> None:
    """With a checksum, on processors and as on a device, which compares before the step.

    All ranks have the fault, so that all stop at the same place.
    """
    changed = "arrived changed from rank"
    config = ds_config(block_of("topo", checksum=True))
    with mock.patch.object(sys.modules[Engine.__module__], "Collectives", FaultyCollectives):
        for device in (contextlib.nullcontext(), recording()):
            with device:
                engine = engine_of(config)
                train(engine, 1)
                before = masters_of(engine)
                collectives = hzero.state(engine)._collectives
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
    ratios = {what: float(text) for what, text in re.findall(r"(\w+/\w+) ([\d.]+) dB", message)}
    plan, expected = hzero.state(engine).plan, {"int8": (40, 80), "int4": (15, 35)}
    hops = {"weights": plan.gather_hops(), "gradients": plan.reduce_hops()}
    codecs = {f"{role}/{hop.tier}": hop.codec.codec for role, some in hops.items() for hop in some}
    assert {(name.partition("/")[0], codecs[name]) for name in ratios} >= {("weights", "int8"), ("gradients", "int4")}
    for name, ratio in ratios.items():
        lowest, highest = expected[codecs[name]]
        assert lowest < ratio < highest, message
    assert_masters(engine, good)
    spoil[0] = False
    train(engine, 1, first=4)
    spoil[0] = True
    train(engine, 1, first=5)  # the count began again
    engine.destroy()


def check_without_a_guard_training_goes_on_as_in_stock() -> None:
    """Stock discards such steps for ever."""
    model = AwkwardNet()
    engine = engine_of(ds_config(block_of("lossless", guard=0), 1), model)
    model.up.weight.register_hook(lambda grad: grad * float("inf"))
    train(engine, 4)
    assert engine.optimizer.overflow
    engine.destroy()


def check_a_step_before_the_boundary_takes_what_has_come() -> None:
    """The optimizer's own ``step``, after the first of two micro-steps: as in stock, where shards have been delivered."""
    masters = []
    for block in (None, block_of("lossless")):
        engine = engine_of(ds_config(block, 2))
        engine.backward(engine(batch(0, 0)))
        engine.optimizer.step()
        masters.append(masters_of(engine))
        engine.destroy()
    for name, want in masters[0].items():
        torch.testing.assert_close(masters[1][name], want, rtol=1e-5, atol=1e-6)
