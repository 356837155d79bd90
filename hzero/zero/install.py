"""Puts the stage into DeepSpeed, and the surface that users call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from hzero.sharding.memory import BUCKET_NUMEL
from hzero.sharding.plan import ShardPlan
from hzero.topology.resolve import resolve_grid
from hzero.zero.block import check_deepspeed, check_engine, read_block, sets_persistence_threshold
from hzero.zero.stage import HZeroStage3
from hzero.zero.state import StageState
from hzero.zero.weights import Weights


def enable() -> None:
    """Installs the stage for everything in this process that calls ``deepspeed.initialize`` from here on.

    A configuration with an ``"hzero"`` block beside ``"stage": 3`` gets the stage; any other behaves exactly as before.
    Calling it again does nothing. Call it before ``deepspeed.initialize`` (or Trainer, or Accelerate) builds an engine;
    models made earlier under ``deepspeed.zero.Init`` are taken over.

    Raises:
        ConfigError: This DeepSpeed is outside the versions the stage supports.
    """
    if stage3.DeepSpeedZeroOptimizer_Stage3 is HZeroStage3:
        return
    check_deepspeed()
    # SuperOffload subclasses the stock class, by the name that is about to be replaced.
    import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401

    DeepSpeedEngine._do_sanity_check = _checked(DeepSpeedEngine._do_sanity_check)
    DeepSpeedZeRoOffload.__init__ = _with_weights(DeepSpeedZeRoOffload.__init__)
    stage3.DeepSpeedZeroOptimizer_Stage3 = HZeroStage3  # engine._configure_zero_optimizer imports the name late


def _checked(stock: Any) -> Any:
    """``DeepSpeedEngine._do_sanity_check`` that also refuses what the stage cannot work with, before anything is built."""

    @functools.wraps(stock)
    def check(self: DeepSpeedEngine) -> None:
        config = read_block(self._config._param_dict)
        if config is not None:
            check_engine(self)
            grid = resolve_grid(config.topology, dist.get_world_size())
            ShardPlan.from_config(config, grid, dist.get_rank())
        stock(self)

    return check


def _with_weights(stock: Any) -> Any:
    """``DeepSpeedZeRoOffload.__init__`` that takes over the gathers of its module where the block is there.

    The optimizer stage makes one, and so does an engine without an optimizer.
    """

    @functools.wraps(stock)
    def init(self: DeepSpeedZeRoOffload, *args: Any, **kwargs: Any) -> None:
        ds_config = kwargs.get("ds_config", args[2] if len(args) > 2 else None)
        config = read_block(ds_config)
        Weights.release_all(kwargs["module"] if "module" in kwargs else args[0])
        if config is None:
            return stock(self, *args, **kwargs)
        if not sets_persistence_threshold(ds_config):
            # DeepSpeed's 1e5 elements would keep every matrix of a small model out of the codecs.
            kwargs["param_persistence_threshold"] = 0
        stock(self, *args, **kwargs)
        persistent = {param.ds_id for param in self.persistent_parameters}
        for param in self.module.parameters():
            param.ds_persist = param.ds_id in persistent  # zero.Init may have decided by the stock threshold
        # Zero turns prefetching off, and says nothing of refreshes.
        self.hzero = StageState(self.module, config, int(kwargs.get("prefetch_bucket_size") or BUCKET_NUMEL))
        # Without an optimizer the engine has only this object to tell of a checkpoint.
        self.checkpoint_event_prologue = self.partition_all_parameters
        self.checkpoint_event_epilogue = self.hzero.replaced
        self.destroy = functools.partial(_destroy, self.destroy, self.hzero)
        return None

    return init


def _destroy(stock: Any, own: StageState) -> None:
    stock()
    own.destroy()


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize`` with the stage installed: same arguments, same four results.

    The model's weights are gathered from a copy that is sharded inside the package or the node, gradients are summed
    inside the node and cross nodes once a step, and every hop has the codec that the ``"hzero"`` block names. A
    configuration without the block gives a stock engine.

    Returns:
        Engine, optimizer, data loader and learning-rate scheduler, as DeepSpeed returns them.

    Raises:
        ConfigError: The block is wrong, does not fit the world, or goes with a DeepSpeed feature that it cannot work
            with. Nothing has been built then.
    """
    enable()
    return deepspeed.initialize(*args, **kwargs)


def state(engine: Any) -> StageState | None:
    """What hzero keeps for an engine: plan, wire log, configuration. None for an engine without the block."""
    return getattr(getattr(engine, "optimizer", None), "hzero", None)


@contextlib.contextmanager
def exact_weights(engine: Any) -> Iterator[None]:
    """Inside, forward and backward of ``engine`` read exact weights instead of decoded ones.

    Gathers are then DeepSpeed's own, flat over the world: meant for evaluation, not for training. A stock engine is
    exact anyway. All ranks must enter and leave together, outside of a forward or backward.
    """
    own = state(engine)
    with own.weights.exact() if own is not None else contextlib.nullcontext():
        yield


__all__ = ["enable", "exact_weights", "initialize", "state"]
