"""Reasons: why a rank ends, and the pipes through which it tells its parent, since the disk may be what is full."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections import deque
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from hzero.files import FULL
from hzero.validation import ConfigError, PeerError, PlainError

#: Environment variable of a rank: the number of the descriptor to which it writes why it ends.
REASONS = "HZERO_REASONS"
#: Longest text of a reason, in characters. As JSON it fits into a pipe, so writing it never waits for the parent.
_REASON_LENGTH = 10_000
#: Lines of a rank's output that the parent keeps.
_LINES = 15


class Reason(NamedTuple):
    """Why a rank ends, as it tells its parent.

    Attributes:
        kind: It refused its input, failed, or waited for other ranks in vain.
        text: For the user.
        time: Seconds of this machine's monotonic clock.
        blames: The ranks that it waited for.
    """

    kind: Literal["refused", "failed", "waited"]
    text: str
    time: float
    blames: list[int]

    @classmethod
    def of(cls, error: BaseException) -> Reason:
        """The reason for an error that is being handled."""
        text, blames = str(error), [*error.ranks] if isinstance(error, PeerError) else []
        if disk := disk_error(error):
            text = disk
        elif not isinstance(error, (ConfigError, PlainError)):
            text = traceback.format_exc()
        if len(text) > _REASON_LENGTH:
            text = f"{text[: _REASON_LENGTH // 2]}\n...\n{text[-_REASON_LENGTH // 2 :]}"
        waited = isinstance(error, PeerError) or getattr(error, "elsewhere", False)  # rank 0 says more
        kind: Literal["refused", "waited", "failed"] = "waited" if waited else "failed"
        return cls("refused" if isinstance(error, ConfigError) else kind, text, time.monotonic(), blames)


def disk_error(error: BaseException) -> str | None:
    """The line that says all of an error of a disk that takes no more, if the error names the file."""
    if isinstance(error, OSError) and error.errno in FULL and error.filename is not None:
        return f"{error.strerror}: {os.fspath(error.filename)}"
    return None


class RankPipes:
    """The two pipes from a rank, and what has come through them.

    Attributes:
        output: Write end of the pipe for its output; the parent closes it once the rank has it.
        reasons: The same for its reasons.
        lines: The last lines of its output.
        reason: Its first reason.
    """

    def __init__(self, logs: Path, rank: int) -> None:
        self._logs, self._rank = logs, rank
        self._from_output, self.output = os.pipe()
        self._from_reasons, self.reasons = os.pipe()
        for end in (self._from_output, self._from_reasons):
            os.set_blocking(end, False)
        self._log: BinaryIO | None = None
        with contextlib.suppress(OSError):
            self._log = open(logs / f"rank{rank}.log", "wb", buffering=0)  # noqa: SIM115 - open as long as the rank
        self.lines: deque[str] = deque(maxlen=_LINES)
        self._partial = self._said = b""
        self.reason: Reason | None = None

    @property
    def ends(self) -> tuple[int, int]:
        """The read ends."""
        return self._from_output, self._from_reasons

    def started(self) -> None:
        """The rank has the write ends."""
        os.close(self.output)
        os.close(self.reasons)

    def read(self) -> None:
        """Takes what has come, without waiting."""
        while chunk := _chunk(self._from_output):
            *whole, self._partial = (self._partial + chunk).split(b"\n")
            self.lines.extend(line.decode(errors="replace") for line in whole)
            self._partial = self._partial[-_REASON_LENGTH:]
            with contextlib.suppress(OSError):  # a full disk
                if self._log is not None:
                    self._log.write(chunk)
        while chunk := _chunk(self._from_reasons):
            self._said += chunk
            if self.reason is None and b"\n" in self._said:
                self.reason = Reason(*json.loads(self._said.split(b"\n")[0]))
                name = f"rank{self._rank}.{'refused' if self.reason.kind == 'refused' else 'traceback'}"
                with contextlib.suppress(OSError):
                    (self._logs / name).write_text(self.reason.text)

    def tail(self) -> list[str]:
        """The last lines of the output."""
        return [*self.lines, *([self._partial.decode(errors="replace")] if self._partial else [])][-_LINES:]

    def close(self) -> None:
        """Takes what is left."""
        self.read()
        for end in self.ends:
            os.close(end)
        if self._log is not None:
            self._log.close()


def _chunk(end: int) -> bytes:
    try:
        return os.read(end, 1 << 16)
    except BlockingIOError:
        return b""
