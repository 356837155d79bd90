"""Steps under the race detector, with all waits and without one. Run by test_stage.py on 4 and on 8 ranks.

Only rank 0 records, and the others wait for it. 8 ranks show what needs three tiers, 4 the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from deepspeed.utils import safe_get_full_grad

import hzero
from hzero.comm import Communicator, shared_lanes
from hzero.config import PRESETS
from hzero.deepspeed.stage_state import async_accelerator
from tests.deepspeed.race_detector import recording
from tests.deepspeed.tensor_checks import tensor_groups, train_split
from tests.deepspeed.training import (
    WIDTH,
    WORLD,
    AwkwardNet,
    batch,
    block_of,
    ds_config,
    engine_of,
    shared_folder,
    train,
)


class _Net(AwkwardNet):
    """Has weights that no forward waits for, in a refresh message of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(WIDTH, WIDTH)


class _ReadsOutside(_Net):
    """Reads a parameter of a module that it does not call."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.unused.bias.sum()


def _engine(
    preset: str,
    accumulation: int = 2,
    zero: dict[str, Any] | None = None,
    block: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    small = {"stage3_prefetch_bucket_size": 400, "reduce_bucket_size": 400, "sub_group_size": 500}
    zero = {"stage": 3, **small, **(zero or {})}
    return engine_of(
        ds_config(block_of(preset, **(block or {})), accumulation, zero_optimization=zero, **changes), _Net()
    )


def _steps(preset: str, accumulation: int = 2, **block: Any) -> Any:
    engine = _engine(preset, accumulation, block=block)
    train(engine, 2, accumulation)
    return engine


_FOUR_NODES = {"nodes": 4, "packages_per_node": 1, "devices_per_package": 2}
#: With checksums.
_DOUBLING = {
    "node_all_gather": {"algorithm": "doubling", "below_bytes": 1 << 30},
    "topology": _FOUR_NODES,
    "checksum": True,
}
#: Sums of several buckets wait between the nodes of a group and the groups; without gradient accumulation buffers too.
_GROUPS = {"topology": {**_FOUR_NODES, "nodes_per_group": 2}, "boundary_message_bytes": 200}
#: No hop fetches weights or reduces the gradients of a micro-batch.
_ONE_DEVICE = {
    "topology": {"nodes": 2, "packages_per_node": 4, "devices_per_package": 1},
    "shard": {"weights": "package", "gradients": "package"},
}


def _load_and_offload() -> Any:
    """A checkpoint is loaded, and states leave the device, while a step's refresh is under way."""
    model = _Net()
    model.frozen.weight.requires_grad_(True)  # DeepSpeed 0.19.8 cannot offload the shards of frozen parameters
    engine = engine_of(ds_config(block_of("topo"), 1), model)
    folder = str(shared_folder())
    engine.save_checkpoint(folder)
    train(engine, 1, 1)
    engine.load_checkpoint(folder)
    train(engine, 1, 1)
    engine.offload_states(include=[OffloadStateTypeEnum.lp_params], pin_memory=False)
    engine.reload_states()
    train(engine, 1, 1)
    return engine


def _edit_and_exact_forward() -> Any:
    """An edit while a step's refresh is under way; an exact forward and a decoded one, with no backward behind it."""
    engine = _engine("topo")
    train(engine, 1, 2)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        if dist.get_rank() == 0:
            engine.module.gain.data.fill_(5.0)
    train(engine, 1, 2, first=1)
    with torch.no_grad():
        with hzero.exact_weights(engine):
            engine(batch(2, 0))
        engine(batch(2, 0))
    return engine


def _kept_whole_in_bf16() -> Any:
    """Parameters that stay whole between steps; gradients outside DeepSpeed's buffer, cast before they are sent.

    Accumulation is the caller's, so all buckets cross at the boundary; the last window is given up.
    """
    zero = {"stage3_param_persistence_threshold": 10**6, "contiguous_gradients": False}
    unmanaged = {"managed_gradient_accumulation": False}
    block = {"codecs": {"except": {"norm.*": "none"}}}
    engine = _engine(
        "topo", zero=zero, block=block, bf16={"enabled": True}, communication_data_type="fp32", **unmanaged
    )
    for step in range(2):
        for micro in range(2):
            engine.backward(engine(batch(step, micro)))
        engine.step()
    engine.backward(engine(batch(2, 0)))
    engine.optimizer.zero_grad()
    return engine


def _read_between_micro_steps() -> Any:
    """Without gradient accumulation buffers: a micro-batch ends while its reductions are in flight, and a reader wants them."""
    engine = _engine("zeropp", 3)
    for step in range(2):
        for micro in range(3):
            engine.backward(engine(batch(step, micro)))
            if micro == 1:
                safe_get_full_grad(engine.module.up.weight)
            engine.step()
    return engine


def _without_optimizer() -> Any:
    """Forward before anything has stopped the device, of a model that reads a parameter outside its module."""
    block = block_of("topo")
    config = {k: v for k, v in ds_config(block).items() if k != "optimizer"}
    engine = hzero.initialize(model=_ReadsOutside(), config=config)[0]
    with torch.no_grad():
        engine(batch(0, 0))
    return engine


def _without_a_stage() -> Any:
    """Operations of a communicator, several under way; what they read changes, or is freed, once they have read it."""
    shared_lanes(async_accelerator())
    settings = {"codecs": "int8", "gather": {"inter_node": "int4"}, "error_feedback": ["intra_package", "inter_node"]}
    world = dist.get_world_size()
    group = Communicator(
        {**settings, "topology": {"nodes": 2, "packages_per_node": world // 4, "devices_per_package": 2}}
    )
    for _ in range(2):
        tensor = torch.randn(world, 40)
        average = torch.randn(50)
        chains: list[Any] = [group.all_reduce(one, key=key, async_op=True) for key, one in enumerate((tensor, average))]
        chains += [group.all_gather(tensor, async_op=True), group.all_to_all(tensor, async_op=True)]
        chains += [group.broadcast(tensor, 1, async_op=True), group.reduce_scatter(tensor, key=2, async_op=True)]
        for chain in chains:
            chain.wait_read()
        tensor.zero_()
        del tensor
        assert sum(float(chain.wait().sum()) for chain in chains) != 0
    last = [group.all_gather(torch.randn(40), async_op=True), group.all_to_all(torch.randn(world, 40), async_op=True)]
    last.append(group.broadcast(torch.randn(40), 0, async_op=True))
    group.all_reduce(torch.randn(50), "mean", key=1, async_op=True)
    torch.randn(50).add_(1)
    assert sum(float(chain.wait().sum()) for chain in last) != 0
    group.broadcast(torch.ones(3), 0).add_(1)
    return mock.Mock()


def _beside_tensor_groups() -> Any:
    """Sums of activations in layers, between gathers of weights and reductions of gradients."""
    shared_lanes(async_accelerator())
    block = block_of("topo", codecs={"tensor": "int8"})
    with tensor_groups(2) as mpu:
        return train_split(ds_config(block, 2), mpu, 2, 2)[-1]


#: Presets whose scopes and codecs differ in more than one from those of the others.
_SCHEDULES = [preset for preset in PRESETS if preset not in ("zero2", "zero3", "hpz", "half", "lossless")]
#: The others take half the time.
_ACCUMULATE = ("topo", "replica")
#: What is recorded. Each makes an engine and does something with it.
SCENARIOS: dict[str, Callable[[], Any]] = {
    **{f"steps, {preset}": functools.partial(_steps, preset, 1 + (preset in _ACCUMULATE)) for preset in _SCHEDULES},
    "steps, gathers by doubling": functools.partial(_steps, "topo", 1, **_DOUBLING),
    "steps, shared boundary messages": functools.partial(_steps, "topo", 1, **_GROUPS),
    "steps, audits": functools.partial(_steps, "topo", 1, guard={"every": 1}),
    "steps, scopes of one device": functools.partial(_steps, "topo", **_ONE_DEVICE),
    "load and offload": _load_and_offload,
    "edit and exact forward": _edit_and_exact_forward,
    "kept whole, bf16": _kept_whole_in_bf16,
    "a reader between micro-batches": _read_between_micro_steps,
    "without optimizer": _without_optimizer,
    "without a stage": _without_a_stage,
    "beside tensor groups": _beside_tensor_groups,
}


#: Of 8 ranks.
_OF_THREE_TIERS = (
    *("steps, topo", "steps, gathers by doubling", "steps, scopes of one device", "steps, shared boundary messages"),
    "beside tensor groups",
)


def check_no_races() -> None:
    """All accesses of every buffer, collectives included, have an order, and no buffer is freed while it is in use."""
    for scenario, run in SCENARIOS.items():
        if (scenario in _OF_THREE_TIERS) != (WORLD == 8):
            continue
        with recording() as trace:
            engine = run()
            engine.destroy()
            del engine
        races = trace.races()
        assert not races, f"{scenario}: {len(races)} races\n" + "\n".join(races[:6])


def check_collectives_of_a_step_have_one_order() -> None:
    """Under the order ``strict``. Under ``lanes`` tiers overlap. tests/comm/test_order.py has schedules of other presets."""
    settings = [("topo", {}), ("topo", _GROUPS)] if WORLD == 8 else [(preset, {}) for preset in ("zero2", *_SCHEDULES)]
    for preset, block in settings:
        with recording() as trace:
            engine = _steps(preset, 1 + (preset in _ACCUMULATE), order="strict", **block)
            streams = hzero.state(engine).lanes._streams.values()
            assert len(streams) <= 6 and all(stream.priority < 0 for stream in streams), preset
            engine.destroy()
        pairs, most = trace.unordered()
        if dist.get_rank() == 0:
            assert not pairs and most == 1, f"{preset}: {most} collectives, {len(pairs)} pairs\n" + "\n".join(pairs[:3])
    with recording() as trace:
        engine = _steps("topo", order="lanes")
        assert len(hzero.state(engine).lanes._streams) == (6 if WORLD == 8 else 4)
        engine.destroy()
    pairs, most = trace.unordered()
    if dist.get_rank() == 0:
        assert pairs and most > 1
