"""Draws docs/step.png: the traffic of a step by tier, and the bytes into a node by scheme. Run: python docs/step.py."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

from hzero.config import parse_config
from hzero.experiment import compose
from hzero.plan.collectives import node_bytes, schemes_node_bytes, step_traffic
from hzero.plan.shards import ShardPlan
from hzero.topology.grid import Grid

BLUE, RED, GREY = "#0072B2", "#D55E00", "#999999"


def draw_step(axes: plt.Axes) -> None:
    """The tiers as nested boxes, the hops as labelled arrows."""
    axes.set_xlim(0, 10)
    axes.set_ylim(0, 6.4)
    axes.axis("off")
    for left in (0.2, 5.3):
        axes.add_patch(FancyBboxPatch((left, 0.4), 4.5, 4.1, boxstyle="round,pad=0.05", fc="#f3f3f3", ec=GREY))
        axes.text(left + 2.25, 0.5, "node", ha="center", color="#555555")
        for bottom in (1.0, 2.8):
            axes.add_patch(
                FancyBboxPatch((left + 0.3, bottom), 3.9, 1.35, boxstyle="round,pad=0.05", fc="white", ec=GREY)
            )
            axes.text(left + 2.25, bottom + 0.07, "package", ha="center", color="#555555", fontsize=8)
            for gcd in (0, 1):
                x = left + 0.5 + gcd * 2.2
                axes.add_patch(
                    FancyBboxPatch((x, bottom + 0.42), 1.3, 0.75, boxstyle="round,pad=0.04", fc="#e8f1f8", ec=BLUE)
                )
                axes.text(x + 0.65, bottom + 0.78, "GCD", ha="center", va="center")
            axes.annotate(
                "",
                (left + 2.7, bottom + 0.8),
                (left + 1.8, bottom + 0.8),
                arrowprops={"arrowstyle": "<->", "color": BLUE, "lw": 2},
            )
        axes.annotate(
            "", (left + 1.15, 2.9), (left + 1.15, 2.2), arrowprops={"arrowstyle": "<->", "color": BLUE, "lw": 1.5}
        )
    axes.annotate("", (5.2, 3.6), (4.8, 3.6), arrowprops={"arrowstyle": "<->", "color": RED, "lw": 3})
    lines = [
        (BLUE, "per micro-step, inside the node: gather weights from the other GCD (int8), sum gradients (int4)"),
        (RED, "per step, between nodes: refresh the weights (int8), sum the gradients (int4)"),
    ]
    for index, (colour, text) in enumerate(lines):
        axes.text(0.2, 5.9 - 0.5 * index, text, color=colour, fontsize=8.5)


def draw_bytes(axes: plt.Axes) -> None:
    """Bytes into one node per step against micro-batches, of GPT-NeoX-20B on 48 Frontier nodes: computed."""
    grid = Grid(48, 4, 2)
    numels = compose(["model=gpt_neox_20b"]).numels
    steps = [1, 2, 4, 8, 16]
    plan = ShardPlan.from_config(parse_config({"preset": "topo"}), grid, 0)
    own = [node_bytes(step_traffic(plan, grid, numels, accumulation=a), grid) / 1e9 for a in steps]
    for name, colour in (("ZeRO-3", "#000000"), ("hpZ", "#009E73"), ("ZeRO++", "#E69F00")):
        values = [schemes_node_bytes(grid, numels, accumulation=a)[name] / 1e9 for a in steps]
        axes.plot(steps, values, marker="o", color=colour, label=name)
    # An all-reduce in bf16 brings twice the gradients' bytes into a node, whatever the number of micro-batches.
    reduced = 4 * sum(numels) * (grid.nodes - 1) / grid.nodes / 1e9
    axes.plot(steps, [reduced] * len(steps), color="#56B4E9", ls="--", label="DDP (20B does not fit a GCD)")
    axes.plot(steps, own, marker="o", color=RED, lw=2.5, label="hzero topo")
    axes.set(xscale="log", yscale="log", xlabel="micro-batches per step", ylabel="GB into each node per step")
    axes.set_xticks(steps, [str(a) for a in steps])
    axes.minorticks_off()
    axes.set_title("GPT-NeoX-20B on 48 nodes, computed", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)


def main() -> None:
    """Writes the picture beside this file."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained", width_ratios=(1.5, 1))
    draw_step(left)
    draw_bytes(right)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
