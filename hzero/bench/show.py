"""What rank 0 shows of a probe: rccl-tests' columns as they come, and the time left."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hzero.bench.probe import Measurement
from hzero.config import ROLES
from hzero.topology.links_file import LinkRow, LinksFile

#: Seconds between lines about the time left, where there is no terminal.
EVERY_S = 5.0
_HEAD = (
    "#      size      count      type  op                     time         min         max      algbw      busbw\n"
    "#       (B)                                              (us)        (us)        (us)     (GB/s)     (GB/s)"
)


class Table:
    """Prints rows, with a bar below them on a terminal and lines about the time left elsewhere.

    Args:
        plan: What will be measured.
        world_size: Ranks of the world.
        enabled: False shows nothing: every rank but the first.
    """

    def __init__(self, plan: Sequence[Measurement], world_size: int, *, enabled: bool) -> None:
        self._plan, self._world_size, self._enabled = plan, world_size, enabled
        self._console = Console(soft_wrap=True)

    def say(self, text: str) -> None:
        """Prints a line."""
        if self._enabled:
            self._console.print(text, highlight=False, markup=False)

    def follow(self, rows: Iterable[LinkRow]) -> list[LinkRow]:
        """Shows rows as they come and returns all of them."""
        if not self._enabled:
            return list(rows)
        if not self._console.is_terminal:
            return list(self._with_lines(rows))
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        found = []
        with Progress(*columns, console=self._console) as bar:
            task = bar.add_task("", total=sum(measurement.cost for measurement in self._plan))
            for measurement, row in zip(self._plan, self._with_heads(rows)):
                found.append(row)
                done = f"tier {row.tier}, {len(found)} of {len(self._plan)}"
                bar.update(task, advance=measurement.cost, description=done)
        return found

    def _with_lines(self, rows: Iterable[LinkRow]) -> Iterator[LinkRow]:
        began = shown = time.monotonic()
        total, done = sum(measurement.cost for measurement in self._plan), 0
        for index, row in enumerate(self._with_heads(rows)):
            done += self._plan[index].cost
            now = time.monotonic()
            if now - shown >= EVERY_S and done < total:
                shown = now
                left = timedelta(seconds=round((now - began) / done * (total - done)))
                self.say(f"# {index + 1} of {len(self._plan)} measurements, {left} left")
            yield row

    def _with_heads(self, rows: Iterable[LinkRow]) -> Iterator[LinkRow]:
        tier = None
        for row in rows:
            if row.tier != tier:
                tier = row.tier
                groups = self._world_size // row.ranks
                many = (
                    f"{groups} groups of {row.ranks} ranks, all at once"
                    if groups > 1
                    else f"1 group of {row.ranks} ranks"
                )
                self.say(f"# tier {tier}: {many}\n{_HEAD}")
            self.say(line(row))
            yield row


def line(row: LinkRow) -> str:
    """A row under the columns' heads."""
    op = row.op if row.codec is None else f"{row.op}/{row.codec}"
    times = " ".join(f"{value:11.1f}" for value in (row.median_us, row.min_us, row.max_us))
    rates = " ".join(f"{value:10.4g}" for value in (row.algbw_gb_s, row.busbw_gb_s))
    return f"{row.size_bytes:11} {row.count:10} {row.type:>9}  {op:15} {times} {rates}"


def summary(links: LinksFile) -> str:
    """A line a tier: bandwidth, latency, and what the codecs gain or cost at the largest size."""
    lines = []
    for tier, rate in links.tiers.items():
        rows = [row for row in links.rows if row.tier == tier]
        smallest = min(row.size_bytes for row in rows if row.op == "all_gather")
        text = f"tier {tier}: {rate.gb_s:.4g} GB/s a device; latency {rate.latency_us:.1f} us (all-gather of {smallest:,} B)"
        for role in ROLES:
            size = max((row.size_bytes for row in rows if row.op == role), default=0)
            times = {row.codec: row.median_us for row in rows if row.op == role and row.size_bytes == size}
            gains = [
                f"{codec} {times['none'] / us:.2f} x"
                for codec, us in times.items()
                if codec != "none" and "none" in times
            ]
            if gains:
                text += f"\n  {role} hops of {size:,} B, speed against codec none: {', '.join(gains)}"
        lines.append(text)
    return "\n".join(lines)
