"""With codec none, FSDP2 under hzero gives FSDP2's losses, norms and weights. Run by test_fsdp.py on 4 ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from tests.fsdp.training import Case, case, plain, relative, train

LOSSLESS: dict[str, Any] = {"preset": "lossless", "guard": {"every": 2}}


def uncoded(preset: str) -> dict[str, Any]:
    """A preset with codec none."""
    return {"preset": preset, "codecs": {"weights": "none", "gradients": "none"}, "guard": {"every": 2}}


def assert_equal(what: Case, block: dict[str, Any] = LOSSLESS, exact: bool = False) -> None:
    if what.layout == (3, 1, 2):  # audits of a part of the world are in mesh_checks.py
        block = {**block, "guard": {"every": 0, "discarded_steps": 0}}
    steps = 2 if isinstance(what.accumulation, int) else len(what.accumulation)
    found, wanted = train(what, block, steps), plain(what, steps)
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
    for layout in ((2, 1, 2), (1, 2, 2)):
        assert_equal(Case(layout, (1, 3, 8)))


def check_presets() -> None:
    """Scopes from the device to the world; with codec none all give the same."""
    for preset in ("hpz", "zero1"):
        assert_equal(Case(accumulation=2), uncoded(preset))


def check_bfloat16_with_sums_of_float32_keeps_every_bit() -> None:
    assert_equal(case("bf16"), exact=True)


def check_features() -> None:
    """Some together; feature_checks.py has each alone."""
    assert_equal(case("frozen", "checkpointing", accumulation=2))
    assert_equal(case("tied", "grouped", "kept", optimizer="sgd"))
    if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # torch 2.12
        assert_equal(case("spare", "smaller", accumulation=2))
    assert_equal(case("meta", "prefetch", "offload", layout=(1, 2, 2)))
    assert_equal(case(layout=(2, 1, 1), tensor=2, accumulation=2))


def check_buckets_that_share_a_message_of_the_boundary() -> None:
    """Some of a step's buckets, or all of them."""
    for least in (300, 1 << 24):
        assert_equal(case("frozen", "checkpointing", accumulation=2), {**LOSSLESS, "boundary_message_bytes": least})
    runs = [train(case(accumulation=2), {"preset": "topo", "boundary_message_bytes": least}) for least in (0, 1 << 24)]
    hops = [Counter({(one.role, one.tier): one.hops for one in run.state.wire_log.entries()}) for run in runs]
    assert runs[0].losses == runs[1].losses
    assert hops[1]["gradients", "inter_node"] < hops[0]["gradients", "inter_node"]
    for run in runs:
        run.state.close()


def check_exceptions_of_parameters() -> None:
    """Those with a codec or scopes of their own travel in messages of their own."""
    blocks = {"codecs": {"weights": "none", "gradients": "none", "except": {"*norm*": "none", "head.*": "bf16"}}}
    found = train(case("frozen"), {"preset": "topo", **blocks})
    assert found.state is not None
    wanted = plain(case("frozen"))
    assert relative(found.losses, wanted.losses) < 1e-3
    assert any(entry.codec == "bf16" for entry in found.state.wire_log.entries())
    found.state.close()
    shard = {"except": {"head.*": {"weights": "world"}, "*norm*": {"weights": "device", "gradients": "world"}}}
    assert_equal(case("frozen", "checkpointing", accumulation=2), {"preset": "lossless", "shard": shard})
