"""Models on a part of the world, and with tensor parallelism: who decides. Run by test_fsdp.py on 4 ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD

from hzero import DivergenceError, StaleWeightsError
from tests.parity.compare import WORLD
from tests.parity.fsdp import applied, mesh_of, spoil

#: Weights are resident on each device.
GUARDED: dict[str, Any] = {
    "preset": "zero1",
    "codecs": {"weights": "none", "gradients": "none"},
    "guard": {"every": 1, "discarded_steps": 2},
}


def check_ranks_without_the_model_need_not_take_part() -> None:
    """The last two ranks train alone, with audits and a guard; the others do nothing."""
    mesh_of(WORLD - 2)  # all ranks make all meshes, since torch numbers their groups
    if dist.get_rank() < WORLD - 2:
        return
    # One rank alone reads gradients, which have crossed in every backward.
    with applied(GUARDED, "count", layout=(1, 1, 2)) as session:
        for step in range(3):
            session.go(step)
            session.advance()
        session.go(3)
        spoil(session.state, "blocks.1")
        with pytest.raises(StaleWeightsError, match=r"blocks\.1"):
            session.optimizer.step()
        session.state.note_edit()
        with pytest.raises(DivergenceError, match="in 2 steps in a row"):
            for _ in range(2):
                session.go(4)
                if session.rank == 1:
                    session.model.blocks[0].up.weight.grad.to_local().fill_(math.nan)
                session.advance()


def check_tensor_groups_decide_alike() -> None:
    """What one rank finds is of all ranks that hold a part of the model."""
    with applied(GUARDED, layout=(2, 1, 1), tensor=2) as session:
        optimizer = SGD(session.model.parameters(), lr=0.1)
        before = session.masters()
        session.go(0)
        if dist.get_rank() == WORLD - 1:
            session.model.blocks[0].up.weight.grad.to_local().fill_(math.inf)
        optimizer.step()
        after = session.masters()
        assert all(torch.equal(before[name], after[name]) for name in before)
