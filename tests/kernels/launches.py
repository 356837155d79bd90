"""Counts what a rank starts on its device for one layer in a micro-batch: kernels of codecs, and torch's operators on data.

    python -m tests.kernels.launches [--width 256] [PRESET ...]

It runs the stage's programs with wires that bring nothing, on a CPU. Refreshes send whole weights. A device starts the same
calls. Page faults are those of this CPU: pages that the operating system clears, because memory was given back to it.
"""

from __future__ import annotations

import argparse
import math
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.counts.messages import numels_of
from hzero.codecs import backends
from hzero.codecs.formats import chunk_numel
from hzero.comm import Bucket, Runtime, WireLog
from hzero.comm.wires import STAGE
from hzero.config import PRESETS, parse_config
from hzero.errors import one_of
from hzero.program.program import Program, StagePrograms
from hzero.program.shards import ShardPlan
from hzero.tools.terminal import positive
from hzero.topology import Grid
from tests.comm.simulated import AtOnce, peers

GRID = Grid(2, 4, 2)


class Wires:
    """Wires that bring nothing; the library sums."""

    library_sums = True

    def __getattr__(self, kind: str) -> Any:
        return lambda *_: SimpleNamespace(wait=lambda: None)


class _Operators(TorchDispatchMode):
    """Counts operators that start something on a device: those that write memory, once for each tensor of a list."""

    def __init__(self, started: Counter[str]) -> None:
        super().__init__()
        self.started = started

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = [one for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        made = [one for one in func._schema.returns if one.alias_info is None]
        name = func._schema.name.removeprefix("aten::")
        if not name.startswith("profiler::") and (written or (made and "empty" not in name)):
            # Views of tensors that are apart: one kernel for each.
            self.started[name] += len(args[0]) if isinstance(args[0], (list, tuple)) else 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """What is started inside, by name."""
    started, faults = Counter[str](), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    launch = backends.Launch.__call__

    def counts(call: backends.Launch, *arguments: Any, **more: Any) -> None:
        started[call.kernel] += 1
        launch(call, *arguments, **more)

    with mock.patch.object(backends.Launch, "__call__", counts), _Operators(started):
        yield started
    started["page faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults


def launches(preset: str, width: int = 256, **block: Any) -> dict[str, Counter[str]]:
    """Of one layer: to gather it, to sum its gradients within their scope, and, once a step, to refresh it and cross the rest."""
    plan = ShardPlan.from_config(parse_config({"preset": preset, **block}), GRID, 3)
    groups = {(STAGE, tier): (Wires(), list(plan.tier_group(tier))) for tier in plan.grid.crossed}
    collectives = Runtime(plan, peers(3, groups), WireLog(), AtOnce())
    programs, world, numels = StagePrograms.of(plan), GRID.world_size, numels_of(width)
    chunks = tuple(chunk_numel(numel, world) for numel in numels)
    keys, dtype = tuple(range(len(chunks))), torch.bfloat16
    shards = [torch.ones(chunk, dtype=dtype) for chunk in chunks]
    rows = plan.gradient_rows // math.prod(cross.ranks for cross in programs.boundary.crossings)
    sums, last = ([torch.ones(count * chunk) for chunk in chunks] for count in (plan.gradient_rows, rows))
    held: Any = shards
    if plan.keeps_copies:
        held = torch.zeros(
            plan.secondary_codec.format.message_bytes(chunks, plan.secondary_rows, dtype.itemsize), dtype=torch.uint8
        )
    runs: dict[str, tuple[Program, str, Any]] = {
        "gather": (programs.unshard, "weights", held),
        "micro": (programs.micro, "gradients", [torch.ones(numel, dtype=dtype) for numel in numels]),
        "refresh": (programs.uncoded if plan.exact else programs.refresh, "weights", shards),
        "boundary": (programs.boundary, "gradients", sums),
        "outermost": (programs.outermost, "gradients", last),
    }
    found = {}
    for name, (program, role, value) in runs.items():
        found[name] = Counter[str]()
        if not program.steps:
            continue
        bound = collectives.bind(program, Bucket(keys, chunks, dtype, role))
        totals = [torch.zeros(plan.gradient_rows * chunk) for chunk in chunks] if name == "micro" else None
        for _ in range(5):  # the first run prepares, and the next ones take memory that it gave back
            with counted() as found[name]:
                bound.run(lambda value=value: value, seed=5, first_seed=6, into=lambda totals=totals: totals).wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=positive(int, 1 << 14), default=256, help="of the layer (default 256)")
    parser.add_argument("presets", nargs="*", default=["lossless", "topo", "zero3"])
    arguments = parser.parse_args()
    for preset in arguments.presets:
        if preset not in PRESETS:
            parser.error(str(one_of("presets", preset, PRESETS)))
    for preset in arguments.presets:
        runs = launches(preset, arguments.width)
        faults = {name: started.pop("page faults", 0) for name, started in runs.items()}
        found = {name: started.total() for name, started in runs.items()}
        micro = 2 * found["gather"] + found["micro"]
        step = found["refresh"] + found["boundary"] + found["outermost"]
        print(f"{preset:10} {micro:4} launches per layer and micro-batch, {step:4} more per step: {found}")
        print(f"{'':10} page faults: {faults}; a layer has {2 * sum(numels_of(arguments.width)) // 4096:,} pages")


if __name__ == "__main__":
    main()
