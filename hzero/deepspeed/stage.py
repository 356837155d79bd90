"""The stage: DeepSpeed's ZeRO-3 optimizer with tiered gradient reduction and resident weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK, DeepSpeedZeRoOffload
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from hzero.block import KEY
from hzero.comm import blaming, shared_watchdog
from hzero.config import HZeroConfig
from hzero.deepspeed import versions
from hzero.deepspeed.autoep import is_expert
from hzero.deepspeed.muon import Matrix
from hzero.deepspeed.stage_state import InFlight, Managed, StageState, ZeroParameter, current_device
from hzero.engine.guard import DivergenceError
from hzero.engine.parameter import Parameter
from hzero.validation import ConfigError, attributes, on_all_ranks, some

#: DeepSpeed's default of ``stage3_prefetch_bucket_size``.
BUCKET_NUMEL = 50_000_000


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
        module.ds_inflight_param_registry = InFlight()  # type: ignore[assignment]  # stock makes one if there is none
        super().__init__(module, *args, **kwargs)
        persistent = {param.ds_id for param in self.persistent_parameters}
        params: list[ZeroParameter] = list(module.parameters())
        for param in params:
            param.ds_persist = param.ds_id in persistent  # zero.Init may have applied the stock threshold
        group = self.dp_process_group or params[0].ds_process_group  # the latter without an optimizer
        # A size of 0 turns prefetching off. Refreshes then have buckets of the default size.
        bucket_numel = self._prefetch_bucket_sz or BUCKET_NUMEL
        self.hzero = StageState(module, config, group, bucket_numel, self._max_available_parameters_in_numel)
        units = set(self.hzero.units.of.values())
        # DeepSpeed counts the layer in use, which it has as a whole. A limit of one layer would leave nothing to gather ahead.
        largest = max((sum(member.param.ds_numel for member in unit.members) for unit in units), default=0)
        self.param_coordinator._PartitionedParameterCoordinator__max_n_available_params += largest
        for unit in units:
            self.backward_hooks.append(unit.layer.register_forward_pre_hook(_by_keyword, with_kwargs=True))

    # DeepSpeed's hooks before and after every module take more time than all that hzero does in a step. So they do nothing
    # inside a layer that DeepSpeed has as a whole.

    def pre_sub_module_forward_function(self, sub_module: torch.nn.Module) -> None:
        """Stock, except inside a layer; the layer is held."""
        units = self.hzero.units
        if units.inside(sub_module):
            FWD_MODULE_STACK.append(sub_module)  # from which stock's hook takes it
            return
        units.use(sub_module)
        super().pre_sub_module_forward_function(sub_module)
        units.held.add(sub_module)

    @torch.compiler.disable  # as stock's hooks before a forward are
    def post_sub_module_forward_function(self, sub_module: torch.nn.Module) -> None:
        """Stock, except inside a layer."""
        if not self.hzero.units.inside(sub_module):
            self.hzero.units.held.discard(sub_module)
            super().post_sub_module_forward_function(sub_module)

    def pre_sub_module_backward_function(self, sub_module: torch.nn.Module) -> None:
        """Stock, except inside a layer; the layer is held."""
        units = self.hzero.units
        if not units.inside(sub_module):
            units.use(sub_module)
            super().pre_sub_module_backward_function(sub_module)
            units.held.add(sub_module)

    def post_sub_module_backward_function(self, sub_module: torch.nn.Module) -> None:
        """Stock, except inside a layer."""
        if not self.hzero.units.inside(sub_module):
            self.hzero.units.held.discard(sub_module)
            super().post_sub_module_backward_function(sub_module)

    def partition_all_parameters(self) -> None:
        """Stock; then nothing of a layer is kept."""
        super().partition_all_parameters()
        self.hzero.units.drop()

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


@torch.compiler.disable
def _by_keyword(layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Before a forward of a layer: stock finds the end of its backward by its input, but only among positional arguments."""
    if layer.ds_grads_remaining:
        return args, kwargs
    follow = layer.post_bwd_fn.apply
    return args, {
        key: follow(value) if isinstance(value, torch.Tensor) and value.requires_grad else value
        for key, value in kwargs.items()
    }


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
        self.persistent_parameters = list(filter(is_expert, self.persistent_parameters))
        self.reduce_scatter = True  # for Muon stock requires false, which would keep gradients from `accumulate`
        self.hzero.gradients.bucket_numel = self.reduce_bucket_size
        self.hzero.mark_stale()  # stock has moved the primary shards

    # ---- gradients --------------------------------------------------------------------------------------------------

    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(  # noqa: N802 - the mangled name is how stock calls it
        self, params_to_reduce: list[ZeroParameter], communication_data_type: torch.dtype
    ) -> list[torch.Tensor]:
        """Submits the reduction of one bucket over the gradients' scope; see `Gradients.accumulate`."""
        if is_expert(params_to_reduce[0]):  # a bucket is of one partition
            self._arrived.update(param.ds_id for param in params_to_reduce)
            stock = super()._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads  # type: ignore[misc]
            return stock(params_to_reduce, communication_data_type)  # type: ignore[no-any-return]
        gradients = [param.grad for param in params_to_reduce]
        for param in params_to_reduce:
            param.grad = None
        try:
            self.hzero.gradients.accumulate(
                self.hzero.of(params_to_reduce),
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
        """Stock for experts; `Gradients.accumulate` has taken other gradients, and shards reach stock by `_deliver`."""
        if params_to_release and is_expert(params_to_release[0]):
            super().partition_grads(params_to_release, grad_partitions)

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
        self.hzero.units.end()
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
        self._stepping = True
        try:
            self.hzero.before_step(self._stepped(), self._gradient_of)
            with blaming():  # the norm's all-reduce is no hop
                super().step(closure)
        except Exception as error:  # whoever catches it goes on with a new window
            if isinstance(error, DivergenceError):  # discarded as by stock, with the weights of the last good step
                self._overflow_clean_up(self.loss_scale)
            self._new_window()
            raise
        finally:
            self._stepping = False
        self.hzero.after_step(done=not self.overflow)
        self._new_window()
        self.hzero.gather_kept_whole()
        self.hzero.lanes.before_others()
        if self.hzero.logged_hops.wanted():  # the logger makes every collective of DeepSpeed wait too
            self.hzero.settle()

    def _update_scale(self, has_overflow: bool = False) -> None:
        """Stock, in every step, before a step whose norm is not finite is discarded; see `Guard.discarded`."""
        if has_overflow:
            self.hzero.guard.discarded(self.loss_scaler, self._stepped(), self._gradient_of)
        super()._update_scale(has_overflow)

    def _apply_muon_to_accumulated_grads(self) -> None:
        """Stock, before the norm is taken; the matrices travel by `hzero.deepspeed.muon`."""
        if not self.use_muon:
            return
        matrices = []
        for number, group in enumerate(self.fp16_groups):
            if not self.sub_groups_using_muon[number]:
                continue
            self.sub_groups_lacking_loss_scale.add(number)
            master = self.fp32_partitioned_groups_flat[number]
            if "momentum_buffer" not in self.optimizer.state.get(master, {}):
                self._create_momentum_buffer(self.fp16_partitioned_groups_flat_numel[number], number, master.ds_id)
            momenta = self.optimizer.state[master]["momentum_buffer"]
            for param, shard in zip(group, self.averaged_gradients[number]):
                start = self.grad_position[self.get_param_id(param)][1]
                matrices.append(Matrix(param, shard, momenta.narrow(0, start, shard.numel())))
        assert self.hzero.orthogonalizer is not None  # the same parameters are marked
        self.hzero.orthogonalizer.update(matrices, self.muon_beta, self.muon_ns_method)

    def _new_window(self) -> None:
        self.hzero.gradients.clear()
        self._arrived.clear()

    def _gradient_of(self, weight: Any) -> torch.Tensor:
        return self._get_fp32_grad_state_partition(weight.param, True)[0]  # type: ignore[no-any-return]

    def _stepped(self) -> list[Managed]:
        """The parameters in the optimizer."""
        return self.hzero.of(itertools.chain.from_iterable(self.fp16_groups))

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
        with attributes((self, "micro_step_id", 0)):
            super().partition_grads(arrived, [sums[param.ds_id].to(device) for param in arrived])

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
                scope = param.hzero_managed.route.plan.gradients_scope
                raise RuntimeError(
                    f"hzero: the gradient of parameter {param.ds_id} is a partial sum over its {scope} until the accumulation "
                    "boundary. Read it after the backward of the last micro-step, before step(); with "
                    "managed_gradient_accumulation false, after optimizer.finalize_gradient_accumulation_boundary()"
                )
        # Shards that come of the micro-steps so far are added where stock keeps them.
        with torch.no_grad(), get_accelerator().stream(self.reduce_and_partition_stream):
            self.hzero.gradients.wait_reduced()

    # ---- weights ----------------------------------------------------------------------------------------------------

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        """The weights of a sub-group are new: on a device their refresh starts, behind the steps of other sub-groups.

        On CPUs it starts with the next gather. A script may end after any step, and torch.distributed aborts if
        its groups are destroyed while gloo has a collective under way.
        """
        super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)
        if self._stepping:
            self.hzero.mark_stale(self.fp16_groups[sub_group_id])
            if not get_accelerator().is_synchronized_device():
                self.hzero.weights.refresh_stepped(self.hzero.of(self.fp16_groups[sub_group_id]))

    def _restore_from_bit16_weights(self) -> None:
        """The last call of stock's load without optimizer states: the weights have been replaced."""
        super()._restore_from_bit16_weights()
        self.hzero.replaced()
        self._new_window()

    def checkpoint_event_prologue(self) -> None:
        """Stock. A resumed run refreshes whole weights first, so one that goes on has to do the same after a save."""
        super().checkpoint_event_prologue()
        if self.hzero.config.refresh_differences and self.hzero.config.checkpoint is not None:
            self.hzero.mark_stale()

    def checkpoint_event_epilogue(self) -> None:
        """Parameters kept whole are there again after a save or a load, as in stock."""
        self.hzero.gather_kept_whole()

    def state_dict(self) -> dict[str, Any]:
        """Stock, and the stage's own state where it has some; see `StageState.state_dict`."""
        state: dict[str, Any] = super().state_dict()
        seeds = self.hzero.state_dict()
        return state if seeds is None else {**state, KEY: seeds}

    def load_state_dict(
        self, state_dict_list: list[dict[str, Any]] | None, load_optimizer_states: bool = True, **kwargs: Any
    ) -> None:
        """Stock; then drops resident payloads, waiting gradients and residuals, which belong to the old weights.

        Raises:
            ConfigError: The states are of another optimizer.
        """
        saved = state_dict_list[self.hzero.plan.rank] if state_dict_list else {}  # a universal checkpoint gives none
        if saved and load_optimizer_states:
            _check_same(self.optimizer, saved[OPTIMIZER_STATE_DICT])
        self._partition_all_parameters()
        self.hzero.weights.before_change()
        super().load_state_dict(state_dict_list, load_optimizer_states, **kwargs)
        self.hzero.replaced()
        self._new_window()
        self.hzero.load_state_dict(saved.get(KEY))

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Stock; resident payloads are freed too, and rebuilt at their next use."""
        self.hzero.weights.before_change()
        super().offload_states(*args, **kwargs)
        self.hzero.drop_gathered()
        self.hzero.weights.free()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Stock; resident payloads are rebuilt at their next use."""
        super().reload_states(non_blocking)
        self.hzero.mark_stale()


@on_all_ranks()
def _check_same(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Refuses states with other parameter groups, or without what the optimizer keeps for its parameters and their groups."""
    found, groups = saved["param_groups"], optimizer.param_groups
    if len(found) != len(groups):
        raise ConfigError(
            f"checkpoint: of {len(found)} parameter groups; found {len(groups)} in the optimizer; expected those of that run"
        )
    kept = optimizer.state.values() if saved["state"] else ()  # an optimizer that has not stepped may have none yet
    needed = set(optimizer.defaults).union(*kept)
    if lacking := sorted(needed.difference(*found, *saved["state"].values())):
        raise ConfigError(
            f"checkpoint: of another optimizer: found {type(optimizer).__name__}, for which it lacks {some(lacking, 4)}; "
            "expected the optimizer of that run"
        )
