"""A world of one rank. Run by test_stage.py."""

from __future__ import annotations

from tests.zero.training import assert_losses, ds_config, engine_of, train


def check_one_rank_has_stocks_losses() -> None:
    """Nothing is gathered or reduced, and DeepSpeed uses the memory of a bucket again while the stage holds the last one."""
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 300, "reduce_bucket_size": 300}
    topology = {"nodes": 1, "gpus_per_node": 1, "gcds_per_gpu": 1}
    stock = engine_of(ds_config(accumulation=2, zero_optimization=zero))
    want = train(stock, 4, 2)
    stock.destroy()
    for preset in ("zero3", "lossless", "topo"):
        engine = engine_of(ds_config({"preset": preset, "topology": topology}, 2, zero_optimization=zero))
        assert_losses(train(engine, 4, 2), want, what=f"losses of {preset} and ZeRO-3")
        engine.destroy()
