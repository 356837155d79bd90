"""The stage inside DeepSpeed, on real ranks: one launch per world."""

from __future__ import annotations

import os

import pytest

from tests.ranks import Outcome, collect, conclude, launch, selected

EQUALITY = ("tests.zero.equality_checks",)
STAGE = (
    "tests.zero.stage_checks",
    "tests.zero.refusal_checks",
    "tests.zero.gradient_checks",
    "tests.zero.window_checks",
    "tests.zero.difference_checks",
    "tests.zero.exception_checks",
    "tests.zero.exponent_checks",
    "tests.zero.zfp_checks",
    "tests.zero.audit_checks",
    "tests.zero.race_checks",
    "tests.zero.delay_checks",
    "tests.zero.trace_checks",
    "tests.zero.tensor_checks",
    "tests.zero.autotp_checks",
    "tests.zero.pipeline_checks",
    "tests.zero.checkpoint_checks",
)


@pytest.fixture(scope="module", params=[8, 6], ids=["8 ranks", "6 ranks"])
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Outcomes of the selected checks on one world."""
    timeout = 900 + 2 * int(os.environ.get("HZERO_SCHEDULES", "0"))  # see delay_checks
    return launch((*EQUALITY, *STAGE), request.param, selected(request), timeout=timeout)


@pytest.mark.parametrize("check", collect("tests.zero.single_checks"))
def test_one_rank(check: str) -> None:
    conclude(launch(("tests.zero.single_checks",), 1, [check])[check])


@pytest.mark.parametrize("check", collect(*EQUALITY))
def test_equality(outcomes: dict[str, Outcome], check: str) -> None:
    conclude(outcomes[check])


@pytest.mark.parametrize("check", collect(*STAGE))
@pytest.mark.parametrize("outcomes", [8], ids=["8 ranks"], indirect=True, scope="module")
def test_stage(outcomes: dict[str, Outcome], check: str) -> None:
    conclude(outcomes[check])
