"""Compares the performance model with public measurements.

    python -m benchmarks.model        # the tables of errors in docs/model.md
    python -m benchmarks.model --fit  # the calibrated constants of the profiles, from the rows C

The rows, with source and date, are in ``measured_rows.yaml``. The rows K only check the constants.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import yaml

from hzero.config import BASE_TIERS, PLAIN
from hzero.program.collectives import Scheme
from hzero.program.program import Cross, Kind
from hzero.tools.experiment import Architecture
from hzero.tools.plan.against import PIPELINE, Degrees, best_degrees, price
from hzero.tools.plan.machine import CONSTANTS, Machine, Profile, Source, load_profile
from hzero.tools.plan.scenario import Job, Scenario, buckets_of
from hzero.topology import Grid

#: From this size on an all-reduce is long: bandwidth sets its pace.
LONG = 16 << 20
#: Micro-batches where a batch is not public.
MANY = 256
#: Constants that `fit` determines on the rows C: of all-reduces, and by profile of training.
COLLECTIVES = ("launch_us", "level_us", "fill_us", "fill_node_us", "fill_kib", "tree_fill_us", "tree_fill_mib",
               "node_all_reduce_gb_s", "net_all_reduce_gb_s", "net_tree_gb_s")  # fmt: skip
FITTED = {
    "nic": ("compute_tflops", "half_tokens", "attention_share", "layer_bytes"),
    "dgx_h200": ("compute_tflops", "half_tokens", "attention_share", "layer_bytes"),
    "frontier-2026": ("compute_tflops", "half_tokens"),
    "frontier-2023": ("compute_tflops",),
}
#: Profiles by the device whose training checks them.
DEVICES = {"MI250X": ("frontier-2026", "frontier-2023"), "A100": ("nic",), "H100": ("dgx_h200",)}


class Check(NamedTuple):
    """A measured figure and its prediction; ``use`` is as in the file of rows.

    Training of one ``work`` differs in the number of devices only.
    """

    use: str
    what: str
    profile: str
    size: int
    measured: float
    predicted: float | None
    work: str = ""

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        assert self.predicted is not None
        return self.predicted / self.measured - 1


def collective_checks(rows: dict[str, Any], profile: Profile) -> Iterator[Check]:
    """Published collectives, in microseconds and GB/s."""

    def seconds(kind: Kind, nodes: int, size: float) -> float:
        tiers = BASE_TIERS if nodes > 1 else BASE_TIERS[:2]
        crossing = Cross("gradients", kind, tiers, 8 * nodes, PLAIN, 1)
        return Machine(Grid(nodes, 4, 2), profile).transfer(crossing, size).alone_s

    for table in rows["all_reduce"]:
        for nodes, times in table["us"].items():
            for size, time in times.items():
                use, predicted = table["use"][nodes], 1e6 * seconds("all_reduce", nodes, size)
                yield Check(use, f"all-reduce, {nodes} nodes", profile.name, size, time - table["adds_us"], predicted)
    kinds: tuple[Kind, ...] = ("all_gather", "all_to_all")
    for kind in kinds:
        for size, time in rows["node"][f"{kind}_us"].items():
            yield Check("C", f"{kind}, 1 node", profile.name, 8 * size, time, 1e6 * seconds(kind, 1, 8 * size))
    for kind, rate in rows["large"]["busbw_gb_s"].items():
        factor, sizes = (2 if kind == "all_reduce" else 1) * 63 / 64, [1 << shift for shift in range(27, 31)]
        found = statistics.fmean(size * factor / seconds(kind, 8, size) / 1e9 for size in sizes)
        yield Check("C", f"{kind} bandwidth, 8 nodes", profile.name, sizes[0], rate, found)


def training_checks(rows: dict[str, Any], profiles: Mapping[str, Profile] = {}) -> Iterator[Check]:
    """Published training, in TFLOPS of a device, beside what `hzero plan --against` predicts of it.

    Args:
        rows: The measured rows.
        profiles: Profiles by name, instead of those that come with hzero.
    """
    for group in rows["training"]:
        if group["use"] == "seen":
            yield Check(
                "seen", f"{group['what']} ({group['source'].partition(',')[0]})", "seen", 0, group["tflops"], None
            )
            continue
        for one in group["rows"]:
            yield _training_check({**group, **one}, rows["shapes"], profiles)


def _training_check(row: dict[str, Any], shapes: dict[str, Any], profiles: Mapping[str, Profile]) -> Check:
    name, devices, length, micro, count, again, measured = row["row"]
    profile = profiles.get(row["profile"]) or load_profile(row["profile"])
    values = dict(row.get("set", {}))
    if gbit := row.get("nic_gbit"):
        values |= {key: gbit / 8 for key in CONSTANTS if key.startswith("net_")}
    if values:
        source = Source(what=row["source"], date=row["date"], stack=row["stack"], kind="nominal")
        profile = profile.with_values(source, **values)
    grid = Grid(
        devices // 8, profile.packages_per_node, profile.devices_per_package, nodes_per_group=row.get("shard_nodes")
    )
    scheme = Scheme("fsdp", shard="group" if "shard_nodes" in row else "world")
    if row["scheme"] != "fsdp":
        scheme = Scheme("ddp") if row["scheme"] == "ddp" else Scheme("deepspeed", stage=1)
    tensor, pipeline = row.get("tensor", 1), row.get("pipeline", 1)
    job, text = job_of(name, shapes[name], length, micro, count or MANY), ""
    seconds = []
    for checkpointing in sorted({again > 0, again == 1}):  # an average for a share
        one = replace(job, checkpointing=checkpointing)
        if pipeline is None:
            one = replace(one, accumulation=1)
            scenario = Scenario(cast(Any, None), one, grid, None, profile, 64 * 10**9, MANY * devices, ())
            best = best_degrees(scenario, PIPELINE)
            assert best is not None
            text, step = f", {best.degrees}", best.step
        else:
            step = price(scheme, one, grid, profile, Degrees(tensor, pipeline))
            text = f", {Degrees(tensor, pipeline)}" if tensor * pipeline > 1 else ""
        seconds.append(1 / step.tflops)
    share = again if len(seconds) == 2 else 0.0
    tflops = 1 / (seconds[0] * (1 - share) + seconds[-1] * share)
    # Model operations of a token, without and with those that are computed again.
    forward = [bucket.flops * factor for bucket in buckets_of(job) for factor in (1, again * (not bucket.logits))]
    model, executed = 3 * sum(forward[::2]) / 1e12, (3 * sum(forward[::2]) + sum(forward[1::2])) / 1e12
    measured *= model / executed if row.get("unit") == "executed" else model
    what = f"{name}{text}, {devices:,} devices ({row['source'].partition(',')[0]})"
    work = f"{name} {length} {micro} {again} {tensor} {pipeline} {values} {row['source']} {row['stack']}"
    return Check(row["use"], what, row["profile"], 0, measured, tflops, work)


def job_of(name: str, shape: dict[str, int], length: int, micro_batch: int, micro_steps: int) -> Job:
    """What a row trains: a GPT by default, with the keys ``intermediate`` and ``kv`` a Llama."""
    hidden, layers, vocab = shape["hidden"], shape["layers"], shape.get("vocab", 50257)
    wide, queries = shape.get("intermediate", 4 * hidden), shape.get("queries", hidden)
    attention = (hidden * (queries + 2 * shape.get("kv", hidden)), queries * hidden)
    layer = (*attention, *(hidden * wide,) * (2 + ("intermediate" in shape)))
    ends = (vocab * hidden,)
    model = Architecture(
        (*ends, *layer * layers, *ends), 0, layers * queries, vocab, hidden, layers, 32, wide, ends, layer, ends
    )
    return Job(name, model, length, micro_batch, micro_steps, True,
               2, 50_000_000, 1, 500_000_000, True, 10**9, 10**9, None, False)  # fmt: skip


@functools.cache
def measured_rows() -> dict[str, Any]:
    """The file of rows."""
    rows: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "measured_rows.yaml").read_text(encoding="utf-8"))
    return rows


@functools.cache
def checks() -> list[Check]:
    """All rows."""
    rows = measured_rows()
    return [*collective_checks(rows, load_profile("frontier-2026")), *training_checks(rows)]


def fit(name: str, names: Sequence[str]) -> Profile:
    """Fits constants of a profile on its rows C, by damped least squares of logarithms that counts large errors linearly."""
    rows, profile = measured_rows(), load_profile(name)
    fitted = {
        **rows,
        "training": [group for group in rows["training"] if (group["use"], group.get("profile")) == ("C", name)],
    }

    def at(place: Any) -> Profile:
        source = Source(what="benchmarks/model.py --fit", date="", stack="", kind="calibrated")
        return profile.with_values(source, **dict(zip(names, map(float, np.exp(place)))))

    def errors(place: Any) -> Any:
        made = (
            collective_checks(rows, at(place)) if names is COLLECTIVES else training_checks(fitted, {name: at(place)})
        )
        return np.array([math.log(one.error + 1) for one in made if one.use == "C" and one.what[:10] != "all_gather"])

    def cost(found: Any) -> float:
        return float(np.sqrt(1 + (found / 0.1) ** 2).sum())

    place, damping = np.log([profile.value(one) for one in names]), 0.01
    found = errors(place)
    for _ in range(40):
        slope = np.stack([(errors(place + step) - found) / 1e-3 for step in 1e-3 * np.eye(len(names))], 1)
        square = slope.T @ (slope / np.sqrt(1 + (found / 0.1) ** 2)[:, None])
        down = slope.T @ (found / np.sqrt(1 + (found / 0.1) ** 2))
        next_place = place - np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), down)
        saved = cost(found) - cost(after := errors(next_place))
        if saved > 0:
            place, found = next_place, after
        damping *= 0.25 if saved > 0 else 4
        if -1 < saved < 1e-4 * cost(found) and damping > 1:
            break
    return at(place)


def summary(found: Sequence[Check]) -> dict[str, list[float]]:
    """Absolute errors of the rows K in rising order, by kind."""
    held_out = [check for check in found if check.use == "K"]
    kinds = {
        "all-reduce of 16 MiB and more": [check for check in held_out if check.size >= LONG],
        "shorter all-reduce": [check for check in held_out if 0 < check.size < LONG],
        **{
            f"training, {device}": [check for check in held_out if not check.size and check.profile in names]
            for device, names in DEVICES.items()
        },
        "training": [check for check in held_out if not check.size],
    }
    return {kind: sorted(abs(check.error) for check in of_kind) for kind, of_kind in kinds.items()}


def nine_of_ten(errors: Sequence[float]) -> float:
    """The error that 9 of 10 do not exceed; ``errors`` rise."""
    return errors[math.ceil(0.9 * len(errors)) - 1]


def pairs(found: Sequence[Check]) -> list[float]:
    """What remains in the ratio of two training runs K that differ in the number of devices only, in rising order."""
    held_out = [check for check in found if check.use == "K" and not check.size]
    both = ((one, other) for one, other in itertools.combinations(held_out, 2) if one.work == other.work)
    return sorted(abs(math.log((1 + one.error) / (1 + other.error))) for one, other in both)


def main(arguments: Sequence[str] = sys.argv[1:]) -> None:
    """Prints every row, and the errors of the rows K by kind. With ``--fit``: the fitted constants, within minutes."""
    if "--fit" in arguments:
        for names, profile in [
            (COLLECTIVES, fit("frontier-2026", COLLECTIVES)),
            *((FITTED[name], fit(name, FITTED[name])) for name in FITTED),
        ]:
            print(profile.name, {name: float(f"{profile.value(name):.4g}") for name in names})
        return
    found = checks()
    print("us, GB/s, or TFLOPS of a device")
    titles = {
        "C": "fitted",
        "K": "only checked",
        "bound": "with the model's best degrees instead of the run's",
        "seen": "without such a scheme in the model",
    }
    for use, title in titles.items():
        print(f"\n{use}: {title:76}{'measured':>12}{'model':>12}{'error':>8}")
        for check in (check for check in found if check.use == use):
            size = f", {check.size:,} bytes" if check.size else ""
            predicted = "" if check.predicted is None else f"{check.predicted:12.1f}{check.error:+8.1%}"
            print(f"{check.what + size:79}{check.measured:12.1f}{predicted}")
    print()
    for kind, errors in {**summary(found), "ratio of two runs on other numbers of devices": pairs(found)}.items():
        print(f"rows K, {kind}: mean {statistics.fmean(errors):.1%}, median {statistics.median(errors):.1%}, 9 of 10 within "
              f"{nine_of_ten(errors):.1%}, max {errors[-1]:.1%} of {len(errors)}")  # fmt: skip


if __name__ == "__main__":
    main()
