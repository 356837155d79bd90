"""Prints what a layer of GPT-NeoX-20B sends between the nodes of Frontier: parts for each peer, and the peers.

    python -m benchmarks.counts.messages [PRESET ...] [--nodes 48 384 9408]

At the boundary, a layer's part waits for the parts of other layers until together they have ``boundary_message_bytes``.
"""

from __future__ import annotations

import argparse
import dataclasses
import math

from hzero.codecs.formats import chunk_numel
from hzero.config import NET_TIERS, PRESETS, parse_config
from hzero.errors import one_of
from hzero.program.program import StagePrograms
from hzero.program.shards import ShardPlan
from hzero.tools.terminal import positive
from hzero.topology import Grid

#: Nodes of a switch group of Frontier (hzero/topology/presets/frontier.yaml).
SWITCH_NODES = 128


def numels_of(width: int) -> tuple[int, ...]:
    """Parameters of a GPT-NeoX layer: weights and biases of two norms, of attention and of the MLP."""
    return (*(width,) * 4, 3 * width**2, 3 * width, width**2, width, 4 * width**2, 4 * width, 4 * width**2, width)


def parts(preset: str, nodes: int) -> list[tuple[str, str, int, float, int]]:
    """Of each hop between nodes: phase, tier, peers, bytes of a part, and the layers that share a message."""
    grid = dataclasses.replace(Grid(nodes, 4, 2), automatic=True, switch_nodes=SWITCH_NODES)
    plan = ShardPlan.from_config(parse_config({"preset": preset}), grid, 0)
    programs, found = StagePrograms.of(plan), []
    chunks = tuple(chunk_numel(numel, grid.world_size) for numel in numels_of(6144))
    for phase in ("refresh", "unshard", "micro", "boundary", "outermost"):
        for cross in getattr(programs, phase).crossings:
            if cross.tiers[0] in NET_TIERS:
                whole = cross.message_bytes(chunks, 2)
                part = whole if cross.kind == "all_gather" else whole / cross.ranks
                layers = max(math.ceil(plan.boundary_message_bytes / part), 1) if phase == "outermost" else 1
                found.append((phase, cross.tiers[0], cross.ranks - 1, part, layers))
    return found


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=positive(int, 100_000), nargs="+", default=[48, 384, 9408])
    parser.add_argument("presets", nargs="*", default=["topo", "lossless", "exact"])
    arguments = parser.parse_args()
    for preset in arguments.presets:
        if preset not in PRESETS:
            parser.error(str(one_of("presets", preset, PRESETS)))
    print("| preset | nodes | phase | tier | peers | KiB for each peer | layers in a message | KiB for each peer |")
    print("|---" * 8 + "|")
    for preset in arguments.presets:
        for nodes in arguments.nodes:
            for phase, tier, peers, part, layers in parts(preset, nodes):
                kib = part / 1024
                print(
                    f"| {preset} | {nodes:,} | {phase} | {tier} | {peers} | {kib:,.1f} | {layers} | {layers * kib:,.1f} |"
                )


if __name__ == "__main__":
    main()
