"""Tiered collectives on 8 and on 6 ranks; 6 is not a power of two."""

from __future__ import annotations

from tests.ranks import on_ranks

TIERED = ("tests.comm.tiered_checks", "tests.comm.communicator_checks")
CHECKS = (*TIERED, "tests.comm.fault_checks", "tests.comm.ddp_checks", "tests.comm.activation_checks")

test_on_ranks = on_ranks({8: CHECKS, 6: TIERED})
