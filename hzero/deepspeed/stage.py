"""The stage: DeepSpeed's ZeRO-3 optimizer with tiered gradient reduction and resident weights."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from hzero.block import KEY
from hzero.comm import blaming, shared_watchdog
from hzero.deepspeed import versions
from hzero.deepspeed.parameters import ZeroParameter
from hzero.deepspeed.refusals import mixed_types
from hzero.deepspeed.state import StageState
from hzero.engine.guard import DivergenceError
from hzero.engine.parameter import Parameter
from hzero.validation import on_all_ranks


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
        self._arrived: set[int] = set()  # ids of parameters whose gradients of this window stock has received,
        self._complete: set[int] = set()  # and of those that the last micro-step has brought
        try:
            super().__init__(*args, **kwargs)
        except AssertionError:
            trained = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
            if (found := mixed_types(trained, self.param_names)) is not None:
                with on_all_ranks():
                    raise found from None
            raise
        self.hzero = self.parameter_offload.hzero
        # Stock gathers persistent parameters flat over the world after each step, which takes 30 s on 32 nodes
        # (deepspeedai/Megatron-DeepSpeed#384). Here they go by tier and codec; see `step`.
        self.persistent_parameters = []
        self.hzero.gradients.bucket_numel = self.reduce_bucket_size
        self.hzero.weights.mark_stale()  # stock has moved the primary shards

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
                self.hzero.weights.weights_of(params_to_reduce),
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
        self.hzero.weights.end_backward()
        self.hzero.place()
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
        self.hzero.weights.gather_kept_whole()
        self.hzero.place()
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
        self._complete.clear()

    def _gradient_of(self, weight: Parameter) -> torch.Tensor:
        (param,) = self.hzero.weights.params_of([weight])
        shard: torch.Tensor = self._get_fp32_grad_state_partition(param, True)[0]
        return shard

    def _stepped(self) -> list[Parameter]:
        """The parameters in the optimizer."""
        return self.hzero.weights.weights_of(itertools.chain.from_iterable(self.fp16_groups))

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
            self.hzero.gradients.boundary(self.communication_data_type, float(self.loss_scale), self._deliver)
            if self.offload_optimizer:
                self._offload_earlier()
            self._silence()
            # The host is about to wait anyway, and nothing has been stepped.
            with self.hzero.gradients.all_or_nothing():
                self.hzero.verify()
        if not get_accelerator().resolves_data_dependency():
            self.reduce_and_partition_stream.synchronize()

    def _deliver(self, weights: list[Parameter], shards: list[torch.Tensor]) -> None:
        """Delivers shards to stock, which must copy the first delivery of a window and add later ones.

        Later deliveries occur where every micro-step delivers, and where re-entrant checkpointing runs several epilogues
        in one backward. Stock decides by the number of the micro-step: it would add the first gradient of a parameter
        that was silent before to the remains of the last window.
        """
        params = self.hzero.weights.params_of(weights)
        for again in (False, True):
            chosen = [i for i, param in enumerate(params) if (param.ds_id in self._arrived) == again]
            with self._as_micro_step(int(again)):
                super().partition_grads(
                    [_Receiver(params[i]) for i in chosen],
                    [shards[i].to(self.gradient_accumulation_dtype) for i in chosen],
                )
        self._arrived.update(param.ds_id for param in params)
        if versions.at_boundary(self):
            self._complete.update(param.ds_id for param in params)

    def _offload_earlier(self) -> None:
        """Moves gradients to the host that only earlier micro-steps delivered; stock moves the last micro-step's only."""
        missing = self._arrived - self._complete
        earlier = [param for param in itertools.chain.from_iterable(self.fp16_groups) if param.ds_id in missing]
        sums = self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        device = get_accelerator().current_device_name()
        with self._as_micro_step(0):  # stock copies what it has onto itself, and then to the host
            super().partition_grads(
                [_Receiver(param) for param in earlier], [sums[param.ds_id].to(device) for param in earlier]
            )
        self._complete |= missing

    @contextlib.contextmanager
    def _as_micro_step(self, micro_step: int) -> Iterator[None]:
        before, self.micro_step_id = self.micro_step_id, micro_step
        try:
            yield
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
        self._settle_gradients()

    @torch.no_grad()
    def _settle_gradients(self) -> None:
        """Waits for the reductions of the micro-steps so far; shards that come of them are added where stock keeps them."""
        with get_accelerator().stream(self.reduce_and_partition_stream):
            self.hzero.gradients.settle()

    # ---- weights ----------------------------------------------------------------------------------------------------

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        """The weights of a sub-group are new: on a device their refresh starts, behind the steps of other sub-groups.

        On CPUs it starts with the next gather. A script may end after any step, and torch.distributed aborts if
        its groups are destroyed while gloo has a collective under way.
        """
        super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)
        if self._stepping:
            self.hzero.weights.mark_stale(self.fp16_groups[sub_group_id])
            if not get_accelerator().is_synchronized_device():
                self.hzero.weights.refresh_stepped(self.fp16_groups[sub_group_id])

    def _restore_from_bit16_weights(self) -> None:
        """The last call of stock's load without optimizer states: the weights have been replaced."""
        super()._restore_from_bit16_weights()
        self.hzero.replaced()
        self._new_window()

    def checkpoint_event_prologue(self) -> None:
        """Stock. A resumed run refreshes whole weights first, so one that goes on has to do the same after a save."""
        super().checkpoint_event_prologue()
        if self.hzero.config.refresh_differences and self.hzero.config.checkpoint is not None:
            self.hzero.weights.mark_stale()

    def checkpoint_event_epilogue(self) -> None:
        """Parameters kept whole are there again after a save or a load, as in stock."""
        self.hzero.weights.gather_kept_whole()

    def state_dict(self) -> dict[str, Any]:
        """Stock, and the stage's own state where it has some; see `StageState.state_dict`."""
        state: dict[str, Any] = super().state_dict()
        own = self.hzero.state_dict()
        return state if own is None else {**state, KEY: own}

    def load_state_dict(self, state_dict_list: list[dict[str, Any]] | None, *args: Any, **kwargs: Any) -> None:
        """Stock; then drops resident payloads, waiting gradients and residuals, which belong to the old weights."""
        own = state_dict_list[self.hzero.plan.rank].get(KEY) if state_dict_list else None
        self._partition_all_parameters()
        self.hzero.weights.resident.before_change()
        super().load_state_dict(state_dict_list, *args, **kwargs)
        self.hzero.replaced()
        self._new_window()
        self.hzero.load_state_dict(own)

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Stock; resident payloads are freed too, and rebuilt at their next use."""
        self.hzero.weights.resident.before_change()
        super().offload_states(*args, **kwargs)
        self.hzero.weights.drop()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Stock; resident payloads are rebuilt at their next use."""
        super().reload_states(non_blocking)
        self.hzero.weights.mark_stale()


class _Receiver:
    """A parameter as stock delivers a shard to it, which takes its ``grad`` away: the parameter's own may be a newer one."""

    def __init__(self, param: ZeroParameter) -> None:
        self._param, self.grad = param, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._param, name)
