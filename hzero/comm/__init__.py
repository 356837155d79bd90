"""Collectives tier by tier over torch.distributed, each tier with its codec, and their wire log.

`Communicator` and `ddp_hook` are for programs without a stage; the rest is what the stage is made of.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hzero.comm.communicator import Communicator, CommunicatorConfig, for_dimension, in_use
from hzero.comm.lanes import Chain, DeviceStreams, Lanes, lasting, shared_lanes
from hzero.comm.runtime import Bucket, Collectives, ErrorFeedback, in_buckets
from hzero.comm.transport import Transport, most_failures
from hzero.comm.watchdog import HopError, blaming, shared_watchdog
from hzero.comm.wirelog import WireEntry, WireLog
from hzero.comm.wires import limit_waits

if TYPE_CHECKING:
    from hzero.comm import activations
    from hzero.comm.ddp import DdpState, ddp_hook

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


def __getattr__(name: str) -> Any:
    if name == "activations":  # not of the stage
        return importlib.import_module("hzero.comm.activations")
    if name in ("DdpState", "ddp_hook"):
        return getattr(importlib.import_module("hzero.comm.ddp"), name)
    raise AttributeError(f"module 'hzero.comm' has no attribute {name!r}")
