"""Runs checks on several ranks: one launch for all checks of a world, since starting ranks takes most of the time.

A module of checks has functions ``check_*()``, which all ranks run alike, in the order in which they are written. Or it has
tables ``ROWS`` and ``LONG_ROWS``: dictionaries from names to such functions. A check that cannot run here calls
``pytest.skip``, on all ranks alike. `on_ranks` makes a test of each; `collect` gives their names without importing the module.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hzero.tools.launch import free_port
from tests.forks import fork, join

ROOT = Path(__file__).resolve().parent.parent
#: For tests and checks that only ``--long`` runs, as .ci/run does; see conftest.py.
LONG = pytest.mark.long
#: Checks of a launch that may fail before the others are given up, which may fail for the same reason, each after a timeout.
MOST_FAILURES = 3


@dataclass(frozen=True)
class Outcome:
    """The end of one check.

    Attributes:
        status: ``passed``, ``skipped`` or ``failed``.
        why: The reason: of a failure the traceback of the first rank that failed, or the end of the log. Of a check that
            passed the text that it returned, if any.
        seconds: Time that the check took on the ranks.
    """

    status: str
    why: str = ""
    seconds: float = 0.0


def collect(*modules: str) -> list[str]:
    """Names of the checks of modules, in order."""
    return [name for _, name, _ in _checks(modules)]


def _checks(modules: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
    """Modules and names of checks, and whether they take long."""
    for module in modules:
        tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("check_"):
                yield module, node.name, "LONG" in map(ast.unparse, node.decorator_list)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                table = ast.unparse(node.targets[0])
                rows = node.value.keys if table in ("ROWS", "LONG_ROWS") else []
                yield from ((module, ast.literal_eval(row), table == "LONG_ROWS") for row in rows if row)


def on_ranks(modules: Mapping[int, Sequence[str]], **options: Any) -> Callable[..., None]:
    """A test for each check of modules of checks: assign it to a name that pytest collects.

    Args:
        modules: Modules by the ranks that they need. The selected checks of a world are one launch.
        options: Of `launch`.
    """
    launched: dict[int, dict[str, Outcome]] = {}
    cases = [(ranks, check, long) for ranks, of_world in modules.items() for _, check, long in _checks(of_world)]
    assert len(cases) == len({case[:2] for case in cases}), (
        "checks of one world with the same name, of which one would hide the other's end"
    )

    @pytest.mark.parametrize(
        ("ranks", "check"),
        [pytest.param(ranks, check, marks=[LONG] if long else []) for ranks, check, long in cases],
    )
    def test(request: pytest.FixtureRequest, ranks: int, check: str) -> None:
        if ranks not in launched:
            others = [item for item in request.session.items if getattr(item, "function", None) is request.function]
            runs = [other for other in others if other.get_closest_marker("skip") is None]
            checks = [other.callspec.params for other in runs]  # type: ignore[attr-defined]
            names = [one["check"] for one in checks if one["ranks"] == ranks]
            launched[ranks] = launch(modules[ranks], ranks, names, **options)
        outcome = launched[ranks][check]
        print(f"{outcome.seconds:.1f} s on the ranks\n{outcome.why}")
        if outcome.status == "skipped":
            pytest.skip(outcome.why)
        assert outcome.status == "passed", outcome.why

    return test


def launch(
    modules: Sequence[str], world_size: int, checks: Sequence[str], *, timeout: float = 900, **environment: str
) -> dict[str, Outcome]:
    """Runs checks on ``world_size`` ranks.

    Args:
        modules: Modules of checks.
        world_size: Number of ranks.
        checks: Names of the checks to run.
        timeout: Seconds after which the launch ends.
        environment: Variables of the ranks.

    Returns:
        The outcome of every check. A check that fails ends its launch, and those after it have a launch of their own. After
        `MOST_FAILURES` the others are skipped.
    """
    deadline, outcomes = time.monotonic() + timeout, dict[str, Outcome]()
    wanted = [(module, name) for module, name, _ in _checks(modules) if name in checks]
    for _ in range(MOST_FAILURES):
        left = [f"{module}:{name}" for module, name in wanted if name not in outcomes]
        if left:
            outcomes |= _launched(left, world_size, max(deadline - time.monotonic(), 1.0), environment)
    failed = [name for name, outcome in outcomes.items() if outcome.status == "failed"]
    skipped = Outcome("skipped", f"not run: {', '.join(failed)} failed before it")
    return {name: outcomes.get(name, skipped) for _, name in wanted}


def _launched(wanted: list[str], world_size: int, timeout: float, environment: Mapping[str, str]) -> dict[str, Outcome]:
    """One launch. Returns the outcomes of checks ``MODULE:CHECK`` up to the first that fails."""
    with tempfile.TemporaryDirectory() as folder:
        env = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world_size),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "HZERO_CHECKS_OUT": folder,
            **environment,
        }
        log = Path(folder) / "ranks.log"
        if env.get("HZERO_CHECKS_TRANSPORT") == "mpi":
            _by_mpiexec(wanted, world_size, env, log, timeout)
        elif env.get("HZERO_CHECKS_DEVICE") == "cuda":
            _on_gpu(wanted, world_size, env, log, timeout)
        else:
            from tests.rank_main import run_checks  # imports torch

            ranks = fork(run_checks, wanted, folder=Path(folder), env=env, out=log, err=log)
            join(ranks, timeout)
        return _outcomes(Path(folder), [name.split(":")[1] for name in wanted], timeout)


def mpiexec() -> str:
    """The command, beside this Python or on the path; skips the test where it or mpi4py is missing."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if not found or importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpiexec or mpi4py is not there (extra mpi)")
    return found


def _by_mpiexec(checks: Sequence[str], world_size: int, env: dict[str, str], log: Path, timeout: float) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PMI", "OMPI_", "MPI_"))}
    command = [mpiexec(), "-n", str(world_size), sys.executable, "-m", "tests.rank_main", *checks]
    kept["TORCHDYNAMO_DISABLE"] = "1"  # or each rank imports torch's compiler
    with open(log, "w") as file, contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(command, cwd=ROOT, env={**kept, **env}, stdout=file, stderr=file, timeout=timeout, check=False)


def _on_gpu(checks: Sequence[str], world_size: int, env: dict[str, str], log: Path, timeout: float) -> None:
    """Starts processes, since CUDA does not survive a fork."""
    command, deadline = [sys.executable, "-m", "tests.rank_main", *checks], time.monotonic() + timeout
    with open(log, "w") as file:
        environments = (
            {**os.environ, **env, "DS_ACCELERATOR": "cuda", "RANK": str(rank)} for rank in range(world_size)
        )
        ranks = [subprocess.Popen(command, cwd=ROOT, env=one, stdout=file, stderr=file) for one in environments]
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    time.sleep(0.5)  # the one that failed first may not be the one that ended first
    for rank in ranks:
        rank.kill()
        rank.wait()


def _outcomes(folder: Path, names: list[str], timeout: float) -> dict[str, Outcome]:
    done_file = folder / "done"
    done = [json.loads(line) for line in done_file.read_text().splitlines()] if done_file.exists() else []
    outcomes = {one.pop("check"): Outcome(**one) for one in done}
    missing = [name for name in names if name not in outcomes]
    if missing:
        failures = sorted((json.loads(p.read_text()) for p in folder.glob("failed*.json")), key=lambda f: f["time"])
        log = (folder / "ranks.log").read_text()[-3000:]
        outcomes[missing[0]] = Outcome(
            "failed",
            f"rank {failures[0]['rank']}:\n{failures[0]['traceback']}"
            if failures
            else f"a rank died, or {timeout:.0f} s were not enough\n{log}",
        )
    return outcomes


def environment(**more: str) -> dict[str, str]:
    """Our environment without the variables of a launcher, and with others."""
    # Without buffers, Python writes a line and its end separately, so ranks that share a pipe print into each other's.
    ours = ("SLURM_", "PMI", "OMPI_", "MPI_", "RANK", "PYTHONUNBUFFERED")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port()), **more}


def run(*command: str, folder: Path = ROOT, timeout: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end in `environment`, and keeps what it prints."""
    own = environment(**env)
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, timeout=timeout, check=False)


def run_python(*words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """This Python by `run`."""
    return run(sys.executable, *words, **how)
