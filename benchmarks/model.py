"""Compares the performance model with public measurements of Frontier and LUMI.

    python -m benchmarks.model        # the table of errors in docs/model.md

The rows are in ``measured_rows.yaml``. Constants of the profiles were fit on the rows C; the rows K only check them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hzero.config import BASE_TIERS, PLAIN
from hzero.plan.machine import Machine, load_profile
from hzero.plan.program import Cross, Kind
from hzero.topology import Grid

#: From this size on an all-reduce is long: bandwidth sets its pace.
LONG = 16 << 20


class Check(NamedTuple):
    """A measured figure and its prediction; ``use`` is C or K."""

    use: str
    what: str
    size: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
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
    """Published training against profile frontier-2023, in TFLOPS per device.

    Of the rate of a device Megatron's tensor and pipeline parallelism leave a share: a layer makes four all-reduces of its
    activations over the tensor-parallel devices, and the bubble of the pipeline is (stages - 1) / micro-batches.
    """
    profile = load_profile("frontier-2023")
    rate, node = profile.value("compute_tflops"), Machine(Grid(1, 4, 2), profile)
    for row in rows["training"]:
        tokens = row["micro_batch"] * row["length"]
        flops = 72 * tokens * row["hidden"] ** 2 * (1 + row["length"] / (6 * row["hidden"])) / row["tensor"]
        compute, reduces, bubble = flops / rate / 1e12, 0.0, 0.0
        if row["tensor"] > 1:
            tiers = BASE_TIERS[: 1 if row["tensor"] == 2 else 2]
            crossing = Cross("gradients", "all_reduce", tiers, row["tensor"], PLAIN, 1)
            reduces = 4 * node.transfer(crossing, 2.0 * tokens * row["hidden"]).alone_s
        if row["batch"]:
            replicas = row["devices"] // (row["tensor"] * row["pipeline"])
            bubble = (row["pipeline"] - 1) * replicas * row["micro_batch"] / row["batch"]
        share = compute / (compute + reduces) / (1 + bubble)
        yield Check(row["use"], f"training of {row['name']}", 0, row["tflops"], rate * share)


def checks() -> list[Check]:
    """All rows."""
    rows = yaml.safe_load((Path(__file__).parent / "measured_rows.yaml").read_text(encoding="utf-8"))
    return [*collective_checks(rows), *training_checks(rows)]


def main() -> None:
    """Prints every row, and the errors of the rows K by kind."""
    found = checks()
    for check in found:
        size = f"{check.size:,} bytes" if check.size else ""
        print(f"{check.use}  {check.what:34}{size:>22}{check.measured:12.1f}{check.predicted:12.1f}{check.error:+8.1%}")
    held_out = [check for check in found if check.use == "K"]
    for name, errors in {
        "all-reduce of 16 MiB and more": [abs(check.error) for check in held_out if check.size >= LONG],
        "shorter ones": [abs(check.error) for check in held_out if 0 < check.size < LONG],
        "training": [abs(check.error) for check in held_out if not check.size],
    }.items():
        print(f"rows K, {name}: mean {statistics.fmean(errors):.1%}, max {max(errors):.1%} of {len(errors)}")


if __name__ == "__main__":
    main()
