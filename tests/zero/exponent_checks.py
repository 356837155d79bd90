"""Weights in codec exp. Run by test_stage.py on 8 ranks, 2 nodes x 2 GPUs x 2 GCDs."""

from __future__ import annotations

import pytest
import torch

import hzero
from hzero.config import TIERS
from hzero.validation import ConfigError
from tests.zero.training import AwkwardNet, block_of, ds_config, engine_of, masters_of, train


def check_codec_exp_changes_no_bit() -> None:
    """On every tier and in resident payloads; in fewer bytes."""
    losses, masters, moved = [], [], []
    for codec in ("none", "exp"):
        block = block_of("lossless", codecs={"weights": dict.fromkeys(TIERS, codec)})
        engine = engine_of(ds_config(block, 2, bf16={"enabled": True}), AwkwardNet(width=256, inner=1024))
        losses.append(train(engine, 2, 2))
        masters.append(masters_of(engine))
        state = hzero.state(engine)
        state.settle()
        entries = [entry for entry in state.wire_log.entries() if entry.role == "weights"]
        assert {entry.codec for entry in entries} == {codec}
        moved.append(sum(entry.wire_bytes for entry in entries))
        engine.destroy()
    assert losses[0] == losses[1]
    assert all(torch.equal(masters[0][name], masters[1][name]) for name in masters[0])
    assert 0.75 < moved[1] / moved[0] < 0.85, moved


def check_codec_exp_is_refused_for_other_types() -> None:
    config = ds_config(block_of("lossless", codecs={"weights": {"node": "exp"}}))
    says = "hzero.codecs.weights.node: found 'exp', which holds bfloat16 numbers, with torch.float32 of"
    with pytest.raises(ConfigError, match=says):
        engine_of(config)
