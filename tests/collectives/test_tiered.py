"""Tiered collectives on 8 and on 6 ranks; 6 is not a power of two."""

from __future__ import annotations

import pytest

from tests.ranks import Outcome, collect, conclude, launch, selected

CHECKS = (
    "tests.collectives.tiered_checks",
    "tests.collectives.communicator_checks",
    "tests.collectives.fault_checks",
    "tests.collectives.message_checks",
    "tests.collectives.lost_block_checks",
    "tests.collectives.ddp_checks",
    "tests.collectives.activation_checks",
)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Outcomes of the selected checks on one world."""
    return launch(CHECKS, request.param, selected(request))


@pytest.mark.parametrize("check", collect(*CHECKS))
@pytest.mark.parametrize("outcomes", [8], ids=["8 ranks"], indirect=True, scope="module")
def test_on_ranks(outcomes: dict[str, Outcome], check: str) -> None:
    conclude(outcomes[check])


@pytest.mark.parametrize("check", collect(*CHECKS[:2]))
@pytest.mark.parametrize("outcomes", [6], ids=["6 ranks"], indirect=True, scope="module")
def test_on_6_ranks(outcomes: dict[str, Outcome], check: str) -> None:
    conclude(outcomes[check])
