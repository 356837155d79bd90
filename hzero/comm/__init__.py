"""Collectives tier by tier over torch.distributed, each tier with its codec, and their wire log.

`Communicator` and `ddp_hook` are for programs without a stage; the rest is what the stage is made of.
"""

# ruff: noqa: F401 - imported for others
import importlib
from typing import TYPE_CHECKING, Any

from hzero.comm.communicator import Communicator, CommunicatorConfig, for_dimension, in_use
from hzero.comm.lanes import Chain, DeviceStreams, Lanes, lasting, shared_lanes
from hzero.comm.memory import ErrorFeedback
from hzero.comm.peers import HopError, blaming, peers_of
from hzero.comm.runtime import Bucket, Collectives, in_buckets
from hzero.comm.watchdog import shared_watchdog
from hzero.comm.wirelog import WireEntry, WireLog
from hzero.comm.wires import limit_waits

if TYPE_CHECKING:
    from hzero.comm import activations
    from hzero.comm.ddp import DdpState, ddp_hook

#: Modules that load when they are used: the stage does without.
_LATER = {"activations": "activations", "DdpState": "ddp", "ddp_hook": "ddp"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'hzero.comm' has no attribute {name!r}")
    module = importlib.import_module(f"hzero.comm.{_LATER[name]}")
    return module if name == _LATER[name] else getattr(module, name)
