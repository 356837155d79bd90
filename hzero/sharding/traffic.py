"""Traffic: bytes per tier and role of one optimizer step. What the wire log will count, before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from hzero.config import ROLES, TIERS
from hzero.sharding.plan import Hop, ShardPlan
from hzero.sharding.records import chunk_numel, record_format
from hzero.topology.grid import Grid


@dataclass(frozen=True)
class TierTraffic:
    """Bytes that enter one rank over one tier for one role, in one optimizer step.

    Attributes:
        role: ``weights`` or ``gradients``.
        tier: ``gcd``, ``gpu`` or ``node``.
        codec: Codec of the messages.
        wire_bytes: Bytes received, scales and record padding included.
        raw_bytes: The same with codec ``none``, without padding.
        crossings: How often a step a whole set of parameters crosses the tier.
        used: Whether the tier has more than one rank; its codec means nothing otherwise.
    """

    role: str
    tier: str
    codec: str
    wire_bytes: int
    raw_bytes: int
    crossings: int
    used: bool


class _Tally:
    """Adds up hops a role and tier."""

    def __init__(self, chunks: Sequence[int]) -> None:
        self._chunks = chunks
        self._wire: dict[tuple[str, str], int] = {}
        self._raw: dict[tuple[str, str], int] = {}
        self._crossings: dict[tuple[str, str], int] = {}

    def add(self, role: str, hop: Hop, rows: int, itemsize: int, received: float, times: float) -> None:
        key = (role, hop.tier)
        message = record_format(hop.codec).message_bytes(self._chunks, rows, itemsize)
        self._wire[key] = self._wire.get(key, 0) + round(round(message * received) * times)
        raw = rows * sum(self._chunks) * itemsize * received
        self._raw[key] = self._raw.get(key, 0) + round(round(raw) * times)
        self._crossings[key] = self._crossings.get(key, 0) + round(times)

    def rows(self, plan: ShardPlan) -> list[TierTraffic]:
        return [
            TierTraffic(
                role=role,
                tier=tier,
                codec=plan.codecs[role][tier].codec,
                wire_bytes=self._wire.get((role, tier), 0),
                raw_bytes=self._raw.get((role, tier), 0),
                crossings=self._crossings.get((role, tier), 0),
                used=plan.grid.size(tier) > 1,
            )
            for role in ROLES
            for tier in TIERS
        ]


def plan_traffic(
    plan: ShardPlan,
    numels: Sequence[int],
    *,
    itemsize: int = 2,
    comm_itemsize: int | None = None,
    accumulation: int = 1,
    fetches: float = 2,
) -> list[TierTraffic]:
    """Bytes of one optimizer step of the stage, exactly as its wire log counts them.

    Args:
        plan: The shard plan; every rank of the grid receives the same.
        numels: Elements of each trainable parameter.
        itemsize: Bytes of one weight (2 for bf16 and fp16).
        comm_itemsize: Bytes of one gradient on a hop with codec ``none``; as ``itemsize`` where not given.
        accumulation: Micro-steps a step.
        fetches: Gathers of every parameter a micro-step, on average: forward and backward. A parameter that is used
            again soon is kept by DeepSpeed (``stage3_max_reuse_distance``), so small models fetch less.

    Returns:
        One entry a role and tier, weights first, tiers innermost first.
    """
    comm_itemsize = comm_itemsize or itemsize
    tally = _Tally([chunk_numel(numel, plan.grid.world_size) for numel in numels])
    refresh = plan.refresh_hops()
    rows = 1
    for hop in refresh:
        tally.add("weights", hop, rows, itemsize, hop.size - 1, 1)
        rows *= hop.size
    for hop in plan.fetch_hops() if refresh else plan.gather_hops():
        tally.add("weights", hop, rows, itemsize, hop.size - 1, fetches * accumulation)
        rows *= hop.size
    rows = plan.grid.world_size
    for hops, times in ((plan.micro_hops(), accumulation), (plan.boundary_hops(), 1)):
        for hop in hops:
            tally.add("gradients", hop, rows, comm_itemsize, 1 - 1 / hop.size, times)
            rows //= hop.size
    return tally.rows(plan)


def node_bytes(traffic: Sequence[TierTraffic], plan: ShardPlan) -> int:
    """Bytes that enter one node in a step: the node tier's, of all roles and all ranks of the node."""
    return sum(t.wire_bytes for t in traffic if t.tier == "node") * plan.grid.scope_size("node")


def zero3_traffic(
    grid: Grid, numels: Sequence[int], *, itemsize: int = 2, accumulation: int = 1, fetches: float = 2
) -> list[TierTraffic]:
    """What plain ZeRO-3 receives a step: flat collectives, every peer's part over the outermost tier between the two.

    A flat all-gather brings a rank one shard from each peer, and so does an ideal flat reduce-scatter.
    """
    shards = sum(chunk_numel(numel, grid.world_size) for numel in numels) * itemsize
    inside = 1
    rows = []
    for tier in TIERS:
        peers = inside * (grid.size(tier) - 1)
        inside *= grid.size(tier)
        for role, times in (("weights", fetches * accumulation), ("gradients", accumulation)):
            size = round(peers * shards * times)
            rows.append(TierTraffic(role, tier, "none", size, size, round(times), peers > 0))
    return sorted(rows, key=lambda row: (ROLES.index(row.role), TIERS.index(row.tier)))


def peers_node_bytes(
    grid: Grid, numels: Sequence[int], *, itemsize: int = 2, accumulation: int = 1
) -> dict[str, float]:
    """Bytes into one node a step of what DeepSpeed offers, by the closed forms of the schemes.

    With M the bytes of the weights, A the micro-steps, f = (nodes - 1) / nodes: ZeRO-3 gathers twice and reduces once a
    micro-step, 3 A M f. Its hpZ serves all but a step's first forward from the node, (1 + A) M f. ZeRO++
    (arXiv 2306.10209) sends 8 and 4 bits where they send 16: (0.5 + 0.25 A) M f.
    """
    m, f, a = sum(numels) * itemsize, (grid.nodes - 1) / grid.nodes, accumulation
    return {"ZeRO-3": 3 * a * m * f, "hpZ": (1 + a) * m * f, "ZeRO++": (0.5 + 0.25 * a) * m * f * 2 / itemsize}


def as_dicts(traffic: Sequence[TierTraffic]) -> list[dict[str, object]]:
    """As plain dictionaries, for JSON."""
    return [dataclasses.asdict(row) for row in traffic]
