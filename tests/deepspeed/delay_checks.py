"""Training while every hop arrives late, each time differently: no hang and no changed bit. Run by test_stage.py on 8 ranks."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist

import hzero
from hzero.config import TIERS
from tests.deepspeed.training import AwkwardNet, batch, block_of, ds_config, engine_of, shared_folder

#: Optimizer steps in all, each a schedule of its own; ``HZERO_SCHEDULES=1000`` for a long run.
SCHEDULES = int(os.environ.get("HZERO_SCHEDULES", "6"))
DELAYS_S = (0.0, 0.0, 0.0005, 0.002)
#: Steps after which training restarts, so that the run without delays need not be as long.
CYCLE = 8

_AT_RANDOM: dict[str, Any] = {
    "codecs": {
        "weights": {tier: {"codec": "int8", "rounding": "stochastic"} for tier in TIERS},
        "gradients": {tier: {"codec": "int4", "rounding": "stochastic"} for tier in TIERS},
    },
    "error_feedback": ["inter_node"],
}
_DOUBLING = {
    "topology": {"nodes": 4, "packages_per_node": 1, "devices_per_package": 2},
    "node_all_gather": {"algorithm": "doubling", "below_bytes": 1 << 20},
    "checksum": True,
}
_GROUPS = {
    "topology": {"nodes": 4, "packages_per_node": 1, "devices_per_package": 2, "nodes_per_group": 2},
    "boundary_message_bytes": 200,
}
_ONE_GCD = {"topology": {"nodes": 2, "packages_per_node": 4, "devices_per_package": 1}}
#: What is trained: block, micro-batches per step, arguments of the model, and more of DeepSpeed's configuration.
CASES: list[tuple[dict[str, Any], int, dict[str, Any], dict[str, Any]]] = [
    (block_of("topo", **_AT_RANDOM), 2, {"checkpointing": "reentrant"}, {}),
    (block_of("zero3"), 2, {"checkpointing": "nonreentrant"}, {}),
    (block_of("lossless", boundary_message_bytes=0), 2, {}, {"bf16": {"enabled": True}}),
    (block_of("topo", **_DOUBLING), 2, {}, {}),
    (block_of("lossless", **_ONE_GCD), 3, {}, {"gradient_clipping": 0.5}),
    (block_of("topo", **_GROUPS), 1, {}, {"bf16": {"enabled": True}}),
]
#: Elements that DeepSpeed gathers ahead, by turns.
PREFETCHED = (700, 0, 5000)


@dataclass
class _Late:
    """What delays did.

    Attributes:
        delayed: Number of hops that arrived later than they did.
        overtaken: Number of hops that arrived before one that had started earlier.
        orders: The collectives of each communicator of this rank, in the order in which it started them.
    """

    delayed: int = 0
    overtaken: int = 0
    orders: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    numbers: Iterator[int] = field(default_factory=itertools.count)
    under_way: set[int] = field(default_factory=set)


@contextlib.contextmanager
def _late(seed: int, did: _Late) -> Iterator[None]:
    """Every hop of this rank arrives up to 2 ms later than it does, its own time later."""
    draw = random.Random(seed * 1000 + dist.get_rank())
    init, end = Pending.__init__, Pending.end

    def started(self: Any, collective: Any, *rest: Any) -> None:
        init(self, collective, *rest)
        text = re.sub(r"rank \d+ among", "among", str(collective))
        communicator = re.search(r"of (\w+) of .*(among \[.*\])", text)
        assert communicator, text
        did.orders[" ".join(communicator.groups())].append(text)
        delay = draw.choice(DELAYS_S)
        self.due, self.number = time.monotonic() + delay, next(did.numbers)
        did.delayed += delay > 0
        did.under_way.add(self.number)

    def ended_late(self: Any) -> None:
        end(self)
        time.sleep(max(self.due - time.monotonic(), 0))
        if self.number in did.under_way:
            did.overtaken += min(did.under_way) < self.number
            did.under_way.discard(self.number)

    with mock.patch.object(Pending, "__init__", started), mock.patch.object(Pending, "end", ended_late):
        yield


def _cycle(
    engine: Any, accumulation: int, folder: Path, delays: list[contextlib.AbstractContextManager[None]]
) -> list[tuple[list[float], list[torch.Tensor]]]:
    """This rank's losses and masters after each step of a training that is saved and loaded after the first step."""
    engine.load_checkpoint(str(folder), tag="start")
    own = hzero.state(engine)
    steps = []
    for step, delay in enumerate(delays):
        with delay:
            losses = []
            for micro in range(accumulation):
                loss = engine(batch(step, micro))
                losses.append(float(loss.detach()))
                engine.backward(loss)
                engine.step()
            if step == 0:
                engine.save_checkpoint(str(folder), tag="first")
                engine.load_checkpoint(str(folder), tag="first")
            own.settle()
        # As bits: DeepSpeed leaves the padding of a shard as it finds it, and that may be NaN.
        masters = engine.optimizer.fp32_partitioned_groups_flat
        steps.append((losses, [flat.detach().clone().view(torch.int32) for flat in masters]))
    return steps


def check_late_hops_change_no_bit() -> str:
    """Losses and masters after every step are those without delays; the ranks of a communicator start the same collectives."""
    did, seeds = _Late(), itertools.count(int(os.environ.get("HZERO_FIRST_SCHEDULE", "0")))
    for index, (block, accumulation, of_model, more) in enumerate(CASES):
        ahead = PREFETCHED[index % len(PREFETCHED)]
        zero = {"stage": 3, "stage3_prefetch_bucket_size": ahead, "reduce_bucket_size": 700}
        schedules = len(range(index, SCHEDULES, len(CASES)))
        model = AwkwardNet(**of_model)
        deepspeed.utils.set_z3_leaf_modules(model, [torch.nn.LayerNorm])
        engine = engine_of(ds_config(block, accumulation, zero_optimization=zero, **more), model)
        folder = shared_folder()
        engine.save_checkpoint(str(folder), tag="start")
        want = _cycle(engine, accumulation, folder, [contextlib.nullcontext()] * min(CYCLE, schedules))
        for first in range(0, schedules, CYCLE):
            delays = [_late(next(seeds), did) for _ in range(first, min(first + CYCLE, schedules))]
            late = _cycle(engine, accumulation, folder, delays)
            for step, ((losses, masters), (want_losses, want_masters)) in enumerate(zip(late, want)):
                assert losses == want_losses, (block, first + step, losses, want_losses)
                assert all(map(torch.equal, masters, want_masters)), (block, first + step)
        engine.destroy()
    digests = {name: hashlib.sha256("\n".join(order).encode()).hexdigest() for name, order in did.orders.items()}
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, digests)
    for rank, theirs in enumerate(everyones):
        for name in digests.keys() & theirs.keys():
            assert digests[name] == theirs[name], f"rank {rank} starts the collectives of {name} in another order"
    assert len(digests) >= 6, digests
    assert did.delayed > 0 and did.overtaken > 0 and not did.under_way, did
    return f"{SCHEDULES} schedules: {did.delayed} hops of a rank late, {did.overtaken} in front of an earlier one"
