"""Tiered all-gather and reduce-scatter over torch.distributed, and their wire log."""

from hzero.collectives.bucket import Bucket, in_buckets
from hzero.collectives.chain import Chain, pipelined
from hzero.collectives.feedback import ErrorFeedback
from hzero.collectives.tiered import TieredCollectives
from hzero.collectives.transport import HopError, Transport
from hzero.collectives.wirelog import WireEntry, WireLog

__all__ = [
    "Bucket",
    "Chain",
    "ErrorFeedback",
    "HopError",
    "TieredCollectives",
    "Transport",
    "WireEntry",
    "WireLog",
    "in_buckets",
    "pipelined",
]
