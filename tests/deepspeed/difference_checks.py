"""A refresh that sends differences. Run by test_stage.py on 4 ranks."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import hzero
from hzero.config import TIERS, Scope, tiers_outside
from tests.deepspeed.training import (
    AwkwardNet,
    batch,
    block_of,
    ds_config,
    engine_of,
    masters_of,
    mean_over_ranks,
    read_of,
    shared_folder,
    train,
)


def _block(weights: Scope, **changes: Any) -> dict[str, Any]:
    """int4 on the tiers of the refresh, nothing lossy on those of the fetches."""
    codecs = {"weights": dict.fromkeys(tiers_outside(weights), "int4")}
    shard = {"weights": weights, "gradients": "world"}
    return block_of("lossless", **{"shard": shard, "codecs": codecs, "refresh_differences": True, **changes})


def _noise_db(engine: Any) -> float:
    """Noise of what forward reads against the masters, below the weights, in decibels."""
    masters, noise, signal = masters_of(engine), 0.0, 0.0
    for name, copy in read_of(engine).items():
        if name in masters:
            noise += float((copy.double() - masters[name].double()).square().sum())
            signal += float(masters[name].double().square().sum())
    return 10 * torch.log10(torch.tensor(signal / max(noise, 1e-300))).item()


def check_differences_follow_the_weights_more_closely_than_int8() -> None:
    """int4 differences stay nearer to the masters than int8 values, do not drift, and all ranks hold the same bits."""
    int8 = engine_of(ds_config(block_of("lossless", codecs={"weights": dict.fromkeys(TIERS, "int8")})))
    train(int8, 3)
    coarse = _noise_db(int8)
    int8.destroy()
    for weights in ("device", "package"):
        engine = engine_of(ds_config(_block(weights, guard={"every": 4})))
        early = train(engine, 3) and _noise_db(engine)
        late = train(engine, 9, first=3) and _noise_db(engine)
        assert min(early, late) > coarse + 6, (weights, early, late, coarse)
        assert late > early - 3, (weights, early, late)
        assert hzero.state(engine).ratios["weights/inter_node"] > coarse, "of the copy, not of a difference"
        engine.destroy()


def check_whole_weights_are_sent_after_a_load_and_an_edit() -> None:
    """What no difference leads to: forward reads exact weights then."""
    folder = shared_folder()
    engine = engine_of(ds_config(_block("device")))
    train(engine, 2)
    engine.save_checkpoint(str(folder))
    train(engine, 2, first=2)
    engine.load_checkpoint(str(folder))
    assert _noise_db(engine) > 120
    train(engine, 2, first=2)
    with deepspeed.zero.GatheredParameters([engine.module.gain, engine.module.up.weight], modifier_rank=0):
        if dist.get_rank() == 0:
            engine.module.gain.data.fill_(5.0)
            engine.module.up.weight.data.mul_(3.0)
    assert float(read_of(engine)["gain"]) == 5.0
    engine.destroy()


class _WithNothing(AwkwardNet):
    """Has a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = torch.nn.Parameter(torch.zeros(0, 5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.nothing.sum()


def check_an_evaluation_in_inference_mode_may_start_a_refresh() -> None:
    """What it keeps is trained with and added to; a parameter without elements is no obstacle."""
    for block in (block_of("zero1"), _block("device"), _block("package")):
        losses = []
        for mode in (torch.no_grad, torch.inference_mode):
            engine = engine_of(ds_config(block), _WithNothing())
            got = []
            for first in (0, 2):
                with mode():
                    engine(batch(first, 0))
                got += train(engine, 2, first=first)
            engine.destroy()
            losses.append(got)
        assert losses[0] == losses[1], (block, losses)


def check_an_edit_that_nobody_is_told_of_is_gone() -> None:
    """As in stock. A parameter that is kept whole between steps must not let it into the resident copy."""
    for preset in ("zero1", "lossless"):
        zero = {"stage": 3, "stage3_param_persistence_threshold": 10**6}
        engine = engine_of(ds_config(block_of(preset), zero_optimization=zero))
        train(engine, 1)
        losses = []
        for value in (5.0, 6.0):
            with torch.no_grad():
                losses.append(mean_over_ranks(engine(batch(50, 0))))
                with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                    engine.module.gain.data.fill_(value + dist.get_rank())
        assert losses[0] == losses[1], losses
        engine.destroy()
