"""A training goes on with other ranks, under another preset: 4, then 2, then 6. One launch for each world."""

from __future__ import annotations

import pytest

from tests.clients.test_clients import needs_clients
from tests.ranks import Outcome, collect, conclude, launch, selected

CHECKS = ("tests.clients.resume_checks",)
WORLDS = (4, 2, 6)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    """Outcomes of the selected checks on each world, one after the other."""
    folder = str(tmp_path_factory.mktemp("resume"))
    return [launch(CHECKS, world, selected(request), HZERO_RESUME_FOLDER=folder) for world in WORLDS]


@needs_clients
@pytest.mark.parametrize("check", collect(*CHECKS))
def test_resume(outcomes: list[dict[str, Outcome]], check: str) -> None:
    for outcome in outcomes:
        conclude(outcome[check])
