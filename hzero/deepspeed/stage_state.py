"""Connects DeepSpeed's parameters to the engine, so that DeepSpeed gathers them from resident weights.

DeepSpeed partitions every parameter over the world. These partitions are the primary shards. DeepSpeed's coordinator calls
functions that `zero.Init` has set on each parameter; this module replaces them. The first request for a parameter of a layer
gathers the whole layer, which is a unit. The coordinator sees only the parameters that it has requested. The others wait in
the unit.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, cast
from weakref import ref

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, free_param, register_external_parameter
from deepspeed.runtime.zero.partitioned_param_coordinator import InflightParamRegistry
from deepspeed.utils import z3_leaf_module

from hzero.calls import attributes
from hzero.codecs.codec import FLOAT_DTYPES
from hzero.codecs.formats import owned_numel
from hzero.comm import lasting, shared_lanes
from hzero.config import HZeroConfig
from hzero.deepspeed import autoep, autotp
from hzero.deepspeed.refusals import check_partition
from hzero.engine.engine import PASS, Engine, Owners, Traffic
from hzero.engine.parameter import Parameter, Route, routes_of
from hzero.engine.weights import Unsharded
from hzero.errors import is_rank_0
from hzero.program.shards import ShardPlan
from hzero.sequence import detacher

#: A message with this many elements gets no further unit. Its transfer then takes longer than the latency of a hop.
_MESSAGE_NUMEL = 1 << 20
#: Larger values, and values that are not finite, are codes.
_LARGEST_WEIGHT = 2.0**20
#: A torch.nn.Parameter with DeepSpeed's attributes (ds_id, ds_tensor, ds_status and so on).
ZeroParameter: TypeAlias = Any


@dataclass(eq=False, kw_only=True)
class Managed(Parameter):
    """One parameter that an engine gathers. DeepSpeed's parameter refers to it by the attribute ``hzero_managed``.

    Attributes:
        param: DeepSpeed's parameter.
        owner: The engine that gathers it.
        stock: DeepSpeed's replaced functions, by name.
        inexact: Whether ``param.data`` has been decoded from a lossy codec, while the parameter is available.
        unit: The layer whose parameters are gathered together. None: the parameter is gathered when it is requested.
        whole: The gathered parameter, until a handle takes it or the unit is dropped.
        layers: Layers that request the parameter although it belongs to a module inside them.
    """

    param: ZeroParameter
    owner: StageState = field(init=False)
    stock: dict[str, Any] = field(default_factory=dict)
    inexact: bool = False
    unit: Unit | None = None
    whole: Whole | None = None
    layers: list[torch.nn.Module] = field(default_factory=list)

    def attach(self, owner: StageState) -> None:
        """Replaces DeepSpeed's functions."""
        self.owner, param = owner, self.param
        self.stock = {name: getattr(param, name) for name in ("all_gather_coalesced", "all_gather", "partition")}
        param.all_gather_coalesced, param.all_gather, param.partition = owner.gather, self.all_gather, self.partition
        param.hzero_managed = self

    def detach(self) -> None:
        """Restores DeepSpeed's functions, also if a failed gather has left the parameter in flight."""
        self.put_away(inexact=True)
        self.whole = None
        if self.param.ds_status == ZeroParamStatus.INFLIGHT:
            self.param.ds_status = ZeroParamStatus.NOT_AVAILABLE
        for name, function in self.stock.items():
            setattr(self.param, name, function)
        del self.param.hzero_managed
        for layer in self.layers:
            layer._external_params.pop(id(self.param), None)  # type: ignore[operator, union-attr]
        if self.unit is not None:
            self.unit.members.remove(self)

    def all_gather(self, param_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        """``param.all_gather``. Gathers resident weights for a forward outside the parameter's module, else exact shards."""
        in_forward = getattr(self.owner.module._parameters, "_in_forward", False)  # DeepSpeed's flag
        if param_list is None and in_forward and self.param.ds_status == ZeroParamStatus.NOT_AVAILABLE:
            return self.owner.gather([self.param]).wait()
        return self.stock["all_gather"](param_list, *args, **kwargs)

    def partition(self, *args: Any, free_data: bool = True, **kwargs: Any) -> None:
        """``param.partition``. Stock's function calls `partition`."""
        if not args and not kwargs and free_data and self.param.ds_status == ZeroParamStatus.AVAILABLE:
            with lasting():
                # The same as stock, without the log messages that stock formats but does not print.
                free_param(self.param)
            self.gone()
        else:
            self.stock["partition"](*args, free_data=free_data, **kwargs)

    def put_away(self, inexact: bool = False) -> None:
        """Partitions the parameter if it is available and not in use. With ``inexact``, only if it has been decoded."""
        param = self.param
        available = param.ds_status == ZeroParamStatus.AVAILABLE and not param.ds_active_sub_modules
        if available and (self.inexact or not inexact):
            param.partition()

    def drop(self) -> None:
        """Drops the gathered parameter, since its shards have changed."""
        self.whole = None
        if self.unit is not None:
            self.unit.waiting.discard(self)

    def gone(self) -> None:
        """Notes that DeepSpeed has partitioned the parameter."""
        self.inexact = False
        if self.unit is not None:
            self.unit.out.discard(self)


def managed_of(params: Iterable[ZeroParameter]) -> list[Managed]:
    """Returns the `Managed` of each parameter that an engine with a block gathers. Parameters of stock engines have none."""
    return [param.hzero_managed for param in params if hasattr(param, "hzero_managed")]


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
        _measure(found[-1])
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

    Raises:
        ConfigError: A parameter is partitioned over other ranks.
    """

    ADVICE = (
        "change weights inside deepspeed.zero.GatheredParameters with a modifier_rank, or call "
        "hzero.state(engine).note_edit() on all ranks afterwards"
    )

    def __init__(
        self, module: torch.nn.Module, config: HZeroConfig, group: dist.ProcessGroup | None, bucket_numel: int
    ) -> None:
        owners = Owners.of(group, config.topology)
        check_partition(module, owners.ranks)
        plan = ShardPlan.from_config(config, owners.grid, owners.rank)
        parts = autoep.parts(module, config, owners.world)
        of_experts = {param: parts[0][0] for param in module.parameters() if autoep.is_expert(param)}
        packed = packed_parameters(module, lambda param: of_experts.get(param, plan).rank)
        routes, codes = routes_of(module, plan, of_experts.get, packed)
        self.module = module
        lanes = shared_lanes(device := async_accelerator(), config.transport, config.order)
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
            self.announce(f"{self.described()}{of_parts}{how}{as_bytes}")
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
        """Frees payloads and accumulators, and restores DeepSpeed's functions. The model's next engine may be a stock one."""
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
            if _measure(managed):  # users can resize a parameter inside GatheredParameters
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


def _shard(param: ZeroParameter, dtype: torch.dtype) -> torch.Tensor:
    """Returns this rank's partition of a parameter, flat, on the device of the parameter."""
    return param.ds_tensor.detach().view(-1).view(dtype).to(param.device)  # type: ignore[no-any-return]


def _measure(managed: Managed) -> bool:
    """Updates the properties that may change. Returns whether the size has changed."""
    param = managed.param
    code_bytes = param.ds_tensor.dtype.itemsize if managed.dtype == torch.uint8 else 1
    changed = (param.ds_numel, code_bytes) != (managed.numel, managed.code_bytes)
    managed.numel, managed.code_bytes = param.ds_numel, code_bytes
    managed.trained, managed.urgent = param.requires_grad, param.ds_persist
    return changed


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
    Available data may have been decoded. A reader that may write back must not read it, and must not write to the resident
    copy. So such parameters are partitioned first, and DeepSpeed then gathers their primary shards.
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
            _measure(managed)
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


# ---- units ---------------------------------------------------------------------------------------------------------------


class Unit:
    """A layer whose parameters are gathered together.

    Gathered parameters wait here until DeepSpeed requests them. So DeepSpeed never has a parameter that it has not requested,
    even if a forward skips modules of the layer. Parameters that DeepSpeed has released are also kept until the unit is
    dropped, since a backward after activation checkpointing uses them again.

    Args:
        layer: The layer.
        members: The parameters.

    Attributes:
        layer: As given.
        members: As given.
        waiting: Gathered parameters that DeepSpeed has not requested yet.
        out: Parameters that DeepSpeed has.
        used: Whether DeepSpeed has had a parameter since the unit was gathered.
    """

    def __init__(self, layer: torch.nn.Module, members: list[Managed]) -> None:
        self.layer, self.members = layer, members
        self.waiting: set[Managed] = set()
        self.out: set[Managed] = set()
        self.used = False

    def give(self, managed: Managed) -> None:
        """Notes that DeepSpeed has received a parameter."""
        self.used = True
        self.waiting.discard(managed)
        self.out.add(managed)

    def drop(self) -> None:
        """Drops all gathered parameters. Those in use by DeepSpeed remain until it releases them."""
        for managed in self.members:
            managed.whole = None
        self.waiting.clear()
        self.out.clear()
        self.used = False


class Units:
    """The gathered units. DeepSpeed's requests decide when a unit is dropped, so all ranks decide the same.

    Attributes:
        of: The unit of a layer, and of each module inside it whose parameters all belong to the unit.
        held: Layers that a forward or backward uses, whose parameters DeepSpeed has requested together.
        begun: Whether the current forward or backward has gathered parameters.
    """

    def __init__(self) -> None:
        self.begun = False
        self._gathered: dict[Unit, None] = {}
        self._place = -1  # last key of the unit in use; -1 before a forward
        self.of: dict[torch.nn.Module, Unit] = {}
        self.held: set[torch.nn.Module] = set()

    def inside(self, module: torch.nn.Module) -> bool:
        """Returns whether a module is inside a layer in `held`. DeepSpeed then has nothing to request or to release."""
        unit = self.of.get(module)
        return unit is not None and unit.layer in self.held and module is not unit.layer

    def widened(self, wanted: Iterable[Managed]) -> list[list[Managed]]:
        """Returns the parameters to gather for a request, by message. They include the other parameters of their units.

        A message ends with a unit once it has `_MESSAGE_NUMEL` elements, so a large layer waits only for its message. The
        messages that are needed next are first.
        """
        found = {managed.key: managed for managed in wanted if managed.whole is None}
        for unit in {managed.unit for managed in found.values()} - {None}:
            for other in unit.members:  # type: ignore[union-attr]
                if other.whole is None and other.param.ds_status == ZeroParamStatus.NOT_AVAILABLE:
                    found[other.key] = other
        messages: list[list[Managed]] = []
        filled = 0
        for key in sorted(found):
            if not messages or (filled >= _MESSAGE_NUMEL and found[key].unit is not messages[-1][-1].unit):
                messages.append([])
                filled = 0
            messages[-1].append(found[key])
            filled += found[key].numel
        ahead = sum(message[0].key <= self._place for message in messages)
        return messages[ahead:] + messages[:ahead][::-1]

    def bring(self, managed: Managed) -> None:
        """Notes that a gather of a parameter has started."""
        if managed.unit is not None:
            self._gathered[managed.unit] = None
            managed.unit.waiting.add(managed)

    def request(self, requested: Collection[Managed]) -> None:
        """Drops units that are complete, if DeepSpeed requests parameters of other units.

        The last layer of a forward thus remains for its backward, if the modules after it have no unit.
        """
        now = {managed.unit for managed in requested} - {None}
        if now:
            others = [unit for unit in self._gathered if unit not in now]
            self._drop(unit for unit in others if unit.used and not unit.waiting and not unit.out)

    def use(self, module: torch.nn.Module) -> None:
        """Drops the other units before a module with a unit is used.

        This includes incomplete units, of which a forward has skipped a module or DeepSpeed has kept one for its next use.
        Prefetched units that are not used yet remain. Handles cannot decide this, since ranks wait for them in different orders.
        """
        if (now := self.of.get(module)) is not None:
            self._place = now.members[-1].key if now.members else self._place
            self._drop(unit for unit in self._gathered if unit is not now and unit.used)

    def end(self) -> None:
        """Drops the units that have been used, at the end of a forward or backward."""
        self.held.clear()
        self.begun = False
        self._place = -1
        self._drop(unit for unit in self._gathered if unit.used)

    def drop(self) -> None:
        """Drops all units."""
        self._drop(self._gathered)
        self.end()

    def _drop(self, units: Iterable[Unit]) -> None:
        for unit in list(units):
            unit.drop()
            del self._gathered[unit]


def layers_of(module: torch.nn.Module, limit: int) -> list[torch.nn.Module]:
    """Finds the layers of a model whose parameters DeepSpeed has partitioned, in module order.

    In models of transformers, layers are the modules whose class is in ``_no_split_modules``. The list may also contain a whole
    encoder, so the innermost modules count. Otherwise a layer is a module whose class repeats in a ``ModuleList`` or
    ``Sequential``. A layer of more than ``limit`` elements is divided into its children. DeepSpeed's leaf modules are
    excluded, since DeepSpeed requests their parameters together anyway.
    """
    names = {name for one in module.modules() for name in getattr(one, "_no_split_modules", None) or ()}

    def found(parent: torch.nn.Module) -> Iterator[torch.nn.Module]:
        in_list = isinstance(parent, (torch.nn.ModuleList, torch.nn.Sequential))
        kinds = Counter(type(child) for child in parent._modules.values()) if in_list else Counter()
        for child in parent.children():
            if z3_leaf_module(child):
                continue
            has_named = any(type(one).__name__ in names for one in child.modules() if one is not child)
            if not has_named and (type(child).__name__ in names or kinds[type(child)] > 1):
                yield from fitting(child)
            else:
                yield from found(child)

    def fitting(layer: torch.nn.Module) -> Iterator[torch.nn.Module]:
        if sum(param.ds_numel for param in layer.parameters()) > limit:  # type: ignore[attr-defined]
            for child in layer.children():
                yield from fitting(child)
        elif sum(any(True for _ in one.parameters(recurse=False)) for one in layer.modules()) > 1:
            yield layer  # DeepSpeed requests the parameters of one module together anyway

    return list(found(module))


def _why_by_module(module: torch.nn.Module, config: HZeroConfig) -> str:
    if config.by_module or not layers_of(module, sys.maxsize):
        return config.by_module or "no layers found"
    return f"no layer within unit_numel {config.unit_numel:,}"


def form_units(units: Units, module: torch.nn.Module, layers: Iterable[torch.nn.Module]) -> None:
    """Makes a unit of each layer, without parameters that other parts of the model share or that are kept whole.

    DeepSpeed then requests all parameters of a unit when the forward or backward of the layer begins.
    """
    users: dict[torch.nn.Parameter, set[int]] = {}
    inside = {one: number for number, layer in enumerate(layers) for one in layer.modules()}
    for one in module.modules():
        for param in one._parameters.values():
            if param is not None:
                users.setdefault(param, set()).add(inside.get(one, -1))
    for number, layer in enumerate(layers):
        inner: list[ZeroParameter] = [param for param in layer.parameters() if users[param] == {number}]
        unit = Unit(layer, managed_of(param for param in inner if not param.ds_persist))
        for member in unit.members:
            member.unit = unit
        for param in inner:
            register_external_parameter(layer, param)
            param.hzero_managed.layers.append(layer)
        covered = set(inner)
        units.of.update((one, unit) for one in layer.modules() if covered.issuperset(one.parameters(recurse=False)))
        units.of[layer] = unit


# ---- handles -------------------------------------------------------------------------------------------------------------


class Gathering:
    """One gather of whole parameters, maybe of two layers. The `Whole` of each parameter has the only reference to its memory."""

    def __init__(self, wait: Unsharded) -> None:
        self._wait = wait
        self._parts: list[ref[Whole]] = []

    def add(self) -> Whole:
        """Creates the part of the next parameter."""
        part = Whole(self)
        self._parts.append(ref(part))
        return part

    def wait(self) -> None:
        """Makes the current stream wait for the parts; any number of times."""
        flats = self._wait()
        for weak, flat in zip(self._parts, flats):
            if (part := weak()) is not None:
                part.flat = flat
        flats.clear()


class Whole:
    """A whole parameter. ``flat`` is ``[world * chunk]`` after `Gathering.wait`, None before."""

    def __init__(self, gathering: Gathering) -> None:
        self.gathering = gathering
        self.flat: torch.Tensor | None = None


class GatherHandle:
    """Handle on which DeepSpeed's coordinator waits for some parameters of a gather."""

    def __init__(self, gathering: Gathering, managed: Sequence[Managed]) -> None:
        self._gathering, self.params = gathering, {one.param for one in managed}
        self._parts = [(one, one.whole) for one in managed]
        for one in managed:
            if one.unit is None:
                one.whole = None

    def wait(self, handle_dependency: bool = True) -> None:
        """Makes the parameters available.

        DeepSpeed's ``handle_dependency`` has no effect. The decoded tensors alias no communication buffer, and the current
        stream waits for them.
        """
        if not self._parts:
            return
        self._gathering.wait()
        with lasting():
            for one, part in self._parts:
                assert part is not None and part.flat is not None, "`gather` has started the gather"
                param = one.param
                flat = part.flat.view(param.ds_tensor.dtype)  # parameters of codes arrive as bytes
                param.data = flat[: param.ds_numel].view(param.ds_shape)
                param.ds_status = ZeroParamStatus.AVAILABLE
                if one.unit is not None and one.whole is part:
                    one.unit.give(one)
        self._parts = []  # frees the tensors


class Handles:
    """Several handles as one. Some may be DeepSpeed's."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def of(self, param: ZeroParameter) -> Any:
        """Returns the handle of the message that contains a parameter. If there is none, returns this object."""
        return next((one for one in self._handles if isinstance(one, GatherHandle) and param in one.params), self)

    def wait(self, **how: Any) -> None:
        """Waits on each handle."""
        with lasting():
            for handle in self._handles:
                handle.wait(**how)


class InFlight(InflightParamRegistry):  # type: ignore[misc]
    """DeepSpeed's registry of handles. A module waits only for the messages of its parameters."""

    def __setitem__(self, param: ZeroParameter, handle: Any) -> None:
        super().__setitem__(param, handle.of(param) if isinstance(handle, Handles) else handle)


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
