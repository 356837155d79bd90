"""The stage beside stock ZeRO-3 on four ranks, for the installed DeepSpeed; scripts/test-versions runs it for others."""

from __future__ import annotations

import pytest

from tests.ranks import Outcome, collect, conclude, launch, selected

CHECKS = ("tests.zero.parity_checks",)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Outcomes of the selected checks."""
    return launch(CHECKS, 4, selected(request))


@pytest.mark.parametrize("check", collect(*CHECKS))
def test_parity(outcomes: dict[str, Outcome], check: str) -> None:
    conclude(outcomes[check])
