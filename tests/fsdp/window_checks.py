"""When gradients cross, what a step sends, and what ends a window. Run by test_fsdp.py on 4 ranks."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import hzero.fsdp
from hzero import DivergenceError
from hzero.codecs.formats import FIXED
from hzero.tools.plan.collectives import step_traffic
from tests.fsdp.training import (
    BLOCKS,
    WORLD,
    Case,
    applied,
    backward,
    build,
    case,
    mesh_of,
    optimizer_of,
    plain,
    relative,
    train,
)
from tests.rank_main import same_on_all_ranks

LOSSLESS: dict[str, Any] = {"preset": "lossless"}
#: Tiers inside a node.
INSIDE = ("intra_package", "intra_node")[: 1 + (WORLD == 8)]
#: The model and its blocks.
MODULES = 1 + BLOCKS
AT_RANDOM = {"codec": "int8", "rounding": "stochastic", "block_size": 64}


def check_signs_of_the_last_backward() -> None:
    for flags in ("sync", "all_reduce", "count"):
        what = Case(accumulation=3, flags=flags)
        found, wanted = train(what, LOSSLESS), plain(what)
        assert relative(found.losses, wanted.losses) < 1e-6, (flags, found.losses, wanted.losses)
        assert relative(found.norms, wanted.norms) < 1e-6, (flags, found.norms, wanted.norms)
        assert found.state is not None
        found.state.settle()
        hops = {(entry.role, entry.tier): entry.hops for entry in found.state.wire_log.entries()}
        crossings = 2 * MODULES  # in 2 steps
        assert hops["gradients", "inter_node"] == crossings, (flags, hops)
        assert {hops["gradients", tier] for tier in INSIDE} == {crossings * 3}
        assert {hops["weights", tier] for tier in ("inter_node", *INSIDE[1:])} == {crossings}, hops
        found.state.close()


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """What hzero logs on this rank."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hzero").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("hzero").removeHandler(handler)


def check_the_number_of_backwards_is_observed() -> None:
    """Without flags, each backward of the first step crosses. Later, only the last one of a step does."""
    what = Case(accumulation=3, flags="none")
    found, wanted = train(what, LOSSLESS), plain(what)
    assert relative(found.losses, wanted.losses) < 1e-6 and relative(found.norms, wanted.norms) < 1e-6
    assert found.state is not None
    found.state.settle()
    hops = {(entry.role, entry.tier): entry.hops for entry in found.state.wire_log.entries()}
    assert (hops["gradients", "inter_node"], hops["gradients", "intra_package"]) == (MODULES * (3 + 1), MODULES * 2 * 3)
    found.state.close()


def check_bytes_are_those_of_the_plan() -> None:
    for preset, accumulation in (("lossless", 1), ("topo", 4)):
        what = case("kept", accumulation=accumulation)
        with applied(what, {"preset": preset}) as (model, state, optimizer, mesh):
            for step in range(2):
                if step == 1:
                    state.settle()
                    state.wire_log.reset()
                for micro in range(accumulation):
                    backward(what, model, mesh, step, micro)
                optimizer.step()
                optimizer.zero_grad()
            state.settle()
            logged = Counter({(one.role, one.tier): one.wire_bytes for one in state.wire_log.entries()})
            numels = [weight.numel for weight in state.weights.parameters.values()]
            planned = step_traffic(state.plan, state.plan.grid, numels, itemsize=4, accumulation=accumulation)
            for row in planned:
                if row.role == "gradients" or row.tier in ("inter_node", "intra_node"):
                    assert logged[row.role, row.tier] == row.wire_bytes, (preset, accumulation, row, logged)


def check_zero_grad_drops_what_has_been_accumulated() -> None:
    what = Case(accumulation=2, flags="count")
    for to_none in (True, False):
        with applied(what, LOSSLESS) as (model, state, optimizer, mesh):
            backward(what, model, mesh, 7, 0)
            optimizer.zero_grad(set_to_none=to_none)
            assert state.gradients.waiting
            for micro in range(2):
                backward(what, model, mesh, 0, micro)
            found = [param.grad.full_tensor() for param in model.parameters()]
        with applied(what, LOSSLESS) as (model, _, _, mesh):
            for micro in range(2):
                backward(what, model, mesh, 0, micro)
            for got, param in zip(found, model.parameters(), strict=True):
                assert torch.equal(got, param.grad.full_tensor()), to_none


def check_zeroed_gradients_lose_their_sums_and_others_keep_theirs() -> None:
    """In each way to drop the gradient of one weight between two backwards, as FSDP2 alone does."""
    what = Case(accumulation=2, flags="none")
    for way in ("zero", "none", "replace"):
        found: list[list[torch.Tensor]] = []
        for block in (LOSSLESS, None):
            with contextlib.ExitStack() as stack:
                if block is None:
                    mesh = mesh_of(WORLD)
                    model = build(what.options, mesh)
                else:
                    model, _, _, mesh = stack.enter_context(applied(what, block))
                backward(what, model, mesh, 0, 0)
                weight = model.blocks[1].up.weight
                if way == "zero":
                    weight.grad.zero_()
                else:
                    weight.grad = None if way == "none" else torch.ones_like(weight.detach())
                backward(what, model, mesh, 0, 1)
                found.append([param.grad.full_tensor() for param in model.parameters()])
        for got, wanted in zip(*found, strict=True):
            assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-7), way


def check_one_rank_alone_cannot_read_a_sum() -> None:
    """All ranks say so, instead of waiting for each other."""
    what = Case(accumulation=2, flags="count")
    for others in ("step", "forward"):
        with applied(what, LOSSLESS) as (model, _, optimizer, mesh):
            backward(what, model, mesh, 0, 0)
            with pytest.raises(
                RuntimeError, match=r"this rank is at .*, other ranks are at .*; all ranks must use gradients"
            ):
                if dist.get_rank() == 1:
                    model.embed.weight.grad.to_local()
                elif others == "step":
                    optimizer.step()
                else:
                    backward(what, model, mesh, 0, 1)
            optimizer.zero_grad()


def check_an_error_in_backward_loses_its_window_alone() -> None:
    """As with FSDP2 alone, which keeps what the modules before the error had not reduced yet."""
    if not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("FSDP2 of this torch cannot begin anew after an error")
    what, losses = Case(), []
    for on in (False, True):
        mesh = mesh_of(WORLD)
        model = build(what.options, mesh)
        state = hzero.fsdp.apply(model, topology=what.topology, **LOSSLESS) if on else None
        optimizer = optimizer_of("adamw", model)
        handle = model.blocks[0].register_full_backward_pre_hook(_fail)
        with pytest.raises(ArithmeticError, match="on purpose"):
            backward(what, model, mesh, 5, 0)
        handle.remove()
        model.reset_iter_state()
        optimizer.zero_grad()
        losses.append([])
        for step in range(2):
            losses[-1].append(float(backward(what, model, mesh, step, 0)))
            optimizer.step()
            optimizer.zero_grad()
        if state is not None:
            assert not state.gradients.waiting
            state.close()
    assert relative(*losses) < 1e-6, losses


def _fail(*_: Any) -> None:
    raise ArithmeticError("on purpose")


def check_gradients_that_are_not_finite_change_no_weight() -> None:
    what = Case()
    with applied(what, {"preset": "topo", "guard": 2}) as (model, _, optimizer, mesh):
        backward(what, model, mesh, 0, 0)
        optimizer.step()
        optimizer.zero_grad()
        before = [param.full_tensor() for param in model.parameters()]
        for attempt in range(2):
            backward(what, model, mesh, 1, 0)
            for param in model.blocks[1].parameters():
                param.grad.to_local().fill_(math.nan)
            if attempt:
                with pytest.raises(DivergenceError, match=r"not finite in 2 steps in a row.*blocks\.1"):
                    optimizer.step()
            else:
                optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(one, param.full_tensor()) for one, param in zip(before, model.parameters(), strict=True))


def check_error_feedback_keeps_what_codecs_lose() -> None:
    """Its mean error over many steps with one gradient vanishes; a load drops residuals."""
    what = Case()
    errors = {}
    for tiers in ((), ("inter_node",)):
        block = {
            "preset": "topo",
            "codecs": {"gradients": {"intra_package": "none", "inter_node": "int4"}, "weights": "none"},
        }
        with applied(what, {**block, "error_feedback": list(tiers)}) as (model, state, _, mesh):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            total: list[torch.Tensor] = []
            for _ in range(16):
                backward(what, model, mesh, 0, 0)
                found = [param.grad.full_tensor() for param in model.parameters()]
                total = [one + other for one, other in zip(total, found)] if total else found
                optimizer.step()
                optimizer.zero_grad()
            if tiers:
                assert state.memory()["error feedback"] > 0
                with said() as lines:
                    model.load_state_dict(model.state_dict())
                assert state.memory()["error feedback"] == 0
                assert dist.get_rank() or any("start at zero" in line for line in lines), lines
        exact = [param.grad for param in _exact_gradients(what)]
        errors[tiers] = math.sqrt(
            sum(float((one / 16 - other.full_tensor()).square().sum()) for one, other in zip(total, exact, strict=True))
        )
    assert errors["inter_node",] < errors[()] / 4, errors


def _exact_gradients(what: Case) -> list[torch.nn.Parameter]:
    with applied(what, LOSSLESS) as (model, _, _, mesh):
        backward(what, model, mesh, 0, 0)
        return list(model.parameters())


def check_all_ranks_hold_the_same_bits() -> None:
    """Under every codec of secondary partitions and of sums."""
    for codec in (*FIXED, AT_RANDOM):
        assert_same_bits(codec)
    assert_same_bits("int8", refresh_differences=True)


def assert_same_bits(codec: Any, **others: Any) -> None:
    """Of what forward reads after two steps."""
    what = case(*("bf16",) if codec == "int4" else ())
    with applied(what, {"preset": "topo", "codecs": {"weights": codec, "gradients": codec}, **others}) as parts:
        model, state, optimizer, mesh = parts
        for step in range(2):
            backward(what, model, mesh, step, 0)
            optimizer.step()
            optimizer.zero_grad()
        seen: list[torch.Tensor] = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                whole = [param for param in module.parameters() if not hasattr(param, "placements")]
                seen += [param.detach().clone() for param in whole]
                module.reshard()
        assert len(seen) == len(list(model.parameters())) and same_on_all_ranks(seen), codec
        name = codec["codec"] if isinstance(codec, dict) else codec
        assert name in {entry.codec for entry in state.wire_log.entries()}


def check_training_with_codecs_stays_near_the_exact_one() -> None:
    found, wanted = (
        train(Case(accumulation=2), {"preset": "topo", "codecs": {"gradients": "int8"}}, 6),
        plain(Case(accumulation=2), 6),
    )
    assert relative(found.losses, wanted.losses) < 2e-2, (found.losses, wanted.losses)
    assert wanted.losses[-1] < wanted.losses[0]
    assert found.state is not None
    memory = found.state.memory(optimizer_of("sgd", torch.nn.Linear(1, 1)))
    assert memory["secondary partition"] > 0 and memory["gradient accumulation buffers"] > 0
    found.state.close()


def check_the_examples_run() -> None:
    from examples import fsdp, hsdp

    losses = fsdp.train(10)
    assert losses[-1] < losses[0] - 0.3, losses
    exact, _ = hsdp.train(8, "none")
    coarse, log = hsdp.train(8)
    assert relative(coarse, exact) < 1e-3 and exact[-1] < exact[0], (coarse, exact)
    assert {entry.tier for entry in log} == {"inter_node"}
    assert 3.7 < sum(entry.raw_bytes for entry in log) / sum(entry.wire_bytes for entry in log) < 4
