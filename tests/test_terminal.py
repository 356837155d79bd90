"""Output for a reader that has gone, in another encoding, and with control characters; input from a pipe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.ranks import run

SHOW = f"{sys.executable} -m hzero topology"


def shell(command: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return run("bash", "-o", "pipefail", "-c", command, folder=folder, timeout=60, **env)


def test_a_reader_that_has_gone_ends_a_command_without_a_traceback(tmp_path: Path) -> None:
    done = shell(f"{SHOW} frontier | true", tmp_path)
    assert done.returncode == 1 and not done.stderr


def test_what_an_encoding_lacks_is_written_as_an_escape(tmp_path: Path) -> None:
    command = f"{SHOW} frontier && {sys.executable} -m hzero topology nöne.yaml"
    done = shell(command, tmp_path, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 2 and "MI250X" in done.stdout
    assert done.stderr.isascii() and done.stderr.count("\n") == 1 and "ne.yaml'; expected" in done.stderr


def test_names_do_not_command_the_terminal(tmp_path: Path) -> None:
    done = shell(f"{SHOW} $'./no\\e[2J.yaml'; {SHOW} $'./no\\n.yaml'", tmp_path)
    assert done.stderr.count("\n") == 2 and "no\\x1b[2J.yaml'; expected" in done.stderr


def test_a_configuration_in_a_pipe_is_left_to_deepspeed(tmp_path: Path) -> None:
    """As in ``--deepspeed <(make_config)``: what hzero read from it, DeepSpeed would miss."""
    from hzero import block

    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text('{"hzero": {"preset": "topo"}}')
    assert block.load(str(tmp_path / "pipe")) is None
    assert block.split(block.load(str(tmp_path / "file")) or {})[0] == {"preset": "topo"}
