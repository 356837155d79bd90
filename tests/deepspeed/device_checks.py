"""The stage on a GPU. Run by test_device.py."""

from __future__ import annotations

import torch

from hzero.codecs import backends
from tests.deepspeed.training import (
    ORDER,
    Run,
    assert_losses,
    batch,
    block_of,
    ds_config,
    engine_of,
    run,
    train,
    train_ddp,
)


def check_codec_none_gives_stocks_losses() -> None:
    for accumulation in (1, 3):
        stock, norms = run(None, accumulation, 3), list[float]()
        assert_losses(train_ddp(3, accumulation, norms=norms), stock.losses, what="losses of DDP and ZeRO-3")
        for preset in ("lossless", "zero3"):
            found = run(block_of(preset), accumulation, 3)
            assert_losses(found.losses, stock.losses, what=f"losses of {preset} and ZeRO-3")
            assert_losses(found.norms, norms, what=f"gradient norms of {preset} and DDP")


def check_kernels_change_no_bit() -> None:
    """Device kernels and the reference: the same losses and weights in every preset, and again in a second run."""
    torch.use_deterministic_algorithms(mode=True)
    assert backends.choice("cuda").name in ("cuda", "hip")
    for preset in ("topo", "zeropp", "replica", "half"):
        runs: list[Run] = [run(block_of(preset), 2, 3) for _ in range(2)]
        with backends.reference_instead():
            runs.append(run(block_of(preset), 2, 3))
        assert runs[1].has_bits_of(runs[0]), f"{preset}: two runs differ"
        assert runs[2].has_bits_of(runs[0]), f"{preset}: kernels and reference differ"
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
