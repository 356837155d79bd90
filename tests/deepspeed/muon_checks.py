"""Muon beside stock ZeRO-3, and what older releases of DeepSpeed lack. Run by tests/parity/test_parity.py on 4 ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator

import hzero
from hzero.deepspeed import versions
from hzero.errors import ConfigError
from hzero.program.matrices import Matrix, Owned
from tests.deepspeed.training import (
    LR,
    TOPOLOGY,
    WORLD,
    AwkwardNet,
    assert_losses,
    ds_config,
    engine_of,
    shared_folder,
    train,
)

TOLERANCE = 1e-6
STEPS = 2  # before the checkpoint, and after it


# Stock orthogonalises in fp16 where the processor has it, whose roundings make 4e-4 of differences in the last bit of a sum.
@mock.patch.object(type(get_accelerator()), "is_fp16_supported", mock.Mock(return_value=False))
@torch._dynamo.config.patch(disable=True)
def check_muon_gives_stocks_losses_and_norms() -> None:
    """Each loads the other's checkpoint. Every matrix travels whole to one rank and back, and nothing else does."""
    if "Muon" in versions.lacking():
        pytest.skip("the installed DeepSpeed has another Muon")
    params = {"lr": LR, "momentum": 0.9, "weight_decay": 0.01, "torch_adam": True}
    folder, found = shared_folder(), dict[tuple[str, int], tuple[list[float], list[float]]]()
    blocks = {"stock": None, "hzero": {"preset": "lossless", "topology": TOPOLOGY}}
    for first, name in itertools.product((0, STEPS), blocks):
        zero = {"stage": 3, "reduce_scatter": False}
        config = ds_config(blocks[name], 3, zero_optimization=zero) | {"optimizer": {"type": "Muon", "params": params}}
        engine, norms = engine_of(config, _Matrices()), list[float]()
        if first:
            engine.load_checkpoint(str(folder), tag="hzero" if name == "stock" else "stock")
        losses = train(engine, STEPS, 3, first=first, norms=norms)
        if not first:
            engine.save_checkpoint(str(folder), tag=name)
        found[name, first] = losses, norms
        if name == "hzero":
            own = hzero.state(engine)
            own.settle()
            entries = [entry for entry in own.wire_log.entries() if entry.role == "optimizer"]
            sent = {entry.tier: (entry.wire_bytes, entry.raw_bytes) for entry in entries}
            matrices = [Matrix.of(param.ds_shape, WORLD) for param in engine.module.parameters() if param.use_muon]
            planned = Owned.of(matrices, own.plan.grid).traffic(own.plan, 4)
            assert sent == {row.tier: (STEPS * row.wire_bytes, STEPS * row.raw_bytes) for row in planned}
            # A node owns one matrix of 29 x 17, on one rank, and two of 13 x 29, on the other. In shards:
            large, small = math.ceil(29 * 17 / WORLD), math.ceil(13 * 29 / WORLD)
            numels = {"inter_node": large + 2 * small, "intra_package": 2 * 2 * small}
            # There and back, in float32. Half of a message stays on this rank.
            assert {tier: raw for tier, (_, raw) in sent.items()} == {
                tier: STEPS * 2 * 4 * numel for tier, numel in numels.items()
            }
        engine.destroy()
    for first in (0, STEPS):
        for got, want, what in zip(found["hzero", first], found["stock", first], ("losses", "norms"), strict=True):
            assert_losses(got, want, TOLERANCE, f"{what} from step {first}")
    model = _Matrices()
    model.patch = torch.nn.Conv2d(1, 2, 3)
    with pytest.raises(ConfigError, match=r"optimizer.type: found muon for patch.weight of shape \[2, 1, 3, 3\]; exp"):
        engine_of(config, model)


@mock.patch.object(type(get_accelerator()), "is_fp16_supported", mock.Mock(return_value=False))
@torch._dynamo.config.patch(disable=True)
def check_muon_forgets_a_gradient_that_is_not_finite() -> None:
    """A discarded step changes neither weights nor momentum."""
    if "Muon" in versions.lacking():
        pytest.skip("the installed DeepSpeed has another Muon")
    losses = []
    for spoils in (False, True):
        config = ds_config({"preset": "lossless", "topology": TOPOLOGY}, zero_optimization={"reduce_scatter": False})
        params = {"lr": LR, "momentum": 0.9, "torch_adam": True}
        engine = engine_of(config | {"optimizer": {"type": "Muon", "params": params}}, _Matrices())
        train(engine, 1)
        if spoils:
            matrices = [layer.weight for layer in engine.module.layers]
            hooks = [matrix.register_hook(lambda gradient: gradient * math.inf) for matrix in matrices]
            train(engine, 1, first=9)
            assert engine.optimizer.overflow
            for hook in hooks:
                hook.remove()
        losses.append(train(engine, 2, first=1))
        engine.destroy()
    assert losses[0] == losses[1], losses


class _Matrices(torch.nn.Module):
    """More matrices than ranks, of odd sizes, beside parameters that Adam steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(37, 13)
        sizes = ((13, 29), (29, 17), (17, 29), (29, 13), (13, 29), (29, 13))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(*size) for size in sizes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x - self.embed(tokens.flip(1))).square().mean()


def check_what_only_newer_versions_have_is_refused_by_name() -> None:
    if not (missing := versions.lacking()):
        pytest.skip("the installed DeepSpeed lacks nothing")
    block = {"preset": "lossless", "topology": TOPOLOGY, "boundary_message_bytes": 4096}  # several buckets a message
    stages = deepspeed.PipelineModule(
        [torch.nn.Linear(3, 3) for _ in range(2)], num_stages=2, loss_fn=torch.nn.MSELoss()
    )
    asked: dict[str, tuple[dict[str, Any], torch.nn.Module]] = {
        "pipeline stages": ({"zero_optimization": {"stage": 1}}, stages),
        "AutoTP": ({"tensor_parallel": {"autotp_size": 2}}, AwkwardNet()),
        "Muon": ({"optimizer": {"type": "Muon", "params": {"lr": LR}}}, AwkwardNet()),
        "managed_gradient_accumulation false": ({"managed_gradient_accumulation": False}, AwkwardNet()),
    }
    for feature in missing:
        changes, model = asked[feature]
        with pytest.raises(ConfigError, match=f"with deepspeed {deepspeed.__version__}; hzero supports {feature} with"):
            engine_of(ds_config(block, **changes), model)
