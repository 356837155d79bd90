"""Bootstrap: environments as launchers make them, alone and inside one another."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hzero.topology.bootstrap import Bootstrap, bootstrap, first_host
from hzero.validation import ConfigError
from tests.topology.test_exchange import under_mpi

HOSTS = "frontier[00001-00002]"


def srun(rank: int, tasks: int = 16, **more: str) -> dict[str, str]:
    """A task of ``srun -N 2 -n tasks`` in blocks."""
    nodes, a_node = 2, tasks // 2
    return {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "frontier[00001-00004]",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": HOSTS,
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_NTASKS": str(tasks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % a_node),
        **more,
    }


def torchrun(rank: int, **more: str) -> dict[str, str]:
    """A worker of ``torchrun --nnodes=2 --nproc-per-node=8``."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "16",
        "LOCAL_RANK": str(rank % 8),
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29400",
        "TORCHELASTIC_RUN_ID": "run",
        **more,
    }


def mpich(rank: int, size: int = 16, a_node: int = 8, **more: str) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(rank % a_node),
        "MPI_LOCALNRANKS": str(a_node),
        **more,
    }


def openmpi(rank: int, size: int = 16, a_node: int = 8, **more: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % a_node),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(a_node),
        "PMIX_RANK": str(rank),
        **more,
    }


@pytest.mark.parametrize("rank", [0, 5, 15])
def test_srun_with_one_device_a_task(rank: int) -> None:
    found = bootstrap(srun(rank, SLURM_GPUS_PER_TASK="1"), visible=1)
    assert found == Bootstrap(rank, 16, 0, rank % 8, 8, "frontier00001", 3442, "slurm", "slurm")
    assert found.environment() == {
        "RANK": str(rank),
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "frontier00001",
        "MASTER_PORT": "3442",
    }
    # A wrapper that sets LOCAL_RANK from Slurm's local index, although the rank sees one device.
    assert bootstrap(srun(rank, LOCAL_RANK=str(rank % 8)), visible=1).local_rank == 0


@pytest.mark.parametrize("rank", [0, 5, 15])
def test_srun_with_all_devices_visible(rank: int) -> None:
    assert bootstrap(srun(rank), visible=8).local_rank == rank % 8
    assert bootstrap(srun(rank, LOCAL_RANK="3"), visible=8).local_rank == 3
    assert bootstrap(srun(rank), visible=0).local_rank == rank % 8


def test_srun_as_the_job_script_starts_it() -> None:
    found = bootstrap(srun(9, MASTER_ADDR="frontier00001", MASTER_PORT="3443", WORLD_SIZE="16"), visible=1)
    assert (found.rank, found.master_port, found.launcher, found.address_from) == (9, 3443, "slurm", "MASTER_ADDR")
    # What the ranks of hzero train set for torch and then read again.
    again = bootstrap({**srun(9), **found.environment()}, visible=1)
    assert (again.rank, again.world_size, again.local_rank, again.local_index) == (9, 16, 0, 1)


def test_uneven_tasks_of_a_step() -> None:
    tasks = {"SLURM_STEP_NUM_TASKS": "15", "SLURM_NTASKS": "15"}
    assert bootstrap({**srun(14), **tasks}, visible=1).local_size is None
    assert bootstrap(srun(3), visible=1).local_size == 8


@pytest.mark.parametrize("rank", [0, 9])
def test_torchrun_on_two_nodes(rank: int) -> None:
    found = bootstrap(torchrun(rank), visible=8)
    assert found == Bootstrap(rank, 16, rank % 8, rank % 8, 8, "node1", 29400, "torchrun")
    # salloc, then a torchrun on each node: two tasks, whose ranks are other ones.
    nested = {**srun(rank // 8, tasks=2), **torchrun(rank)}
    assert bootstrap(nested, visible=8) == found
    assert bootstrap({**mpich(rank // 8, size=2, a_node=1), **nested}, visible=8) == found
    assert bootstrap({"PMIX_RANK": str(rank // 8), **nested}, visible=8) == found
    # From a shell of salloc or a batch script, whose step is none.
    for step in ("4294967290", "4294967291", "batch", ""):
        assert bootstrap({**srun(0), "SLURM_STEP_ID": step, **torchrun(rank)}, visible=8) == found


@pytest.mark.parametrize("mpi", [mpich, openmpi])
@pytest.mark.parametrize("rank", [0, 11])
def test_mpi(mpi: Any, rank: int) -> None:
    found = bootstrap(mpi(rank, MASTER_ADDR="node1"), visible=1)
    assert found == Bootstrap(rank, 16, 0, rank % 8, 8, "node1", 3442, "mpi")
    assert bootstrap(mpi(rank, MASTER_ADDR="node1"), visible=8).local_rank == rank % 8
    # mpiexec under Slurm starts one daemon a node, whose task the ranks inherit.
    inherited = bootstrap({**srun(rank // 8, tasks=2), **mpi(rank, MASTER_ADDR="node1")}, visible=1)
    assert inherited == found
    # srun itself may speak PMI or PMIx with the ranks: both are the same ranks then.
    spoken = bootstrap({**srun(rank), **mpi(rank)}, visible=1)
    assert (spoken.launcher, spoken.master_addr, spoken.address_from) == ("slurm", "frontier00001", "slurm")


def test_other_kinds_of_mpi() -> None:
    mvapich = {"MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1"}
    assert bootstrap({**mvapich, "MASTER_ADDR": "a"}, visible=4).local_rank == 1
    cray = {"PMI_RANK": "3", "PMI_SIZE": "4", "PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"}
    found = bootstrap({**cray, "MASTER_ADDR": "a"}, visible=1)
    assert (found.rank, found.world_size, found.local_index, found.local_size) == (3, 4, 1, 2)
    pmix = bootstrap(srun(12, PMIX_RANK="12"), visible=1)
    assert (pmix.rank, pmix.world_size, pmix.local_index, pmix.launcher) == (12, 16, 4, "slurm")


def test_other_launchers_with_torchs_variables() -> None:
    """A launcher of processes on each node, such as DeepSpeed's, under srun with PMIx."""
    env = {"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    found = bootstrap({**srun(1, tasks=2), "PMIX_RANK": "1", **env}, visible=8)
    assert found == Bootstrap(11, 16, 3, None, None, "a", 29500, "environment")
    # A wrapper that gives srun's ranks torch's variables: the index on the host is still Slurm's.
    wrapped = bootstrap({**srun(11), **env, "LOCAL_RANK": "0"}, visible=1)
    assert (wrapped.local_rank, wrapped.local_index, wrapped.local_size) == (0, 3, 8)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"},  # sbatch without srun
        {**srun(0), "SLURM_STEP_ID": "4294967291"},
        {"WORLD_SIZE": "1"},
        {"LOCAL_RANK": "0", "RANK": ""},
    ],
)
def test_alone(environ: dict[str, str]) -> None:
    found = bootstrap(environ)
    assert (found.rank, found.world_size, found.local_rank, found.local_index) == (0, 1, 0, None)
    assert (found.master_addr, found.launcher) == ("127.0.0.1", "alone")
    assert 0 < found.master_port < 65536


def test_worlds_of_one_rank() -> None:
    assert bootstrap({"RANK": "0", "WORLD_SIZE": "1"}).launcher == "environment"
    assert bootstrap(mpich(0, size=1, a_node=1)).master_addr == "127.0.0.1"
    one = {"SLURM_STEP_NUM_NODES": "1"}
    assert bootstrap({**srun(0, tasks=2, SLURM_STEP_NUM_TASKS="1"), **one}).launcher == "slurm"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**srun(3), "RANK": "4", "WORLD_SIZE": "16"}, "RANK=4 and SLURM_PROCID=3 contradict each other"),
        ({**srun(3), "RANK": "3", "WORLD_SIZE": "8"}, "WORLD_SIZE=8 and SLURM_STEP_NUM_TASKS=16 contradict each other"),
        ({**srun(3), "RANK": "3", "WORLD_SIZE": "32"}, "WORLD_SIZE=32 and SLURM_STEP_NUM_TASKS=16"),
        ({**srun(3), **mpich(4)}, "PMI_RANK=4 and SLURM_PROCID=3"),
        ({**mpich(4), **openmpi(5)}, "OMPI_COMM_WORLD_RANK=5 and PMI_RANK=4"),
        ({**openmpi(5), "PMIX_RANK": "6"}, "OMPI_COMM_WORLD_RANK=5 and PMIX_RANK=6"),
        ({"RANK": "3"}, "RANK=3 is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set, but RANK is not"),
        ({"PMI_SIZE": "4"}, "PMI_SIZE=4 is set, but PMI_RANK is not"),
        ({"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4 is set, but OMPI_COMM_WORLD_SIZE is not"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, "SLURM_PROCID=0 is set, but SLURM_STEP_NUM_TASKS is not"),
        ({"RANK": "four", "WORLD_SIZE": "4"}, "RANK: found 'four' in the environment, expected a number"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK: found '-1'"),
        ({"RANK": "1", "WORLD_SIZE": "9" * 40}, "WORLD_SIZE: found '99999"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK: found 4, but WORLD_SIZE is 4"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE: found 0, expected at least 1"),
        (srun(16), "SLURM_PROCID: found 16, but SLURM_STEP_NUM_TASKS is 16"),
        (mpich(3, MPI_LOCALRANKID="8"), "MPI_LOCALRANKID: found 8, but MPI_LOCALNRANKS is 8"),
        (torchrun(3, LOCAL_RANK="8"), "LOCAL_RANK: found 8, but LOCAL_WORLD_SIZE is 8"),
        (torchrun(7), "LOCAL_RANK: found 7, but this rank sees 4 devices (0 to 3)"),
        (srun(7), "local index of the launcher: found 7, but this rank sees 4 devices"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
            "LOCAL_RANK: not set, and nothing else tells which of the 4",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "MASTER_ADDR: not set, and nothing else tells"),
        (srun(1, MASTER_PORT="70000"), "MASTER_PORT: found 70000, expected 1 to 65535"),
        (srun(1, SLURM_DISTRIBUTION="arbitrary"), "MASTER_ADDR: not set; under SLURM_DISTRIBUTION=arbitrary"),
        (srun(1, SLURM_STEP_NODELIST="a[1-"), "SLURM_STEP_NODELIST: found 'a[1-', expected hosts"),
    ],
)
def test_contradictions_and_noise(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        bootstrap(environ, visible=4)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


NAMES = [*torchrun(3), *srun(3), *mpich(3), *openmpi(3), "PALS_RANKID", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"]
VALUES = st.sampled_from(["", "0", "1", "2", "8", "16", "99", "-1", "x", "a[1-2]", "]", "1(x2)"]) | st.text(max_size=8)


@given(st.dictionaries(st.sampled_from(sorted({*NAMES})), VALUES, max_size=12), st.integers(0, 4))
def test_any_environment_gives_a_rank_or_one_line(changes: dict[str, str], visible: int) -> None:
    # An address keeps MPI out of it, which is not there.
    environ = {**srun(3), **changes, "MASTER_ADDR": "a"}
    if not environ.get("SLURM_PROCID"):  # PMIX_RANK alone leaves the size to MPI
        environ.pop("PMIX_RANK", None), environ.pop("PALS_RANKID", None)
    try:
        found = bootstrap(environ, visible)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert 0 <= found.rank < found.world_size
        assert visible == 0 or found.local_rank < visible


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("frontier[00001-00003,00010],login1", "frontier00001"),
        ("n[8-10]", "n8"),
        ("login1,frontier[00001-00003]", "login1"),
        ("r[01-02]n[3,5-6].site,b", "r01n3.site"),
        ("a", "a"),
    ],
)
def test_the_first_host_of_a_list(text: str, host: str) -> None:
    assert first_host(text, "X") == host


@pytest.mark.parametrize("text", ["", ",b", "a[1-2", "a1-2]", "a[1-[2]]", "a[]", "a[x]", "a b", "a[-1]"])
def test_malformed_lists(text: str) -> None:
    with pytest.raises(ConfigError, match="expected hosts such as node") as raised:
        first_host(text, "SLURM_JOB_NODELIST")
    assert str(raised.value).startswith(f"SLURM_JOB_NODELIST: found {text!r}")


@given(st.text("a1[],-. ", max_size=20) | st.text(max_size=20))
def test_noise_is_a_host_or_one_line(text: str) -> None:
    try:
        assert first_host(text, "X")
    except ConfigError as error:
        assert str(error).startswith("X: found ")


RANKS = """
import json, os
from hzero.validation import ConfigError
from hzero.topology.bootstrap import bootstrap
try:
    said = [bootstrap(visible=1)]
except ConfigError as error:
    said = [int(os.environ["PMI_RANK"]), str(error)]
os.write(1, (json.dumps(said) + chr(10)).encode())
"""


def test_mpi_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    for environ in (mpich(1), {"PMIX_RANK": "1"}):
        with pytest.raises(ConfigError, match=r'pip install "hzero\[mpi\]", or set MASTER_ADDR') as raised:
            bootstrap(environ, visible=1)
        assert "\n" not in str(raised.value)


def test_ranks_of_another_mpi_than_mpi4py_s() -> None:
    """Each rank is a world of its own then."""
    before = "import os\nnames = ('PMI_FD', 'PMI_PORT')\nkept = [os.environ.pop(name, '') for name in names]\n"
    done = under_mpi(before + RANKS, 3)
    found = sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert len(found) == 3, done.stderr
    for rank, text in found:
        assert text == (
            f"mpi4py has this process as rank 0 of 1, but PMI_RANK={rank}, PMI_SIZE=3: "
            "mpi4py is of another MPI than the launcher"
        )
