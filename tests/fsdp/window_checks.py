"""When gradients cross, and what ends a window. Run by test_fsdp.py on 4 ranks."""

from __future__ import annotations

import logging
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from hzero import DivergenceError
from tests.parity.compare import Row, relative, row, stock, train
from tests.parity.fsdp import Session, applied
from tests.parity.zoo import BLOCKS

LOSSLESS: dict[str, Any] = {"preset": "lossless"}
#: The model and its blocks.
MODULES = 1 + BLOCKS


def check_the_number_of_backwards_is_observed() -> None:
    """Without flags, each backward of the first step crosses. Later, only the last one of a step does."""
    sessions = []

    def front(row: Row) -> Session:
        sessions.append(Session(row))
        return sessions[-1]

    one = row("lossless", "none", 3)
    found, wanted = train(front, one, measures=False), stock(Session, one.of_stock)
    assert relative(found.losses, wanted.losses) < 1e-6 and relative(found.norms, wanted.norms) < 1e-6
    hops = {(entry.role, entry.tier): entry.hops for entry in sessions[0].state.wire_log.entries()}
    assert (hops["gradients", "inter_node"], hops["gradients", "intra_package"]) == (MODULES * (3 + 1), MODULES * 2 * 3)


def check_one_rank_alone_cannot_read_a_sum() -> None:
    """All ranks say so, instead of waiting for each other."""
    says = r"this rank is at .*, other ranks are at .*; all ranks must use gradients"
    for others in ("step", "forward"):
        with applied(LOSSLESS, "count", accumulation=2) as session:
            session.go(0, 0)
            with pytest.raises(RuntimeError, match=says):
                if dist.get_rank() == 1:
                    session.model.embed.weight.grad.to_local()
                elif others == "step":
                    session.optimizer.step()
                else:
                    session.go(0, 1)
            session.optimizer.zero_grad()


def check_an_error_in_backward_loses_its_window_alone() -> None:
    """As with FSDP2 alone, which keeps what the modules before the error had not reduced yet."""
    if not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("FSDP2 of this torch cannot begin anew after an error")

    def fail(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    losses = []
    for preset in (None, "lossless"):
        session = Session(Row(preset))
        handle = session.model.blocks[0].register_full_backward_pre_hook(fail)
        with pytest.raises(ArithmeticError, match="on purpose"):
            session.go(5)
        handle.remove()
        session.model.reset_iter_state()
        session.optimizer.zero_grad()
        losses.append([])
        for step in range(2):
            losses[-1].append(float(session.go(step)))
            session.advance()
        session.end()
    assert relative(*losses) < 1e-6, losses


def check_gradients_that_are_not_finite_change_no_weight() -> None:
    with applied({"preset": "topo", "guard": 2}) as session:
        session.go(0)
        session.advance()
        before = session.masters()
        for attempt in range(2):
            session.go(1)
            for param in session.model.blocks[1].parameters():
                param.grad.to_local().fill_(math.nan)
            if attempt:
                with pytest.raises(DivergenceError, match=r"not finite in 2 steps in a row.*blocks\.1"):
                    session.optimizer.step()
            else:
                session.optimizer.step()
            session.optimizer.zero_grad()
        after = session.masters()
        assert all(torch.equal(before[name], after[name]) for name in before)


def check_a_load_drops_residuals() -> None:
    with applied({"preset": "topo", "error_feedback": ["inter_node"]}) as session:
        session.go(0)
        session.advance()
        assert session.state.memory()["error feedback"] > 0
        with mock.patch.object(logging.getLogger("hzero"), "warning") as warned:
            session.model.load_state_dict(session.model.state_dict())
        assert session.state.memory()["error feedback"] == 0
        assert dist.get_rank() or any("start at zero" in call.args[0] for call in warned.mock_calls)


def check_the_examples_run() -> None:
    from examples import fsdp, hsdp

    losses = fsdp.train(10)
    assert losses[-1] < losses[0] - 0.3, losses
    exact, _ = hsdp.train(8, "none")
    coarse, log = hsdp.train(8)
    assert relative(coarse, exact) < 1e-3 and exact[-1] < exact[0], (coarse, exact)
    assert {entry.tier for entry in log} == {"inter_node"}
    assert 3.7 < sum(entry.raw_bytes for entry in log) / sum(entry.wire_bytes for entry in log) < 4
