"""The report of one rank on itself in a discovery, in a few hundred bytes; and the node that reports add up to."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hzero.topology.machine import AmbiguousTopologyError, Device, Link, Machine
from hzero.topology.placement import Place
from hzero.topology.tiers import Position, positions
from hzero.validation import ConfigError


@dataclass(frozen=True)
class RankReport:
    """One rank's own device and that device's links.

    Attributes:
        rank: The rank.
        world_size: Ranks of the world, according to this rank.
        host: Identity of its node.
        device: Its device; None for a rank of a processor.
        links: Direct links of the device: identity of the other end (its alias where a task's cgroup hides it), kind,
            count, GB/s.
        package: Identities of the devices of its package where the source declares packages.
        fabric: Kinds of the node's NICs, such as ``cxi``.
        switch_nodes: Nodes of one switch group of the network, where the source declares it.
    """

    rank: int
    world_size: int
    host: str
    device: Device | None
    links: tuple[tuple[str, str, int | None, float | None], ...] = ()
    package: tuple[str, ...] = ()
    fabric: str = ""
    switch_nodes: int | None = None

    def encode(self) -> bytes:
        """As compact JSON."""
        values = {**dataclasses.asdict(self), "device": dataclasses.astuple(self.device) if self.device else None}
        return json.dumps({key: value for key, value in values.items() if value}, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, report: bytes) -> RankReport:
        """The report that `encode` wrote."""
        values = {"rank": 0, "device": None, "links": (), "package": (), **json.loads(report)}
        values["device"] = Device(*values["device"]) if values["device"] else None
        values["links"] = tuple(map(tuple, values["links"]))
        values["package"] = tuple(values["package"])
        return cls(**values)


def report_of(rank: int, world_size: int, host: str, machine: Machine, device: Device | None) -> RankReport:
    """The report of a rank on a device of its node."""
    own = device.number if device is not None else -1
    links = [link for link in machine.links if own in (link.a, link.b)]
    peers = [machine.device(link.b if link.a == own else link.a).identity for link in links]
    package = next((members for members in machine.packages or () if own in members), ())
    return RankReport(
        rank=rank,
        world_size=world_size,
        host=host,
        device=device,
        links=tuple((peer, link.kind, link.count, link.gb_s) for peer, link in zip(peers, links)),
        package=tuple(machine.device(number).identity for number in package),
        fabric="+".join(sorted({nic.kind for nic in machine.nics if nic.kind})),
        switch_nodes=machine.switch_nodes,
    )


def by_host(reports: Iterable[RankReport]) -> dict[str, list[RankReport]]:
    """Reports of each node, nodes in the order of their first report."""
    hosts: dict[str, list[RankReport]] = {}
    for report in reports:
        hosts.setdefault(report.host, []).append(report)
    return hosts


def places_of(reports: Sequence[RankReport]) -> list[Place]:
    """Where the ranks of one node sit, from the reports of all of them, in rank order.

    Ranks may see less than the node: under task cgroups each reads its own device alone, and numbers the others. The
    links of all reports together determine the packages.

    Raises:
        ConfigError: Reports contradict each other, or the packages are ambiguous; the message names the node.
    """
    host = reports[0].host
    with_device = [report for report in reports if report.device is not None]
    if not with_device:
        return [Place(report.rank, host, index, 0) for index, report in enumerate(reports)]
    if len(with_device) < len(reports):
        without = [report.rank for report in reports if report.device is None]
        raise ConfigError(f"topology: ranks {without} of node {host} have no device, the other ranks there have one")
    keys, machine = node_of(with_device)
    try:
        found = _positions(
            tuple((d.bus, d.kind, d.module, d.hidden) for d in machine.devices), machine.links, machine.packages
        )
    except AmbiguousTopologyError as error:
        raise AmbiguousTopologyError(f"topology: node {host}: {str(error).partition(': ')[2]}") from None
    placed = [(report, found[keys[report.device.identity]]) for report in with_device if report.device is not None]
    return [Place(report.rank, host, position.node_package, position.gcd) for report, position in placed]


def node_of(reports: Sequence[RankReport]) -> tuple[dict[str, int], Machine]:
    """The node that the reports of its ranks add up to.

    Args:
        reports: Of ranks of one node, each with a device.

    Returns:
        The number of each device by its identity, in the order of these; the node, its devices so numbered, NICs left
        out. A device without a rank is hidden: only links of others to it are known.

    Raises:
        ConfigError: Two ranks contradict each other on a link.
    """
    host = reports[0].host
    own = {report.device.identity: report.device for report in reports if report.device is not None}
    read = {device.alias: identity for identity, device in own.items()}  # hidden from some ranks, not from its own
    linked = {read.get(peer, peer) for report in reports for peer, *_ in report.links}
    packages = {tuple(sorted(report.package)) for report in reports if report.package}
    keys = sorted({*own, *linked, *(key for package in packages for key in package)})
    index = {key: number for number, key in enumerate(keys)}
    # A device without a rank is of the kind that the others are, where they are all of one.
    kinds = {device.kind for device in own.values()}
    kind = kinds.pop() if len(kinds) == 1 else ""
    links: dict[tuple[int, int], tuple[Link, int]] = {}
    for report in reports:
        assert report.device is not None
        here = index[report.device.identity]
        for peer, link_kind, count, gb_s in report.links:
            a, b = sorted((here, index[read.get(peer, peer)]))
            link = Link(a, b, link_kind, count, gb_s)
            other, rank = links.setdefault((a, b), (link, report.rank))
            if other != link:
                raise ConfigError(
                    f"topology: ranks {rank} and {report.rank} of node {host} contradict each other on the link between "
                    f"{keys[a]} and {keys[b]}: {other.count} and {link.count} links, {other.gb_s} and {link.gb_s} GB/s"
                )
    devices = [
        dataclasses.replace(own[key], number=number)
        if key in own
        else Device(number, key if ":" in key else "", kind, hidden=True)
        for key, number in index.items()
    ]
    declared = None
    if packages:
        named = {key for package in packages for key in package}
        groups = [tuple(index[key] for key in package) for package in packages]
        declared = (*groups, *((index[key],) for key in keys if key not in named))
    return index, Machine(f"node {host}", tuple(devices), tuple(link for link, _ in links.values()), packages=declared)


@functools.lru_cache(maxsize=256)
def _positions(
    devices: tuple[tuple[str, str, str, bool], ...],
    links: tuple[Link, ...],
    packages: tuple[tuple[int, ...], ...] | None,
) -> tuple[Position, ...]:
    """`positions` of a machine by its parts; a world has thousands of nodes alike."""
    machine = Machine(
        "links",
        tuple(Device(n, bus, kind, module, hidden=hidden) for n, (bus, kind, module, hidden) in enumerate(devices)),
        links,
        packages=packages,
    )
    found = positions(machine, of_ranks=True)
    return tuple(found[number] for number in range(len(devices)))
