"""Check: whether the links of an emulated cluster have their rates, and whether counters match the sent bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cluster import counters
from benchmarks.cluster.shape import Cluster
from benchmarks.cluster.stream import transfer
from hzero.config import Tier
from hzero.terminal import size_text

#: A shaped link is right when the payload's rate is in this range of the nominal one, which includes headers.
MIN_SHARE, MAX_SHARE = 0.9, 1.02


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        tier: Whose links.
        what: Who sends to whom.
        nominal_mbit: The rate set; None: not shaped.
        mbit: Payload that arrived, in Mbit/s, all streams together.
        payload: Bytes that were sent, without headers.
        senders: Bytes that the senders' counters of the tier rose by.
        receivers: Bytes that the receivers' counters of the tier rose by: acknowledgements.
        stray: Bytes that counters of other tiers rose by.
        trunk: Bytes that all trunks' counters of what goes out rose by; None on tiers inside a node.
    """

    tier: Tier
    what: str
    nominal_mbit: float | None
    mbit: float
    payload: int
    senders: int
    receivers: int
    stray: int
    trunk: int | None

    @property
    def held(self) -> bool:
        """Whether the rate is that of the link; true where it is not shaped."""
        return self.nominal_mbit is None or MIN_SHARE <= self.mbit / self.nominal_mbit <= MAX_SHARE


def patterns(cluster: Cluster) -> list[tuple[Tier, str, list[tuple[int, int]]]]:
    """What is measured: tier, description, pairs of sender and receiver that are active at once.

    On the tiers inside a node rank 0 sends to all ranks that it reaches there; between nodes all ranks of a node send to
    their counterparts, and, where there are more than two nodes, all other nodes to the first one.
    """
    found: list[tuple[Tier, str, list[tuple[int, int]]]] = []
    if "gcd" in cluster.tiers:
        found.append(("gcd", "0 to its package", [(0, peer) for peer in cluster.peers(0, "gcd")]))
    if "gpu" in cluster.tiers:
        found.append(("gpu", "0 to its node", [(0, peer) for peer in cluster.peers(0, "gpu")]))
    size = cluster.ranks_per_node
    if "node" in cluster.tiers:
        found.append(("node", "node 0 to node 1", [(rank, rank + size) for rank in range(size)]))
    if cluster.nodes > 2:
        pairs = [(rank, rank % size) for rank in range(size, cluster.world_size)]
        found.append(("node", "others to node 0", pairs))
    return found


def check(cluster: Cluster, seconds: float = 2.0) -> list[Row]:
    """Measures every tier of a cluster that is set up.

    Args:
        cluster: As set up.
        seconds: Time of one measurement.

    Raises:
        ConfigError: Ranks cannot reach each other, or a counter cannot be read.
    """
    return [_measure(cluster, tier, what, pairs, seconds) for tier, what, pairs in patterns(cluster)]


def print_rows(cluster: Cluster, rows: Sequence[Row]) -> None:
    """Prints measurements as a table, and below it any deviations."""
    print(f"emulated cluster: {cluster}")
    form = "{:5} {:20} {:>10} {:>10} {:>10} {:>9} {:>9} {:>9} {:>9}".format
    print(form("tier", "streams", "set", "measured", "payload", "headers", "acks", "trunk", "stray"))
    for row in rows:
        trunk = "" if row.trunk is None else f"{row.trunk / row.payload - 1:+.2%}"
        shares = (
            f"{row.senders / row.payload - 1:+.2%}",
            f"{row.receivers / row.payload:+.2%}",
            trunk,
            f"{row.stray:,} B",
        )
        rate = "none" if row.nominal_mbit is None else f"{row.nominal_mbit:g}"
        print(form(row.tier, row.what, rate, f"{row.mbit:,.1f}", size_text(row.payload), *shares))
    print(
        "set, measured: Mbit/s with and without headers; headers, acks, trunk: bytes beyond the payload; stray: in other tiers"
    )
    for row in rows:
        if not row.held:
            slow = row.mbit < (row.nominal_mbit or 0)
            why = "the cores of this machine are too busy or too slow for it" if slow else "the link has no limit"
            print(f"tier {row.tier}: {row.mbit:,.1f} Mbit/s instead of {row.nominal_mbit:g}: {why}")


def _measure(cluster: Cluster, tier: Tier, what: str, pairs: list[tuple[int, int]], seconds: float) -> Row:
    before, trunks_before = _all_sent(cluster), counters.trunks(cluster)
    done = transfer(cluster, pairs, seconds=seconds)
    after, trunks_after = _all_sent(cluster), counters.trunks(cluster)
    rise = [{name: new[name] - old[name] for name in new} for old, new in zip(before, after)]
    senders = {source for source, _ in pairs}
    return Row(
        tier=tier,
        what=what,
        nominal_mbit=cluster.rate_mbit(tier),
        mbit=done.mbit,
        payload=sum(done.payload.values()),
        senders=sum(rise[rank][tier] for rank in senders),
        receivers=sum(by_tier[tier] for rank, by_tier in enumerate(rise) if rank not in senders),
        stray=sum(count for by_tier in rise for name, count in by_tier.items() if name != tier),
        trunk=sum(new[0] - old[0] for old, new in zip(trunks_before, trunks_after)) if tier == "node" else None,
    )


def _all_sent(cluster: Cluster) -> list[dict[str, int]]:
    return [counters.sent(namespace=cluster.namespace(rank)) for rank in range(cluster.world_size)]
