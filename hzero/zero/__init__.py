"""The stage inside DeepSpeed: installation, weights, gradients. Only this and the trainer import DeepSpeed."""

from hzero.zero.audit import StaleWeightsError
from hzero.zero.guard import DivergenceError
from hzero.zero.install import enable, exact_evaluation, exact_weights, initialize, state
from hzero.zero.pipeline_state import PipelineState
from hzero.zero.state import StageState

__all__ = [
    "DivergenceError",
    "PipelineState",
    "StageState",
    "StaleWeightsError",
    "enable",
    "exact_evaluation",
    "exact_weights",
    "initialize",
    "state",
]
