"""A world of one rank. Run by test_stage.py."""

from __future__ import annotations

from tests.zero.training import assert_losses, ds_config, engine_of, train


def check_one_rank_has_stocks_losses() -> None:
    """Nothing is gathered or reduced, and DeepSpeed uses the memory of a bucket again while the stage holds the last one."""
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 300, "reduce_bucket_size": 300}
    topology = {"nodes": 1, "gpus_per_node": 1, "gcds_per_gpu": 1}
    for accumulation in (1, 2):
        want_norms: list[float] = []
        stock = engine_of(ds_config(accumulation=accumulation, zero_optimization=zero))
        want = train(stock, 4, accumulation, norms=want_norms)
        stock.destroy()
        for preset in ("zero3", "lossless", "topo", "replica"):
            block = {"preset": preset, "topology": topology}
            norms: list[float] = []
            engine = engine_of(ds_config(block, accumulation, zero_optimization=zero))
            assert_losses(train(engine, 4, accumulation, norms=norms), want, what=f"losses of {preset} and ZeRO-3")
            assert_losses(norms, want_norms, what=f"gradient norms of {preset} and ZeRO-3")
            engine.destroy()
