"""Secondary partitions: audits, refreshes that send differences, packed codes. Run by test_stage.py on 4 ranks."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

import hzero
from hzero.config import Scope, tiers_outside
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


def _block(weights: Scope, **changes: Any) -> dict[str, Any]:
    """int4 on the tiers of the refresh, no loss on the tiers of the gathers."""
    codecs = {"weights": dict.fromkeys(tiers_outside(weights), "int4")}
    shard = {"weights": weights, "gradients": "world"}
    return block_of("lossless", **{"shard": shard, "codecs": codecs, "refresh_differences": True, **changes})


def _noise_db(engine: Any) -> float:
    """Noise of the weights that forward reads, relative to the masters, in decibels below the weights."""
    masters, noise, signal = masters_of(engine), 0.0, 0.0
    for name, copy in read_of(engine).items():
        if name in masters:
            noise += float((copy.double() - masters[name].double()).square().sum())
            signal += float(masters[name].double().square().sum())
    return 10 * torch.log10(torch.tensor(signal / max(noise, 1e-300))).item()


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
