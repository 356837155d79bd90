"""Tiers of one node: the devices of each package, the packages of each hive, and the bandwidth of the links between them.

Packages are found by physical identity where the source states one, and by the number of parallel links otherwise; never
by adjacency of numbers. A machine that can be read in more than one way is an error that says how to declare it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hzero.topology.machine import XGMI_LINK_GB_S, AmbiguousTopologyError, Link, Machine, by_bus, product

#: Levels of links of a world, innermost first. The stage uses gcd, gpu and node: it merges hive into gpu, cluster into node.
LEVELS = ("gcd", "hive", "gpu", "node", "cluster")

#: Devices per module of each product. A gfx90a may be a die of an MI250X or a whole MI210.
DIES = {
    **dict.fromkeys(("MI250X", "MI250"), 2),
    **dict.fromkeys(
        ("MI100", "MI210", "MI300A", "MI300X", "MI308X", "MI325X", "MI350X", "MI355X", "gfx908", "gfx942"), 1
    ),
}

#: Links between the two dies of an MI250X: no other pair of gfx90a has as many (OLCF user guide; RCCL's models).
_MI250X_LINKS = 4
_GFX90A = {"gfx90a", "MI250X", "MI250", "MI210"}


@dataclass(frozen=True)
class Level:
    """One level of links.

    Attributes:
        name: One of `LEVELS`.
        size: Members of its largest group; 1 where the machine lacks the level.
        groups: Numbers of the devices that differ in this tier's coordinate alone.
        gb_s: GB/s each way of the slowest direct link in the groups; for ``node`` a device's share of the NICs. May be None.
    """

    name: str
    size: int
    groups: tuple[tuple[int, ...], ...]
    gb_s: float | None = None


@dataclass(frozen=True)
class Position:
    """Where a device sits in its node: indices that follow PCI bus ids, the same whatever numbers a process sees.

    Attributes:
        hive: Of its hive in the node.
        package: Of its package in the hive.
        gcd: Of the device in the package.
        node_package: Of its package in the node, hive after hive.
    """

    hive: int
    package: int
    gcd: int
    node_package: int


def tiers_of(machine: Machine, of_ranks: bool = False) -> tuple[Level, ...]:
    """All `LEVELS` of one node, innermost first; ``node`` and ``cluster`` have size 1. Arguments as for `packages_of`."""
    places = positions(machine, of_ranks)
    several_hives = len({place.hive for place in places.values()}) > 1
    axes = {"gcd": "gcd", "hive": "package" if several_hives else "", "gpu": "hive" if several_hives else "package"}
    tiers = []
    for name in LEVELS:
        groups = _groups(places, axes.get(name, ""))
        size = max((len(group) for group in groups), default=1)
        gb_s = machine.tier_gb_s.get(name, _bandwidth(machine, name, groups, size))
        tiers.append(Level(name, size, groups, gb_s))
    return tuple(tiers)


def positions(machine: Machine, of_ranks: bool = False) -> dict[int, Position]:
    """Position of every device by its number. Arguments and errors are those of `packages_of`."""
    order = {device.number: index for index, device in enumerate(sorted(machine.devices, key=by_bus))}
    packages = [sorted(package, key=order.__getitem__) for package in packages_of(machine, of_ranks)]
    packages.sort(key=lambda package: order[package[0]])
    home = {number: index for index, package in enumerate(packages) for number in package}
    joined = [(home[link.a], home[link.b]) for link in machine.links if link.kind != "pcie"]
    hives = _components(range(len(packages)), joined)
    if max((len(hive) for hive in hives), default=0) < 2:  # no direct links at all: the node is one group of packages
        hives = [list(range(len(packages)))]
    places: dict[int, Position] = {}
    in_node = itertools.count()
    for hive_index, hive in enumerate(hives):
        for package_index, package in enumerate(hive):
            node_package = next(in_node)
            for gcd, number in enumerate(packages[package]):
                places[number] = Position(hive_index, package_index, gcd, node_package)
    return places


def packages_of(machine: Machine, of_ranks: bool = False) -> tuple[tuple[int, ...], ...]:
    """The packages of a node: each a group of device numbers, sorted; the packages sorted by their first.

    Declared packages count, then modules that the source states, then links: the dies of an MI250X are the pairs that
    are joined by four links, and a die that has no such partner stands alone where it is the only one.

    Args:
        machine: The node.
        of_ranks: Whether the reports of ranks add up to it: hidden devices then have no rank, the links between two of
            them are not known, and their packages do not matter.

    Raises:
        AmbiguousTopologyError: The links are ambiguous, or devices are hidden from this process. The message says what was
            found and which packages to declare.
    """
    if machine.packages is not None:
        return _sorted(machine.packages)
    hidden = [device.number for device in machine.devices if device.hidden]
    if hidden and not of_ranks:
        raise AmbiguousTopologyError(
            f"{machine.source}: a task's cgroup hides the devices {hidden}, so one process cannot identify the packages; "
            "the ranks of a job can together, as in `srun ... hzero doctor`"
        )
    numbers = [device.number for device in machine.devices]
    modules: dict[str, list[int]] = {}
    for device in machine.devices:
        modules.setdefault(device.module, []).append(device.number)
    if set(modules) - {""}:
        if "" in modules:
            raise _ambiguous(machine, f"devices {modules['']} have no module, the others do", [])
        return _sorted(modules.values())
    kinds = {product(device.kind) for device in machine.devices if device.kind}  # one without a rank may have none
    dies = {DIES.get(kind) for kind in kinds} or {None}
    links = [link for link in machine.links if link.kind == "xgmi"]
    if not links or dies == {1}:
        return _sorted([number] for number in numbers)
    return _by_links(machine, links, kinds, dies)


def _by_links(
    machine: Machine, links: Sequence[Link], kinds: set[str], dies: set[int | None]
) -> tuple[tuple[int, ...], ...]:
    numbers = [device.number for device in machine.devices]
    single = _sorted([number] for number in numbers)
    of_gfx90a = kinds <= _GFX90A  # also where nothing is known of the product
    counts = {(link.a, link.b): link.count for link in links}
    if kinds and of_gfx90a:  # the bandwidth of one link is known
        counts |= {(k.a, k.b): round(k.gb_s / XGMI_LINK_GB_S["gfx90a"]) for k in links if k.count is None and k.gb_s}
    dies_of_one = [pair for pair, count in counts.items() if count == _MI250X_LINKS]
    joined = _components(numbers, dies_of_one)
    if of_gfx90a and dies_of_one and (kinds or len(dies_of_one) < len(links)):
        alone = [group[0] for group in joined if len(group) == 1 and not machine.device(group[0]).hidden]
        if max(map(len, joined)) > 2 or max(count or 0 for count in counts.values()) > _MI250X_LINKS:
            raise _ambiguous(
                machine, f"the pairs with 4 and more links are no pairs of dies: {_text(joined)}", [single]
            )
        if len(alone) > 1 or (alone and not kinds):
            both = [[group for group in joined if len(group) > 1] + [alone]] if len(alone) == 2 else []
            why = f"devices {alone} have no partner with 4 links, so a partner is missing or links are broken"
            raise _ambiguous(machine, why, [*both, joined])
        return _sorted(joined)
    rates = {link.gb_s for link in links}
    alike = len(rates) == 1 and None not in rates and max(map(len, _components(numbers, counts))) > 2
    if None in counts.values() and not alike:
        a, b = next(pair for pair, count in counts.items() if count is None)
        raise _ambiguous(
            machine, f"the source does not count the links of {a}-{b}, so packages are ambiguous", [single]
        )
    if dies == {2}:
        raise _ambiguous(machine, "no two dies have the 4 links of an MI250X", [single])
    groups = _components(numbers, counts)
    if len(set(counts.values())) > 1:
        text = f"pairs are joined by {' or '.join(map(str, sorted(set(counts.values()), key=str)))} links"
        raise _ambiguous(machine, f"{text}, and nothing says which of them are dies of one package", [single])
    if 1 not in counts.values() and max(map(len, groups)) == 2:
        # Two dies, or two bridged cards.
        text = f"devices {_text(groups)} are joined by several links each and to no others"
        raise _ambiguous(machine, text, [_sorted(groups), single])
    return single


def _ambiguous(machine: Machine, why: str, readings: Sequence[Iterable[Iterable[int]]]) -> AmbiguousTopologyError:
    ways = [f"packages: {[list(package) for package in reading]}" for reading in readings]
    choice = " or ".join(ways) if ways else "packages: [[..], ..]"
    return AmbiguousTopologyError(
        f"{machine.source}: ambiguous: {why}; declare the machine in a file with {choice}, or the grid (gpus_per_node, "
        "gcds_per_gpu)"
    )


def _bandwidth(machine: Machine, name: str, groups: Sequence[Sequence[int]], size: int) -> float | None:
    if name == "node":
        rates = [nic.gb_s for nic in machine.nics]
        known = [rate for rate in rates if rate is not None]
        return sum(known) / len(machine.devices) if known and len(known) == len(rates) and machine.devices else None
    if size == 1:
        return None
    home = {number: index for index, group in enumerate(groups) for number in group}
    rates = [link.gb_s for link in machine.links if home[link.a] == home[link.b]]
    known = [rate for rate in rates if rate is not None]
    return min(known) if known and len(known) == len(rates) else None


def _groups(places: dict[int, Position], axis: str) -> tuple[tuple[int, ...], ...]:
    """Devices that differ in one coordinate alone; each by itself where no axis is given."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, place in sorted(places.items()):
        others = [getattr(place, name) for name in ("hive", "package", "gcd") if name != axis]
        groups.setdefault((*others, number if not axis else -1), []).append(number)
    return _sorted(groups.values())


def _components(nodes: Iterable[int], pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Connected components, each sorted, by their first."""
    group = {node: [node] for node in sorted(nodes)}
    for a, b in pairs:
        if group[a] is not group[b]:
            group[a] += group[b]
            group.update(dict.fromkeys(group[b], group[a]))
    return sorted({id(found): sorted(found) for found in group.values()}.values())


def _sorted(groups: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _text(groups: Iterable[Iterable[int]]) -> str:
    return " ".join("{" + ", ".join(map(str, group)) + "}" for group in groups)
