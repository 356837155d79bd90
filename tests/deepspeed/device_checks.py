"""The stage on a GPU. Run by test_device.py."""

from __future__ import annotations

import torch

from hzero.codecs import backends
from tests.deepspeed.training import Run, assert_losses, block_of, run, train_ddp


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
    for preset in ("topo", "mild", "zeropp", "replica", "half"):
        runs: list[Run] = [run(block_of(preset), 2, 3) for _ in range(2)]
        with backends.reference_instead():
            runs.append(run(block_of(preset), 2, 3))
        assert runs[1].has_bits_of(runs[0]), f"{preset}: two runs differ"
        assert runs[2].has_bits_of(runs[0]), f"{preset}: kernels and reference differ"
    torch.use_deterministic_algorithms(mode=False)
