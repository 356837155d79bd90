"""Connects DeepSpeed's parameters to the engine, so that DeepSpeed gathers them from secondary partitions.

DeepSpeed partitions every parameter over the world. These partitions are the primary shards. DeepSpeed's coordinator calls
functions that `zero.Init` has set on each parameter; this module replaces them. Layers are gathered whole, see
`hzero.deepspeed.units`.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from hzero.calls import attributes
from hzero.codecs.codec import FLOAT_DTYPES
from hzero.codecs.formats import owned_numel
from hzero.comm import lasting, shared_lanes
from hzero.config import FIT, HZeroConfig
from hzero.deepspeed import autoep, autotp
from hzero.deepspeed.handles import GatherHandle, Gathering, Handles, ZeroParameter
from hzero.deepspeed.refusals import check_partition
from hzero.deepspeed.units import Managed, Units, form_units, layers_of, managed_of
from hzero.engine.engine import PASS, Engine, Owners, Traffic
from hzero.engine.parameter import Parameter, Route, routes_of
from hzero.errors import is_rank_0
from hzero.program.shards import ShardPlan
from hzero.sequence import detacher

if TYPE_CHECKING:
    from hzero.program.choice import Load

#: Larger values, and values that are not finite, are codes.
_LARGEST_WEIGHT = 2.0**20


def managed_parameters(
    module: torch.nn.Module, routes: Mapping[torch.nn.Parameter, Route], codes: Collection[torch.nn.Parameter]
) -> list[Managed]:
    """Creates a `Managed` for each parameter of a model. They are not attached to an engine yet.

    Args:
        module: The model, whose parameters DeepSpeed has partitioned.
        routes: The route of each parameter. See `hzero.engine.parameter.routes_of`.
        codes: Parameters that are sent as bytes.
    """
    found = []
    param: ZeroParameter
    for name, param in module.named_parameters():
        dtype = torch.uint8 if param in codes else param.ds_tensor.dtype
        found.append(Managed(param.ds_id, name, 0, dtype, routes[param], partial(_shard, param, dtype), param=param))
        found[-1].measure()
    return found


def packed_parameters(module: torch.nn.Module, rank_of: Callable[[ZeroParameter], int]) -> set[ZeroParameter]:
    """Finds frozen parameters that hold packed codes in a floating dtype, by values that no weight has. Collective.

    A quantisation library may leave no other sign, and a lossy codec would destroy the codes. Read as floating-point numbers,
    codes have exponents of all sizes.

    Args:
        module: The model, whose parameters DeepSpeed has partitioned.
        rank_of: Returns this rank among the owners of a parameter.
    """
    params: list[ZeroParameter] = list(module.parameters())
    frozen = [param for param in params if param.dtype in FLOAT_DTYPES and not param.requires_grad]
    # Without the padding, which may have any values.
    owned = [one.ds_tensor[: owned_numel(one.ds_numel, len(one.ds_tensor), rank_of(one))] for one in frozen]
    odd = [not bool((shard.abs() < _LARGEST_WEIGHT).all()) for shard in owned]  # true for NaN
    marks = torch.tensor(odd, dtype=torch.uint8, device=current_device())
    if frozen:
        dist.all_reduce(marks, dist.ReduceOp.MAX)
    return {param for param, mark in zip(frozen, marks.tolist()) if mark}


def load_of(module: torch.nn.Module, config: HZeroConfig, accumulation: int, bucket_numel: int, offload: bool) -> Load:
    """Returns what decides about a layout.

    Args:
        module: The model, whose parameters DeepSpeed has partitioned.
        config: The block.
        accumulation: Micro-batches per step.
        bucket_numel: Elements that are refreshed, or reduced, together.
        offload: Whether the optimizer's states are on the host.
    """
    from hzero.program.choice import STATE_BYTES, Load

    params: list[ZeroParameter] = list(module.parameters())
    numels = tuple(param.ds_numel for param in params)
    trained = tuple(param.ds_numel for param in params if param.requires_grad)
    itemsize = max(params, key=lambda param: param.ds_numel).ds_tensor.element_size()
    layers = layers_of(module, config.unit_numel if config.unit == "layer" else 0)
    modules = sum(next(one.parameters(recurse=False), None) is not None for one in module.modules())
    buckets = -(-sum(numels) // bucket_numel)
    gathers = len(layers) + 1 if layers else modules
    return Load(numels, trained, itemsize, accumulation, gathers, buckets, 0 if offload else STATE_BYTES)


class StageState(Engine):
    """hzero's engine for one DeepSpeed engine with ZeRO-3.

    Attributes:
        module: As given.
        units: The layers that are gathered.
        logged_hops: Passes hops to DeepSpeed's ``comms_logger``, at the end of each step and in `settle`.

    Args:
        module: The model, whose parameters DeepSpeed has partitioned.
        config: The block.
        group: The ranks over which DeepSpeed partitions. None: the world.
        bucket_numel: Maximum number of elements in a message of a refresh. It is also the limit at the boundary until the
            optimizer sets another one.
        accumulation: Micro-batches per step.
        reduce_numel: Elements of the gradients that DeepSpeed reduces together.
        offload: Whether the optimizer's states are on the host.

    Raises:
        ConfigError: A parameter is partitioned over other ranks.
    """

    ADVICE = (
        "change weights inside deepspeed.zero.GatheredParameters with a modifier_rank, or call "
        "hzero.state(engine).note_edit() on all ranks afterwards"
    )

    def __init__(
        self,
        module: torch.nn.Module,
        config: HZeroConfig,
        group: dist.ProcessGroup | None,
        bucket_numel: int,
        accumulation: int,
        reduce_numel: int,
        offload: bool,
    ) -> None:
        owners = Owners.of(group, config.topology)
        check_partition(module, owners.ranks)
        lanes = shared_lanes(device := async_accelerator(), config.transport, config.order)
        choice: Any = None
        if config.preset == FIT:
            from hzero.engine.fit import fitted

            load = load_of(module, config, accumulation, min(bucket_numel, reduce_numel), offload)
            config, choice = fitted(config, owners, load, current_device(), lanes)
        plan = ShardPlan.from_config(config, owners.grid, owners.rank)
        parts = autoep.parts(module, config, owners.world)
        of_experts = {param: parts[0][0] for param in module.parameters() if autoep.is_expert(param)}
        packed = packed_parameters(module, lambda param: of_experts.get(param, plan).rank)
        routes, codes = routes_of(module, plan, of_experts.get, packed)
        self.module = module
        model = module, config, owners.world
        self._dimensions = [autotp.take_over(*model), autoep.take_over(*model, lanes)]
        self.orthogonalizer: Any = None
        if any(getattr(param, "use_muon", False) for param in module.parameters()):  # DeepSpeed marks what Muon trains
            from hzero.deepspeed.muon import Orthogonalizer

            self.orthogonalizer = Orthogonalizer(config, owners, module)
        self._make_whole = detacher(module)
        managed = managed_parameters(module, routes, codes)
        super().__init__(config, plan, owners, module, managed, bucket_numel, current_device(), device, parts=parts)
        self.weights.follows_writes = device is None  # on a device, the host would wait
        self._exact = self._evaluating = False  # see `exact` and `_enter_mode`
        for one in managed:
            one.attach(self)
        self._all = {one.key: one for one in managed}  # also parameters that a later engine has taken over
        # Weights that every device has completely need no gather.
        whole = all(route.plan.whole_copies for route in routes.values())
        # Not limited by ``stage3_max_live_parameters``, since any unit needs one live layer.
        layers = [] if whole else layers_of(module, plan.unit_numel)
        self.units = units = Units()
        form_units(units, module, layers)
        # These functions refer to the units only, so that a copy of the model does not copy the engine.
        self._hooks = [
            # It must run before DeepSpeed's hook, which prefetches.
            module.register_forward_pre_hook(torch.compiler.disable(lambda *_: units.drop()), prepend=True),
            module.register_forward_hook(torch.compiler.disable(lambda *_: units.end())),
        ]
        if config.exact_evaluation and any(one.route.lossy for one in managed):  # codec `none` is exact anyway
            self._hooks.append(module.register_forward_pre_hook(self._enter_mode, prepend=True))
        self.logged_hops = LoggedHops(self)
        if is_rank_0():
            kinds = Counter(type(layer).__name__ for layer in layers)
            named = ", ".join(f"{name} x {count}" for name, count in kinds.items())
            how = f"; gathers by layer ({named})" if layers else ""
            if plan.gather_hops() and not (whole or layers):
                how = f"; gathers by module ({_why_by_module(module, config)})"
            as_bytes = f"; parameters that hold codes, sent as bytes: {len(codes):,}" if codes else ""
            of_parts = "".join(f"; {one.channel} over {one}" for one, _ in parts)
            self.announce(f"{self.described()}{of_parts}{how}{as_bytes}", choice)
            self.warn_of_plan()

    @property
    def _managed(self) -> list[Managed]:
        """Parameters that this engine gathers. No later engine has taken them over."""
        return cast("list[Managed]", list(self.weights.parameters.values()))

    def after_load(self) -> None:
        """Forgets all state that is derived from the primary shards. See `Engine.after_load`."""
        self.drop_gathered()
        super().after_load()

    def memory(self, optimizer: Any = None) -> dict[str, int]:
        """Measures the bytes of each state on this rank, without transient buffers. See `Engine.memory`.

        Args:
            optimizer: The engine's optimizer, if it has one.
        """
        return {
            "primary weights": sum(managed.param.ds_tensor.nbytes for managed in self._managed),
            "gradient shard": _bytes([getattr(optimizer, "grad_partitions_flat_buffer", None)]),
            "optimizer": optimizer_bytes(optimizer),
            **super().memory(),
        }

    def destroy(self) -> None:
        """Frees the engine's memory and restores DeepSpeed's functions. The model's next engine may be a stock one."""
        for group in filter(None, self._dimensions):
            autotp.give_back(self.module, group)
        self._dimensions.clear()  # DeepSpeed may keep this object alive, but nothing uses these groups any more
        for hook in self._hooks:
            hook.remove()
        self._make_whole()
        try:
            self.close()
        finally:
            for managed in self._managed:
                self._release(managed)

    def _release(self, managed: Managed) -> None:
        managed.detach()
        self.weights.remove(managed)

    def of(self, params: Iterable[ZeroParameter]) -> list[Managed]:
        """Returns the `Managed` of each of DeepSpeed's parameters that belongs to this engine."""
        return [self._all[param.ds_id] for param in params if param.ds_id in self._all]

    # ---- written weights -----------------------------------------------------------------------------------------------

    def note_edit(self) -> None:
        """Notes that the user may have changed any weight. Their next use refreshes them. All ranks must make the same calls."""
        self.drop_gathered()
        self.weights.note_edit()

    def note_step(self, stepped: Iterable[ZeroParameter]) -> None:
        """Notes that a step has changed parameters, of which some may belong to a later engine. As `note_edit` otherwise."""
        changed = managed_of(stepped)
        for managed in changed:
            managed.drop()
        for owner in dict.fromkeys([self, *(managed.owner for managed in changed)]):
            owner.units.drop()
            owner.weights.note_step([managed for managed in changed if managed.owner is owner])

    def follow_writes(self, where: str = PASS) -> list[Parameter]:
        """Marks parameters that the user has written, and drops what was gathered of them. See `Engine.follow_writes`."""
        found = super().follow_writes(where)
        for managed in cast("list[Managed]", found):
            managed.drop()
        return found

    def drop_gathered(self) -> None:
        """Drops all gathered parameters, since all weights have changed."""
        for managed in self._managed:
            managed.drop()
        self.units.drop()

    # ---- exact weights -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """Context in which forward and backward gather the primary shards without codecs, as stock DeepSpeed does."""
        self.put_away_all()
        with attributes((self, "_exact", True)):
            try:
                yield
            finally:
                self.put_away_all()
        self.gather_kept_whole()

    @torch.compiler.disable
    def _enter_mode(self, module: torch.nn.Module, *_: Any) -> None:
        """Forward pre-hook for ``exact_evaluation``: in evaluation mode, forward and backward read exact weights.

        ``module.training`` of the whole model decides when its forward begins. If the mode has changed, parameters that are
        still available are partitioned. It starts no collective.
        """
        if self._evaluating == module.training:
            self._evaluating = not module.training
            self.put_away_all()

    def put_away_all(self) -> None:
        """Partitions all parameters that are available and not in use."""
        self.units.drop()
        for managed in self._managed:
            managed.put_away()

    # ---- gather --------------------------------------------------------------------------------------------------

    def gather(self, params: Iterable[ZeroParameter], **how: Any) -> Any:
        """Starts the gather of whole parameters for forward or backward (``param.all_gather_coalesced``).

        Args:
            params: Parameters that are not available. All ranks pass the same ones, in any order. They may belong to several
                engines.
            how: DeepSpeed's arguments. Only the exact path uses them.

        Returns:
            A handle. Its ``wait`` sets ``param.data`` of shape ``ds_shape`` and the status AVAILABLE.

        Raises:
            RuntimeError: A parameter is already available or in flight.
        """
        of_engines: dict[StageState | None, list[ZeroParameter]] = {}
        for param in sorted(params, key=lambda param: param.ds_id):
            managed = getattr(param, "hzero_managed", None)
            of_engines.setdefault(managed and managed.owner, []).append(param)
        # The functions of others belong to another engine or to DeepSpeed. By ids, since DeepSpeed's requests are sets, in whose
        # order ranks differ.
        handles = [
            self._start(managed_of(of), how) if owner is self else of[0].all_gather_coalesced(of, **how)
            for owner, of in of_engines.items()
        ]
        return handles[0] if len(handles) == 1 else Handles(handles)

    def _start(self, wanted: list[Managed], how: dict[str, Any]) -> Any:
        if wanted and (self._exact or self._evaluating or self.weights.plan.grid.world_size == 1):
            self.weights.await_change()
            with lasting():
                params = [managed.param for managed in wanted]
                # An evaluation in inference mode may wait for the gather, and a backward may use its tensors.
                return Handles([wanted[0].stock["all_gather_coalesced"](params, **how)])
        if not self.units.begun:
            self.units.begun = True
            self.follow_writes()
        for managed in wanted:
            if managed.param.ds_status != ZeroParamStatus.NOT_AVAILABLE:
                raise RuntimeError(f"hzero: cannot gather, since it is not partitioned: {managed.param.ds_summary()}")
            if managed.measure():  # users can resize a parameter inside GatheredParameters
                managed.drop()
                self.weights.note_edit([managed])
        self.units.request(wanted)
        for together in self.units.widened(wanted):
            for brought, wait in self.weights.unshard(together):
                gathering = Gathering(wait)
                for managed in cast("list[Managed]", brought):
                    managed.whole = gathering.add()
                    self.units.bring(managed)
        messages: dict[Gathering, list[Managed]] = {}
        for managed in wanted:
            managed.param.ds_status = ZeroParamStatus.INFLIGHT
            managed.inexact = managed.route.lossy
            assert managed.whole is not None, "the parameter or its unit has just been gathered"
            messages.setdefault(managed.whole.gathering, []).append(managed)
        return Handles([GatherHandle(gathering, brought) for gathering, brought in messages.items()])

    def gather_kept_whole(self) -> None:
        """Gathers the parameters that are kept whole, and waits. Scripts read them at any time without a request."""
        kept = (managed.param for managed in self._managed if managed.param.ds_persist)
        self.gather(param for param in kept if param.ds_status == ZeroParamStatus.NOT_AVAILABLE).wait()


def _why_by_module(module: torch.nn.Module, config: HZeroConfig) -> str:
    if config.by_module or not layers_of(module, sys.maxsize):
        return config.by_module or "no layers found"
    return f"no layer within unit_numel {config.unit_numel:,}"


def _shard(param: ZeroParameter, dtype: torch.dtype) -> torch.Tensor:
    """Returns this rank's partition of a parameter, flat, on the device of the parameter."""
    return param.ds_tensor.detach().view(-1).view(dtype).to(param.device)  # type: ignore[no-any-return]


# ---- functions that DeepSpeed calls with parameters of several engines ---------------------------------------------------


def order_request(stock: Any, coordinator: Any, params: Iterable[ZeroParameter], *args: Any, **kwargs: Any) -> None:
    """``PartitionedParameterCoordinator.__all_gather_params_``, which calls ``params[0].all_gather_coalesced(params)``.

    The parameters may belong to several engines, and their order differs between ranks. A parameter of an engine with a block
    comes first here. `StageState.gather` then divides the request in the same way on all ranks.
    """
    managed_first = sorted(params, key=lambda param: (not hasattr(param, "hzero_managed"), param.ds_id))
    stock(coordinator, managed_first, *args, **kwargs)


def gather_exactly(stock: Any, init: Any, param_list: list[ZeroParameter], *args: Any, **kwargs: Any) -> Any:
    """``Init._all_gather``, which stock's ``param.all_gather`` calls.

    DeepSpeed calls ``params[0].all_gather(params)``. The other parameters may belong to other engines, with or without a block.
    Available data may have been decoded. A reader that may write back must not read it, and must not write to the secondary
    partition. So such parameters are partitioned first, and DeepSpeed then gathers their primary shards.
    """
    found = managed_of(param_list)
    # DeepSpeed cannot free parameters in use. GatheredParameters of one fails when the context ends.
    idle = [managed for managed in found if not managed.param.ds_active_sub_modules]
    for managed in idle:
        stale = managed.inexact or managed.route.plan.whole_copies
        if managed.param.ds_status == ZeroParamStatus.AVAILABLE and stale:
            managed.param.partition()
    with lasting() if found else contextlib.nullcontext():
        gathered = stock(init, param_list, *args, **kwargs)
    for managed in idle:
        managed.inexact = False
    return gathered


def partition(
    stock: Any, init: Any, param_list: list[ZeroParameter], *, has_been_updated: bool = False, **how: Any
) -> None:
    """``Init._partition``, which stock's ``param.partition`` calls. Marks the payloads of written parameters as stale."""
    found = managed_of(param_list)
    for owner in dict.fromkeys(managed.owner for managed in found) if has_been_updated else ():
        owner.lanes.join()
    with lasting() if found else contextlib.nullcontext():
        stock(init, param_list, has_been_updated=has_been_updated, **how)
    for managed in found:
        managed.gone()
        if has_been_updated:
            managed.drop()
            managed.measure()
            managed.owner.weights.note_edit([managed])


def step_stock(stock: Any, optimizer: Any, sub_group_id: int) -> None:
    """Ends the step of a stock optimizer. A later engine with a block may gather its parameters."""
    found = [] if hasattr(optimizer, "hzero") else managed_of(optimizer.fp16_groups[sub_group_id])
    for owner in dict.fromkeys(managed.owner for managed in found):
        owner.lanes.join()
    stock(optimizer, sub_group_id)
    if found:
        found[0].owner.note_step([managed.param for managed in found])


def release_all(module: torch.nn.Module) -> None:
    """Detaches the parameters and layers of a module from an earlier engine that was not destroyed."""
    detacher(module)()
    autotp.give_back(module)
    for managed in managed_of(module.parameters()):
        managed.owner.lanes.drain()
        managed.owner._release(managed)


# ---- measurements --------------------------------------------------------------------------------------------------------


def _bytes(tensors: list[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def optimizer_bytes(optimizer: Any) -> int:
    """Returns the bytes of a ZeRO optimizer on this rank: float32 masters and states of the wrapped optimizer."""
    names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups")  # of stage 3, of stage 1
    masters = [master for name in names for master in getattr(optimizer, name, ())]
    inner = getattr(optimizer, "optimizer", None)
    states = [value for state in getattr(inner, "state", {}).values() for value in state.values()]
    return _bytes(masters) + _bytes(states)


class LoggedHops:
    """Passes the hops of a wire log to DeepSpeed's ``comms_logger``, in every `Traffic.settle`.

    Args:
        traffic: The lanes and wire log of the hops.
    """

    def __init__(self, traffic: Traffic) -> None:
        self._wire_log, self._logged = traffic.wire_log, dict[str, tuple[int, int, float]]()
        traffic.on_settle.append(self._log)

    @staticmethod
    def wanted() -> bool:
        """Returns whether the user has enabled the logger, for all operations or for ``hzero``."""
        logger = comm.comms_logger
        return bool(logger.enabled and (logger.prof_all or "hzero" in logger.prof_ops))

    def _log(self) -> None:
        """Logs the hops since the last call, with their mean bytes and mean time."""
        for entry in self._wire_log.entries() if self.wanted() else ():
            name = f"hzero {entry.role}, {entry.tier}, {entry.codec}"
            wire_bytes, hops, seconds = self._logged.get(name, (0, 0, 0.0))
            if hops > entry.hops:  # the wire log has been reset
                wire_bytes, hops, seconds = 0, 0, 0.0
            self._logged[name] = entry.wire_bytes, entry.hops, entry.seconds
            received, hops, seconds = entry.wire_bytes - wire_bytes, entry.hops - hops, entry.seconds - seconds
            for number in range(hops if received else 0):
                size = received // hops if number else received - received // hops * (hops - 1)
                # For `recv` the logger computes the bandwidth from these bytes, without a factor for the world size.
                comm.comms_logger.append("recv", name, max(seconds / hops * 1e3, 1e-6), size)


def async_accelerator() -> Any:
    """Returns DeepSpeed's accelerator, or None for synchronous devices such as CPUs."""
    accelerator = get_accelerator()
    return None if accelerator.is_synchronized_device() else accelerator


def current_device() -> torch.device:
    """Returns the device of this rank."""
    return torch.device(get_accelerator().current_device_name())
