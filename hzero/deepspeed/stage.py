"""The stage: DeepSpeed's ZeRO-3 optimizer with tiered gradient reduction and secondary partitions."""

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
from hzero.calls import attributes
from hzero.comm import blaming, shared_watchdog
from hzero.config import HZeroConfig
from hzero.deepspeed import versions
from hzero.deepspeed.handles import InFlight, ZeroParameter
from hzero.deepspeed.stage_state import StageState, current_device
from hzero.deepspeed.units import Managed
from hzero.engine.guard import DivergenceError
from hzero.engine.parameter import Parameter
from hzero.errors import ConfigError, on_all_ranks, some

#: DeepSpeed's default of ``stage3_prefetch_bucket_size``.
BUCKET_NUMEL = 50_000_000


class HZeroOffload(DeepSpeedZeRoOffload):
    """DeepSpeed's parameter offload, which gathers a model, with gathers from secondary partitions.

    A `HZeroStage3` creates one. An engine without an optimizer creates it directly.

    Args:
        config: The block.
        engine: DeepSpeed's engine, whose batch and buckets decide for preset ``fit``.
        module: The model.
        *args: Passed to ``DeepSpeedZeRoOffload``.
        **kwargs: Passed to ``DeepSpeedZeRoOffload``.
    """

    @on_all_ranks()
    def __init__(self, config: HZeroConfig, engine: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        registry = InFlight()  # otherwise stock creates its own, unless an earlier engine has left one
        earlier: Any = getattr(module, "ds_inflight_param_registry", registry)
        registry.data, module.ds_inflight_param_registry = earlier.data, registry  # type: ignore[assignment]
        super().__init__(module, *args, **kwargs)
        persistent = {param.ds_id for param in self.persistent_parameters}
        params: list[ZeroParameter] = list(module.parameters())
        for param in params:
            param.ds_persist = param.ds_id in persistent  # zero.Init may have used the stock threshold
        group = self.dp_process_group or params[0].ds_process_group  # without an optimizer there is no dp_process_group
        # A size of 0 disables prefetching. Refreshes then use buckets of the default size.
        bucket_numel = int(engine.zero_prefetch_bucket_size()) or BUCKET_NUMEL
        step = engine.gradient_accumulation_steps(), engine.zero_reduce_bucket_size()
        self.hzero = StageState(module, config, group, bucket_numel, *step, engine.zero_cpu_offload())
        units = set(self.hzero.units.of.values())
        # DeepSpeed counts all parameters of the layer in use. With a limit of one layer it could not prefetch the next one.
        largest = max((sum(member.param.ds_numel for member in unit.members) for unit in units), default=0)
        self.param_coordinator._PartitionedParameterCoordinator__max_n_available_params += largest
        for unit in units:
            self.backward_hooks.append(unit.layer.register_forward_pre_hook(_by_keyword, with_kwargs=True))

    # DeepSpeed's hooks before and after every module need more host time than all of hzero's work in a step. They are skipped
    # inside a layer whose parameters DeepSpeed has requested together.

    def pre_sub_module_forward_function(self, sub_module: torch.nn.Module) -> None:
        """Runs stock's hook, except inside a layer."""
        units = self.hzero.units
        if units.inside(sub_module):
            FWD_MODULE_STACK.append(sub_module)  # stock's hook after the forward pops it
            return
        units.use(sub_module)
        super().pre_sub_module_forward_function(sub_module)
        units.held.add(sub_module)

    @torch.compiler.disable  # as for stock's hook before a forward
    def post_sub_module_forward_function(self, sub_module: torch.nn.Module) -> None:
        """Runs stock's hook, except inside a layer."""
        if not self.hzero.units.inside(sub_module):
            self.hzero.units.held.discard(sub_module)
            super().post_sub_module_forward_function(sub_module)

    def pre_sub_module_backward_function(self, sub_module: torch.nn.Module) -> None:
        """Runs stock's hook, except inside a layer."""
        units = self.hzero.units
        if not units.inside(sub_module):
            units.use(sub_module)
            super().pre_sub_module_backward_function(sub_module)
            units.held.add(sub_module)

    def post_sub_module_backward_function(self, sub_module: torch.nn.Module) -> None:
        """Runs stock's hook, except inside a layer."""
        if not self.hzero.units.inside(sub_module):
            self.hzero.units.held.discard(sub_module)
            super().post_sub_module_backward_function(sub_module)

    def partition_all_parameters(self) -> None:
        """Partitions all parameters as stock does, and drops the gathered layers."""
        super().partition_all_parameters()
        self.hzero.units.drop()

    def checkpoint_event_prologue(self) -> None:
        """Partitions all parameters. An engine without an optimizer calls this before it saves or loads a checkpoint."""
        self.partition_all_parameters()

    def checkpoint_event_epilogue(self) -> None:
        """Drops all state that is derived from the weights, since a load may have replaced them."""
        self.hzero.after_load()

    def destroy(self) -> None:
        """Removes stock's hooks, then frees the stage's buffers."""
        super().destroy()
        self.hzero.destroy()


@torch.compiler.disable
def _by_keyword(layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of a layer, which makes stock's end-of-backward hook cover keyword arguments.

    Stock attaches that hook to the inputs of a layer, but only to positional ones.
    """
    if getattr(layer, "ds_grads_remaining", True):  # a layer inside a leaf module has no hooks of stock
        return args, kwargs
    follow = layer.post_bwd_fn.apply
    return args, {
        key: follow(value) if isinstance(value, torch.Tensor) and value.requires_grad else value
        for key, value in kwargs.items()
    }


# ---- the optimizer ------------------------------------------------------------------------------------------------------


class HZeroStage3(DeepSpeedZeroOptimizer_Stage3):
    """ZeRO-3 with separate shard degrees for weights and gradients.

    DeepSpeed keeps the primary partition of weights, gradients and optimizer states. It spans the world or, with tensor
    parallelism, the data-parallel ranks. So norms, clipping, loss scaling, offload and checkpoints are stock.
    `hzero.engine.gradients` delivers the gradients. Forward and backward gather from `hzero.engine.weights`.
    """

    hzero: StageState
    micro_step_id: int
    overflow: bool
    persistent_parameters: list[ZeroParameter]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._stepping = False
        self._arrived: set[int] = set()  # ids of parameters whose gradients stock has received in this window
        super().__init__(*args, **kwargs)
        self.hzero = self.parameter_offload.hzero
        # After each step stock gathers persistent parameters in one flat all-gather over the world, 30 s on 32 nodes
        # (deepspeedai/Megatron-DeepSpeed#384). `step` gathers them tier by tier instead.
        self.persistent_parameters = []
        self.reduce_scatter = True  # stock requires False for Muon, and would then bypass `accumulate`
        self.hzero.gradients.bucket_numel = self.reduce_bucket_size
        self.hzero.note_edit()  # stock has moved the primary shards to other memory

    # ---- gradients --------------------------------------------------------------------------------------------------

    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(  # noqa: N802 - the mangled name is how stock calls it
        self, params_to_reduce: list[ZeroParameter], communication_data_type: torch.dtype
    ) -> list[torch.Tensor]:
        """Starts to reduce one bucket over the gradients' scope. See `Gradients.accumulate`."""
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
            self.ipg_buckets[communication_data_type].clear_params()  # otherwise stock would reduce them again
            raise
        return []

    def partition_grads(self, params_to_release: list[ZeroParameter], grad_partitions: list[torch.Tensor]) -> None:
        """Does nothing: `Gradients.accumulate` has taken the gradients, and `_deliver` passes their shards to stock."""

    def backward_prologue(self) -> None:
        """Counts the micro-batch for error messages, then runs stock's prologue."""
        shared_watchdog().micro += 1
        super().backward_prologue()

    def independent_gradient_partition_epilogue(self) -> None:
        """Ends a backward as stock does. At the boundary the sums then cross the outer tiers.

        Before the boundary this method waits for nothing, so reductions overlap with the next forward.
        """
        super().independent_gradient_partition_epilogue()
        self.hzero.units.end()
        self.hzero.lanes.before_others()
        if versions.at_boundary(self):
            self._cross_boundary()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Crosses the outer tiers. With unmanaged accumulation the engine calls this at the start of ``step``."""
        versions.set_boundary(self)
        self._cross_boundary()

    def step(self, closure: Any = None) -> None:
        """Runs stock's step, after all gradients have crossed the outer tiers."""
        if self.hzero.gradients.waiting:
            self._cross_boundary()
        self._stepping = True
        try:
            self.hzero.before_step(self._stepped(), self._gradient_of)
            with blaming():  # the norm's all-reduce is not a hop of hzero
                super().step(closure)
        except Exception as error:  # a caller that catches it starts a new window
            if isinstance(error, DivergenceError):  # as stock discards a step; weights stay as they were
                self._overflow_clean_up(self.loss_scale)
            self._new_window()
            raise
        finally:
            self._stepping = False
        self.hzero.after_step(done=not self.overflow)
        self._new_window()
        self.hzero.gather_kept_whole()
        self.hzero.lanes.before_others()
        if self.hzero.logged_hops.wanted():  # as the logger does for every collective of DeepSpeed
            self.hzero.settle()

    def _update_scale(self, has_overflow: bool = False) -> None:
        """Updates the loss scale as stock does, and reports a step that overflowed. See `Guard.discarded`."""
        if has_overflow:
            self.hzero.guard.discarded(self.loss_scaler, self._stepped(), self._gradient_of)
        super()._update_scale(has_overflow)

    def _apply_muon_to_accumulated_grads(self) -> None:
        """Replaces the gradients of Muon's matrices by their updates before the norm. See `hzero.deepspeed.muon`."""
        if not self.use_muon:
            return
        from hzero.deepspeed.muon import Shard

        shards = []
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
                shards.append(Shard(param, shard, momenta.narrow(0, start, shard.numel())))
        assert self.hzero.orthogonalizer is not None  # it exists if a parameter uses Muon
        self.hzero.orthogonalizer.orthogonalize(shards, self.muon_beta, self.muon_ns_method)

    def _new_window(self) -> None:
        self.hzero.gradients.clear()
        self._arrived.clear()

    def _gradient_of(self, weight: Any) -> torch.Tensor:
        return self._get_fp32_grad_state_partition(weight.param, True)[0]  # type: ignore[no-any-return]

    def _stepped(self) -> list[Managed]:
        """Parameters that the optimizer steps."""
        return self.hzero.of(itertools.chain.from_iterable(self.fp16_groups))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes gradients and starts a new accumulation window, unless stock's step makes the call.

        It also drops the remains of a backward that an exception has ended early.
        """
        if not self._stepping:
            self._new_window()
            for bucket in self.ipg_buckets.values():
                bucket.clear_params()
            while self.cut_short:
                self.exit_backward()
            if set_to_none and get_accelerator().is_synchronized_device():
                # Gradients that an error has left. Stock would use their stream, which these devices do not have.
                for param in itertools.chain.from_iterable(self.fp16_groups):
                    param.grad = None
        super().zero_grad(set_to_none)

    @property
    def cut_short(self) -> bool:
        """Whether an exception has ended the last backward early. Valid between backwards."""
        return bool(self._backward_active_depth > 0)

    @torch.no_grad()
    def _cross_boundary(self) -> None:
        with get_accelerator().stream(self.reduce_and_partition_stream):
            self.hzero.gradients.finish(self.communication_data_type, float(self.loss_scale), self._deliver)
            if self.offload_optimizer:
                self._offload()
            self._silence()
            # The host is about to wait anyway, and no weight has been stepped yet.
            with self.hzero.gradients.all_or_nothing():
                self.hzero.verify()
        if not get_accelerator().resolves_data_dependency():
            self.reduce_and_partition_stream.synchronize()

    def _deliver(self, weights: list[Parameter], shards: list[torch.Tensor]) -> None:
        """Adds shards to stock's gradients. The first shard of a window replaces the gradient of the last window.

        Stock decides this by the number of the micro-batch. A parameter whose first gradient of a window arrives in a later
        micro-batch would then be added to the old gradient.
        """
        sums = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        for weight, shard in zip(weights, shards):
            total, kept = shard.to(self.gradient_accumulation_dtype), sums[weight.key][: shard.numel()]
            if weight.key in self._arrived:  # on the device, since sums on the host are slow
                total = kept.to(shard.device, non_blocking=True).add_(total)
            kept.copy_(total, non_blocking=True)
        self._arrived.update(weight.key for weight in weights)

    def _offload(self) -> None:
        """Moves gradients to the masters on the host, with stock's function."""
        arrived = [param for param in itertools.chain.from_iterable(self.fp16_groups) if param.ds_id in self._arrived]
        sums, device = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition, current_device()
        with attributes((self, "micro_step_id", 0)):
            super().partition_grads(arrived, [sums[param.ds_id].to(device) for param in arrived])

    def _silence(self) -> None:
        """Zeroes the shards of parameters that received no gradient in this window, whether they require one now or not.

        Stock keeps their gradients of the previous step, and would apply them again. Stock also drops the gradient of a
        parameter that was frozen later in the window, but torch's optimizers apply it.
        """
        shards = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        for number, group in enumerate(self.fp16_groups):
            for param in group:
                if param.ds_id not in self._arrived:
                    shards[param.ds_id].zero_()
                    if self.offload_optimizer:
                        self.norm_for_param_grads.pop(self.get_param_id(param), None)  # left by an abandoned window
                        super()._get_fp32_grad_state_partition(param, release_swap_buffers=True)[0].zero_()
            if not self.offload_optimizer:
                self.averaged_gradients[number] = [shards[param.ds_id] for param in group]

    def _get_fp32_grad_state_partition(self, param: ZeroParameter, release_swap_buffers: bool) -> Any:
        self._before_reading([param])
        return super()._get_fp32_grad_state_partition(param, release_swap_buffers)

    def update_fp32_grad_for_param_vectorized(self, update_func: Any, param_list: list[ZeroParameter]) -> None:
        """Calls stock's function. See `_before_reading`."""
        self._before_reading(param_list)
        super().update_fp32_grad_for_param_vectorized(update_func, param_list)

    def get_fp32_grad_partitions(self) -> Any:
        """Calls stock's function. See `_before_reading`."""
        self._before_reading(itertools.chain.from_iterable(self.fp16_groups))
        return super().get_fp32_grad_partitions()

    def _before_reading(self, params: Iterable[ZeroParameter]) -> None:
        """Waits for reduced gradients before a user reads them.

        Raises:
            RuntimeError: A gradient is still a partial sum over its scope.
        """
        for param in params:
            if self.hzero.gradients.holds(param.ds_id):
                scope = param.hzero_managed.route.plan.gradients_scope
                raise RuntimeError(
                    f"hzero: the gradient of parameter {param.ds_id} is a partial sum over its {scope} until the accumulation "
                    "boundary. Read it after the backward of the last micro-batch, before step(); with "
                    "managed_gradient_accumulation false, after optimizer.finalize_gradient_accumulation_boundary()"
                )
        # Adds the shards of the micro-batches so far to stock's gradients.
        with torch.no_grad(), get_accelerator().stream(self.reduce_and_partition_stream):
            self.hzero.gradients.wait_reduced()

    # ---- weights ----------------------------------------------------------------------------------------------------

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        """Starts the refresh of a sub-group's new weights. It overlaps with the steps of other sub-groups.

        On CPU the next gather starts it instead. A script may end after any step, and torch.distributed aborts if a process
        group is destroyed while gloo has a collective in flight.
        """
        super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)
        if self._stepping:
            self.hzero.note_step(self.fp16_groups[sub_group_id])
            if not get_accelerator().is_synchronized_device():
                self.hzero.weights.refresh_stepped(self.hzero.of(self.fp16_groups[sub_group_id]))

    def _restore_from_bit16_weights(self) -> None:
        """Drops state of the old weights. It is the last call of a load without optimizer states."""
        super()._restore_from_bit16_weights()
        self.hzero.after_load()
        self._new_window()

    def checkpoint_event_epilogue(self) -> None:
        """Gathers the parameters that are kept whole after a save or a load, as stock does."""
        self.hzero.gather_kept_whole()

    def state_dict(self) -> dict[str, Any]:
        """Returns stock's state and, if there is any, the stage's. See `StageState.state_dict`."""
        state: dict[str, Any] = super().state_dict()
        seeds = self.hzero.state_dict()
        return state if seeds is None else {**state, KEY: seeds}

    def load_state_dict(
        self, state_dict_list: list[dict[str, Any]] | None, load_optimizer_states: bool = True, **kwargs: Any
    ) -> None:
        """Loads stock's state. Drops secondary partitions, waiting gradients and residuals, which belong to the old weights.

        Raises:
            ConfigError: Another optimizer has written the states.
        """
        saved = state_dict_list[self.hzero.plan.rank] if state_dict_list else {}  # None for a universal checkpoint
        if saved and load_optimizer_states:
            _check_same(self.optimizer, saved[OPTIMIZER_STATE_DICT])
        self._partition_all_parameters()
        self.hzero.lanes.join()
        super().load_state_dict(state_dict_list, load_optimizer_states, **kwargs)
        self.hzero.after_load()
        self._new_window()
        self.hzero.load_state_dict(saved.get(KEY))

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Offloads states as stock does, and frees secondary partitions. Their next use rebuilds them."""
        self.hzero.lanes.join()
        super().offload_states(*args, **kwargs)
        self.hzero.drop_gathered()
        self.hzero.weights.free()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Reloads states as stock does. The next use of secondary partitions rebuilds them."""
        super().reload_states(non_blocking)
        self.hzero.note_edit()


@on_all_ranks()
def _check_same(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Refuses states with other parameter groups, or without an entry that this optimizer needs."""
    found, groups = saved["param_groups"], optimizer.param_groups
    if len(found) != len(groups):
        raise ConfigError(
            f"checkpoint: found {len(groups)} parameter groups in the optimizer; expected {len(found)}, as in the checkpoint"
        )
    kept = optimizer.state.values() if saved["state"] else ()  # empty if no step has been made
    needed = set(optimizer.defaults).union(*kept)
    if lacking := sorted(needed.difference(*found, *saved["state"].values())):
        raise ConfigError(
            f"checkpoint: found optimizer {type(optimizer).__name__} and states without {some(lacking, 4)}; expected the "
            "optimizer that has written them"
        )
