"""One rank of a measurement, forked by `benchmarks.compare.take`.

All schemes live in the same ranks and take turns step by step, so that anything else on the machine affects all of them. Another
checkout can run this file with its own packages, so it imports little, and nothing of hzero. It holds all that measures, so that
both are measured alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import gzip
import io
import json
import math
import pickle
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

from benchmarks.cluster.counters import sent
from benchmarks.cluster.ranks import run_ranks
from benchmarks.cluster.shape import Cluster
from benchmarks.compare import schemes
from benchmarks.compare.scheme import Job, Scheme
from benchmarks.training import batch, layer_numel, learning_rate, prepare, start_rank

_ALL_THREADS = _ExperimentalConfig(profile_all_threads=True)
_PERIOD_S = 0.0005


@dataclass(frozen=True)
class Work:
    """What a rank measures.

    Attributes:
        config: Of the measurement.
        catalog: Entries of its schemes.
        tokens: File of token ids.
        traces: Folder for traces, or None.
        after_s: Seconds that other measurements will take afterwards.
        result: File that rank 0 writes.
        peers: By rank, the socket of this rank's turns with the same rank of another checkout.
        theirs: Whether the schemes of the other checkout, ``NAME@COMMIT``, are the ones to measure.
    """

    config: dict[str, Any]
    catalog: dict[str, Any]
    tokens: Path
    traces: Path | None
    after_s: float
    result: Path
    peers: tuple[int, ...] = ()
    theirs: bool = False


def run(work: Work) -> int:
    """Runs all ranks; returns 0, or another status if one failed."""
    cluster = Cluster.model_validate(work.config["cluster"])
    return run_ranks(cluster, functools.partial(measure, work), work.result.parent, work.config["threads"])


def measure(work: Work) -> None:
    """Measures; rank 0 writes the results of all ranks."""
    start_rank(work.config["threads"], work.config["timeout_s"])
    turns = _Turns(work)
    turns.build()
    turns.measure()
    results = turns.results()
    if dist.get_rank() == 0:
        work.result.write_text(json.dumps(results))
    dist.barrier()


class _Turns:
    """All schemes of one measurement on this rank."""

    def __init__(self, work: Work) -> None:
        self._work, self._config = work, work.config
        self._turns: list[str] = self._config["schemes"]
        self._names = [name for name in self._turns if ("@" in name) == work.theirs]
        model, grid = self._config["model"], Cluster.model_validate(self._config["cluster"]).grid
        self._job = Job(model, self._config["train"], grid, bucket_numel=layer_numel(model))
        self._ids = np.load(work.tokens, mmap_mode="r")
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._peer = socket.socket(fileno=work.peers[self._rank]) if work.peers else None
        if self._peer is not None:
            self._peer.settimeout(self._config["timeout_s"])
        self._schemes: dict[str, Scheme] = {}
        self._losses: dict[str, list[Any]] = {name: [] for name in self._names}
        self._times: dict[str, list[float]] = {name: [] for name in self._names}
        self._sent: dict[str, dict[str, int]] = {name: {} for name in self._names}
        self._cpu_s: dict[str, float] = dict.fromkeys(self._names, 0.0)
        self._measured: dict[str, dict[str, Any]] = {name: {} for name in self._names}
        self._load: list[tuple[float, float]] = []

    def build(self) -> None:
        """Builds every scheme and warms it up; notes its memory and traces one of its steps."""
        for index, name in enumerate(self._turns):
            self._say(f"building {name} ({index + 1}/{len(self._turns)})")
            self._turn(name, self._build)

    def _build(self, name: str) -> None:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            self._warm_up(name)
        print(said.getvalue(), end="", file=sys.stderr, flush=True)
        self._measured[name]["said"] = [line for line in said.getvalue().splitlines() if line.startswith("hzero: ")]

    def _warm_up(self, name: str) -> None:
        before = sum(live_storages().values())
        self._schemes[name] = schemes.build(self._work.catalog[name], self._job)
        for step in range(self._config["warmup"]):
            if step == 1 and self._rank == 0:
                with Heap() as heap:
                    self._step(name)
                self._measured[name]["peak"] = heap.peak
            elif (
                step == 1 and self._rank == self._world - 1 and self._work.traces
            ):  # whose heap has the profiler's records
                traced(functools.partial(self._step, name), self._work.traces / f"{name}.json.gz")
            else:
                self._step(name)
        kept = sum(live_storages().values()) - before
        self._measured[name]["memory"] = {**self._schemes[name].memory(), "kept": kept}

    def _turn(self, name: str, act: Callable[[str], None]) -> None:
        """Acts on a scheme of this checkout, or waits until the same rank of the other checkout has acted on one of its."""
        if name in self._names:
            act(name)
            if self._peer is not None:
                self._peer.sendall(b".")
        elif self._peer is not None:
            with contextlib.suppress(TimeoutError):
                if self._peer.recv(1):
                    return
            raise RuntimeError(f"{name}: the other checkout's rank has ended, or has not acted within timeout_s")

    def measure(self) -> None:
        """Rounds of timed steps, in which all schemes take their turn."""
        for name in self._names:
            self._schemes[name].start_counting()
        rounds, begun = self._config["rounds"], time.monotonic()
        for index in range(rounds):
            stolen, total = _stolen()
            for name in self._turns if index % 2 == 0 else self._turns[::-1]:
                self._turn(name, self._timed_step)
            stolen, total = (after - before for after, before in zip(_stolen(), (stolen, total)))
            self._load.append((stolen / max(total, 1), _copy_gb_s() if self._rank == 0 else 0.0))
            done = time.monotonic() - begun
            left = done / (index + 1) * (rounds - index - 1)
            after = (
                f", about {timedelta(seconds=round(left + self._work.after_s))} of all" if self._work.after_s else ""
            )
            self._say(f"round {index + 1}/{rounds}, {timedelta(seconds=round(left))} left{after}")

    def _timed_step(self, name: str) -> None:
        before = sent()
        dist.barrier()
        started, worked = time.perf_counter(), time.process_time()
        self._step(name)
        dist.barrier()
        self._times[name].append(time.perf_counter() - started)
        self._cpu_s[name] += time.process_time() - worked
        total = self._sent[name]
        for tier, count in sent().items():
            total[tier] = total.get(tier, 0) + count - before[tier]

    def _step(self, name: str) -> None:
        train, step = self._config["train"], len(self._losses[name]) + 1
        size, length = train["micro_batch"], self._config["model"]["seq_length"]
        batches = []
        for micro in range(train["accumulation"]):
            first = (micro * self._world + self._rank) * size
            batches.append(torch.from_numpy(batch(self._ids, (train["seed"], step), first, size, length)))
        self._losses[name].append(self._schemes[name].step(batches, learning_rate(train, step)))

    def results(self) -> dict[str, Any]:
        """Results of all ranks by scheme, on rank 0."""
        losses = torch.stack([torch.stack(self._losses[name]) for name in self._names])
        dist.all_reduce(losses)
        mine = {
            name: {
                "sent": self._sent[name],
                "memory": self._measured[name]["memory"],
                "cpu_s": self._cpu_s[name],
            }
            for name in self._names
        }
        everyones: list[Any] = [None] * self._world
        dist.all_gather_object(everyones, mine)
        rounds = self._config["rounds"]
        found = {}
        for index, name in enumerate(self._names):
            memory = {key: max(one[name]["memory"][key] for one in everyones) for key in mine[name]["memory"]}
            sent = [one[name]["sent"] for one in everyones]
            found[name] = {
                "parameters": self._schemes[name].parameters,
                "step_s": self._times[name],
                "load": self._load,
                "said": self._measured[name]["said"],
                "losses": [value if math.isfinite(value) else None for value in (losses[index] / self._world).tolist()],
                "measured": {tier: sum(one[tier] for one in sent) / rounds for tier in sent[0]},
                "busiest": {tier: self._busiest(tier, [one[tier] for one in sent]) / rounds for tier in sent[0]},
                "cpu_s": sum(one[name]["cpu_s"] for one in everyones) / rounds,
                "fetches": self._schemes[name].fetches(),
                "memory": {**memory, "peak": self._measured[name].get("peak")},
            }
        return found

    def _busiest(self, tier: str, sent: list[int]) -> int:
        """Bytes over the busiest link of a tier: a rank's own inside nodes, a node's trunk between them."""
        share = self._job.grid.scope_size("node") if tier == "inter_node" else 1
        return max(sum(sent[first : first + share]) for first in range(0, self._world, share))

    def _say(self, message: str) -> None:
        if self._rank == 0 and not self._work.theirs:
            print(f"  {message}", flush=True)


# ---- load of the machine -----------------------------------------------------------------------------------------------


def _stolen() -> tuple[int, int]:
    """Ticks that a hypervisor has taken from this machine, and all ticks."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[7], sum(ticks)


def _copy_gb_s() -> float:
    """GB/s of the best of three copies of 32 MB, while the other ranks wait: less where others use the machine."""
    source, taken = torch.ones(32_000_000, dtype=torch.uint8), []
    target = torch.empty_like(source)
    for _ in range(3):
        started = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - started)
    return float(source.numel() / 1e9 / min(taken))


# ---- memory and trace of a step ----------------------------------------------------------------------------------------


def live_storages() -> dict[int, int]:
    """Bytes of every storage that a tensor of this process keeps, by address; memory that only C++ holds is not counted."""
    gc.collect()
    found: dict[int, int] = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor):
            for tensor in _plain(item):
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return found


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    for one in (local, local.grad if local.is_leaf else None):
        one = getattr(one, "_local_tensor", one)
        if one is not None and one.device.type != "meta" and one.layout == torch.strided:
            yield one


def traced(step: Callable[[], Any], path: Path) -> None:
    """Runs a step under torch's profiler.

    Args:
        step: What to run.
        path: Where to write the Chrome trace, gzipped.
    """
    with profile(activities=[ProfilerActivity.CPU], experimental_config=_ALL_THREADS) as profiler:
        step()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    plain = path.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    with open(plain, "rb") as source, gzip.open(path, "wb", compresslevel=6) as target:
        shutil.copyfileobj(source, target)
    plain.unlink()


class Heap:
    """Maximum bytes that the process has allocated inside, beyond those at the start.

    torch's profiler records the memory of one thread only, but hzero's lanes are threads, and gloo's buffers are no tensors.

    Attributes:
        peak: Maximum bytes.
    """

    def __init__(self) -> None:
        self._allocated = ctypes.CDLL(None).mallinfo2
        self._allocated.restype = _Mallinfo
        self._ended = threading.Event()
        self.peak = self._start = 0

    def _now(self) -> int:
        found = self._allocated()
        return int(found.uordblks + found.hblkhd)

    def _watch(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            self.peak = max(self.peak, self._now() - self._start)

    def __enter__(self) -> Heap:
        self._start = self._now()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()
        self.peak = max(self.peak, self._now() - self._start)


_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    """glibc's ``mallinfo2``: the bytes in use, of mapped blocks and of all arenas, are its fields ``hblkhd`` and ``uordblks``."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS)


if __name__ == "__main__":  # the ranks of another checkout
    prepare()
    raise SystemExit(run(Work(**pickle.loads(bytes.fromhex(sys.argv[2])))))
