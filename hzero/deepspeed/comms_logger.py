"""DeepSpeed's ``comms_logger``, which lists hops with their bytes on the wire, next to DeepSpeed's own collectives."""

from __future__ import annotations

import threading
from collections import Counter, deque

import torch.distributed as dist
from deepspeed.comm import comm

from hzero.comm.wirelog import HopTimer, WireLog
from hzero.config import CodecName, Tier


class LoggedHops:
    """Counts and times of hops that have ended, by name and size, until ``comms_logger`` gets them.

    The logger gets the same rows on all ranks: its summary with ``show_straggler`` makes one all-reduce for each of them.

    Args:
        wire_log: Counts the hops.
    """

    def __init__(self, wire_log: WireLog) -> None:
        self._running: deque[tuple[tuple[str, int], HopTimer]] = deque()
        self._counts: Counter[tuple[str, int]] = Counter()
        self._seconds: dict[tuple[str, int], float] = {}
        self._lock = threading.Lock()  # hops may end on another thread
        wire_log.on_hop.append(self._add)

    @staticmethod
    def wanted() -> bool:
        """Whether the user has turned the logger on, for all operations or for those named ``hzero``."""
        logger = comm.comms_logger
        return bool(logger.enabled and (logger.prof_all or "hzero" in logger.prof_ops))

    def _add(self, role: str, tier: Tier, codec: CodecName, wire_bytes: int, timer: HopTimer) -> None:
        if wire_bytes and self.wanted():
            with self._lock:
                self._running.append(((f"hzero {role}, {tier}, {codec}", wire_bytes), timer))
                while self._running and self._running[0][1].ready():
                    self._count()

    def _count(self) -> None:
        row, timer = self._running.popleft()
        self._counts[row] += 1
        self._seconds[row] = self._seconds.get(row, 0.0) + timer.seconds()

    def flush(self) -> None:
        """Gives all hops to the logger, once they have ended. Collective over the world where the logger is on.

        Bytes may differ between ranks: where a message does not fit codec ``exp``, or in codec ``mpc``. The hops of such a name
        are one entry on every rank, with the bytes of the rank that has received most.
        """
        if not self.wanted():
            return
        with self._lock:
            while self._running:
                self._count()
            counts, self._counts = self._counts, Counter()
            seconds, self._seconds = self._seconds, {}
        every = [counts] * dist.get_world_size()
        dist.all_gather_object(every, counts)
        for name in sorted({name for each in every for name, _ in each}):
            first, *others = [{size: count for (own, size), count in each.items() if own == name} for each in every]
            if all(sizes == first for sizes in others):
                for size, count in sorted(first.items()):
                    for _ in range(count):
                        _log(name, seconds[name, size] / count, size)
            else:
                most = max(sum(size * count for size, count in sizes.items()) for sizes in (first, *others))
                _log(name, sum(spent for row, spent in seconds.items() if row[0] == name), most)


def _log(name: str, seconds: float, wire_bytes: int) -> None:
    # The logger computes the bandwidth of `recv` from these bytes, without a factor for the ranks of the world.
    comm.comms_logger.append("recv", name, max(seconds * 1e3, 1e-6), wire_bytes)
