"""Tiered all-gather and reduce-scatter over torch.distributed, and their wire log."""

from hzero.collectives.bucket import Bucket, in_buckets
from hzero.collectives.canary import Canary
from hzero.collectives.feedback import ErrorFeedback
from hzero.collectives.pipeline import Chain, Pipeline, Streams, shared_pipeline
from hzero.collectives.tiered import TieredCollectives
from hzero.collectives.trace import Trace
from hzero.collectives.transport import HopError, Transport
from hzero.collectives.wirelog import WireEntry, WireLog

__all__ = [
    "Bucket",
    "Canary",
    "Chain",
    "ErrorFeedback",
    "HopError",
    "Pipeline",
    "Streams",
    "TieredCollectives",
    "Trace",
    "Transport",
    "WireEntry",
    "WireLog",
    "in_buckets",
    "shared_pipeline",
]
