"""The stage inside DeepSpeed: installation, weights, gradients. With `hzero.train`, all that imports DeepSpeed."""

from hzero.zero.install import enable, exact_weights, initialize, state
from hzero.zero.state import StageState

__all__ = ["StageState", "enable", "exact_weights", "initialize", "state"]
