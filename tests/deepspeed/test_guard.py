"""The guard's count, which dynamic loss scaling has its say in. Processors train no float16, so no rank runs here."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

from hzero.config import GuardConfig
from hzero.engine.guard import DivergenceError, Guard


def guard_of(limit: int) -> Guard:
    guard = Guard(mock.Mock(), GuardConfig(discarded_steps=limit), torch.device("cpu"))
    guard._where = lambda params, gradient_of: ""  # type: ignore[method-assign,assignment]
    return guard


def discard(guard: Guard, scaler: Any) -> None:
    guard.discarded(scaler, [], mock.Mock())
    scaler.update_scale(True)


def dynamic(**changes: Any) -> DynamicLossScaler:
    return DynamicLossScaler(
        **{"init_scale": 8.0, "scale_window": 100, "min_scale": 1, "delayed_shift": 1, "consecutive_hysteresis": False}
        | changes
    )


def test_steps_that_lower_the_loss_scale_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 1)
    scaler, guard = dynamic(raise_error_at_min_scale=False), guard_of(2)
    for _ in range(3):
        discard(guard, scaler)
    assert scaler.cur_scale == 1
    discard(guard, scaler)
    with pytest.raises(
        DivergenceError, match=r"2 steps in a row \(guard: 2\) and the loss scale is at its minimum of 1; "
    ):
        discard(guard, scaler)


def test_at_the_minimum_the_guard_speaks_before_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's error there names nothing."""
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 1)
    scaler, guard = dynamic(init_scale=1.0), guard_of(10)
    with pytest.raises(DivergenceError, match="in 1 steps in a row"):
        discard(guard, scaler)


def test_only_steps_in_a_row_count(caplog: pytest.LogCaptureFixture) -> None:
    scaler, guard = LossScaler(1), guard_of(3)
    for _ in range(5):
        with caplog.at_level(logging.WARNING, "hzero"):
            guard.discarded(scaler, [], mock.Mock())
            guard.discarded(scaler, [], mock.Mock())
        guard.stepped()
    assert "step 2 is discarded: the norm of the gradients is not finite (guard: 2 of 3 in a row)" in caplog.text
