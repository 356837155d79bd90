"""Namespace: a process or a thread moves into a network namespace, and who is in one.

    python -m benchmarks.cluster.namespace NAME COMMAND...

enters the namespace and becomes COMMAND. NAME ``-`` takes the name from the
variable HZERO_CLUSTER_NAMESPACE. This file needs the standard library alone, so that it also starts by its path, from any
folder and in no time.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

#: Where `ip netns` keeps names.
NAMES = Path("/var/run/netns")
VARIABLE = "HZERO_CLUSTER_NAMESPACE"
_CLONE_NEWNET = 0x40000000

T = TypeVar("T")


def enter(name: str) -> None:
    """Moves the calling thread into a network namespace; what it starts from now on is in there too.

    A process calls this before it has other threads, since those stay where they are. Sockets that are open stay in the
    namespace in which they were made. (setns(2); Python has it as ``os.setns`` from 3.12 on only.)

    Raises:
        ConfigError: There is no such namespace, or this process may not enter it.
    """
    why = _entered(name)
    if why is not None:
        # Not above: ranks start by this file's path, and pydantic takes a while to import.
        from hzero.validation import ConfigError

        raise ConfigError(why)


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


def _entered(name: str) -> str | None:
    """Enters a namespace. Returns None, or why it cannot."""
    try:
        handle = os.open(NAMES / name, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return f"network namespace {name!r}: there is none; `python -m benchmarks.cluster up` sets the cluster up"
    except OSError as error:
        return f"network namespace {name!r}: {error.strerror}"
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle, _CLONE_NEWNET) != 0:
            return f"network namespace {name!r}: cannot be entered: {os.strerror(ctypes.get_errno())} (needs root)"
        return None
    finally:
        os.close(handle)


def main(arguments: list[str]) -> int:
    """Becomes COMMAND in a namespace. Returns only where that fails: 2, or 127 where there is no such command."""
    if len(arguments) < 2 or arguments[0] in ("-h", "--help"):
        print("usage: python -m benchmarks.cluster.namespace NAME|- COMMAND [ARGUMENT ...]", file=sys.stderr)
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    name, command = arguments[0], arguments[1:]
    if name == "-":
        name = os.environ.get(VARIABLE, "")
        if not name:
            print(f"namespace: {VARIABLE} is not set, which - takes the name from", file=sys.stderr)
            return 2
    why = _entered(name)
    if why is not None:
        print(why, file=sys.stderr)
        return 2
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
