"""What tests of the benchmarks share."""

from __future__ import annotations

import pytest

from benchmarks.cluster import owner
from benchmarks.cluster.network import check_kernel, check_tools, clear, ours
from hzero.config import ConfigError


@pytest.fixture
def emulated_network() -> None:
    """Skips where no network can be set up, or where somebody has one."""
    try:
        check_tools()
        lock = owner.Lock()
        lock.take()
        try:
            there = owner.read()
            if ours() and there is not None and there.kept:
                pytest.skip("somebody keeps an emulated network up")
            clear()  # of an earlier test that was killed: a network of somebody who lives has the lock
            check_kernel()
        finally:
            lock.release()
    except ConfigError as error:
        pytest.skip(str(error))
