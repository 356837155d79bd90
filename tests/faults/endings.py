"""Ends ranks inside an accumulation window in several ways, and prints the exit statuses of each as a JSON line.

A way has two ranks, forked from this process, which has imported everything. They run to the end of the interpreter.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
import deepspeed
import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group  # before hzero can replace it

import hzero.deepspeed  # noqa: F401  # or each rank would import it
from hzero import errors
from hzero.comm import Communicator, watchdog
from hzero.comm.wires import process_group
from hzero.errors import ConfigError, of_all_ranks
from hzero.tools.launch import free_port
from tests.deepspeed import training

#: Weak references to messages, whose callbacks gloo's threads call.
messages: list[Any] = []
WAYS = ("destroy", "bound", "engines", "nothing", "all raise", "rank 0 raises", "rank 1 raises", "peers never come")


def engine_of(preset: str) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 500), torch.nn.GELU(), torch.nn.Linear(500, 8))
    block = {"preset": preset, "topology": {"nodes": 1, "packages_per_node": 1, "devices_per_package": 2}}
    return training.engine_of(training.ds_config(block, 2), model)


def drop_late() -> None:
    """Lets gloo's thread drop a message while the script ends: rank 0's takes a second for that."""
    dropping = threading.Event()

    def slowly(_: Any) -> None:
        dropping.set()
        for _ in range(100):
            time.sleep(0.01)

    group = process_group(("late", "intra_package"), [0, 1], timedelta(seconds=20))
    message = torch.zeros(8, dtype=torch.uint8)
    if dist.get_rank() == 0:
        messages.append(weakref.ref(message, slowly))
    else:
        time.sleep(0.2)  # so rank 0 has forgotten its message when this one arrives
    dist.all_gather_into_tensor(torch.empty(16, dtype=torch.uint8), message, group=group, async_op=True)
    del message
    if dist.get_rank() == 0:
        dropping.wait()


def leave_hops() -> None:
    """Ends both ranks with a message in flight that nobody sends, rank 1 before that hop's timeout."""
    grid = {"nodes": 1, "packages_per_node": 1, "devices_per_package": 2}
    ranks = Communicator({"topology": grid}, timeout=timedelta(seconds=5), uses=["messages"])
    ranks.recv(torch.empty(8), 1 - dist.get_rank(), async_op=True)
    if dist.get_rank():
        raise KeyboardInterrupt
    sys.exit(3)


def name_threads() -> None:
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("hzero")]
    print(f"threads at exit: {names}", file=sys.stderr)


def train(way: str) -> None:
    deepspeed.init_distributed("gloo")
    if way == "peers never come":
        leave_hops()
    engines = [engine_of("topo" if way == "nothing" else "lossless") for _ in range(2 if way == "engines" else 1)]
    for number in range(5):
        for engine in engines:
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
            if number == 3 and way == f"rank {dist.get_rank()} raises":
                raise ValueError("on rank 1\nalone") if dist.get_rank() else of_all_ranks(ConfigError("on rank 0"))
            engine.backward((engine(x) - x.roll(1, 1)).square().mean())
            engine.step()
    if way in ("destroy", "nothing", "all raise"):
        drop_late()
    if way == "all raise":
        raise ValueError("on all ranks")
    if way == "bound":
        destroy_process_group()
    elif way in ("destroy", "engines"):
        if way == "engines":
            engines[0].destroy()
        dist.destroy_process_group()


watchdog.PERIOD_S, errors.WAIT_S = 0.2, 3.0
torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
gc.freeze()
for way in WAYS:
    os.environ["MASTER_PORT"] = str(free_port())
    ranks = {}
    for rank in range(2):
        pid = os.fork()
        if not pid:
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
            atexit.register(name_threads)  # the first one, which is called last
            train(way)
            sys.exit()
        ranks[pid] = rank
    statuses = [0, 0]
    for _ in ranks:
        pid, status = os.wait()
        statuses[ranks[pid]] = os.waitstatus_to_exitcode(status)
    print(json.dumps([way, statuses]), flush=True)
