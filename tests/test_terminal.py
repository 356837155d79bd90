"""Output that nobody can take ends no command: a full disk, a closed stream, a reader that has gone, another encoding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import run

SHOW = f"{sys.executable} -m hzero topology"
#: More than a pipe's buffer of output, to both streams, then a file that shows that the script has reached its end.
SCRIPT = (
    "import sys; from hzero.tools.terminal import keep_streams; keep_streams(); "
    "[print('\\u2026 line', n, file=s) for n in range(20000) for s in (sys.stdout, sys.stderr)]; open('end', 'w').write('end')"
)


def shell(command: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return run("bash", "-o", "pipefail", "-c", command, folder=folder, timeout=60, **env)


@pytest.mark.parametrize(
    ("redirection", "status", "says"),
    [
        ("> /dev/full", 1, "hzero: warning: output is lost: no space left on device\n"),
        (">&-", 0, ""),
        (">&- 2>&-", 0, ""),
        ("<&- | head -n 1", 0, ""),
    ],
)
def test_a_command_ends_as_it_would(redirection: str, status: int, says: str, tmp_path: Path) -> None:
    done = shell(f"{SHOW} frontier {redirection}", tmp_path)
    assert (done.returncode, done.stderr) == (status, says)


@pytest.mark.parametrize("redirection", ["> /dev/full 2>&1", "2>&1 | head -n 1"])
def test_a_run_reaches_its_end(redirection: str, tmp_path: Path) -> None:
    done = shell(f'{sys.executable} -c "$SCRIPT" {redirection}', tmp_path, SCRIPT=SCRIPT)
    assert done.returncode == 0 and (tmp_path / "end").read_text() == "end", done.stderr


def test_what_an_encoding_lacks_is_written_as_an_escape(tmp_path: Path) -> None:
    command = f"{SHOW} frontier && {sys.executable} -m hzero topology nöne.yaml"
    done = shell(command, tmp_path, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 2 and "MI250X" in done.stdout
    assert done.stderr.isascii() and done.stderr.count("\n") == 1 and "ne.yaml'; expected" in done.stderr


def test_names_do_not_command_the_terminal(tmp_path: Path) -> None:
    done = shell(f"{SHOW} $'./no\\e[2J.yaml'; {SHOW} $'./no\\n.yaml'", tmp_path)
    assert done.stderr.count("\n") == 2 and "no\\x1b[2J.yaml'; expected" in done.stderr


def test_a_script_of_hzero_run_reaches_its_end(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("[print('line', n) for n in range(9999)]\nopen('end', 'w').write('end')\n")
    done = shell(f"{sys.executable} -m hzero run script.py > /dev/full", tmp_path)
    assert done.returncode == 0 and (tmp_path / "end").read_text() == "end", done.stderr


def test_a_configuration_in_a_pipe_is_left_to_deepspeed(tmp_path: Path) -> None:
    """As in ``--deepspeed <(make_config)``: what hzero read from it, DeepSpeed would miss."""
    from hzero import block

    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text('{"hzero": {"preset": "topo"}}')
    assert block.load(str(tmp_path / "pipe")) is None
    assert block.split(block.load(str(tmp_path / "file")) or {})[0] == {"preset": "topo"}
