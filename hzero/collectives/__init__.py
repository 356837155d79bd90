"""Collectives tier by tier over torch.distributed, each tier with its codec, and their wire log.

`Communicator` and `ddp_hook` are for programs without a stage; the rest is what the stage is made of.
"""

from hzero.collectives import activations
from hzero.collectives.bucket import Bucket, in_buckets
from hzero.collectives.canary import Canary
from hzero.collectives.communicator import Communicator
from hzero.collectives.ddp import DdpState, ddp_hook
from hzero.collectives.dimensions import for_dimension, in_use
from hzero.collectives.errors import HopError, blaming
from hzero.collectives.feedback import ErrorFeedback
from hzero.collectives.lanes import Chain, DeviceStreams, Lanes, host_steps, lasting, shared_lanes
from hzero.collectives.process_groups import limit_waits
from hzero.collectives.runtime import Collectives
from hzero.collectives.settings import CommunicatorConfig
from hzero.collectives.transport import Transport, most_failures
from hzero.collectives.watchdog import shared_watchdog
from hzero.collectives.wirelog import WireEntry, WireLog

__all__ = [
    "Bucket",
    "Canary",
    "Chain",
    "Collectives",
    "Communicator",
    "CommunicatorConfig",
    "DdpState",
    "DeviceStreams",
    "ErrorFeedback",
    "HopError",
    "Lanes",
    "Transport",
    "WireEntry",
    "WireLog",
    "activations",
    "blaming",
    "ddp_hook",
    "for_dimension",
    "host_steps",
    "in_buckets",
    "in_use",
    "lasting",
    "limit_waits",
    "most_failures",
    "shared_lanes",
    "shared_watchdog",
]
