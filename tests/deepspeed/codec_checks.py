"""Codecs inside the stage: of single parameters, and those that lose nothing or have a rate. Run by test_stage.py on 4 ranks."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad

from hzero.config import BASE_TIERS, TIERS
from tests.deepspeed.training import (
    AwkwardNet,
    batch,
    block_of,
    ds_config,
    engine_of,
    masters_of,
    read_of,
    run,
    train,
)

NONE = {role: dict.fromkeys(BASE_TIERS, "none") for role in ("weights", "gradients")}


def check_an_exception_of_all_is_the_other_codec() -> None:
    """The same bits, whatever the scopes and types; with differences those are left out where nothing is lossy."""
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed does not allow it on processors, though torch can
    half = {"fp16": {"enabled": True, "initial_scale_power": 8}}  # whose sums are of parts of an average
    cases: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("topo", {}, half),
        ("replica", {}, {}),
        ("zeropp", {}, half),
        ("topo", {"refresh_differences": True}, {}),
    )
    for preset, more, changes in cases:
        found = run(block_of(preset, codecs={"except": {"*": "none"}}, **more), 2, **changes)
        assert found.has_bits_of(run(block_of(preset, codecs=NONE), 2, **changes)), (preset, more)


def check_exceptions_travel_by_their_own_codec() -> None:
    """What forward reads of them, and their gradients, are those of their codec; all ranks hold the same bits."""
    codecs = {"except": {"norm.*": "none", "down.weight": "none", "*.weight": {"codec": "int8", "block_size": 64}}}
    exact = {"norm.weight", "norm.bias", "down.weight"}
    for preset, accumulation in (("topo", 1), ("half", 2), ("replica", 2), ("zeropp", 1)):
        gradients: list[dict[str, torch.Tensor]] = []
        for block in (block_of(preset, codecs=codecs), block_of(preset, codecs=NONE)):
            model = AwkwardNet()
            engine = engine_of(ds_config(block, accumulation), model)
            for micro in range(accumulation):
                engine.backward(engine(batch(0, micro)))
                if micro + 1 < accumulation:
                    engine.step()
            found = {name: safe_get_full_grad(p) for name, p in model.named_parameters() if p.requires_grad}
            gradients.append({name: grad.clone() for name, grad in found.items()})
            engine.step()
            train(engine, 1, accumulation, first=1)
            if block["codecs"] is not NONE:
                masters, read = masters_of(engine), read_of(engine)
                # In float32 int8 loses something of every matrix; scalars and zeros are exact in any codec.
                assert all(torch.equal(read[name], masters[name]) for name in exact), preset
                assert not torch.equal(read["up.weight"], masters["up.weight"])
            engine.destroy()
        got, want = gradients
        for name in exact:
            # Forward reads other weights, so gradients are near and not equal.
            assert float((got[name] - want[name]).norm() / want[name].norm()) < 0.05, (preset, name)
        assert not torch.equal(got["up.bias"], want["up.bias"])


def check_packed_codes_without_a_quantisation_state_keep_their_bits() -> None:
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


def check_codec_zfp_trains_as_without_a_codec_but_for_its_noise() -> None:
    losses, moved = {}, {}
    for rate in (None, 12, 20):
        codec = {"codec": "zfp", "rate": rate} if rate else "none"
        block = block_of("lossless", codecs=dict.fromkeys(("weights", "gradients"), dict.fromkeys(TIERS, codec)))
        found = run(block, 2, 3, AwkwardNet(width=64, inner=256))
        losses[rate], entries = found.losses, [one for one in found.log if one.role in ("weights", "gradients")]
        assert {entry.codec for entry in entries} == {"zfp" if rate else "none"}
        moved[rate] = sum(entry.wire_bytes for entry in entries)
    errors = {rate: max(abs(a - b) / abs(b) for a, b in zip(losses[rate], losses[None])) for rate in (12, 20)}
    assert 0 < errors[20] < errors[12] < 0.02, (errors, losses)
    assert 12 / 32 <= moved[12] / moved[None] < 0.45 and moved[12] < moved[20] < moved[None], moved
