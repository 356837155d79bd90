"""Scopes and machines of DeepSpeed on 1, 6 and 8 ranks. Run by test_parity.py.

Weights and gradients have every pair of scopes that nests, from ZeRO-1 to ZeRO-3, without codecs, on 6 or on 8 ranks; and
codecs on every tier. Some pairs of the larger machines are left out.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

from hzero.config import TopologyConfig
from hzero.topology import resolve_grid
from tests.parity.compare import LAYOUT, WORLD, Row, row, rows
from tests.parity.deepspeed import Session
from tests.parity.deepspeed_rows import AT_RANDOM

_of = functools.partial(rows, Session)
#: The usual machine; then, on 8 ranks, two groups of two nodes of two packages; two groups of one node of 2 x 2 devices; two
#: clusters of one node with two hives of two packages.
MACHINES: list[dict[str, Any]] = [dict(zip(("nodes", "packages_per_node", "devices_per_package"), LAYOUT))]
if WORLD == 8:
    MACHINES += [
        {"nodes": 4, "packages_per_node": 2, "devices_per_package": 1, "nodes_per_group": 2},
        {"nodes": 2, "packages_per_node": 2, "devices_per_package": 2, "nodes_per_group": 1},
        {"nodes": 2, "packages_per_node": 4, "devices_per_package": 1, "packages_per_hive": 2, "clusters": 2},
    ]
#: Tiers of size one: no hop inside, every hop inside, one node.
LAYOUTS = [(2, 4, 1), (1, 1, 8), (8, 1, 1), (1, 4, 2)] if WORLD == 8 else []
#: Ranks that are not numbered from the innermost tier.
REORDERED = {**MACHINES[0], "order": ["intra_node", "inter_node", "intra_package"]}


def _lattice() -> Iterator[Row]:
    for number, machine in enumerate(MACHINES):
        scopes = resolve_grid(TopologyConfig(**machine), WORLD).scopes
        pairs = list(itertools.combinations_with_replacement(scopes, 2))
        if number:
            pairs = [pair for pair in pairs if {"hive", "group", "cluster"} & set(pair)][::5]
        for place, (weights, gradients) in enumerate(pairs if number else pairs[WORLD == 6 :: 2]):
            shard = {"weights": weights, "gradients": gradients}
            yield row("lossless", 1 + 2 * (place % 2), block={"shard": shard, "topology": machine})


def _coded() -> Iterator[Row]:
    leaves = [("bf16", "node"), ("int8", "package"), ("int4", "node"), (AT_RANDOM, "package"), ("int4", "world")]
    leaves.append(({"codec": "int4", "rotation": 128}, "device"))
    for leaf, scope in leaves if WORLD == 8 else leaves[2:3]:
        weights = {"intra_package": leaf, "intra_node": "int8", "inter_node": leaf}
        shard = {"weights": scope, "gradients": "world"}
        yield row("lossless", 2, block={"shard": shard, "codecs": {"weights": weights, "gradients": leaf}})


ROWS = {
    "layouts": _of(
        *(row("lossless", layout=layout) for layout in LAYOUTS),
        *([row("lossless", block={"topology": REORDERED})] if WORLD == 8 else []),
        row("zero3", "small", 2),
    ),
    "coded_scopes": _of(*_coded(), row("topo", 3), row("replica")),
}
LONG_ROWS = {"scopes": _of(*_lattice(), row("zero1", 3, block={"resident": "payload"}))}
