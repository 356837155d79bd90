"""Canary: a known pattern on every lane, compared byte by byte where it arrives."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from hzero.comm.errors import HopError
from hzero.comm.runtime import Collectives
from hzero.comm.transport import Lane
from hzero.config import NET_TIERS, ROLES, TIERS, Algorithm
from hzero.plan.program import Kind

#: Differences that an error names one by one.
_NAMED = 4


class Canary:
    """Sends patterns through the groups and collectives of the hops: an all-gather for weights, an all-to-all for gradients.

    A pattern is of its sender, its receiver and the number of the canary, so that a message from elsewhere or from before is
    a difference too. Nothing of it is in the wire log.

    Args:
        collectives: Their lanes are tested.
        size: Bytes that a rank receives on each lane; each peer sends at least 16.
        device: Where the messages are.
        names: Rank in the world of each rank of the plan, for messages; None where they are the same.
    """

    def __init__(
        self, collectives: Collectives, size: int, device: torch.device, names: Sequence[int] | None = None
    ) -> None:
        self._names = names
        self._collectives = collectives
        self._size = size
        self._device = device
        self._sent = 0

    def send(self) -> None:
        """Tests all lanes at once. Collective; waits for the device.

        Raises:
            HopError: Some bytes are not those that were sent, or a hop failed.
        """
        plan, self._sent = self._collectives.plan, self._sent + 1
        lanes: list[tuple[Lane, Algorithm]] = [
            ((role, tier), algorithm)
            for role, tier in itertools.product(ROLES, TIERS)
            if plan.grid.size(tier) > 1
            for algorithm in dict.fromkeys(("library", plan.node_all_gather.algorithm))
            if algorithm == "library" or (role == "weights" and tier in NET_TIERS)
        ]
        tests = []
        for lane, algorithm in lanes:
            ranks = list(plan.tier_group(lane[1]))
            words = max(self._size // len(ranks), 16) // 8
            own, everyone = ranks.index(plan.rank), np.arange(len(ranks), dtype=np.uint64)
            to_all = lane[0] == "weights"
            mine = self._pattern(np.array([own]), np.zeros(1) if to_all else everyone, words)
            want = self._pattern(everyone, np.zeros(1) if to_all else np.array([own]), words)
            message = torch.from_numpy(mine.reshape(-1)).to(self._device)
            kind: Kind = "all_gather" if to_all else "all_to_all"
            chain = self._collectives.send(lane, kind, message, f"{lane[0]} of canary {self._sent}", algorithm)
            where = f"{lane[0]} on tier {lane[1]!r}" + ("" if algorithm == "library" else f" by {algorithm}")
            tests.append((where, ranks, want, chain))
        wrong = []
        for where, ranks, want, chain in tests:  # all have arrived before one raises: the lanes stay in order
            arrived = chain.wait().cpu().numpy().reshape(want.shape)
            for sender in np.flatnonzero((arrived != want).any(axis=1)):
                offsets = np.flatnonzero(arrived[sender] != want[sender])
                wrong.append(
                    f"{where}: rank {self._name(plan.rank)} received {len(offsets):,} wrong bytes of {want.shape[1]:,} from "
                    f"rank {self._name(ranks[sender])}, the first at offset {offsets[0]} "
                    f"({arrived[sender][offsets[0]]:#04x}, sent as {want[sender][offsets[0]]:#04x})"
                )
        if wrong:
            more = [f"and {len(wrong) - _NAMED} more"] if len(wrong) > _NAMED else []
            raise HopError(
                f"hzero: canary {self._sent} arrived changed. {'; '.join([*wrong[:_NAMED], *more])}. What these wires "
                "carried since the last canary may be wrong too: go back to a checkpoint from before"
            )

    def _name(self, rank: int) -> int:
        return rank if self._names is None else self._names[rank]

    def _pattern(self, senders: np.ndarray, receivers: np.ndarray, words: int) -> np.ndarray:
        """uint8 ``[senders or receivers, 8 * words]``; one of the two may have one entry."""
        keys = senders.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        keys = keys + receivers.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03) + np.uint64(self._sent)
        mixed: np.ndarray = keys[:, None] * np.uint64(0xBF58476D1CE4E5B9) + np.arange(1, words + 1, dtype=np.uint64)
        for shift in (30, 27):  # the finalizer of splitmix64
            mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(0x94D049BB133111EB)
        return (mixed ^ mixed >> np.uint64(31)).view(np.uint8)
