"""The ranks of `tests.ranks.launch`: one process imports the checks and forks the ranks."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from hzero.tools.launch import die_with_parent, renew_thread_pool

#: Maximum wait of one collective in a check: a hang must fail, and soon.
HOP_TIMEOUT_S = int(os.environ.get("HZERO_CHECKS_HOP_TIMEOUT_S", "90"))
#: What carries the hops of checks.
TRANSPORT = os.environ.get("HZERO_CHECKS_TRANSPORT", "torch")
#: Where the ranks compute. With `cuda` all of them use one GPU.
DEVICE = os.environ.get("HZERO_CHECKS_DEVICE", "cpu")


def begin_anew() -> None:
    """After waits that have failed on purpose: what ranks that are started again have. On all ranks."""
    if TRANSPORT == "mpi":
        from hzero.comm import mpi_wires

        for work in [work for wires in mpi_wires.made.values() for work in wires.under_way]:
            with contextlib.suppress(RuntimeError):  # their rest would fail later
                work.wait()
        mpi_wires.MpiWires.broken = None
        mpi_wires.made.clear()
        dist.barrier()


def same_on_all_ranks(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> bool:
    """Whether all ranks hold the same bits; of several groups, all ranks of each."""
    mine = torch.cat([t.detach().reshape(-1).contiguous().view(torch.uint8) for t in tensors])
    first = mine.clone()
    dist.broadcast(first, 0 if group is None else dist.get_global_rank(group, 0), group=group)
    equal = torch.tensor([int(torch.equal(first, mine))])
    dist.all_reduce(equal, op=dist.ReduceOp.MIN)
    return bool(equal.item())


def _share_gloos_thread() -> None:
    """One thread moves the messages of all groups of this rank.

    torch gives each group a thread that wakes 100 times a second. DeepSpeed's engines make a dozen groups and leave them behind,
    and with hundreds of such threads a third of two cores went to waking them. If that thread preempts a sender, which holds
    a lock, it spins until the sender runs again: a batch thread preempts nobody.
    """
    gloo, before = c10d.ProcessGroupGloo, set(os.listdir("/proc/self/task"))
    stock, device = gloo.__init__, gloo.create_default_device()
    for thread in set(os.listdir("/proc/self/task")) - before:
        os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))

    def sharing(self: Any, store: dist.Store, rank: int, size: int, timeout: Any, **_: Any) -> None:
        options = gloo._Options() if isinstance(timeout, timedelta) else timeout  # of hzero, which shares a thread too
        if options is not timeout:
            options._devices, options._timeout = [device], timeout
        stock(self, store, rank, size, options)

    gloo.__init__ = sharing


def _run_rank(rank: int, checks: Sequence[str]) -> None:
    """Runs checks on one rank; leaves at the first that fails."""
    die_with_parent()
    faulthandler.enable()  # where the threads are when a signal ends the rank
    renew_thread_pool()
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    if DEVICE == "cuda":  # NCCL refuses two ranks on a GPU of one host: each names another host
        os.environ.update(LOCAL_RANK="0", NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo")
        torch.cuda.set_device(0)
    out = Path(os.environ["HZERO_CHECKS_OUT"])
    name = "start"
    try:
        _share_gloos_thread()
        backend = "gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, timeout=timedelta(seconds=HOP_TIMEOUT_S))
        for module, name in (check.split(":") for check in checks):
            started, status, why = time.monotonic(), "passed", ""
            try:
                why = _check_of(sys.modules[module], name)() or ""
            except pytest.skip.Exception as skipped:
                status, why = "skipped", str(skipped)
            # DeepSpeed, stock as well, leaves 1,500 objects of every engine behind, and collects garbage with every engine.
            gc.collect()
            gc.freeze()
            dist.barrier()
            if rank == 0:
                done = {"check": name, "status": status, "why": why, "seconds": time.monotonic() - started}
                with open(out / "done", "a") as file:
                    file.write(json.dumps(done) + "\n")
    except BaseException:
        failure = {"rank": rank, "check": name, "time": time.time(), "traceback": traceback.format_exc()}
        partial = out / f"partial{rank}"
        partial.write_text(json.dumps(failure))
        partial.rename(out / f"failed{rank}.json")
        print(failure["traceback"], flush=True)
        os._exit(1)
    dist.barrier()  # mpiexec ends all ranks with the first that leaves
    os._exit(0)


def _check_of(module: Any, name: str) -> Callable[[], Any]:
    """A function of a module of checks, or of its tables."""
    for table in (getattr(module, "ROWS", None), getattr(module, "LONG_ROWS", None)):
        if isinstance(table, dict) and name in table:
            return table[name]
    return getattr(module, name)


def _prepare(checks: Sequence[str]) -> None:
    """Imports the modules of checks."""
    torch.set_num_threads(1)  # no thread pool may be up when we fork
    torch.set_printoptions(threshold=0, edgeitems=1)  # DeepSpeed makes a text of every parameter
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    for check in checks:
        importlib.import_module(check.split(":")[0])
    gc.freeze()  # DeepSpeed collects garbage with every engine: imported objects need not be searched


def run_checks(checks: Sequence[str]) -> None:
    """Imports the modules of checks ``MODULE:CHECK``, forks the ranks, and ends all of them when one fails."""
    _prepare(checks)
    children = {}
    for rank in range(int(os.environ["WORLD_SIZE"])):
        pid = os.fork()
        if pid == 0:
            _run_rank(rank, checks)
        children[pid] = rank
    while children:
        pid, status = os.wait()
        if status:
            time.sleep(0.5)  # the one that failed first may not be the one that ended first
            with contextlib.suppress(ChildProcessError):  # no more of them
                while pid:
                    _tell_of_signal(children[pid], status)
                    pid, status = os.waitpid(-1, os.WNOHANG)
            os._exit(1)  # the parent kills this group
        del children[pid]


def _tell_of_signal(rank: int, status: int) -> None:
    """Leaves the failure of a rank that a signal has ended, in front of those of ranks that have lost it."""
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        print(f"rank {rank}: ended by {name}", flush=True)
        failure = {"rank": rank, "time": 0.0, "traceback": f"ended by {name}\n{_end_of_log()}"}
        (Path(os.environ["HZERO_CHECKS_OUT"]) / f"failed{rank}.json").write_text(json.dumps(failure))


def _end_of_log() -> str:
    sys.stdout.flush()
    return (Path(os.environ["HZERO_CHECKS_OUT"]) / "ranks.log").read_text()[-6000:]


if __name__ == "__main__":  # a rank of mpiexec, which does not let its ranks be forked, or of a GPU
    _prepare(sys.argv[1:])
    ranks = (os.environ.get(name) for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK"))
    _run_rank(int(next(filter(None, ranks))), sys.argv[1:])
