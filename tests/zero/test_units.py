"""Units of gathering on 4 ranks: one launch."""

from __future__ import annotations

import pytest

from tests.ranks import Outcome, collect, conclude, launch, selected

CHECKS = ("tests.zero.unit_checks",)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Outcomes of the selected checks."""
    return launch(CHECKS, 4, selected(request))


@pytest.mark.parametrize("check", collect(*CHECKS))
def test_units(outcomes: dict[str, Outcome], check: str) -> None:
    conclude(outcomes[check])
