"""Traffic: bytes per tier and role of one optimizer step, and the links' time for them.

For the stage these are exactly the bytes that its wire log counts; for plain ZeRO-3 they are those of flat rings.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hzero.codecs.formats import chunk_numel
from hzero.config import NET_TIERS, ROLES, TIERS, CodecName, Role, Tier
from hzero.plan.sequence import stage_chains
from hzero.plan.shards import ShardPlan
from hzero.topology import Grid

#: Bytes of a checksum, one for each message of a peer.
CHECKSUM_BYTES = 16


@dataclass(frozen=True)
class TierTraffic:
    """Bytes that enter one rank over one tier for one role, in one optimizer step.

    Attributes:
        role: The kind of state; of activations the parallel dimension.
        tier: The tier.
        codec: Codec of the messages.
        wire_bytes: Bytes received, scales and record padding included.
        raw_bytes: The same with codec ``none``, without padding.
        crossings: How often per step a whole set of parameters crosses the tier.
        used: Whether the tier has more than one rank; its codec means nothing otherwise.
        checksum_bytes: Bytes received on top with each collective, where messages carry checksums. They are in no other
            number, nor in the wire log, since a plan does not know how many collectives share a step's bytes.
    """

    role: Role
    tier: Tier
    codec: CodecName
    wire_bytes: int
    raw_bytes: int
    crossings: int
    used: bool
    checksum_bytes: int = 0


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
        comm_itemsize: Bytes of one gradient on a hop with codec ``none``; ``itemsize`` if not given.
        accumulation: Micro-steps per step.
        fetches: Gathers of every parameter per micro-step, on average: forward and backward. A parameter that is used
            again soon is kept by DeepSpeed (``stage3_max_reuse_distance``), so small models fetch less.

    Returns:
        One entry per role and tier, weights first, tiers innermost first.
    """
    itemsizes: dict[Role, int] = {"weights": itemsize, "gradients": comm_itemsize or itemsize}
    chunks = [chunk_numel(numel, plan.grid.world_size) for numel in numels]
    wire: dict[tuple[Role, Tier], float] = defaultdict(float)
    raw: dict[tuple[Role, Tier], float] = defaultdict(float)
    crossings: dict[tuple[Role, Tier], float] = defaultdict(float)
    for chain in stage_chains(plan, accumulation):
        times = fetches - 1 if chain.phase == "backward" else 1
        for crossing in chain.crossings:
            key = (crossing.role, crossing.tiers[0])
            size = itemsizes[crossing.role]
            wire[key] += round(crossing.message_bytes(chunks, size) * crossing.received) * times
            raw[key] += round(crossing.rows * sum(chunks) * size * crossing.received) * times
            crossings[key] += times
    return [
        TierTraffic(
            role=role,
            tier=tier,
            codec=plan.codecs[role][tier].codec,
            wire_bytes=round(wire[role, tier]),
            raw_bytes=round(raw[role, tier]),
            crossings=round(crossings[role, tier]),
            used=plan.grid.size(tier) > 1,
            checksum_bytes=CHECKSUM_BYTES * (plan.grid.size(tier) - 1) if plan.checksum else 0,
        )
        for role in ROLES
        for tier in plan.grid.tiers
    ]


def node_bytes(traffic: Sequence[TierTraffic], plan: ShardPlan) -> int:
    """Bytes that enter one node per step: those of the tiers between nodes, of both roles and all ranks of the node."""
    return sum(row.wire_bytes for row in traffic if row.tier in NET_TIERS) * plan.grid.scope_size("node")


def ring_links(sizes: Sequence[int]) -> list[int]:
    """How many links of every level a ring has that visits the units of each level one after the other.

    A ring over 2 nodes of 4 packages of 2 devices, ``sizes`` (2, 4, 2), has 8 links inside packages, 6 between the packages
    of a node, and 2 between nodes: it enters and leaves a node once, whatever the number of ranks on it.

    Args:
        sizes: Units of each level, innermost first.
    """
    links, units = [], math.prod(sizes)
    closing = max((level for level, size in enumerate(sizes) if size > 1), default=None)
    for level, size in enumerate(sizes):
        units //= size
        links.append(units * (size - 1) + (level == closing))
    return links


def zero3_traffic(
    grid: Grid, numels: Sequence[int], *, itemsize: int = 2, accumulation: int = 1, fetches: float = 2
) -> list[TierTraffic]:
    """What plain ZeRO-3 receives per step: flat ring collectives over the world. Averages over the ranks.

    Over every link of the ring goes each shard but one, M (w - 1) / w of M bytes on w ranks, per all-gather and per
    reduce-scatter. Rings go node by node and package by package (`ring_links`), as RCCL and NCCL build them, so this is
    also what enters a node in all. Ranks do not receive the same: those where the ring enters a node receive everything
    over the node tier and the others nothing. Several rings, each with its part of the bytes, spread this.

    Args:
        grid: The machine.
        numels: Elements of each trainable parameter.
        itemsize: Bytes of one element, of weights and of gradients.
        accumulation: Micro-steps per step.
        fetches: Gathers of every parameter per micro-step, on average.

    Returns:
        As `plan_traffic`, averages rounded to whole bytes.
    """
    world = grid.world_size
    link = sum(chunk_numel(numel, world) for numel in numels) * itemsize * (world - 1)
    rows = []
    uses: dict[Role, float] = {"weights": fetches * accumulation, "gradients": accumulation}
    for role, times in uses.items():
        for tier, links in zip(grid.tiers, ring_links([grid.size(tier) for tier in grid.tiers])):
            size = round(links * link * times / world)
            rows.append(TierTraffic(role, tier, "none", size, size, round(times), grid.size(tier) > 1))
    return rows


def schemes_node_bytes(
    grid: Grid, numels: Sequence[int], *, itemsize: int = 2, accumulation: int = 1
) -> dict[str, float]:
    """Minimum bytes into one node per step under each scheme of DeepSpeed: each byte that a node lacks enters it once.

    With M the bytes of the weights, A the micro-steps and f = (nodes - 1) / nodes: ZeRO-3 gathers twice and reduces once
    per micro-step, 3 A M f. Its hpZ serves all gathers but the first of a step from the node, (1 + A) M f. ZeRO++
    (arXiv 2306.10209) sends 8 and 4 bits where these two send 16, (0.5 + 0.25 A) M f. Flat rings bring (ranks - 1) / ranks
    instead of f (`zero3_traffic`).
    """
    m, f, a = sum(numels) * itemsize, (grid.nodes - 1) / grid.nodes, accumulation
    return {"ZeRO-3": 3 * a * m * f, "hpZ": (1 + a) * m * f, "ZeRO++": (0.5 + 0.25 * a) * m * f * 2 / itemsize}


def link_seconds(traffic: Sequence[TierTraffic], rates_gb_s: Mapping[str, float | None]) -> dict[Tier, float]:
    """Seconds per step that each tier's links need by their bandwidth alone; tiers without a rate are left out.

    All bytes that cross a tier, over the bandwidth of all its links. Both sides of the division are per device: the
    average over the devices, and a device's share of the links. On 8 devices that share NICs of 100 GB/s, 12.5 GB/s are a
    device's share, and a flat ring that brings M bytes into the node has brought M / 8 per device.

    Latency, computation and overlap are left out. The result is a lower bound if no link of the tier carries more than its
    rate; it is reached if the bytes are spread evenly over the links.
    """
    return {
        tier: sum(row.wire_bytes for row in traffic if row.tier == tier) / (rate * 1e9)
        for tier in TIERS
        if (rate := rates_gb_s.get(tier))
    }
