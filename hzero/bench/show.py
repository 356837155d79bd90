"""What rank 0 shows of a probe: the columns of rccl-tests, row by row, and the time left."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from hzero.bench.probe import HopTiming
from hzero.config import ROLES
from hzero.plan.links_file import LinkRow, LinksFile, node_all_gather
from hzero.progress import Progress

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

    def __init__(self, plan: Sequence[HopTiming], world_size: int, *, enabled: bool) -> None:
        self._plan, self._world_size = plan, world_size
        self._progress = Progress(sum(timing.cost for timing in plan), enabled=enabled)

    def say(self, text: str) -> None:
        """Prints a line."""
        self._progress.message(text)

    def follow(self, rows: Iterable[LinkRow]) -> list[LinkRow]:
        """Shows rows as they come and returns all of them."""
        found: list[LinkRow] = []
        done = 0
        with self._progress as progress:
            for timing, row in zip(self._plan, rows):
                if not found or found[-1].tier != row.tier:
                    groups = self._world_size // row.ranks
                    many = f"{groups} groups of {row.ranks} ranks, all at once"
                    self.say(f"# tier {row.tier}: {many if groups > 1 else f'1 group of {row.ranks} ranks'}\n{_HEAD}")
                self.say(line(row))
                found.append(row)
                done += timing.cost
                progress.update(done, f"# tier {row.tier}, {len(found)} of {len(self._plan)} measurements")
        return found


def line(row: LinkRow) -> str:
    """A row under the columns' heads."""
    op = row.op if row.codec is None else f"{row.op}/{row.codec}"
    times = " ".join(f"{value:11.1f}" for value in (row.median_us, row.min_us, row.max_us))
    rates = " ".join(f"{value:10.4g}" for value in (row.algbw_gb_s, row.busbw_gb_s))
    return f"{row.size_bytes:11} {row.count:10} {row.type:>9}  {op:15} {times} {rates}"


def summary(links: LinksFile) -> str:
    """Bandwidth, latency and speed of hops with codecs for every tier; the algorithm for all-gathers between nodes."""
    lines = []
    for tier, rate in links.tiers.items():
        rows = [row for row in links.rows if row.tier == tier]
        smallest = min(row.size_bytes for row in rows if row.op == "all_gather")
        ranks = rows[0].ranks
        # A rank receives the parts of all others: latency is a tenth of the time where these take nine times as long.
        enough = 9 * rate.latency_us * rate.gb_s * 1e3 / (ranks - 1)
        text = (
            f"tier {tier}: {rate.gb_s:.4g} GB/s per device; latency {rate.latency_us:.1f} us (all-gather of {smallest:,} B), "
            f"less than a tenth of a hop from {enough:,.0f} B per rank on"
        )
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
    setting = node_all_gather(links.rows)
    if setting.algorithm != "library":
        lines.append(
            f'all-gathers between nodes took less than the library\'s with, in the "hzero" block,\n'
            f'  "node_all_gather": {json.dumps(setting.model_dump())}'
        )
    return "\n".join(lines)
