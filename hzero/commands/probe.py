"""Probe: times collectives and hops of every tier, on all ranks together."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hzero.comm import Bucket, Collectives, Transport, WireLog
from hzero.comm.wirelog import HopTimer
from hzero.comm.wires import STAGE, Lane
from hzero.config import (
    DEFAULT_BLOCK_SIZE,
    NET_TIERS,
    ROLES,
    Algorithm,
    CodecConfig,
    CodecName,
    Tier,
    TransportName,
    parse_config,
)
from hzero.plan.links_file import LinkRow, Operation, algorithm_bandwidth, bus_bandwidth
from hzero.plan.program import Decode, Order, Program, gather_program, reduce_program
from hzero.plan.shards import Hop, ShardPlan
from hzero.topology import Grid

#: All-gathers and their algorithms; on tiers inside a node there is the library's only.
GATHERS: dict[Operation, Algorithm] = {"all_gather": "library", "doubling": "doubling", "pairs": "pairs"}
#: A part of a message is a multiple of this many bytes, as the records of payloads are.
_ALIGNMENT = 16
#: Untimed iterations before each measurement; the first connects the ranks.
_WARMUP = 3


@dataclass(frozen=True)
class Measurement:
    """A row to measure: one collective or hop at one size.

    Attributes:
        tier: The tier.
        ranks: Ranks of its groups.
        op: A bare collective, or the role of a hop.
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


def measurements(
    grid: Grid, sizes: Sequence[int], codecs: Sequence[CodecName], dtype: torch.dtype
) -> Iterator[Measurement]:
    """Everything to measure on a grid, in order; nothing on tiers of size 1.

    Args:
        grid: Where the ranks sit.
        sizes: Bytes of the whole array over a group.
        codecs: Codecs of the hops.
        dtype: Type of what is summed or encoded.
    """
    for tier in grid.crossed:
        ops: list[tuple[Operation, CodecName | None, torch.dtype]] = [
            (op, None, torch.uint8) for op, how in GATHERS.items() if tier in NET_TIERS or how == "library"
        ]
        ops += [("all_to_all", None, torch.uint8), ("reduce_scatter", None, dtype)]
        ops += [(role, codec, dtype) for role in ROLES for codec in codecs]
        ranks = grid.size(tier)
        parts = sorted({max(size // ranks // _ALIGNMENT, 1) * _ALIGNMENT for size in sizes})
        for op, codec, kind in ops:
            for part in parts:
                yield Measurement(tier, ranks, op, codec, part // kind.itemsize, kind)


class Probe:
    """Measures on this rank. Collective: all ranks of the world measure the same things in the same order.

    Args:
        grid: Where the ranks sit; the process group is up.
        device: Of this rank.
        transport: What carries the messages.
        iterations: Timed iterations of each measurement.
        timeout_s: How long one collective may take, in seconds.
    """

    def __init__(
        self, grid: Grid, device: torch.device, transport: TransportName, iterations: int, timeout_s: float = 120
    ) -> None:
        config = parse_config({"preset": "lossless", "transport": transport})
        plan = ShardPlan.from_config(config, grid, dist.get_rank())
        self._transport = Transport(plan, timedelta(seconds=timeout_s))
        self._plan = plan
        self._collectives = Collectives(plan, self._transport, WireLog())
        self._device, self._iterations = device, iterations

    def measure(self, one: Measurement) -> LinkRow:
        """Measures one row.

        Raises:
            HopError: A collective failed or timed out.
        """
        run = self._hop(one) if one.codec else self._collective(one)
        for _ in range(_WARMUP):
            run()
        dist.barrier()
        timers = []
        for _ in range(self._iterations):
            timers.append(HopTimer(self._device))
            run()
            timers[-1].stop()
        measured = torch.tensor([timer.seconds() for timer in timers], dtype=torch.float64, device=self._device)
        dist.all_reduce(measured, dist.ReduceOp.MAX)  # of the slowest rank
        times = [max(time, 1e-9) for time in measured.tolist()]  # a device's clock may not resolve less
        size, seconds = one.ranks * one.count * one.dtype.itemsize, statistics.median(times)
        row = dataclasses.asdict(one)
        return LinkRow(
            type=str(row.pop("dtype")).removeprefix("torch."),
            size_bytes=size,
            median_us=seconds * 1e6,
            min_us=min(times) * 1e6,
            max_us=max(times) * 1e6,
            algbw_gb_s=algorithm_bandwidth(size, seconds),
            busbw_gb_s=bus_bandwidth(size, seconds, one.ranks),
            **row,
        )

    def _values(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(1, 128, (count,), dtype=torch.uint8, device=self._device).to(dtype)

    def _collective(self, one: Measurement) -> Callable[[], object]:
        lane: Lane = (STAGE, one.tier)
        if one.op in GATHERS:
            part = self._values(one.count, one.dtype)
            return lambda: self._transport.start(lane, "all_gather", part, "a probe", algorithm=GATHERS[one.op]).wait()
        whole, kind = self._values(one.count * one.ranks, one.dtype).view(torch.uint8), one.op
        assert kind in ("all_to_all", "reduce_scatter")
        return lambda: self._transport.start(lane, kind, whole, "a probe", dtype=one.dtype).wait()

    def _hop(self, one: Measurement) -> Callable[[], object]:
        """One hop of a bucket of one tensor: encoding, collective, decoding."""
        settings = CodecConfig(codec=one.codec or "none", block_size=DEFAULT_BLOCK_SIZE)
        hop, then = Hop(one.tier, one.ranks, settings), lambda tensors: tensors
        if one.op == "gradients":
            tensor = self._values(one.count * one.ranks, one.dtype)
            program = reduce_program(self._plan, [hop], hop.size, shard_order=False)
        else:
            tensor = self._values(one.count, one.dtype)
            gather = gather_program(self._plan, [hop], left=settings)
            program = Program((*gather.steps, Decode(settings, Order.of_rows(hop.size), gather.pieces)))
        bucket = Bucket((0,), (one.count,), one.dtype, one.op)
        return lambda: self._collectives.run(program, bucket, lambda: [tensor], then).wait()
