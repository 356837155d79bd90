"""Errors of hops."""

from __future__ import annotations

from hzero.collectives.record import Lane
from hzero.collectives.recorder import shared_recorder
from hzero.validation import PeerError, PlainError


class HopError(PlainError):
    """A hop failed, or a message arrived changed, or with blocks that its codec could not hold.

    It names the collective, its payload, tier and ranks.
    """


class DisagreementError(RuntimeError):
    """A message of another size has come than this rank expects. Wires raise it, and whoever waits makes a `HopError` of it."""


class MissingPeerError(HopError, PeerError):
    """A hop failed or timed out since peers are gone or late. The message also says who did not come."""

    @classmethod
    def of(
        cls, what: str, error: Exception | None = None, lane: Lane | None = None, number: int = 0
    ) -> MissingPeerError:
        """The error of a collective that has failed.

        Args:
            what: The collective, how it ended, and a colon, before who is missing.
            error: What the library says of it.
            lane: As for `Recorder.missing`.
            number: As for `Recorder.missing`.
        """
        missing = shared_recorder().missing(lane, number)
        return cls(f"{what}{missing.text}" + (f" ({error})" if error is not None else ""), missing.ranks)
