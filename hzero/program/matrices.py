"""Matrices whose update needs all of their elements: who updates which one, in rounds, and the bytes of a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hzero.codecs.formats import chunk_numel
from hzero.config import TIERS, Tier, tiers_inside, tiers_outside
from hzero.program.collectives import TierTraffic, exchange_bytes
from hzero.program.shards import ShardPlan
from hzero.topology import Grid

#: The tiers that a shard crosses on its way to the owner: first across nodes, then inside the node.
LEGS = tiers_outside("node"), tiers_inside("node")
#: Elements that a rank receives in a round, unless one matrix has more.
_ROUND_NUMEL = 1 << 24
#: The matrices of one round, by node and by place in the node.
Round = list[list[list[int]]]


@dataclass(frozen=True)
class Matrix:
    """A matrix that is sharded over all ranks in the order of its elements.

    Attributes:
        shape: Its shape. Dimensions before the last two count matrices.
        chunk: Elements of a rank's shard, with padding.
    """

    shape: tuple[int, ...]
    chunk: int

    @classmethod
    def of(cls, shape: Sequence[int], ranks: int) -> Matrix:
        """A matrix that is cut anywhere into equal shards, as DeepSpeed does."""
        return cls(tuple(shape), chunk_numel(math.prod(shape), ranks))

    @property
    def flops(self) -> int:
        """Operations of one Newton-Schulz iteration: a Gram matrix, its square, and its product with the matrix."""
        *several, rows, columns = self.shape
        short, long = sorted((rows, columns))
        return math.prod(several) * (4 * short * short * long + 2 * short**3)


@dataclass(frozen=True)
class Owned:
    """The owners of matrices on a grid.

    A shard crosses nodes first, and then goes to the owner inside the node. So messages between nodes are balanced even if a
    node has fewer matrices than ranks.

    Attributes:
        matrices: The matrices.
        grid: The ranks over which they are sharded.
        rounds: The rounds.
    """

    matrices: tuple[Matrix, ...]
    grid: Grid
    rounds: tuple[Round, ...]

    @classmethod
    def of(cls, matrices: Sequence[Matrix], grid: Grid) -> Owned:
        """Gives every matrix to one rank, so that the slowest rank computes little more than the mean.

        The most expensive matrix comes first and goes to the node with the least work so far, and there to the rank with the
        least work (longest processing time first; R. L. Graham, 1969). All messages of a round have the length of the longest,
        so a round takes as much from every rank.
        """
        inside = grid.scope_size("node")
        work = [[0] * inside for _ in range(grid.world_size // inside)]
        queues, nodes = [[list[int]() for _ in of_node] for of_node in work], [0] * len(work)
        for number in sorted(range(len(matrices)), key=lambda number: -matrices[number].flops):
            node = nodes.index(min(nodes))
            place = work[node].index(min(work[node]))
            nodes[node] += matrices[number].flops
            work[node][place] += matrices[number].flops
            queues[node][place].append(number)
        rounds = []
        while waiting := [queue for of_node in queues for queue in of_node if queue]:
            limit = max(_ROUND_NUMEL // grid.world_size, *(matrices[queue[0]].chunk for queue in waiting))
            rounds.append([[_taken(queue, limit, matrices) for queue in of_node] for of_node in queues])
        return cls(tuple(matrices), grid, tuple(rounds))

    @property
    def legs(self) -> list[Grid]:
        """The grid of the ranks among which messages of each of `LEGS` go."""
        return [self.grid.of_ranks(along(self.grid, 0, tiers)) for tiers in LEGS]

    def numel(self, numbers: Sequence[int]) -> int:
        """Elements of a rank's shards of some matrices."""
        return sum(self.matrices[number].chunk for number in numbers)

    def flops(self, numbers: Sequence[int]) -> int:
        """Operations of one Newton-Schulz iteration of some matrices."""
        return sum(self.matrices[number].flops for number in numbers)

    def parts(self, one: Round) -> tuple[int, int]:
        """Elements for each peer in a message of a round: across nodes, and inside the node."""
        across = max(sum(map(self.numel, of_node)) for of_node in one)
        return across, len(one) * max(self.numel(numbers) for of_node in one for numbers in of_node)

    def traffic(self, plan: ShardPlan, itemsize: int) -> list[TierTraffic]:
        """Bytes of one step: each matrix goes to its owner, and the update comes back.

        Args:
            plan: The shard plan, with the codecs.
            itemsize: Bytes of an element on the wire.
        """
        codecs, found = plan.codecs.optimizer, list[TierTraffic]()
        for leg, parts in zip(self.legs, zip(*map(self.parts, self.rounds))):
            raw = 2 * sum(parts) * leg.world_size * itemsize
            for tier, wire in exchange_bytes(leg, codecs, 2 * parts, itemsize).items():
                sent = raw - raw // leg.size(tier)
                found.append(TierTraffic("optimizer", tier, codecs[tier].codec, wire, sent, 2, used=True))
        return sorted(found, key=lambda row: TIERS.index(row.tier))

    def balance_text(self) -> str:
        """How evenly the work is distributed, over the nodes and over the ranks that have some."""
        if not self.matrices:
            return "0 matrices"
        by_node = [[sum(map(self.flops, of_rank)) for of_rank in zip(*of_node)] for of_node in zip(*self.rounds)]
        text = []
        for what, work in (("nodes", map(sum, by_node)), ("ranks", itertools.chain(*by_node))):
            busy = [flops for flops in work if flops]
            text.append(f"{len(busy)} {what} (slowest {max(busy) * len(busy) / sum(busy):.2f} of their mean)")
        return f"{len(self.matrices)} matrices on {', '.join(text)}"


def _taken(queue: list[int], limit: int, matrices: Sequence[Matrix]) -> list[int]:
    """Removes as many matrices from a queue as fit into a round."""
    taken, numel = list[int](), 0
    while queue and (numel := numel + matrices[queue[0]].chunk) <= limit:
        taken.append(queue.pop(0))
    return taken


def along(grid: Grid, rank: int, tiers: Sequence[Tier]) -> list[int]:
    """The ranks that differ from a rank only on some tiers, outermost tier first."""
    place = grid.coordinates(rank)
    outermost = sorted(tiers, key=TIERS.index, reverse=True)
    found = itertools.product(*(range(grid.size(tier)) for tier in outermost))
    return [grid.rank(place._replace(**dict(zip(outermost, at)))) for at in found]
