"""Calibrates the performance model on measured rows, and compares it with those and with others.

    python -m benchmarks.calibration             # fit, and compare with the constants of the profiles

Published rows stand in ``measured_rows.yaml``: constants are fit on those marked C; those marked K are only compared with.
The emulated cluster is fit on the suite ``main`` of a report and its measurement without limits; all other rows check.
"""

from __future__ import annotations

import argparse
import datetime
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from benchmarks.compare.traffic import engine_of
from benchmarks.rows import StepsRow, read_rows
from hzero.config import BASE_TIERS, PLAIN
from hzero.model.collectives import transfer
from hzero.model.job import Job
from hzero.model.profile import Profile, Source, load_profile
from hzero.model.shape import gpt_neox_shape
from hzero.model.sharing import link_rates, pairs_gb_s, ring_gb_s, route
from hzero.model.step import Prediction, predict
from hzero.parsing import parse_config
from hzero.sharding.plan import ShardPlan
from hzero.sharding.sequence import Crossing, Kind, Scheme
from hzero.topology import Grid
from hzero.topology.preset import preset

FOLDER = Path(__file__).parent
REPORTS = FOLDER / "reports"
#: Rates between nodes that were set aside before anything was fit: those of the suite ``sweep``.
HELD_OUT = ("node-16", "node-160", "node-unlimited")
#: What is fit on the emulated cluster. A compute rate cannot be told apart from the cost of starting operators there.
FITTED = (
    "launch_us",
    "ring_net_us",
    "host_us",
    "core_s_per_gb",
    "codec_s_per_gb",
    "optimizer_s_per_g",
    "step_us",
)
#: End of the last measurement of such a stage.
_SETTLED = datetime.datetime(2026, 11, 23, 18, tzinfo=datetime.UTC)


class Check(NamedTuple):
    """A measured figure and its prediction."""

    use: str
    what: str
    size: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error."""
        return self.predicted / self.measured - 1


@cache
def measured() -> dict[str, Any]:
    """The published rows."""
    rows: dict[str, Any] = yaml.safe_load((FOLDER / "measured_rows.yaml").read_text(encoding="utf-8"))
    return rows


# ---- published collectives ----------------------------------------------------------------------------------------------


def flat(kind: Kind, nodes: int) -> Crossing:
    """A collective over all devices of some nodes of Frontier."""
    tiers = BASE_TIERS if nodes > 1 else BASE_TIERS[:2]
    return Crossing("gradients", kind, tiers, 8 * nodes, PLAIN, 1)


def all_reduce_rows() -> Iterator[tuple[str, int, int, float]]:
    """Use, nodes, bytes and microseconds of every published all-reduce."""
    for table in measured()["all_reduce"]:
        for nodes, times in table["us"].items():
            for size, time in times.items():
                yield table["use"][nodes], nodes, size, time - table["adds_us"]


def fit_all_reduce() -> dict[str, float]:
    """Constants of an all-reduce by least squares of relative errors over the rows C.

    The time is linear in all of them but the size that fills the pipeline, which is searched for.
    """
    rows = [(nodes, size, time) for use, nodes, size, time in all_reduce_rows() if use == "C"]

    def features(nodes: int, size: int, fill: float) -> list[float]:
        levels, filled, kilo = math.log2(nodes), size / (size + fill), size / 1e3
        found = [1.0, levels, filled, levels * filled, 0.0, 0.0, 0.0]
        ranks = 8 * nodes
        if nodes == 1:
            found[4] = 2 * kilo * (ranks - 1) / ranks
        elif nodes == 2 or nodes >= 16:
            found[5] = kilo if nodes == 2 else 2 * kilo
        else:
            found[6] = 2 * kilo * (ranks - 1) / ranks
        return found

    best: tuple[float, dict[str, float]] | None = None
    for kib in range(128, 2049, 128):
        table = np.array([features(nodes, size, kib * 1024) for nodes, size, _ in rows])
        scale = 1 / np.array([time for *_, time in rows])
        found = np.linalg.lstsq(table * scale[:, None], np.ones(len(rows)), rcond=None)[0]
        error = float(np.sqrt(np.mean((table @ found * scale - 1) ** 2)))
        if best is None or error < best[0]:
            names = ("launch_us", "level_us", "fill_node_us", "fill_us")
            rates = ("node_all_reduce_gb_s", "net_tree_gb_s", "net_all_reduce_gb_s")
            values = dict(zip(names, map(float, found[:4]))) | dict(zip(rates, (float(1 / x) for x in found[4:])))
            best = error, {**values, "fill_kib": float(kib)}
    assert best is not None
    return best[1]


def collective_checks(profile: Profile) -> list[Check]:
    """All published collectives against a profile."""

    def seconds(kind: Kind, nodes: int, size: float) -> float:
        return transfer(flat(kind, nodes), size, Grid(nodes, 4, 2), profile).alone_s

    checks = [
        Check(use, f"all-reduce, {nodes} nodes", size, time, 1e6 * seconds("all_reduce", nodes, size))
        for use, nodes, size, time in all_reduce_rows()
    ]
    node = measured()["node"]
    for size, time in node["all_gather_us"].items():
        checks.append(Check("C", "all-gather, 1 node", 8 * size, time, 1e6 * seconds("all_gather", 1, 8 * size)))
    for size, time in node["all_to_all_us"].items():
        checks.append(Check("C", "all-to-all, 1 node", 8 * size, time, 1e6 * seconds("all_to_all", 1, 8 * size)))
    for kind, rate in measured()["large"]["busbw_gb_s"].items():
        factor = (2 if kind == "all_reduce" else 1) * 63 / 64
        sizes = [1 << shift for shift in range(27, 31)]
        found = statistics.fmean(size * factor / seconds(kind, 8, size) / 1e9 for size in sizes)
        checks.append(Check("C", f"{kind} bandwidth, 8 nodes of LUMI, GB/s", sizes[0], rate, found))
    return checks


def _link_rates() -> dict[tuple[int, int], float]:
    """GB/s of the links of a node of Frontier: the mean of the rows C, where there are two."""
    links = measured()["links"]["C"]
    lanes = {4: "in a package", 2: "two links", 1: "one link"}
    return link_rates(preset("frontier"), {count: statistics.fmean(links[name]) for count, name in lanes.items()})


def link_checks() -> list[Check]:
    """Pairs of devices without a link, whose messages go by another device."""
    routed, rates = measured()["links"]["K"], _link_rates()
    best = {}
    for a in range(8):
        for b in range(a):
            if (a, b) not in rates:
                narrowest = min(rates[link] for link in route(rates, a, b))
                best[narrowest] = narrowest
    return [
        Check("K", "routed over two links, GB/s", 1 << 25, routed["routed over two links"], max(best)),
        Check("K", "routed over one link, GB/s", 1 << 25, routed["routed over one link"], min(best)),
    ]


def fit_net_ring(profile: Profile) -> dict[str, float]:
    """``net_ring_gb_s`` with which 64 devices reach the measured bandwidth on average."""
    wanted, rate = measured()["large"]["busbw_gb_s"]["all_gather"], profile.value("net_ring_gb_s")
    source = Source(what="fit", date="2026-11", stack="RCCL", kind="calibrated")
    for _ in range(8):
        checks = collective_checks(profile.with_values(source, net_ring_gb_s=rate))
        rate *= wanted / next(check.predicted for check in checks if check.what.startswith("all_gather bandwidth"))
    return {"net_ring_gb_s": rate}


def fabric() -> dict[str, float]:
    """Rates inside a node: the links of a package, and those of the tier gpu by max-min shares of the measured links."""
    rates = _link_rates()
    return {
        "gcd_gb_s": rates[0, 1],
        "gpu_ring_gb_s": ring_gb_s(rates, [[0, 2, 4, 6], [1, 3, 7, 5]]),
        "gpu_pairs_gb_s": pairs_gb_s(rates, [[0, 2, 4, 6], [1, 3, 5, 7]]),
    }


# ---- published training -------------------------------------------------------------------------------------------------


def fit_recomputed() -> dict[str, float]:
    """``compute_tflops`` and ``half_tokens`` of the rows of one node: a line in one over the sequences."""
    rows = measured()["recomputed"]["tflops"]
    slope, offset = np.polyfit([1 / count for count in rows], [1 / rate for rate in rows.values()], 1)
    return {"compute_tflops": float(1 / offset), "half_tokens": float(2048 * slope / offset)}


def pipeline_share(row: dict[str, Any], rate: float, profile: Profile) -> float:
    """Share of a device's rate that Megatron's tensor and pipeline parallelism leave.

    A layer makes four all-reduces of its activations over the tensor-parallel devices; the bubble of the pipeline is
    (stages - 1) / micro-batches, where the batch is public.
    """
    tokens = row["micro_batch"] * row["length"]
    flops = 72 * tokens * row["hidden"] ** 2 * (1 + row["length"] / (6 * row["hidden"])) / row["tensor"]
    compute = flops / rate / 1e12
    reduces = 0.0
    if row["tensor"] > 1:
        tiers = BASE_TIERS[: 1 if row["tensor"] == 2 else 2]
        crossing = Crossing("gradients", "all_reduce", tiers, row["tensor"], PLAIN, 1)
        reduces = 4 * transfer(crossing, 2.0 * tokens * row["hidden"], Grid(1, 4, 2), profile).alone_s
    bubble = 0.0
    if row["batch"]:
        replicas = row["devices"] // (row["tensor"] * row["pipeline"])
        bubble = (row["pipeline"] - 1) * replicas * row["micro_batch"] / row["batch"]
    return compute / (compute + reduces) / (1 + bubble)


def fit_trained(profile: Profile) -> float:
    """``compute_tflops`` of June 2023: that with which the rows C are met on average."""
    rate = 70.0
    for _ in range(8):
        rates = [row["tflops"] / pipeline_share(row, rate, profile) for row in _training("C")]
        rate = statistics.geometric_mean(rates)
    return rate


def _training(use: str) -> list[dict[str, Any]]:
    return [row for row in measured()["training"] if row["use"] == use]


def training_checks(profile: Profile) -> list[Check]:
    """Published training against a profile of its era."""
    rate = profile.value("compute_tflops")
    return [
        Check(
            row["use"], f"training {row['name']}, TFLOPS", 0, row["tflops"], rate * pipeline_share(row, rate, profile)
        )
        for row in measured()["training"]
    ]


# ---- the emulated cluster -----------------------------------------------------------------------------------------------


def emulated(cluster: Any, base: Profile) -> Profile:
    """The profile with the rates of a cluster, less packet headers; a tier without a limit has 1 GB/s."""
    rates = {tier: (cluster.rate_mbit(tier) or 8104.0) / 8000 / 1.013 for tier in BASE_TIERS}
    source = Source(what="rates of the measurement", date="2026-11", stack="gloo", kind="nominal")
    return base.with_values(
        source,
        gcd_gb_s=rates["gcd"],
        gpu_ring_gb_s=rates["gpu"],
        net_ring_gb_s=rates["node"],
        net_rails_gb_s=rates["node"],
    )


def prediction(row: StepsRow, base: Profile) -> Prediction:
    """The model's step of a measured row."""
    config, grid = row.config, row.config.cluster.grid
    scheme: Scheme | ShardPlan
    if row.engine == "hzero":
        scheme = ShardPlan.from_config(parse_config(row.scheme_config["block"]), grid, 0)
    else:
        scheme = engine_of(row.scheme_config)
    hidden = config.model["hidden_size"]
    job = Job(
        gpt_neox_shape(config.model),
        micro_batch=config.train.micro_batch,
        accumulation=config.train.accumulation,
        itemsize=2 if config.train.dtype == "bf16" else 4,
        bucket_numel=12 * hidden**2 + 13 * hidden,
        ahead=0,  # stage3_max_live_parameters of one layer leaves no room for the next
    )
    return predict(scheme, job, grid, emulated(config.cluster, base))


def modelled(row: StepsRow) -> bool:
    """Whether the model describes the code that a row was measured with.

    Other reduce-scatters than gloo's are the benchmark's own; before 2026-11-22 the stage used gloo's for codec ``none``.
    Until `_SETTLED` a stage without accumulators waited for its reductions at the end of every micro-step.
    """
    if row.config.reduce_scatter != "gloo":
        return False
    if row.engine != "hzero":
        return True
    plan = ShardPlan.from_config(parse_config(row.scheme_config["block"]), row.config.cluster.grid, 0)
    if not plan.accumulates and row.date < _SETTLED:
        return False
    return row.date.day >= 22 or all(hop.codec.codec != "none" for hop in plan.reduce_hops())


def calibrates(row: StepsRow) -> bool:
    """Whether constants are fit on a row."""
    return row.suite == "main" or "gpt_neox_10m" in row.measurement


def emulated_rows(day: str) -> list[StepsRow]:
    """Rows of a day's report that the model describes."""
    rows, _ = read_rows(REPORTS / f"{day}-comparison.jsonl")
    return [row for row in rows if isinstance(row, StepsRow) and modelled(row)]


def fit_emulated(rows: Sequence[StepsRow], base: Profile) -> Profile:
    """Constants of processors and of gloo's start, by a search along each in turn, on step times and processor seconds."""
    source = Source(what="fit on this day's rows", date="2026-11", stack="gloo", kind="calibrated")

    def made(values: dict[str, float]) -> Profile:
        return base.with_values(source, **values, ring_inside_us=values["ring_net_us"])

    def loss(values: dict[str, float]) -> float:
        total = 0.0
        for row in rows:
            found = prediction(row, made(values))
            cores = found.busy.get("cores", 0.0) * found.step_s * row.machine.cores
            total += math.log(found.step_s / row.median_s) ** 2 + 0.1 * math.log(max(cores, 1e-3) / row.cpu_s) ** 2
        return total

    values = {name: base.value(name) for name in FITTED}
    steps = dict.fromkeys(FITTED, 0.5)
    best = loss(values)
    for _ in range(14):
        for name in FITTED:
            for sign in (1, -1):
                tried = {**values, name: values[name] * math.exp(sign * steps[name])}
                if (found := loss(tried)) < best:
                    best, values = found, tried
                    steps[name] *= 1.3
                    break
            else:
                steps[name] /= 2
    return made(values)


def emulated_checks(rows: Iterable[StepsRow], base: Profile) -> list[tuple[StepsRow, Check]]:
    """Rows of the emulated cluster against a profile."""
    return [
        (row, Check("C" if calibrates(row) else "K", row.scheme, 0, row.median_s, prediction(row, base).step_s))
        for row in rows
    ]


def misordered(checks: Sequence[tuple[StepsRow, Check]]) -> list[tuple[str, str]]:
    """Pairs of schemes of one measurement in the wrong order, although the ranges of their steps do not overlap."""
    found = []
    for row, check in checks:
        for other, with_other in checks:
            apart = row.id == other.id and max(row.step_s) < min(other.step_s)
            if apart and check.predicted > with_other.predicted:
                found.append((f"{row.title}: {row.scheme}", other.scheme))
    return found


def regret(checks: Sequence[tuple[StepsRow, Check]]) -> list[tuple[str, int, str, float]]:
    """How good a choice by the model is among the settings of the stage that were measured together.

    Returns:
        For each measurement of at least five settings: its name, their number, the one with the shortest predicted step, and
        how much longer its measured step is than the shortest measured one, as a share.
    """
    found = []
    for title in dict.fromkeys(row.title for row, _ in checks):
        ours = [(row, check) for row, check in checks if row.title == title and row.engine == "hzero"]
        if len(ours) >= 5:
            chosen = min(ours, key=lambda one: one[1].predicted)[1]
            best = min(check.measured for _, check in ours)
            found.append((title, len(ours), chosen.what, chosen.measured / best - 1))
    return found


def main() -> None:
    """Fits, and prints the constants next to those of the profiles."""
    base = load_profile("emulated")
    today = [row for row in emulated_rows("2026-11-22") if calibrates(row)]
    fits = {
        "frontier-2026": {
            **fit_all_reduce(),
            **fit_recomputed(),
            **fabric(),
            **fit_net_ring(load_profile("frontier-2026")),
        },
        "frontier-2023": {"compute_tflops": fit_trained(load_profile("frontier-2023"))},
    }
    refit = fit_emulated(today, base)
    fits["emulated"] = {name: refit.value(name) for name in FITTED}
    for name, values in fits.items():
        profile = load_profile(name)
        for key, value in values.items():
            print(f"{name:15} {key:22} fit {value:10.4g}   profile {profile.value(key):10.4g}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
