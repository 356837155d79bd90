"""Probe: measures the links of every tier by all-gathers, of one tier or of all tiers at once.

Sizes and rates are defined in `hzero.topology.links_file`. All groups of a tier run at once, as in training.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from datetime import datetime, timezone

import torch
import torch.distributed as dist

from hzero.codecs import exact
from hzero.comm.runtime import Runtime
from hzero.comm.wirelog import HopTimer
from hzero.comm.wires import STAGE
from hzero.config import Algorithm, Tier
from hzero.topology.links_file import LinkRow, LinksFile

#: Bytes of a part are a multiple of this number, as in payloads.
_ALIGNMENT = 16
#: Weights with which codec `exact` is timed.
_WEIGHTS = 1 << 18
#: Untimed iterations before each measurement; the first connects the ranks.
WARMUP = 3
#: Of a short measurement: iterations for latency and for rates, bytes of the first part, factor of the following ones, seconds of
#: the last one, and maximum bytes of an array over a group, on CPU and on a device with faster links.
_OF_LATENCY, _OF_RATE, _LEAST, _FACTOR, _ENOUGH_S, _MOST, _MOST_ON_DEVICE = 10, 3, 4 << 10, 4, 0.05, 4 << 20, 64 << 20


class Probe:
    """Measures collectives on the lanes of a runtime. Its methods are collective.

    Args:
        runtime: Has the peers of every tier.
        device: Device of the messages.
        group: All ranks that measure together; None is the world.
    """

    def __init__(self, runtime: Runtime, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._runtime, self._device, self._group = runtime, device, group

    def row(
        self, tier: Tier, part: int, iterations: int, algorithm: Algorithm = "library", warmup: int = WARMUP
    ) -> LinkRow:
        """Times the all-gather of ``part`` bytes of each rank over a tier."""
        ranks = self._runtime.plan.grid.size(tier)
        times = [1e6 * time for time in self._times([(tier, part)], iterations, algorithm, warmup)]
        of_times = {"median_us": statistics.median(times), "min_us": min(times), "max_us": max(times)}
        return LinkRow(tier=tier, ranks=ranks, algorithm=algorithm, size_bytes=part * ranks, **of_times)

    def _times(
        self, parts: Sequence[tuple[Tier, int]], iterations: int, algorithm: Algorithm = "library", warmup: int = WARMUP
    ) -> list[float]:
        """Seconds of each iteration on its slowest rank. All parts, in bytes, are on their way at once."""
        runtime, device = self._runtime, self._device
        messages = [torch.ones(part, dtype=torch.uint8, device=device) for _, part in parts]
        hops = [
            runtime.prepare((STAGE, tier), "all_gather", part, "a probe", algorithm=algorithm) for tier, part in parts
        ]

        def run() -> None:
            for hop, flight in [(hop, hop.start(message)) for hop, message in zip(hops, messages)]:
                hop.end(flight)

        for _ in range(warmup):
            run()
        dist.barrier(self._group)
        timers = []
        for _ in range(iterations):
            timers.append(HopTimer(device))
            run()
            timers[-1].stop()
        return slowest([timer.seconds() for timer in timers], device, self._group)

    def short(self, backend: str, name: str) -> LinksFile:
        """Measures latency and bandwidth of every tier, how much they share, and codec ``exact``, in a few seconds.

        Messages grow until one takes long enough for a link that sends short bursts at a higher rate.
        """
        rows, largest = list[LinkRow](), dict[Tier, LinkRow]()
        most = _MOST if self._device.type == "cpu" else _MOST_ON_DEVICE
        for tier in self._runtime.plan.grid.crossed:
            part, ranks = _LEAST, self._runtime.plan.grid.size(tier)
            while tier not in largest or (
                largest[tier].min_us < 1e6 * _ENOUGH_S and part * ranks <= most  # a stall of the host ends nothing
            ):
                first = tier not in largest
                iterations, warmup = (_OF_LATENCY, WARMUP) if first else (_OF_RATE, 0)
                largest[tier] = self.row(tier, part, iterations, warmup=warmup)
                rows.append(largest[tier])
                part *= _FACTOR
        links = self.file(rows, backend, name)
        coding = slowest(coding_s(self._device), self._device, self._group)
        return links.model_copy(update={"together": self.together(rows), "coding_s": coding})

    def together(self, rows: Sequence[LinkRow]) -> float:
        """How much of the shorter tiers' times adds to the longest one's if all tiers are busy, 0 to 1."""
        largest = {row.tier: row for row in sorted(rows, key=lambda row: row.size_bytes) if row.algorithm == "library"}
        if len(largest) < 2:
            return 0.0
        # Parts that take equally long alone: on independent links they take as long together.
        alone_us = min(row.min_us for row in largest.values())
        shares = [(tier, row.size_bytes / row.ranks * alone_us / row.min_us) for tier, row in largest.items()]
        parts = [(tier, max(int(share) // _ALIGNMENT, 1) * _ALIGNMENT) for tier, share in shares]
        longer = min(self._times(parts, _OF_RATE, warmup=0)) * 1e6 / alone_us - 1
        return min(max(longer / (len(parts) - 1), 0.0), 1.0)

    def file(self, rows: list[LinkRow], backend: str, name: str) -> LinksFile:
        """The content of a links file. ``name``: name of the device."""
        grid = self._runtime.plan.grid
        return LinksFile(
            schema="hzero-links-1",
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            machine={"host": platform.node(), "processor": platform.processor() or platform.machine()},
            versions={"python": platform.python_version(), "torch": torch.__version__},
            backend=backend,
            device=name,
            grid={tier: grid.size(tier) for tier in grid.tiers},
            rows=rows,
        )


def parts_of(sizes: Sequence[int], ranks: int) -> list[int]:
    """Bytes of one rank's part of arrays over a group: aligned, and at least one unit of alignment."""
    return sorted({max(size // ranks // _ALIGNMENT, 1) * _ALIGNMENT for size in sizes})


def slowest(seconds: Sequence[float], device: torch.device, group: dist.ProcessGroup | None = None) -> list[float]:
    """The largest of each number over all ranks. Collective."""
    most = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    return [max(time, 1e-15) for time in most.tolist()]  # a device's clock may return zero


def coding_s(device: torch.device) -> list[float]:
    """Seconds to measure and encode one weight in codec ``exact``, and to decode one."""
    old = torch.linspace(0.001, 1, _WEIGHTS, device=device).bfloat16()
    new = (old.view(torch.int16) + (torch.arange(_WEIGHTS, device=device) % 3).to(torch.int16)).view(torch.bfloat16)
    layout = exact.Layout.of((_WEIGHTS,))

    def encoded() -> torch.Tensor:
        head = old.new_empty(layout.head, dtype=torch.uint8)
        exact.measure([new], [old], head)
        record = head.new_empty(layout.record_bytes(int(exact.words_of(head))))
        record[: len(head)] = head
        exact.encode([new], [old], record)
        return record

    record, copy = encoded(), old.clone().view(1, -1)
    exact.decode(record, [copy], [0])  # both are compiled now
    encode = HopTimer(device)
    record = encoded()
    encode.stop()
    decode = HopTimer(device)
    exact.decode(record, [copy.copy_(old)], [0])
    decode.stop()
    return [timer.seconds() / _WEIGHTS for timer in (encode, decode)]
