"""The launcher's processes, which are no ranks here."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hzero.launcher import GRACE_S, INTERRUPTED, STARTED, UNFINISHED, Ranks, local_ranks
from tests.forks import fork, torchrun
from tests.ranks import ROOT


def test_an_interruption_while_ranks_are_started_ends_them_at_once(tmp_path: Path) -> None:
    """Ranks that were not started yet are not, and none is left to be waited for."""
    given = 0

    def environments() -> Iterator[Mapping[str, str]]:
        nonlocal given
        for given in range(1, 6):
            yield dict(os.environ)
            if given == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    started: Any = environments()
    begun = time.monotonic()
    command = [sys.executable, "-c", "import time; time.sleep(120)"]
    ranks = Ranks(command, started, tmp_path, start_timeout=60, say=lambda message: None)
    assert ranks.run() == INTERRUPTED
    assert given == 3 and len(list(tmp_path.glob("rank*.log"))) == 2
    assert time.monotonic() - begun < GRACE_S / 2


def _launched(folder: Path, body: str, ranks: int = 2) -> tuple[int, str]:
    """Status and what the user is told of ranks that do the work ``body``, where ``rank`` is the rank."""
    said: list[str] = []
    start = "import os, sys, time, errno\nfrom hzero.launcher import *\nfrom hzero.reasons import *\n"
    code = f"{start}rank = int(os.environ['RANK'])\ndef work():\n{body}\nrun_rank(work)"
    command = [sys.executable, "-c", code]
    environments = [{**os.environ, "RANK": str(rank), "PYTHONPATH": str(ROOT)} for rank in range(ranks)]
    status = Ranks(command, environments, folder, start_timeout=60, say=said.append).run()
    return status, "\n".join(said)


def test_a_signal_is_passed_on_once_the_work_has_begun_and_unfinished_work_is_no_failure(tmp_path: Path) -> None:
    """Ranks that end as unfinished one after the other; a signal that came before they could take it waits."""
    wait = "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75)); open(sys.argv[1], 'w'); signal.pause()"
    command = [sys.executable, "-c", wait, str(tmp_path / STARTED)]
    environments: Any = (os.kill(os.getpid(), signal.SIGUSR1) or dict(os.environ) for _ in range(1))
    assert Ranks(command, environments, tmp_path, passed_on=(signal.SIGUSR1,)).run() == UNFINISHED
    status, said = _launched(tmp_path, " time.sleep(rank / 10)\n return 75 * (1 - rank)")
    assert (status, said) == (UNFINISHED, "")


def test_a_full_disk_does_not_hide_the_cause(tmp_path: Path) -> None:
    """No log can be written, and the reason is one line; what a rank printed before it was killed is there too."""
    for rank in range(2):
        (tmp_path / f"rank{rank}.log").mkdir()
    full = (
        " print('step 3', file=sys.stderr)\n"
        " if rank: raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), '/full/metrics.jsonl')\n time.sleep(60)"
    )
    status, said = _launched(tmp_path, full)
    lines = said.splitlines()
    assert status == 1 and lines[0] == "No space left on device: /full/metrics.jsonl", said
    assert lines[1] == "hzero: rank 1 failed; all ranks are ended" and len(lines) == 3, said
    assert (tmp_path / "rank1.traceback").read_text() == lines[0]
    status, said = _launched(tmp_path, " print('step 3', file=sys.stderr)\n os.kill(os.getpid(), 9)")
    assert status == 1 and "step 3" in said and "died: signal SIGKILL" in said, said


def test_a_rank_that_is_stopped_is_named(tmp_path: Path) -> None:
    """Whoever else ended, and without a reason."""
    said: list[str] = []
    script = "if [ $RANK = 1 ]; then kill -STOP $$; else sleep 0.5; exit 1; fi"
    ranks = Ranks(["sh", "-c", script], local_ranks(2), tmp_path, say=said.append)
    assert ranks.run() == 1
    assert "hzero: rank 0 died: exit status 1; stopped (SIGSTOP): ranks [1]; all ranks are ended" in said


def test_who_waited_for_another_rank_is_not_to_blame(tmp_path: Path) -> None:
    waited = " if rank == 0: raise PeerError('hzero: waited for rank 2 (host h)', [2])\n"
    status, said = _launched(tmp_path, waited + " time.sleep(60)")
    assert (status, said.splitlines()[:2]) == (
        1,
        ["hzero: waited for rank 2 (host h)", "hzero: rank 2 did not come; all ranks are ended"],
    )
    # Its own error says more, though it comes later. It is cut in the middle, so that no pipe is full.
    up = f" up = {str(tmp_path / 'up')!r}\n if rank: open(up, 'w')\n while not os.path.exists(up): time.sleep(0.01)\n"
    status, said = _launched(tmp_path, f"{up}{waited} time.sleep(0.2)\n raise ValueError('x' * 200_000)")
    assert status == 1 and "rank 1 failed" in said and "Traceback" in said and 10_000 < len(said) < 11_000


def test_what_ranks_print_is_in_their_logs(tmp_path: Path) -> None:
    (tmp_path / "rank1.log").write_text("of an earlier run")
    status, said = _launched(tmp_path, " os.write(2, b'y' * 300_000 + b'end')")
    assert (status, said) == (0, "")
    assert [(tmp_path / f"rank{rank}.log").read_text() for rank in range(2)] == ["y" * 300_000 + "end"] * 2


#: Forks from a process that was forked itself before PyTorch made its pool, as a rank is; threads of C need the pool at once.
POOL = """
import ctypes, os, sys, torch
from hzero.launcher import renew_thread_pool
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
torch.set_num_threads(1)
need = ctypes.cast(ctypes.CDLL(sys.argv[1])._ZN2at16init_num_threadsEv, ctypes.c_void_p)
pthread, threads = ctypes.CDLL(None), (ctypes.c_ulong * 8)()
for _ in range(100):
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
    done = subprocess.run(
        [sys.executable, "-c", POOL, torch_cpu], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


#: A rank of `hzero train` under torchrun, which gets no further than to its settings.
RANK = """
import ctypes, os, sys, time
from omegaconf import OmegaConf
from hzero.bootstrap import bootstrap
from hzero.train import application
application.Settings = lambda *args, **named: (open(f"{sys.argv[1]}/{os.environ['RANK']}-{os.getpid()}", "w"), time.sleep(60))
ctypes.CDLL(None).prctl(1, 0)  # torch's forks end with their agent, and ranks that torchrun starts as programs do not
os.environ.update(bootstrap().environment())
application._train_as_rank(OmegaConf.create({}), 0.0)
"""


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for whoever adopted it."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_ranks_end_with_the_agent_that_started_them(tmp_path: Path) -> None:
    """torchrun's agent is killed, so it cannot end its ranks. Each of them notices by itself."""
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "ranks").mkdir()
    log = tmp_path / "log"
    words = ("--standalone", "--nproc-per-node=2", str(tmp_path / "rank.py"), str(tmp_path / "ranks"))
    agent = fork(torchrun, *words, folder=tmp_path, env={"OMP_NUM_THREADS": "1"}, out=log, err=log)
    while len(found := list((tmp_path / "ranks").iterdir())) < 2:
        assert agent.is_alive(), log.read_text()
        time.sleep(0.02)
    pids = [int(path.name.split("-")[1]) for path in found]
    os.kill(agent.pid or 0, signal.SIGKILL)
    agent.join()
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank lives on"
        time.sleep(0.02)
    assert log.read_text().count("ends, since the process that started it") == 2, log.read_text()
