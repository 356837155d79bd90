"""Errors of hops."""

from __future__ import annotations

from hzero.reasons import PeerError, PlainError


class HopError(PlainError):
    """A hop failed, or a message arrived changed, or with blocks that its codec could not hold.

    It names the collective, its payload, tier and ranks.
    """


class DisagreementError(RuntimeError):
    """A message of another size has come than this rank expects. Wires raise it, and whoever waits makes a `HopError` of it."""


class MissingPeerError(HopError, PeerError):
    """A hop failed or timed out since peers are gone or late. The message also says who did not come."""
