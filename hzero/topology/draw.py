"""Draws a node: packages, devices, links by their number, NICs. As text here, as a picture in `hzero.topology.picture`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import permutations

from hzero.topology.machine import Link, Machine
from hzero.topology.picture import known_packages, plural, png
from hzero.topology.tiers import Tier

__all__ = ["WIDTH", "png", "text", "tier_text"]

WIDTH = 100

#: Letters of link kinds in the matrix, where a node has several.
_LETTERS = {"xgmi": "x", "nvlink": "n", "nvswitch": "s", "pcie": "p"}


def text(machine: Machine) -> str:
    """The node as text of at most `WIDTH` columns for up to 32 devices. Ambiguous packages are drawn as not known."""
    packages = known_packages(machine)
    counts = [plural(len(machine.devices), "device")]
    counts += [plural(len(packages), "package")] if packages is not None else ["packages not known"]
    counts += [plural(len(machine.nics), "NIC")] if machine.nics else []
    blocks = [[f"{machine.source}: {', '.join(counts)}"], _device_lines(machine, packages)]
    if len(machine.devices) > 1:
        blocks.append(_matrix_lines(machine, packages))
    if machine.nics:
        blocks.append(_nic_lines(machine))
    if machine.remarks:
        blocks.append([f"remark: {remark}" for remark in machine.remarks])
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks if block) + "\n"


def tier_text(tiers: Sequence[Tier]) -> str:
    """One line a tier of more than one device, or with a bandwidth."""
    lines = []
    for tier in tiers:
        if tier.size == 1 and tier.gb_s is None:
            continue
        groups = "" if tier.size == 1 else " ".join(str(list(group)) for group in tier.groups)
        rate = f"{tier.gb_s:.4g} GB/s" if tier.gb_s is not None else ""
        latency = f"{tier.latency_us:g} us" if tier.latency_us is not None else ""
        line = f"  {tier.name:<8}{tier.size:>4}  {rate:>10}  {latency:>8}  {groups}".rstrip()
        lines.append(line if len(line) <= WIDTH else line[: WIDTH - 4] + " ...")
    head = f"  {'tier':<8}{'size':>4}  {'each way':>10}  {'latency':>8}  groups"
    return "\n".join([head, *lines]) + "\n" if lines else "  no tiers: no two devices\n"


def _device_lines(machine: Machine, packages: Sequence[Sequence[int]] | None) -> list[str]:
    home = {number: str(index) for index, package in enumerate(packages or ()) for number in package}
    head = ("package", "device", "bus", "kind", "NUMA", "NIC")
    rows = [
        (
            home.get(device.number, "?"),
            str(device.number),
            device.bus or "-",
            device.kind[:30] or "-",
            str(device.numa) if device.numa is not None else "-",
            device.nic or "-",
        )
        for device in sorted(machine.devices, key=lambda device: (int(home.get(device.number, -1)), device.number))
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = []
    before = ""
    for row in (head, *rows):
        cells = list(row)
        if row is not head and packages is not None and row[0] == before:
            cells[0] = ""  # once a package
        before = row[0]
        # Numbers to the right, names to the left.
        aligned = [cell.rjust(width) if column in (0, 1, 4) else cell.ljust(width)
                   for column, (cell, width) in enumerate(zip(cells, widths))]  # fmt: skip
        lines.append("  " + "  ".join(aligned))
    return lines if rows else []


def _matrix_lines(machine: Machine, packages: Sequence[Sequence[int]] | None) -> list[str]:
    """Parallel links by pair, in order of packages, with a bar between packages of several devices."""
    if not machine.links:
        return ["links: the source names no direct links"]
    groups = packages if packages is not None else [[device.number for device in machine.devices]]
    order = [number for group in groups for number in group]
    bars = {group[-1] for group in groups[:-1]} if max(map(len, groups)) > 1 else set()
    kinds = {link.kind for link in machine.links}
    cells: dict[tuple[int, int], str] = {}
    for link in machine.links:
        cells[link.a, link.b] = cells[link.b, link.a] = _cell(link, len(kinds) > 1)
    for a, b in permutations([device.number for device in machine.devices if device.hidden], 2):
        cells.setdefault((a, b), "?")  # nobody here can read what joins them
    width = max(map(len, [*cells.values(), *map(str, order)])) + 1

    def line(head: str, entries: Iterable[tuple[int, str]]) -> str:
        return f"  {head:>4} " + "".join(
            f"{entry:>{width}}" + (" |" if number in bars else "") for number, entry in entries
        )

    legend = _legend(machine, len(kinds) > 1)
    lines = [line("", ((number, str(number)) for number in order))]
    if len(lines[0]) > WIDTH:
        return [f"links of {len(order)} devices (too many for a matrix)", *legend]
    for row in order:
        entries = ((number, "-" if number == row else cells.get((row, number), ".")) for number in order)
        lines.append(line(str(row), entries))
        if row in bars:
            lines.append("       " + "-" * (len(lines[0]) - 7))
    return ["parallel links of each pair of devices", *lines, *legend]


def _cell(link: Link, several_kinds: bool) -> str:
    return ("?" if link.count is None else str(link.count)) + (_LETTERS.get(link.kind, "?") if several_kinds else "")


def _legend(machine: Machine, several_kinds: bool) -> list[str]:
    groups = Counter((_cell(link, several_kinds), link.kind, link.gb_s) for link in machine.links)
    count = len(machine.devices)
    hidden = sum(device.hidden for device in machine.devices)
    unread = hidden * (hidden - 1) // 2
    routed = count * (count - 1) // 2 - len(machine.links) - unread
    lines = []
    for (cell, kind, gb_s), pairs in sorted(
        groups.items(), key=lambda item: (-(item[0][2] or 0), item[0][0], item[0][1])
    ):
        rate = f", {gb_s:g} GB/s each way together" if gb_s is not None else ""
        number = " (how many is not stated)" if cell.startswith("?") else ""
        lines.append(f"  {cell:>4}  {kind}{rate}: {plural(pairs, 'pair')}{number}")
    if routed:
        lines.append(f"  {'.':>4}  no direct link, routed: {plural(routed, 'pair')}")
    return [*lines, f"  {'?':>4}  both hidden by a cgroup, not known: {plural(unread, 'pair')}"] if unread else lines


def _nic_lines(machine: Machine) -> list[str]:
    head = ("NIC", "bus", "kind", "GB/s", "NUMA", "nearest of devices")
    rows = [
        (
            nic.name,
            nic.bus or "-",
            nic.kind or "-",
            f"{nic.gb_s:g}" if nic.gb_s is not None else "-",
            str(nic.numa) if nic.numa is not None else "-",
            " ".join(str(device.number) for device in machine.devices if device.nic == nic.name) or "-",
        )
        for nic in machine.nics
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in (head, *rows)]
