"""Time of a collective by algorithm: a latency, and seconds of every resource that its bytes take.

All-gather and reduce-scatter are rings: RCCL and NCCL have no other algorithm for them, so a flat one over p ranks waits
p - 1 steps, each at least as long as a message takes to the next rank. An all-reduce is a ring on few nodes and a tree on
many. An all-to-all sends a message to every peer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hzero.config import NET_TIERS, Algorithm
from hzero.model.profile import Profile
from hzero.sharding.sequence import Crossing
from hzero.topology import Grid

#: What transfers and kernels share: links of a device in its package and between packages, the NICs of a node, the links
#: between switch groups, the device's memory and compute, processor cores.
Resource = Literal["gcd", "gpu", "node", "uplink", "memory", "compute", "cores"]


@dataclass(frozen=True)
class Phase:
    """A stretch of a task.

    Attributes:
        latency_s: Seconds in which it takes no resource.
        work: Then, seconds for which it would keep each resource busy if alone; the longest sets its pace.
    """

    latency_s: float
    work: Mapping[Resource, float] = field(default_factory=dict)

    @property
    def alone_s(self) -> float:
        """Its time with every resource to itself."""
        return self.latency_s + max(self.work.values(), default=0.0)


def transfer(
    crossing: Crossing,
    size: float,
    grid: Grid,
    profile: Profile,
    *,
    pairwise: bool = False,
    algorithm: Algorithm = "library",
) -> Phase:
    """Time of one collective; groups of the same kind on all ranks run at once.

    Args:
        crossing: The collective.
        size: Bytes of the whole array over a group.
        grid: The machine.
        profile: Its constants.
        pairwise: Whether a reduce-scatter is an all-to-all, as the stage's is on gloo.
        algorithm: Of an all-gather between nodes.
    """
    if crossing.ranks == 1 or not size:
        return Phase(0.0)
    if profile.library == "gloo":
        return _gloo(crossing, size, grid, profile, pairwise)
    if crossing.kind == "all_to_all" or (algorithm == "pairs" and set(crossing.tiers) <= set(NET_TIERS)):
        return _with_compute(_pairs(crossing, size, grid, profile), profile)
    if crossing.kind == "all_reduce":
        return _with_compute(_all_reduce(crossing, size, grid, profile), profile)
    return _with_compute(_ring(crossing, size, grid, profile, algorithm), profile)


def _with_compute(phase: Phase, profile: Profile) -> Phase:
    stolen = profile.value("stolen_share") * max(phase.work.values(), default=0.0)
    return Phase(phase.latency_s, {**phase.work, "compute": stolen} if stolen else phase.work)


def _places(crossing: Crossing, grid: Grid) -> tuple[int, int, int]:
    """Nodes of a group, its ranks on each, and the groups that share a node."""
    nodes = math.prod(grid.size(tier) for tier in crossing.tiers if tier in NET_TIERS)
    ranks = crossing.ranks // nodes
    return nodes, ranks, grid.scope_size("node") // ranks


def _inside(crossing: Crossing, sent: float, profile: Profile, pairs: bool) -> dict[Resource, float]:
    """Seconds of a node's links for what a device sends to the others of its group on the node."""
    within = [tier for tier in crossing.tiers if tier not in NET_TIERS]
    if not within:
        return {}
    if within == ["gcd"]:
        return {"gcd": sent / profile.value("gcd_gb_s") / 1e9}
    if within == ["gpu"]:
        return {"gpu": sent / profile.value("gpu_pairs_gb_s" if pairs else "gpu_ring_gb_s") / 1e9}
    seconds = sent / profile.value("flat_pairs_gb_s" if pairs else "flat_ring_gb_s") / 1e9
    return {"gcd": seconds, "gpu": seconds}


def _ring(crossing: Crossing, size: float, grid: Grid, profile: Profile, algorithm: Algorithm) -> Phase:
    nodes, ranks, groups = _places(crossing, grid)
    sent = size * (crossing.ranks - 1) / crossing.ranks
    work = _inside(crossing, sent, profile, pairs=False)
    between = nodes - 1
    inside = crossing.ranks - 1 - between
    if nodes > 1:
        work["node"] = sent * groups / profile.value("net_ring_gb_s" if ranks > 1 else "net_rails_gb_s") / 1e9
        if algorithm == "doubling" and ranks == 1:
            between = (nodes - 1).bit_length()
            work |= _uplink(work["node"], nodes, crossing, profile)
        else:
            work |= _uplink(work["node"], nodes, crossing, profile, neighbours=True)
    choices = []
    for protocol, share in (("", 1.0), ("_ll", profile.value("ll_share"))):
        steps = inside * profile.value(f"ring_inside{protocol}_us") + between * profile.value(f"ring_net{protocol}_us")
        slowed = {resource: seconds / share for resource, seconds in work.items()}
        choices.append(Phase((profile.value("launch_us") + steps) / 1e6, slowed))
    return min(choices, key=lambda phase: phase.alone_s)


def _pairs(crossing: Crossing, size: float, grid: Grid, profile: Profile) -> Phase:
    nodes, ranks, groups = _places(crossing, grid)
    part = size / crossing.ranks
    work = _inside(crossing, part * (ranks - 1), profile, pairs=True)
    latency = profile.value("launch_us") + (nodes - 1) * ranks * profile.value("pair_us")
    if nodes > 1:
        # Every rank of the node sends to all ranks of the group on other nodes.
        work["node"] = part * (nodes - 1) * ranks * ranks * groups / profile.value("net_rails_gb_s") / 1e9
        work |= _uplink(work["node"], nodes, crossing, profile)
    return Phase(latency / 1e6, work)


def _uplink(
    node_s: float, nodes: int, crossing: Crossing, profile: Profile, *, neighbours: bool = False
) -> dict[Resource, float]:
    """Messages that leave the switch group.

    Those to all peers do in proportion to the nodes outside it. A ring, and nearly all edges of a tree, join neighbours; nodes
    are numbered group by group, so one in each leaves. On tier ``group`` all do.
    """
    group = profile.group_nodes
    if group is None or ("node" in crossing.tiers and nodes <= group):
        return {}
    leaving = node_s * profile.taper
    if "node" in crossing.tiers:
        leaving *= 1 / group if neighbours else (nodes - group) / nodes
    return {"uplink": leaving}


def _all_reduce(crossing: Crossing, size: float, grid: Grid, profile: Profile) -> Phase:
    nodes, ranks, groups = _places(crossing, grid)
    ring = 2 * size * (crossing.ranks - 1) / crossing.ranks
    levels = math.log2(nodes)
    filled = size / (size + 1024 * profile.value("fill_kib"))
    latency = profile.value("launch_us") + levels * profile.value("level_us")
    latency += filled * (profile.value("fill_node_us") * (ranks > 1) + levels * profile.value("fill_us"))
    work: dict[Resource, float] = {}
    if ranks > 1:
        inside = 2 * size * (ranks - 1) / ranks
        if "gcd" in crossing.tiers and "gpu" in crossing.tiers:
            seconds = inside / profile.value("node_all_reduce_gb_s") / 1e9
            work |= {"gcd": seconds, "gpu": seconds}
        else:
            work |= _inside(crossing, inside, profile, pairs=False)
    if nodes == 2:  # either tree of the two is one message each way
        work["node"] = size * groups / profile.value("net_tree_gb_s") / 1e9
    elif nodes >= profile.tree_nodes:
        work["node"] = 2 * size * groups / profile.value("net_tree_gb_s") / 1e9
    elif nodes > 1:
        work["node"] = ring * groups / profile.value("net_all_reduce_gb_s") / 1e9
    if nodes > 1:
        work |= _uplink(work["node"], nodes, crossing, profile, neighbours=True)
    return Phase(latency / 1e6, work)


def _gloo(crossing: Crossing, size: float, grid: Grid, profile: Profile, pairwise: bool) -> Phase:
    """On emulated links, which carry all algorithms at one rate. gloo's reduce-scatter is a ring that gathers again."""
    nodes, ranks, groups = _places(crossing, grid)
    count = crossing.ranks
    rates: dict[str, float] = {"gcd": profile.value("gcd_gb_s"), "gpu": profile.value("gpu_ring_gb_s")}
    work: dict[Resource, float] = {}
    if crossing.kind == "all_to_all" or (crossing.kind == "reduce_scatter" and pairwise):
        rounds, inner, sent = 1, 1, size * (count - 1) / count
        for tier in crossing.tiers:
            peers = (grid.size(tier) - 1) * inner
            inner *= grid.size(tier)
            if tier in NET_TIERS:
                seconds = size / count * peers * ranks * groups / profile.value("net_rails_gb_s") / 1e9
                work["node"] = work.get("node", 0.0) + seconds
            elif tier == "gcd" or tier == "gpu":  # `predict` refuses grids with hives
                work[tier] = size / count * peers / rates[tier] / 1e9
    else:
        rounds = (count - 1) * (1 if crossing.kind == "all_gather" else 2)
        sent = rounds * size / count
        for tier in crossing.tiers:
            if tier in NET_TIERS:
                work["node"] = sent * groups / profile.value("net_ring_gb_s") / 1e9
            elif tier == "gcd" or tier == "gpu":
                work[tier] = sent / rates[tier] / 1e9
    if profile.cores:
        work["cores"] = sent / 1e9 * profile.value("core_s_per_gb") * grid.world_size / profile.cores
    step = profile.value("ring_net_us" if nodes > 1 else "ring_inside_us")
    return Phase((profile.value("launch_us") + rounds * step) / 1e6, work)


def kernel(profile: Profile, touched: float, world: int) -> Phase:
    """A codec's kernel that reads and writes ``touched`` bytes; on processors seconds of the cores that all ranks share."""
    if profile.cores:
        seconds = touched / 1e9 * profile.value("codec_s_per_gb") * world / profile.cores
        return Phase(0.0, {"cores": seconds})
    return Phase(profile.value("kernel_us") / 1e6, {"memory": touched / profile.value("hbm_gb_s") / 1e9})
