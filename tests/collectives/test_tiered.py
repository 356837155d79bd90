"""Tiered collectives on 8 and on 6 ranks; a world that is not a power of two among them."""

from __future__ import annotations

import pytest

from tests.ranks import collect, launch

CHECKS = ("tests.collectives.tiered_checks",)


@pytest.fixture(scope="module", params=[8, 6], ids=["8 ranks", "6 ranks"])
def outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    """One launch for all checks."""
    return launch(CHECKS, request.param)


@pytest.mark.parametrize("check", collect(*CHECKS))
def test_on_ranks(outcomes: dict[str, str], check: str) -> None:
    assert outcomes[check] == "passed", outcomes[check]
