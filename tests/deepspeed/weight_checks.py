"""Secondary partitions: audits, refreshes, packed codes. Run by test_stage.py on 4 ranks."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

import hzero
from tests.deepspeed.training import (
    AwkwardNet,
    batch,
    block_of,
    ds_config,
    engine_of,
    mean_over_ranks,
    read_of,
    train,
)

AUDITED = {"every": 1}


def _spoil(engine: Any, name: str, row: int = 0) -> None:
    """Changes one bit of a secondary partition on this rank: in the row of its own shard, or ``row`` rows before."""
    own = hzero.state(engine).weights
    (kept,) = (param.secondary for param in own.up_to_date() if param.name == name)
    plan = own.plan
    place = plan.rank if plan.whole_copies else plan.rank_row
    kept.view(plan.secondary_rows, -1).view(torch.uint8)[place - row, 0] ^= 1


def check_a_stale_weight_ends_training_by_its_name() -> None:
    """A copy that somebody changes behind the stage, on one rank. The same change of a shard is fine."""
    for preset in ("topo", "replica"):
        model = AwkwardNet()
        engine = engine_of(ds_config(block_of(preset, guard=AUDITED), 1), model)
        train(engine, 1)
        loss = engine(batch(1, 0))
        engine.backward(loss)
        if dist.get_rank() == 3:
            _spoil(engine, "up.weight")
        with pytest.raises(hzero.StaleWeightsError) as caught:
            engine.step()
        text = str(caught.value)
        assert "guard before step 2 of this engine: the secondary partitions of 1 of 10 weights are not what" in text, (
            text
        )
        assert "owners hold: up.weight. Something" in text, text
        assert caught.value.reported_elsewhere == (dist.get_rank() != 0)
        engine.destroy()
        engine = engine_of(ds_config(block_of(preset, guard=AUDITED), 1), model := AwkwardNet())
        train(engine, 1)
        engine.backward(engine(batch(1, 0)))
        if dist.get_rank() == 3:
            model.up.weight.ds_tensor.data[0] += 0.5
        engine.step()
        train(engine, 1, first=2)
        engine.destroy()


def check_a_copy_that_differs_ends_training_by_its_name() -> None:
    """One bit of another rank's shard, in one of the copies; also where copies have two scopes."""
    scoped = {"shard": {"except": {"norm*": {"weights": "device"}}}}
    for block in ({}, scoped):
        model = AwkwardNet()
        engine = engine_of(ds_config(block_of("topo", guard=AUDITED, **block), 1), model)
        train(engine, 1)
        engine.backward(engine(batch(1, 0)))
        if dist.get_rank() == 2:
            _spoil(engine, "down.weight", 1)
        with pytest.raises(hzero.StaleWeightsError) as caught:
            engine.step()
        text = str(caught.value)
        assert "ranks that hold the same copies of 1 of 10 weights have different ones: down.weight. " in text, text
        assert "not what their owners hold" not in text
        engine.destroy()


class _WithNothing(AwkwardNet):
    """Has a parameter without elements."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.nothing = torch.nn.Parameter(torch.zeros(0, 5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.nothing.sum()


def check_an_evaluation_in_inference_mode_may_start_a_refresh() -> None:
    """What it keeps is trained with and added to; a parameter without elements is no obstacle."""
    sixteen: dict[str, Any] = {"bf16": {"enabled": True}}  # changes, from copies that an evaluation has made
    wide = {"width": 64, "inner": 150}
    for preset, how, sizes in (("zero1", {}, {}), ("zero1", sixteen, wide), ("lossless", sixteen, wide)):
        losses = []
        for mode in (torch.no_grad, torch.inference_mode):
            engine = engine_of(ds_config(block_of(preset), **how), _WithNothing(**sizes))
            got = []
            for first in (0, 2):
                with mode():
                    engine(batch(first, 0))
                got += train(engine, 2, first=first)
            engine.destroy()
            losses.append(got)
        assert losses[0] == losses[1], (preset, losses)


def check_an_edit_that_nobody_is_told_of_is_gone() -> None:
    """As in stock. A parameter that is kept whole between steps must not let it into the secondary partition."""
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


def check_packed_codes_without_a_state_keep_their_bits() -> None:
    """Another frozen weight beside them is rounded."""
    model = AwkwardNet()
    codes = torch.randint(0, 256, (333, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    model.packed = torch.nn.Parameter(codes.view(torch.bfloat16), requires_grad=False)
    model.plain = torch.nn.Parameter(torch.randn(333, dtype=torch.bfloat16), requires_grad=False)
    before = {name: getattr(model, name).detach().view(torch.int16).clone() for name in ("packed", "plain")}
    engine = engine_of(ds_config(block_of("topo"), bf16={"enabled": True}), model)
    read = read_of(engine)
    kept = [torch.equal(read[name].view(torch.int16), bits) for name, bits in before.items()]
    assert kept == [True, False]
    engine.destroy()
