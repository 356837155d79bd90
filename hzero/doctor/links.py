"""Links of a node: each pair that the stage relies on against what a machine of its kind should have; peer access."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hzero.config import ConfigError
from hzero.doctor.verdict import DEGRADED, GOOD, UNUSABLE, Findings
from hzero.topology.expected import compare, expected_for
from hzero.topology.machine import Machine
from hzero.topology.tiers import Tier, tiers_of


def examine_links(
    node: str, machine: Machine, expected: Machine | None, findings: Findings, *, ranks: bool = False
) -> dict[str, Any] | None:
    """Every pair of devices of a node against the expected link matrix.

    Args:
        node: Its name, for remarks.
        machine: The node as found.
        expected: What it should be; None takes the preset that describes its devices, where there is one.
        findings: Takes devices and links that are missing or slow, and why a node cannot be judged.
        ranks: Whether the node is what ranks have reported: devices without a rank are then not missing.

    Returns:
        What the node was compared with, its pairs, and its tiers where all devices can be read; None for a node without
        devices.
    """
    if not machine.devices:
        return None
    hidden = {device.number for device in machine.devices if device.hidden}
    tiers: Sequence[Tier] = ()
    if not hidden or ranks:
        try:
            tiers = tiers_of(machine, of_ranks=ranks)
        except ConfigError as error:
            findings.add(UNUSABLE, str(error))
    relied = {
        (min(pair), max(pair))
        for tier in tiers
        if tier.name in ("gcd", "hive", "gpu")
        for group in tier.groups
        for pair in itertools.combinations(group, 2)
    }
    expected = expected or expected_for(machine)
    result: dict[str, Any] = {
        "node": node,
        "tiers": {tier.name: {"size": tier.size, "gb_s": tier.gb_s} for tier in tiers},
        "expected": expected.source if expected else None,
        "pairs": [],
    }
    if expected is None:
        if len(machine.devices) > 1:
            findings.add(GOOD, f"{node}: no known machine has these devices, so its links are shown and not judged")
        return result
    try:
        pairs = compare(machine, expected)
    except ConfigError as error:
        findings.add(DEGRADED, f"{node}: {error}")
        return {**result, "expected": None}
    for pair in pairs:
        if not pair.pair and ranks:
            continue  # a job may leave devices out
        if pair.pair and hidden.issuperset(pair.pair):
            continue  # a task's cgroup keeps this process from both: what joins them cannot be read
        if pair.state == "degraded":
            findings.add(DEGRADED, f"{node}: {pair.text}")
        elif pair.state == "remark":
            findings.add(GOOD, f"{node}: {pair.text}")
        result["pairs"].append(
            {"pair": list(pair.pair), "state": pair.state, "relied_on": pair.pair in relied, "text": pair.text}
        )
    return result


def examine_peer_access(findings: Findings) -> dict[str, Any]:
    """Which of the devices that this process sees can read each other's memory.

    Task cgroups can cut it (SchedMD bug 17793), so it is asked of the runtime and not taken from the links.
    """
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return {"devices": count, "without": [], "why": "not tested: this process sees fewer than two devices"}
    without: list[Sequence[int]] = [
        pair for pair in itertools.permutations(range(count), 2) if not torch.cuda.can_device_access_peer(*pair)
    ]
    for a, b in without:
        findings.add(DEGRADED, f"device {a} has no peer access to device {b}: their traffic goes through the host")
    return {"devices": count, "without": [list(pair) for pair in without], "why": ""}
