"""A plain loop that is stopped, or dies, in the way that the first argument names, in the folder of the second.

``hzero.newest_checkpoint`` and the engine decide where it goes on. Each rank notes its end in ``end<rank>``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import hzero
from hzero import manifest
from tests.deepspeed.training import ds_config, engine_of

way, folder = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
limit = 66.0 if way == "time" else 3600.0  # a save may take 60 s, half as long again, and leaving 5 s
stop = hzero.StopAndSave(time_limit=limit)
hzero.stop._REPEATED_S = 0.0  # type: ignore[attr-defined]
deepspeed.init_distributed("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 500), torch.nn.GELU(), torch.nn.Linear(500, 8))
engine = engine_of(ds_config({"preset": "lossless", "checkpoint": {}}), model)
if hzero.newest_checkpoint(folder) is not None:
    engine.load_checkpoint(str(folder))
    if rank == 0:
        print(f"goes on after step {engine.global_steps}", flush=True)

if way == "killed" and rank == 1:
    stock = manifest.HashedFile.write

    def dying(self: manifest.HashedFile, data: Any) -> int:
        """Dies in the middle of the second save."""
        if engine.global_steps == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return stock(self, data)

    manifest.HashedFile.write = dying  # type: ignore[method-assign]


def save() -> None:
    engine.save_checkpoint(str(folder))


with contextlib.ExitStack() as stack:
    stack.callback(
        lambda: (folder / f"end{rank}").write_text(f"{engine.global_steps} {stop.reason} {sys.exc_info()[1]!r}")
    )
    for step in range(engine.global_steps, 6):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        if step == 2 and rank == 1 and way == "signals":  # rank 0 gets none at all
            os.kill(os.getpid(), signal.SIGUSR1)
        engine.backward((engine(x) - x.roll(1, 1)).square().mean())
        engine.step()
        if step == 2 and rank > 0 and way == "signals":  # others, at another place of the same step
            os.kill(os.getpid(), signal.SIGTERM if rank == 2 else signal.SIGINT)
        if rank == 0:
            print(f"step {engine.global_steps}", flush=True)
        stop(save=save)
        if way == "killed":
            save()
    if rank == 0:
        print("trained", flush=True)
stop.close()
