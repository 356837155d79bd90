"""Draws docs/step.png: bytes into a node per step, by scheme. Run: python docs/step.py."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from hzero.config import parse_config
from hzero.program.collectives import node_bytes, schemes_node_bytes, step_traffic
from hzero.program.shards import ShardPlan
from hzero.tools.experiment import compose
from hzero.tools.plan.scenario import expected_bits, expecting

RED, GREY = "#D55E00", "#8c959f"


def main() -> None:
    """Writes the picture beside this file."""
    experiment = compose(["experiment=paper_20b", "topology.nodes=48"])
    grid, numels, accumulation = experiment.grid, experiment.architecture.numels, 8
    bits = expected_bits(experiment["train"]["lr"])

    def into_node(preset: str) -> float:
        plan = expecting(ShardPlan.from_config(parse_config({"preset": preset}), grid, 0), bits)
        return node_bytes(step_traffic(plan, grid, numels, accumulation=accumulation), grid)

    others = schemes_node_bytes(grid, numels, accumulation=accumulation)
    bars = {
        "ZeRO-3 and FSDP2": others["ZeRO-3"],
        "ZeRO++": others["ZeRO++"],
        "HSDP over the node": others["HSDP, node"],
        **{f"hzero {preset}": into_node(preset) for preset in ("lossless", "topo", "exact")},
    }
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    for place, (name, count) in enumerate(bars.items()):
        colour = RED if name.startswith("hzero") else GREY
        axes.barh(place, count / 1e9, 0.66, color=colour)
        axes.text(
            count / 1e9 + 8, place, f"{count / 1e9:.0f} GB", va="center", fontsize=12, color=colour, weight="bold"
        )
    axes.set_yticks(range(len(bars)), list(bars), fontsize=12)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.13 * others["ZeRO-3"] / 1e9)
    axes.xaxis.set_visible(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False)
    title = "Bytes into each node per step\nGPT-NeoX-20B, 48 Frontier nodes, 8 micro-batches, computed"
    axes.set_title(title, loc="left", fontsize=11)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main()
