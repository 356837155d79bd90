"""Training while every hop arrives late, each time differently: no hang and no changed bit. Run by test_stage.py on 8 ranks."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist

from hzero.collectives.transport import Pending
from hzero.config import TIERS
from tests.zero.training import AwkwardNet, block_of, ds_config, engine_of, masters_of, shared_folder, train

#: Optimizer steps in all, each a schedule of its own; ``HZERO_SCHEDULES=1000`` for a long run.
SCHEDULES = int(os.environ.get("HZERO_SCHEDULES", "6"))
DELAYS_S = (0.0, 0.0, 0.0005, 0.003)

_AT_RANDOM: dict[str, Any] = {
    "codecs": {
        "weights": {tier: {"codec": "int8", "rounding": "stochastic"} for tier in TIERS},
        "gradients": {tier: {"codec": "int4", "rounding": "stochastic"} for tier in TIERS},
    },
    "error_feedback": ["node"],
}
#: What is trained: block, micro-steps per step, and arguments of the model.
CASES: list[tuple[dict[str, Any], int, dict[str, Any]]] = [
    (block_of("topo", **_AT_RANDOM), 2, {"checkpointing": "reentrant"}),
    (block_of("zero3"), 2, {"checkpointing": "nonreentrant"}),
]


@contextlib.contextmanager
def _late(seed: int) -> Iterator[None]:
    """Every hop of this rank arrives up to 3 ms later than it does, its own time later."""
    draw = random.Random(seed * 1000 + dist.get_rank())
    init, arrived, announce = Pending.__init__, Pending.arrived, Pending.announce

    def started(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self.due = time.monotonic() + draw.choice(DELAYS_S)

    def arrived_late(self: Any) -> bool:
        return time.monotonic() >= self.due and arrived(self)

    def announced_late(self: Any, wake: Callable[[], None]) -> None:
        announce(self, lambda: threading.Timer(max(self.due - time.monotonic(), 0.0), wake).start())

    with (
        mock.patch.object(Pending, "__init__", started),
        mock.patch.object(Pending, "arrived", arrived_late),
        mock.patch.object(Pending, "announce", announced_late),
    ):
        yield


def _run(case: tuple[dict[str, Any], int, dict[str, Any]], steps: int, tag: str) -> tuple[list[float], Any]:
    """Losses and master weights of a run that is saved and loaded in its middle."""
    block, accumulation, of_model = case
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 400, "reduce_bucket_size": 400}
    model = AwkwardNet(**of_model)
    deepspeed.utils.set_z3_leaf_modules(model, [torch.nn.LayerNorm])
    engine = engine_of(ds_config(block, accumulation, zero_optimization=zero), model)
    losses = train(engine, steps // 2, accumulation)
    folder = shared_folder()
    engine.save_checkpoint(str(folder), tag=tag)
    engine.load_checkpoint(str(folder), tag=tag)
    losses += train(engine, steps - steps // 2, accumulation, first=steps // 2)
    masters = masters_of(engine)
    engine.destroy()
    return losses, masters


def check_late_hops_change_no_bit() -> None:
    steps = max(SCHEDULES // len(CASES), 2)
    for index, case in enumerate(CASES):
        want, want_masters = _run(case, steps, "on-time")
        with _late(index):
            losses, masters = _run(case, steps, "late")
        assert losses == want, case
        for name, master in masters.items():
            assert torch.equal(master, want_masters[name]), (case, name)
