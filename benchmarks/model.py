"""Compares the performance model with public measurements of Frontier and LUMI.

    python -m benchmarks.model        # the tables of errors in docs/model.md

The rows, with source and date, are in ``measured_rows.yaml``. Constants of the profiles were fit on the rows C. The rows K
only check them.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml

from hzero.config import BASE_TIERS, PLAIN
from hzero.program.collectives import Scheme
from hzero.program.program import Cross, Kind
from hzero.tools.experiment import Architecture
from hzero.tools.plan.against import PIPELINE, Degrees, best_degrees, price
from hzero.tools.plan.machine import Machine, load_profile
from hzero.tools.plan.scenario import Job, Scenario
from hzero.topology import Grid

#: From this size on an all-reduce is long: bandwidth sets its pace.
LONG = 16 << 20
#: Micro-batches where a batch is not public.
MANY = 256


class Check(NamedTuple):
    """A measured figure and its prediction; ``use`` is C, K, or ``seen`` where the model has no such scheme."""

    use: str
    what: str
    size: int
    measured: float
    predicted: float | None

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        assert self.predicted is not None
        return self.predicted / self.measured - 1


def collective_checks(rows: dict[str, Any]) -> Iterator[Check]:
    """Published collectives against profile frontier-2026, in microseconds and GB/s."""
    profile = load_profile("frontier-2026")

    def seconds(kind: Kind, nodes: int, size: float) -> float:
        tiers = BASE_TIERS if nodes > 1 else BASE_TIERS[:2]
        crossing = Cross("gradients", kind, tiers, 8 * nodes, PLAIN, 1)
        return Machine(Grid(nodes, 4, 2), profile).transfer(crossing, size).alone_s

    for table in rows["all_reduce"]:
        for nodes, times in table["us"].items():
            for size, time in times.items():
                use, predicted = table["use"][nodes], 1e6 * seconds("all_reduce", nodes, size)
                yield Check(use, f"all-reduce, {nodes} nodes", size, time - table["adds_us"], predicted)
    kinds: tuple[Kind, ...] = ("all_gather", "all_to_all")
    for kind in kinds:
        for size, time in rows["node"][f"{kind}_us"].items():
            yield Check("C", f"{kind}, 1 node", 8 * size, time, 1e6 * seconds(kind, 1, 8 * size))
    for kind, rate in rows["large"]["busbw_gb_s"].items():
        factor, sizes = (2 if kind == "all_reduce" else 1) * 63 / 64, [1 << shift for shift in range(27, 31)]
        found = statistics.fmean(size * factor / seconds(kind, 8, size) / 1e9 for size in sizes)
        yield Check("C", f"{kind} bandwidth, 8 nodes", sizes[0], rate, found)


def training_checks(rows: dict[str, Any]) -> Iterator[Check]:
    """Published training, in TFLOPS of a device, beside what `hzero plan --against` predicts of it."""
    for row in rows["training"]:
        what = f"{row['what']} ({row['source'].partition(',')[0]})"
        if row["use"] == "seen":
            yield Check("seen", what, 0, row["tflops"], None)
            continue
        job, profile = job_of(row), load_profile(row["profile"])
        grid = Grid(row["devices"] // 8, 4, 2, nodes_per_group=row.get("shard_nodes"))
        scheme = Scheme("fsdp", shard="group" if "shard_nodes" in row else "world")
        if row["scheme"] == "zero1":
            scheme = Scheme("deepspeed", stage=1)
        if row["pipeline"] is None:
            scenario = Scenario(cast(Any, None), job, grid, None, profile, 64 * 10**9, MANY * row["devices"], ())
            best = best_degrees(scenario, PIPELINE)
            assert best is not None
            what, step = f"{what}, {best.degrees}", best.step
        else:
            step = price(scheme, job, grid, profile, Degrees(row["tensor"], row["pipeline"]))
        recomputed = 4 / 3 if row["counted"] == "recomputed" else 1.0
        yield Check(row["use"], what, 0, row["tflops"], step.tflops * recomputed)


def job_of(row: dict[str, Any]) -> Job:
    """What a row trains: a GPT by default, with the keys ``intermediate`` and ``kv`` a Llama."""
    hidden, layers, vocab = row["hidden"], row["layers"], row.get("vocab", 50257)
    wide = row.get("intermediate", 4 * hidden)
    layer = (hidden * (hidden + 2 * row.get("kv", hidden)), hidden * hidden, hidden * wide, hidden * wide)
    layer += (hidden * wide,) * ("intermediate" in row)
    ends = (vocab * hidden,)
    shape = Architecture(
        (*ends, *layer * layers, *ends), 0, layers * hidden, vocab, hidden, layers, 32, wide, ends, layer, ends
    )
    replicas = row["devices"] // ((row["tensor"] or 1) * (row["pipeline"] or 1))
    micro_steps = row["batch"] // (replicas * row["micro_batch"]) if row["batch"] else MANY
    return Job(row["what"], shape, row["length"], row["micro_batch"], micro_steps, row.get("checkpointing", True),
               2, 50_000_000, 1, 500_000_000, True, 10**9, 10**9, None, False)  # fmt: skip


@functools.cache
def checks() -> list[Check]:
    """All rows."""
    rows = yaml.safe_load((Path(__file__).parent / "measured_rows.yaml").read_text(encoding="utf-8"))
    return [*collective_checks(rows), *training_checks(rows)]


def main() -> None:
    """Prints every row, and the errors of the rows K by kind."""
    found = checks()
    print("us, GB/s, or TFLOPS of a device")
    for use, title in {"C": "fitted", "K": "only checked", "seen": "without such a scheme in the model"}.items():
        print(f"\n{use}: {title:76}{'measured':>12}{'model':>12}{'error':>8}")
        for check in (check for check in found if check.use == use):
            size = f", {check.size:,} bytes" if check.size else ""
            predicted = "" if check.predicted is None else f"{check.predicted:12.1f}{check.error:+8.1%}"
            print(f"{check.what + size:79}{check.measured:12.1f}{predicted}")
    print()
    held_out = [check for check in found if check.use == "K"]
    for name, errors in {
        "all-reduce of 16 MiB and more": [abs(check.error) for check in held_out if check.size >= LONG],
        "shorter ones": [abs(check.error) for check in held_out if 0 < check.size < LONG],
        "training": [abs(check.error) for check in held_out if not check.size],
    }.items():
        print(f"rows K, {name}: mean {statistics.fmean(errors):.1%}, max {max(errors):.1%} of {len(errors)}")


if __name__ == "__main__":
    main()
