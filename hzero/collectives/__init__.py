"""Tiered all-gather and reduce-scatter over torch.distributed, and their wire log."""

from hzero.collectives.bucket import Bucket, in_buckets
from hzero.collectives.canary import Canary
from hzero.collectives.errors import HopError
from hzero.collectives.feedback import ErrorFeedback
from hzero.collectives.pipeline import Chain, Pipeline, Streams, shared_pipeline
from hzero.collectives.recorder import Recorder, blaming, shared_recorder
from hzero.collectives.tiered import TieredCollectives
from hzero.collectives.trace import Trace
from hzero.collectives.transport import Transport
from hzero.collectives.wirelog import WireEntry, WireLog

__all__ = [
    "Bucket",
    "Canary",
    "Chain",
    "ErrorFeedback",
    "HopError",
    "Pipeline",
    "Recorder",
    "Streams",
    "TieredCollectives",
    "Trace",
    "Transport",
    "WireEntry",
    "WireLog",
    "blaming",
    "in_buckets",
    "shared_pipeline",
    "shared_recorder",
]
