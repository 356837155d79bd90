"""Packages and tiers of one node, from its links.

Packages are found by physical identity where the source states one, and by the number of parallel links otherwise; never
by adjacency of numbers. A machine that can be read in more than one way is an error that says how to declare it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hzero.config import TIERS, Tier
from hzero.topology.machine import DIES, AmbiguousTopologyError, Machine, product
from hzero.validation import some

#: Tiers inside a node, and that of its NICs.
_OF_NODE = TIERS[: TIERS.index("node") + 1]

#: Links between the two dies of an MI250X: no other pair of gfx90a has as many (OLCF user guide; RCCL's models).
_MI250X_LINKS = 4
_GFX90A = {"gfx90a", "MI250X", "MI250", "MI210"}


@dataclass(frozen=True)
class NodeTier:
    """A tier of one node.

    Attributes:
        name: Its name.
        size: Members of its largest group; 1 where the machine lacks the tier.
        groups: Numbers of the devices that differ in this tier's coordinate alone.
        gb_s: GB/s each way of the slowest direct link in the groups; for ``node`` a device's share of the NICs. May be None.
    """

    name: Tier
    size: int
    groups: tuple[tuple[int, ...], ...]
    gb_s: float | None = None


@dataclass(frozen=True)
class Position:
    """The place of a device in its node: indices in the order of PCI bus ids, the same in all processes.

    Attributes:
        hive: Of its hive, packages that direct links join, in the node.
        package: Of its package in the hive.
        gcd: Of the device in the package.
        node_package: Of its package in the node, hive after hive.
    """

    hive: int
    package: int
    gcd: int
    node_package: int


def tiers_of(machine: Machine) -> tuple[NodeTier, ...]:
    """The tiers of one node, innermost first; ``node`` has size 1. Raises `AmbiguousTopologyError` as `packages_of` does."""
    places = positions(machine)
    axes = {"gcd": "gcd", "hive": "package", "gpu": "hive"}
    if len({place.hive for place in places.values()}) < 2:
        axes = {"gcd": "gcd", "gpu": "package"}
    tiers = []
    for name in _OF_NODE:
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, place in sorted(places.items()):
            others = [getattr(place, axis) for axis in ("hive", "package", "gcd") if axis != axes.get(name)]
            groups.setdefault(tuple(others), []).append(number)
        members = _sorted(groups.values())
        rate = machine.tier_gb_s.get(name, _bandwidth(machine, name, members))
        tiers.append(NodeTier(name, max(map(len, members), default=1), members, rate))
    return tuple(tiers)


def _bandwidth(machine: Machine, name: str, groups: Iterable[tuple[int, ...]]) -> float | None:
    """GB/s of a tier; None where one of its rates is not known."""
    home = {number: index for index, group in enumerate(groups) for number in group}
    of_node = name == "node"
    links = [link for link in machine.links if home[link.a] == home[link.b]]
    rates = [nic.gb_s for nic in machine.nics] if of_node else [link.gb_s for link in links]
    known = [rate for rate in rates if rate is not None]
    if not known or len(known) < len(rates) or not machine.devices:
        return None
    return sum(known) / len(machine.devices) if of_node else min(known)


def positions(machine: Machine, of_ranks: bool = False) -> dict[int, Position]:
    """Position of every device by its number. Arguments and errors: see `packages_of`."""
    by_bus = sorted(machine.devices, key=lambda device: (device.hidden, device.bus, device.number))
    order = {device.number: index for index, device in enumerate(by_bus)}
    packages = [sorted(package, key=order.__getitem__) for package in packages_of(machine, of_ranks)]
    packages.sort(key=lambda package: order[package[0]])
    home = {number: index for index, package in enumerate(packages) for number in package}
    joined = [(home[link.a], home[link.b]) for link in machine.links if link.kind != "pcie"]
    hives = _components(range(len(packages)), joined)
    if max(map(len, hives), default=0) < 2:  # no direct links at all: the node is one group of packages
        hives = [list(range(len(packages)))]
    in_order = [(hive, index, package) for hive, members in enumerate(hives) for index, package in enumerate(members)]
    return {
        number: Position(hive, index, gcd, in_node)
        for in_node, (hive, index, package) in enumerate(in_order)
        for gcd, number in enumerate(packages[package])
    }


def packages_of(machine: Machine, of_ranks: bool = False) -> tuple[tuple[int, ...], ...]:
    """The packages of a node: each a group of device numbers, sorted; the packages sorted by their first.

    Declared packages count, then modules that the source states, then links: the dies of an MI250X are the pairs that
    are joined by four links, and a single die without such a partner is a package of its own.

    Args:
        machine: The node.
        of_ranks: Whether the reports of ranks add up to it: hidden devices then have no rank, the links between two of
            them are not known, and their packages do not matter.

    Raises:
        AmbiguousTopologyError: The links can be read in more than one way, or devices are hidden from this process.
    """
    if machine.packages is not None:
        return _sorted(machine.packages)
    hidden = [device.number for device in machine.devices if device.hidden]
    if hidden and not of_ranks:
        raise AmbiguousTopologyError(
            f"{machine.source}: a task's cgroup hides the devices {hidden}, so one process cannot identify the packages; "
            "the ranks of a job can together, as in `srun ... hzero doctor`"
        )
    modules: dict[str, list[int]] = {}
    for device in machine.devices:
        modules.setdefault(device.module or f"#{device.number}", []).append(device.number)
    if any(device.module for device in machine.devices):
        return _sorted(modules.values())
    singles = _sorted(modules.values())
    kinds = {product(device.kind) for device in machine.devices if device.kind}  # one without a rank may have none
    links = [link for link in machine.links if link.kind == "xgmi"]
    dies = {DIES.get(kind) for kind in kinds}
    if not links or dies == {1}:
        return singles
    numbers = [device.number for device in machine.devices]
    counts = {(link.a, link.b): link.count for link in links}
    most = max(count or 0 for count in counts.values())
    strongest = _components(numbers, [pair for pair, count in counts.items() if (count or 0) == most])
    alone = [group for group in strongest if len(group) == 1 and not machine.device(group[0]).hidden]
    largest, alike = max(map(len, strongest)), len(set(counts.values())) == 1
    # On an unknown product, four links stand out only next to pairs with fewer. One die may have lost its partner; two may be
    # a pair whose links are broken.
    stands_out = bool(kinds) or not alike
    if kinds <= _GFX90A and most == _MI250X_LINKS and largest == 2 and stands_out and len(alone) <= bool(kinds):
        return _sorted(strongest)
    # Two devices with several links and no others may be two dies, or two bridged cards.
    if alike and dies != {2} and (most == 1 or (1 < most < _MI250X_LINKS and largest > 2)):
        return singles
    shown = some([f"{a}-{b}: {'?' if count is None else count}" for (a, b), count in counts.items()], 16)
    ways = [_sorted(strongest), singles] if largest == 2 else [singles]
    text = " or ".join(f"packages: {[list(package) for package in way]}" for way in ways)
    raise AmbiguousTopologyError(
        f"{machine.source}: ambiguous: the links do not say which devices share a package ({shown} links); declare the "
        f"machine in a file, for example with {text}, or the grid (gpus_per_node, gcds_per_gpu)"
    )


def _components(nodes: Iterable[int], pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Connected components, each sorted, by their first."""
    group = {node: [node] for node in nodes}
    for a, b in pairs:
        if group[a] is not group[b]:
            group[a] += group[b]
            group.update(dict.fromkeys(group[b], group[a]))
    return sorted({id(found): sorted(found) for found in group.values()}.values())


def _sorted(groups: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(tuple(sorted(group)) for group in groups))
