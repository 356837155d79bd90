"""The stage inside DeepSpeed, on real ranks: one launch a world."""

from __future__ import annotations

import pytest

from tests.ranks import collect, launch

EQUALITY = ("tests.zero.equality_checks",)
STAGE = ("tests.zero.stage_checks", "tests.zero.gradient_checks")


@pytest.fixture(scope="module", params=[8, 4, 6], ids=["8 ranks", "4 ranks", "6 ranks"])
def equality(request: pytest.FixtureRequest) -> dict[str, str]:
    """Outcomes of the equality checks on one world."""
    return launch(EQUALITY, request.param)


@pytest.fixture(scope="module")
def stage() -> dict[str, str]:
    """Outcomes of the checks of the stage."""
    return launch(STAGE, 8)


@pytest.mark.parametrize("check", collect(*EQUALITY))
def test_equality(equality: dict[str, str], check: str) -> None:
    assert equality[check] == "passed", equality[check]


@pytest.mark.parametrize("check", collect(*STAGE))
def test_stage(stage: dict[str, str], check: str) -> None:
    assert stage[check] == "passed", stage[check]
