"""Runs a script as ``torchrun --standalone --nproc-per-node=N script.py`` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.forks import fork, join, torchrun
from tests.ranks import ROOT


def run(
    script: str,
    *arguments: str,
    folder: Path,
    ranks: int = 4,
    status: int = 0,
    timeout: float = 300,
    forked: bool = True,
) -> str:
    """Runs a script of this folder and returns its output and errors; fails unless it exits with ``status``.

    Args:
        script: Name of a file beside this one.
        *arguments: Arguments of the script.
        folder: Empty folder for its output.
        ranks: Number of ranks.
        status: Expected exit status of torchrun.
        timeout: Seconds until the launch is killed.
        forked: Whether ranks are forked from a process that has imported everything, which saves most of the time. Such
            a rank skips the end of the interpreter, so a script that tests it needs a torchrun of its own.
    """
    out, err = folder / "out", folder / "err"
    env = {"PYTHONWARNINGS": "ignore", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    words = [f"--nproc-per-node={ranks}", str(Path(__file__).with_name(script)), *arguments]
    if not forked:
        with open(out, "w") as both:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
            done = subprocess.run(
                command, cwd=ROOT, env={**os.environ, **env}, stdout=both, stderr=both, timeout=timeout
            )
        assert done.returncode == status, out.read_text()
        return out.read_text()
    process = fork(_run, words, folder=ROOT, env=env, out=out, err=err)
    join(process, timeout)
    text = out.read_text() + err.read_text()
    assert process.exitcode == status, text
    return text


def _run(words: list[str]) -> int:
    return torchrun("--standalone", *words)
