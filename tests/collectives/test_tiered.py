"""Tiered collectives on 8 and on 6 ranks; 6 is not a power of two."""

from __future__ import annotations

from tests.ranks import on_ranks

TIERED = ("tests.collectives.tiered_checks", "tests.collectives.communicator_checks")
CHECKS = (
    *TIERED,
    "tests.collectives.fault_checks",
    "tests.collectives.message_checks",
    "tests.collectives.lost_block_checks",
    "tests.collectives.ddp_checks",
    "tests.collectives.activation_checks",
)

test_on_ranks = on_ranks({8: CHECKS, 6: TIERED})
