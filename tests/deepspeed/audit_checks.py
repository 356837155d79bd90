"""The audit of secondary partitions and codecs. Run by test_stage.py on 4 ranks."""

from __future__ import annotations

import math
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

import hzero
from tests.deepspeed.training import WIDTH, AwkwardNet, batch, block_of, ds_config, engine_of, train

AUDITED = {"every": 1}


def _engine(preset: str, **block: Any) -> Any:
    return engine_of(ds_config(block_of(preset, **{"guard": AUDITED, **block}), 2))


def check_an_audit_changes_nothing_and_has_no_complaint() -> None:
    """Losses keep every bit and the wire log every byte, with all forms of secondary partitions."""
    blocks: tuple[tuple[str, dict[str, Any]], ...] = (
        ("replica", {"error_feedback": ["inter_node"]}),
        ("replica", {"resident": "payload", "checksum": True, "refresh_differences": True}),
        (
            "topo",
            {"codecs": {"gradients": "int8", "weights": {"inter_node": {"codec": "int8", "rounding": "stochastic"}}}},
        ),
        (
            "topo",
            {
                "codecs": {"weights": {"inter_node": "int4", "intra_node": "int8", "intra_package": "none"}},
                "shard": {"weights": "package"},
            },
        ),
        ("topo", {"codecs": {"weights": {"intra_package": {"codec": "int4", "rounding": "stochastic"}}}}),
    )
    for preset, block in blocks:
        found = []
        for every in (0, 1):
            engine = _engine(preset, **block, guard={"every": every})
            losses, own = train(engine, 2, 2), hzero.state(engine)
            own.settle()
            log = [{key: row[key] for key in row if "seconds" not in key} for row in own.wire_log.as_dicts()]
            found.append((losses, log))
            lossy = {hop.tier for hop in own.plan.gather_hops() if hop.codec.codec != "none"}
            expected = {f"weights/{tier}" for tier in lossy} if every else set()
            assert {name for name in own.ratios if name.startswith("weights/")} == expected, own.ratios
            engine.destroy()
        assert found[0] == found[1], (preset, block)


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


class _Unused(AwkwardNet):
    """Has weights that no forward reads, in refresh messages of their own; one without elements, which stock cannot gather."""

    def __init__(self, empty: bool) -> None:
        super().__init__()
        self.tower = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        if empty:
            self.nothing = torch.nn.Parameter(torch.zeros(0))


def check_audits_beside_whatever_deepspeed_does() -> None:
    """Nothing is stale and every rank continues, with any other keys of the configuration."""
    small = {"stage3_prefetch_bucket_size": 400, "sub_group_size": 500}
    cases: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("topo", {}, {"zero_optimization": small}),
        ("replica", {}, {"bf16": {"enabled": True}, "zero_optimization": small}),
        ("topo", {"exact_evaluation": True}, {}),
        ("topo", {}, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
        ("half", {}, {"managed_gradient_accumulation": False}),
        ("zeropp", {}, {"zero_optimization": {"stage3_param_persistence_threshold": 10**6}}),
    )
    for preset, block, changes in cases:
        config = ds_config(block_of(preset, **block, guard=AUDITED), 1, **changes)
        engine = engine_of(config, _Unused(empty="exact_evaluation" not in block))
        if "exact_evaluation" in block:
            engine.eval()
        train(engine, 3)
        assert hzero.state(engine).ratios or "exact_evaluation" in block
        engine.destroy()


def check_after_a_complaint_training_goes_on_with_a_new_window() -> None:
    """After the error is caught and its cause fixed, only the gradients of the next window count."""
    gradients = []
    for spoil in (False, True):
        model = AwkwardNet()
        engine = engine_of(ds_config(block_of("topo", guard=AUDITED), 1), model)
        train(engine, 1)
        if spoil:
            engine.backward(engine(batch(5, 0)))
            _spoil(engine, "up.weight")
            with pytest.raises(hzero.StaleWeightsError):
                engine.step()
            hzero.state(engine).note_edit()
        engine.backward(engine(batch(1, 0)))
        gradients.append(safe_get_full_grad(model.up.weight))
        engine.destroy()
    size = float(gradients[0].norm())
    assert float((gradients[1] - gradients[0]).norm()) < 0.3 * size  # int4, rounded at random
