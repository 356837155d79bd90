"""Rules of the training loop that no run on processors reaches: they train no float16."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from hzero import DivergenceError
from hzero.train.loop import Loop
from tests.zero.test_guard import dynamic


@pytest.fixture(autouse=True)
def _rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 1)  # the scaler logs on rank 0


class _Loop(Loop):
    """A loop of one rank and a guard of three steps, of which nothing but the guard is built."""

    def __init__(self, scaler: DynamicLossScaler) -> None:
        self._settings: Any = {"train": {"guard": 3}}
        self._engine: Any = mock.Mock(**{"optimizer.loss_scaler": scaler})
        self._saver: Any = mock.Mock()
        self._rank = self._not_finite = 0

    def step(self, loss: float, *, skipped: bool) -> None:
        self._guard({"step": 7, "loss": loss, "skipped": skipped}, mock.Mock())
        if skipped:
            self._engine.optimizer.loss_scaler.update_scale(True)


def test_steps_that_lower_the_loss_scale_are_no_divergence_and_prove_nothing() -> None:
    loop = _Loop(dynamic(raise_error_at_min_scale=False))
    for _ in range(3):  # 8, 4, 2
        loop.step(2.0, skipped=True)
    loop._saver.judge.assert_not_called()
    loop.step(2.0, skipped=False)
    loop._saver.judge.assert_called_once_with(True)


def test_discarded_steps_at_the_least_loss_scale_end_the_run() -> None:
    loop = _Loop(dynamic(raise_error_at_min_scale=False))
    for _ in range(5):  # three that lower it, two at the minimum
        loop.step(2.0, skipped=True)
    with pytest.raises(DivergenceError, match=r"discarded the step; 3 steps in a row were not finite"):
        loop.step(2.0, skipped=True)
    loop._saver.judge.assert_called_once_with(False)


def test_an_infinite_loss_counts_though_its_step_was_done() -> None:
    loop = _Loop(dynamic(raise_error_at_min_scale=False))
    loop.step(float("inf"), skipped=False)
    loop.step(2.0, skipped=False)
    for _ in range(2):
        loop.step(float("nan"), skipped=False)
    with pytest.raises(DivergenceError, match=r"the loss is nan and the optimizer did the step; 3 steps"):
        loop.step(float("nan"), skipped=False)
