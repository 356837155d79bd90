"""Long sequences: attention, hidden units and loss in chunks on the host, and groups of ranks that share a sequence."""

from hzero.sequence.batch import attach, detach

__all__ = ["attach", "detach"]
