"""Completion as a shell does it: bash asks the command, which neither runs anything nor loads torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT

#: Lines, in which TAB follows the last character, and words among the answers; the values without those of a key or option.
LINES = {
    "hzero ": {"train", "plan", "report", "runs", "doctor", "topology", "links", "completion"},
    "hzero report --o": {"--output "},
    "hzero report runs/": {"runs/one", "runs/two"},
    "hzero topology fr": {"frontier "},
    "hzero doctor --expect lu": {"lumi "},
    "hzero links --it": {"--iterations "},
    "hzero train zero=": {"topo", "mild", "lossless"},
    "hzero train zero=mild train.gr": {"train.grad_accumulation=", "train.grad_clip="},
    "hzero train che": {"checkpoint.every=", "checkpoint.keep="},  # not the only "checkpoint.", with a blank behind it
    "hzero plan topology=frontier accu": {"accumulation="},
    "hzero plan preset=lo": {"lossless "},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a command `hzero` of this checkout, two runs and a folder that is no run."""
    command = tmp_path / "bin" / "hzero"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hzero "$@"\n')
    command.chmod(0o755)
    for name in ("one", "two"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "metrics.jsonl").touch()
    (tmp_path / "runs" / "other").mkdir()
    return tmp_path


def _bash(folder: Path, script: str, *arguments: str) -> str:
    compiled = {"PYTHONPYCACHEPREFIX": str(folder / "compiled"), "PYTHONDONTWRITEBYTECODE": ""}  # as installed
    environ = {**os.environ, **compiled, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", *arguments],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return done.stdout


def test_bash_completes_the_whole_command(folder: Path) -> None:
    script = """
    eval "$(hzero completion bash)"
    complete -p hzero | grep -q -- '-F _python_argcomplete hzero' || exit 1
    for COMP_LINE; do
        COMP_POINT=${#COMP_LINE} COMP_TYPE=9 COMPREPLY=()
        _python_argcomplete hzero
        (IFS=,; echo "${COMPREPLY[*]}")
    done
    """
    answers = _bash(folder, script, *LINES).splitlines()
    assert len(answers) == len(LINES)
    for (line, expected), answer in zip(LINES.items(), answers):
        assert expected <= set(answer.split(",")), f"{line!r}: {answer}"
    assert "runs/other" not in answers[2]
    assert set(answers[3].split(",")) == {"frontier "}  # nothing else begins so


def test_every_command_has_options_without_torch() -> None:
    code = (
        "import sys\n"
        "from hzero.cli import COMMANDS\n"
        "from hzero.completion import _parser_of\n"
        "for name, (runs, _) in COMMANDS.items():\n"
        "    assert any('--help' in action.option_strings for action in _parser_of(name, runs)._actions), name\n"
        "    loaded = {'torch', 'deepspeed', 'matplotlib'} & sys.modules.keys()\n"
        "    assert not loaded, f'{name} loads {loaded}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
