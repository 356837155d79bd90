"""``hzero topology``: shows a node as the stage sees it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hzero.terminal import console, show_table
from hzero.topology.machine import AmbiguousTopologyError, Link, Machine, packages_of, tiers_of
from hzero.topology.sources import PRESETS, machine_of
from hzero.validation import Parser

_EXAMPLES = f"""sources:
  auto    this machine
  FILE    a declared machine (YAML or JSON), a topology dump of RCCL or NCCL, or a saved nvidia-smi topo -m
  PRESET  {", ".join(PRESETS)}; a file of such a name is ./NAME

examples:
  hzero topology frontier
  hzero topology topology.xml --json

Exit status 2 if the packages are ambiguous; all known data is printed first."""

#: Largest number of devices in a matrix of links.
_MATRIX = 24


def run_topology(arguments: Sequence[str]) -> int:
    """Runs the command on its arguments. Raises `ConfigError` for input that cannot be used."""
    about = "Shows the packages, links and NICs of a node, and the tiers that follow from them."
    parser = Parser("hzero topology", about, _EXAMPLES)
    parser.add_argument("source", nargs="?", default="auto", metavar="auto|FILE|PRESET", help="which node")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parsed = parser.parse_args(arguments)
    machine = machine_of(parsed.source)
    if parsed.json:
        print(json.dumps(as_json(machine), indent=1))
    else:
        show_machine(machine, out := console())
        # One line for each tier of several devices, or with a bandwidth.
        tiers = [tier for tier in tiers_of(machine) if tier.size > 1 or tier.gb_s is not None]
        groups = [" ".join(str(list(group)) for group in tier.groups) if tier.size > 1 else "" for tier in tiers]
        rows = [(tier.name, tier.size, tier.gb_s, text[:100]) for tier, text in zip(tiers, groups)]
        show_table(out, ("tier", "size", "GB/s each way", "groups"), rows)
        if not rows:
            out.print("no tiers: no two devices")
    return 0


def as_json(machine: Machine) -> dict[str, Any]:
    """The node as plain values: what ``--json`` prints. Devices carry the source's own numbers.

    Raises:
        AmbiguousTopologyError: Its packages are ambiguous.
    """
    values = dataclasses.asdict(machine)
    tiers = [dataclasses.asdict(tier) for tier in tiers_of(machine)]
    return {"tiers": tiers, **{key: values[key] for key in ("source", "devices", "links", "nics", "remarks")}}


def show_machine(machine: Machine, out: Console) -> None:
    """Prints the node. Ambiguous packages are shown as not known."""
    try:
        packages: Sequence[Sequence[int]] | None = packages_of(machine)
    except AmbiguousTopologyError:
        packages = None
    counts = [_plural(len(machine.devices), "device")]
    counts += [_plural(len(packages), "package") if packages is not None else "packages not known"]
    counts += [_plural(len(machine.nics), "NIC")] if machine.nics else []
    out.print(f"{machine.source}: {', '.join(counts)}\n", soft_wrap=True)
    order = [number for package in packages for number in package] if packages else [d.number for d in machine.devices]
    home = {number: index for index, package in enumerate(packages or ()) for number in package}
    rows = [(home.get(d.number), d.number, d.bus, d.kind[:30], d.numa) for d in map(machine.device, order)]
    show_table(out, ("package", "device", "bus", "kind", "NUMA"), rows)
    if len(order) > 1:
        _show_links(machine, order, out)
    show_table(out, ("NIC", "kind", "GB/s"), [(nic.name, nic.kind, nic.gb_s) for nic in machine.nics])
    for remark in machine.remarks:
        out.print(f"remark: {remark}", soft_wrap=True)


def _show_links(machine: Machine, order: Sequence[int], out: Console) -> None:
    """Parallel links by pair, in the order of packages, and how many pairs have which links."""
    if len(order) <= _MATRIX and machine.links:
        table = Table("links", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        for number in order:
            table.add_column(str(number), justify="right", no_wrap=True)
        for row in order:
            table.add_row(str(row), *("-" if row == other else _count(machine.link(row, other)) for other in order))
        out.print(table)
        out.print()
    alike = Counter((_count(link), link.kind, link.gb_s) for link in machine.links)
    rows = [(*links, pairs) for links, pairs in sorted(alike.items(), key=lambda item: -(item[0][2] or 0))]
    routed = len(order) * (len(order) - 1) // 2 - len(machine.links)
    rows += [(".", "no direct link, or none that this process can read", None, routed)] if routed else []
    show_table(out, ("links", "kind", "GB/s each way together", "pairs"), rows)


def _count(link: Link | None) -> str:
    """Number of links; ? where the source does not count them."""
    return "." if link is None else "?" if link.count is None else str(link.count)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"
