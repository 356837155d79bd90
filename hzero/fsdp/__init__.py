"""hzero with PyTorch's FSDP2. Call `apply` after ``fully_shard``, or pass a `Callback` to Trainer. `Muon` is an optimizer."""

from hzero.fsdp.callback import Callback
from hzero.fsdp.muon import Muon
from hzero.fsdp.state import FsdpState, apply

__all__ = ["Callback", "FsdpState", "Muon", "apply"]
