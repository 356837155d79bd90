"""Processes forked from one that has imported everything, since imports take most of a short test (9 s of a core)."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from hzero import errors
from hzero.tools.commands.train import IMPORTS
from hzero.tools.launch import die_with_parent, renew_thread_pool

ROOT = Path(__file__).resolve().parent.parent
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["hzero.tools.cli", "hzero.tools.commands.doctor", "hzero.tools.commands.links", *IMPORTS]
)


def fork(
    target: Callable[..., Any], *arguments: Any, folder: Path, env: Mapping[str, str], out: Path, err: Path
) -> BaseProcess:
    """Calls a function in a new process, the first of its group.

    Args:
        target: A function of a module; its result is the exit status.
        arguments: Of the function.
        folder: Where the process runs.
        env: Its variables on top of ours.
        out: File for what it prints.
        err: File for its errors.
    """
    whole = {**os.environ, **env}
    process = _SERVER.Process(target=_enter, args=(target, arguments, folder, whole, out, err))
    process.start()
    return process


def join(process: BaseProcess, timeout: float) -> None:
    """Waits for the end of a forked process, then kills the rest of its group."""
    process.join(timeout)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()


def _enter(
    target: Callable[..., Any], arguments: Sequence[Any], folder: Path, env: dict[str, str], out: Path, err: Path
) -> None:
    gc.freeze()  # DeepSpeed collects garbage four times for every engine: imported objects need not be searched
    os.setsid()
    die_with_parent()
    for path, number in ((out, 1), (err, 2)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, number)
        os.close(handle)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.exit(target(*arguments))


def run_script(script: str, *arguments: str) -> None:
    """Runs a script in this process as Python would."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork of torchrun's agent has its handler
    renew_thread_pool()
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception:  # torch's own process would show the traceback, and not ask the hook
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.exit(1)
    sys.stdout.flush()


def torchrun(*arguments: str) -> int:
    """What ``torchrun`` does, agent and all, but that it forks its ranks from this process with all that is imported."""
    from torch.distributed import run

    stock = run.config_from_args

    def forking(args: Any) -> tuple[Any, Callable[..., None], list[str]]:
        config, _, _ = stock(args)
        config.start_method = "fork"
        return config, run_script, [args.training_script, *args.training_script_args]

    with mock.patch.object(run, "config_from_args", forking):
        run.main(list(arguments))
    return 0


def run_words(words: list[str]) -> None:
    """Does in this process what Python does with these words: ``-m MODULE ...``, ``-c CODE ...`` or ``FILE ...``."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    renew_thread_pool()
    errors.WAIT_S = 3.0  # ranks that have imported everything begin together
    option, sys.argv = words[0], words[1:]
    if option == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif option == "-c":
        exec(sys.argv[0], {"__name__": "__main__"})
    else:
        sys.argv = words
        runpy.run_path(option, run_name="__main__")


def run_forked(*words: str, folder: Path, timeout: float = 300, **env: str) -> tuple[int, str, str]:
    """Runs Python with these words in the checkout; exit status, output and errors, which are in ``folder`` too."""
    out, err = (Path(tempfile.mkstemp(dir=folder)[1]) for _ in range(2))
    process = fork(run_words, list(words), folder=ROOT, env=env, out=out, err=err)
    join(process, timeout)
    return process.exitcode or 0, out.read_text(), err.read_text()


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for its new parent."""
    stat = Path(f"/proc/{pid}/stat")
    with contextlib.suppress(OSError):  # it may end while we read
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    return False


class Command:
    """A running ``hzero`` command, with what tests need of `subprocess.Popen`.

    Args:
        arguments: Of ``hzero``.
        folder: Where it runs.
        output: A new folder for what it prints.
        env: Its variables on top of ours.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, output: Path, env: Mapping[str, str]) -> None:
        output.mkdir(parents=True)
        self.out, self.err = output / "out", output / "err"
        self._process = fork(_hzero, list(arguments), folder=folder, env=env, out=self.out, err=self.err)
        self.pid = self._process.pid or 0

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.exitcode is None:  # a test that failed; the ranks end with their parent
            self._process.kill()

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Sends a signal."""
        os.kill(self.pid, number)

    def finish(self, timeout: float = 300) -> tuple[int, str, str]:
        """Exit status, output and errors once it has ended; after ``timeout`` seconds it is killed."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            raise TimeoutError(f"no end in {timeout:.0f} s: {self.err.read_text()}")
        return self._process.exitcode, self.out.read_text(), self.err.read_text()


def _hzero(arguments: list[str]) -> int:
    from hzero.tools.cli import main

    sys.argv = ["hzero", *arguments]
    return main(arguments)
