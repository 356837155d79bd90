"""The stage inside DeepSpeed: installation, weights and gradients. Of the commands, train, doctor and plan import DeepSpeed."""

# ruff: noqa: F401 - imported for others
from hzero.deepspeed.install import enable, exact_weights, initialize, state
from hzero.deepspeed.stage_state import StageState
from hzero.engine.guard import DivergenceError, StaleWeightsError
