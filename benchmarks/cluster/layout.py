"""Layout: the namespaces, links and queues of an emulated cluster, as lines for ``ip -batch`` and ``tc -batch``.

Every rank is a namespace with one interface, ``eth0``, plugged into the bridge of its node; every node is a namespace with
that bridge; where there is more than one node, their trunks meet at the bridge of one more namespace, the spine.

    rank r: eth0 ---- r<r> [bridge of node n] trunk ---- n<n> [bridge of the spine]
            htb: a class a tier                tbf: leaves   tbf: enters

A rank's htb has one class a tier, chosen by destination, so that a tier's bytes are counted where they are sent, and the
rates of the tiers inside a node hold there. The class of tier inter_node is not shaped: that rate is the trunk's.
"""

from __future__ import annotations

from benchmarks.cluster.shape import PREFIX, Cluster
from hzero.config import BASE_TIERS, Tier

INTERFACE, TRUNK, BRIDGE = "eth0", "trunk", "br0"
SPINE = f"{PREFIX}spine"
#: Large, as on the machines that this emulates: headers are below 1 % of a full packet.
MTU = 9000
#: Bytes that may pass at once after a pause: what the rate gives in this time, and never less than a few packets. Larger
#: ones let every message of a training step go faster than the link.
BURST_S, MIN_BURST = 0.0025, 32 * 1024
#: Bytes that a queue holds. A sender's own queue limit comes first, so that nothing is dropped, as on a fabric with credits.
QUEUE_BYTES = 8 * 1024 * 1024
#: Means "not shaped" in a class, which must have a rate.
UNSHAPED_BITS, UNSHAPED_BURST = 10**11, 8 * 1024 * 1024
#: Class of each tier in a rank's htb, and the handle of the queue in it.
CLASSES = {tier: (f"1:{index}", f"{index}0:") for index, tier in enumerate(BASE_TIERS, start=1)}
#: Files under /proc/sys/net to write in every namespace. IPv6 would add its own packets to the counters; bridges need no
#: firewall; connections must not be slow after each pause or because of those before; and reno is the one congestion
#: control that every kernel has and allows here, so that results do not depend on the machine's default.
SETTINGS = {
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv6/conf/default/disable_ipv6": "1",
    "bridge/bridge-nf-call-iptables": "0",
    "bridge/bridge-nf-call-ip6tables": "0",
    "bridge/bridge-nf-call-arptables": "0",
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_no_metrics_save": "1",
    "ipv4/tcp_congestion_control": "reno",
}


def node_namespace(node: int) -> str:
    """Network namespace of a node, which holds its bridge and its trunk."""
    return f"{PREFIX}n{node}"


def namespaces(cluster: Cluster) -> list[str]:
    """All namespaces: ranks, nodes, spine."""
    ranks = [cluster.namespace(rank) for rank in range(cluster.world_size)]
    nodes = [node_namespace(node) for node in range(cluster.nodes)]
    return [*ranks, *nodes, *([SPINE] if cluster.nodes > 1 else [])]


def links(cluster: Cluster) -> list[str]:
    """Lines for ``ip`` outside of the namespaces: pairs of interfaces, made in the namespaces where they belong."""
    ranks = [
        f"link add name {INTERFACE} address {_mac(rank)} netns {cluster.namespace(rank)} "
        f"type veth peer name r{rank} netns {node_namespace(cluster.node_of(rank))}"
        for rank in range(cluster.world_size)
    ]
    trunks = [
        f"link add name {TRUNK} netns {node_namespace(node)} type veth peer name n{node} netns {SPINE}"
        for node in range(cluster.nodes)
    ]
    return [*ranks, *(trunks if cluster.nodes > 1 else [])]


def interfaces(cluster: Cluster) -> dict[str, list[str]]:
    """Lines for ``ip`` inside of every namespace."""
    return {name: _interfaces(cluster, name) for name in namespaces(cluster)}


def shaping(cluster: Cluster) -> dict[str, list[str]]:
    """Lines for ``tc`` inside of every namespace that has queues."""
    lines = {cluster.namespace(rank): _classes(cluster, rank) for rank in range(cluster.world_size)}
    for name, device, rate in _trunk_ends(cluster):
        if rate is not None:
            lines.setdefault(name, []).append(_trunk_queue(device, rate))
    return lines


def burst(mbit: float) -> int:
    """Bytes that may pass at once at a rate."""
    return max(MIN_BURST, round(mbit * 1e6 / 8 * BURST_S))


def _mac(rank: int) -> str:
    return f"02:00:00:00:00:{rank + 1:02x}"


def _interfaces(cluster: Cluster, name: str) -> list[str]:
    ranks = {cluster.namespace(rank): rank for rank in range(cluster.world_size)}
    if name in ranks:
        rank = ranks[name]
        # Known addresses need no ARP, whose questions would be counted on every link and could be lost in a full queue.
        known = [
            f"neigh add {cluster.address(other)} lladdr {_mac(other)} dev {INTERFACE} nud permanent"
            for other in range(cluster.world_size)
            if other != rank
        ]
        return [
            "link set dev lo up",
            f"link set dev {INTERFACE} mtu {MTU} up",
            f"addr add {cluster.address(rank)}/24 dev {INTERFACE}",
            *known,
        ]
    if name == SPINE:
        ports = [f"n{node}" for node in range(cluster.nodes)]
    else:
        node = int(name.removeprefix(node_namespace(0)[:-1]))
        ports = [f"r{rank}" for rank in cluster.ranks_of(node)] + ([TRUNK] if cluster.nodes > 1 else [])
    # A bridge that forgets where a rank is would send its next packet to every port, and over the trunk: 1 day.
    return [
        "link set dev lo up",
        f"link add name {BRIDGE} type bridge ageing_time 8640000 mcast_snooping 0 stp_state 0",
        *(f"link set dev {port} mtu {MTU} master {BRIDGE} up" for port in ports),
        f"link set dev {BRIDGE} mtu {MTU} up",
    ]


def _classes(cluster: Cluster, rank: int) -> list[str]:
    lines = [f"qdisc add dev {INTERFACE} root handle 1: htb"]
    for tier in cluster.tiers:
        class_id, queue = CLASSES[tier]
        lines.append(_class(cluster, tier))
        lines.append(f"qdisc add dev {INTERFACE} parent {class_id} handle {queue} bfifo limit {QUEUE_BYTES}")
    for tier in cluster.tiers:
        lines += [
            f"filter add dev {INTERFACE} parent 1: protocol ip prio 1 "
            f"u32 match ip dst {cluster.address(other)}/32 flowid {CLASSES[tier][0]}"
            for other in cluster.peers(rank, tier)
        ]
    return lines


def _class(cluster: Cluster, tier: Tier) -> str:
    mbit = cluster.rate_mbit(tier) if tier != "inter_node" else None
    bits, size = (UNSHAPED_BITS, UNSHAPED_BURST) if mbit is None else (round(mbit * 1e6), burst(mbit))
    return (
        f"class add dev {INTERFACE} parent 1: classid {CLASSES[tier][0]} "
        f"htb rate {bits}bit burst {size}b cburst {size}b quantum 60000"
    )


def _trunk_ends(cluster: Cluster) -> list[tuple[str, str, float | None]]:
    """Both ends of every trunk: namespace, interface, rate of what is sent there."""
    if cluster.nodes == 1:
        return []
    rate = cluster.rates_mbit.inter_node
    leaves = [(node_namespace(node), TRUNK, rate) for node in range(cluster.nodes)]
    return leaves + [(SPINE, f"n{node}", rate) for node in range(cluster.nodes)]


def _trunk_queue(device: str, mbit: float) -> str:
    return f"qdisc replace dev {device} root tbf rate {round(mbit * 1e6)}bit burst {burst(mbit)}b limit {QUEUE_BYTES}b"
