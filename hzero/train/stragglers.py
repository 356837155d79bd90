"""Which ranks and nodes the others wait for: slow ones, which no timeout finds."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

#: Steps between two looks, and how much of a step the others must wait for one to be named.
EVERY, SHARE = 20, 0.1
#: Nodes that are named at most.
_NAMED = 8


class Stragglers:
    """Compares how long ranks wait for each other: in synchronous training a slow rank is the one that waits least.

    Args:
        device: Of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._world = device, dist.get_world_size()
        self._hosts: list[str] | None = None
        self._rows: list[tuple[float, float]] = []

    def add(self, step_s: float, waited_s: float) -> list[dict[str, Any]] | None:
        """Takes a step of this rank; after every 20th the ranks exchange their medians. Collective.

        Args:
            step_s: Seconds of the step.
            waited_s: Those in which this rank waited for others.

        Returns:
            Slow nodes as of `slow`, on all ranks; None between two looks.
        """
        self._rows.append((step_s, waited_s))
        if len(self._rows) < EVERY:
            return None
        medians = torch.tensor([statistics.median(values) for values in zip(*self._rows)], device=self._device)
        self._rows.clear()
        everyones = torch.empty(self._world, 2, device=self._device)
        dist.all_gather(list(everyones), medians)
        if self._hosts is None:
            self._hosts = [""] * self._world
            dist.all_gather_object(self._hosts, socket.gethostname())
        steps, waits = everyones.T.tolist()
        return slow(self._hosts, steps, waits)


def slow(hosts: Sequence[str], steps: Sequence[float], waits: Sequence[float]) -> list[dict[str, Any]]:
    """Nodes with ranks for which the others wait, the slowest first.

    Args:
        hosts: Host of every rank.
        steps: Median seconds of a step of every rank.
        waits: Median seconds of a step in which it waited.

    Returns:
        ``host``, its slow ``ranks``, ``lag_s``: how much less than the median of all ranks the slowest of them waits in a
        step, and ``step_s``: the median of the steps of the host's ranks.
    """
    usual, step_s = statistics.median(waits), statistics.median(steps)
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        if usual - waits[rank] > SHARE * step_s:
            found.setdefault(host, []).append(rank)
    rows = [
        {
            "host": host,
            "ranks": ranks,
            "lag_s": round(max(usual - waits[rank] for rank in ranks), 4),
            "step_s": round(statistics.median(steps[rank] for rank, other in enumerate(hosts) if other == host), 4),
        }
        for host, ranks in found.items()
    ]
    return sorted(rows, key=lambda row: -float(row["lag_s"]))[:_NAMED]  # type: ignore[arg-type]


def described(row: dict[str, Any]) -> str:
    """A row of `slow` in words."""
    ranks = ", ".join(map(str, row["ranks"]))
    lag_s, step_s = row["lag_s"], row["step_s"]
    return f"rank {ranks} on {row['host']} is slow: the others wait for it {lag_s:.3g} s of every step ({step_s:.3g} s)"
