"""Groups of nodes: losses of stock ZeRO-3, bytes of the plan, and the same bits on all ranks. Run on 16 ranks."""

from __future__ import annotations

import contextlib
import io

import torch
import torch.distributed as dist

import hzero
from hzero.tools.plan.collectives import step_traffic
from tests.deepspeed.training import (
    AwkwardNet,
    assert_losses,
    batch,
    block_of,
    ds_config,
    engine_of,
    same_on_all_ranks,
    train,
)

TOPOLOGY = {"nodes": 8, "packages_per_node": 2, "devices_per_package": 1, "nodes_per_group": 4}
STEPS, ACCUMULATION = 2, 2


def check_16_ranks_as_8_nodes_in_2_groups() -> None:
    # Parameters that are kept whole would be refreshed once more, after the last step.
    zero, stock = {"stage3_max_reuse_distance": 0}, [[], []]
    for preset, tolerance in {None: 0.0, "lossless": 1e-6, "topo": 5e-3}.items():
        block = block_of(preset, topology=TOPOLOGY) if preset else None
        model, norms = AwkwardNet(inner=257), list[float]()
        model.frozen.requires_grad_(True)  # or it is refreshed before the first step only
        with contextlib.redirect_stderr(io.StringIO()) as said:
            engine = engine_of(ds_config(block, ACCUMULATION, zero_optimization=zero), model)
        losses = train(engine, STEPS, ACCUMULATION, norms=norms)
        state = hzero.state(engine)
        if state is None:
            stock = [losses, norms]
        else:
            assert_losses(losses, stock[0], tolerance)
            state.settle()
            numels = [param.ds_numel for param in model.parameters()]
            planned = step_traffic(state.plan, state.plan.grid, numels, itemsize=4, accumulation=ACCUMULATION)
            logged = {(entry.role, entry.tier): entry for entry in state.wire_log.entries()}
            far = {
                (row.role, row.tier): row for row in planned if row.used and row.tier in ("inter_node", "inter_group")
            }
            assert len(far) == 4
            for crossing, row in far.items():
                assert logged[crossing].wire_bytes == STEPS * row.wire_bytes, crossing
            codecs = [logged["gradients", tier].codec for tier in ("inter_node", "inter_group")]
            if preset == "lossless":
                assert_losses(norms, stock[1], 1e-5, "norms")
                assert {logged[crossing].codec for crossing in far} == {"none"}
                line = "lossless on 2 groups x 4 nodes x 2 packages x 1 device"
                assert line in said.getvalue() or dist.get_rank(), "the start line"
            else:
                assert codecs == ["int4", "int8"] and losses != stock[0]
            with torch.no_grad():
                assert same_on_all_ranks([engine(batch(0, 0, rank=0))])
        engine.destroy()
