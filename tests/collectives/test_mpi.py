"""Collectives and stage over MPI: ranks of mpiexec. What all transports do is checked by the same functions as on gloo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.collectives.test_tiered import CHECKS
from tests.ranks import Outcome, collect, conclude, environment, launch, mpiexec, selected

#: All checks on 8, 16 and 6 ranks: some minutes, in which ranks that look for messages take the cores from other tests.
FULL = os.environ.get("HZERO_MPI") == "full"
COMMON = CHECKS if FULL else ("tests.collectives.tiered_checks",)
STAGE = ("tests.zero.mpi_checks", *(["tests.zero.equality_checks"] if FULL else []))
WORLDS = [8, 16, 6] if FULL else [8]
OWN = ("tests.collectives.mpi_checks",)
#: Frozen ranks, which mpiexec waits for.
FROZEN = ("tests.collectives.watchdog_checks",)


@pytest.fixture(scope="module", params=WORLDS, ids=lambda ranks: f"{ranks} ranks")
def outcomes(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    """Outcomes of the selected checks on one world."""
    mpiexec()
    modules = (*COMMON, *STAGE, *OWN) if request.param == 8 else OWN
    return launch(modules, request.param, selected(request), HZERO_CHECKS_TRANSPORT="mpi")


@pytest.fixture(scope="module")
def frozen(request: pytest.FixtureRequest) -> dict[str, Outcome]:
    mpiexec()
    return launch(FROZEN, 4, selected(request), timeout=120, HZERO_CHECKS_TRANSPORT="mpi")


@pytest.mark.parametrize("check", collect(*COMMON, *STAGE))
@pytest.mark.parametrize("outcomes", [8], ids=["8 ranks"], indirect=True, scope="module")
def test_on_ranks(outcomes: dict[str, Outcome], check: str) -> None:
    conclude(outcomes[check])


@pytest.mark.parametrize("check", collect(*OWN))
def test_of_mpi(outcomes: dict[str, Outcome], check: str) -> None:
    conclude(outcomes[check])


@pytest.mark.parametrize("check", collect(*FROZEN))
def test_frozen_ranks(frozen: dict[str, Outcome], check: str) -> None:
    conclude(frozen[check])


KILLED = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from hzero.collectives import Communicator, HopError, watchdog
from hzero.bootstrap import launched
watchdog.PERIOD_S, watchdog._ANSWER_S = 0.3, 1.0
launched()
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
settings = {"transport": "mpi", "topology": {"nodes": 2, "gpus_per_node": 2, "gcds_per_gpu": 1}}
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


UNEQUAL = """
import os
from datetime import timedelta
import torch, torch.distributed as dist
from hzero.collectives import Communicator, HopError
from hzero.bootstrap import launched
from hzero.validation import ConfigError
launched()
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
settings = {"transport": "mpi", "topology": {"nodes": 2, "gpus_per_node": 1, "gcds_per_gpu": 1}}
group = Communicator(settings, timeout=timedelta(seconds=20))
if dist.get_rank() == 0:
    group.send(torch.ones(1000), 1)
else:
    try:
        group.recv(torch.empty(int(os.environ["EXPECTED"])), 0)
    except HopError as error:
        print(f"first: {error}", flush=True)
    try:
        Communicator(settings, timeout=timedelta(seconds=20))
    except ConfigError as error:
        print(f"then: {error}", flush=True)
dist.barrier()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        (5000, "a message of 4,000 bytes has come, expected 20,000: ranks disagree"),
        (100, "a message has come that is longer than the 400 bytes that were expected: ranks disagree"),
    ],
)
def test_sizes_that_differ_are_named_and_nothing_is_sent_after_a_failure(expected: int, said: str) -> None:
    """A communicator that one rank has given up may hold what another has sent, which would come in the next message's place."""
    command = [mpiexec(), "-n", "2", sys.executable, "-c", UNEQUAL]
    env = {**environment(), "EXPECTED": str(expected)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert re.search(rf"^first: hzero: recv of float32 .* failed: {said}$", done.stdout, re.MULTILINE), done
    assert re.search(
        r"^then: transport: found 'mpi', and an earlier wait of this process has failed", done.stdout, re.MULTILINE
    ), done
