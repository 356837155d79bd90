"""Point to point: a payload from one rank to another, as a chain of the pipeline with a lane for each direction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
from torch.profiler import record_function

from hzero.codecs import Codec, mpc
from hzero.collectives.checksum import Comparison, addressed, checksums
from hzero.collectives.errors import MissingPeerError
from hzero.collectives.hop import Bucket, checked, exchanges, marked, repeats
from hzero.collectives.moves import TieredMoves
from hzero.collectives.pipeline import Chain, Hops
from hzero.collectives.transport import NOTHING_SENT, Ends, Pending
from hzero.collectives.watchdog import shared_watchdog
from hzero.collectives.wires import Lane, Wires
from hzero.config import PLAIN
from hzero.sharding.plan import Hop

T = TypeVar("T")
_NOTHING = Ends()


class PointToPoint:
    """Sends and receives between the ranks of a plan.

    Args:
        tiered: Its pipeline runs the messages, and its wire log counts them.
        wires: Of all ranks of the plan.
        ranks: Rank in the world of each rank of the plan.
        name: Begins the names of the lanes.
        timeout: Longest wait for a message.
    """

    def __init__(self, tiered: TieredMoves, wires: Wires, ranks: Sequence[int], name: str, timeout: timedelta) -> None:
        self._tiered, self._wires, self._ranks = tiered, wires, ranks
        self._name, self._timeout = name, timeout
        self._numbers: Counter[Lane] = Counter()

    def send(self, bucket: Bucket, tensor: torch.Tensor, target: int, *, seed: int = 0) -> Chain[None]:
        """Submits a message to a rank of the plan.

        Args:
            bucket: Of one tensor, of which it is one chunk.
            tensor: Flat, ``[chunk]``.
            target: The rank.
            seed: Seed of stochastic rounding.
        """
        hop, lane = self._way(self._tiered.plan.rank, target)
        codec = Codec.from_config(hop.codec)

        def hops() -> Hops[None]:
            used = self._tiered.used(tensor)
            message, found = self._tiered.encoded(bucket, codec, lambda to: to.encode([used], bucket.chunks, seed=seed))
            yield None
            if exchanges(hop.codec):
                length = mpc.lengths(message, [message.numel()])
                pending = self._start(lane, length.view(torch.uint8), bucket, codec, target, sends=True)
                yield pending
                self._tiered.received(pending, length)
                message = message[: int(length)]
            fits = found.name == codec.name
            yield from sent(message if fits else marked(bucket, message, codec, 1), codec, bucket.chunks[0])
            if not fits:
                yield from sent(message, found, 0)  # its elements are counted already
            elif repeats(hop.codec, self._tiered.pipeline):
                yield from [NOTHING_SENT] * (1 + self._tiered.plan.checksum)

        def sent(message: torch.Tensor, codec: Codec, elements: int) -> Hops[None]:
            number = self._next(lane)
            ends = self._tiered.counted(hop, bucket, codec, message, elements, peers=0.0)
            pending = self._start(lane, message, bucket, codec, target, sends=True, ends=ends)
            yield pending
            self._tiered.received(pending, message)
            if self._tiered.plan.checksum:
                sums = _sums(message, number).view(-1).view(torch.uint8)
                pending = self._start(lane, sums, bucket, codec, target, sends=True)
                yield pending
                self._tiered.received(pending, sums)

        return self._tiered.pipeline.submit(hops(), self._lanes(lane, hop))

    def receive(self, bucket: Bucket, like: torch.Tensor, source: int, then: Callable[[torch.Tensor], T]) -> Chain[T]:
        """Submits the receipt of a message.

        Args:
            bucket: As sent.
            like: On the device of the message.
            source: Rank of the plan that sends it.
            then: Makes the result, of ``[chunk]`` in ``bucket.dtype``.
        """
        hop, lane = self._way(source, self._tiered.plan.rank)
        codec = Codec.from_config(hop.codec)

        def hops() -> Hops[T]:
            yield None
            message, found = room(codec), codec
            size = message.numel()
            if exchanges(hop.codec):
                told = like.new_empty(8, dtype=torch.uint8)
                pending = self._start(lane, told, bucket, codec, source, sends=False)
                yield pending
                message = message[: checked(self._tiered.received(pending, told), size, bucket.label)[0]]
            yield from arrived(message, codec, bucket.chunks[0])
            message = torch.nn.functional.pad(message, (0, size - message.numel()))
            if codec.name == "exp":
                lost = codec.lost(message, bucket.chunks)
                if not repeats(hop.codec, self._tiered.pipeline):
                    self._tiered.keep_lost(lost, f"{bucket.label} in codec exp on tier {hop.tier!r}")
                elif int(lost):
                    found = Codec.from_config(PLAIN)
                    message = room(found)
                    yield from arrived(message, found, 0)
                else:
                    yield from [NOTHING_SENT] * (1 + self._tiered.plan.checksum)
            return then(found.decode(message, bucket.chunks, dtype=bucket.dtype)[0])

        def room(codec: Codec) -> torch.Tensor:
            return like.new_zeros(codec.message_bytes(bucket.chunks, 1, bucket.dtype.itemsize), dtype=torch.uint8)

        def arrived(message: torch.Tensor, codec: Codec, elements: int) -> Hops[None]:
            number = self._next(lane)
            ends = self._tiered.counted(hop, bucket, codec, message, elements, peers=1.0)
            pending = self._start(lane, message, bucket, codec, source, sends=False, ends=ends)
            yield pending
            self._tiered.received(pending, message)
            if self._tiered.plan.checksum:
                sums = message.new_empty(16)
                pending = self._start(lane, sums, bucket, codec, source, sends=False)
                yield pending
                sent = self._tiered.received(pending, sums).view(torch.int64).view(-1, 2)
                what = partial(self._describe, bucket, codec, source, False, message.nbytes)
                own = _sums(message, number)
                self._tiered.compare(Comparison(sent, own, [self._ranks[source]], number, what), message)

        return self._tiered.pipeline.submit(hops(), self._lanes(lane, hop))

    def _way(self, source: int, target: int) -> tuple[Hop, Lane]:
        """The outermost tier on which two ranks differ, and the lane of their messages.

        Each direction has its own: in a ring every rank sends before it receives. Its tier is that of the wires, which
        communicators of one role share, whatever their grids.
        """
        plan = self._tiered.plan
        tier = plan.grid.tier_between(source, target)
        lane: Lane = f"{self._name} {self._ranks[source]} to {self._ranks[target]}", "node"
        return Hop(tier, 2, plan.codecs.weights[tier]), lane

    def _lanes(self, lane: Lane, hop: Hop) -> list[Lane]:
        times = 1 + repeats(hop.codec, self._tiered.pipeline)
        return [lane] * (exchanges(hop.codec) + times * (1 + self._tiered.plan.checksum))

    def _next(self, lane: Lane) -> int:
        self._numbers[lane] += 1
        return self._numbers[lane]

    def _describe(self, bucket: Bucket, codec: Codec, other: int, sends: bool, size: int) -> str:
        plan = self._tiered.plan
        return (
            f"hzero: {bucket.label} in codec {codec.name} {'to' if sends else 'from'} rank {self._ranks[other]} on tier "
            f"{plan.grid.tier_between(plan.rank, other)!r} (rank {self._ranks[plan.rank]}, {size:,} bytes)"
        )

    def _start(
        self,
        lane: Lane,
        message: torch.Tensor,
        bucket: Bucket,
        codec: Codec,
        other: int,
        *,
        sends: bool,
        ends: Ends = _NOTHING,
    ) -> Pending:
        own, peer = self._ranks[self._tiered.plan.rank], self._ranks[other]
        what = partial(self._describe, bucket, codec, other, sends, message.nbytes)
        try:
            with record_function(f"hzero: {'send' if sends else 'recv'}: {bucket.label} in codec {codec.name}"):
                work = self._wires.message(message, other, sends=sends)
        except RuntimeError as error:  # gloo has closed the pair, after a message that did not come
            raise MissingPeerError.of(f"{what()} cannot start: ", error) from error
        hops = shared_watchdog().lane(lane, sorted((own, peer)), self._timeout.total_seconds())
        return Pending(work, message, what, ends, lane=hops)


def _sums(message: torch.Tensor, number: int) -> torch.Tensor:
    return addressed(checksums(message, 1), number, 0, 1)
