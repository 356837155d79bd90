"""Expected links: the known machine that a node should be, and each pair of its devices compared with that machine's.

A node may number its devices in any order. So the expected devices are laid onto the found ones by PCI bus ids where both
sides state them, else so that the number of agreeing links is maximal.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hzero.topology.machine import Device, Link, Machine, by_bus, link_text, product
from hzero.topology.preset import preset
from hzero.validation import ConfigError

#: Bounds of the time of the search: devices that are compared, and steps.
MAX_DEVICES = 16
MAX_STEPS = 60_000

#: A link that reaches this share of its expected bandwidth is good: sources round.
ENOUGH = 0.9

# Costs of a missing and of an extra link when devices are laid.
_MISSING, _EXTRA, _NEVER = 4, 1, 10**9
_ANY = -1  # a link of unknown strength

#: Presets by product, or by architecture where the source names no product.
_PRESETS = {
    "MI250X": ("frontier",),
    "gfx90a": ("frontier",),
    "MI300X": ("mi300x",),
    "MI300A": ("el_capitan",),
    "gfx942": ("mi300x", "el_capitan"),
    "H200": ("dgx_h200",),
}

#: Products that a source may mean which names the architecture only.
_PRODUCTS_OF = {
    "gfx908": ("MI100",),
    "gfx90a": ("MI250X", "MI250", "MI210"),
    "gfx942": ("MI300X", "MI300A", "MI308X", "MI325X"),
    "sm_90": ("H200",),
}


@dataclass(frozen=True)
class PairFinding:
    """One pair of devices, or one device that is missing, against what is expected.

    Attributes:
        pair: Numbers of the found devices, the smaller first; empty for a missing device.
        expected: The direct links that should be there, under the found numbers; None where traffic should be routed.
        found: The direct links that are there; None where the pair is routed.
        state: ``good``, ``degraded``, ``unknown`` where the source does not say whether the link is as expected, or
            ``remark`` for a link that is there though none is expected.
        text: The same as one line.
    """

    pair: tuple[int, ...]
    expected: Link | None
    found: Link | None
    state: str
    text: str


def expected_for(machine: Machine) -> Machine | None:
    """The preset whose links a node should have, found by the kind of its devices, their number and their links.

    Devices may be missing as long as more than half are there. Where the source names only an architecture, which several
    products share (an MI210 is a gfx90a, as a die of an MI250X is), the links have to look like the product's.

    Returns:
        The preset, or None where none is known to describe the node. LUMI's links are Frontier's, which stands for both.
    """
    kinds = {product(device.kind) for device in machine.devices if device.kind}
    if len(kinds) != 1 or any("NVL" in device.kind.upper() for device in machine.devices):  # H200 NVL is a PCIe card
        return None
    (kind,) = kinds
    for name in _PRESETS.get(kind, ()):
        candidate = preset(name)
        if len(candidate.devices) < 2 * len(machine.devices) <= 2 * len(candidate.devices) and (
            not kind.startswith("gfx") or _looks_like(machine, candidate)
        ):
            return candidate
    return None


def _looks_like(machine: Machine, candidate: Machine) -> bool:
    """Whether at most a quarter of the links is not as expected, and all are counted or have a bandwidth."""
    findings = [finding for finding in compare(machine, candidate) if finding.expected or finding.found]
    good = sum(finding.state == "good" for finding in findings)
    known = all(link.count is not None or link.gb_s is not None for link in machine.links)
    return known and 4 * good >= 3 * len(findings)


def compare(machine: Machine, expected: Machine) -> list[PairFinding]:
    """Every missing device, then every pair of found devices that is linked or expected to be, or is rightly routed.

    A pair that is expected to be routed and is routed is good. An expected link that is missing, has fewer parallel
    links, or less than `ENOUGH` of its bandwidth is degraded. Where the source states neither, it is unknown.

    Raises:
        ConfigError: The node has more devices than expected, or more than `MAX_DEVICES`.
    """
    places = relabelling(machine, expected)
    findings = [
        _missing(device, machine, expected, places) for device in expected.devices if device.number not in places
    ]
    numbers = {found: number for number, found in places.items()}
    for a, b in itertools.combinations(sorted(numbers), 2):
        link = expected.link(numbers[a], numbers[b])
        findings.append(_pair(a, b, replace(link, a=a, b=b) if link is not None else None, machine.link(a, b)))
    return findings


def unmet(machine: Machine, expected: Machine, ranks: bool = False) -> list[str]:
    """One line for each product and NIC that is expected and that the node does not have, or that its source does not state.

    A NIC is looked for by its name, then by its kind, since sources name one NIC in several ways. Ranks report the names of
    the NICs that are nearest to their devices, and nothing else of them.
    """
    lines = []
    wanted = {product(device.kind) for device in expected.devices if device.kind}
    for device in machine.devices:
        found = product(device.kind)
        if wanted and not device.hidden and not {found, *_PRODUCTS_OF.get(found, ())} & wanted:
            lines.append(
                f"device {device.number}: found {device.kind or 'no kind'}, expected {' or '.join(sorted(wanted))}"
            )
    if ranks:
        near = {device.nic for device in machine.devices}
        named = [nic.name for nic in expected.nics if nic.name not in near]
        return lines + [
            f"NIC {name} of {expected.source}: missing, or nearest to no device of a rank" for name in named
        ]
    names = {nic.name for nic in expected.nics}
    left = list(machine.nics)
    for nic in expected.nics:
        same = next((other for other in left if other.name == nic.name), None) or next(
            (other for other in left if other.kind == nic.kind and other.name not in names), None
        )
        if same is None:
            lines.append(f"missing: NIC {nic.name} ({nic.kind or 'of any kind'}) of {expected.source}")
            continue
        left.remove(same)
        if nic.gb_s is not None and (same.gb_s is None or same.gb_s < ENOUGH * nic.gb_s):
            rate = "no rate" if same.gb_s is None else f"{same.gb_s:g} GB/s"
            lines.append(f"NIC {same.name}: found {rate}, expected {nic.gb_s:g} GB/s")
    return lines


def relabelling(machine: Machine, expected: Machine) -> dict[int, int]:
    """Found device by expected device, so that the fewest expected links are missing; expected devices may be left out.

    Bus ids that the expected machine states decide. Otherwise a search decides, which begins with the devices in order
    of bus ids, and gives up with that order after `MAX_STEPS`.

    Raises:
        ConfigError: As `compare`.
    """
    count = len(machine.devices)
    by_bus_id = {device.bus: device.number for device in expected.devices if device.bus}
    if count and all(device.bus in by_bus_id for device in machine.devices):
        return {by_bus_id[device.bus]: device.number for device in machine.devices}
    if len(expected.devices) > MAX_DEVICES or count > len(expected.devices):
        raise ConfigError(
            f"{machine.source}: {count} devices cannot be compared with the {len(expected.devices)} of {expected.source}; "
            f"possible: as many or fewer, at most {MAX_DEVICES}"
        )
    found = sorted(machine.devices, key=by_bus)
    wanted = sorted(expected.devices, key=by_bus)
    laid = _Search(machine, expected, found, wanted).best()
    return {wanted[index].number: found[place].number for index, place in enumerate(laid) if place is not None}


class _Search:
    """Lays expected devices onto found ones, one after the other, within a cost that deepens step by step."""

    def __init__(self, machine: Machine, expected: Machine, found: Sequence[Device], wanted: Sequence[Device]) -> None:
        self._wanted = _strengths(expected, wanted, expected)
        self._found = _strengths(machine, found, expected)
        self._wanted_home = _homes(expected, wanted)
        self._found_home = _homes(machine, found)
        self._missing = len(wanted) - len(found)
        self._steps = 0
        self._over = 0

    def best(self) -> list[int | None]:
        limit = self._minimum()
        while limit < _NEVER and self._steps < MAX_STEPS:
            self._over = _NEVER
            laid = self._lay([], set(), 0, limit)
            if laid is not None:
                return laid
            limit = self._over
        return [*range(len(self._found)), *[None] * self._missing]

    def _lay(self, laid: list[int | None], used: set[int], cost: int, limit: int) -> list[int | None] | None:
        if len(laid) == len(self._wanted):
            return laid
        self._steps += 1
        if self._steps > MAX_STEPS:
            return None
        choices: list[tuple[int, int]] = []
        for place in range(len(self._found)):
            if place in used or not self._homes_agree([*laid, place]):
                continue
            row, own = self._wanted[len(laid)], self._found[place]
            total = cost + sum(_cost(row[other], own[there]) for other, there in enumerate(laid) if there is not None)
            if total > limit:
                self._over = min(self._over, total)
            else:
                choices.append((total, place))
        for total, place in sorted(choices):
            done = self._lay([*laid, place], used | {place}, total, limit)
            if done is not None:
                return done
        if laid.count(None) < self._missing:
            return self._lay([*laid, None], used, cost, limit)
        return None

    def _homes_agree(self, laid: Sequence[int | None]) -> bool:
        """Whether the last device laid shares its package with the same devices as expected. True where unknown."""
        own = len(laid) - 1
        last = laid[own]
        if last is None or self._wanted_home is None or self._found_home is None:
            return True
        wanted, found = self._wanted_home, self._found_home
        return all(
            (wanted[other] == wanted[own]) == (found[place] == found[last])
            for other, place in enumerate(laid[:own])
            if place is not None
        )

    def _minimum(self) -> int:
        """Lower bound of the assignment cost: strongest expected links against strongest found ones."""
        if self._missing:
            return 0
        wanted, found = (
            sorted((row[other] for index, row in enumerate(rows) for other in range(index)), reverse=True)
            for rows in (self._wanted, self._found)
        )
        return 0 if _ANY in found or _ANY in wanted else sum(map(_cost, wanted, found))


def _cost(wanted: int, found: int) -> int:
    if _ANY in (wanted, found):
        return 0 if wanted and found else _MISSING if wanted else _EXTRA
    return _MISSING * (wanted - found) if wanted > found else _EXTRA * (found - wanted)


def _strengths(machine: Machine, devices: Sequence[Device], expected: Machine) -> list[list[int]]:
    """Parallel links by pair; from the bandwidth where they are not counted; 0 for a routed pair."""
    units = [link.gb_s / link.count for link in expected.links if link.gb_s is not None and link.count]
    unit = min(units, default=None)
    index = {device.number: place for place, device in enumerate(devices)}
    strengths = [[0] * len(devices) for _ in devices]
    for link in machine.links:
        strength = _ANY
        if link.count is not None:
            strength = link.count
        elif link.gb_s is not None and unit is not None:
            strength = max(1, round(link.gb_s / unit))
        a, b = index[link.a], index[link.b]
        strengths[a][b] = strengths[b][a] = strength
    return strengths


def _homes(machine: Machine, devices: Sequence[Device]) -> list[object] | None:
    """The package of each device, where the source states packages or modules."""
    if machine.packages is not None:
        homes = {number: index for index, package in enumerate(machine.packages) for number in package}
        return [homes[device.number] for device in devices]
    return [device.module for device in devices] if all(device.module for device in devices) else None


def _pair(a: int, b: int, expected: Link | None, found: Link | None) -> PairFinding:
    fewer = more = unknown = False
    if expected is not None and found is not None:
        counted = found.count is not None and expected.count is not None
        rated = found.gb_s is not None and expected.gb_s is not None
        unknown = not counted and not rated and (expected.count, expected.gb_s) != (None, None)
        if found.count is not None and expected.count is not None:
            fewer, more = found.count < expected.count, found.count > expected.count
        if found.gb_s is not None and expected.gb_s is not None:
            fewer |= found.gb_s < ENOUGH * expected.gb_s
        fewer |= found.kind == "pcie" != expected.kind
    if fewer or (expected and not found):
        state, text = "degraded", f"expected {link_text(expected)}, found {link_text(found)}"
    elif unknown:
        state, text = (
            "unknown",
            f"expected {link_text(expected)}, found {link_text(found)}, which the source does not count",
        )
    elif more or (found and not expected):
        state, text = "remark", f"expected {link_text(expected)}, found more: {link_text(found)}"
    else:
        state, text = "good", f"{link_text(found) if found else 'routed'}, as expected"
    return PairFinding((a, b), expected, found, state, f"{a}-{b}: {text}")


def _missing(device: Device, machine: Machine, expected: Machine, places: dict[int, int]) -> PairFinding:
    name = f"device {device.number} of {expected.source}" + (f" ({device.bus})" if device.bus else "")
    package = next((package for package in expected.packages or () if device.number in package), ())
    others = [places[number] for number in package if number in places]
    where = f", which shares its package with device {', '.join(map(str, others))}" if others else ""
    count = f"{len(machine.devices)} of {len(expected.devices)} devices are there"
    return PairFinding((), None, None, "degraded", f"missing: {name}{where}; {count}")
