"""Draws the JSON of `hzero plan --against` as TFLOPS per device by nodes: ``python docs/sweep.py PLAN.json PICTURE.png``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(source: str, picture: str) -> None:
    """Draws a curve for each scheme. A curve ends or has a gap where the scheme does not fit or cannot divide the batch."""
    plan = json.loads(Path(source).read_text())
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
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    main(*sys.argv[1:])
