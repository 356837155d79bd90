"""Peers of the comparison on real ranks: one launch."""

from __future__ import annotations

import pytest

from tests.ranks import collect, launch

CHECKS = ("tests.benchmarks.peer_checks",)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """One launch for all checks."""
    pytest.importorskip("transformers", reason="the train extra is not installed")
    return launch(CHECKS, 4)


@pytest.mark.parametrize("check", collect(*CHECKS))
def test_on_ranks(outcomes: dict[str, str], check: str) -> None:
    assert outcomes[check] == "passed", outcomes[check]
