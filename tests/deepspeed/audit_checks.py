"""The audit of resident weights and codecs. Run by test_stage.py on 4 ranks."""

from __future__ import annotations

import math
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

import hzero
from tests.deepspeed.training import AwkwardNet, batch, block_of, ds_config, engine_of, train

AUDITED = {"every": 1}


def check_ratios_are_those_of_what_forward_reads() -> None:
    """With one codec on all tiers, its ratio is that of what a forward reads against the exact weight."""
    model = AwkwardNet()
    engine = engine_of(ds_config(block_of("topo", guard=AUDITED), 1), model)
    train(engine, 1)
    # The first audit takes the first of the larger weights, the embedding.
    tiers = hzero.state(engine).ratios
    ratio = tiers["weights/inter_node"]
    engine.destroy()
    model = AwkwardNet()
    engine = engine_of(ds_config(block_of("topo"), 1), model)
    seen: list[torch.Tensor] = []
    model.embed.register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
    engine(batch(0, 0))
    with deepspeed.zero.GatheredParameters(model.embed.weight):
        exact = model.embed.weight.detach().clone()
    noise = (seen[0] - exact).double().square().sum()
    assert math.isclose(ratio, float(10 * torch.log10(exact.double().square().sum() / noise)), abs_tol=1e-6)
    assert 40 < ratio < 60 and tiers["weights/intra_package"] == ratio and 10 < tiers["gradients/inter_node"] < 30, (
        tiers
    )
    engine.destroy()


def _spoil(engine: Any, name: str, row: int = 0) -> None:
    """Changes one bit of a resident copy on this rank: in the row of its own shard, or ``row`` rows before."""
    own = hzero.state(engine).weights
    (kept,) = (param.resident for param in own.up_to_date() if param.name == name)
    plan = own.plan
    place = plan.rank if plan.whole_copies else plan.rank_row
    kept.view(plan.resident_rows, -1).view(torch.uint8)[place - row, 0] ^= 1


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
        assert "guard before step 2 of this engine: the resident copies of 1 of 10 weights are not what" in text, text
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
    """One bit of another rank's shard, in one of the copies; also where copies are updated by differences, or have two scopes."""
    scoped = {"shard": {"except": {"norm*": {"weights": "device"}}}}
    for block in ({}, {"refresh_differences": True}, scoped):
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
