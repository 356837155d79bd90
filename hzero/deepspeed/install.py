"""Installs the stage into DeepSpeed, and defines the functions that users call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.runtime.superoffload.superoffload_stage3  # subclasses a class that `_make_optimizer` replaces
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import engine as ds_engine
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import nvtx, set_z3_leaf_module

from hzero.block import KEY
from hzero.calls import attributes
from hzero.deepspeed import autotp
from hzero.deepspeed.refusals import check_engine, check_mpu
from hzero.deepspeed.stage import HZeroOffload, HZeroStage3
from hzero.deepspeed.stage_state import gather_exactly, order_request, partition, release_all, step_stock
from hzero.deepspeed.versions import check_deepspeed
from hzero.errors import ConfigError, from_rank_0, on_all_ranks
from hzero.sequence import attach
from hzero.topology import resolve_grid


@functools.cache
def enable() -> None:
    """Installs the stage into DeepSpeed.

    You need not call it. `hzero.autoload` does so when DeepSpeed reads a configuration with an ``"hzero"`` block, in
    ``zero_optimization`` or at the top level. Such a configuration then creates an engine with the stage that `initialize`
    describes. A configuration without the block creates the stock engine. Existing engines do not change.

    The call replaces the methods of `_REPLACED` in DeepSpeed. It starts no collective, reads no configuration and allocates
    no memory. It works before ``torch.distributed`` is initialised, and on models that were made earlier under
    ``deepspeed.zero.Init``. Further calls have no effect. It cannot be undone in the process.

    Raises:
        ConfigError: The stage does not support this version of DeepSpeed.
    """
    check_deepspeed()
    DeepSpeedConfig.hzero_block = None  # `hzero.autoload` sets it for a configuration with a block
    for owner, name, function in _REPLACED:
        _replace(owner, name, function)
    if get_accelerator().device_name() == "cpu":
        nvtx.enable_nvtx = False  # DeepSpeed opens ranges for every module, without use on CPU


def _replace(owner: type, name: str, function: Callable[..., Any]) -> None:
    """Replaces a method by ``function(stock, *arguments)``."""
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(stock, *args, **kwargs)

    setattr(owner, name, method)


@on_all_ranks()
def _check(stock: Any, engine: DeepSpeedEngine) -> None:
    """``DeepSpeedEngine._do_sanity_check``, which an engine calls first. Refuses engines that the stage does not support.

    An engine of pipeline stages with the block becomes an `HZeroPipelineEngine` here.
    """
    if (config := engine._config.hzero_block) is not None:
        check_engine(engine)
        pipeline, world = isinstance(engine, PipelineEngine), resolve_grid(config.topology, dist.get_world_size())
        if not pipeline and engine.autotp_size() > 1:
            autotp.check(engine._config, config, world)
        else:
            check_mpu(engine.mpu, world)
        if pipeline:
            from hzero.deepspeed.pipeline import HZeroPipelineEngine

            engine.__class__ = HZeroPipelineEngine
    stock(engine)


def _make_optimizer(stock: Any, engine: DeepSpeedEngine, optimizer: Any) -> Any:
    """``DeepSpeedEngine._configure_zero_optimizer``. With the block, makes an `HZeroStage3` and an `HZeroOffload`.

    With or without the block, it first detaches the parameters from an earlier engine that was not destroyed.
    """
    release_all(engine.module)
    if (config := engine._config.hzero_block) is None:
        return stock(engine, optimizer)
    if config.sequence is not None:
        with on_all_ranks():
            attach(engine.module, config, set_z3_leaf_module)
        engine.dp_world_size //= config.sequence.parallel  # the ranks of a sequence count once in the batch size
    offload = functools.partial(HZeroOffload, config, engine)
    with attributes(
        (stage3, "DeepSpeedZeroOptimizer_Stage3", HZeroStage3),  # the method imports it
        (stage3, "DeepSpeedZeRoOffload", offload),
        (ds_engine, "DeepSpeedZeRoOffload", offload),
    ):
        return stock(engine, optimizer)


def _make_loader(stock: Any, engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
    """``DeepSpeedEngine.deepspeed_io``. Gives the ranks of a sequence group the same samples."""
    if (config := engine._config.hzero_block) is None or config.sequence is None:
        return stock(engine, *args, **kwargs)
    places = {"dp_world_size": dist.get_world_size(), "global_rank": dist.get_rank()}
    with attributes(*((engine, key, place // config.sequence.parallel) for key, place in places.items())):
        return stock(engine, *args, **kwargs)


def _zero_grad(stock: Any, engine: DeepSpeedEngine) -> None:
    """``DeepSpeedEngine.zero_grad``. Also drops a window that an exception has ended, which stock keeps in its buckets."""
    stock(engine)
    if isinstance(engine.optimizer, HZeroStage3) and engine.optimizer.cut_short:
        engine.optimizer.zero_grad()


def _make_checkpoint_engine(stock: Any, engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> None:
    """``DeepSpeedEngine._configure_checkpointing``. With the key ``checkpoint``, `CheckpointFiles` writes and reads."""
    stock(engine, *args, **kwargs)
    if (config := engine._config.hzero_block) is not None and config.checkpoint is not None:
        from hzero.deepspeed.checkpoint import CheckpointFiles

        with on_all_ranks():
            files = CheckpointFiles(engine, config.checkpoint)
        engine.checkpoint_engine, engine.save_checkpoint = files, files.save_checkpoint
        if not engine.load_universal_checkpoint():
            engine.load_checkpoint = files.load_checkpoint


@on_all_ranks()
def _load(stock: Any, engine: DeepSpeedEngine, load_dir: Any, tag: Any, **how: Any) -> Any:
    """``DeepSpeedEngine._load_checkpoint``. Without the key ``checkpoint``, refuses a checkpoint of other ranks or parameters."""
    config = engine._config.hzero_block
    resumes = how["load_optimizer_states"] and not how["load_module_only"]
    if resumes and config is not None and config.checkpoint is None and isinstance(engine.optimizer, HZeroStage3):
        written = len(list(Path(load_dir, tag).glob("*zero_pp_rank_*_mp_rank_00_optim_states.pt")))
        ranks = dist.get_world_size(engine.optimizer.dp_process_group)
        if written not in (0, ranks):
            raise ConfigError(
                f"{KEY}.checkpoint: found no such key and {str(Path(load_dir, tag))!r} of {written} ranks; "
                f"expected a checkpoint of {ranks} ranks, or the key (an empty block will do)"
            )
        if written and how["load_module_strict"] and not engine.load_universal_checkpoint():
            from hzero.deepspeed.resharding import Resharding, Sharding
            from hzero.deepspeed.safe_loading import load

            sharding = Sharding.of(ranks, engine._get_zero_param_shapes())
            read = functools.partial(load, map_location="cpu", trust=True)
            from_rank_0(lambda: bool(Resharding(Path(load_dir, tag), sharding, 0, (), read)))  # compares parameters
    return stock(engine, load_dir, tag, **how)


#: DeepSpeed's replaced methods and their replacements. The last four also handle parameters of other engines, since one list
#: may have parameters of several engines, and a step may change parameters of another engine.
_REPLACED: tuple[tuple[type, str, Callable[..., Any]], ...] = (
    (DeepSpeedEngine, "_do_sanity_check", _check),
    (DeepSpeedEngine, "_configure_zero_optimizer", _make_optimizer),
    (DeepSpeedEngine, "deepspeed_io", _make_loader),
    (DeepSpeedEngine, "zero_grad", _zero_grad),
    (DeepSpeedEngine, "_configure_checkpointing", _make_checkpoint_engine),
    (DeepSpeedEngine, "_load_checkpoint", _load),
    (PartitionedParameterCoordinator, "_PartitionedParameterCoordinator__all_gather_params_", order_request),
    (Init, "_all_gather", gather_exactly),
    (Init, "_partition", partition),
    (stage3.DeepSpeedZeroOptimizer_Stage3, "_reassign_or_swap_out_partitioned_parameters", step_stock),
)


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Calls ``deepspeed.initialize`` with the stage installed, with the same arguments and the same four results.

    The stage is ZeRO-3 with a shard degree for each kind of state. DeepSpeed partitions every parameter, its gradient and its
    optimizer states over the world. It keeps these primary shards, so the optimizer step, gradient norm, clipping, loss
    scaling and checkpoints are stock. If the ``"hzero"`` block shards the weights over the package or the node, each rank also
    keeps a secondary partition. This is its share of a second, encoded copy of the weights, which is complete inside that scope.
    Collectives cross one tier of links at a time (``intra_package``, ``intra_node``, ``inter_node``), each with its codec from
    the block.

    Forward and backward gather the weights of a module when they reach it, as in ZeRO-3. They gather from the secondary
    partitions, so only over the tiers inside the weights' scope. All ranks decode the same bytes and compute with the same bits.
    Gradients are reduced in the same buckets as in stock ZeRO-3, but only over the tiers inside the gradients' scope. Float32
    gradient accumulation buffers add up the partial sums. At the gradient accumulation boundary, the last micro-batch before an
    optimizer step, the sums cross the outer tiers once. This overlaps with backward. The stock optimizer then gets each rank's
    shard. After the step, the secondary partitions are rebuilt, which crosses the outer tiers once. The next forward waits for
    them module by module. With weights over the package and gradients over the node, links between nodes thus transfer each
    weight and each gradient once per optimizer step, for any number of micro-batches.

    The stage needs more memory than ZeRO-3. Per rank and parameter, a secondary partition needs the codec's bytes (2 in bf16,
    about 1 in ``int8``) divided by the ranks of the weights' scope. The gradient accumulation buffers need 4 bytes divided by
    the ranks of the gradients' scope. Error feedback adds bfloat16 residuals. `hzero plan` computes the bytes before a run, and
    ``hzero.state(engine).memory(engine.optimizer)`` measures them.

    With codec ``none`` on all tiers, the losses equal ZeRO-3's up to the order of float sums. ``int8`` and ``int4`` change them.
    Until the boundary a gradient is a partial sum inside its scope, and reading it raises an error. The stage does not shard
    activations. It supports AutoTP, and tensor parallelism with an ``mpu`` whose tensor groups are inside nodes. It then shards
    over the data-parallel ranks. With AutoEP, it shards experts over the ranks that have the same experts, and all other
    parameters over the world. DeepSpeed features that it does not support raise `ConfigError`. A configuration
    without the block creates a stock engine.

    DeepSpeed supports at most ZeRO-1 for a ``PipelineModule``, so the block then requires stage 1. Activations between pipeline
    stages, sums of gradients and updated weights cross tier by tier with codecs (`HZeroStage1`).

    Args:
        *args: As for ``deepspeed.initialize``.
        **kwargs: As for ``deepspeed.initialize``.

    Returns:
        Engine, optimizer, data loader and learning-rate scheduler, as DeepSpeed returns them.

    Raises:
        ConfigError: The block is wrong or does not fit the world, or the stage does not support a DeepSpeed feature. This
            happens before training.
    """
    enable()
    return deepspeed.initialize(*args, **kwargs)


def state(engine: Any) -> Any:
    """Returns the plan, wire log and configuration of an engine.

    Returns:
        A `StageState`, or a `PipelineState` for an engine with pipeline stages. None for an engine without the block.
    """
    return getattr(getattr(engine, "optimizer", None), "hzero", None)


@contextlib.contextmanager
def exact_weights(engine: Any) -> Iterator[None]:
    """Context in which forward and backward of ``engine`` read exact weights instead of decoded ones.

    Gathers are then DeepSpeed's flat gathers over the world. Use it for evaluation, not for training. A stock engine is always
    exact. All ranks must enter and exit together, outside of a forward or backward. With pipeline stages the weights are sent
    once more without codecs, and a second copy needs memory until the context ends.
    """
    if (found := state(engine)) is None:
        yield
        return
    with engine.optimizer.exact() if isinstance(engine, PipelineEngine) else found.exact():
        yield
