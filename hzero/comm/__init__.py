"""Collectives over the tiers of a machine on torch.distributed, each tier with its codec, and their wire log.

`Communicator` and `ddp_hook` are for programs without a stage. The stage is built from the other names.
"""

# ruff: noqa: F401 - imported for others
from hzero.comm import activations
from hzero.comm.communicator import Communicator, CommunicatorConfig, for_dimension, in_use
from hzero.comm.ddp import DdpState, ddp_hook
from hzero.comm.lanes import Chain, Lanes, StreamLanes, ThreadLanes, lasting, shared_lanes
from hzero.comm.peers import peers_of
from hzero.comm.runtime import Bucket, ErrorFeedback, Runtime, in_buckets
from hzero.comm.watchdog import HopError, blaming, shared_watchdog
from hzero.comm.wirelog import WireEntry, WireLog
from hzero.comm.wires import limit_waits
