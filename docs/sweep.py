"""Draws the JSON of `hzero plan --against`: ``python docs/sweep.py PLAN.json ... PICTURE.png``.

One plan becomes curves of TFLOPS per device by nodes. Several plans, which differ in the rate of the NICs, become a map.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(*arguments: str) -> None:
    """Draws curves or a map, see above."""
    *sources, picture = arguments
    plans = [json.loads(Path(source).read_text()) for source in sources]
    (draw_map(plans) if len(plans) > 1 else draw_curves(*plans)).savefig(picture, dpi=150)


def draw_map(plans: list[dict[str, Any]]) -> Any:
    """The ratio of the fastest scheme without hzero to the fastest with it. White: their steps are equal within the error."""
    plans = sorted(plans, key=lambda plan: plan["node_gb_s"])
    figure, axes = plt.subplots(figsize=(7.5, 4.0), layout="constrained")
    ratios = [[row["lead"] if row["lead_interval"][0] > 1 or row["lead_interval"][1] < 1 else 1.0 for row in plan["winners"]]
              for plan in plans]  # fmt: skip
    axes.imshow(ratios, origin="lower", aspect="auto", cmap="PuOr_r", norm=matplotlib.colors.LogNorm(1 / 5, 5))
    for y, plan in enumerate(plans):
        for x, row in enumerate(plan["winners"]):
            name = row["best"].replace("hzero ", "") if ratios[y][x] != 1 else "equal"
            axes.annotate(f"{row['lead']:.2f}\n{name}", (x, y), fontsize=6.5, ha="center", va="center")
    axes.set_xticks(range(len(plans[0]["winners"])), [f"{row['nodes']:,}" for row in plans[0]["winners"]])
    axes.set_yticks(range(len(plans)), [f"{8 * plan['node_gb_s']:,.0f}" for plan in plans])
    axes.set(xlabel=f"nodes of {plans[0]['profile']}", ylabel="Gbit/s of a node")
    axes.set_title(f"step of the fastest scheme without hzero to the fastest with it; {plans[0]['work']}", fontsize=9)
    return figure


def draw_curves(plan: dict[str, Any]) -> Any:
    """Draws a curve for each scheme. A curve ends or has a gap where the scheme does not fit or cannot divide the batch."""
    figure, axes = plt.subplots(figsize=(7.5, 5.2), layout="constrained")
    ends = []
    for name, points in plan["curves"].items():
        rates = [(point["nodes"], point["tflops"] if point["fits"] else float("nan")) for point in points]
        drawn = [pair for pair in rates if pair[1] == pair[1]]
        if not drawn:
            continue
        colour, width = "#D55E00" if "hzero" in name else "#6e7781", 3.0 if name == "hzero topo" else 1.2
        axes.plot(*zip(*rates), "-" if name.startswith("hzero ") else "--", color=colour, linewidth=width)
        ends.append((*drawn[-1], name, colour))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(ylim=(0, None), xlabel=f"nodes of {plan['profile']}", ylabel="model TFLOPS per device, predicted")
    axes.set_title(f"{plan['work']} and step", fontsize=9)
    axes.grid(alpha=0.2)
    place, (_, top) = float("-inf"), axes.get_ylim()
    # Names are placed next to the ends, far enough apart to be read.
    for nodes, rate, name, colour in sorted(ends, key=lambda end: end[1]):
        place, line = max(rate, place + top / 30), {"arrowstyle": "-", "color": "#d0d7de", "relpos": (0, 0.5)}
        where: Any = {"xytext": (1.04, place / top), "textcoords": "axes fraction", "va": "center", "arrowprops": line}
        axes.annotate(name, (nodes, rate), fontsize=7.5, color=colour, **where)
    return figure


if __name__ == "__main__":
    main(*sys.argv[1:])
