"""Which rank a process is: environments as launchers make them, alone and inside one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hzero.errors import ConfigError
from hzero.tools.launch import rank_variables
from tests.ranks import run_python


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
    values = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank % a_node, "LOCAL_SIZE": a_node}
    return {**{f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}, **more}


def pals(rank: int, size: int = 16, a_node: int = 8, **more: str) -> dict[str, str]:
    ours = {"PALS_RANKID": str(rank), "PALS_LOCAL_RANKID": str(rank % a_node), "PALS_LOCAL_SIZE": str(a_node)}
    return {**ours, "PMI_RANK": str(rank), "PMI_SIZE": str(size), **more}


def _found(environ: dict[str, str], visible: int = 1) -> tuple[Any, ...]:
    """Rank, world size, local rank, ranks of the host, address and port."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = rank_variables(environ, visible)
    return tuple(int(value) if value.isdigit() else value for value in (found.get(name, "") for name in names))


@pytest.mark.parametrize("rank", [0, 15])
def test_srun(rank: int) -> None:
    assert _found(srun(rank)) == (rank, 16, 0, 8, "frontier00001", 3442)
    # A wrapper that sets LOCAL_RANK from Slurm's local index, although the rank sees one device.
    assert _found(srun(rank, LOCAL_RANK=str(rank % 8)))[2] == 0
    assert _found(srun(rank), visible=8)[2] == _found(srun(rank), visible=0)[2] == rank % 8
    # What a job script exports, and the ranks read again.
    exported = srun(rank, MASTER_ADDR="node1", MASTER_PORT="3443", WORLD_SIZE="16")
    assert _found(exported) == _found({**exported, **rank_variables(exported, 1)}) == (rank, 16, 0, 8, "node1", 3443)
    assert _found(srun(14, SLURM_STEP_NUM_TASKS="15"))[3] == ""


@pytest.mark.parametrize("rank", [0, 9])
def test_torchrun_also_inside_another_launcher(rank: int) -> None:
    expected = (rank, 16, rank % 8, 8, "node1", 29400)
    nested = {**srun(rank // 8, tasks=2), **torchrun(rank)}
    for environ in (torchrun(rank), nested, {**mpich(rank // 8, size=2, a_node=1), **nested}):
        assert _found(environ, visible=8) == expected
    for step in ("4294967290", "4294967291", "batch", ""):  # a shell of salloc, or a batch script: its step is none
        assert _found({**srun(0), "SLURM_STEP_ID": step, **torchrun(rank)}, visible=8) == expected


@pytest.mark.parametrize("mpi", [mpich, openmpi, pals])
def test_mpi_also_inside_slurm(mpi: Any) -> None:
    environ = mpi(11, MASTER_ADDR="node1")
    assert _found(environ) == (11, 16, 0, 8, "node1", 3442) and _found(environ, visible=8)[2] == 3
    # mpiexec starts one daemon a node, whose task the ranks inherit.
    assert _found({**srun(1, tasks=2), **environ}) == _found(environ)
    # srun itself may speak PMI with the ranks.
    assert _found({**srun(11), **mpi(11)}) == (11, 16, 0, 8, "frontier00001", 3442)
    assert _found(mpi(2, size=3, a_node=3))[4] == "127.0.0.1"


def test_alone() -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"}  # without srun
    step = {**srun(0), "SLURM_STEP_ID": "4294967291"}
    for environ in ({}, batch, step, {"WORLD_SIZE": "1"}, {"LOCAL_RANK": "0", "RANK": ""}, mpich(0, size=1, a_node=1)):
        assert rank_variables(environ) == {}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (srun(3, RANK="4", WORLD_SIZE="16"), "RANK=4 of WORLD_SIZE=16 and SLURM_PROCID=3 of SLURM_STEP_NUM_TASKS=16"),
        ({"RANK": "3"}, "RANK, WORLD_SIZE: found one of them; expected both"),
        ({"RANK": "four", "WORLD_SIZE": "4"}, "RANK: found 'four'; expected a number"),
        ({"PMI_RANK": "4", "PMI_SIZE": "4"}, "PMI_RANK: found 4, but PMI_SIZE is 4"),
        (torchrun(7), "LOCAL_RANK: found 7; expected 0 to 3, the visible devices"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "LOCAL_RANK: found None; expected 0 to 3, the visible"),
        (mpich(8), "MASTER_ADDR: missing; set it to the host of rank 0"),
        (srun(1, SLURM_STEP_NODELIST="a[1-"), "MASTER_ADDR: missing; set it to the host of rank 0"),
    ],
)
def test_contradictions(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        rank_variables(environ, visible=4)
    assert message in str(raised.value) and "\n" not in str(raised.value)


NAMES = sorted({*torchrun(3), *srun(3), *mpich(3), *openmpi(3), *pals(3)} - {"MASTER_ADDR"})
VALUES = st.sampled_from(["", "0", "1", "2", "8", "16", "99", "-1", "x", "a[1-2]", "]", "1(x2)"]) | st.text(max_size=8)


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=12), st.integers(0, 4))
def test_any_environment_gives_a_rank_or_one_line(changes: dict[str, str], visible: int) -> None:
    try:
        found = _found({**srun(3), **changes, "MASTER_ADDR": "a"}, visible)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert found[0] == "" or (found[0] < found[1] and (visible == 0 or found[2] < visible))


def test_the_first_host_of_a_list() -> None:
    for hosts, first in (
        ("frontier[00001-00003,00010],login1", "frontier00001"),
        ("login1,frontier[00001-00003]", "login1"),
        ("r[01-02]n[3,5-6].site,b", "r01n3.site"),
    ):
        assert _found(srun(3, SLURM_STEP_NODELIST=hosts))[4] == first


def test_hzero_run_tells_a_script_its_rank(tmp_path: Path) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    script = tmp_path / "script.py"
    script.write_text(f"import os, sys; print(*[os.environ[name] for name in {names}], sys.argv[1])")
    for more, said in (({}, "9 16 0 frontier00001 3442 --x\n"), ({"RANK": "1", "WORLD_SIZE": "16"}, "")):
        step = srun(9, LOCAL_RANK="0", MASTER_PORT="", **more)
        done = run_python("-m", "hzero.run", str(script), "--x", **step)
        assert (done.stdout, done.returncode) == (said, 0 if said else 2), done.stderr
    assert done.stderr.startswith("hzero: error: RANK=1 of WORLD_SIZE=16 and SLURM_PROCID=9")
    assert done.stderr.count("\n") == 1
