"""hzero under PyTorch's FSDP2: call `apply` after ``fully_shard``."""

from hzero.fsdp.state import FsdpState, apply

__all__ = ["FsdpState", "apply"]
