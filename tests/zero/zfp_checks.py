"""Weights and gradients in codec zfp. Run by test_stage.py on 8 ranks, 2 nodes x 2 GPUs x 2 GCDs."""

from __future__ import annotations

import hzero
from hzero.config import TIERS
from tests.zero.training import AwkwardNet, block_of, ds_config, engine_of, train


def check_codec_zfp_trains_as_without_a_codec_but_for_its_noise() -> None:
    losses, moved = {}, {}
    for rate in (None, 12, 20):
        codec = {"codec": "zfp", "rate": rate} if rate else "none"
        block = block_of("lossless", codecs=dict.fromkeys(("weights", "gradients"), dict.fromkeys(TIERS, codec)))
        engine = engine_of(ds_config(block, 2), AwkwardNet(width=64, inner=256))
        losses[rate] = train(engine, 3, 2)
        state = hzero.state(engine)
        state.settle()
        entries = [entry for entry in state.wire_log.entries() if entry.role in ("weights", "gradients")]
        assert {entry.codec for entry in entries} == {"zfp" if rate else "none"}
        moved[rate] = sum(entry.wire_bytes for entry in entries)
        engine.destroy()
    errors = {rate: max(abs(a - b) / abs(b) for a, b in zip(losses[rate], losses[None])) for rate in (12, 20)}
    assert 0 < errors[20] < errors[12] < 0.02, (errors, losses)
    assert 12 / 32 <= moved[12] / moved[None] < 0.45 and moved[12] < moved[20] < moved[None], moved
