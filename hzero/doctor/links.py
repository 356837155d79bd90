"""Links of a node: each pair of devices against a machine of its kind; peer access."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hzero.doctor.expected import compare, expected_for, unmet
from hzero.doctor.verdict import DEGRADED, GOOD, UNUSABLE, Findings
from hzero.topology.machine import Machine
from hzero.topology.tiers import Level, tiers_of
from hzero.validation import ConfigError


def examine_links(
    node: str, machine: Machine, expected: Machine | None, findings: Findings, *, ranks: bool = False
) -> dict[str, Any] | None:
    """Every pair of devices of a node against the expected link matrix.

    Args:
        node: Its name, for remarks.
        machine: The node as found.
        expected: What it should be, as the user says: whatever of it is missing or not known is a finding. None takes
            the preset that describes its devices, if any, and holds against the node only what its source states.
        findings: Takes devices, links and NICs that are missing or slow, and why a node cannot be judged.
        ranks: Whether ranks reported the node: devices without a rank are then not missing, unless they are expected.

    Returns:
        The machine compared with, the pairs, and the tiers if all devices are readable; None for a node without devices.
    """
    asked = expected is not None
    if expected is not None:
        findings.add(DEGRADED, *(f"{node}: {line}" for line in unmet(machine, expected, ranks)))
    if not machine.devices:
        if expected is not None and expected.devices:
            findings.add(UNUSABLE, f"{node}: no devices found, {expected.source} has {len(expected.devices)}")
        return None
    hidden = {device.number for device in machine.devices if device.hidden}
    tiers: Sequence[Level] = ()
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
    unread = 0
    for pair in pairs:
        if not pair.pair and ranks and not asked:
            continue  # a job may leave devices out
        if pair.pair and hidden.issuperset(pair.pair):
            unread += 1  # a task's cgroup keeps this process from both: what joins them cannot be read
            continue
        state = "good" if pair.state == "unknown" and not asked else pair.state
        if state != "good":
            findings.add(GOOD if state == "remark" else DEGRADED, f"{node}: {pair.text}")
        result["pairs"].append(
            {"pair": list(pair.pair), "state": state, "relied_on": pair.pair in relied, "text": pair.text}
        )
    if asked and unread:
        findings.add(
            DEGRADED, f"{node}: {unread} pairs of devices are hidden by a cgroup, so their links are not known"
        )
    return result


def examine_peer_access(findings: Findings) -> dict[str, Any]:
    """Peer access between the devices that this process sees.

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
