"""``slurm/setup_env.sh`` with stand-ins for modules, conda, pip, the container and mksquashfs: what it runs and leaves."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.ranks import ROOT

#: A Python that records its calls and otherwise answers like the real one.
PYTHON = """#!/bin/sh
echo "python $*" >> "$CALLS"
case "$*" in
*"$FAIL"*) exit 3 ;;
*"pip list"*) printf 'torch==2.10.0+rocm7.0\\nrich==14\\ndeepspeed==0.19.2\\n' ;;
*mpi4py*) echo "MPICC=$MPICC" >> "$CALLS" ;;
*"-m venv"*) mkdir -p "$WORK/bin" ;;
esac
"""
#: Commands of the machines.
TOOLS = {
    "conda": """echo "conda $*" >> "$CALLS"
while [ "$1" != -p ]; do shift; done
mkdir -p "$2/bin" && cp "$STAND_IN" "$2/bin/python"
printf '#!/bin/sh\\nwhile [ "$1" != -o ]; do shift; done; echo packed > "$2"\\n' > "$2/bin/conda-pack"
chmod +x "$2/bin/conda-pack"
""",
    "singularity": """echo "singularity $1 $6" >> "$CALLS"
export WORK=${3%%:*}
shift 6
case $1 in */bin/python | python) shift ;; esac
exec "$STAND_IN" "$@"
""",
    "mksquashfs": 'cp "$1/pins.txt" "$2"\n',
}


def _pinned(file: Path) -> dict[str, str]:
    """Versions of constraints, without markers."""
    return dict(line.split(" ;")[0].split("==") for line in file.read_text().splitlines() if line[0] != "#")


def _setup(folder: Path, *arguments: str, **more: str) -> tuple[int, str, list[str]]:
    """Status, stderr and the calls of tools."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, body in {**TOOLS, "stand-in": PYTHON}.items():
        (folder / "bin" / name).write_text(body if name == "stand-in" else f"#!/bin/sh\n{body}")
        (folder / "bin" / name).chmod(0o755)
    given = {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "USER": "somebody",
        "HZERO_OUT": str(folder / "out"),
        "CALLS": str(folder / "calls"),
        "FAIL": "nothing",
        "STAND_IN": str(folder / "bin/stand-in"),
        "BASH_FUNC_module%%": '() { echo "module $*" >> "$CALLS"; }',
    }
    command = ["bash", "slurm/setup_env.sh", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**given, **more}, capture_output=True, text=True, timeout=60, check=False
    )
    calls = (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []
    return done.returncode, done.stderr, calls


def test_on_frontier_an_archive_is_packed(tmp_path: Path) -> None:
    status, errors, calls = _setup(tmp_path, "frontier", "ABC123")
    assert status == 0, errors
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["hzero.tar.gz"]
    expected = (
        "module load PrgEnv-gnu",
        "module load rccl-net-plugin",
        "conda create",
        "python -m pip install torch==2.10.0",
    )
    assert [call[: len(start)] for call, start in zip(calls, expected)] == list(expected)
    assert calls[3].endswith("--index-url https://download.pytorch.org/whl/rocm7.1")
    lock = "python -m pip install -c constraints/frontier.txt"
    assert f"{lock} --no-binary=mpi4py mpi4py" in calls and "MPICC=cc -shared" in calls
    assert calls[-2] == f"{lock} .[train,data]" and calls[-1] == "python -m hzero --version"
    assert "next: sbatch -A abc123 -N 2 slurm/first_run.sbatch\n" in errors
    assert "first write this path into slurm/frontier.env" in errors
    again = _setup(tmp_path, "frontier", "ABC123")
    assert (
        again[0] == 2
        and f"{tmp_path}/out/hzero.tar.gz exists; remove it" in again[1]
        and len(again[2]) == len(calls) + 2
    )


def test_on_lumi_packages_go_over_the_container(tmp_path: Path) -> None:
    status, errors, calls = _setup(tmp_path, "lumi", "project_1", HZERO_WHEELS="/wheels")
    assert status == 0, errors
    containers = {"torch": "2.10.0+rocm7.0", "deepspeed": "0.19.2"}
    locked = {name: found for name, found in _pinned(ROOT / "constraints/lumi.txt").items() if name != "numpy"}
    assert _pinned(tmp_path / "out/hzero.sqsh") == {**locked, **containers}
    assert errors.splitlines()[-2].endswith("--exclusive slurm/first_run.sbatch lumi")
    assert calls[0] == "module load Local-LAIF lumi-aif-singularity-bindings"
    assert "python -m venv --system-site-packages /user-software" in calls
    install = "python -m pip install -c /user-software/pins.txt --no-index --find-links /wheels .[train]"
    assert install in calls and calls[-1] == "python -m hzero --version"


def test_a_step_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Here a module is missing, and then an installation fails."""
    broken = {"BASH_FUNC_module%%": '() { echo "no such module" >&2; return 1; }'}
    assert _setup(tmp_path, "frontier", "X", **broken)[0] == 1
    status, errors, calls = _setup(tmp_path, "frontier", "X", FAIL="mpi4py")
    assert status == 3 and "mpi4py" in calls[-1] and not list((tmp_path / "out").iterdir()), errors


@pytest.mark.parametrize(("restarts", "calls"), [(None, ["update JobId=7 Requeue=0"]), ("1", ["requeue 7"])])
def test_a_job_starts_again_only_on_request(restarts: str | None, calls: list[str], tmp_path: Path) -> None:
    """Its ranks save and end with status 75. Slurm itself starts a job again that does not forbid it."""
    tools = {"squeue": "", "scontrol": 'echo "$*" >> "$CALLS"', "srun": 'case "$*" in *"hzero train"*) exit 75 ;; esac'}
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls"), "HZERO_CHECK": "0"}
    job = {
        "SUBMIT_DIR": str(tmp_path),
        "JOB_ID": "7",
        "JOB_NAME": "hzero",
        "JOB_NUM_NODES": "1",
        "NTASKS_PER_NODE": "1",
    }
    given |= {f"SLURM_{name}": value for name, value in job.items()} | (
        {"HZERO_RESTARTS": restarts} if restarts else {}
    )
    command = ["bash", "--norc", str(ROOT / "slurm/slurm_local.sbatch")]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 75 and (tmp_path / "calls").read_text().splitlines() == calls, done
