"""Shows a node: packages, devices, links by number and kind, NICs, tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import permutations

from rich import box
from rich.console import Console
from rich.table import Table

from hzero.terminal import WIDTH
from hzero.topology.machine import AmbiguousTopologyError, Link, Machine
from hzero.topology.tiers import Level, packages_of

#: Largest number of devices in a matrix of links.
_MATRIX = 24
#: Letters of link kinds in the matrix, where a node has several.
_LETTERS = {"xgmi": "x", "nvlink": "n", "nvswitch": "s", "pcie": "p"}


def show_machine(machine: Machine, console: Console) -> None:
    """Prints the node. Ambiguous packages are shown as not known."""
    try:
        packages: Sequence[Sequence[int]] | None = packages_of(machine)
    except AmbiguousTopologyError:
        packages = None
    counts = [_plural(len(machine.devices), "device")]
    counts += [_plural(len(packages), "package") if packages is not None else "packages not known"]
    counts += [_plural(len(machine.nics), "NIC")] if machine.nics else []
    console.print(f"{machine.source}: {', '.join(counts)}\n", soft_wrap=True)
    home = {number: str(index) for index, package in enumerate(packages or ()) for number in package}
    devices = sorted(machine.devices, key=lambda device: (int(home.get(device.number, -1)), device.number))
    rows = [(home.get(d.number, "?"), d.number, d.bus, d.kind[:30], d.numa, d.nic) for d in devices]
    show_table(console, ("package", "device", "bus", "kind", "NUMA", "NIC"), rows)
    if len(devices) > 1:
        _show_links(machine, packages or [[device.number for device in devices]], console)
    nearest = [" ".join(str(device.number) for device in devices if device.nic == nic.name) for nic in machine.nics]
    nics = [(nic.name, nic.bus, nic.kind, nic.gb_s, nic.numa, near) for nic, near in zip(machine.nics, nearest)]
    show_table(console, ("NIC", "bus", "kind", "GB/s", "NUMA", "nearest of devices"), nics)
    if machine.nics and not any(nearest):
        console.print("remark: the source does not say which NIC is nearest to which device", soft_wrap=True)
    for remark in machine.remarks:
        console.print(f"remark: {remark}", soft_wrap=True)


def show_tiers(tiers: Iterable[Level], console: Console) -> None:
    """Prints one line for each tier of several devices, or with a bandwidth."""
    shown = [tier for tier in tiers if tier.size > 1 or tier.gb_s is not None]
    groups = [" ".join(str(list(group)) for group in tier.groups) if tier.size > 1 else "" for tier in shown]
    rows = [(tier.name, tier.size, tier.gb_s, text[:WIDTH]) for tier, text in zip(shown, groups)]
    show_table(console, ("tier", "size", "GB/s each way", "groups"), rows)
    if not rows:
        console.print("no tiers: no two devices")


def show_table(console: Console, heads: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Prints a table; a column in which no row states anything is left out."""
    kept = [column for column in range(len(heads)) if any(row[column] not in (None, "") for row in rows)]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, title=title or None, title_justify="left")
    for column in kept:
        numbers = all(isinstance(row[column], (int, float, type(None))) for row in rows)
        table.add_column(heads[column], justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        cells = ("-" if row[column] in (None, "") else row[column] for column in kept)
        table.add_row(*(f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in cells))
    if rows:
        console.print(table)
        console.print()


def _show_links(machine: Machine, packages: Sequence[Sequence[int]], console: Console) -> None:
    """Parallel links by pair, in the order of packages, and a legend."""
    if not machine.links:
        console.print("links: the source names no direct links\n")
        return
    several = len({link.kind for link in machine.links}) > 1

    def cell(link: Link) -> str:
        count = "?" if link.count is None else str(link.count)
        return count + (_LETTERS.get(link.kind, "?") if several else "")

    order = [number for package in packages for number in package]
    cells = {pair: cell(link) for link in machine.links for pair in ((link.a, link.b), (link.b, link.a))}
    for pair in permutations([device.number for device in machine.devices if device.hidden], 2):
        cells.setdefault(pair, "?")  # nobody here can read what joins them
    if len(order) <= _MATRIX:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        for head in ("links", *map(str, order)):
            table.add_column(head, justify="right", no_wrap=True)
        ends = {package[-1] for package in packages}
        for row in order:
            line = ("-" if row == column else cells.get((row, column), ".") for column in order)
            table.add_row(str(row), *line, end_section=row in ends and max(map(len, packages)) > 1)
        console.print(table)
    alike = Counter((cell(link), link.kind, link.gb_s) for link in machine.links)
    for (text, kind, gb_s), pairs in sorted(alike.items(), key=lambda item: (-(item[0][2] or 0), item[0][:2])):
        rate = f", {gb_s:g} GB/s each way together" if gb_s is not None else ""
        unknown = ", the source does not count them" if text.startswith("?") else ""
        console.print(f"{text:>5}  {kind}{rate}: {_plural(pairs, 'pair')}{unknown}")
    unread = len(cells) // 2 - len(machine.links)
    routed = len(order) * (len(order) - 1) // 2 - len(machine.links) - unread
    if routed:
        console.print(f"    .  no direct link, routed: {_plural(routed, 'pair')}")
    if unread:
        console.print(f"    ?  both hidden by a cgroup, not known: {_plural(unread, 'pair')}")
    console.print()


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"
