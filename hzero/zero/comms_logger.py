"""DeepSpeed's ``comms_logger``, which gets hops with their bytes on the wire, beside the collectives of DeepSpeed."""

from __future__ import annotations

from deepspeed.comm import comm

from hzero.collectives.wirelog import HopTimer, WireLog
from hzero.config import CodecName, Tier


class LoggedHops:
    """Hops that have ended, until ``comms_logger`` gets them.

    The logger gets them in one order on all ranks, because its summary with ``show_straggler`` sums times by that order, and
    hops end in any order.

    Args:
        wire_log: Counts the hops.
    """

    def __init__(self, wire_log: WireLog) -> None:
        self._hops: list[tuple[str, int, HopTimer]] = []
        wire_log.on_hop.append(self._add)

    @staticmethod
    def wanted() -> bool:
        """Whether the user has turned the logger on, for all operations or for those named ``hzero``."""
        logger = comm.comms_logger
        return bool(logger.enabled and (logger.prof_all or "hzero" in logger.prof_ops))

    def _add(self, role: str, tier: Tier, codec: CodecName, wire_bytes: int, label: str, timer: HopTimer) -> None:
        if wire_bytes and self.wanted():
            self._hops.append((f"hzero {role}, {tier}, {codec}", wire_bytes, timer))

    def flush(self) -> None:
        """Gives all hops to the logger, once they have ended."""
        hops = self._hops[: len(self._hops)]
        del self._hops[: len(hops)]  # other threads append meanwhile
        for name, wire_bytes, timer in sorted(hops, key=lambda hop: hop[:2]):
            # The logger computes the bandwidth of `recv` from these bytes, without a factor for the ranks of the world.
            comm.comms_logger.append("recv", name, max(timer.seconds() * 1e3, 1e-6), wire_bytes)
