"""Dask's messages over MPI: connections, a cluster of four ranks, and what happens when one of them dies."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import LONG, ROOT, environment, mpiexec

pytest.importorskip("dask_mpi", reason="dask-mpi is not installed (extra data)")

RANKS = (ROOT / "tests/data/mpi_ranks.py").read_text()
CHECKS = [
    *re.findall(r"^async def (check_\w+)", RANKS, re.MULTILINE),
    "aborted",
    "transposed",
    "merged",
    "ports",
    "ended",
]

DIES = """
import os, signal, time
from hzero.tools.data.cluster import cluster
with cluster() as client:
    one = next(iter(client.scheduler_info()["workers"]))
    print("dies", client.scheduler_info()["workers"][one]["name"], flush=True)
    client.submit(lambda: os.kill(os.getpid(), signal.SIGKILL), workers=[one]).result(timeout=60)
"""


def _mpiexec(log: Path, *command: str, **env: str) -> tuple[int, str]:
    """Runs four ranks. Returns the status, -1 if they do not end, and what they print."""
    with open(log, "w") as out, contextlib.suppress(subprocess.TimeoutExpired):
        ranks = [mpiexec(), "-n", "4", *command]
        done = subprocess.run(ranks, cwd=ROOT, env=environment(**env), stdout=out, stderr=out, timeout=120, check=False)
        return done.returncode, log.read_text()
    return -1, log.read_text()


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str]:
    # Not as __main__, whose classes Dask sends whole.
    code = "from tests.data.mpi_ranks import main; main()"
    return _mpiexec(tmp_path_factory.mktemp("mpi") / "log", sys.executable, "-c", code)


@pytest.mark.parametrize("check", CHECKS)
def test_on_four_ranks(said: tuple[int, str], check: str) -> None:
    assert re.search(rf"^ok {check}\b", said[1], re.MULTILINE), said[1][-3000:]


def test_the_ranks_end_in_order(said: tuple[int, str]) -> None:
    assert said[0] == 0 and "waited" not in said[1] and "Traceback" not in said[1], said[1][-3000:]


@LONG
def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    """Behind a shell, so that mpiexec does not see it: the scheduler notices it and ends the job."""
    command = ["sh", "-c", '"$0" "$@"; sleep 60', sys.executable, "-c", DIES]
    status, said = _mpiexec(tmp_path / "log", *command)
    dies = re.search(r"^dies (rank [23] on .+)", said, re.MULTILINE)
    assert status > 0 and dies, said
    assert f"hzero: {dies[1]} is gone; the job ends" in said, said
