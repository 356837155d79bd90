"""State that hzero keeps for one engine with pipeline stages."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Sequence
from typing import Any, Literal
from weakref import WeakSet

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import TiedLayerSpec
from deepspeed.runtime.utils import is_model_parallel_parameter

from hzero.block import KEY
from hzero.codecs import backends
from hzero.codecs.formats import LOSSLESS
from hzero.comm import Communicator, CommunicatorConfig, WireLog, for_dimension
from hzero.comm.process_groups import world_timeout
from hzero.config import HZeroConfig
from hzero.deepspeed.comms_logger import LoggedHops
from hzero.deepspeed.partition import Partition, ranks_of
from hzero.deepspeed.state import adopt, optimizer_bytes, stage_lanes, undeclared
from hzero.plan.shards import lossy_crossings
from hzero.validation import ConfigError, is_rank_0

logger = logging.getLogger("hzero")

#: Elements of a tensor from which on it is broadcast by itself; smaller ones go together, such as norms and biases.
_SMALL = 1 << 18


class PipelineState:
    """Communicators and wire log of an engine with pipeline stages.

    Attributes:
        config: The block.
        partition: The data-parallel ranks of this stage, over which ZeRO-1 partitions.
        wire_log: Bytes and time of every hop that has ended, those of `hzero.comm.for_dimension` too; see `settle`.
        logged_hops: What DeepSpeed's ``comms_logger`` gets of them, at the end of each step and in `settle`.
        gradients: Sums gradients over the data-parallel ranks.
        optimizer: Sends the weights that their owners have updated, over the same ranks.
        pipeline: Sends activations and their gradients; its ranks are those of one pipeline, by stage.

    Args:
        module: The ``PipelineModule``.
        mpu: Its grid (``PipelineParallelGrid``).
        config: The block.

    Raises:
        ConfigError: The groups do not fill the tiers of the topology evenly.
    """

    def __init__(self, module: torch.nn.Module, mpu: Any, config: HZeroConfig) -> None:
        self.config = config
        data, stages = mpu.get_data_parallel_group(), mpu.get_pipe_parallel_group()
        self.partition = Partition.of(data, config.topology)
        world = self.partition.world
        self._tensor = mpu.get_slice_parallel_group()
        settings = CommunicatorConfig(
            codecs=config.codecs.gradients,
            gather=config.codecs.gradients,
            error_feedback=config.error_feedback,
            **{key: getattr(config, key) for key in ("node_all_gather", "checksum", "transport")},
        )
        self.gradients = Communicator(
            settings, data, timeout=world_timeout(), role="gradients", grid=self.partition.grid, uses=["sums"]
        )
        self.optimizer = for_dimension("optimizer", config, data, grid=world, uses=["copies"])
        self.pipeline = for_dimension("pipeline", config, stages, grid=world, uses=["messages"])
        self.wire_log = WireLog()
        self.logged_hops = LoggedHops(self.wire_log)
        self._communicators = WeakSet(adopt(config, module, self.wire_log))  # as long as the model holds them
        for communicator in (self.gradients, self.optimizer, self.pipeline):
            communicator.wire_log = self.wire_log
            self._communicators.add(communicator)
        kept = set(config.error_feedback) & set(lossy_crossings(config.codecs.gradients, self.partition.grid))
        for tier in config.error_feedback:
            if tier not in kept:
                logger.info("hzero: error feedback on tier %s has nothing to keep: no codec loses anything there", tier)
        self._keeps = bool(kept)  # residuals
        self._pipeline = stage_lanes(config.transport, config.order)
        if is_rank_0():
            transport = "mpi" if config.transport == "mpi" else dist.get_backend()
            print(
                f"hzero: codecs of {config.preset} with ZeRO-1 on {world}{undeclared(config)}: pipelines of "
                f"{len(ranks_of(stages))} stages, data parallel over {len(ranks_of(data))} ranks ({self.partition.grid}); "
                f"transport {transport}; codecs {backends.choice('cpu' if self._pipeline.streams is None else 'cuda').name}",
                file=sys.stderr,
                flush=True,
            )

    def settle(self) -> None:
        """Waits for all hops under way, so that `wire_log` counts them and their checksums are compared. Collective."""
        self._pipeline.drain()
        self.verify()
        self.logged_hops.flush()

    def verify(self) -> None:
        """On a device: waits for all hops so far, those of dimensions too. Raises `HopError` for a checksum or a lost block."""
        for communicator in self._communicators:
            communicator.verify()

    def keep_alike(self, role: Literal["gradients", "optimizer"], tensors: Sequence[torch.Tensor]) -> None:
        """Gives parts of parameters that all ranks of a tensor group have whole the bits of its first rank. Collective.

        Blocks of a lossy codec hold elements of neighbours too, which differ between these ranks, and so round differently.

        Args:
            role: What the codec has been of.
            tensors: Contiguous, changed in place; as many and as large on all ranks of the group.
        """
        if (
            not tensors
            or dist.get_world_size(self._tensor) == 1
            or not lossy_crossings(self.config.codecs[role], self.partition.grid)
        ):
            return
        small = [tensor for tensor in tensors if tensor.numel() < _SMALL]
        flat = torch.cat([tensor.reshape(-1) for tensor in small]) if small else tensors[0].new_empty(0)
        for one in (flat, *(tensor for tensor in tensors if tensor.numel() >= _SMALL)):
            dist.broadcast(one, ranks_of(self._tensor)[0], group=self._tensor)
        for tensor, found in zip(small, flat.split([tensor.numel() for tensor in small]), strict=True):
            tensor.copy_(found.view_as(tensor))

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

    @property
    def lossy(self) -> bool:
        """Whether the weights that forward reads have lost something on their way."""
        return bool(lossy_crossings(self.config.codecs.optimizer, self.partition.grid))

    def forget(self) -> None:
        """Drops what error feedback keeps, after a load: it belongs to the old weights, and a checkpoint of stages has none."""
        self.gradients.forget()
        if self._keeps and is_rank_0():
            logger.warning("hzero: residuals of error feedback start at zero: checkpoints of pipeline stages have none")


def check_module(module: Any, config: HZeroConfig) -> None:
    """Refuses lossy codecs that would drive copies of a weight apart, before an engine is built. Collective.

    Those of a weight that several stages keep: each would round it, or its sums, in other blocks. Their gradients are summed
    over the stages before the data-parallel ranks sum, so nothing would bring the copies together again. Those of weights that
    all ranks of a tensor group have whole are brought together (`PipelineState.keep_alike`); so what is split has to be known.

    Args:
        module: The ``PipelineModule``.
        config: The block.

    Raises:
        ConfigError: Names the codec and a parameter; the same on all ranks.
    """
    mpu = module.mpu()
    grid = Partition.of(mpu.get_data_parallel_group(), config.topology).grid
    roles: tuple[Literal["gradients", "optimizer"], ...] = ("gradients", "optimizer")
    lossy = [(role, tier) for role in roles for tier in lossy_crossings(config.codecs[role], grid)]
    if not lossy:
        return
    role, tier = lossy[0]
    found = f"{KEY}.codecs.{role}.{tier}: found {config.codecs[role][tier].codec!r} with"
    possible = f"possible: {', '.join(LOSSLESS)}, or"
    stages: dict[str, set[int]] = {}
    for number, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            stages.setdefault(spec.key, set()).add(module.stage_owner(number))
    shared = next((key for key, owners in stages.items() if len(owners) > 1), None)
    if shared is not None:
        raise ConfigError(
            f"{found} weights that are tied over stages ({shared}), whose copies it would drive apart; {possible} weights that "
            "are not tied"
        )
    if mpu.get_slice_parallel_world_size() == 1:
        return
    every: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, _unlike(module, mpu.get_slice_parallel_group()))
    if (name := next(filter(None, every), None)) is not None:
        raise ConfigError(
            f"{found} parameter {name}, which differs between the ranks of a tensor group and does not say that it is split; "
            f"{possible} tensor_model_parallel = True on parameters that are split, as Megatron-LM sets it, and equal parts"
        )


def _unlike(module: torch.nn.Module, group: Any) -> str | None:
    """The first parameter that a tensor group neither has in equal parts, as it says, nor as copies of the same bits."""
    own = {
        name: (tuple(param.shape), None if is_model_parallel_parameter(param) else _digest(param))
        for name, param in module.named_parameters()
    }
    every: list[dict[str, Any]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group=group)
    names = dict.fromkeys(name for each in every for name in each)
    return next((name for name in names if len({each.get(name) for each in every}) > 1), None)


def _digest(param: torch.Tensor) -> str:
    words = param.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha1(words.numpy().data, usedforsecurity=False).hexdigest()
