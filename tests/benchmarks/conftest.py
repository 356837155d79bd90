"""What tests of the benchmarks share."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cluster.network import check_kernel, check_tools, clear, locked
from hzero.errors import ConfigError


@pytest.fixture
def emulated_network() -> Iterator[None]:
    """Skips if no network can be set up or somebody has one; tests of other processes wait for their turn."""
    with open(Path(tempfile.gettempdir()) / f"hzero-tests-network-{os.getuid()}", "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        _check_network()
        yield


def _check_network() -> None:
    try:
        check_tools()
        with locked("tests"):
            clear()  # of an earlier test that was killed: a network of somebody who lives has the lock
            check_kernel()
    except ConfigError as error:
        pytest.skip(str(error))
