"""Models on a part of the world, and with tensor parallelism: who decides. Run by test_fsdp.py on 4 ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD

import hzero.fsdp
from hzero import DivergenceError, StaleWeightsError
from tests.fsdp.training import WORLD, Case, backward, build, mesh_of, optimizer_of, spoil

#: Weights are resident on each device.
GUARDED: dict[str, Any] = {
    "preset": "zero1",
    "codecs": {"weights": "none", "gradients": "none"},
    "guard": {"every": 1, "discarded_steps": 2},
}


def check_ranks_without_the_model_need_not_take_part() -> None:
    """The last two ranks train alone, with audits and a guard; the others do nothing."""
    mesh = mesh_of(WORLD - 2)  # all ranks make all meshes, since torch numbers their groups
    if dist.get_rank() < WORLD - 2:
        return
    what = Case((1, 1, 2))
    model = build(frozenset(), mesh)
    # One rank alone reads gradients, which have crossed in every backward.
    state = hzero.fsdp.apply(
        model, topology={"packages_per_node": 1, "devices_per_package": 2}, accumulation=1, **GUARDED
    )
    optimizer = optimizer_of("adamw", model)
    for step in range(3):
        backward(what, model, mesh, step, 0)
        optimizer.step()
        optimizer.zero_grad()
    backward(what, model, mesh, 3, 0)
    spoil(state, "blocks.1")
    with pytest.raises(StaleWeightsError, match=r"blocks\.1"):
        optimizer.step()
    state.note_edit()
    with pytest.raises(DivergenceError, match="in 2 steps in a row"):
        for _ in range(2):
            backward(what, model, mesh, 4, 0)
            if mesh.get_local_rank() == 1:
                model.blocks[0].up.weight.grad.to_local().fill_(math.nan)
            optimizer.step()
            optimizer.zero_grad()
    state.close()


def check_tensor_groups_decide_alike() -> None:
    """What one rank finds is of all ranks that hold a part of the model."""
    what = Case((2, 1, 1), tensor=2)
    mesh = mesh_of(WORLD, 2)
    model = build(frozenset(), mesh)
    state = hzero.fsdp.apply(model, topology=what.topology, **GUARDED)
    optimizer = SGD(model.parameters(), lr=0.1)
    before = [param.full_tensor().clone() for param in model.parameters()]
    backward(what, model, mesh, 0, 0)
    if dist.get_rank() == WORLD - 1:
        model.blocks[0].up.weight.grad.to_local().fill_(math.inf)
    optimizer.step()
    for one, param in zip(before, model.parameters(), strict=True):
        assert torch.equal(one, param.full_tensor())
    state.close()
