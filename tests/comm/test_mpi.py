"""Collectives and stage over MPI: ranks of mpiexec. What all transports do is checked by the same functions as on gloo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.comm.test_tiered import CHECKS
from tests.ranks import LONG, environment, mpiexec, on_ranks

#: All checks on 8, 16 and 6 ranks: some minutes, in which ranks that look for messages take the cores from other tests.
FULL = os.environ.get("HZERO_MPI") == "full"
OWN = ("tests.comm.mpi_checks",)
FULL_CHECKS = {8: (*CHECKS, "tests.deepspeed.mpi_checks", "tests.parity.deepspeed_scopes", *OWN), 16: OWN, 6: OWN}

test_on_ranks = on_ranks(
    FULL_CHECKS if FULL else {4: ("tests.comm.tiered_checks", "tests.deepspeed.mpi_checks", *OWN)},
    HZERO_CHECKS_TRANSPORT="mpi",
)
#: mpiexec waits for ranks that are frozen. On gloo test_watchdog.py runs the same.
test_frozen_ranks = LONG(on_ranks({4: ("tests.comm.watchdog_checks",)}, timeout=120, HZERO_CHECKS_TRANSPORT="mpi"))


KILLED = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from hzero.comm import Communicator, HopError, watchdog
from hzero.tools.launch import launched
watchdog.PERIOD_S, watchdog._ANSWER_S = 0.3, 1.0
launched()
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
settings = {"transport": "mpi", "topology": {"nodes": 2, "packages_per_node": 2, "devices_per_package": 1}}
group = Communicator(settings, timeout=timedelta(seconds=3))
group.all_reduce(torch.ones(5))
time.sleep(1)  # all have said where they are
dist.barrier()
if dist.get_rank() == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    group.all_reduce(torch.ones(5))
except HopError as error:
    os.write(1, f"rank {dist.get_rank()}: {error.ranks}: {error}\\n".encode())
    sys.exit(1)
os._exit(0)
"""


def test_a_killed_rank_ends_the_job_in_the_timeout(tmp_path: Path) -> None:
    """Behind a shell between mpiexec and the rank, so that mpiexec does not notice: the other ranks name it."""
    rank = ["sh", "-c", '"$0" -c "$1"; sleep 60', sys.executable, KILLED]
    with open(tmp_path / "log", "w") as log:
        started = time.monotonic()
        done = subprocess.run(
            [mpiexec(), "-n", "4", *rank], env=environment(), stdout=log, stderr=log, timeout=100, check=False
        )
    said = (tmp_path / "log").read_text()
    assert done.returncode != 0 and time.monotonic() - started < 60, said
    named = r"^rank \d: \(2,\): hzero: .*all_reduce of float32.* failed after 3\.\d s: waited for rank 2 "
    assert re.search(named, said, re.MULTILINE), said
