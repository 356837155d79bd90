"""With codec none, FSDP2 under hzero gives FSDP2's losses, norms and weights. Run by test_fsdp.py on 8 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fsdp.training import Case, case, plain, relative, train
from tests.ranks import LONG

LAYOUTS = ((2, 1, 2), (1, 2, 2), (3, 1, 2), (2, 2, 2))
LOSSLESS: dict[str, Any] = {"preset": "lossless", "guard": {"every": 2}}


def _assert_equal(what: Case, block: dict[str, Any] = LOSSLESS, exact: bool = False) -> None:
    if what.layout == (
        3,
        1,
        2,
    ):  # the other ranks are no two nodes, so their audits differ, which are made over the world
        block = {**block, "guard": {"every": 0, "discarded_steps": 0}}
    found, wanted = train(what, block), plain(what)
    assert found.state is not None
    found.state.close()
    if exact:
        assert found.losses == wanted.losses and found.norms == wanted.norms, (what, found.losses, wanted.losses)
        return
    assert relative(found.losses, wanted.losses) < 1e-6, (what, found.losses, wanted.losses)
    assert relative([norm + 1e-9 for norm in found.norms], [norm + 1e-9 for norm in wanted.norms]) < 1e-6, (
        what,
        found.norms,
        wanted.norms,
    )
    for one, other in zip(found.weights, wanted.weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4, msg=lambda text: f"{what}: {text}")


def check_layouts_and_accumulation() -> None:
    for layout, accumulation in zip(LAYOUTS, (1, 3, 1, 3)):
        _assert_equal(Case(layout, accumulation))


def check_presets() -> None:
    """Scopes from the device to the world; with codec none all give the same."""
    uncoded = {"codecs": {"weights": "none", "gradients": "none"}, "guard": {"every": 2}}
    for preset in ("hpz", "zero1"):
        _assert_equal(Case(accumulation=3), {"preset": preset, **uncoded})


def check_bfloat16_with_sums_of_float32_keeps_every_bit() -> None:
    _assert_equal(case("bf16"), exact=True)
    _assert_equal(case("bf16", layout=(2, 1, 2)), exact=True)


def check_features() -> None:
    """One or two of each; `check_every_layout_and_feature` has all."""
    _assert_equal(case("frozen", "checkpointing", accumulation=3))
    _assert_equal(case("tied", "grouped", "kept", layout=(2, 1, 2), optimizer="sgd"))
    _assert_equal(case("spare", "smaller", accumulation=3))
    _assert_equal(case("meta", "prefetch", "offload", layout=(1, 2, 2)))
    _assert_equal(Case((2, 1, 2), 3, optimizer="fused"))
    _assert_equal(case(layout=(2, 2, 1), tensor=2, accumulation=3))


def check_exceptions_of_parameters() -> None:
    """Those with a codec of their own travel in messages of their own."""
    blocks = {"codecs": {"weights": "none", "gradients": "none", "except": {"*norm*": "none", "head.*": "bf16"}}}
    found = train(case("frozen"), {"preset": "topo", **blocks})
    assert found.state is not None
    wanted = plain(case("frozen"))
    assert relative(found.losses, wanted.losses) < 1e-3
    assert any(entry.codec == "bf16" for entry in found.state.wire_log.entries())
    found.state.close()


def check_every_layout_and_feature() -> None:
    if LONG.args[0]:
        pytest.skip(LONG.kwargs["reason"])
    options = (
        *("frozen", "checkpointing", "tied", "grouped", "kept", "spare", "smaller", "meta", "prefetch", "offload"),
        *("compiled", "bf16", "bf16_wire", "fp16"),
    )
    for layout in LAYOUTS:
        for accumulation in (1, 3, 8):
            for flags in ("last", "sync", "all_reduce", "count", "none"):
                _assert_equal(Case(layout, accumulation, flags))
        for option in options:
            if option == "smaller" and layout != (2, 2, 2):  # torch makes its groups with all ranks of the world
                continue
            if option in ("bf16_wire", "fp16"):  # sums are rounded otherwise
                found, wanted = train(case(option, layout=layout), LOSSLESS), plain(case(option, layout=layout))
                assert relative(found.losses, wanted.losses) < 2e-2, (option, found.losses, wanted.losses)
                assert found.state is not None
                found.state.close()
                continue
            for accumulation in (1, 3):
                _assert_equal(case(option, layout=layout, accumulation=accumulation), exact=option == "bf16")
        for optimizer in ("fused", "sgd"):
            _assert_equal(Case(layout, 3, optimizer=optimizer))
