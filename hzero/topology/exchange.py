"""The exchange of a discovery: one report of every rank to rank 0, and one answer back.

Traffic is bounded for any world: a rank sends one report of at most `MAX_REPORT_BYTES` and receives one answer. If a rank
cannot make its report, it sends the reason, and all ranks raise the same message in place of waiting for it.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from hzero.validation import ConfigError, some

#: Longest report of one rank.
MAX_REPORT_BYTES = 4096

#: Reports that rank 0 reads from a store in one message.
BATCH = 512

_GOOD, _BAD = b"+", b"-"
_PREFIX = "hzero/exchange"
_NAMED = 8  # ranks that a message names


class Exchange(ABC):
    """A round is one `gather` and then one `broadcast`, by all ranks.

    Args:
        rank: This rank.
        world_size: Ranks of the world.
        timeout_s: Longest wait of rank 0 for the others, in seconds; they wait a little longer for its answer.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._failed = False

    def gather(self, report: bytes | Exception) -> list[bytes] | None:
        """Brings the reports of all ranks to rank 0.

        Args:
            report: This rank's report, or the error that prevented it.

        Returns:
            On rank 0 all reports, in rank order; None on the others, which call `broadcast` next.

        Raises:
            ConfigError: A rank had no report, had one that is too long, or did not come in time. Rank 0 raises it here, the
                others from `broadcast`, with the same message.
        """
        if isinstance(report, bytes) and len(report) > MAX_REPORT_BYTES:
            report = ConfigError(f"a report of {len(report)} bytes; at most {MAX_REPORT_BYTES} are exchanged")
        self._failed = not isinstance(report, bytes)
        frames = self._collect(
            _GOOD + report if isinstance(report, bytes) else _BAD + one_line(report).encode()[:MAX_REPORT_BYTES]
        )
        if frames is None:
            return None
        failed = [(rank, frame[1:].decode(errors="replace")) for rank, frame in enumerate(frames) if frame[:1] != _GOOD]
        if failed:
            message = _failure(failed, self.world_size)
            self._spread(_BAD + message.encode())
            raise ConfigError(message)
        return [frame[1:] for frame in frames]

    def broadcast(self, answer: bytes | Exception | None) -> bytes:
        """Brings rank 0's answer to all ranks.

        Args:
            answer: On rank 0 the answer, or an error, which all ranks raise; None on the others.

        Returns:
            The answer, on all ranks.

        Raises:
            ConfigError: Rank 0 had none, the round failed in `gather`, or no answer came in time.
        """
        if isinstance(answer, Exception):
            self._spread(_BAD + one_line(answer).encode())
            raise ConfigError(str(answer))
        frame = self._spread(_GOOD + answer if answer is not None else None)
        if frame[:1] != _GOOD:
            message = frame[1:].decode(errors="replace")
            raise ConfigError(message) if self._failed else ConfigError.of_rank_0(message)
        return frame[1:]

    @property
    def grace_s(self) -> float:
        """The longer wait of other ranks for rank 0, so that its reason reaches them before they give up."""
        return max(2.0, self.timeout_s / 5)

    @abstractmethod
    def _collect(self, frame: bytes) -> list[bytes] | None:
        """The frames of all ranks, on rank 0."""

    @abstractmethod
    def _spread(self, frame: bytes | None) -> bytes:
        """Rank 0's frame, on all ranks."""


class AloneExchange(Exchange):
    """A world of one rank."""

    def __init__(self) -> None:
        super().__init__(0, 1, 0.0)

    def _collect(self, frame: bytes) -> list[bytes]:
        return [frame]

    def _spread(self, frame: bytes | None) -> bytes:
        assert frame is not None
        return frame


class StoreExchange(Exchange):
    """Through a store of torch.distributed: one key per rank, read by rank 0 in batches, and one for the answer.

    Each rank counts its rounds in the store, so that a second exchange of the same job has keys of its own. Each rank
    removes its report once it has the answer, and rank 0 the answer once all have it, if the store can.

    ``store`` is a TCPStore, FileStore, HashStore, or a PrefixStore of one.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
        super().__init__(rank, world_size, timeout_s)
        self._store = store
        self._round = 0

    def _collect(self, frame: bytes) -> list[bytes] | None:
        deadline = time.monotonic() + self.timeout_s
        frames: list[bytes] = []
        first = 0
        try:
            self._round = self._store.add(f"{_PREFIX}/rounds/{self.rank}", 1)
            self._store.set(self._key(self.rank), frame)
            if self.rank != 0:
                return None
            for first in range(0, self.world_size, BATCH):
                keys = [self._key(rank) for rank in range(first, min(first + BATCH, self.world_size))]
                self._store.wait(keys, _left(deadline))
                frames += self._store.multi_get(keys)
        except RuntimeError as error:
            if self.rank != 0 or time.monotonic() < deadline - 0.5:
                raise self._gone(error) from None
            raise self._incomplete(first) from None
        return frames

    def _spread(self, frame: bytes | None) -> bytes:
        if frame is not None:
            self._answer(frame, self.world_size - 1)
            return frame
        patience = self.timeout_s + self.grace_s
        deadline = time.monotonic() + patience
        try:
            self._store.wait([self._key("answer")], _left(deadline))
            answer = bytes(self._store.get(self._key("answer")))
            self._free(self.rank)
            self._store.add(self._key("heard"), 1)
        except RuntimeError as error:
            if time.monotonic() < deadline - 0.5:
                raise self._gone(error) from None
            raise ConfigError(
                f"topology: rank {self.rank} has waited {patience:g} s for the answer of rank 0, which did not come"
            ) from None
        return answer

    def _answer(self, frame: bytes, listeners: int) -> None:
        """Writes the answer, and stays until all have heard it: rank 0 may serve the store."""
        deadline, pause = time.monotonic() + self.grace_s, 1e-3
        try:
            self._store.set(self._key("answer"), frame)
            while self._store.add(self._key("heard"), 0) < listeners:
                if time.monotonic() > deadline:
                    return
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            self._free(0, "answer", "heard")
        except RuntimeError as error:
            raise self._gone(error) from None

    def _free(self, *names: int | str) -> None:
        with contextlib.suppress(RuntimeError):  # a FileStore keeps its keys
            for name in names:
                self._store.delete_key(self._key(name))

    def _incomplete(self, first: int) -> ConfigError:
        try:
            missing = self._missing(first, self.world_size)
        except RuntimeError as error:
            return self._gone(error)
        message = absent(missing, self.world_size, self.timeout_s)
        self._answer(_BAD + message.encode(), self.world_size - 1 - len(missing))
        return ConfigError(message)

    def _missing(self, first: int, end: int) -> list[int]:
        """Ranks without a report, by halves: most are there."""
        if self._store.check([self._key(rank) for rank in range(first, end)]):
            return []
        if end - first == 1:
            return [first]
        middle = (first + end) // 2
        return self._missing(first, middle) + self._missing(middle, end)

    def _key(self, name: int | str) -> str:
        return f"{_PREFIX}/{self._round}/{name}"

    def _gone(self, error: Exception) -> ConfigError:
        return ConfigError(f"topology: rank {self.rank}: the store of the exchange has failed: {one_line(error)[:200]}")


def one_line(error: Exception) -> str:
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def absent(missing: Sequence[int], world_size: int, timeout_s: float) -> str:
    """The message for ranks that did not come."""
    many = f"{len(missing)} of {world_size} ranks have"
    return f"topology: {many} not reported within {timeout_s:g} s: {_ranks(missing)}"


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(deadline - time.monotonic(), 0.01))


def _failure(failed: list[tuple[int, str]], world_size: int) -> str:
    text = failed[0][1]
    if world_size == 1:
        return text
    same = [rank for rank, other in failed if other == text]
    who = f"all {world_size} ranks" if len(same) == world_size else _ranks(same)
    others = f"; {len(failed) - len(same)} other ranks fail for other reasons" if len(failed) > len(same) else ""
    return f"{text} ({who}{others})"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {some([str(rank) for rank in ranks], _NAMED)}"
