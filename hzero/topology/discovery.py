"""Discovery: every rank reports where it sits, rank 0 finds the grid, and all ranks receive the same answer.

A rank sends a few hundred bytes and receives about as many, in a world of any size.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hzero.topology.device import own_device
from hzero.topology.exchange import Exchange
from hzero.topology.grid import Grid
from hzero.topology.machine import Device, Link, Machine, merge_links
from hzero.topology.sources import machine_of
from hzero.topology.tiers import positions
from hzero.validation import ConfigError, some


@dataclass(frozen=True)
class RankReport:
    """One rank's own device and that device's links.

    Attributes:
        rank: The rank.
        host: Identity of its node.
        device: Its device; None for a rank on a CPU.
        links: Direct links of the device: identity of the other end, kind, count, GB/s.
        package: Identities of the devices of its package where the source declares packages.
        fabric: Kinds of the node's NICs, such as ``cxi``.
        switch_nodes: Nodes of one switch group of the network, where the source declares it.
    """

    rank: int
    host: str
    device: Device | None
    links: tuple[tuple[str, str, int | None, float | None], ...] = ()
    package: tuple[str, ...] = ()
    fabric: str = ""
    switch_nodes: int | None = None

    @classmethod
    def of(cls, rank: int, host: str, machine: Machine, device: Device | None) -> RankReport:
        """The report of a rank on a device of its node."""
        own = device.number if device is not None else -1
        ends = [(link, link.b if link.a == own else link.a) for link in machine.links if own in (link.a, link.b)]
        links = [(machine.device(peer).identity, link.kind, link.count, link.gb_s) for link, peer in ends]
        package = next((members for members in machine.packages or () if own in members), ())
        identities = tuple(machine.device(number).identity for number in package)
        fabric = "+".join(sorted({nic.kind for nic in machine.nics if nic.kind}))
        return cls(rank, host, device, tuple(links), identities, fabric, machine.switch_nodes)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RankReport:
        """The report that ``dataclasses.asdict`` and JSON have made values of."""
        device = Device(**values["device"]) if values["device"] else None
        links = tuple(map(tuple, values["links"]))
        return cls(**{**values, "device": device, "links": links, "package": tuple(values["package"])})


@dataclass(frozen=True)
class Place:
    """Where one rank sits.

    Attributes:
        rank: The rank.
        host: Its node.
        package: Index of its package in the node, in the order of PCI bus ids, hive after hive.
        gcd: Index of its device in the package.
    """

    rank: int
    host: str
    package: int
    gcd: int


@dataclass(frozen=True)
class Discovery:
    """The result of a discovery.

    Attributes:
        grid: The grid of the world; None where it is not rectangular.
        refusal: Why no grid exists; empty with a grid.
        notes: Remarks for the user: several fabrics, ranks without devices.
        reports: The report of each rank, in rank order; empty on all ranks but the first.
        places: Where each rank sits, in rank order; empty on all ranks but the first.
    """

    grid: Grid | None
    refusal: str = ""
    notes: tuple[str, ...] = ()
    reports: Sequence[RankReport] = ()
    places: Sequence[Place] = ()

    def required_grid(self) -> Grid:
        """The grid. Raises `ConfigError` with `refusal` if it is None."""
        if self.grid is None:
            raise ConfigError(self.refusal, elsewhere=not self.reports)
        return self.grid


def discover(
    source: str = "auto", exchange: Exchange | None = None, environ: Mapping[str, str] = os.environ
) -> Discovery:
    """Finds where all ranks sit. Collective: every rank of the world calls it.

    Args:
        source: The source of a node: ``auto`` for this machine, a preset, or a file.
        exchange: Carries the reports; by default the store of the process group.
        environ: The environment of this rank: the devices it sees, and its place among them.

    Raises:
        ConfigError: A rank cannot identify its device, did not come in time, reports contradict each other, or packages
            are ambiguous: the same message on all ranks.
    """
    exchange = exchange or Exchange.of_group()
    found: list[Discovery] = []

    def own() -> dict[str, Any]:
        machine = machine_of(source, environ)
        report = RankReport.of(exchange.rank, host_identity(environ), machine, own_device(machine, environ))
        return dataclasses.asdict(report)

    def combine(reports: list[dict[str, Any]]) -> dict[str, Any]:
        found.append(assemble([RankReport.from_json(report) for report in reports]))
        return dataclasses.asdict(dataclasses.replace(found[0], reports=(), places=()))

    answer = exchange.agree(own, combine)
    if found:
        return found[0]
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in (answer["grid"] or {}).items()}
    return Discovery(Grid(**values) if values else None, answer["refusal"], tuple(answer["notes"]))


def host_identity(environ: Mapping[str, str] = os.environ) -> str:
    """The name of this node: ``NCCL_HOSTID`` where it is set, as for NCCL and RCCL; else host name and boot id.

    The boot id distinguishes machines of one name.
    """
    if stated := environ.get("NCCL_HOSTID"):
        return stated
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        return socket.gethostname()
    return f"{socket.gethostname()}/{boot}"


def assemble(reports: Sequence[RankReport]) -> Discovery:
    """The world that the reports of its ranks, in rank order, add up to.

    Raises:
        ConfigError: Reports contradict each other, or packages are ambiguous.
    """
    hosts = by_host(reports)
    places = sorted((place for ranks in hosts.values() for place in places_of(ranks)), key=lambda place: place.rank)
    fabrics = {ranks[0].fabric or "no known NIC" for ranks in hosts.values()}
    notes = []
    if len(fabrics) > 1:
        notes.append(f"nodes are on {len(fabrics)} fabrics ({', '.join(sorted(fabrics))}), which tier node joins")
    if all(report.device is None for report in reports):
        notes.append("no GPUs found: each rank is treated as a package of one device")
    declared = {report.switch_nodes for report in reports}
    switch_nodes = declared.pop() if len(declared) == 1 else None  # unknown if the sources of the nodes differ
    try:
        grid, refusal = dataclasses.replace(grid_of(places), automatic=True, switch_nodes=switch_nodes), ""
        if not grid.regular:
            notes.append(
                "ranks are numbered in no regular order, so each gather and reduction reorders shards in a pass of its own; "
                "numbering the ranks of a node by PCI bus id saves it"
            )
    except ConfigError as error:
        grid, refusal = None, str(error)
    return Discovery(grid, refusal, tuple(notes), tuple(reports), tuple(places))


def by_host(reports: Iterable[RankReport]) -> dict[str, list[RankReport]]:
    """Reports of each node, nodes in the order of their first report."""
    hosts: dict[str, list[RankReport]] = {}
    for report in reports:
        hosts.setdefault(report.host, []).append(report)
    return hosts


def places_of(reports: Sequence[RankReport]) -> list[Place]:
    """Where the ranks of one node sit, from the reports of all of them, in rank order.

    Raises:
        ConfigError: Reports contradict each other, or the packages are ambiguous; the message names the node.
    """
    host = reports[0].host
    without = [report.rank for report in reports if report.device is None]
    if len(without) == len(reports):
        return [Place(report.rank, host, index, 0) for index, report in enumerate(reports)]
    if without:
        raise ConfigError(f"topology: ranks {without} of node {host} have no device, the other ranks there have one")
    machine = node_of(reports)
    found = positions(machine, of_ranks=True)
    named = {device.identity: found[device.number] for device in machine.devices}
    placed = [(report.rank, named[report.device.identity]) for report in reports if report.device is not None]
    return [Place(rank, host, position.node_package, position.gcd) for rank, position in placed]


def node_of(reports: Sequence[RankReport]) -> Machine:
    """The node that the reports of its ranks add up to.

    Ranks may see less than the node: under task cgroups each reads its own device alone, and numbers the others. So
    devices have numbers of their own here, and a device without a rank is hidden: only links of others to it are known.

    Raises:
        ConfigError: Two ranks contradict each other on a link.
    """
    own = {report.device.identity: report.device for report in reports if report.device is not None}
    packages = {tuple(sorted(report.package)) for report in reports if report.package}
    named = {name for report in reports for name in (*(peer for peer, *_ in report.links), *report.package)}
    names = [*sorted(own, key=lambda name: (own[name].bus, own[name].number)), *sorted(named - {*own})]
    number = {name: index for index, name in enumerate(names)}
    hidden = [Device(number[name], node=name, hidden=True) for name in names[len(own) :]]
    devices = [dataclasses.replace(device, number=number[name], node=name) for name, device in own.items()]
    links = [
        Link(number[report.device.identity], number[peer], kind, count, gb_s)
        for report in reports
        if report.device is not None
        for peer, kind, count, gb_s in report.links
    ]
    singles = [(number[name],) for name in names if name not in {name for package in packages for name in package}]
    declared = (*(tuple(number[name] for name in package) for package in packages), *singles) if packages else None
    source = f"topology: node {reports[0].host}"
    return Machine(source, (*devices, *hidden), merge_links(source, links), packages=declared)


# ---- the grid of all places ---------------------------------------------------------------------------------------------


def grid_of(places: Sequence[Place]) -> Grid:
    """The grid of a world whose nodes all have the same packages, and packages the same number of devices.

    Coordinates follow physical places, so that groups of tier ``gpu`` hold devices at the same position of their
    packages, and those of tier ``node`` the same packages; they are numbered as the ranks are if one of the six
    orders of axes allows it. Nodes whose ranks go through packages in different orders are paired by rank. Where no
    order holds, the grid lists the rank of every place.

    Args:
        places: One per rank, in rank order.

    Raises:
        ConfigError: Two ranks sit on one device, or the world is not rectangular; the message names the nodes that differ.
    """
    table = _table(places)
    shapes = {
        host: tuple(sorted((len(package) for package in packages.values()), reverse=True))
        for host, packages in table.items()
    }
    first = next(iter(shapes.values()))
    if any(shape != first for shape in shapes.values()) or len(set(first)) != 1:
        raise ConfigError(_refusal(shapes))
    physical = [
        [[gcds[gcd] for gcd in sorted(gcds)] for _, gcds in sorted(packages.items())] for packages in table.values()
    ]
    by_place = _numbered_as_ranks(physical)
    by_rank = [sorted(packages, key=min) for packages in by_place]
    grids = []
    for cells in (by_place, by_rank):
        ranks = [rank for packages in cells for package in packages for rank in package]
        grids.append(Grid(len(cells), len(cells[0]), len(cells[0][0])).numbered(ranks))
    return next((grid for grid in grids if grid.regular), grids[0])


def _table(places: Iterable[Place]) -> dict[str, dict[int, dict[int, int]]]:
    """Ranks by node, package and device, as physical indices number them; nodes in the order of their lowest rank."""
    table: dict[str, dict[int, dict[int, int]]] = {}
    for place in places:
        package = table.setdefault(place.host, {}).setdefault(place.package, {})
        if place.gcd in package:
            raise ConfigError(
                f"topology: ranks {package[place.gcd]} and {place.rank} are on the same device of node {place.host}; each "
                "rank needs a device of its own: bind them with --gpus-per-task=1, LOCAL_RANK or ROCR_VISIBLE_DEVICES"
            )
        package[place.gcd] = place.rank
    return table


def _numbered_as_ranks(cells: list[list[list[int]]]) -> list[list[list[int]]]:
    """The same places with the axes' labels in the order in which rank 0's own node and package number them."""
    node = next(n for n, packages in enumerate(cells) if 0 in itertools.chain(*packages))
    home = next(p for p, package in enumerate(cells[node]) if 0 in package)
    own = cells[node][home].index(0)
    gcds = sorted(range(len(cells[0][0])), key=lambda gcd: cells[node][home][gcd])
    packages = sorted(range(len(cells[0])), key=lambda package: cells[node][package][own])
    nodes = sorted(range(len(cells)), key=lambda node: cells[node][home][own])
    return [[[cells[n][p][g] for g in gcds] for p in packages] for n in nodes]


def _refusal(shapes: dict[str, tuple[int, ...]]) -> str:
    even = Counter(shape for shape in shapes.values() if len(set(shape)) == 1)
    usual = even.most_common(1)[0][0] if even else ()
    odd = [f"node {host} has {_shape(shape)}" for host, shape in shapes.items() if shape != usual]
    others = f"; every other node has {_shape(usual)}" if len(odd) < len(shapes) else ""
    return (
        f"topology: the ranks do not form a grid of nodes x packages x devices: {some(odd, 4)}{others}. Start the same number of "
        "ranks on the same packages of every node"
    )


def _shape(shape: Sequence[int]) -> str:
    return f"{sum(shape)} ranks on packages of {'/'.join(map(str, shape))}"
