"""The stage inside DeepSpeed: installation, weights, gradients. Only this and the trainer import DeepSpeed."""

from hzero.zero.install import enable, exact_evaluation, exact_weights, initialize, state
from hzero.zero.state import StageState

__all__ = ["StageState", "enable", "exact_evaluation", "exact_weights", "initialize", "state"]
