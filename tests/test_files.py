"""Modes of files: others never write what hzero writes, and a training's files are its user's alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from hzero import cli
from hzero.files import distrust, narrow, replacing
from hzero.train import folder


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    """The widest umask, as in some containers."""
    before = os.umask(0)
    yield
    os.umask(before)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("mask", "mode"), [(0, 0o644), (0o002, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_a_replaced_file_is_no_wider_than_the_umask_and_written_by_its_owner(
    mask: int, mode: int, tmp_path: Path
) -> None:
    os.umask(mask)
    for _ in range(2):
        with replacing(tmp_path / "file") as file:
            file.write("text")
        assert _mode(tmp_path / "file") == mode
        (tmp_path / "file").chmod(0o666)


@pytest.mark.parametrize(("command", "mask"), [("train", 0o077), ("report", 0o022)])
def test_commands_narrow_the_umask_and_put_it_back(
    command: str, mask: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    masks: list[int] = []

    def runs(arguments: list[str]) -> int:
        with narrow(0):
            masks.append(os.umask(0))
            os.umask(masks[-1])
        return 0

    monkeypatch.setattr(cli.pkgutil, "resolve_name", lambda name: runs)
    assert cli.main([command]) == 0 and masks == [mask] and os.umask(0) == 0


def test_a_run_folder_is_its_users(tmp_path: Path) -> None:
    folder.lock(tmp_path / "runs" / "first").close()
    assert _mode(tmp_path / "runs" / "first") == 0o700


def test_who_is_distrusted(tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert not distrust(made)
    made.mkdir(mode=0o700)
    (made / "file").touch(0o666)
    assert not distrust(made) and "can be written" in distrust(made / "file")
    made.chmod(0o711)
    assert distrust(made) == f"'{made}/file' can be written by its group or by others (mode 666)"
    (made / "file").chmod(0o644)
    assert not distrust(made)
    (made / "gone").symlink_to("nowhere")
    assert not distrust(made)
