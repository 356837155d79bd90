"""Memory of the trainer's steps on processors, beside what `hzero plan` says of them.

Processors have no allocator that counts, so every storage that torch's operators make is counted from its making until it is
freed, on the hops' thread too. Codecs' own scratch, gloo's buffers and what an operator frees before it returns are not seen.
Ranks are alike; rank 0's figures are printed.

    python benchmarks/memory.py [--presets zero1,topo] [--ranks 8]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import sys
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hzero
from hzero.collectives.pipeline import Pipeline
from hzero.launch import free_port
from hzero.model.footprint import Footprint, footprint
from hzero.plan.scenario import job_of
from hzero.settings.conf import compose, plain
from hzero.settings.settings import Settings
from hzero.train import loop
from hzero.train.data import Tokens
from hzero.train.stop import Stop

#: Steps before the one that is measured, in which DeepSpeed records the order of modules.
WARM_UP = 1
#: Buckets that are small beside the model, as those of large models are.
BUCKETS = [
    f"++deepspeed.zero_optimization.{key}=300000" for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size")
]
CASES = [
    (*settings, *more)
    for preset in ("zero1", "replica", "half", "topo", "zero3")
    for settings, more in (
        ((preset, 1, False), ()),
        ((preset, 2, False), ()),
        ((preset, 2, True), ()),
        ((preset, 2, False), ("train.dtype=bf16",)),
    )
]


class Storages:
    """Counts the bytes of storages that are alive, and remembers what was alive when most was.

    Args:
        states: Tensors of every state, by name. Everything else that forward and backward of the model make is
            ``activations``, and the rest ``buffers``.
    """

    def __init__(self, states: Callable[[], dict[str, list[torch.Tensor]]]) -> None:
        self._states = states
        self._alive: dict[int, tuple[int, str]] = {}
        self._by: Counter[str] = Counter()
        self._lock = threading.RLock()  # hops run on a thread; a storage may be freed while another one is added
        self.peak: Counter[str] = Counter()

    @property
    def alive(self) -> int:
        """Bytes that are alive."""
        return self._by.total()

    def reset(self) -> None:
        """Forgets the peak."""
        self.peak = Counter()

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what is made inside."""
        move = Pipeline._move

        def counted(pipeline: Pipeline) -> None:
            with _Watch(self):
                move(pipeline)

        with mock.patch.object(Pipeline, "_move", counted), _Watch(self):
            yield

    def add(self, tensor: Any) -> None:
        """Counts a tensor's storage, unless it is known."""
        if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            if not size or key in self._alive:
                return
            kind = _kind(sys._getframe(1))
            self._alive[key] = size, kind
            self._by[kind] += size
            weakref.finalize(storage, self._gone, key)
            if self._by.total() > self.peak.total():
                self.peak = self._named()

    def _gone(self, key: int) -> None:
        with self._lock:
            size, kind = self._alive.pop(key)
            self._by[kind] -= size

    def _named(self) -> Counter[str]:
        """What is alive, by state."""
        found = Counter(self._by)
        named: set[int] = set()
        for name, tensors in self._states().items():
            for key in {tensor.untyped_storage()._cdata for tensor in tensors} - named:
                if key in self._alive:
                    named.add(key)
                    size, kind = self._alive[key]
                    found[kind] -= size
                    found[name] += size
        return found


class _Watch(TorchDispatchMode):
    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            self._storages.add(leaf)
        return out


def _kind(frame: Any) -> str:
    """What an operator that this frame has called works for."""
    while frame is not None:
        file = frame.f_code.co_filename
        if "/hzero/collectives/" in file or "/hzero/zero/" in file or file.endswith("/zero/stage3.py"):
            return "buffers"
        frame = frame.f_back
    return "activations"


@dataclass(frozen=True)
class Measured:
    """Memory of one rank in one step of the trainer.

    Attributes:
        states: Measured bytes by the names of the plan's states; what is transient when most was there.
        bytes: All, when most was there.
        plan: What the plan says.
    """

    states: dict[str, int]
    bytes: int
    plan: Footprint

    def rows(self) -> list[tuple[str, int, int]]:
        """Planned and measured bytes of every state that is there, and of all."""
        planned = {state.name: state.bytes for state in self.plan.states}
        if self.plan.fullest == "the loss":
            planned["activations"] += planned["transient loss"]
        else:  # by then some are gone
            del planned["activations"]
        rows = [
            (name, planned[name], size)
            for name, size in self.states.items()
            if planned.get(name) or (size and name in planned)
        ]
        return [*rows, ("all", self.plan.bytes, self.bytes)]


def measure(overrides: list[str], world: int) -> Measured:
    """Trains some steps with the trainer's loop and measures the last one. Collective; the process group is up."""
    settings = Settings(plain(compose(overrides)), world_size=world)
    box: dict[str, Any] = {}
    storages = Storages(lambda: _states(box["engine"]) if "engine" in box else {})
    tokens = np.random.default_rng(0).integers(0, settings["model"]["vocab_size"], 1 << 16).astype(np.uint16)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(loop, "Sampler"),
            storages.counting(),
        ):
            trainer = loop.Loop(settings, Path(folder), Tokens(tokens, tokens, "", ""), None, Stop())
            box["engine"] = engine = trainer._engine
            for step in range(1, WARM_UP + 2):
                storages.reset()
                trainer._step(step)
            own = hzero.state(engine)
            assert own is not None and settings.plan is not None, "stock ZeRO-3 has no plan"
            own.settle()
            states = own.memory(engine.optimizer)
    finally:
        signal.signal(signal.SIGTERM, before)
    peak = storages.peak
    states |= {name: peak[name] for name in ("gradient buffer", "transient parameters", "activations")}
    job = job_of(settings, settings.itemsize)
    planned = footprint(settings.plan, settings.grid, job.model.numels, job, channels=0)
    engine.destroy()
    box.clear()
    return Measured(states, peak.total(), planned)


def _states(engine: Any) -> dict[str, list[torch.Tensor]]:
    """Tensors of what is kept, by the names of the plan's states."""
    own, optimizer = hzero.state(engine), engine.optimizer
    assert own is not None
    managed = own.weights._managed.values()
    adam = [value for state in optimizer.optimizer.state.values() for value in state.values()]
    return {
        "primary weights": [one.param.ds_tensor for one in managed],
        "resident weights": [tensor for one in managed for tensor in (one.payload, one.whole) if tensor is not None],
        "gradient shard": [optimizer.grad_partitions_flat_buffer],
        "gradient accumulators": own.gradients.accumulators(),
        "optimizer": [*optimizer.fp32_partitioned_groups_flat, *(x for x in adam if isinstance(x, torch.Tensor))],
        "gradient buffer": [one.buffer for one in optimizer.ipg_buckets.values() if one.buffer is not None],
        "transient parameters": [one.param.data for one in managed if one.param.ds_status.name == "AVAILABLE"],
    }


def overrides_of(preset: str, accumulation: int, checkpointing: bool, *more: str) -> list[str]:
    """The trainer's configuration of a case."""
    return [
        f"zero={preset}",
        f"train.grad_accumulation={accumulation}",
        f"train.activation_checkpointing={str(checkpointing).lower()}",
        *BUCKETS,
        *more,
    ]


def _rank(rank: int, world: int, port: int, cases: list[tuple[Any, ...]]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    loop.start_process_group(120)
    for case in cases:
        found = measure([*overrides_of(*case), f"topology.gcds_per_gpu={world // 4}"], world)
        if rank == 0:
            cells = [f"{name} {have / plan - 1 if plan else 0:+.1%}" for name, plan, have in found.rows()]
            print(" | ".join([*map(str, case), f"{found.plan.bytes:,}", f"{found.bytes:,}", *cells]), flush=True)
    torch.distributed.destroy_process_group()


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", help="of these alone, such as topo,half")
    parser.add_argument("--ranks", type=int, default=8, choices=(4, 8))
    parsed = parser.parse_args()
    chosen = parsed.presets.split(",") if parsed.presets else None
    cases = [case for case in CASES if chosen is None or case[0] in chosen]
    print("preset | micro-steps | checkpointing | ... | planned bytes | measured bytes | measured against planned")
    ranks = torch.multiprocessing.start_processes(
        functools.partial(_rank), (parsed.ranks, free_port(), cases), nprocs=parsed.ranks, start_method="fork"
    )
    assert ranks is None  # has joined
    return 0


if __name__ == "__main__":
    sys.exit(main())
