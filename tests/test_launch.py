"""The ranks of a command on this machine: statuses, messages, signals, and that none of them lives on."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from hzero.tools.launch import run_ranks
from tests.forks import alive, fork, join, run_script, torchrun
from tests.ranks import run_python

#: A command of three ranks, whose body has `rank`, `folder` and `wait`, which waits until all ranks are there.
COMMAND = """
import errno, os, signal, sys, time
from pathlib import Path
from hzero.tools.launch import run_ranks
from hzero.errors import ConfigError, PeerError
folder = Path(sys.argv[1])
def wait():
    (folder / os.environ["RANK"]).touch()
    while not all((folder / name).exists() for name in "012"): time.sleep(0.01)
def work():
    rank = int(os.environ["RANK"])
{body}
print("status", run_ranks(work, 3, logs=folder / "logs", saves={saves}), flush=True)
"""


class _Command:
    """`COMMAND` in a process of its own."""

    def __init__(self, folder: Path, body: str, *, saves: bool = True) -> None:
        self._folder, self._out, self._err = folder, folder / "out", folder / "err"
        code = COMMAND.replace("{body}", "\n".join(f"    {line}" for line in body.splitlines()))
        code = code.replace("{saves}", str(saves))
        (folder / "command.py").write_text(code)
        words = (str(folder / "command.py"), str(folder))
        self.process = fork(run_script, *words, folder=folder, env={}, out=self._out, err=self._err)

    def all_ranks_wait(self) -> None:
        while not all((self._folder / name).exists() for name in "012"):
            assert self.process.is_alive(), self._err.read_text()
            time.sleep(0.01)
        time.sleep(0.05)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid or 0, number)

    def finish(self) -> tuple[str, str]:
        """Output and errors."""
        join(self.process, 120)
        return self._out.read_text(), self._err.read_text()


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ("wait()", 0, ""),
        ("wait()\nreturn 75 if rank == 1 else 0", 75, ""),
        ("wait()\nraise ConfigError('steps: found 0')", 2, "hzero: error: steps: found 0\n"),
        ("wait()\nif rank == 1: raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), '/full/\\x1bfile')\ntime.sleep(60)", 1,
         "No space left on device: /full/\\x1bfile\nhzero: rank 1 failed; all ranks are ended\nhzero: logs of"),
        ("wait()\nif rank == 2: os.kill(os.getpid(), 9)\ntime.sleep(60)", 1,
         "hzero: rank 2 died: signal SIGKILL, perhaps out of memory; all ranks are ended\nhzero: logs of"),
        (  # who waited for another rank is not to blame, though its error comes first
            "wait()\nif rank == 0: raise PeerError('waited', [1])\ntime.sleep(0.3)\nif rank == 1: 1 / 0\ntime.sleep(60)",
            1,
            "ZeroDivisionError: division by zero\nhzero: rank 1 failed; all ranks are ended\n",
        ),
        ("wait()\nif rank == 1: sys.exit(3)\ntime.sleep(60)", 1, "hzero: rank 1 died: exit status 3; all ranks are end"),
    ],
    ids=["well", "unfinished", "refused", "full disk", "killed", "waited", "exit"],
)  # fmt: skip
def test_how_ranks_end(tmp_path: Path, body: str, status: int, told: str) -> None:
    out, err = _Command(tmp_path, body).finish()
    assert out == f"status {status}\n", err
    assert told in err and err.count("Traceback") <= 1 and len(err.splitlines()) <= 12, err
    assert bool(err) == bool(told)
    assert time.time() - (tmp_path / "0").stat().st_mtime < 30, "the others were not ended"


def test_rank_0_has_the_terminal_and_the_others_have_logs(tmp_path: Path) -> None:
    body = "wait()\nprint('rank', rank, 'of', os.environ['WORLD_SIZE'])\nos.write(2, b'y' * 300_000)"
    out, err = _Command(tmp_path, body).finish()
    assert out == "rank 0 of 3\nstatus 0\n" and err == "y" * 300_000
    assert "rank 2 of 3\n" in (tmp_path / "logs/rank2.log").read_text()


def test_a_log_that_is_a_link_or_a_pipe_is_not_written(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "victim").write_text("precious")
    (logs / "rank1.log").symlink_to(tmp_path / "victim")
    os.mkfifo(logs / "rank2.log")
    out, err = _Command(tmp_path, "wait()").finish()
    assert out == "status 0\n" and (tmp_path / "victim").read_text() == "precious"
    says = "; this rank writes to the terminal"
    kinds = {1: "a symbolic link", 2: "not a regular file"}.items()
    assert set(err.splitlines()) == {f"hzero: warning: {logs}/rank{rank}.log: {kind}{says}" for rank, kind in kinds}


#: As on a machine with accelerators: ranks are new processes. Three have none of their own.
SPAWNED = """
import functools, operator, os, sys, torch
from pathlib import Path
from hzero.tools.launch import run_ranks
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 2
for work in (functools.partial(operator.mul, 1, 75), functools.partial(operator.truediv, 1, 0)):
    print(run_ranks(work, 2, logs=Path(sys.argv[1])), flush=True)
print(run_ranks(functools.partial(os.system, "echo $DS_ACCELERATOR $CUDA_VISIBLE_DEVICES"), 3, logs=Path(sys.argv[1])))
"""


def test_ranks_with_an_accelerator_are_no_forks(tmp_path: Path) -> None:
    done = run_python("-c", SPAWNED, str(tmp_path))
    assert done.stdout == "75\n1\ncpu -1\n0\n", done.stderr
    assert "ZeroDivisionError: division by zero\nhzero: rank" in done.stderr
    assert done.stderr.endswith("hzero: 3 ranks run on CPUs, since this machine has 2 GPUs\n")


#: A trainer that saves upon a signal, as a rank finds it after its step.
SAVES = "told = []\nsignal.signal(signal.SIG{}, lambda *_: told.append(1))\nwait()\nwhile not told: time.sleep(0.01)\nreturn 75"
AGAIN = "Ctrl-C again ends them at once"


@pytest.mark.parametrize(
    ("sent", "body", "status"),
    [
        ([signal.SIGUSR1], SAVES.format("USR1"), 75),
        ([signal.SIGTERM], SAVES.format("TERM"), 75),
        ([signal.SIGINT], SAVES.format("TERM"), 130),
        ([signal.SIGUSR1], "wait()\ntime.sleep(60)", 75),  # before training
        ([signal.SIGTERM], "wait()\ntime.sleep(60)", 130),
        ([signal.SIGTERM], SAVES.format("TERM").replace("return", "if rank == 1: os.kill(os.getpid(), 9)\nreturn"), 1),
        ([signal.SIGINT] * 2, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwait()\ntime.sleep(60)", 130),
    ],
)
def test_signals(tmp_path: Path, sent: list[signal.Signals], body: str, status: int) -> None:
    command = _Command(tmp_path, body)
    command.all_ranks_wait()
    for number in sent:
        command.signal(number)
        time.sleep(0.3)
    out, err = command.finish()
    assert out == f"status {status}\n", err
    stopping = signal.SIGUSR1 not in sent
    said = f"hzero: stopping the ranks, which save if they train ({AGAIN})\n" * stopping
    assert err.partition(", perhaps")[0] == said + "hzero: rank 1 died: signal SIGKILL" * (status == 1)


def test_ranks_that_miss_one_which_sigterm_has_ended_are_interrupted(tmp_path: Path) -> None:
    """As measurements are, which save nothing: their command must not continue with the next one."""
    late = "signal.signal(signal.SIGTERM, lambda *_: 1 / 0)\nwait()\ntime.sleep(60)"
    command = _Command(tmp_path, late, saves=False)
    command.all_ranks_wait()
    command.signal(signal.SIGTERM)
    assert command.finish()[0] == "status 130\n"


def test_a_rank_that_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_ranks(lambda: 0, 2, logs=tmp_path)
    assert signal.getsignal(signal.SIGTERM) == before and not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def _all_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank lives on"
        time.sleep(0.02)


def test_no_rank_outlives_the_command(tmp_path: Path) -> None:
    command = _Command(tmp_path, "(folder / f'pid{rank}').write_text(str(os.getpid()))\nwait()\ntime.sleep(60)")
    command.all_ranks_wait()
    command.process.kill()
    _all_end([int((tmp_path / f"pid{rank}").read_text()) for rank in range(3)])


#: A rank under torchrun.
RANK = """
import os, sys, time
from hzero.tools.launch import launched
assert launched()
open(f"{sys.argv[1]}/{os.environ['RANK']}-{os.getpid()}", "w"), time.sleep(60)
"""


def test_ranks_end_with_the_agent_of_torchrun(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "ranks").mkdir()
    log = tmp_path / "log"
    words = ("--standalone", "--nproc-per-node=2", str(tmp_path / "rank.py"), str(tmp_path / "ranks"))
    agent = fork(torchrun, *words, folder=tmp_path, env={"OMP_NUM_THREADS": "1"}, out=log, err=log)
    while len(found := list((tmp_path / "ranks").iterdir())) < 2:
        assert agent.is_alive(), log.read_text()
        time.sleep(0.02)
    os.kill(agent.pid or 0, signal.SIGKILL)
    agent.join()
    _all_end([int(path.name.split("-")[1]) for path in found])


#: Forks from a process that was forked itself before PyTorch made its pool, as a rank is; threads of C need the pool at once.
POOL = """
import ctypes, os, sys, torch
from hzero.tools.launch import renew_thread_pool
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
torch.set_num_threads(1)
need = ctypes.cast(ctypes.CDLL(sys.argv[1])._ZN2at16init_num_threadsEv, ctypes.c_void_p)
pthread, threads = ctypes.CDLL(None), (ctypes.c_ulong * 8)()
for _ in range(30):
    if not os.fork():
        renew_thread_pool()
        for number in range(8):
            pthread.pthread_create(ctypes.byref(threads, 8 * number), None, need, None)
        for thread in threads:
            pthread.pthread_join(ctypes.c_ulong(thread), None)
        os._exit(0)
    if os.wait()[1]:
        sys.exit(1)
"""


def test_a_forked_rank_has_a_thread_pool_before_its_threads_come() -> None:
    """Without `renew_thread_pool` about one fork in three dies of PyTorch's "Invalid thread pool!"."""
    torch_cpu = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not hasattr(ctypes.CDLL(str(torch_cpu)), "_ZN2at16init_num_threadsEv"):
        pytest.skip("this build of PyTorch does not export at::init_num_threads")
    done = run_python("-c", POOL, str(torch_cpu))
    assert done.returncode == 0, done.stderr[-2000:]
