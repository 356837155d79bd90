"""Probe: times collectives and hops of every tier, on all ranks together."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hzero.bench.settings import LinksSettings
from hzero.codecs import Codec
from hzero.collectives import Bucket, TieredCollectives, Transport, WireLog
from hzero.collectives.transport import Lane
from hzero.collectives.wirelog import HopTimer
from hzero.config import DEFAULT_BLOCK_SIZE, NET_TIERS, ROLES, TIERS, Algorithm, CodecConfig, CodecName, Role, Tier
from hzero.parsing import parse_config
from hzero.plan.links_file import LinkRow, Operation, algorithm_bandwidth, bus_bandwidth
from hzero.sharding.plan import Hop, ShardPlan
from hzero.topology import Grid

#: All-gathers and their algorithms; on tiers other than ``node`` there is the library's only.
GATHERS: dict[Operation, Algorithm] = {"all_gather": "library", "doubling": "doubling", "pairs": "pairs"}
COLLECTIVES: tuple[Operation, ...] = (*GATHERS, "all_to_all", "reduce_scatter")
#: Added to the bytes of a collective to estimate its duration: the cost that does not depend on its size.
FIXED_BYTES = 256 << 10


@dataclass(frozen=True)
class HopTiming:
    """A line of the table that is to be measured: one collective or hop at one size.

    Attributes:
        tier: The tier.
        ranks: Ranks of its groups.
        op: One of `COLLECTIVES`, or the role of a hop.
        codec: Codec of a hop; None for a bare collective.
        count: Elements of one rank's part.
        dtype: Their type.
    """

    tier: Tier
    ranks: int
    op: Operation
    codec: CodecName | None
    count: int
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole array over the group."""
        return self.ranks * self.count * self.dtype.itemsize

    @property
    def cost(self) -> int:
        """Relative duration, without a unit."""
        return self.size_bytes + FIXED_BYTES


def timings(grid: Grid, settings: LinksSettings, dtype: torch.dtype) -> list[HopTiming]:
    """Everything to measure on a grid, in order; nothing on tiers of size 1."""
    ops: list[tuple[Operation, CodecName | None, torch.dtype]] = [
        (op, None, dtype if op == "reduce_scatter" else torch.uint8) for op in COLLECTIVES
    ]
    ops += [(role, codec, dtype) for role in ROLES for codec in settings.codecs]
    return [
        HopTiming(tier, grid.size(tier), op, codec, count, kind)
        for tier in TIERS
        if grid.size(tier) > 1
        for op, codec, kind in ops
        if tier in NET_TIERS or GATHERS.get(op, "library") == "library"
        for count in settings.parts(grid.size(tier), kind.itemsize)
    ]


class Probe:
    """Measures on this rank. Collective: all ranks of the world measure the same things in the same order.

    Args:
        grid: Where the ranks sit; the process group is up.
        settings: Of the command.
        device: Of this rank.
    """

    def __init__(self, grid: Grid, settings: LinksSettings, device: torch.device) -> None:
        plan = ShardPlan.from_config(
            parse_config({"preset": "lossless", "transport": settings.transport}), grid, dist.get_rank()
        )
        self._transport = Transport(plan, timedelta(seconds=settings.timeout))
        self._collectives = TieredCollectives(plan, self._transport, WireLog())
        self._settings = settings
        self._device = device

    def rows(self, plan: Sequence[HopTiming]) -> Iterator[LinkRow]:
        """Measures one after the other.

        Raises:
            HopError: A collective failed or timed out.
        """
        for timing in plan:
            run = self._hop(timing) if timing.codec else self._collective(timing)
            times = [max(time, 1e-9) for time in self._times(run)]  # a device's clock may not tell less
            seconds = statistics.median(times)
            size = timing.size_bytes
            yield LinkRow(
                tier=timing.tier,
                ranks=timing.ranks,
                op=timing.op,
                codec=timing.codec,
                size_bytes=size,
                count=timing.count,
                type=str(timing.dtype).removeprefix("torch."),
                median_us=seconds * 1e6,
                min_us=min(times) * 1e6,
                max_us=max(times) * 1e6,
                algbw_gb_s=algorithm_bandwidth(size, seconds),
                busbw_gb_s=bus_bandwidth(size, seconds, timing.ranks),
            )

    def _times(self, run: Callable[[], object]) -> list[float]:
        """Seconds of each iteration on its slowest rank."""
        for _ in range(self._settings.warmup):
            run()
        dist.barrier()
        timers = []
        for _ in range(self._settings.iterations):
            timers.append(HopTimer(self._device))
            run()
            timers[-1].stop()
        times = torch.tensor([timer.seconds() for timer in timers], dtype=torch.float64, device=self._device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return times.tolist()

    def _values(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(1, 128, (count,), dtype=torch.uint8, device=self._device).to(dtype)

    def _collective(self, timing: HopTiming) -> Callable[[], object]:
        lane: Lane = ("weights", timing.tier)
        if timing.op in GATHERS:
            part = self._values(timing.count, timing.dtype)
            return lambda: list(self._transport.gather(GATHERS[timing.op], lane, part, "a probe"))
        start = getattr(self._transport, timing.op)
        message = self._values(timing.count * timing.ranks, timing.dtype)
        return lambda: start(lane, message, "a probe").wait()

    def _hop(self, timing: HopTiming) -> Callable[[], object]:
        """One hop of a bucket of one tensor: encoding, collective, decoding."""
        settings = CodecConfig(codec=timing.codec or "none", block_size=DEFAULT_BLOCK_SIZE)
        hop = Hop(timing.tier, timing.ranks, settings)
        codec = Codec.from_config(settings)
        role: Role = "weights" if timing.op == "weights" else "gradients"
        bucket = Bucket((0,), (timing.count,), timing.dtype, role)

        def gather() -> object:
            def decode(payload: torch.Tensor, received: Codec, outer: int) -> object:
                return received.decode(payload, bucket.chunks, dtype=bucket.dtype, outer=outer)

            return self._collectives.gather(
                [hop], bucket, lambda: (codec.encode([shard], bucket.chunks), codec), decode
            ).wait()

        def reduce() -> object:
            return self._collectives.reduce([hop], bucket, [whole], rows=hop.size, shard_order=False).wait()

        if timing.op == "weights":
            shard = self._values(timing.count, timing.dtype)
            return gather
        whole = self._values(timing.count * timing.ranks, timing.dtype)
        return reduce
