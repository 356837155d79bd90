"""Collectives tier by tier over torch.distributed, each tier with its codec, and their wire log.

`Communicator` and `ddp_hook` are for programs without a stage; the rest is what the stage is made of.
"""

from hzero.comm import activations
from hzero.comm.bucket import Bucket, in_buckets
from hzero.comm.communicator import Communicator
from hzero.comm.ddp import DdpState, ddp_hook
from hzero.comm.dimensions import for_dimension, in_use
from hzero.comm.errors import HopError, blaming
from hzero.comm.feedback import ErrorFeedback
from hzero.comm.lanes import Chain, Lanes, lasting, shared_lanes
from hzero.comm.process_groups import limit_waits
from hzero.comm.runtime import Collectives
from hzero.comm.settings import CommunicatorConfig
from hzero.comm.streams import DeviceStreams
from hzero.comm.transport import Transport, most_failures
from hzero.comm.watchdog import shared_watchdog
from hzero.comm.wirelog import WireEntry, WireLog

__all__ = [
    "Bucket",
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
    "in_buckets",
    "in_use",
    "lasting",
    "limit_waits",
    "most_failures",
    "shared_lanes",
    "shared_watchdog",
]
