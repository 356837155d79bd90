"""Errors of hops."""

from __future__ import annotations

from hzero.reasons import PeerError, PlainError


class HopError(PlainError):
    """A hop failed, or a message arrived changed, or with blocks that its codec could not hold.

    It names the collective, its payload, tier and ranks.
    """


class MissingPeerError(HopError, PeerError):
    """A hop failed or timed out since peers are gone or late. The message also says who did not come."""
