"""The stage on a GPU. Run by test_device.py."""

from __future__ import annotations

import contextlib
import itertools

import torch

from hzero.codecs import backends
from tests.deepspeed.training import ORDER, batch, block_of, ds_config, engine_of, train
from tests.parity import compare as parity
from tests.parity.compare import assert_row, row
from tests.parity.deepspeed import Plain, Session


def check_codec_none_gives_stocks_losses() -> None:
    for preset, accumulation in itertools.product(("lossless", "zero3"), (1, 3)):
        for reference in (Session, Plain):
            assert_row(Session, row(preset, accumulation), reference)


def check_kernels_change_no_bit() -> None:
    """Device kernels and the reference: the same losses and weights in every preset, and again in a second run."""
    torch.use_deterministic_algorithms(mode=True)
    assert backends.choice("cuda").name in ("cuda", "hip")
    for preset, other in itertools.product(("topo", "zeropp", "replica", "half"), ("again", "reference")):
        one = parity.train(Session, row(preset, 2))
        with backends.reference_instead() if other == "reference" else contextlib.nullcontext():
            two = parity.train(Session, row(preset, 2))
        assert two.losses == one.losses, (preset, other)
        assert all(torch.equal(two.masters[name], master) for name, master in one.masters.items()), (preset, other)
    torch.use_deterministic_algorithms(mode=False)


def check_collectives_come_in_the_order_asked_for() -> str:
    """Under ``strict`` a rank has one collective under way, DeepSpeed's own among them."""
    engine = engine_of(ds_config(block_of("topo"), 2))
    train(engine, 1, 2)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for micro in range(2):
            loss = engine(batch(1, micro))
            engine.backward(loss)
            engine.step()
        torch.cuda.synchronize()
    engine.destroy()
    times = [(event.time_range.start, event.time_range.end) for event in profiler.events() if "nccl" in event.name]
    assert times
    most = max(sum(start <= begin < end for start, end in times) for begin, _ in times)
    assert most == 1 or ORDER != "strict"
    return f"most collectives under way: {most}"
