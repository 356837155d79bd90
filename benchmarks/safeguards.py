"""What safeguards cost the main job: hashes of files, the flight recorder, canaries, the guard and its audits.

Runs ``hzero train`` on processors with timers around them in every rank, and prints a table in Markdown. Two costs are given,
since ranks share this machine's cores: time for which a rank's training stands still, after the ranks have met, so that a slow
rank is not counted; and CPU time of threads beside it, as a share of all that the rank uses.

    python -m benchmarks.safeguards [KEY=VALUE ...]        keys of `hzero train`
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
import timeit
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import torch.distributed as dist
import xxhash

from hzero import cli
from hzero.collectives.canary import Canary
from hzero.collectives.record import HopCount
from hzero.formatting import size_text
from hzero.train import digests
from hzero.train.loop import Loop
from hzero.zero.audit import Audit
from hzero.zero.guard import Guard

#: What is timed, by the names of the samples.
ROWS = {
    "hashes": "hashes of checkpoints",
    "recorder": "flight recorder: its threads",
    "hops": "flight recorder: counting hops",
    "canary": "canaries",
    "audit": "audits",
    "guard": "guard: steps",
}
#: Of threads beside training; the others hold it up.
BESIDE = ("hashes", "recorder")


class _Costs:
    """What the safeguards of this rank have taken.

    Attributes:
        seconds: By the names of `ROWS`.
        calls: How often, by the same names; of hashes the bytes.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)

    def timed(self, name: str, call: Callable[..., Any], *, met: bool = False) -> Callable[..., Any]:
        """``call``, its time added under a name; with ``met`` all ranks meet before it."""

        @functools.wraps(call)
        def timing(*args: Any, **more: Any) -> Any:
            if met:
                dist.barrier()
            started = time.perf_counter()
            try:
                return call(*args, **more)
            finally:
                self.seconds[name] += time.perf_counter() - started
                self.calls[name] += 1

        return timing


def _hash_of(costs: _Costs) -> Callable[[], Any]:
    """What makes hashes that add CPU time and bytes to the costs, in place of ``xxhash.xxh3_128``."""

    class Hash:
        def __init__(self) -> None:
            self._hash = xxhash.xxh3_128()
            self.hexdigest = self._hash.hexdigest

        def update(self, data: Any) -> None:
            started = time.thread_time()
            self._hash.update(data)
            costs.seconds["hashes"] += time.thread_time() - started
            costs.calls["hashes"] += memoryview(data).nbytes

    return Hash


def _time_ranks(out: Path) -> None:
    """Puts the timers in place; forked ranks inherit them, and each writes its costs at the end of its training."""
    costs = _Costs()
    hashes = types.SimpleNamespace(xxh3_128=_hash_of(costs), xxh3_128_hexdigest=xxhash.xxh3_128_hexdigest)
    digests.xxhash = hashes  # type: ignore[assignment]
    for owner, method, name, met in (
        (Canary, "send", "canary", True),
        (Audit, "run", "audit", True),
        (Guard, "stepped", "guard", False),
    ):
        setattr(owner, method, costs.timed(name, getattr(owner, method), met=met))
    stock_start, run = HopCount.start, Loop.run

    def start(self: HopCount, what: Callable[[], str], passed: Callable[[], bool]) -> int:
        costs.calls["hops"] += 1
        return stock_start(self, what, passed)

    HopCount.start = start  # type: ignore[method-assign]

    def timed_run(self: Loop) -> Any:
        costs.seconds["hashes"], costs.calls["hashes"] = 0.0, 0
        started, cpu = time.perf_counter(), time.process_time()
        try:
            return run(self)
        finally:
            whole, cpu = time.perf_counter() - started, time.process_time() - cpu
            for thread in threading.enumerate():
                if thread.name in ("hzero recorder", "hzero store") and thread.ident is not None:
                    clock = time.pthread_getcpuclockid(thread.ident)
                    costs.seconds["recorder"] += time.clock_gettime(clock)
                    costs.calls["recorder"] += 1
            count, times = HopCount(1.0, lambda rank: ()), 100_000
            each = timeit.timeit(lambda: stock_start(count, str, bool), number=times) / times
            costs.seconds["hops"] = costs.calls["hops"] * each
            found = {"whole_s": whole, "cpu_s": cpu, "seconds": costs.seconds, "calls": costs.calls}
            (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))

    Loop.run = timed_run  # type: ignore[method-assign]


def table(ranks: Sequence[dict[str, Any]]) -> str:
    """The costs of all ranks as a table in Markdown.

    Args:
        ranks: Of each rank ``whole_s`` and ``cpu_s``, wall and CPU time of its training, and ``seconds`` and ``calls`` by the
            names of `ROWS`.
    """
    lines = ["| safeguard | how often, a rank | seconds, a rank | share of a rank's training |", "|---|---|---|---|"]
    total = 0.0
    for name, what in ROWS.items():
        seconds = statistics.mean(rank["seconds"].get(name, 0.0) for rank in ranks)
        calls = statistics.mean(rank["calls"].get(name, 0) for rank in ranks)
        whole = statistics.mean(rank["cpu_s" if name in BESIDE else "whole_s"] for rank in ranks)
        total += seconds / whole
        often = size_text(round(calls)) if name == "hashes" else f"{calls:,.0f}"
        often = f"{calls:.0f} threads" if name == "recorder" else often
        kind = "CPU time" if name in BESIDE else "time"
        lines.append(f"| {what} | {often} | {seconds:.3f} of {whole:.1f} | {seconds / whole:.3%} of {kind} |")
    return "\n".join([*lines, f"| all | | | {total:.3%} |"])


def main(overrides: Sequence[str]) -> int:
    """Runs the job and prints what was measured. Returns an exit status."""
    with tempfile.TemporaryDirectory(prefix="hzero-safeguards-") as folder:
        _time_ranks(Path(folder))
        if status := cli.main(["train", f"run.dir='{folder}/run'", *overrides]):
            return status
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
    print(f"# What safeguards cost the main job, {datetime.date.today()}\n")
    versions = ", ".join(f"{name} {version(name)}" for name in ("hzero", "torch", "deepspeed"))
    print(
        f"Written by `python -m benchmarks.safeguards{''.join(f' {key}' for key in overrides)}`. {os.cpu_count()} cores, ",
        end="",
    )
    print(f"{platform.machine()}, Python {platform.python_version()}, {versions}; {len(ranks)} ranks.\n")
    print(table(ranks))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as of `hzero train`")
    sys.exit(main(parser.parse_args().overrides))
