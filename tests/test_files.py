"""Modes of files: others never write what hzero writes, and a training's files are its user's alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from hzero import cli
from hzero.files import distrust, narrow, read_small, replacing
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
    (made / "inner").mkdir(mode=0o755)
    (made / "inner" / "deep").touch(0o666)
    assert "deep' can be written" in distrust(made)
    (made / "inner" / "deep").unlink()
    (made / "inner" / "link").symlink_to(made / "file")
    assert distrust(made) == f"'{made}/inner/link' is a link"
    (tmp_path / "beside").symlink_to(made)
    assert distrust(tmp_path / "beside").endswith("beside' is a link")
    (made / "inner" / "link").unlink()
    tmp_path.chmod(0o777)  # others could put another entry in place of this one
    for entry in (made, tmp_path / "none"):
        assert distrust(entry) == f"'{tmp_path}' can be written by others (mode 777)"
    tmp_path.chmod(0o1777)
    assert not distrust(made)


def test_what_is_small_and_regular_is_read(tmp_path: Path) -> None:
    (tmp_path / "note").write_bytes(b"12345")
    assert read_small(tmp_path / "note", 5) == b"12345"
    with pytest.raises(ValueError, match=r"note' is larger than 4 bytes"):
        read_small(tmp_path / "note", 4)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        read_small(tmp_path / "pipe")
