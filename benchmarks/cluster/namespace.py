"""Namespaces: a process or a thread moves into a network namespace, and which processes are in one."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hzero.errors import ConfigError

#: Where `ip netns` keeps names.
NAMES = Path("/var/run/netns")
VARIABLE = "HZERO_CLUSTER_NAMESPACE"
_CLONE_NEWNET = 0x40000000

T = TypeVar("T")


def enter(name: str) -> None:
    """Moves the calling thread into a network namespace, with everything that it starts afterwards.

    A process calls this before it has other threads, since those stay where they are. Sockets that are open stay in the
    namespace in which they were made. (setns(2); Python has it as ``os.setns`` from 3.12 on only.)

    Raises:
        ConfigError: There is no such namespace, or this process may not enter it.
    """
    try:
        handle = os.open(NAMES / name, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        known = "`python -m benchmarks.cluster up` sets the cluster up"
        raise ConfigError(f"network namespace {name!r}: there is none; {known}") from None
    except OSError as error:
        raise ConfigError(f"network namespace {name!r}: {error.strerror}") from None
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle, _CLONE_NEWNET) != 0:
            why = os.strerror(ctypes.get_errno())
            raise ConfigError(f"network namespace {name!r}: cannot be entered: {why} (needs root)")
    finally:
        os.close(handle)


def inside(name: str, function: Callable[[], T]) -> T:
    """What ``function`` returns or raises when called in a namespace, by a thread of its own; the caller stays outside.

    Raises:
        ConfigError: As of `enter`.
    """

    def there() -> T:
        enter(name)
        return function()

    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(there).result()


def occupants(names: list[str]) -> dict[int, str]:
    """Processes in namespaces, without the calling one: process id -> name of the namespace."""
    inodes = {}
    for name in names:
        with contextlib.suppress(OSError):
            inodes[(NAMES / name).stat().st_ino] = name
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):  # gone in the meantime
                there = os.stat(f"/proc/{entry}/ns/net").st_ino
                if there in inodes:
                    found[int(entry)] = inodes[there]
    return found


def end_occupants(names: list[str], grace_s: float = 2.0) -> list[str]:
    """Ends all processes in namespaces: SIGTERM, and SIGKILL for those that are still there.

    Args:
        names: Of the namespaces.
        grace_s: Longest wait after each signal, in seconds.

    Returns:
        A line for every process that was ended.
    """
    ended: dict[int, str] = {}
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace_s
        signalled: set[int] = set()
        while (here := occupants(names)) and time.monotonic() < deadline:
            for pid, name in here.items():
                if pid not in signalled:
                    signalled.add(pid)
                    ended.setdefault(pid, f"process {pid} in {name}")
                    _signal(pid, names, number)
            time.sleep(0.02)
    return list(ended.values())


def _signal(pid: int, names: list[str], number: int) -> None:
    """Signals a process that is still in one of the namespaces: a number that has a new owner since is left alone."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if pid in occupants(names):
                signal.pidfd_send_signal(handle, number)
        finally:
            os.close(handle)
