"""State that hzero keeps for one engine with pipeline stages."""

from __future__ import annotations

import itertools
import logging
import sys
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import TiedLayerSpec

from hzero.block import KEY
from hzero.codecs import backends
from hzero.collectives import Communicator, CommunicatorConfig, WireLog, for_dimension
from hzero.config import LOSSLESS, TIERS, Dimension, HZeroConfig, Role
from hzero.topology import Grid
from hzero.validation import ConfigError
from hzero.zero.partition import Partition, ranks_of, speaks
from hzero.zero.state import adopt, optimizer_bytes
from hzero.zero.streams import stage_pipeline

logger = logging.getLogger("hzero")


class PipelineState:
    """Communicators and wire log of an engine with pipeline stages.

    Attributes:
        config: The block.
        partition: The data-parallel ranks of this stage, over which ZeRO-1 partitions.
        wire_log: Bytes and time of every hop that has ended, those of `hzero.collectives.for_dimension` too; see `settle`.
        gradients: Sums gradients over the data-parallel ranks.
        optimizer: Sends the weights that their owners have updated, over the same ranks.
        pipeline: Sends activations and their gradients; its ranks are those of one pipeline, by stage.

    Args:
        module: The ``PipelineModule``.
        mpu: Its grid (``PipelineParallelGrid``).
        config: The block.

    Raises:
        ConfigError: The groups do not fill the tiers of the topology evenly, or codecs would drive tied weights apart.
    """

    def __init__(self, module: torch.nn.Module, mpu: Any, config: HZeroConfig) -> None:
        self.config = config
        data, stages = mpu.get_data_parallel_group(), mpu.get_pipe_parallel_group()
        self.partition = Partition.of(data, config.topology)
        world = self.partition.world
        _check_tied(module, config, self.partition.grid)
        settings = CommunicatorConfig(
            codecs=config.codecs.gradients,
            gather=config.codecs.gradients,
            error_feedback=config.error_feedback,
            **{key: getattr(config, key) for key in ("node_all_gather", "checksum", "transport")},
        )
        self.gradients = Communicator(settings, data, role="gradients", grid=self.partition.grid)
        self.optimizer = for_dimension("optimizer", config, data, grid=world)
        self.pipeline = for_dimension("pipeline", config, stages, grid=world)
        self.wire_log = WireLog()
        adopt(config, module, self.wire_log)
        for communicator in (self.gradients, self.optimizer, self.pipeline):
            communicator.wire_log = self.wire_log
        self._keeps = False  # residuals of error feedback
        for tier in config.error_feedback:
            if self.partition.grid.size(tier) == 1 or config.codecs.gradients[tier].codec in LOSSLESS:
                logger.info("hzero: error feedback on tier %s has nothing to keep: no codec loses anything there", tier)
            else:
                self._keeps = True
        self._pipeline = stage_pipeline(config.transport)
        if speaks():
            transport = "mpi" if config.transport == "mpi" else dist.get_backend()
            print(
                f"hzero: codecs of {config.preset} with ZeRO-1 on {world}: pipelines of {len(ranks_of(stages))} stages, data "
                f"parallel over {len(ranks_of(data))} ranks ({self.partition.grid}); transport {transport}; codecs "
                f"{backends.choice('cpu' if self._pipeline.streams is None else 'cuda').name}",
                file=sys.stderr,
                flush=True,
            )

    def settle(self) -> None:
        """Waits for all hops under way, so that `wire_log` counts them and their checksums are compared. Collective."""
        self._pipeline.drain()
        self.verify()

    def verify(self) -> None:
        """On a device: waits until the checksums of all hops so far are compared. Raises `HopError` for a difference."""
        for communicator in (self.gradients, self.optimizer, self.pipeline):
            communicator.verify()

    @property
    def waited_s(self) -> float:
        """Seconds in which this rank has waited for others' part of hops; see `StageState.waited_s`."""
        return self._pipeline.waited_s if self._pipeline.streams is None else self.wire_log.seconds()

    def memory(self, optimizer: Any) -> dict[str, int]:
        """Measured bytes of each state on this rank, without transient buffers, gradients and what error feedback keeps.

        Args:
            optimizer: The engine's `HZeroStage1`.
        """
        weights = sum(flat.nbytes for flat in optimizer.bit16_groups_flat)
        return {"weights": weights, "optimizer": optimizer_bytes(optimizer)}

    def forget(self) -> None:
        """Drops what error feedback keeps, after a load: it belongs to the old weights, and a checkpoint of stages has none."""
        self.gradients.forget()
        if self._keeps and speaks():
            logger.warning("hzero: residuals of error feedback start at zero: checkpoints of pipeline stages have none")

    def destroy(self) -> None:
        """Lets lanes be used again on which a message has failed."""
        self._pipeline.mend()


def _check_tied(module: Any, config: HZeroConfig, grid: Grid) -> None:
    """Refuses lossy codecs with weights that several stages keep: each would round them, or their sums, in other blocks.

    Their gradients are summed over the stages before the data-parallel ranks sum, so nothing would bring the copies together
    again.
    """
    stages: dict[str, set[int]] = {}
    for number, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            stages.setdefault(spec.key, set()).add(module.stage_owner(number))
    shared = next((key for key, owners in stages.items() if len(owners) > 1), None)
    roles: tuple[Role | Dimension, ...] = ("gradients", "optimizer")
    for role, tier in itertools.product(roles, TIERS if shared is not None else ()):
        codec = config.codecs[role][tier].codec
        if grid.size(tier) > 1 and codec not in LOSSLESS:
            raise ConfigError(
                f"{KEY}.codecs.{role}.{tier}: found {codec!r} with weights that are tied over stages ({shared}), whose copies it "
                f"would drive apart; possible: {', '.join(LOSSLESS)}, or weights that are not tied"
            )
