"""Suites of the comparison in the report's order: what they are, and how the report shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Suite:
    """How a suite is shown.

    Attributes:
        what: What it is, for the list of what was measured.
        shown: ``detail``: each measurement by itself; ``series``: along an axis; ``ablation``: a line a peer; ``losses``:
            with the runs of training.
        title: Heading of its part, where it has one of its own.
        axis: Of a series: what changes, with its unit.
        column: Of a series: head of a value's column.
    """

    what: str
    shown: Literal["detail", "series", "ablation", "losses"]
    title: str = ""
    axis: str = ""
    column: str = ""


SUITES = {
    "main": Suite("the main measurement, which the targets are about", "detail"),
    "reduce_scatter": Suite("other reduce-scatters for the peers", "detail"),
    "accumulation": Suite(
        "accumulation of gradients over micro-steps", "series", "Accumulation", "micro-steps a step", "accumulation {}"
    ),
    "nodes_weak": Suite(
        "numbers of nodes, the same work a rank", "series", "Nodes, weak scaling", "nodes", "nodes: {}"
    ),
    "nodes_strong": Suite(
        "numbers of nodes, the same work in all", "series", "Nodes, strong scaling", "nodes", "nodes: {}"
    ),
    "sweep": Suite("rates between nodes", "series", "Bandwidth between nodes", "Mbit/s a node", "{} Mbit/s a node"),
    "codecs": Suite("codecs of `topo`", "ablation", "Codecs"),
    "shards": Suite("shard degrees of `topo`", "ablation", "Shard degrees"),
    "training": Suite("step times of the job that the convergence runs train", "losses"),
    "convergence": Suite("convergence over many steps and seeds", "losses"),
}


def shown_as(suite: str) -> str:
    """How a suite is shown; each measurement of an unknown one by itself."""
    return SUITES[suite].shown if suite in SUITES else "detail"
