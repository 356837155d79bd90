"""The verdict: the worst of all findings."""

from __future__ import annotations

GOOD, DEGRADED, UNUSABLE = range(3)
#: Names of the verdicts; the exit status of ``hzero doctor`` is the place in this tuple.
STATES = ("good", "degraded", "unusable")


class Findings:
    """Collects findings.

    Attributes:
        status: Place of the verdict in `STATES`.
        remarks: One line each, in the order in which they were found.
    """

    def __init__(self) -> None:
        self.status = GOOD
        self.remarks: list[str] = []

    def add(self, status: int, *remarks: str) -> None:
        """Adds findings; the verdict is the worst of all."""
        self.status = max(self.status, status if remarks else GOOD)
        self.remarks += remarks

    @property
    def verdict(self) -> str:
        """One of `STATES`."""
        return STATES[self.status]
