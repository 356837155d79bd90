"""What of the stage's own state is saved and restored, without ranks."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hzero.collectives import ErrorFeedback
from hzero.parsing import parse_config
from hzero.sharding.plan import ShardPlan
from hzero.topology import Grid
from hzero.zero.saved import SavedState

GRID = Grid(2, 2, 2)
STOCHASTIC = {"gradients": {"node": {"codec": "int4", "rounding": "stochastic"}}}


def _saved(grid: Grid = GRID, **block: Any) -> tuple[SavedState, Any, ErrorFeedback | None]:
    """The state of an engine after some steps, what its seeds are made from, and its residuals."""
    model = torch.nn.Linear(2, 3)
    for number, param in enumerate(model.parameters()):
        param.ds_id = number  # type: ignore[attr-defined]
    config = parse_config(block)
    feedback = ErrorFeedback() if config.error_feedback else None
    if feedback is not None:
        feedback.restore("node", 1, torch.arange(3.0), 4.0)
    seeds = SimpleNamespace(version=3, reductions=5)
    plan = ShardPlan.from_config(config, grid, 0)
    return SavedState(model, plan, seeds, seeds, feedback, config.save_residuals), seeds, feedback  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("block", "seeds", "residuals"),
    [
        ({}, False, False),
        ({"error_feedback": ["node"]}, False, False),
        ({"codecs": STOCHASTIC}, True, False),
        ({"codecs": {"except": {"bias": {"codec": "int8", "rounding": "stochastic"}}}}, True, False),
        ({"accumulators": "bf16", "error_feedback": ["node"]}, True, False),
        ({"error_feedback": ["node"], "save_residuals": True}, True, True),
    ],
)
def test_files_stay_stock_where_there_is_nothing_to_save(block: dict[str, Any], seeds: bool, residuals: bool) -> None:
    state = _saved(**block)[0].of_now()
    assert (state is not None) == seeds
    assert bool(state and state["residuals"]) == residuals
    if state is not None:
        assert state["seeds"] == {"weights": 3, "gradients": 5}


def test_a_run_goes_on_from_what_was_saved_on_the_same_ranks(caplog: pytest.LogCaptureFixture) -> None:
    block = {"error_feedback": ["node"], "save_residuals": True, "codecs": STOCHASTIC}
    state = _saved(**block)[0].of_now()
    cases: tuple[tuple[Any, dict[str, Any], Grid, str], ...] = (
        (state, block, Grid(2, 2, 2), ""),
        (state, block, Grid(4, 1, 2), "was written with another plan or on other ranks"),
        (state, block, Grid(2, 2, 2, order=("gcd", "gpu", "node")), "was written with another plan or on other ranks"),
        (state, {**block, "error_feedback": ["gpu", "node"]}, Grid(2, 2, 2), "was written with another plan"),
        (None, block, Grid(2, 2, 2), "the checkpoint has none"),
        (state, {"codecs": STOCHASTIC}, Grid(2, 2, 2), ""),
        (None, {"codecs": STOCHASTIC}, Grid(2, 2, 2), ""),
    )
    for found, other, grid, says in cases:
        caplog.clear()
        saved, seeds, feedback = _saved(grid, **other)
        seeds.version = seeds.reductions = 0
        if feedback is not None:
            feedback.clear()
        with caplog.at_level(logging.WARNING, "hzero"):
            saved.restore(found)
        same = found is not None and not says and "error_feedback" in other
        assert seeds.version == (3 if same else 0) and seeds.reductions == (5 if same else 0)
        assert (says in caplog.text) if says else not caplog.text
        if same:
            assert feedback is not None
            (residual, scale) = feedback.saved()["node"][1]
            assert residual.tolist() == [0, 1, 2] and scale == 4
        else:
            assert feedback is None or not feedback.saved()


def test_seeds_alone_go_on_as_well() -> None:
    state = _saved(codecs=STOCHASTIC)[0].of_now()
    saved, seeds, _ = _saved(codecs=STOCHASTIC)
    seeds.version = seeds.reductions = 0
    saved.restore(state)
    assert (seeds.version, seeds.reductions) == (3, 5)
