"""Parameters with codecs of their own. Run by test_stage.py on 8 ranks, 2 nodes x 2 GPUs x 2 GCDs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad

import hzero
from hzero.validation import ConfigError
from tests.zero.training import AwkwardNet, batch, block_of, ds_config, engine_of, masters_of, same_on_all_ranks, train

NONE = {role: dict.fromkeys(("gcd", "gpu", "node"), "none") for role in ("weights", "gradients")}


def _trained(block: dict[str, Any], accumulation: int = 2, steps: int = 2, **changes: Any) -> tuple[Any, Any]:
    engine = engine_of(ds_config(block, accumulation, **changes))
    losses = train(engine, steps, accumulation)
    masters = masters_of(engine)
    engine.destroy()
    return losses, masters


def check_an_exception_of_all_is_the_other_codec() -> None:
    """The same bits, whatever the scopes and types; with differences those are left out where nothing is lossy."""
    get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed does not allow it on processors, though torch can
    half = {"fp16": {"enabled": True, "initial_scale_power": 8}}  # whose sums are of parts of an average
    cases: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("topo", {}, half),
        ("replica", {"accumulators": "bf16"}, {}),
        ("zeropp", {}, half),
        ("topo", {"refresh_differences": True}, {}),
    )
    for preset, more, changes in cases:
        same = {key: value for key, value in more.items() if key == "accumulators"}
        losses, masters = _trained(block_of(preset, codecs={"except": {"*": "none"}}, **more), **changes)
        want_losses, want = _trained(block_of(preset, codecs=NONE, **same), **changes)
        assert losses == want_losses, (preset, more)
        assert all(torch.equal(master, masters[name]) for name, master in want.items()), (preset, more)


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
                own, masters, read = hzero.state(engine), masters_of(engine), {}
                for name, param in model.named_parameters():
                    own.weights.gather([param]).wait()
                    read[name] = param.detach().clone()
                    param.partition()
                assert same_on_all_ranks(list(read.values()))
                # In float32 int8 loses something of every matrix; scalars and zeros are exact in any codec.
                assert all(torch.equal(read[name], masters[name]) for name in exact), preset
                assert not torch.equal(read["up.weight"], masters["up.weight"])
            engine.destroy()
        got, want = gradients
        for name in exact:
            # Forward reads other weights, so gradients are near and not equal.
            assert float((got[name] - want[name]).norm() / want[name].norm()) < 0.05, (preset, name)
        assert not torch.equal(got["up.bias"], want["up.bias"])


def check_a_pattern_without_a_parameter_is_refused() -> None:
    """Before a group is made, on all ranks; also where another pattern comes first."""
    for patterns, found in (({"nrom*": "none"}, "nrom*"), ({"norm*": "int8", "norm.weight": "none"}, "norm.weight")):
        with pytest.raises(ConfigError) as caught:
            engine_of(ds_config(block_of("topo", codecs={"except": patterns})))
        message = str(caught.value)
        assert message.startswith(
            f"hzero.codecs.except: found {found!r}, which matches no parameter that an earlier"
        ), message
        assert "embed.weight" in message
