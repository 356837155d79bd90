"""Where the performance model gives the three ratios of arXiv 2501.04266, and what the stage would do there.

    python -m benchmarks.paper_region            # writes benchmarks/reports/DATE-paper-region.md and .png, in some minutes

The paper (GPT-NeoX-20B on up to 384 GCDs of Frontier) states ZeRO++ over ZeRO-3 1.405, its hierarchy over ZeRO++ 1.707, and
an efficiency of 0.94 up to 384 GCDs. It leaves open how many tokens a GCD has in a step, how many micro-steps make one, and
how fast nodes exchanged data with its software, so the answer is a region.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import yaml

from hzero.model.job import Job
from hzero.model.profile import Profile, Source, load_profile
from hzero.model.shape import gpt_neox_shape
from hzero.model.step import predict
from hzero.parsing import parse_config
from hzero.sharding.plan import ShardPlan
from hzero.sharding.sequence import Scheme
from hzero.topology import Grid

ROOT = Path(__file__).resolve().parent
#: What the paper's abstract states.
STATED = {"ZeRO++ over ZeRO-3": 1.405, "topo over ZeRO++": 1.707, "efficiency of topo": 0.94}
WITHIN = 0.10
#: Tokens of a GCD per micro-step, and GB/s that a node sends to others.
TOKENS = [256 * 2 ** (step / 2) for step in range(13)]
RATES = [3.0, 5.0, 8.0, 12.0, 18.0, 26.0, 39.0, 55.0, 75.0, 91.0]
NODES, FEWER_NODES = 48, 8


@dataclass(frozen=True)
class Case:
    """What else the paper leaves open.

    Attributes:
        era: Profile that gives the rate of compute.
        accumulation: Micro-steps per step.
        visible: Devices that ZeRO++ takes for its node; 8 is the whole node.
        overlap: Whether collectives run beside compute, in all schemes.
    """

    era: str
    accumulation: int
    visible: int
    overlap: bool

    def __str__(self) -> str:
        compute = load_profile(self.era).value("compute_tflops")
        return (
            f"{compute:.0f} TFLOPS, {self.accumulation} micro-step{'s' if self.accumulation > 1 else ''}, ZeRO++ sees "
            f"{self.visible}, {'overlap' if self.overlap else 'no overlap'}"
        )


CASES = [
    Case(era, accumulation, visible, overlap)
    for era, accumulation, visible, overlap in itertools.product(
        ("frontier-2023", "frontier-2026"), (1, 4), (8, 1), (True, False)
    )
]


def ratios(case: Case, tokens: float, rate: float) -> dict[str, float]:
    """The three ratios at one point, and TFLOPS of every scheme, under ``tflops``-prefixed names."""
    profile = _at(load_profile(case.era), rate)
    job = _job(tokens, case)
    zeropp = Scheme("deepspeed", hpz="node", quantized=True, visible=1 if case.visible == 1 else None)
    rates = {
        "ZeRO-3": predict(Scheme("deepspeed"), job, Grid(NODES, 4, 2), profile).tflops,
        "ZeRO++": predict(zeropp, job, Grid(NODES, 4, 2), profile).tflops,
        "topo": _topo(NODES, job, profile),
    }
    return {
        "ZeRO++ over ZeRO-3": rates["ZeRO++"] / rates["ZeRO-3"],
        "topo over ZeRO++": rates["topo"] / rates["ZeRO++"],
        "efficiency of topo": rates["topo"] / _topo(FEWER_NODES, job, profile),
        **{f"tflops {name}": value for name, value in rates.items()},
    }


def _topo(nodes: int, job: Job, profile: Profile) -> float:
    grid = Grid(nodes, 4, 2)
    return predict(ShardPlan.from_config(parse_config({"preset": "topo"}), grid, 0), job, grid, profile).tflops


def _at(profile: Profile, rate: float) -> Profile:
    source = Source(what="axis of the picture", date="2026-11", stack="none", kind="assumed")
    names = ("net_ring_gb_s", "net_rails_gb_s", "net_all_reduce_gb_s")
    return profile.with_values(source, **dict.fromkeys(names, rate))


def _job(tokens: float, case: Case) -> Job:
    model: dict[str, Any] = yaml.safe_load((ROOT.parent / "conf" / "model" / "gpt_neox_20b.yaml").read_text())
    batch = tokens / model["seq_length"]
    shape = gpt_neox_shape(model)
    return Job(shape, batch, case.accumulation, checkpointing=True, overlap=case.overlap)  # type: ignore[arg-type]


def inside(point: dict[str, float]) -> dict[str, bool]:
    """Whether each ratio is within 10 % of what is stated."""
    return {name: abs(point[name] / stated - 1) <= WITHIN for name, stated in STATED.items()}


def main() -> None:
    """Computes all cases, draws four of them, and writes the report."""
    today = date.today().isoformat()
    points = {case: [[ratios(case, tokens, rate) for tokens in TOKENS] for rate in RATES] for case in CASES}
    _draw(points, ROOT / "reports" / f"{today}-paper-region.png")
    text = _report(points, today)
    path = ROOT / "reports" / f"{today}-paper-region.md"
    path.write_text(text, encoding="utf-8")
    print(path)


def _draw(points: dict[Case, list[list[dict[str, float]]]], path: Path) -> None:
    chosen = [case for case in CASES if case.overlap and case.era == "frontier-2023"]
    chosen.sort(key=lambda case: (-case.visible, case.accumulation))
    figure, grid = plt.subplots(2, 2, figsize=(10, 7), sharex=True, sharey=True, layout="constrained")
    for axes, case in zip(grid.flat, chosen):
        for index, (name, stated) in enumerate(STATED.items()):
            values = np.array([[point[name] / stated - 1 for point in row] for row in points[case]])
            axes.contourf(TOKENS, RATES, values, levels=[-WITHIN, WITHIN], colors=[f"C{index}"], alpha=0.3)
            axes.plot([], [], color=f"C{index}", linewidth=6, alpha=0.4, label=f"{name} {stated:g} within 10 %")
        both = [
            (tokens, rate)
            for rate, row in zip(RATES, points[case])
            for tokens, point in zip(TOKENS, row)
            if all(inside(point).values())
        ]
        if both:
            axes.plot(*zip(*both), "k.", label="all three")
        axes.set_title(str(case), fontsize=8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens per GCD and micro-step")
        axes.set_ylabel("GB/s between nodes, per node")
    grid.flat[0].legend(fontsize=7, loc="lower right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _report(points: dict[Case, list[list[dict[str, float]]]], today: str) -> str:
    rows, meeting = [], []
    for case, table in points.items():
        flat = [(t, r, p) for r, row in zip(RATES, table) for t, p in zip(TOKENS, row)]
        counts = [sum(inside(point)[name] for *_, point in flat) for name in STATED]
        two = sum(inside(p)["ZeRO++ over ZeRO-3"] and inside(p)["topo over ZeRO++"] for *_, p in flat)
        everything = [(t, r, p) for t, r, p in flat if all(inside(p).values())]
        worst = {(t, r): max(abs(p[name] / stated - 1) for name, stated in STATED.items()) for t, r, p in flat}
        tokens, rate = min(worst, key=lambda key: worst[key])
        rows.append(
            (str(case), *(f"{count / len(flat):.0%}" for count in counts), f"{two / len(flat):.0%}",
             f"{len(everything) / len(flat):.0%}", f"{tokens:,.0f} tokens, {rate:g} GB/s: {worst[tokens, rate]:.0%}")
        )  # fmt: skip
        meeting += [(case, t, r, p, worst[t, r]) for t, r, p in everything]
    lines = [
        f"# The paper's region, {today}",
        "",
        "arXiv 2501.04266 states three ratios for GPT-NeoX-20B on up to 384 GCDs of Frontier and no absolute figure. The tables",
        "say where the [performance model](../../docs/model.md) gives each within 10 %: on a grid of tokens per GCD and",
        f"micro-step ({TOKENS[0]:.0f} to {TOKENS[-1]:,.0f}) and of rates between nodes ({RATES[0]:g} to {RATES[-1]:g} GB/s per",
        f"node), the share of the points. Efficiency is that of {NODES} nodes over {FEWER_NODES}; the paper does not say over",
        "what. Activations are computed again.",
        "No part of this was measured on Frontier: it is what the model says, with the errors that its page states.",
        "`python -m benchmarks.paper_region` computes it again.",
        "",
        f"![regions of the three ratios]({today}-paper-region.png)",
        "",
        "| case | ZeRO++ over ZeRO-3 | topo over ZeRO++ | efficiency | first two | all three | least worst error |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        *_conclusion(meeting),
        "",
        "*ZeRO++ sees*: the devices that ZeRO++ takes for its node; under `srun --gpus-per-task=1` a rank sees one, and its",
        "gradients then cross in one all-to-all over all ranks.",
        "",
        *_meeting(meeting),
        "",
    ]
    return "\n".join(lines)


def _conclusion(meeting: list[tuple[Case, float, float, dict[str, float], float]]) -> list[str]:
    """In how many cases one point gives all three ratios, by what ZeRO++ takes for its node."""
    lines = []
    for visible, what in ((8, "all eight devices of a node"), (1, "a single device")):
        cases = [case for case in CASES if case.visible == visible]
        met = {case for case, *_ in meeting}.intersection(cases)
        lines.append(f"Where ZeRO++ sees {what}, one point gives all three ratios in {len(met)} of {len(cases)} cases.")
    return [*lines, "The efficiency tells little: most points give it."]


def _meeting(meeting: list[tuple[Case, float, float, dict[str, float], float]]) -> list[str]:
    if not meeting:
        return ["**No point gives all three ratios within 10 %.**"]
    lines = ["## Points that give all three, and the stage there", ""]
    lines += ["Best first, at most twelve. TFLOPS per GCD.", ""]
    lines += [
        "| case | tokens | GB/s | ZeRO-3 | ZeRO++ | topo as in the case | topo with overlap | topo without | worst error |"
    ]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for case, tokens, rate, point, worst in sorted(meeting, key=lambda one: one[-1])[:12]:
        ways = [
            _topo(NODES, _job(tokens, replace(case, overlap=overlap)), _at(load_profile(case.era), rate))
            for overlap in (True, False)
        ]
        cells = (
            str(case), f"{tokens:,.0f}", f"{rate:g}",
            *(f"{point[f'tflops {name}']:.1f}" for name in ("ZeRO-3", "ZeRO++", "topo")),
            *(f"{way:.1f}" for way in ways), f"{worst:.1%}",
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
