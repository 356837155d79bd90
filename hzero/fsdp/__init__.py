"""hzero under PyTorch's FSDP2: call `apply` after ``fully_shard``, or give Trainer a `Callback`."""

from hzero.fsdp.callback import Callback
from hzero.fsdp.state import FsdpState, apply

__all__ = ["Callback", "FsdpState", "apply"]
