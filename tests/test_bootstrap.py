"""Which rank a process is: environments as launchers make them, alone and inside one another."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hzero.bootstrap import Bootstrap, bootstrap
from hzero.validation import ConfigError
from tests.ranks import environment, mpiexec


def srun(rank: int, tasks: int = 16, **more: str) -> dict[str, str]:
    """A task of ``srun -N 2 -n tasks`` in blocks."""
    return {
        "SLURM_JOB_NODELIST": "frontier[00001-00004]",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "frontier[00001-00002]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % (tasks // 2)),
        **more,
    }


def torchrun(rank: int, **more: str) -> dict[str, str]:
    """A worker of ``torchrun --nnodes=2 --nproc-per-node=8``."""
    ours = {"RANK": str(rank), "WORLD_SIZE": "16", "LOCAL_RANK": str(rank % 8), "LOCAL_WORLD_SIZE": "8"}
    return {**ours, "MASTER_ADDR": "node1", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "run", **more}


def mpich(rank: int, size: int = 16, a_node: int = 8, **more: str) -> dict[str, str]:
    ours = {"PMI_RANK": str(rank), "PMI_SIZE": str(size)}
    return {**ours, "MPI_LOCALRANKID": str(rank % a_node), "MPI_LOCALNRANKS": str(a_node), **more}


def openmpi(rank: int, size: int = 16, a_node: int = 8, **more: str) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    values = (rank, size, rank % a_node, a_node)
    return {
        **{f"OMPI_COMM_WORLD_{name}": str(value) for name, value in zip(names, values)},
        "PMIX_RANK": str(rank),
        **more,
    }


def pals(rank: int, size: int = 16, a_node: int = 8, **more: str) -> dict[str, str]:
    ours = {"PALS_RANKID": str(rank), "PALS_LOCAL_RANKID": str(rank % a_node), "PALS_LOCAL_SIZE": str(a_node)}
    return {**ours, "PMI_RANK": str(rank), "PMI_SIZE": str(size), **more}


@pytest.mark.parametrize("rank", [0, 5, 15])
def test_srun(rank: int) -> None:
    found = bootstrap(srun(rank), visible=1)
    assert found == Bootstrap(rank, 16, 0, 8, "frontier00001", 3442, "slurm")
    assert found.environment()["LOCAL_RANK"] == "0"
    # A wrapper that sets LOCAL_RANK from Slurm's local index, although the rank sees one device.
    assert bootstrap(srun(rank, LOCAL_RANK=str(rank % 8)), visible=1).local_rank == 0
    assert bootstrap(srun(rank), visible=8).local_rank == bootstrap(srun(rank), visible=0).local_rank == rank % 8
    # What a job script exports, and the ranks read again.
    found = bootstrap(srun(rank, MASTER_ADDR="node1", MASTER_PORT="3443", WORLD_SIZE="16"), visible=1)
    assert (found.master_addr, found.master_port) == ("node1", 3443)
    again = bootstrap({**srun(rank), **found.environment()}, visible=1)
    assert (again.rank, again.world_size, again.local_rank, again.local_size) == (rank, 16, 0, 8)
    assert bootstrap(srun(14, SLURM_STEP_NUM_TASKS="15"), visible=1).local_size is None


@pytest.mark.parametrize("rank", [0, 9])
def test_torchrun_also_inside_another_launcher(rank: int) -> None:
    found = bootstrap(torchrun(rank), visible=8)
    assert found == Bootstrap(rank, 16, rank % 8, 8, "node1", 29400, "torchrun")
    nested = {**srun(rank // 8, tasks=2), **torchrun(rank)}
    assert bootstrap(nested, visible=8) == found
    assert bootstrap({**mpich(rank // 8, size=2, a_node=1), **nested, "PMIX_RANK": "1"}, visible=8) == found
    for step in ("4294967290", "4294967291", "batch", ""):  # a shell of salloc, or a batch script: its step is none
        assert bootstrap({**srun(0), "SLURM_STEP_ID": step, **torchrun(rank)}, visible=8) == found


@pytest.mark.parametrize("mpi", [mpich, openmpi, pals])
@pytest.mark.parametrize("rank", [0, 11])
def test_mpi_also_inside_slurm(mpi: Any, rank: int) -> None:
    found = bootstrap(mpi(rank, MASTER_ADDR="node1"), visible=1)
    assert found == Bootstrap(rank, 16, 0, 8, "node1", 3442, "mpi")
    assert bootstrap(mpi(rank, MASTER_ADDR="node1"), visible=8).local_rank == rank % 8
    # mpiexec starts one daemon a node, whose task the ranks inherit.
    assert bootstrap({**srun(rank // 8, tasks=2), **mpi(rank, MASTER_ADDR="node1")}, visible=1) == found
    # srun itself may speak PMI or PMIx with the ranks.
    spoken = bootstrap({**srun(rank), **mpi(rank)}, visible=1)
    assert (spoken.launcher, spoken.master_addr) == ("slurm", "frontier00001")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"},  # sbatch without srun
        {**srun(0), "SLURM_STEP_ID": "4294967291"},
        {"WORLD_SIZE": "1"},
        {"LOCAL_RANK": "0", "RANK": ""},
        mpich(0, size=1, a_node=1),
    ],
)
def test_alone(environ: dict[str, str]) -> None:
    found = bootstrap(environ)
    assert (found.rank, found.world_size, found.local_rank, found.master_addr) == (0, 1, 0, "127.0.0.1")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (srun(3, RANK="4", WORLD_SIZE="16"), "RANK=4 of WORLD_SIZE=16 and SLURM_PROCID=3 of SLURM_STEP_NUM_TASKS=16"),
        (srun(3, RANK="3", WORLD_SIZE="8"), "RANK=3 of WORLD_SIZE=8 and SLURM_PROCID=3 of SLURM_STEP_NUM_TASKS=16"),
        ({**srun(3), **mpich(4)}, "PMI_RANK=4 of PMI_SIZE=16 and SLURM_PROCID=3"),
        ({"RANK": "3"}, "RANK, WORLD_SIZE: found one of them"),
        ({"WORLD_SIZE": "4"}, "RANK, WORLD_SIZE: found one of them"),
        ({"PMIX_RANK": "4"}, "PMIX_RANK, WORLD_SIZE: found one of them; expected both, or RANK and WORLD_SIZE"),
        ({"PMI_SIZE": "4"}, "PMI_RANK, PMI_SIZE: found one of them"),
        ({"RANK": "four", "WORLD_SIZE": "4"}, "RANK: found 'four', expected a number"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK: found 4, but WORLD_SIZE is 4"),
        (torchrun(7), "LOCAL_RANK: found 7, but this rank sees 4 devices; expected 0 to 3"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "LOCAL_RANK: found None, but this rank sees 4 devices"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "MASTER_ADDR: missing; set it to the host of rank 0"),
        (srun(1, MASTER_PORT="70000"), "MASTER_PORT: found 70000, expected 1 to 65535"),
        (srun(1, SLURM_DISTRIBUTION="arbitrary"), "does not tell the host of rank 0"),
        (srun(1, SLURM_STEP_NODELIST="a[1-"), "SLURM_STEP_NODELIST='a[1-' does not tell the host of rank 0"),
    ],
)
def test_contradictions(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        bootstrap(environ, visible=4)
    assert message in str(raised.value) and "\n" not in str(raised.value)


NAMES = sorted({*torchrun(3), *srun(3), *mpich(3), *openmpi(3), *pals(3)} - {"MASTER_ADDR"})
VALUES = st.sampled_from(["", "0", "1", "2", "8", "16", "99", "-1", "x", "a[1-2]", "]", "1(x2)"]) | st.text(max_size=8)


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=12), st.integers(0, 4))
def test_any_environment_gives_a_rank_or_one_line(changes: dict[str, str], visible: int) -> None:
    try:
        found = bootstrap({**srun(3), **changes, "MASTER_ADDR": "a"}, visible)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert 0 <= found.rank < found.world_size and (visible == 0 or found.local_rank < visible)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("frontier[00001-00003,00010],login1", "frontier00001"),
        ("login1,frontier[00001-00003]", "login1"),
        ("r[01-02]n[3,5-6].site,b", "r01n3.site"),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert bootstrap(srun(3, SLURM_STEP_NODELIST=hosts), visible=1).master_addr == first


RANKS = """
import json, os, sys
if "other" in sys.argv:  # mpi4py of another MPI: each rank is a world of its own then
    os.environ.pop("PMI_FD", ""), os.environ.pop("PMI_PORT", "")
from hzero.bootstrap import bootstrap
from hzero.validation import ConfigError
try:
    start = bootstrap(visible=0)
    said = [start.rank, start.world_size, start.launcher, start.master_addr, start.master_port]
except ConfigError as error:
    said = [int(os.environ["PMI_RANK"]), str(error)]
os.write(1, (json.dumps(said) + chr(10)).encode())
"""


def _under_mpi(code: str) -> subprocess.CompletedProcess[str]:
    """Three ranks of mpiexec."""
    command = [mpiexec(), "-n", "3", sys.executable, "-c", code]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)


def test_ranks_of_mpiexec_meet_through_mpi4py() -> None:
    done = _under_mpi(RANKS)
    found = sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert found == [[rank, 3, "mpi", "127.0.0.1", found[0][4]] for rank in range(3)], done.stderr
    done = _under_mpi(RANKS.replace('"other" in sys.argv', "True"))
    found = sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    text = "mpi4py has this process as rank 0 of 1, its launcher as rank {} of 3: they are of different MPI libraries"
    assert found == [[rank, text.format(rank)] for rank in range(3)], done.stderr


def test_a_rank_that_raises_ends_the_job_of_mpiexec() -> None:
    """MPI_Finalize would wait for the others without end."""
    begun = time.monotonic()
    body = "import time\nfrom hzero.bootstrap import bootstrap\nif bootstrap(visible=0).rank: time.sleep(100)\n1 / 0\n"
    done = _under_mpi(body)
    assert done.returncode and "ZeroDivisionError" in done.stderr and time.monotonic() - begun < 30


def test_hzero_run_tells_a_script_its_rank(tmp_path: Path) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys; print(*[os.environ[name] for name in {names}], sys.argv[1])")
    for more, said in (({}, "9 16 0 frontier00001 3442 --x\n"), ({"RANK": "1", "WORLD_SIZE": "16"}, "")):
        done = subprocess.run(
            [sys.executable, "-m", "hzero.run", str(script), "--x"],
            env=environment(**srun(9, LOCAL_RANK="0", **more)), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.stdout, done.returncode) == (said, 0 if said else 2), done.stderr
    assert (
        done.stderr.startswith("hzero: error: RANK=1 of WORLD_SIZE=16 and SLURM_PROCID=9")
        and done.stderr.count("\n") == 1
    )
