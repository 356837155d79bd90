"""Sharing: how fast transfers run that need the same resources at once, by max-min fairness."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from hzero.topology.machine import Machine

R = TypeVar("R", bound=Hashable)


def speeds(usages: Sequence[Mapping[R, float]], limit: float = 1.0) -> list[float]:
    """Max-min fair speeds: all grow alike until a resource is full, whose users then keep theirs.

    Args:
        usages: For each transfer the share of every resource that it takes at speed 1.
        limit: Maximum speed.

    Returns:
        Speeds such that the shares of no resource add up to more than 1.
    """
    found = [limit] * len(usages)
    growing, left = set(range(len(usages))), {}
    for usage in usages:
        left.update(dict.fromkeys(usage, 1.0))
    level = 0.0
    while growing:
        demand: dict[R, float] = {}
        for index in growing:
            for resource, share in usages[index].items():
                demand[resource] = demand.get(resource, 0.0) + share
        step, full = limit - level, None
        for resource, total in demand.items():
            if total > 0 and left[resource] / total < step:
                step, full = left[resource] / total, resource
        level += step
        if full is None:
            return found
        for resource, total in demand.items():
            left[resource] = max(left[resource] - step * total, 0.0)
        for index in [index for index in growing if usages[index].get(full, 0.0) > 0]:
            found[index] = level
            growing.remove(index)
    return found


def link_rates(machine: Machine, by_count: Mapping[int, float]) -> dict[tuple[int, int], float]:
    """GB/s of every directed link between a node's devices, by the number of its lanes."""
    rates = {}
    for link in machine.links:
        rate = by_count[link.count or 1]
        rates[link.a, link.b] = rates[link.b, link.a] = rate
    return rates


def route(rates: Mapping[tuple[int, int], float], source: int, target: int) -> list[tuple[int, int]]:
    """Links on the way: the direct one, else by one device, the way with the widest narrowest link."""
    if (source, target) in rates:
        return [(source, target)]
    devices = {device for pair in rates for device in pair}
    ways = [[(source, by), (by, target)] for by in sorted(devices) if (source, by) in rates and (by, target) in rates]
    return max(ways, key=lambda way: min(rates[link] for link in way))


def pairs_gb_s(rates: Mapping[tuple[int, int], float], groups: Sequence[Sequence[int]]) -> float:
    """GB/s that a device sends in an all-to-all of all groups at once: as many times the slowest pair as it has peers."""
    flows = [route(rates, a, b) for group in groups for a in group for b in group if a != b]
    usages = [{link: 1 / rates[link] for link in flow} for flow in flows]
    return min(speeds(usages, math.inf)) * (len(groups[0]) - 1)


def ring_gb_s(rates: Mapping[tuple[int, int], float], rings: Sequence[Sequence[int]]) -> float:
    """GB/s that a device sends over rings in both directions, all at once."""
    flows = [route(rates, a, b) for ring in rings for a, b in zip(ring, [*ring[1:], ring[0]])]
    flows += [[(b, a) for a, b in reversed(flow)] for flow in flows]
    usages = [{link: 1 / rates[link] for link in flow} for flow in flows]
    return 2 * min(speeds(usages, math.inf))
