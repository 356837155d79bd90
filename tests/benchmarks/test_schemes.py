"""Schemes of the comparison on real ranks: one launch."""

from __future__ import annotations

import pytest

from tests.ranks import Outcome, collect, conclude, launch, selected

CHECKS = ("tests.benchmarks.scheme_checks",)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """One launch for all checks."""
    pytest.importorskip("transformers", reason="the train extra is not installed")
    return launch(CHECKS, 4, selected(request))


@pytest.mark.parametrize("check", collect(*CHECKS))
def test_on_ranks(outcomes: dict[str, Outcome], check: str) -> None:
    conclude(outcomes[check])
