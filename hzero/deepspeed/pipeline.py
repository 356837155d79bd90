"""Pipeline stages: messages between stages and ZeRO-1 over the data-parallel ranks, tier by tier with codecs."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.runtime.constants import BFLOAT16
from deepspeed.runtime.pipe import p2p, schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import TiedLayerSpec
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from hzero.block import KEY
from hzero.codecs.formats import LOSSLESS
from hzero.comm import Chain, Communicator, CommunicatorConfig, blaming, for_dimension
from hzero.comm.wires import world_timeout
from hzero.config import HZeroConfig
from hzero.deepspeed.stage_state import LoggedHops, async_accelerator, current_device, optimizer_bytes
from hzero.deepspeed.versions import with_names
from hzero.engine.engine import Owners, Traffic, ranks_of, undeclared
from hzero.errors import ConfigError, first_of_ranks, is_rank_0, of_every_rank, on_all_ranks
from hzero.program.shards import lossy_crossings
from hzero.sequence.host import one_ahead
from hzero.topology import Grid

logger = logging.getLogger("hzero")

#: Maximum bytes of small tensors in one broadcast, such as norms and biases.
_COALESCED_BYTES = 1 << 20


class PipelineState(Traffic):
    """Communicators and wire log of an engine with pipeline stages.

    Attributes:
        owners: The data-parallel ranks of this pipeline stage, over which ZeRO-1 partitions.
        gradients: Averages gradients over the data-parallel ranks.
        optimizer: Sends updated weights from their owners to the other data-parallel ranks.
        pipeline: Sends activations and their gradients. Its ranks are the ranks of one pipeline, numbered by pipeline stage.

    Args:
        module: The ``PipelineModule``.
        mpu: Its grid (``PipelineParallelGrid``).
        config: The block.

    Raises:
        ConfigError: The groups do not fill the tiers of the topology evenly, or `check_module` refuses the model.
    """

    def __init__(self, module: torch.nn.Module, mpu: Any, config: HZeroConfig) -> None:
        data, stages = mpu.get_data_parallel_group(), mpu.get_pipe_parallel_group()
        self.owners = Owners.of(data, config.topology)
        check_module(module, mpu, config, self.owners.grid)
        world = self.owners.world
        self._tensor = mpu.get_slice_parallel_group()
        settings = CommunicatorConfig(
            codecs=config.codecs.gradients,
            gather=config.codecs.gradients,
            error_feedback=config.error_feedback,
            **{key: getattr(config, key) for key in ("node_all_gather", "checksum", "transport")},
        )
        self.gradients = Communicator(
            settings, data, timeout=world_timeout(), role="gradients", grid=self.owners.grid, uses=["sums"]
        )
        self.optimizer = for_dimension("optimizer", config, data, grid=world, uses=["copies"])
        self.pipeline = for_dimension("pipeline", config, stages, grid=world, uses=["messages"])
        made = (self.gradients, self.optimizer, self.pipeline)
        super().__init__(config, module, current_device(), async_accelerator(), made)
        self.logged_hops = LoggedHops(self)
        if is_rank_0() and (clusters := self.owners.grid.clusters) > 1:
            logger.warning(
                "hzero: the ranks of a pipeline stage are on %d clusters, so gradients cross the links between clusters; "
                "with %d stages or a multiple, and ranks numbered cluster by cluster, only activations cross them",
                clusters,
                world.clusters,
            )
        if is_rank_0():
            self.announce(
                f"codecs of {config.preset} with ZeRO-1 on {world}{undeclared(config, self.device)}: pipelines of "
                f"{len(ranks_of(stages))} stages, data parallel over {len(ranks_of(data))} ranks ({self.owners.grid})"
            )

    def keep_alike(self, role: Literal["gradients", "optimizer"], tensors: Sequence[torch.Tensor]) -> None:
        """Broadcasts copies of parameters from the first rank of a tensor group, so that all have the same bits. Collective.

        Blocks of a lossy codec may also contain elements of split parameters, which differ between these ranks. The copies are
        then rounded differently.

        Args:
            role: The role of the codec.
            tensors: Contiguous parts of the parameters, changed in place. Number and sizes are the same on all ranks of the
                group.
        """
        lossy = lossy_crossings(self.config.codecs[role], self.owners.grid)
        if tensors and lossy and dist.get_world_size(self._tensor) > 1:
            dist._broadcast_coalesced(self._tensor, list(tensors), _COALESCED_BYTES, 0)  # as DDP broadcasts its buffers

    def memory(self, optimizer: Any) -> dict[str, int]:
        """Measures the bytes of each state on this rank, without transient buffers, gradients and error feedback.

        Args:
            optimizer: The engine's `HZeroStage1`.
        """
        weights = sum(flat.nbytes for flat in optimizer.bit16_groups_flat)
        return {"weights": weights, "optimizer": optimizer_bytes(optimizer)}


# ---- messages between stages ------------------------------------------------------------------------------------------

#: Dtypes that codecs encode. DeepSpeed sends masks as float16, which must stay exact; training in float16 is refused.
CODED = (torch.float32, torch.bfloat16)
#: Maximum number of sent messages in flight. Beyond it a rank waits until the oldest has been received.
_AHEAD = 4


class StageMessages:
    """Sends tensors to a neighbouring pipeline stage and receives them, in the order of DeepSpeed's schedule.

    Tensors of float32 and bfloat16 use the codec of the tier between the two ranks. Other tensors, such as masks, are sent as in
    stock. Unlike stock's, a send does not wait for its receiver, so it cannot add a wait to the schedule. It is a context
    manager, which is entered for each step.

    Args:
        communicator: The communicator of one pipeline, whose ranks are numbered by pipeline stage.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._sent: deque[Chain[None]] = deque()

    def __enter__(self) -> None:
        """Begins a step."""

    def __exit__(self, kind: Any, *_: Any) -> None:
        """Waits until all messages of this rank have been received. After an error they are dropped instead."""
        while self._sent and kind is None:
            self._sent.popleft().wait()
        self._sent.clear()

    def send(self, tensor: torch.Tensor, dest_stage: int) -> Any:
        """Sends a tensor of any shape and dtype to a pipeline stage. You may change it afterwards."""
        if tensor.dtype not in CODED:
            return p2p.send(tensor, dest_stage)
        chain = self._communicator.send(tensor, dest_stage, async_op=True)
        chain.wait_read()
        self._sent.append(chain)
        if len(self._sent) > _AHEAD:
            self._sent.popleft().wait()
        return None

    def recv(self, tensor: torch.Tensor, src_stage: int) -> Any:
        """Receives a tensor from a pipeline stage into ``tensor``, which has the shape and dtype of the sent tensor."""
        if tensor.dtype not in CODED:
            return p2p.recv(tensor, src_stage)
        return tensor.copy_(self._communicator.recv(tensor, src_stage))


# ---- the optimizer ----------------------------------------------------------------------------------------------------


class HZeroStage1(DeepSpeedZeroOptimizer):
    """Stock ZeRO-1 with other collectives for gradients and updated weights.

    Stock all-reduces gradients, and each rank then reads its partition. Here a bucket has the same columns of all partitions,
    ``[data-parallel ranks, columns]``. Its reduce-scatter gives each rank its partition only. This sends half of the bytes, and
    values are rounded once instead of twice. Sums are float32 in the order of ranks, tier by tier.

    Attributes:
        hzero: Communicators and wire log.
    """

    hzero: PipelineState
    ready_for_gradients: bool

    def setup_buckets(self) -> None:
        """Begins a backward as stock does, without stock's buffer. Buckets are filled when gradients are complete."""
        if not self.ready_for_gradients:
            self.micro_step_id += 1
            self.ready_for_gradients = True

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Averages the gradients of all micro-batches. `averaged_gradients` then has this rank's partition in float32."""
        for index in range(len(self.partition_size)):
            self.averaged_gradients[index] = self._build_compact_grad_partition_buffer(index)
        buckets = list(self._columns(self.reduce_bucket_size))
        started = (self._start_reduction(key, *bucket) for key, bucket in enumerate(buckets))
        # At most two buckets are in memory: one in flight while the next one is filled.
        for (index, first, last), part in zip(buckets, one_ahead(started), strict=True):
            self.averaged_gradients[index].flat_partition[first:last] = part.view(-1)
        for index, size in enumerate(self.partition_size):
            start = self.hzero.gradients.plan.rank * int(size)
            flat = self.averaged_gradients[index].flat_partition
            parts = self._parts(index, start, int(size))
            whole = [flat[a - start : b - start] for param, _, a, b in parts if not is_model_parallel_parameter(param)]
            self.hzero.keep_alike("gradients", whole)
        self._release_ipg_buffers()
        self._clear_param_grad_only()

    def _start_reduction(self, key: int, index: int, first: int, last: int) -> Callable[[], torch.Tensor]:
        """Starts to average a group's columns in all partitions. The result waits for this rank's partition of them."""
        communicator = self.hzero.gradients
        sums = self.averaged_gradients[index].flat_partition
        bucket = sums.new_zeros(communicator.plan.grid.world_size, last - first)
        for rank, row in enumerate(bucket):
            self._fill(index, row, rank * int(self.partition_size[index]) + first)
        return communicator.reduce_scatter(bucket, "mean", key=key, async_op=True).wait

    def _columns(self, elements: int) -> Iterator[tuple[int, int, int]]:
        """Divides partitions into buckets of about ``elements``. Yields group, first column and end of columns."""
        step = max(1, elements // self.hzero.gradients.plan.grid.world_size)
        for index, size in enumerate(map(int, self.partition_size)):
            for first in range(0, size, step):
                yield index, first, min(first + step, size)

    def _parts(self, index: int, start: int, size: int) -> Iterator[tuple[Any, int, int, int]]:
        """Yields the parameters in ``size`` elements of a flat group: parameter, its offset, and start and end of the part."""
        params, offsets = self.round_robin_bit16_groups[index], self.round_robin_bit16_offsets[index]
        for param, offset in zip(params, offsets, strict=True):
            first, last = max(start, offset), min(start + size, offset + param.numel())
            if first < last:
                yield param, offset, first, last

    def _fill(self, index: int, row: torch.Tensor, start: int) -> None:
        """Copies gradients into ``row``, from element ``start`` of the flat group. Without a gradient, zeros remain."""
        for param, offset, first, last in self._parts(index, start, row.numel()):
            if (gradient := self.get_gradient_for_reduction(param)) is not None:
                row[first - start : last - start] = gradient.reshape(-1)[first - offset : last - offset]

    def step(self, closure: Any = None) -> None:
        """Runs stock's step, and sends the new weights with codecs. A skipped step keeps no residuals of error feedback."""
        self.hzero.verify()
        with_names(DeepSpeedZeroOptimizer.step, all_gather_dp_groups=self._gather)(self, closure)
        feedback = self.hzero.gradients.feedback
        feedback.discard() if self.overflow else feedback.commit()
        if self.hzero.logged_hops.wanted():
            self.hzero.settle()

    def _gather(self, **_: Any) -> None:
        """Sends all partitions to all ranks. The owner also uses the decoded weights, so that all ranks have the same bits."""
        gather, groups = self.hzero.optimizer.all_gather, self.parallel_partitioned_bit16_groups
        rank, columns = self.hzero.optimizer.plan.rank, list(self._columns(self.allgather_bucket_size))
        started = (gather(groups[index][rank][first:last], async_op=True).wait for index, first, last in columns)
        for (index, first, last), whole in zip(columns, one_ahead(started), strict=True):
            for partition, part in zip(groups[index], whole.view(len(groups[index]), -1), strict=True):
                partition.data[first:last] = part
        copies = (param for group in self.bit16_groups for param in group if not is_model_parallel_parameter(param))
        self.hzero.keep_alike("optimizer", [param.data for param in copies])

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """Context in which weights are the rounded masters, sent without codecs. Collective over the data-parallel ranks."""
        with torch.no_grad():
            decoded = [flat.clone() for flat in self.bit16_groups_flat]
            masters = zip(self.parallel_partitioned_bit16_groups, self.single_partition_of_fp32_groups, strict=True)
            for index, (partitions, master) in enumerate(masters):
                dist.all_gather(partitions, master.to(partitions[0].dtype), group=self.real_dp_process_group[index])
        try:
            yield
        finally:
            for flat, before in zip(self.bit16_groups_flat, decoded, strict=True):
                flat.copy_(before)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Loads stock's state, and drops residuals of error feedback. Checkpoints have none."""
        super().load_state_dict(*args, **kwargs)
        self.hzero.gradients.feedback.clear()
        if self.hzero.config.error_feedback and is_rank_0():
            logger.warning("hzero: residuals of error feedback start at zero: checkpoints of pipeline stages have none")

    def _restore_from_bit16_weights(self) -> None:
        super()._restore_from_bit16_weights()
        self.hzero.gradients.feedback.clear()


# ---- the engine -------------------------------------------------------------------------------------------------------


class HZeroPipelineEngine(PipelineEngine):
    """DeepSpeed's engine of a ``PipelineModule`` with the block. Its messages cross tier by tier with codecs.

    `hzero.deepspeed.install` changes the class of an engine at the start of its construction. DeepSpeed's schedule is a list of
    instructions for each pipeline stage, and `_INSTRUCTION_MAP` has the method of each instruction. Methods that send or receive
    use `StageMessages` instead of DeepSpeed's ``p2p``. `HZeroStage1` sends gradients and updated weights. Shapes, tied weights
    and losses are sent as in stock.

    Gradients of micro-batches are added up in float32, for weights of any dtype. With bfloat16, stock uses
    ``BF16_Optimizer`` for this. Here ZeRO-1 does it.
    """

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Returns the dtypes of weights and of gradient sums. The latter is float32."""
        return super().get_data_types()[0], torch.float32

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
        found = super()._do_optimizer_sanity_check(basic_optimizer)
        return ZERO_OPTIMIZATION if found == BFLOAT16 else found

    @on_all_ranks()
    def _configure_zero_optimizer(self, optimizer: Any) -> Any:
        if self.has_moe_layers:
            raise ConfigError(f"{KEY}: found experts with pipeline stages; expected a model without experts")
        state = PipelineState(self.module, self.mpu, self._config.hzero_block)
        self._messages = StageMessages(state.pipeline)
        self._INSTRUCTION_MAP = {
            **PipelineEngine._INSTRUCTION_MAP,
            schedule.ReduceTiedGrads: HZeroPipelineEngine._exec_reduce_tied_grads,
            **{one: with_names(PipelineEngine._INSTRUCTION_MAP[one], p2p=self._messages) for one in MESSAGES},
        }
        stock = PipelineEngine._configure_zero_optimizer
        made = with_names(stock, DeepSpeedZeroOptimizer=HZeroStage1)(self, optimizer)
        made.hzero = state
        return made

    def _exec_reduce_tied_grads(self) -> None:
        """Reduces gradients of tied weights as stock does, but from ZeRO-1. With bfloat16 they are not in ``weight.grad``."""
        for weight, group in self.module.get_tied_weights_and_groups():
            if (gradient := self.optimizer.get_gradient_for_reduction(weight)) is not None:
                comm.all_reduce(gradient, group=group)

    def train_batch(self, data_iter: Any = None) -> Any:
        """Trains a batch as stock does. If ranks do not join a collective, the error names them."""
        with blaming(), self._messages:
            return super().train_batch(data_iter)

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates a batch as stock does. See `train_batch` for errors."""
        with blaming(), self._messages:
            return super().eval_batch(*args, **kwargs)


#: Instructions that send or receive a tensor of the model.
MESSAGES = (schedule.SendActivation, schedule.RecvActivation, schedule.SendGrad, schedule.RecvGrad)


def check_module(module: Any, mpu: Any, config: HZeroConfig, grid: Grid) -> None:
    """Refuses lossy codecs with which copies of a weight would diverge. Collective.

    Tied weights have a copy on several pipeline stages. Each stage would round its copy, or the sums of its gradients, in
    different blocks. DeepSpeed sums these gradients over the pipeline stages before the data-parallel ranks do, so the copies
    would never become equal again.

    All ranks of a tensor group have copies of the parameters that are not split. `PipelineState.keep_alike` keeps them equal.
    So each parameter must either be marked as split or be equal on these ranks.

    Args:
        module: The ``PipelineModule``.
        mpu: Its grid.
        config: The block.
        grid: Grid of the data-parallel ranks.

    Raises:
        ConfigError: Copies would diverge. The message has the codec and a parameter, the same on all ranks.
    """
    roles: tuple[Literal["gradients", "optimizer"], ...] = ("gradients", "optimizer")
    lossy = [(role, tier) for role in roles for tier in lossy_crossings(config.codecs[role], grid)]
    if not lossy:
        return
    role, tier = lossy[0]
    found = f"{KEY}.codecs.{role}.{tier}: found {config.codecs[role][tier].codec!r} with"
    expected = f"expected {', '.join(LOSSLESS)}, or"
    stages: dict[str, set[int]] = {}
    for number, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            stages.setdefault(spec.key, set()).add(module.stage_owner(number))
    if (shared := next((key for key, owners in stages.items() if len(owners) > 1), None)) is not None:
        raise ConfigError(
            f"{found} weights that are tied over stages ({shared}), whose copies would diverge; {expected} weights that are "
            "not tied"
        )
    if mpu.get_slice_parallel_world_size() == 1:
        return
    if (name := first_of_ranks(_unlike(module, mpu.get_slice_parallel_group()))) is not None:
        raise ConfigError(
            f"{found} parameter {name}, which differs between the ranks of a tensor group and is not marked as split; "
            f"{expected} tensor_model_parallel = True on split parameters, as in Megatron-LM, with parts of equal size"
        )


def _unlike(module: torch.nn.Module, group: Any) -> str | None:
    """Returns the first parameter whose parts have different shapes, or whose copies have different bits, in a tensor group."""
    here = {
        name: (tuple(param.shape), None if is_model_parallel_parameter(param) else _digest(param))
        for name, param in module.named_parameters()
    }
    every = of_every_rank(here, group)
    names = dict.fromkeys(name for each in every for name in each)
    return next((name for name in names if len({each.get(name) for each in every}) > 1), None)


def _digest(param: torch.Tensor) -> str:
    words = param.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha1(words.numpy().data, usedforsecurity=False).hexdigest()
