"""Runs a script as ``torchrun --standalone --nproc-per-node=N script.py`` does."""

from __future__ import annotations

from pathlib import Path

from tests.forks import fork, join, torchrun
from tests.ranks import ROOT


def run(script: str, *arguments: str, folder: Path, ranks: int = 4, status: int = 0, timeout: float = 300) -> str:
    """Runs a script of this folder and returns its output and errors; fails unless it exits with ``status``.

    Ranks are forked from a process that has imported everything, which saves most of the time. They skip the end of the
    interpreter, which test_endings.py tests.

    Args:
        script: Name of a file beside this one.
        *arguments: Arguments of the script.
        folder: Empty folder for its output.
        ranks: Number of ranks.
        status: Expected exit status of torchrun.
        timeout: Seconds until the launch is killed.
    """
    out, err = folder / "out", folder / "err"
    env = {"PYTHONWARNINGS": "ignore", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    words = [f"--nproc-per-node={ranks}", str(Path(__file__).with_name(script)), *arguments]
    process = fork(_run, words, folder=ROOT, env=env, out=out, err=err)
    join(process, timeout)
    text = out.read_text() + err.read_text()
    assert process.exitcode == status, text
    return text


def _run(words: list[str]) -> int:
    return torchrun("--standalone", *words)
