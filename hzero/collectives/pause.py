"""Pauses between two looks at what does not announce its end."""

from __future__ import annotations

import os
import time

#: Looks at which the processor is only offered to others; then the first and the longest sleep, in seconds.
_YIELDS, _FIRST_S, _LONGEST_S = 10, 2e-5, 1e-3


class Pause:
    """The pauses of one wait.

    At first it yields the processor: a short message arrives within microseconds, and a sleep takes fifty at least. Then it
    sleeps, longer and longer: where ranks share cores, one that looks all the time takes them from those it waits for.
    """

    def __init__(self) -> None:
        self._looks = 0

    def __call__(self) -> None:
        """Lets some time pass."""
        self._looks += 1
        if self._looks <= _YIELDS:
            os.sched_yield()
        else:
            time.sleep(min(_FIRST_S * (self._looks - _YIELDS), _LONGEST_S))
