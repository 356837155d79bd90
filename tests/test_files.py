"""Files that are read whole, written whole, and those of others that are not taken."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from hzero.errors import ConfigError
from hzero.files import distrust, expanded, read_json, read_text, read_whole, regular, replacing


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    """The widest umask, as in some containers."""
    before = os.umask(0)
    yield
    os.umask(before)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("mask", "mode"), [(0, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_a_replaced_file_is_no_wider_than_the_umask_and_written_by_its_owner(
    mask: int, mode: int, tmp_path: Path
) -> None:
    os.umask(mask)
    for _ in range(2):
        with replacing(tmp_path / "file") as file:
            file.write("text")
        assert _mode(tmp_path / "file") == mode
        (tmp_path / "file").chmod(0o666)


def test_who_is_distrusted(tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert not distrust(made), "nobody has written it"
    made.touch(0o644)
    assert not distrust(made)
    (tmp_path / "link").symlink_to(made)
    assert "link' is no regular file that only you or root can write (mode lrwx" in distrust(tmp_path / "link")
    for mode in (0o664, 0o646):
        made.chmod(mode)
        assert f"'{made}' is no regular file that only you or root can write" in distrust(made), mode
    made.chmod(0o644)
    tmp_path.chmod(0o777)  # others could replace this file
    assert distrust(made) == f"'{tmp_path}' can be written by others (mode 777)"
    tmp_path.chmod(0o1777)
    assert not distrust(made)


def test_a_regular_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "note").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_whole(tmp_path / "note", 11) == b'\xef\xbb\xbf{"a": 1}'
    assert read_text(tmp_path / "note") == '{"a": 1}' and read_json(tmp_path / "note") == {"a": 1}
    (tmp_path / "link").symlink_to("note")
    assert read_json(str(tmp_path / "link")) == {"a": 1}


def test_what_cannot_be_read_whole_is_one_line(tmp_path: Path) -> None:
    """And at once: nobody writes into the pipe, and /dev/zero has no end."""
    (tmp_path / "noise").write_bytes(b"ab\xff")
    (tmp_path / "list").write_bytes(b"[1]")
    (tmp_path / "deep").write_bytes(b"[" * 100_000)
    (tmp_path / "no\x1b[2J\nname").write_bytes(b"12345")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "closed").touch(0)
    for name, read, says in (
        ("none", read_whole, "none: cannot be read: no such file or directory"),
        ("pipe", read_whole, "pipe: cannot be read: not a regular file"),
        ("/dev/zero", read_whole, "/dev/zero: cannot be read: not a regular file"),
        (".", read_whole, ": cannot be read: not a regular file"),
        ("loop", read_whole, "loop: cannot be read: too many levels of symbolic links"),
        ("n\0", read_whole, "cannot be read: embedded null byte"),
        ("\ud800", read_whole, "\\ud800: cannot be read"),
        ("closed", read_whole, "closed: cannot be read: permission denied"),
        ("no\x1b[2J\nname", lambda path: read_whole(path, 4), "no\\x1b[2J\\nname: larger than 4 bytes, the limit"),
        ("noise", read_text, "noise: byte 2 is not UTF-8"),
        ("noise", read_json, "noise: byte 2 is not UTF-8"),
        ("list", read_json, "list: found [1]; expected a JSON object"),
        ("deep", read_json, "deep: is not valid JSON: maximum recursion depth"),
        ("~nobody-of-this/x", expanded, "found no home for '~nobody-of-this'; expected a user"),
    ):
        if name == "closed" and os.access(tmp_path / name, os.R_OK):
            continue  # root reads everything
        with pytest.raises(ConfigError) as error:
            read(name if name[0] in "~/" else tmp_path / name)  # type: ignore[operator]
        assert says in str(error.value) and str(error.value).isprintable(), error.value


def test_links_and_pipes_in_our_folders_are_refused_at_once(tmp_path: Path) -> None:
    """Another user may have made them, to have a file of this user overwritten."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "link").symlink_to("victim")
    (tmp_path / "dangling").symlink_to("new")
    os.mkfifo(tmp_path / "pipe")
    write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for name, says in (
        ("link", "a symbolic link"),
        ("dangling", "a symbolic link"),
        ("pipe", "not a regular file"),
        ("n\0", "embedded null byte"),
    ):
        for flags in (os.O_RDONLY, write):
            with pytest.raises(OSError, match=says) as error:
                regular(tmp_path / name, flags)
            assert error.value.filename == str(tmp_path / name)
        with pytest.raises(ConfigError, match=f"cannot be read: {says}"):
            read_whole(tmp_path / name, links=False)
    assert (tmp_path / "victim").read_text() == "precious" and not (tmp_path / "new").exists()
    with pytest.raises(OSError, match="embedded null byte"), replacing(tmp_path / "n\0"):
        pass
    with open(tmp_path / "new", "a", opener=regular) as file:
        file.write("text")
    assert (tmp_path / "new").read_text() == "text"
