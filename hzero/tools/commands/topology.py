"""Prints the packages, links and NICs of a node as YAML that hzero reads, with its tiers as comments.

sources:
  auto    this machine
  FILE    a declared machine (YAML or JSON), or a topology dump of RCCL or NCCL
  PRESET  a known machine; write ./NAME for a file with such a name

Examples:
  hzero topology frontier
  hzero topology topology.xml > node.yaml     a dump as a file that you can edit, for "topology": "node.yaml"

Exit status 2 if the packages are ambiguous. The known data is printed first.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import yaml

from hzero.errors import printable
from hzero.tools.terminal import Parser
from hzero.topology.node import AmbiguousTopologyError, Node, packages_of, tiers_of
from hzero.topology.sources import PRESETS, read_node


def run_topology(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments. Raises `ConfigError` for invalid input."""
    parser = Parser("hzero topology", __doc__)
    which = f"which node; presets: {', '.join(PRESETS)}"
    parser.add_argument("source", nargs="?", default="auto", metavar="auto|FILE|PRESET", help=which)
    node = read_node(parser.parse_args(arguments).source)
    print(text_of(node))
    for tier in tiers_of(node):
        rate = f", {tier.gb_s:g} GB/s each way" if tier.gb_s is not None else ""
        if rate or tier.size > 1:
            print(f"# tier {tier.name}: {tier.size}{rate}", *map(list, tier.groups if tier.size > 1 else ()))
    return 0


def text_of(node: Node) -> str:
    """A node as YAML that declares it. Devices are renumbered from 0. Ambiguous packages are left out."""
    at = {device.number: index for index, device in enumerate(node.devices)}
    kinds, buses = {device.kind for device in node.devices}, [device.bus for device in node.devices]
    numa = [device.numa for device in node.devices]
    pairs: dict[tuple[Any, ...], list[list[int]]] = {}
    for link in node.links:
        pairs.setdefault((link.kind, link.count, link.gb_s), []).append([at[link.a], at[link.b]])
    packages = None
    with contextlib.suppress(AmbiguousTopologyError):
        packages = [[at[number] for number in package] for package in packages_of(node)]
    declared = {
        "kind": kinds.pop() if len(kinds) == 1 else "",
        "devices": len(at),
        "packages": packages,
        "buses": buses if all(buses) else None,
        "numa": None if None in numa else numa,
        "switch_nodes": node.switch_nodes,
    }
    links = [dict(zip(("kind", "count", "gb_s", "pairs"), (*key, found))) for key, found in pairs.items()]
    lines = [f"# {printable(line)}" for line in (node.source, *node.remarks)]
    lines += [_flow({key: value})[1:-1] for key, value in declared.items() if value or key == "devices"]
    # Without subnets, which differ between the nodes that one file describes.
    nics = [{"name": nic.name, "kind": nic.kind, "gb_s": nic.gb_s} for nic in node.nics]
    for key, rows in (("links", links), ("nics", nics)):
        lines += [f"{key}:", *(f"  - {_flow(row)}" for row in rows)] if rows else []
    return "\n".join(lines)


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    return str(yaml.safe_dump(value, sort_keys=False, default_flow_style=True, width=math.inf)).strip()
