"""A world of one rank. Run by test_stage.py."""

from __future__ import annotations

from tests.deepspeed.training import assert_losses, block_of, run


def check_one_rank_has_stocks_losses() -> None:
    """Nothing is gathered or reduced, and DeepSpeed uses the memory of a bucket again while the stage holds the last one."""
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 300, "reduce_bucket_size": 300}
    for accumulation in (1, 2):
        stock = run(None, accumulation, 4, zero_optimization=zero)
        for preset in ("zero3", "lossless", "topo", "replica"):
            found = run(block_of(preset), accumulation, 4, zero_optimization=zero)
            assert_losses(found.losses, stock.losses, what=f"losses of {preset} and ZeRO-3")
            assert_losses(found.norms, stock.norms, what=f"gradient norms of {preset} and ZeRO-3")
