"""Whatever DeepSpeed does around the stage, and secondary partitions. Run by test_stage.py on 4 ranks."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.comm.comm import comms_logger
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

import hzero
from hzero.comm import HopError
from hzero.comm.wires import process_group, world_timeout
from hzero.config import ROLES, TopologyConfig
from hzero.deepspeed.handles import GatherHandle
from hzero.engine.engine import Owners
from hzero.errors import ConfigError
from tests.deepspeed.training import (
    AwkwardNet,
    assert_losses,
    batch,
    block_of,
    ds_config,
    engine_of,
    masters_of,
    mean_over_ranks,
    read_of,
    shared_folder,
    train,
)


def check_a_gather_that_fails_leaves_no_parameter_under_way() -> None:
    """Or the next engine on the model could not partition it."""
    engine = engine_of(ds_config(block_of("topo")))
    train(engine, 1)
    with (
        mock.patch.object(GatherHandle, "wait", side_effect=HopError("a gather")),
        pytest.raises(HopError, match="a gather"),
    ):
        engine(batch(1, 0))
    params = list(engine.module.parameters())
    assert any(param.ds_status == ZeroParamStatus.INFLIGHT for param in params)
    engine.destroy()
    assert not any(param.ds_status == ZeroParamStatus.INFLIGHT for param in params)


def check_a_world_in_another_order_is_refused() -> None:
    """A permuted group has the right size, and would give every rank another one's shard."""
    ranks = [1, 0, *range(2, dist.get_world_size())]
    permuted = process_group(("permuted", "inter_node"), ranks, world_timeout())
    with pytest.raises(ConfigError, match="found rank 1 of the world at place 0"):
        Owners.of(permuted, TopologyConfig())


def check_master_weights_set_by_the_user() -> None:
    """A master weight that the user sets reaches forward with the next step, as in stock DeepSpeed."""
    # DeepSpeed's setter wants sizes that the world divides.
    model = AwkwardNet(inner=32)
    engine = engine_of(ds_config(block_of("topo"), optimizer={"type": "SGD", "params": {"lr": 0.0}}), model)
    train(engine, 1)
    weight = engine.module.norm.weight
    safe_set_full_fp32_param(weight, torch.full_like(safe_get_full_fp32_param(weight), 3.0))
    train(engine, 1)
    seen = []
    hook = engine.module.norm.register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
    with torch.no_grad():
        engine(batch(0, 0))
    hook.remove()
    torch.testing.assert_close(seen[0], torch.full_like(seen[0], 3.0), rtol=2**-7, atol=0.0)
    engine.destroy()


def check_several_engines_and_no_optimizer() -> None:
    """Two stages (one configured by a file), a stock engine, one without an optimizer, interleaved in one process."""
    file = shared_folder() / "ds_config.json"
    if dist.get_rank() == 0:
        file.write_text(json.dumps(ds_config(block_of("lossless"))))
    dist.barrier()
    first = engine_of(file)
    stock = engine_of(ds_config(None))
    second = engine_of(ds_config(block_of("topo")), AwkwardNet(seed=1))
    no_optimizer = {k: v for k, v in ds_config(block_of("topo")).items() if k != "optimizer"}
    judge = hzero.initialize(model=AwkwardNet(), config=no_optimizer)[0]
    assert hzero.state(stock) is None and hzero.state(judge) is not None
    reference = AwkwardNet()
    for step in range(3):
        a, b = train(first, 1, first=step), train(stock, 1, first=step)
        assert_losses(a, b)
        train(second, 1, first=step)
        with torch.no_grad():
            assert abs(mean_over_ranks(judge(batch(step, 0))) - mean_over_ranks(reference(batch(step, 0)))) < 0.05
    assert {e.tier for e in hzero.state(judge).wire_log.entries()} == {"intra_package", "inter_node"}
    for engine in (first, stock, second, judge):
        engine.destroy()


def check_an_engine_leaves_the_model_to_the_next() -> None:
    """Stock after hzero is stock, and hzero after hzero reads its own payloads; destroyed before, late or never."""
    zero = {"stage3_param_persistence_threshold": 0}
    topo = block_of("topo")
    for block, destroyed in ((topo, "before"), (None, "late"), (topo, "late"), (None, "never")):
        model = AwkwardNet()
        first = engine_of(ds_config(block_of("topo"), zero_optimization=zero), model)
        train(first, 2)
        if destroyed == "before":
            first.destroy()
        second = engine_of(ds_config(block, zero_optimization=zero), model)
        if destroyed == "late":
            first.destroy()
        train(second, 2, first=2)
        reference = AwkwardNet()
        reference.load_state_dict(masters_of(second), strict=False)
        with torch.no_grad(), hzero.exact_weights(second):
            exact, want = mean_over_ranks(second(batch(50, 0))), mean_over_ranks(reference(batch(50, 0)))
            assert abs(exact - want) < 1e-5, (block, destroyed, exact, want)
        with torch.no_grad():
            decoded = mean_over_ranks(second(batch(50, 0)))
            assert abs(decoded - want) < (1e-5 if block is None else 0.02), (block, destroyed, decoded, want)
        second.destroy()


def check_a_profile_has_every_hop_of_the_wire_log() -> None:
    """By role, tier and codec, those of all threads, and the time in which the rank waits for them."""
    engine = engine_of(ds_config(block_of("topo"), 2))
    train(engine, 1, 2)
    state = hzero.state(engine)
    state.settle()
    state.wire_log.reset()
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, experimental_config=every) as profiler:
        train(engine, 1, 2, first=1)
        state.settle()
    names = Counter(event.name for event in profiler.events() if event.name.startswith("hzero: "))
    entries = state.wire_log.entries()
    assert {(entry.role, entry.tier) for entry in entries} == {
        (role, tier) for role in ROLES for tier in ("intra_package", "inter_node")
    }
    for entry in entries:
        of = [name for name in names if f" {entry.tier}: {entry.role} of " in name and f" codec {entry.codec}" in name]
        assert sum(names[name] for name in of) == entry.hops, (entry, names)
    assert names["hzero: wait"]
    engine.destroy()


def _logged(engine: Any) -> dict[str, tuple[int, int]]:
    """Bytes and hops of the wire log, which DeepSpeed's logger must have, the same on all ranks."""
    state = hzero.state(engine)
    state.settle()
    found = {
        name: (sum(size * one[0] for size, one in sizes.items()), sum(one[0] for one in sizes.values()))
        for name, sizes in comms_logger.comms_dict.items()
        if name.startswith("hzero ")
    }
    hops = [one for one in state.wire_log.entries() if one.wire_bytes]
    assert found == {f"hzero {one.role}, {one.tier}, {one.codec}": (one.wire_bytes, one.hops) for one in hops}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    assert every == [found] * len(every)
    return found


def check_the_summary_of_comms_logger_has_the_bytes_on_the_wire() -> None:
    logger = {"enabled": True, "verbose": False, "prof_all": True, "debug": False}
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()) as printed:
        train(engine := engine_of(ds_config({"preset": "topo"})), 1)
        engine.destroy()
        assert not comms_logger.comms_dict
        engine = engine_of(ds_config(block_of("topo"), 2, comms_logger=logger))
        train(engine, 2, 2)
        before = _logged(engine)
        with torch.no_grad():
            engine(batch(2, 0))
        assert _logged(engine) != before
        deepspeed.comm.log_summary(show_straggler=True)
        engine.destroy()
    comms_logger.enabled = False
    if dist.get_rank() == 0:
        starts = [line for line in said.getvalue().splitlines() if line.startswith("hzero: topo on ")]
        assert [line.partition("; ")[0].removeprefix("hzero: topo on ") for line in starts] == [
            "1 node x 4 packages x 1 device (CPU ranks, no topology declared)",
            "2 nodes x 1 package x 2 devices",
        ]
        _, summary, stragglers = printed.getvalue().split("Comm. Op")
        for rows in (summary, stragglers):
            assert "\nhzero weights, inter_node, int8\n" in rows and "\nhzero gradients, inter_node, int4\n" in rows


# ---- secondary partitions ----------------------------------------------------------------------------------------------

AUDITED = {"every": 1}


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
    """One bit of another rank's shard, in one of the copies; also where copies have two scopes."""
    scoped = {"shard": {"except": {"norm*": {"weights": "device"}}}}
    for block in ({}, scoped):
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


class _WithNothing(AwkwardNet):
    """Has a parameter without elements."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.nothing = torch.nn.Parameter(torch.zeros(0, 5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.nothing.sum()


def check_an_evaluation_in_inference_mode_may_start_a_refresh() -> None:
    """What it keeps is trained with and added to; a parameter without elements is no obstacle."""
    sixteen: dict[str, Any] = {"bf16": {"enabled": True}}  # changes, from copies that an evaluation has made
    wide = {"width": 64, "inner": 150}
    for preset, how, sizes in (("zero1", {}, {}), ("zero1", sixteen, wide), ("lossless", sixteen, wide)):
        losses = []
        for mode in (torch.no_grad, torch.inference_mode):
            engine = engine_of(ds_config(block_of(preset), **how), _WithNothing(**sizes))
            got = []
            for first in (0, 2):
                with mode():
                    engine(batch(first, 0))
                got += train(engine, 2, first=first)
            engine.destroy()
            losses.append(got)
        assert losses[0] == losses[1], (preset, losses)


def check_an_edit_that_nobody_is_told_of_is_gone() -> None:
    """As in stock. A parameter that is kept whole between steps must not let it into the secondary partition."""
    for preset in ("zero1", "lossless"):
        zero = {"stage": 3, "stage3_param_persistence_threshold": 10**6}
        engine = engine_of(ds_config(block_of(preset), zero_optimization=zero))
        train(engine, 1)
        losses = []
        for value in (5.0, 6.0):
            with torch.no_grad():
                losses.append(mean_over_ranks(engine(batch(50, 0))))
                with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                    engine.module.gain.data.fill_(value + dist.get_rank())
        assert losses[0] == losses[1], losses
        engine.destroy()


def check_packed_codes_without_a_state_keep_their_bits() -> None:
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
