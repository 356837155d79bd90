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
from hzero.collectives.wirelog import HopTimer
from hzero.config import DEFAULT_BLOCK_SIZE, ROLES, TIERS, CodecConfig, parse_config
from hzero.sharding.plan import Hop, ShardPlan
from hzero.topology.grid import Grid
from hzero.topology.links_file import LinkRow, algorithm_bandwidth, bus_bandwidth

COLLECTIVES = ("all_gather", "all_to_all", "reduce_scatter")
#: Added to the bytes of a measurement to foresee how long it takes: what a collective costs whatever its size.
FIXED_BYTES = 256 << 10


@dataclass(frozen=True)
class Measurement:
    """One line of the table before it is measured.

    Attributes:
        tier: The tier.
        ranks: Ranks of its groups.
        op: One of `COLLECTIVES`, or the role of a hop.
        codec: Codec of a hop; None for a bare collective.
        count: Elements of one rank's part.
        dtype: Their type.
    """

    tier: str
    ranks: int
    op: str
    codec: str | None
    count: int
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole array over the group."""
        return self.ranks * self.count * self.dtype.itemsize

    @property
    def cost(self) -> int:
        """How long it takes against others, in no unit."""
        return self.size_bytes + FIXED_BYTES


def measurements(grid: Grid, settings: LinksSettings, dtype: torch.dtype) -> list[Measurement]:
    """All that there is to measure on a grid, in order; nothing on tiers of size 1."""
    ops: list[tuple[str, str | None, torch.dtype]] = [
        (op, None, dtype if op == "reduce_scatter" else torch.uint8) for op in COLLECTIVES
    ]
    ops += [(role, codec, dtype) for role in ROLES for codec in settings.codecs]
    return [
        Measurement(tier, grid.size(tier), op, codec, count, kind)
        for tier in TIERS
        if grid.size(tier) > 1
        for op, codec, kind in ops
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
        plan = ShardPlan.from_config(parse_config({"preset": "lossless"}), grid, dist.get_rank())
        self._transport = Transport(plan, timedelta(seconds=settings.timeout_s))
        self._collectives = TieredCollectives(plan, self._transport, WireLog())
        self._settings = settings
        self._device = device

    def rows(self, plan: Sequence[Measurement]) -> Iterator[LinkRow]:
        """Measures one after the other.

        Raises:
            HopError: A collective failed or timed out.
        """
        for measurement in plan:
            run = self._hop(measurement) if measurement.codec else self._collective(measurement)
            times = [max(time, 1e-9) for time in self._times(run)]  # a device's clock may not tell less
            seconds = statistics.median(times)
            size = measurement.size_bytes
            yield LinkRow(
                tier=measurement.tier,  # type: ignore[arg-type]
                ranks=measurement.ranks,
                op=measurement.op,  # type: ignore[arg-type]
                codec=measurement.codec,  # type: ignore[arg-type]
                size_bytes=size,
                count=measurement.count,
                type=str(measurement.dtype).removeprefix("torch."),
                median_us=seconds * 1e6,
                min_us=min(times) * 1e6,
                max_us=max(times) * 1e6,
                algbw_gb_s=algorithm_bandwidth(size, seconds),
                busbw_gb_s=bus_bandwidth(size, seconds, measurement.ranks),
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

    def _collective(self, measurement: Measurement) -> Callable[[], object]:
        start = getattr(self._transport, measurement.op)
        count = measurement.count * (1 if measurement.op == "all_gather" else measurement.ranks)
        message = self._values(count, measurement.dtype)
        return lambda: start(measurement.tier, message, "a probe", lambda: None).wait()

    def _hop(self, measurement: Measurement) -> Callable[[], object]:
        """One hop of a bucket of one tensor: encoding, collective, decoding."""
        settings = CodecConfig(codec=str(measurement.codec), block_size=DEFAULT_BLOCK_SIZE)
        hop = Hop(measurement.tier, measurement.ranks, settings)
        codec = Codec.from_config(settings)
        bucket = Bucket((0,), (measurement.count,), measurement.dtype, measurement.op)

        def gather() -> object:
            message = codec.encode([shard], bucket.chunks)
            payload, received, outer = self._collectives.gather([hop], bucket, message, codec).wait()
            return received.decode(payload, bucket.chunks, dtype=bucket.dtype, outer=outer)

        def reduce() -> object:
            return self._collectives.reduce([hop], bucket, [whole], rows=hop.size, whole=False).wait()

        if measurement.op == "weights":
            shard = self._values(measurement.count, measurement.dtype)
            return gather
        whole = self._values(measurement.count * measurement.ranks, measurement.dtype)
        return reduce
