"""Why a run stops before its last step: signals, and the end of its job."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Literal

#: What a batch system sends before a job's time is over.
TIME_SIGNAL = signal.SIGUSR1
#: Seconds that ending takes beyond the last save.
_END_S = 5.0

Reason = Literal["interrupted", "timed out"]


def ends_at(limit_s: float | None, began: float, environment: Mapping[str, str] = os.environ) -> float | None:
    """When this job ends, in seconds of the clock; None if nothing says so.

    Args:
        limit_s: ``train.time_limit`` in seconds.
        began: When the command was started.
        environment: May hold ``SLURM_JOB_END_TIME``, which Slurm sets for every start of a job, from 23.02 on.
    """
    given = environment.get("SLURM_JOB_END_TIME", "")
    ends = [float(given)] if given.isdecimal() and int(given) else []
    return min([*ends, *([began + limit_s] if limit_s is not None else [])], default=None)


class Stop:
    """Whether this rank has been asked to stop. The ranks agree on it at the end of every step.

    Attributes:
        asked: By SIGTERM or Ctrl-C.
        timed: By `TIME_SIGNAL`.
        ends_at: When the job ends, in seconds of the clock; None for never.
    """

    def __init__(self) -> None:
        self.asked = self.timed = False
        self.ends_at: float | None = None
        self._longest_s = self._first_s = 0.0

    def remember(self, number: int) -> None:
        """From now on this signal asks the run to stop after the step at hand. On the main thread."""
        signal.signal(number, self._take)

    def _take(self, number: int, frame: object) -> None:
        if number == TIME_SIGNAL:
            self.timed = True
        else:
            self.asked = True

    def stepped(self, seconds: float) -> None:
        """Takes the time of a step with all that came with it but the save; the first is slower than others."""
        if not self._first_s:
            self._first_s = seconds
        else:
            self._longest_s = max(self._longest_s, seconds)

    def margin_s(self, save_s: float) -> float:
        """Seconds before the end of the job in which no step may begin.

        They are enough for one more step and a save, half as long again as the longest so far.

        Args:
            save_s: The longest save so far, or an estimate.
        """
        return 1.5 * ((self._longest_s or self._first_s) + save_s) + _END_S

    def is_due(self, save_s: float) -> bool:
        """Whether the job ends too soon for another step."""
        return self.ends_at is not None and time.time() > self.ends_at - self.margin_s(save_s)
