"""Tiered all-to-all and broadcast: tensors that reach other ranks as they are, beside the gathers and sums of `tiered`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, TypeVar

import torch

from hzero.codecs import Codec
from hzero.collectives.hop import Bucket, cross
from hzero.collectives.pipeline import Chain, Hops
from hzero.collectives.tiered import TieredCollectives
from hzero.config import TIERS
from hzero.sharding.plan import Hop

T = TypeVar("T")


class TieredMoves(TieredCollectives):
    """`TieredCollectives` that also move tensors without a sum. Hops take the codecs of the plan's weights.

    Both encode a tensor once, where it is, and pass the payload on while codecs agree; where they differ a rank transcodes.
    """

    def all_to_all(
        self, bucket: Bucket, tensor: torch.Tensor, then: Callable[[torch.Tensor], T], *, seed: int = 0
    ) -> Chain[T]:
        """Submits a tiered all-to-all.

        It crosses the innermost tier first. On every tier a rank sends to each peer all parts whose way leads over that
        peer's coordinate. So between nodes a rank sends one message to each other node, where an all-to-all over the world
        would send one to each rank; and every part crosses each tier at most once.

        Args:
            bucket: Of one tensor; its chunk is one part.
            tensor: Flat, ``[world * chunk]``; part i goes to rank i.
            then: Makes the result, of ``[world * chunk]`` in ``bucket.dtype``: part i is of rank i.
            seed: Seed of stochastic rounding.
        """
        hops = self.plan.gather_hops()[::-1]
        lanes = [lane for hop in hops for lane in self.steps(hop, bucket)]
        return self.pipeline.submit(self._all_to_all(hops, bucket, tensor, then, seed), lanes)

    def _all_to_all(
        self, hops: tuple[Hop, ...], bucket: Bucket, tensor: torch.Tensor, then: Callable[[torch.Tensor], T], seed: int
    ) -> Hops[T]:
        grid, world = self.plan.grid, self.plan.grid.world_size
        self.used(tensor)
        layout: dict[str, Any] = {"sizes": (world,), "strides": (1,), "seed": seed}
        if grid.regular:
            layout |= {"sizes": self.plan.hop_sizes, "strides": self.plan.hop_strides}
        else:
            tensor = self._in_hop_order(tensor, bucket.chunks[0])
        first = Codec.from_config(hops[0].codec)
        *held, codec = self.encoded(bucket, first, lambda to: to.encode([tensor], bucket.chunks, **layout))
        yield None
        # The axes of the rows: that of the tier to be crossed goes first and is then the sender's coordinate.
        outer = 1
        for hop in hops:
            # Rows are [crossed tiers, last one first][this tier][the rest]: this tier's axis goes to the front.
            rows = held.pop().view(outer, hop.size, world // outer // hop.size, -1)
            held.append(rows.transpose(0, 1).contiguous().view(-1))
            del rows
            outer *= hop.size
            codec = yield from cross(
                self,
                self._transport,
                hop,
                bucket,
                held,
                codec,
                self._transport.scatter,
                outer=1,
                rows=world,
                peers=1 - 1 / hop.size,
                seed=seed,
                parts=hop.size,
            )
        message = held.pop()
        # Rows are now those of the senders, outermost tier first.
        if grid.regular:
            (swapped,) = codec.decode(
                message,
                bucket.chunks,
                dtype=bucket.dtype,
                sizes=self.plan.hop_sizes[::-1],
                strides=self.plan.hop_strides[::-1],
            )
        else:
            (rows,) = codec.decode(message, bucket.chunks, dtype=bucket.dtype)
            places = product(*map(range, self.plan.hop_sizes[::-1]))
            senders = [grid.rank(**dict(zip(TIERS[::-1], place))) for place in places]
            swapped = rows.view(world, -1)[torch.tensor(senders, device=rows.device).argsort()].view(-1)
        return then(swapped)

    def broadcast(
        self, bucket: Bucket, tensor: torch.Tensor, source: int, then: Callable[[torch.Tensor], T], *, seed: int = 0
    ) -> Chain[T]:
        """Submits a tiered broadcast: outermost tier first, so a node receives the payload once.

        Args:
            bucket: Of one tensor, of which it is one chunk.
            tensor: Flat, ``[chunk]``; only the source's values count.
            source: Rank of the plan that has it.
            then: Makes the result, of ``[chunk]`` in ``bucket.dtype``, as all ranks decode it, the source too.
            seed: Seed of stochastic rounding; the same on all ranks.
        """
        home, place = self.plan.grid.coordinates(source), self.plan.grid.coordinates(self.plan.rank)
        hops = tuple(
            hop
            for hop in self.plan.gather_hops()
            # A rank takes part once its coordinates on the tiers further inside are the source's.
            if all(getattr(place, tier) == getattr(home, tier) for tier in TIERS[: TIERS.index(hop.tier)])
        )
        lanes = [lane for hop in hops for lane in self.steps(hop, bucket)]
        return self.pipeline.submit(self._broadcast(hops, bucket, tensor, source, then, seed), lanes)

    def _broadcast(
        self,
        hops: tuple[Hop, ...],
        bucket: Bucket,
        tensor: torch.Tensor,
        source: int,
        then: Callable[[torch.Tensor], T],
        seed: int,
    ) -> Hops[T]:
        home, place = self.plan.grid.coordinates(source), self.plan.grid.coordinates(self.plan.rank)
        codec, device, held = Codec.from_config(hops[0].codec), tensor.device, list[torch.Tensor]()
        if self.plan.rank == source:
            self.used(tensor)
            *held, codec = self.encoded(bucket, codec, lambda to: to.encode([tensor], bucket.chunks, seed=seed))
        yield None
        for hop in hops:
            if not held:
                codec = Codec.from_config(hop.codec)
                size = codec.message_bytes(bucket.chunks, 1, bucket.dtype.itemsize)
                held.append(torch.empty(size, dtype=torch.uint8, device=device))
            root = getattr(home, hop.tier)
            codec = yield from cross(
                self,
                self._transport,
                hop,
                bucket,
                held,
                codec,
                self._transport.spread,
                outer=1,
                rows=1,
                peers=float(getattr(place, hop.tier) != root),
                seed=seed,
                root=root,
            )
        return then(codec.decode(held.pop(), bucket.chunks, dtype=bucket.dtype)[0])
