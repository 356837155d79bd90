"""Runs checks on several ranks: one launch for all checks of a module, since starting ranks is what costs.

A module of checks has functions ``check_*(ranks)``, run in the order in which they are written, on all ranks alike.
`collect` gives their names to pytest without importing them; `launch` runs them and tells how each ended.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hzero.train.launch import free_port

ROOT = Path(__file__).resolve().parent.parent

#: Longest wait of one collective in a check: a hang must fail, and soon.
HOP_TIMEOUT_S = 90


def collect(*modules: str) -> list[str]:
    """Names of the checks of modules, in order; only those that the pattern HZERO_CHECKS finds, where it is set."""
    names = []
    for module in modules:
        tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
        names += [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("check_")]
    return [name for name in names if re.search(os.environ.get("HZERO_CHECKS", ""), name)]


def launch(modules: Sequence[str], world_size: int, *, timeout: float = 420, **environment: str) -> dict[str, str]:
    """Runs all checks of ``modules`` on ``world_size`` ranks.

    Returns:
        For every check "passed", or why it did not: the traceback of the first rank that failed, or which check before
        it failed, or the timeout.
    """
    names = collect(*modules)
    with tempfile.TemporaryDirectory() as folder:
        env = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world_size),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "HZERO_CHECKS_OUT": folder,
            **environment,
        }
        with open(Path(folder) / "ranks.log", "w") as log:
            # One process imports, which is what takes long, and forks the ranks.
            ranks = subprocess.Popen(
                [sys.executable, "-m", "tests.rank_main", *modules],
                env=env,
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            ranks.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ranks.pid, signal.SIGKILL)
            ranks.wait()
        return _outcomes(Path(folder), names, timeout)


def _outcomes(folder: Path, names: list[str], timeout: float) -> dict[str, str]:
    done_file = folder / "done"
    done = done_file.read_text().split() if done_file.exists() else []
    failures = sorted((json.loads(p.read_text()) for p in folder.glob("failed*.json")), key=lambda f: f["time"])
    outcomes = {name: "passed" for name in done}
    if len(done) < len(names):
        first = names[len(done)]
        log = (folder / "ranks.log").read_text()[-3000:]
        why = (
            f"rank {failures[0]['rank']}:\n{failures[0]['traceback']}"
            if failures
            else f"a rank died, or {timeout:.0f} s were not enough\n{log}"
        )
        outcomes[first] = why
        for name in names[len(done) + 1 :]:
            outcomes[name] = f"not run, because {first} failed before it"
    return outcomes
