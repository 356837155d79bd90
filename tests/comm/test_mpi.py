"""Collectives and stage over MPI: ranks of mpiexec. What all transports do is checked by the same functions as on gloo."""

from __future__ import annotations

from tests.ranks import LONG, on_ranks

CHECKS = ("tests.comm.tiered_checks", "tests.deepspeed.mpi_checks", "tests.comm.mpi_checks")

test_on_ranks = on_ranks({4: CHECKS}, HZERO_CHECKS_TRANSPORT="mpi")
#: mpiexec waits for ranks that are frozen. On gloo test_watchdog.py runs the same.
test_frozen_ranks = LONG(on_ranks({4: ("tests.comm.watchdog_checks",)}, timeout=120, HZERO_CHECKS_TRANSPORT="mpi"))
