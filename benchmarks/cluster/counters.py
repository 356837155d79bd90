"""Counters: bytes of every tier, as the kernel counted them where they were sent."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.cluster.layout import CLASSES, INTERFACE, SPINE, TRUNK, node_namespace
from benchmarks.cluster.shape import Cluster
from hzero.errors import ConfigError

TOOL_TIMEOUT_S = 30.0


def sent(interface: str = INTERFACE, namespace: str | None = None) -> dict[str, int]:
    """Bytes that a rank has sent since the set-up, by the tiers that its cluster has.

    Counted by the queue of each tier's class, when a packet leaves it, in bytes on the wire: Ethernet header (14), IP (20)
    and TCP (32 with time stamps) of every packet of at most 9,000 bytes, also where the kernel hands several packets on as
    one (it counts the headers that these will have). So acknowledgements that this rank sends for what it received are in
    here, and so would be anything sent again. Checksums, preambles and gaps of a real wire are not.

    Args:
        interface: The rank's.
        namespace: The rank's; None: that of the calling thread.

    Raises:
        ConfigError: There is no such namespace or interface, or it is not a rank's.
    """
    within = ["-n", namespace] if namespace else []
    said = _call(["tc", *within, "-j", "-s", "qdisc", "show", "dev", interface])
    found = parse_sent(said)
    if not found:
        where = f"namespace {namespace}" if namespace else "this network namespace"
        raise ConfigError(f"counters: {interface} in {where} is not a rank's interface; `up` sets the cluster up")
    return found


def parse_sent(queues: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes by tier from the queues of an interface, as ``tc -j -s qdisc show`` lists them."""
    tier_of = {class_id: tier for tier, (class_id, _) in CLASSES.items()}
    by_tier = {tier_of[q["parent"]]: int(q["bytes"]) for q in queues if q.get("parent") in tier_of and "bytes" in q}
    return {tier: by_tier[tier] for tier in CLASSES if tier in by_tier}


def trunks(cluster: Cluster) -> list[tuple[int, int]]:
    """Bytes that went out of and came into every node over its trunk since the set-up.

    Counted by the node's end of the trunk, after the queues that shape it. Headers as in `sent`, with one exception: what
    the kernel hands on as one piece of several packets (up to 64 KB) is counted with one set of headers. The queue of a
    shaped trunk splits pieces that are larger than its burst, so the truth lies between; the difference is below 1 %. A
    cluster of one node has no trunks: zeros.

    Raises:
        ConfigError: The network is not set up.
    """
    if cluster.nodes == 1:
        return [(0, 0)]
    return [_trunk(node_namespace(node)) for node in range(cluster.nodes)]


def _trunk(namespace: str) -> tuple[int, int]:
    statistics = _call(["ip", "-n", namespace, "-j", "-s", "link", "show", "dev", TRUNK])[0]["stats64"]
    return int(statistics["tx"]["bytes"]), int(statistics["rx"]["bytes"])


def dropped(cluster: Cluster) -> int:
    """Packets that queues of the trunks and ranks have dropped since the set-up: none, unless a queue is too short.

    Raises:
        ConfigError: The network is not set up.
    """
    places = [(cluster.namespace(rank), INTERFACE) for rank in range(cluster.world_size)]
    if cluster.nodes > 1:
        places += [(node_namespace(node), TRUNK) for node in range(cluster.nodes)]
        places += [(SPINE, f"n{node}") for node in range(cluster.nodes)]
    drops = 0
    for namespace, interface in places:
        queues = _call(["tc", "-n", namespace, "-j", "-s", "qdisc", "show", "dev", interface])
        drops += sum(int(queue.get("drops", 0)) for queue in queues if "parent" in queue or queue["kind"] == "tbf")
    return drops


def _call(command: list[str]) -> list[dict[str, Any]]:
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False
        )
        if done.returncode == 0:
            return [entry for entry in json.loads(done.stdout or "[]") if entry]
        said = done.stderr.strip().splitlines() or ["no reason given"]
        why = said[0]
    except subprocess.TimeoutExpired:
        why = f"has not ended after {TOOL_TIMEOUT_S:.0f} s"
    except (OSError, ValueError) as error:
        why = str(error)
    raise ConfigError(f"counters: `{shown}` failed: {why}")
