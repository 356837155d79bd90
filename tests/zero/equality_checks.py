"""Codec `none` gives ZeRO-3's and DDP's losses, on every layout of this world. Run by test_stage.py on several ranks."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from tests.zero.training import (
    assert_losses,
    ds_config,
    engine_of,
    same_on_all_ranks,
    train,
    train_ddp,
)

STEPS = 20
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
LAYOUTS = {8: [(2, 2, 2)], 4: [(1, 2, 2), (1, 1, 4)], 6: [(3, 1, 2)]}


def _topology(layout: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("nodes", "gpus_per_node", "gcds_per_gpu"), layout))


@functools.cache
def _peers(accumulation: int) -> dict[str, tuple[list[float], list[float]]]:
    """Losses and gradient norms of stock ZeRO-3 and of DDP, which have been compared with each other."""
    engine = engine_of(ds_config(accumulation=accumulation))
    assert type(engine.optimizer).__name__ == "DeepSpeedZeroOptimizer_Stage3"
    stock_norms: list[float] = []
    stock = train(engine, STEPS, accumulation, norms=stock_norms)
    engine.destroy()
    ddp_norms: list[float] = []
    ddp = train_ddp(STEPS, accumulation, norms=ddp_norms)
    assert stock[-1] < stock[0] - 0.1
    peers = {"ZeRO-3": (stock, stock_norms), "DDP": (ddp, ddp_norms)}
    _assert_equal("ZeRO-3", stock, stock_norms, {"DDP": peers["DDP"]})
    return peers


def _assert_equal(what: str, losses: list[float], norms: list[float], peers: dict[str, Any]) -> None:
    for name, (peer_losses, peer_norms) in peers.items():
        assert_losses(losses, peer_losses[: len(losses)], what=f"losses of {what} and {name}")
        assert_losses(norms, peer_norms[: len(norms)], what=f"gradient norms of {what} and {name}")


def _compare(block: dict[str, Any], layout: tuple[int, int, int], accumulation: int, steps: int = STEPS) -> None:
    topology = {**_topology(layout), **block.get("topology", {})}
    engine = engine_of(ds_config({**block, "topology": topology}, accumulation))
    assert type(engine.optimizer).__name__ == "HZeroStage3"
    norms: list[float] = []
    losses = train(engine, steps, accumulation, norms=norms)
    engine.destroy()
    _assert_equal(f"{block} on {topology}", losses, norms, _peers(accumulation))


def check_lossless_without_accumulation() -> None:
    for layout in LAYOUTS[WORLD]:
        _compare({"preset": "lossless"}, layout, 1)


def check_lossless_with_accumulation_4() -> None:
    for layout in LAYOUTS[WORLD]:
        _compare({"preset": "lossless"}, layout, 4)


def check_zero3_preset_without_accumulation() -> None:
    for layout in LAYOUTS[WORLD]:
        _compare({"preset": "zero3"}, layout, 1)


def check_hpz_preset_with_accumulation_4() -> None:
    for layout in LAYOUTS[WORLD]:
        _compare({"preset": "hpz"}, layout, 4)


def check_layouts_with_tiers_of_size_one() -> None:
    """Scopes of a single device, wished or not: no hop inside, every hop inside, orders of ranks that are not ours."""
    if WORLD != 8:
        return
    package = {"weights": "package", "gradients": "package"}
    cases = [
        ({"preset": "lossless"}, (8, 1, 1), {}),
        ({"preset": "lossless"}, (1, 1, 8), {}),
        ({"preset": "lossless"}, (1, 4, 2), {}),
        ({"preset": "lossless", "shard": package}, (2, 4, 1), {}),
        ({"preset": "lossless", "shard": package}, (2, 2, 2), {"order": ["gcd", "gpu", "node"]}),
        ({"preset": "lossless"}, (2, 2, 2), {"order": ["gpu", "node", "gcd"]}),
    ]
    for block, layout, order in cases:
        _compare({**block, "topology": order}, layout, 1, steps=4)


def check_determinism() -> None:
    """The same configuration twice gives the same bits."""
    for preset in ("lossless", "topo"):
        runs = []
        for _ in range(2):
            engine = engine_of(ds_config({"preset": preset, "topology": _topology(LAYOUTS[WORLD][0])}, 2))
            runs.append(train(engine, 5, 2))
            engine.destroy()
        assert runs[0] == runs[1]


def check_weights_are_bit_identical_after_every_gather() -> None:
    """With every codec, what forward and backward read is the same on all ranks."""
    rounded_at_random = {"codec": "int8", "rounding": "stochastic", "block_size": 64}
    cases = [
        ("none", "package"),
        ("bf16", "node"),
        ("int8", "package"),
        ("int4", "node"),
        (rounded_at_random, "package"),
        ("int4", "world"),
    ]
    for layout in LAYOUTS[WORLD]:
        for leaf, shard in cases:
            block = {
                "preset": "lossless",
                "shard": {"weights": shard, "gradients": "world"},
                "codecs": {"weights": {"gcd": leaf, "gpu": "int8", "node": leaf}},
                "topology": _topology(layout),
            }
            engine = engine_of(ds_config(block))
            seen: list[torch.Tensor] = []
            collectives = engine.optimizer.hzero.weights.collectives
            decode = collectives.decode_gathered

            def spy(*args, decode=decode, seen=seen):
                whole = decode(*args)
                seen.extend(t.clone() for t in whole)
                return whole

            collectives.decode_gathered = spy
            train(engine, 2)
            assert len(seen) >= 2 * 7
            assert same_on_all_ranks(seen), (layout, leaf, shard)
            engine.destroy()
