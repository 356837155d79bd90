"""The stage: DeepSpeed's ZeRO-3 optimizer with tiered gradient reduction and resident weights."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from hzero.block import KEY
from hzero.comm import blaming, shared_watchdog
from hzero.config import HZeroConfig
from hzero.deepspeed import autotp, versions
from hzero.deepspeed.parameters import Managed, Parameters, ZeroParameter, give_back, layers_of, managed_parameters
from hzero.deepspeed.refusals import check_partition, check_types
from hzero.engine.engine import Engine, Partition, Traffic
from hzero.engine.guard import DivergenceError
from hzero.engine.parameter import Parameter, routes_of
from hzero.plan.shards import ShardPlan
from hzero.validation import is_rank_0, on_all_ranks

#: DeepSpeed's default of ``stage3_prefetch_bucket_size``.
BUCKET_NUMEL = 50_000_000


def async_accelerator() -> Any:
    """DeepSpeed's accelerator; None where it is synchronised, which runs everything in order, as CPUs do."""
    accelerator = get_accelerator()
    return None if accelerator.is_synchronized_device() else accelerator


def current_device() -> torch.device:
    """The device of this rank."""
    return torch.device(get_accelerator().current_device_name())


class StageState(Engine):
    """The engine of one DeepSpeed engine with ZeRO-3: `Engine`, and what is DeepSpeed's.

    Attributes:
        parameters: DeepSpeed's, which gather from resident weights.
        logged_hops: Gives hops to DeepSpeed's ``comms_logger``, at the end of each step and in `settle`.

    Args:
        module: The model, its parameters partitioned by DeepSpeed.
        config: The block.
        group: The ranks over which DeepSpeed partitions.
        bucket_numel: Max elements of the parameters that share one message of the refresh; also of the boundary, until
            the optimizer sets its own.
        live_numel: Max elements of a layer that is gathered as a whole, beside the block's own limit.

    Raises:
        ConfigError: A parameter is partitioned over other ranks.
    """

    ADVICE = (
        "change weights inside deepspeed.zero.GatheredParameters with a modifier_rank, or call "
        "hzero.state(engine).parameters.mark_stale() on all ranks afterwards"
    )

    def __init__(
        self,
        module: torch.nn.Module,
        config: HZeroConfig,
        group: dist.ProcessGroup | None,
        bucket_numel: int,
        live_numel: int,
    ) -> None:
        partition = Partition.of(group, config.topology)
        check_partition(module, partition.ranks)
        plan = ShardPlan.from_config(config, partition.grid, partition.rank)
        self._module = module
        routes, codes = routes_of(module, plan)
        check_types(module, routes)
        self._autotp = autotp.take_over(module, config, partition.world)
        managed = managed_parameters(module, routes, codes)
        own = list(managed.values())
        super().__init__(config, plan, partition, module, own, bucket_numel, current_device(), async_accelerator())
        # Weights that are whole on every device need no gather.
        layers = [] if plan.decoded else layers_of(module, min(plan.unit_numel, live_numel))
        self.parameters = Parameters(module, managed, self.weights, layers)
        if config.exact_evaluation:
            self.parameters.follow_mode()
        self.logged_hops = LoggedHops(self)
        if is_rank_0():
            how = ""  # forward gathers weights
            if plan.gather_hops() and not plan.decoded:
                kinds = Counter(type(layer).__name__ for layer in layers)
                named = ", ".join(f"{name} x {count}" for name, count in kinds.items())
                how = f"; gathers by layer ({named})" if named else "; gathers by module"
            as_bytes = f"; parameters that hold codes, sent as bytes: {len(codes):,}" if codes else ""
            self.announce(f"{self.described()}{how}{as_bytes}")
            self.warn_of_plan()

    def lost(self) -> bool:
        """As of `Engine`."""
        if lost := super().lost():
            self.parameters.put_away_all()
        return lost

    def replaced(self) -> None:
        """As of `Engine`."""
        self.parameters.forget()
        super().replaced()

    def memory(self, optimizer: Any = None) -> dict[str, int]:
        """Measured bytes of each state on this rank, without transient buffers; see `Engine.memory`.

        Args:
            optimizer: The engine's optimizer, if it has one.
        """
        return {
            "primary weights": self.parameters.primary_bytes(),
            "gradient shard": _bytes([getattr(optimizer, "grad_partitions_flat_buffer", None)]),
            "optimizer": optimizer_bytes(optimizer),
            **super().memory(),
        }

    def destroy(self) -> None:
        """Frees payloads and accumulators, and restores the model to what DeepSpeed made."""
        if self._autotp is not None:
            give_back(self._module, self._autotp)
            self._autotp = None  # DeepSpeed may hold this object, and nothing is sent over that group any more
        try:
            self.close()
        finally:
            self.parameters.close()


class HZeroOffload(DeepSpeedZeRoOffload):
    """DeepSpeed's gathers of a model, through resident weights: a `HZeroStage3` has one, or an engine without an optimizer.

    Args:
        config: The block.
        module: The model.
        *args: As of DeepSpeed's.
        **kwargs: As of DeepSpeed's.
    """

    @on_all_ranks()
    def __init__(self, config: HZeroConfig, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        persistent = {param.ds_id for param in self.persistent_parameters}
        params: list[ZeroParameter] = list(module.parameters())
        for param in params:
            param.ds_persist = param.ds_id in persistent  # zero.Init may have applied the stock threshold
        group = self.dp_process_group or params[0].ds_process_group  # the latter without an optimizer
        # A size of 0 turns prefetching off. Refreshes then have buckets of the default size.
        bucket_numel = self._prefetch_bucket_sz or BUCKET_NUMEL
        self.hzero = StageState(module, config, group, bucket_numel, self._max_available_parameters_in_numel)

    def partition_all_parameters(self) -> None:
        """Stock; then nothing of a layer is kept."""
        super().partition_all_parameters()
        self.hzero.parameters.units.drop()

    def checkpoint_event_prologue(self) -> None:
        """An engine without an optimizer announces checkpoints to this object only."""
        self.partition_all_parameters()

    def checkpoint_event_epilogue(self) -> None:
        """The weights have been loaded, or saved."""
        self.hzero.replaced()

    def destroy(self) -> None:
        """Stock; then the engine's."""
        super().destroy()
        self.hzero.destroy()


# ---- the optimizer ------------------------------------------------------------------------------------------------------


class HZeroStage3(DeepSpeedZeroOptimizer_Stage3):
    """ZeRO-3 whose weights and gradients have shard degrees of their own.

    The primary partition of weights, gradients and optimizer states stays DeepSpeed's, over the world or, beside tensor
    groups, over the data-parallel ranks: norms, clipping, loss scaling, offload and checkpoints are stock.
    `hzero.engine.gradients` delivers the gradients; forward and backward gather through `hzero.engine.weights`.
    """

    hzero: StageState
    micro_step_id: int
    overflow: bool
    persistent_parameters: list[ZeroParameter]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._stepping = False
        self._arrived: set[int] = set()  # ids of parameters whose gradients of this window stock has received
        super().__init__(*args, **kwargs)
        self.hzero = self.parameter_offload.hzero
        # Stock gathers persistent parameters flat over the world after each step, which takes 30 s on 32 nodes
        # (deepspeedai/Megatron-DeepSpeed#384). Here they go by tier and codec; see `step`.
        self.persistent_parameters = []
        self.hzero.gradients.bucket_numel = self.reduce_bucket_size
        self.hzero.parameters.mark_stale()  # stock has moved the primary shards

    # ---- gradients --------------------------------------------------------------------------------------------------

    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(  # noqa: N802 - the mangled name is how stock calls it
        self, params_to_reduce: list[ZeroParameter], communication_data_type: torch.dtype
    ) -> list[torch.Tensor]:
        """Submits the reduction of one bucket over the gradients' scope; see `Gradients.accumulate`."""
        gradients = [param.grad for param in params_to_reduce]
        for param in params_to_reduce:
            param.grad = None
        try:
            self.hzero.gradients.accumulate(
                self.hzero.parameters.of(params_to_reduce),
                gradients,
                communication_data_type,
                float(self.loss_scale),
                last=versions.at_boundary(self),
                deliver=self._deliver,
            )
        except BaseException:
            self.ipg_buckets[communication_data_type].clear_params()  # stock would look for their gradients again
            raise
        return []

    def partition_grads(self, params_to_release: list[ZeroParameter], grad_partitions: list[torch.Tensor]) -> None:
        """Nothing: `Gradients.accumulate` has taken the gradients, and shards reach stock by `_deliver`."""

    def backward_prologue(self) -> None:
        """Stock; a micro-step counts."""
        shared_watchdog().micro += 1
        super().backward_prologue()

    def independent_gradient_partition_epilogue(self) -> None:
        """After a backward: stock, then at the boundary the outer hops.

        Before the boundary nothing is waited for: reductions go on behind the next forward, whether shards or partial sums
        come of them.
        """
        super().independent_gradient_partition_epilogue()
        self.hzero.parameters.units.end()
        self.hzero.lanes.before_others()
        if versions.at_boundary(self):
            self._cross_boundary()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Unmanaged accumulation: the engine calls this first thing in ``step``."""
        versions.set_boundary(self)
        self._cross_boundary()

    def step(self, closure: Any = None) -> None:
        """Stock step, after gradients that still wait have crossed."""
        if self.hzero.gradients.waiting:
            self._cross_boundary()
        try:
            self.hzero.before_step(self._stepped(), self._gradient_of)
        except Exception:  # whoever catches it goes on with a new window
            self._new_window()
            raise
        self._stepping = True
        try:
            with blaming():  # the norm's all-reduce is no hop
                super().step(closure)
        except DivergenceError:
            # Discarded as by stock, so that whoever catches it finds the weights of the last good step.
            self._overflow_clean_up(self.loss_scale)
            self._new_window()
            raise
        finally:
            self._stepping = False
        self.hzero.after_step(done=not self.overflow)
        self._new_window()
        self.hzero.parameters.gather_kept_whole()
        self.hzero.lanes.before_others()
        if self.hzero.logged_hops.wanted():  # the logger makes every collective of DeepSpeed wait too
            self.hzero.settle()
        watchdog = shared_watchdog()
        watchdog.step, watchdog.micro = watchdog.step + 1, 0

    def _update_scale(self, has_overflow: bool = False) -> None:
        """Stock, in every step, before a step whose norm is not finite is discarded; see `Guard.discarded`."""
        if has_overflow and not self.hzero.lost():
            self.hzero.guard.discarded(self.loss_scaler, self._stepped(), self._gradient_of)
        super()._update_scale(has_overflow)

    def _new_window(self) -> None:
        self.hzero.gradients.clear()
        self._arrived.clear()

    def _gradient_of(self, weight: Any) -> torch.Tensor:
        shard: torch.Tensor = self._get_fp32_grad_state_partition(weight.param, True)[0]
        return shard

    def _stepped(self) -> list[Managed]:
        """The parameters in the optimizer."""
        return self.hzero.parameters.of(itertools.chain.from_iterable(self.fp16_groups))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Stock; also starts a new accumulation window, except where stock's own step calls this before it is done.

        What a backward has left behind that an exception cut short is dropped too.
        """
        if not self._stepping:
            self._new_window()
            for bucket in self.ipg_buckets.values():
                bucket.clear_params()
            while self.cut_short:
                self.exit_backward()
            if set_to_none and get_accelerator().is_synchronized_device():
                # Those that an error has left: stock would ask for their stream.
                for param in itertools.chain.from_iterable(self.fp16_groups):
                    param.grad = None
        super().zero_grad(set_to_none)

    @property
    def cut_short(self) -> bool:
        """Between backwards: whether an exception has ended the last one early."""
        return bool(self._backward_active_depth > 0)

    @torch.no_grad()
    def _cross_boundary(self) -> None:
        with get_accelerator().stream(self.reduce_and_partition_stream):
            self.hzero.gradients.finish(self.communication_data_type, float(self.loss_scale), self._deliver)
            if self.offload_optimizer:
                self._offload()
            self._silence()
            # The host is about to wait anyway, and nothing has been stepped.
            with self.hzero.gradients.all_or_nothing():
                self.hzero.verify()
        if not get_accelerator().resolves_data_dependency():
            self.reduce_and_partition_stream.synchronize()

    def _deliver(self, weights: list[Parameter], shards: list[torch.Tensor]) -> None:
        """Adds shards where stock keeps gradients; the first of a window replaces the remains of the last one.

        Stock decides by the number of the micro-step, and would add the first gradient of a parameter that was silent before.
        """
        sums = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        for weight, shard in zip(weights, shards):
            total, kept = shard.to(self.gradient_accumulation_dtype), sums[weight.key][: shard.numel()]
            if weight.key in self._arrived:  # on the device, if they are kept on the host, where sums are slow
                total = kept.to(shard.device, non_blocking=True).add_(total)
            kept.copy_(total, non_blocking=True)
        self._arrived.update(weight.key for weight in weights)

    def _offload(self) -> None:
        """Moves gradients to the masters on the host, by stock's own function, which first copies them onto themselves."""
        arrived = [param for param in itertools.chain.from_iterable(self.fp16_groups) if param.ds_id in self._arrived]
        sums, device = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition, current_device()
        before, self.micro_step_id = self.micro_step_id, 0
        try:
            super().partition_grads(arrived, [sums[param.ds_id].to(device) for param in arrived])
        finally:
            self.micro_step_id = before

    def _silence(self) -> None:
        """Zeroes the shards of parameters that received no gradient in this window, whether they require one now or not.

        Stock leaves the gradients of the previous step there, and would apply them again. And it drops the gradient of a
        parameter that was frozen later in the window, which torch's optimizers apply.
        """
        shards = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        for number, group in enumerate(self.fp16_groups):
            for param in group:
                if param.ds_id not in self._arrived:
                    shards[param.ds_id].zero_()
                    if self.offload_optimizer:
                        self.norm_for_param_grads.pop(self.get_param_id(param), None)  # of an abandoned window
                        super()._get_fp32_grad_state_partition(param, release_swap_buffers=True)[0].zero_()
            if not self.offload_optimizer:
                self.averaged_gradients[number] = [shards[param.ds_id] for param in group]

    def _get_fp32_grad_state_partition(self, param: ZeroParameter, release_swap_buffers: bool) -> Any:
        self._before_reading([param])
        return super()._get_fp32_grad_state_partition(param, release_swap_buffers)

    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: list[ZeroParameter]) -> None:
        """Stock, at the boundary; see `_before_reading`."""
        self._before_reading(param_list)
        super().update_fp32_grad_for_param_vectorized(update_func, param_list)

    def get_fp32_grad_partitions(self) -> Any:
        """Stock, at the boundary; see `_before_reading`."""
        self._before_reading(itertools.chain.from_iterable(self.fp16_groups))
        return super().get_fp32_grad_partitions()

    def _before_reading(self, params: Iterable[ZeroParameter]) -> None:
        """Gradients that are summed in every micro-step have arrived; partial sums over a scope are refused."""
        for param in params:
            if self.hzero.gradients.holds(param.ds_id):
                raise RuntimeError(
                    f"hzero: the gradient of parameter {param.ds_id} is a partial sum over its "
                    f"{self.hzero.plan.gradients_scope} until the accumulation boundary. Read it after the backward of the "
                    "last micro-step, before step(); with managed_gradient_accumulation false, after "
                    "optimizer.finalize_gradient_accumulation_boundary()"
                )
        # Shards that come of the micro-steps so far are added where stock keeps them.
        with torch.no_grad(), get_accelerator().stream(self.reduce_and_partition_stream):
            self.hzero.gradients.settle()

    # ---- weights ----------------------------------------------------------------------------------------------------

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        """The weights of a sub-group are new: on a device their refresh starts, behind the steps of other sub-groups.

        On CPUs it starts with the next gather. A script may end after any step, and torch.distributed aborts if
        its groups are destroyed while gloo has a collective under way.
        """
        super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)
        if self._stepping:
            self.hzero.parameters.mark_stale(self.fp16_groups[sub_group_id])
            if not get_accelerator().is_synchronized_device():
                self.hzero.weights.refresh_stepped(self.hzero.parameters.of(self.fp16_groups[sub_group_id]))

    def _restore_from_bit16_weights(self) -> None:
        """The last call of stock's load without optimizer states: the weights have been replaced."""
        super()._restore_from_bit16_weights()
        self.hzero.replaced()
        self._new_window()

    def checkpoint_event_prologue(self) -> None:
        """Stock. A resumed run refreshes whole weights first, so one that goes on has to do the same after a save."""
        super().checkpoint_event_prologue()
        if self.hzero.config.refresh_differences and self.hzero.config.checkpoint is not None:
            self.hzero.parameters.mark_stale()

    def checkpoint_event_epilogue(self) -> None:
        """Parameters kept whole are there again after a save or a load, as in stock."""
        self.hzero.parameters.gather_kept_whole()

    def state_dict(self) -> dict[str, Any]:
        """Stock, and the stage's own state where it has some; see `StageState.state_dict`."""
        state: dict[str, Any] = super().state_dict()
        own = self.hzero.state_dict()
        return state if own is None else {**state, KEY: own}

    def load_state_dict(self, state_dict_list: list[dict[str, Any]] | None, *args: Any, **kwargs: Any) -> None:
        """Stock; then drops resident payloads, waiting gradients and residuals, which belong to the old weights."""
        own = state_dict_list[self.hzero.plan.rank].get(KEY) if state_dict_list else None
        self._partition_all_parameters()
        self.hzero.weights.before_change()
        super().load_state_dict(state_dict_list, *args, **kwargs)
        self.hzero.replaced()
        self._new_window()
        self.hzero.load_state_dict(own)

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Stock; resident payloads are freed too, and rebuilt at their next use."""
        self.hzero.weights.before_change()
        super().offload_states(*args, **kwargs)
        self.hzero.parameters.drop()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Stock; resident payloads are rebuilt at their next use."""
        super().reload_states(non_blocking)
        self.hzero.parameters.mark_stale()


# ---- what DeepSpeed measures --------------------------------------------------------------------------------------------


def _bytes(tensors: list[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def optimizer_bytes(optimizer: Any) -> int:
    """Bytes of a ZeRO optimizer on this rank: float32 masters and the states of the wrapped optimizer."""
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")  # of stage 3, of stage 1
    masters = [master for name in names for master in getattr(optimizer, name, ())]
    inner = getattr(optimizer, "optimizer", None)
    states = [value for state in getattr(inner, "state", {}).values() for value in state.values()]
    return _bytes(masters) + _bytes(states)


class LoggedHops:
    """Gives DeepSpeed's ``comms_logger`` the hops of a wire log, whenever it is settled.

    Args:
        traffic: Counts the hops.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._wire_log, self._logged = traffic.wire_log, dict[str, tuple[int, int, float]]()
        traffic.on_settle.append(self._log)

    @staticmethod
    def wanted() -> bool:
        """Whether the user has turned the logger on, for all operations or for those named ``hzero``."""
        logger = comm.comms_logger
        return bool(logger.enabled and (logger.prof_all or "hzero" in logger.prof_ops))

    def _log(self) -> None:
        """Adds the hops since the last time, with their mean bytes and mean time."""
        for entry in self._wire_log.entries() if self.wanted() else ():
            name = f"hzero {entry.role}, {entry.tier}, {entry.codec}"
            wire_bytes, hops, seconds = self._logged.get(name, (0, 0, 0.0))
            if hops > entry.hops:  # the wire log has been reset
                wire_bytes, hops, seconds = 0, 0, 0.0
            self._logged[name] = entry.wire_bytes, entry.hops, entry.seconds
            received, hops, seconds = entry.wire_bytes - wire_bytes, entry.hops - hops, entry.seconds - seconds
            for number in range(hops if received else 0):
                size = received // hops if number else received - received // hops * (hops - 1)
                # The logger computes the bandwidth of `recv` from these bytes, without a factor for the ranks of the world.
                comm.comms_logger.append("recv", name, max(seconds / hops * 1e3, 1e-6), size)
