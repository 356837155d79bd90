"""Weights in codec exp. Run by test_stage.py on 8 ranks, 2 nodes x 2 GPUs x 2 GCDs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import hzero
from hzero.config import TIERS
from hzero.validation import ConfigError
from tests.zero.training import AwkwardNet, batch, block_of, ds_config, engine_of, masters_of, train


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


def check_weights_that_codec_exp_cannot_hold_change_no_bit() -> None:
    """Numbers of all sizes in one matrix: its payload stays without a codec, those of others do not."""
    for weights, gradients in (("package", "node"), ("node", "node"), ("world", "world"), ("device", "node")):
        losses, masters = [], []
        for codec in ("none", "exp"):
            shard = {"weights": weights, "gradients": gradients}
            codecs = {"weights": dict.fromkeys(TIERS, codec)}
            block = block_of("lossless", codecs=codecs, shard=shard, guard={"every": 1})
            net = AwkwardNet(width=256, inner=1024)
            _spread(net.frozen.weight.data)  # which stays so
            engine = engine_of(ds_config(block, 2, bf16={"enabled": True}), net)
            losses.append(train(engine, 2, 2))
            masters.append(masters_of(engine))
            state = hzero.state(engine)
            state.settle()
            sent = {entry.codec for entry in state.wire_log.entries() if entry.role == "weights"}
            assert sent == {"none", codec}, (weights, sent)
            resident = [managed for managed in state.weights._managed.values() if managed.payload is not None]
            unfit = {managed.param.ds_id for managed in resident if managed.unfit}
            assert unfit == ({net.frozen.weight.ds_id} if codec == "exp" and resident else set()), weights
            engine.destroy()
        assert losses[0] == losses[1], weights
        assert all(torch.equal(masters[0][name], masters[1][name]) for name in masters[0])


def check_a_shard_that_fits_no_longer_is_stale() -> None:
    """Somebody writes numbers of all sizes behind the stage, on one rank: it is named, on all ranks."""
    block = block_of("lossless", codecs={"weights": dict.fromkeys(TIERS, "exp")}, guard={"every": 1})
    model = AwkwardNet(width=128, inner=512)
    engine = engine_of(ds_config(block, 1, bf16={"enabled": True}), model)
    train(engine, 1)
    engine.backward(engine(batch(1, 0)))
    if dist.get_rank() == 3:
        _spread(model.up.weight.ds_tensor.data)
    with pytest.raises(hzero.StaleWeightsError, match=r"owners hold: up\.weight"):
        engine.step()
    engine.destroy()


def _spread(tensor: torch.Tensor) -> None:
    """Makes exponents that codec exp cannot hold."""
    generator = torch.Generator().manual_seed(0)
    tensor *= torch.exp2(-torch.randint(0, 100, tensor.shape, generator=generator)).to(tensor.dtype)


def check_codec_exp_is_refused_for_other_types() -> None:
    config = ds_config(block_of("lossless", codecs={"weights": {"node": "exp"}}))
    says = "hzero.codecs.weights.node: found 'exp', which holds bfloat16 numbers, with torch.float32 of"
    with pytest.raises(ConfigError, match=says):
        engine_of(config)
