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
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from hzero.launch import die_with_parent, free_port, renew_thread_pool

#: Maximum wait of one collective in a check: a hang must fail, and soon.
HOP_TIMEOUT_S = int(os.environ.get("HZERO_CHECKS_HOP_TIMEOUT_S", "90"))
#: Process groups of a rank with which it ends, for new ranks to go on: each has a thread of gloo that wakes 100 times a second,
#: and what DeepSpeed's engines leave behind holds them. Hundreds of them took most of the cores.
MOST_GROUPS = 24
#: What carries the hops of checks.
TRANSPORT = os.environ.get("HZERO_CHECKS_TRANSPORT", "torch")


def begin_anew() -> None:
    """After waits that have failed on purpose: what ranks that are started again have. On all ranks."""
    if TRANSPORT == "mpi":
        from hzero.collectives.mpi_wires import MpiWires, shared_communicators

        for work in [work for wires in shared_communicators._made.values() for work in wires.under_way]:
            with contextlib.suppress(RuntimeError):  # what is left of them would fail later
                work.wait()
        MpiWires.broken = None
        shared_communicators._made.clear()
        dist.barrier()


def _run_rank(rank: int, checks: Sequence[str]) -> None:
    """Runs checks on one rank, the last of them in another process if there are many; leaves at the first that fails."""
    die_with_parent()
    faulthandler.enable()  # where the threads are when a signal ends the rank
    renew_thread_pool()
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    out = Path(os.environ["HZERO_CHECKS_OUT"])
    name = "start"
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=HOP_TIMEOUT_S))
        for module, name in (check.split(":") for check in checks):
            started, status, why = time.monotonic(), "passed", ""
            try:
                why = getattr(sys.modules[module], name)() or ""
            except pytest.skip.Exception as skipped:
                status, why = "skipped", str(skipped)
            # DeepSpeed, stock as well, leaves 1,500 objects of every engine behind, and collects garbage with every engine.
            gc.collect()
            gc.freeze()
            groups = torch.tensor([len(c10d._world.pg_map)])
            dist.all_reduce(groups, op=dist.ReduceOp.MAX)
            if rank == 0:
                done = {"check": name, "status": status, "why": why, "seconds": time.monotonic() - started}
                with open(out / "done", "a") as file:
                    file.write(json.dumps(done) + "\n")
            if TRANSPORT == "torch" and int(groups) > MOST_GROUPS:
                break  # new ranks go on
    except BaseException:
        failure = {"rank": rank, "check": name, "time": time.time(), "traceback": traceback.format_exc()}
        partial = out / f"partial{rank}"
        partial.write_text(json.dumps(failure))
        partial.rename(out / f"failed{rank}.json")
        print(failure["traceback"], flush=True)
        os._exit(1)
    dist.barrier()  # mpiexec ends all ranks with the first that leaves
    os._exit(0)


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
    done = 0
    while done < len(checks):
        _run_ranks(checks[done:])
        os.environ["MASTER_PORT"] = str(free_port())
        done = len((Path(os.environ["HZERO_CHECKS_OUT"]) / "done").read_text().splitlines())


def _run_ranks(checks: Sequence[str]) -> None:
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
            os._exit(1)  # whoever started us kills our group
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


if __name__ == "__main__":  # a rank of mpiexec, which does not let its ranks be forked
    _prepare(sys.argv[1:])
    _run_rank(int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]), sys.argv[1:])
