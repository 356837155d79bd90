"""Installs the stage into DeepSpeed; the functions that users call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import deepspeed
import deepspeed.runtime.superoffload.superoffload_stage3  # subclasses the class that `_with_stage` replaces for a moment
import torch.distributed as dist
from deepspeed.runtime import engine as ds_engine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.partition_parameters import Init

from hzero.block import KEY, find
from hzero.config import HZeroConfig, parse_config
from hzero.deepspeed import parameters
from hzero.deepspeed.pipeline import HZeroPipelineEngine, PipelineState
from hzero.deepspeed.refusals import check_config, check_mpu, group_of, partition_of_autotp, unsendable
from hzero.deepspeed.stage import HZeroOffload, HZeroStage3
from hzero.deepspeed.versions import check_deepspeed
from hzero.engine.engine import Partition
from hzero.plan.shards import ShardPlan
from hzero.topology import resolve_grid
from hzero.validation import ConfigError, on_all_ranks


@functools.cache
def enable() -> None:
    """Installs the stage into DeepSpeed.

    Nobody has to call it: `hzero.autoload` does, as soon as DeepSpeed reads a configuration with an ``"hzero"`` block,
    in ``zero_optimization`` or at the top level. From then on such a configuration gives an engine with the stage that
    `initialize` describes. A configuration without the block gives the stock engine, and existing engines stay as they
    are.

    The call replaces these in DeepSpeed: the engine of its pipelines (by a subclass), the method that makes an engine's
    optimizer (which makes `HZeroStage3` and `HZeroOffload` if the engine has the block), its gathers and partitions of lists of
    parameters (which may belong to several engines), the end of its steps (which may change parameters of another engine), its
    broadcast of a model (whose errors then name the parameter), its sanity check (to refuse unsupported features before
    anything is built), the engine's ``zero_grad`` (which also drops a window that an exception has cut short), and its choice
    of a writer of checkpoints (which obeys the block's key ``checkpoint``). It starts no collective, reads no configuration and
    allocates nothing; it also works before ``torch.distributed`` is initialised. Calling it again does nothing, and it cannot
    be undone in the process. Models made earlier under ``deepspeed.zero.Init`` are taken over.

    Raises:
        ConfigError: The stage does not support this version of DeepSpeed.
    """
    check_deepspeed()
    DeepSpeedEngine._do_sanity_check = _checked(DeepSpeedEngine._do_sanity_check)
    DeepSpeedEngine._configure_zero_optimizer = _with_stage(DeepSpeedEngine._configure_zero_optimizer)
    DeepSpeedEngine.zero_grad = _after_errors(DeepSpeedEngine.zero_grad)
    DeepSpeedEngine._broadcast_model = _naming(DeepSpeedEngine._broadcast_model)
    DeepSpeedEngine._configure_checkpointing = _with_checkpoints(DeepSpeedEngine._configure_checkpointing)
    Init._all_gather = parameters.gathers_exactly(Init._all_gather)
    Init._partition = parameters.notes_changes(Init._partition)
    stock, end = stage3.DeepSpeedZeroOptimizer_Stage3, "_reassign_or_swap_out_partitioned_parameters"
    setattr(stock, end, parameters.notes_steps(getattr(stock, end)))
    deepspeed.PipelineEngine = HZeroPipelineEngine  # as its `initialize` finds it


def _block_of(engine: DeepSpeedEngine) -> HZeroConfig | None:
    """The block of an engine, parsed once; None without one."""
    config = engine._config
    if not hasattr(config, "hzero_block"):  # stock's, or made before `hzero.autoload` watched DeepSpeed
        block = find(config._param_dict)
        config.hzero_block = None if block is None else parse_config(block)
    return config.hzero_block  # type: ignore[no-any-return]


def _checked(stock: Any) -> Any:
    """``DeepSpeedEngine._do_sanity_check`` that also refuses features the stage does not support, before anything is built."""

    @functools.wraps(stock)
    @on_all_ranks()
    def check(self: DeepSpeedEngine) -> None:
        config = _block_of(self)
        if config is not None:
            pipeline = isinstance(self, PipelineEngine)
            check_config(self._config, self.optimizer_name(), pipeline)
            if pipeline:
                check_mpu(self.mpu, config.topology)
                if not isinstance(self, HZeroPipelineEngine):  # such as DualPipeVEngine
                    raise ConfigError(
                        f"{KEY}: found the engine {type(self).__name__}, which {KEY} does not support; possible: a "
                        "PipelineModule with deepspeed.initialize"
                    )
                return stock(self)
            if (size := self.autotp_size()) > 1:
                world = resolve_grid(config.topology, dist.get_world_size())
                partition = partition_of_autotp(size, world, dist.get_rank())
                from hzero.deepspeed import autotp

                autotp.check(self._config, config, world)
            else:
                check_mpu(self.mpu, config.topology)
                partition = Partition.of(group_of(self.mpu), config.topology)
            plan = ShardPlan.from_config(config, partition.grid, partition.rank)
            self._hzero_offload = functools.partial(HZeroOffload, config, partition, plan)
        return stock(self)

    return check


def _with_stage(stock: Any) -> Any:
    """``DeepSpeedEngine._configure_zero_optimizer`` that makes a `HZeroStage3` and a `HZeroOffload` if the engine has the block.

    Whether it has or not, it releases the parameters from an earlier engine that was not destroyed.
    """

    @functools.wraps(stock)
    def configure(self: DeepSpeedEngine, optimizer: Any) -> Any:
        parameters.release_all(self.module)
        parameters.give_back(self.module)
        if _block_of(self) is None:
            return stock(self, optimizer)
        own = [(stage3, "DeepSpeedZeroOptimizer_Stage3", HZeroStage3)]  # the method imports it
        own += [(module, "DeepSpeedZeRoOffload", self._hzero_offload) for module in (stage3, ds_engine)]
        before = [(module, name, getattr(module, name)) for module, name, _ in own]
        try:
            for one in own:
                setattr(*one)
            return stock(self, optimizer)
        finally:
            for one in before:
                setattr(*one)

    return configure


def _after_errors(stock: Any) -> Any:
    """``DeepSpeedEngine.zero_grad`` that also drops a window which an exception has cut short; stock leaves it in its buckets."""

    @functools.wraps(stock)
    def zero_grad(self: DeepSpeedEngine) -> None:
        stock(self)
        if isinstance(self.optimizer, HZeroStage3) and self.optimizer.cut_short:
            self.optimizer.zero_grad()

    return zero_grad


def _naming(stock: Any) -> Any:
    """``DeepSpeedEngine._broadcast_model`` whose error names the parameter where the configuration has the block."""

    @functools.wraps(stock)
    @on_all_ranks()
    def broadcast(self: DeepSpeedEngine) -> None:
        try:
            stock(self)
        except Exception:
            if _block_of(self) is not None and (found := unsendable(self.module, None)) is not None:
                raise found from None
            raise

    return broadcast


def _with_checkpoints(stock: Any) -> Any:
    """``DeepSpeedEngine._configure_checkpointing`` that lets `CheckpointFiles` write and read if the block has the key."""

    @functools.wraps(stock)
    def configure(self: DeepSpeedEngine, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        config = _block_of(self)
        if config is not None and config.checkpoint is not None:
            from hzero.deepspeed.checkpoint import CheckpointFiles

            with on_all_ranks():
                files = CheckpointFiles(self, config.checkpoint)
            self.checkpoint_engine, self.save_checkpoint = files, files.save_checkpoint
            if not self.load_universal_checkpoint():
                self.load_checkpoint = files.load_checkpoint

    return configure


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize`` with the stage installed: same arguments, same four results.

    The stage is ZeRO-3 with a shard degree for each kind of state. DeepSpeed partitions every parameter, its gradient
    and its optimizer states over the world, and owns these primary shards: optimizer step, gradient norm, clipping, loss
    scaling and checkpoints are stock. Where the ``"hzero"`` block shards the weights over the package or the node, each
    rank also keeps a resident payload: its share of a second copy of the weights, encoded, complete inside that scope.
    Collectives cross one tier of links at a time (``gcd``, ``gpu``, ``node``), each with the codec that the block names.

    Forward and backward gather the weights of a module when they reach it, as ZeRO-3 does, but from the resident
    payloads, so over the tiers inside the weights' scope only. All ranks decode the same bytes and compute with the same
    bits. Gradients are reduced in the same buckets as in stock ZeRO-3, but over the tiers inside their own scope only;
    the partial sums are added up in float32 accumulators. At the boundary, the last micro-step before an optimizer
    step, the sums cross the outer tiers once, while backward goes on, and each rank's shard goes to the stock optimizer.
    Then the resident payloads are rebuilt, crossing the outer tiers once; the next forward waits, module by module, for
    what it needs. So with weights over the package and gradients over the node, links between nodes carry each weight
    and each gradient once per optimizer step, however many micro-steps it has.

    The price is memory. Per rank and parameter, a resident payload takes the codec's bytes (2 in bf16, about 1 in
    ``int8``) divided by the ranks of the weights' scope, and the accumulators take 4 bytes divided by the ranks of the
    gradients' scope, on top of ZeRO-3's memory. Error feedback adds bfloat16 residuals. `hzero plan` gives the bytes
    before a run, ``hzero.state(engine).memory(engine.optimizer)`` those of an engine.

    With codec ``none`` everywhere the losses are those of ZeRO-3 up to the order of float sums; ``int8`` and ``int4``
    change them. Until the boundary a gradient is a partial sum inside its scope, and reading it raises. The stage does
    not shard activations. It works beside tensor parallelism of a model's own, with an ``mpu`` whose tensor groups lie inside
    nodes, and beside AutoTP: then it shards over the data-parallel ranks. It refuses expert parallelism and, by name, the
    other DeepSpeed features that it does not support. A configuration without the block gives a stock engine.

    A model with pipeline stages, a ``PipelineModule``, has ZeRO-1 at most in DeepSpeed, and the block goes with stage 1 then:
    activations between stages, sums of gradients and updated weights cross tier by tier with codecs (`HZeroStage1`).

    Args:
        *args: As for ``deepspeed.initialize``.
        **kwargs: As for ``deepspeed.initialize``.

    Returns:
        Engine, optimizer, data loader and learning-rate scheduler, as DeepSpeed returns them.

    Raises:
        ConfigError: The block is wrong, does not fit the world, or meets a DeepSpeed feature that the stage does not
            support. Nothing has been built then.
    """
    enable()
    return deepspeed.initialize(*args, **kwargs)


def state(engine: Any) -> Any:
    """The plan, wire log and configuration of an engine.

    Returns:
        A `StageState`; of an engine with pipeline stages a `PipelineState`; None for an engine without the block.
    """
    return getattr(getattr(engine, "optimizer", None), "hzero", None)


@contextlib.contextmanager
def exact_weights(engine: Any) -> Iterator[None]:
    """Inside, forward and backward of ``engine`` read exact weights instead of decoded ones.

    Gathers are then DeepSpeed's own, flat over the world: meant for evaluation, not for training. A stock engine is
    always exact. All ranks must enter and leave together, outside of a forward or backward. With pipeline stages the weights
    are sent once more, uncoded, and a second copy of them takes memory meanwhile.
    """
    own = state(engine)
    if isinstance(own, PipelineState):
        exact = engine.optimizer.exact() if own.lossy else contextlib.nullcontext()
    else:
        exact = own.parameters.exact() if own is not None else contextlib.nullcontext()
    with exact:
        yield


__all__ = ["enable", "exact_weights", "initialize", "state"]
