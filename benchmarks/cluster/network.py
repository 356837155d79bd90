"""Network: sets an emulated cluster up and tears it down, whatever happens in between."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from benchmarks.cluster import layout
from benchmarks.cluster.namespace import NAMES, end_occupants, inside
from benchmarks.cluster.shape import PREFIX, Cluster
from hzero.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

#: Longest time of one call of ip or tc, in seconds.
TOOL_TIMEOUT_S = 60.0
#: Longest wait for links to come up, in seconds.
LINKS_TIMEOUT_S = 15.0
_OURS = re.compile(rf"{PREFIX}(r\d+|n\d+|spine|probe)")
_PROBE = f"{PREFIX}probe"
#: What a kernel has to have: its option, and the command that shows whether it does.
_NEEDS = (
    ("CONFIG_NET_NS", "ip", f"netns add {_PROBE}"),
    ("CONFIG_VETH", "ip", f"link add name a netns {_PROBE} type veth peer name b netns {_PROBE}"),
    ("CONFIG_BRIDGE", "ip", f"-n {_PROBE} link add name c type bridge"),
    ("CONFIG_NET_SCH_HTB", "tc", f"-n {_PROBE} qdisc add dev a root handle 1: htb"),
    ("CONFIG_NET_SCH_HTB", "tc", f"-n {_PROBE} class add dev a parent 1: classid 1:1 htb rate 1mbit"),
    (
        "CONFIG_NET_CLS_U32",
        "tc",
        f"-n {_PROBE} filter add dev a parent 1: protocol ip prio 1 u32 match ip dst 198.18.0.1/32 flowid 1:1",
    ),
    ("CONFIG_NET_SCH_TBF", "tc", f"-n {_PROBE} qdisc add dev b root tbf rate 1mbit burst 32768b limit 65536b"),
)


class Network:
    """An emulated cluster, there from entering the context to leaving it.

    Entering checks what this needs, takes the machine's lock, clears what a killed process has left behind, and builds.
    Leaving tears down, also after errors. Nothing is made in the machine's own network namespace.

    Args:
        cluster: What to set up.

    Raises:
        ConfigError: On entering: no root, a tool or a feature of the kernel is missing, or another process has a network.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        check_tools()
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(str(self.cluster)))
            stack.callback(_cleared)
            clear()
            check_kernel()
            self._build()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _build(self) -> None:
        cluster = self.cluster
        names = layout.namespaces(cluster)
        run_batch("ip", [f"netns add {name}" for name in names])
        for name in names:  # before there are interfaces, which take these over
            inside(name, _write_settings)
        run_batch("ip", layout.links(cluster))
        for name, lines in layout.interfaces(cluster).items():
            run_batch("ip", lines, name)
        for name, lines in layout.shaping(cluster).items():
            run_batch("tc", lines, name)
        for name in names:
            _wait_for_links(name)


@contextlib.contextmanager
def locked(what: str) -> Iterator[None]:
    """Holds the machine's lock on emulated networks, which ends with this process however that ends.

    Args:
        what: Is set up, for the message of another process.

    Raises:
        ConfigError: Another process has the lock (named), or the file cannot be opened.
    """
    path = Path("/run" if os.access("/run", os.W_OK) else tempfile.gettempdir()) / "hzero-cluster.lock"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} ({what})".encode(), 0)
        yield
    except BlockingIOError:
        who = os.pread(handle, 1 << 12, 0).decode(errors="replace") or "another process"
        raise ConfigError(f"emulated network: in use by {who}; wait for it, or end it: it clears up") from None
    finally:
        os.close(handle)  # the file stays: removing it would let two processes lock two files of one name


def _cleared() -> None:
    with _undisturbed():
        clear()


def ours() -> list[str]:
    """Namespaces of this machine that are of an emulated cluster."""
    try:
        return sorted(entry for entry in os.listdir(NAMES) if _OURS.fullmatch(entry))
    except FileNotFoundError:
        return []


def clear() -> list[str]:
    """Removes every namespace of an emulated cluster, with its links, and ends the processes in them first.

    Returns:
        What was removed; empty where there was nothing.

    Raises:
        ConfigError: Something could not be removed.
    """
    names = ours()
    if not names:
        return []
    ended = end_occupants(names)
    run_batch("ip", [f"netns del {name}" for name in names])
    return [*ended, *(f"namespace {name}" for name in names)]


def clear_left() -> list[str]:
    """Does what `clear` does, unless a process that lives has the network.

    Raises:
        ConfigError: One has it (named), or no root, or ip is missing.
    """
    check_tools()
    with locked("tearing down"), _undisturbed():
        return clear()


def check_tools() -> None:
    """Looks for what needs no trial.

    Raises:
        ConfigError: This is not Linux, not root, or a tool is missing.
    """
    if not Path("/proc/self/ns/net").exists():
        raise ConfigError("emulated network: needs Linux with network namespaces")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise ConfigError(f"emulated network: no command {tool!r}; install iproute2")
    if os.geteuid() != 0:
        raise ConfigError(f"emulated network: needs root, and this is user {os.geteuid()}; use sudo")


def check_kernel() -> None:
    """Tries every feature in a namespace of its own, which is removed again.

    Raises:
        ConfigError: The first that is missing, with the kernel's option and what the tool said.
    """
    try:
        for option, tool, arguments in _NEEDS:
            done = _call([tool, *arguments.split()])
            if done.returncode != 0:
                said = done.stderr.strip().splitlines() or ["no reason given"]
                raise ConfigError(
                    f"emulated network: `{tool} {arguments}` failed: {said[0]}; needs a kernel with {option} (and a "
                    "container to be started with --privileged)"
                )
    finally:
        _call(["ip", "netns", "del", _PROBE])


def run_batch(tool: str, lines: Sequence[str], namespace: str | None = None) -> None:
    """Runs lines by ``ip -batch`` or ``tc -batch``, in a namespace.

    Raises:
        ConfigError: A line failed (given, with what the tool said).
    """
    within = ["-n", namespace] if namespace else []
    done = _call([tool, *within, "-batch", "-"], "".join(line + "\n" for line in lines))
    if done.returncode == 0:
        return
    said = done.stderr.strip().splitlines()
    number = re.search(r"-:(\d+)", done.stderr)
    line = lines[int(number[1]) - 1] if number and 0 < int(number[1]) <= len(lines) else "..."
    raise ConfigError(
        f"emulated network: `{' '.join([tool, *within])} {line}` failed: {said[0] if said else 'no reason'}"
    )


def _call(command: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            input=text,
            stdin=None if text is not None else subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TOOL_TIMEOUT_S,
            check=False,
            start_new_session=True,  # Ctrl-C is ours, so that what was begun is undone in order
        )
    except subprocess.TimeoutExpired:
        shown = " ".join(command)
        raise ConfigError(f"emulated network: `{shown}` has not ended after {TOOL_TIMEOUT_S:.0f} s") from None


def _write_settings() -> None:
    for setting, value in layout.SETTINGS.items():
        path = Path("/proc/sys/net") / setting
        if path.exists():  # a kernel without IPv6 or without a firewall for bridges has nothing to turn off
            try:
                path.write_text(value)
            except OSError as error:
                raise ConfigError(f"emulated network: cannot write {value} to {path}: {error.strerror}") from None


def _wait_for_links(namespace: str) -> None:
    """Waits until all links carry packets, which the kernel brings about up to a second after they are set up.

    Until then packets are lost, and a connection would begin with a second's pause.
    """
    deadline = time.monotonic() + LINKS_TIMEOUT_S
    while True:
        done = _call(["ip", "-n", namespace, "-j", "link", "show"])
        if done.returncode != 0:
            raise ConfigError(f"emulated network: links of {namespace} cannot be read: {done.stderr.strip()}")
        states = {link["ifname"]: link["operstate"] for link in json.loads(done.stdout or "[]")}
        down = [name for name, state in states.items() if name != "lo" and state != "UP"]
        if not down:
            return
        if time.monotonic() > deadline:
            raise ConfigError(
                f"emulated network: {down[0]} in {namespace} is still {states[down[0]]} after {LINKS_TIMEOUT_S:.0f} s"
            )
        time.sleep(0.05)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Holds Ctrl-C and its like back until the end.

    By handlers and not by a mask, which is of one thread: the kernel would give the signal to another.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers run in that one
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for held in came:
            signal.raise_signal(held)
