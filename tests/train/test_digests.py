"""Files that are hashed while they are written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hzero.train import digests

WRITE = os.write


def _written(path: Path, pieces: list[bytes]) -> tuple[bytes, str]:
    file = digests.HashedFile(path)
    for piece in pieces:
        assert file.write(piece) == len(piece)
    digest = file.close()
    assert file.size == path.stat().st_size
    return path.read_bytes(), digest


@settings(max_examples=25)
@given(
    st.lists(
        st.one_of(st.integers(0, 5000), st.integers(digests._PIECE - 3, digests._PIECE + 3), st.just(3 << 20)),
        max_size=5,
    )
)
def test_what_is_written_is_there(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    path = tmp_path_factory.mktemp("digests") / "file"
    pieces = [os.urandom(size) for size in sizes]
    content, digest = _written(path, pieces)
    assert content == b"".join(pieces) and digest == digests.of_file(path)


@pytest.mark.parametrize("how", ["no direct file", "no direct write", "parts"])
def test_file_systems_without_direct_writes_and_partial_writes(tmp_path: Path, how: str) -> None:
    """They take the page cache's way; nothing is written twice and nothing is left out."""
    opened, refused, ways = os.open, [], list[bool]()

    def open_(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & digests._DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return opened(path, flags, mode)

    def write(file: int, data: memoryview) -> int:
        ways.append(bool(fcntl.fcntl(file, fcntl.F_GETFL) & digests._DIRECT))
        if how == "parts":  # as on a disk that is nearly full: whole sectors, and no whole blocks
            return WRITE(file, data[: max(len(data) // 2 // 512 * 512 - 512, 512)])
        if how == "no direct write" and not refused:
            refused.append(file)
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return WRITE(file, data)

    without = mock.patch.object(os, "open", open_) if how == "no direct file" else contextlib.nullcontext()
    with without, mock.patch.object(os, "write", write):
        content, digest = _written(tmp_path / "file", pieces := [os.urandom(9_000_001), os.urandom(5)])
    assert content == b"".join(pieces) and digest == digests.of_file(tmp_path / "file")
    assert bool(refused) == (how == "no direct write")
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | digests._DIRECT))
    except OSError:
        pytest.skip("this file system has no direct writes")
    assert ways[0] == (how != "no direct file")
    assert sum(ways) == ways[0], "not direct any more once a write was refused or cut short"


def test_a_user_may_have_the_cache_filled(tmp_path: Path) -> None:
    ways = []

    def write(file: int, data: memoryview) -> int:
        ways.append(bool(fcntl.fcntl(file, fcntl.F_GETFL) & digests._DIRECT))
        return WRITE(file, data)

    with mock.patch.object(os, "write", write):
        file = digests.HashedFile(tmp_path / "file", direct=False)
        file.write(bytes(9_000_000))
        file.write(b"")
        file.close()
    assert not any(ways) and len(ways) == 3 and (tmp_path / "file").stat().st_size == 9_000_000


def test_an_error_of_the_disk_keeps_its_reason(tmp_path: Path) -> None:
    whole, left = digests.HashedFile(tmp_path / "whole.pt"), digests.HashedFile(tmp_path / "cut.pt")
    state = {"a": torch.arange(1_000_000), "b": [torch.ones(3)]}
    torch.save(state, whole)
    assert whole.close() == digests.of_file(tmp_path / "whole.pt")  # torch writes from the first byte to the last
    assert whole.size == (tmp_path / "whole.pt").stat().st_size

    with mock.patch.object(os, "write", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
        torch.save(state, left)  # torch's own error would not say why
    with pytest.raises(OSError, match="No space left on device"):
        left.close()
    with pytest.raises(IsADirectoryError):
        digests.HashedFile(tmp_path)
