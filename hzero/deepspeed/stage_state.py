"""DeepSpeed's parameters as the engine's: functions that DeepSpeed calls on them gather through resident weights.

DeepSpeed partitions every parameter over the world; these partitions are the primary shards. Its coordinator calls functions that
it has set on each parameter, which are replaced here. The first request for a parameter of a layer gathers the whole layer, its
unit. The coordinator sees only the parameters that it has requested; the others wait in the unit.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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

from hzero.comm import lasting
from hzero.config import HZeroConfig
from hzero.deepspeed import autoep, autotp
from hzero.deepspeed.muon import Orthogonalizer
from hzero.deepspeed.refusals import check_partition
from hzero.engine.engine import Engine, Owners, Traffic
from hzero.engine.parameter import Parameter, Route, routes_of
from hzero.engine.weights import Unsharded
from hzero.plan.shards import ShardPlan
from hzero.sequence import detacher
from hzero.validation import attributes, is_rank_0

#: Elements from which on a unit has a message of its own: its time on a link is then longer than a hop's latency.
_MESSAGE_NUMEL = 1 << 20
#: A torch.nn.Parameter with the attributes that DeepSpeed sets on it (ds_id, ds_tensor, ds_status and so on).
ZeroParameter: TypeAlias = Any


@dataclass(eq=False, kw_only=True)
class Managed(Parameter):
    """One parameter of DeepSpeed that an engine gathers; DeepSpeed's has it as its attribute ``hzero_managed``.

    Attributes:
        param: DeepSpeed's parameter.
        owner: Its engine.
        stock: DeepSpeed's functions that are replaced, by name.
        inexact: Whether ``param.data``, while it is available, came through a codec.
        unit: The layer that it is gathered with; None: it is gathered when it is requested.
        whole: The gathered parameter, until a handle takes it or the unit's turn is over.
        layers: Modules that request it with their other parameters, though it is a parameter of a module inside.
    """

    param: ZeroParameter
    owner: StageState = field(init=False)
    stock: dict[str, Any] = field(default_factory=dict)
    inexact: bool = False
    unit: Unit | None = None
    whole: Whole | None = None
    layers: list[torch.nn.Module] = field(default_factory=list)

    def attach(self, owner: StageState) -> None:
        """Puts functions in the place of DeepSpeed's."""
        self.owner, param = owner, self.param
        self.stock = {name: getattr(param, name) for name in ("all_gather_coalesced", "all_gather", "partition")}
        param.all_gather_coalesced, param.all_gather, param.partition = owner.gather, self.all_gather, self.partition
        param.hzero_managed = self

    def detach(self) -> None:
        """Gives the parameter DeepSpeed's functions back; a failed gather may have left it under way."""
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
        """``param.all_gather``: stock, see `gather_exactly`, unless a forward reads it outside its own module."""
        in_forward = getattr(self.owner.module._parameters, "_in_forward", False)  # as DeepSpeed notes it
        if param_list is None and in_forward and self.param.ds_status == ZeroParamStatus.NOT_AVAILABLE:
            return self.owner.gather([self.param]).wait()
        return self.stock["all_gather"](param_list, *args, **kwargs)

    def partition(self, *args: Any, free_data: bool = True, **kwargs: Any) -> None:
        """``param.partition``: stock, see `note_changes`."""
        if not args and not kwargs and free_data and self.param.ds_status == ZeroParamStatus.AVAILABLE:
            with lasting():
                # All that stock does here, without the texts that it makes and does not print.
                free_param(self.param)
            self.gone()
        else:
            self.stock["partition"](*args, free_data=free_data, **kwargs)

    def put_away(self, inexact: bool = False) -> None:
        """Partitions the parameter if it is available and not in use; with ``inexact``, only if it came through a codec."""
        param = self.param
        available = param.ds_status == ZeroParamStatus.AVAILABLE and not param.ds_active_sub_modules
        if available and (self.inexact or not inexact):
            param.partition()

    def drop(self) -> None:
        """Lets go of the gathered parameter, which has changed."""
        self.whole = None
        if self.unit is not None:
            self.unit.waiting.discard(self)

    def gone(self) -> None:
        """DeepSpeed has partitioned it."""
        self.inexact = False
        if self.unit is not None:
            self.unit.out.discard(self)


def managed_of(params: Iterable[ZeroParameter]) -> list[Managed]:
    """The parameters that engines with a block gather, of any engines; those of stock engines are left out."""
    return [param.hzero_managed for param in params if hasattr(param, "hzero_managed")]


def managed_parameters(
    module: torch.nn.Module, routes: Mapping[torch.nn.Parameter, Route], codes: Collection[torch.nn.Parameter]
) -> list[Managed]:
    """The parameters of a model, before an engine attaches itself to them.

    Args:
        module: The model, its parameters partitioned by DeepSpeed.
        routes: How each parameter travels, see `hzero.engine.parameter.routes_of`.
        codes: Parameters that travel by their bytes.
    """
    found = []
    param: ZeroParameter
    for name, param in module.named_parameters():
        if autoep.is_expert(param):
            continue
        dtype = torch.uint8 if param in codes else param.ds_tensor.dtype
        found.append(Managed(param.ds_id, name, 0, dtype, routes[param], partial(_shard, param, dtype), param=param))
        _measure(found[-1])
    return found


class StageState(Engine):
    """The engine of one DeepSpeed engine with ZeRO-3, whose parameters gather from resident weights.

    Attributes:
        module: As given.
        units: The layers that are gathered.
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
        "hzero.state(engine).mark_stale() on all ranks afterwards"
    )

    def __init__(
        self,
        module: torch.nn.Module,
        config: HZeroConfig,
        group: dist.ProcessGroup | None,
        bucket_numel: int,
        live_numel: int,
    ) -> None:
        owners = Owners.of(group, config.topology)
        check_partition(module, owners.ranks)
        plan = ShardPlan.from_config(config, owners.grid, owners.rank)
        routes, codes = routes_of(module, plan)
        self.module = module
        self._dimensions = [one.take_over(module, config, owners.world) for one in (autotp, autoep)]
        # DeepSpeed marks the parameters of models that it trains by Muon.
        uses_muon = any(getattr(param, "use_muon", False) for param in module.parameters())
        self.orthogonalizer = Orthogonalizer(config, owners) if uses_muon else None
        self._make_whole = detacher(module)
        managed = managed_parameters(module, routes, codes)
        super().__init__(config, plan, owners, module, managed, bucket_numel, current_device(), async_accelerator())
        self._exact = self._evaluating = False  # see `exact` and `_enter_mode`
        for one in managed:
            one.attach(self)
        experts: list[ZeroParameter] = [param for param in module.parameters() if autoep.is_expert(param)]
        self._experts = {param: param.all_gather_coalesced for param in experts}
        for param in self._experts:  # a request may name both kinds, and calls the function of any of them
            param.all_gather_coalesced = self.gather
        self._all = {one.key: one for one in managed}  # with those that a later engine has taken over
        # Weights that are whole on every device need no gather.
        whole = all(route.plan.whole_copies for route in routes.values())
        layers = [] if whole else layers_of(module, min(plan.unit_numel, live_numel))
        self.units = units = Units()
        form_units(units, module, layers)
        # Functions that hold nothing else, so that a copy of the model copies no engine.
        self._hooks = [
            # Before DeepSpeed's hook, which gathers ahead.
            module.register_forward_pre_hook(torch.compiler.disable(lambda *_: units.drop()), prepend=True),
            module.register_forward_hook(torch.compiler.disable(lambda *_: units.end())),
        ]
        if config.exact_evaluation and any(one.route.lossy for one in managed):  # codec `none` is exact anyway
            self._hooks.append(module.register_forward_pre_hook(self._enter_mode, prepend=True))
        self.logged_hops = LoggedHops(self)
        if is_rank_0():
            how = ""  # forward gathers weights
            if plan.gather_hops() and not whole:
                kinds = Counter(type(layer).__name__ for layer in layers)
                named = ", ".join(f"{name} x {count}" for name, count in kinds.items())
                how = f"; gathers by layer ({named})" if named else "; gathers by module"
            as_bytes = f"; parameters that hold codes, sent as bytes: {len(codes):,}" if codes else ""
            self.announce(f"{self.described()}{how}{as_bytes}")
            self.warn_of_plan()

    @property
    def _managed(self) -> list[Managed]:
        """The parameters that this engine gathers: no later engine has taken them over."""
        return cast("list[Managed]", list(self.weights.parameters.values()))

    def replaced(self) -> None:
        """As of `Engine`."""
        self.drop_gathered()
        super().replaced()

    def memory(self, optimizer: Any = None) -> dict[str, int]:
        """Measured bytes of each state on this rank, without transient buffers; see `Engine.memory`.

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
        """Frees payloads and accumulators, and restores the model to what DeepSpeed made; its next engine may be a stock one."""
        for group in filter(None, self._dimensions):
            autotp.give_back(self.module, group)
        self._dimensions.clear()  # DeepSpeed may hold this object, and nothing is sent over these groups any more
        for param, stock in self._experts.items():
            param.all_gather_coalesced = stock
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
        """This engine's, of DeepSpeed's parameters."""
        return [self._all[param.ds_id] for param in params if param.ds_id in self._all]

    # ---- staleness -----------------------------------------------------------------------------------------------

    def mark_stale(self, stepped: Iterable[ZeroParameter] | None = None) -> None:
        """Payloads of ``stepped``, which a step has changed, or of all, are rebuilt before their next use.

        A later engine may have taken over some of ``stepped``; then it keeps their payloads. All ranks must call this alike,
        since rebuilding is a collective.
        """
        marked = self._managed if stepped is None else managed_of(stepped)
        for managed in marked:
            managed.drop()
        for owner in dict.fromkeys([self, *(managed.owner for managed in marked)]):
            owner.units.drop()
            its = [managed for managed in marked if managed.owner is owner]
            owner.weights.mark_stale(its if stepped is not None else None)

    def drop_gathered(self) -> None:
        """Lets go of all that is gathered or under way, since all weights have changed."""
        for managed in self._managed:
            managed.drop()
        self.units.drop()

    # ---- exact weights -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def exact(self) -> Iterator[None]:
        """Inside, forward and backward gather the primary shards without codecs, as stock DeepSpeed does."""
        self.put_away_all()
        with attributes((self, "_exact", True)):
            try:
                yield
            finally:
                self.put_away_all()
        self.gather_kept_whole()

    @torch.compiler.disable
    def _enter_mode(self, module: torch.nn.Module, *_: Any) -> None:
        """With ``exact_evaluation`` a forward in evaluation mode, and its backward, read exact weights, as inside `exact`.

        The mode is that of the whole module (``module.training``) when its forward begins. If it has changed, what the other
        mode has left available is put away. No collective.
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
            params: Parameters that are not available, the same on all ranks in any order; of any engines.
            how: DeepSpeed's; only the exact path uses it.

        Returns:
            A handle whose ``wait`` sets ``param.data``, ``[ds_shape]``, and the status AVAILABLE.

        Raises:
            RuntimeError: A parameter is already available or under way.
        """
        of_engines: dict[StageState | None, list[ZeroParameter]] = {}
        for param in sorted(params, key=lambda param: param.ds_id):
            managed = getattr(param, "hzero_managed", None)
            of_engines.setdefault(managed and managed.owner, []).append(param)
        handle = self._start(managed_of(of_engines.pop(self, [])), how)
        if not of_engines:
            return handle
        # Their functions are those of their engine, or DeepSpeed's.
        others = [self._experts.get(of[0], of[0].all_gather_coalesced)(of, **how) for of in of_engines.values()]
        return Handles([handle, *others])

    def _start(self, wanted: list[Managed], how: dict[str, Any]) -> Any:
        if wanted and (self._exact or self._evaluating or self.weights.plan.grid.world_size == 1):
            self.weights.await_change()
            with lasting():
                params = [managed.param for managed in wanted]
                # An evaluation in inference mode may wait for it, and a backward may use what it gave.
                return Handles([wanted[0].stock["all_gather_coalesced"](params, **how)])
        for managed in wanted:
            if managed.param.ds_status != ZeroParamStatus.NOT_AVAILABLE:
                raise RuntimeError(
                    f"hzero: cannot gather a parameter that is not partitioned: {managed.param.ds_summary()}"
                )
            if _measure(managed):  # users can resize a parameter inside GatheredParameters
                managed.drop()
                self.weights.mark_edited(managed)
        self.units.request(wanted)
        for together in self.units.widened(wanted):
            for brought, wait in self.weights.unshard(together):
                gathering = Gathering(wait, self.lanes.streams is not None)
                for managed in cast("list[Managed]", brought):
                    managed.whole = gathering.add()
                    self.units.bring(managed)
        messages: dict[Gathering, list[Managed]] = {}
        for managed in wanted:
            managed.param.ds_status = ZeroParamStatus.INFLIGHT
            managed.inexact = managed.route.lossy
            assert managed.whole is not None, "it has just been gathered, or its unit has it"
            messages.setdefault(managed.whole.gathering, []).append(managed)
        return Handles([GatherHandle(gathering, brought) for gathering, brought in messages.items()])

    def gather_kept_whole(self) -> None:
        """Gathers the parameters that are kept whole, and waits: scripts read them at any time without a request."""
        kept = (managed.param for managed in self._managed if managed.param.ds_persist)
        self.gather(param for param in kept if param.ds_status == ZeroParamStatus.NOT_AVAILABLE).wait()


def _shard(param: ZeroParameter, dtype: torch.dtype) -> torch.Tensor:
    """This rank's partition of a parameter, flat, where the parameter is computed with."""
    return param.ds_tensor.detach().view(-1).view(dtype).to(param.device)  # type: ignore[no-any-return]


def _measure(managed: Managed) -> bool:
    """Takes over what may change of a parameter; whether its size has."""
    param = managed.param
    code_bytes = param.ds_tensor.dtype.itemsize if managed.dtype == torch.uint8 else 1
    changed = (param.ds_numel, code_bytes) != (managed.numel, managed.code_bytes)
    managed.numel, managed.code_bytes = param.ds_numel, code_bytes
    managed.trained, managed.urgent = param.requires_grad, param.ds_persist
    return changed


# ---- what DeepSpeed calls on lists of parameters, of any engines ---------------------------------------------------------


def gather_exactly(stock: Any, init: Any, param_list: list[ZeroParameter], *args: Any, **kwargs: Any) -> Any:
    """``Init._all_gather``, which stock's ``param.all_gather`` calls.

    DeepSpeed calls ``params[0].all_gather(params)``, and the others may belong to other engines, with or without a block.
    Available data may have been decoded. A reader that may write back must not see it, and must not write to the resident
    copy: such parameters are partitioned first, and DeepSpeed gathers their primary shards.
    """
    found = managed_of(param_list)
    # DeepSpeed cannot free those in use: a context over one of them fails when it ends.
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


def note_changes(
    stock: Any, init: Any, param_list: list[ZeroParameter], *, has_been_updated: bool = False, **how: Any
) -> None:
    """``Init._partition``, which stock's ``param.partition`` calls: payloads of written parameters become stale."""
    found = managed_of(param_list)
    for owner in dict.fromkeys(managed.owner for managed in found) if has_been_updated else ():
        owner.weights.before_change()
    with lasting() if found else contextlib.nullcontext():
        stock(init, param_list, has_been_updated=has_been_updated, **how)
    for managed in found:
        managed.gone()
        if has_been_updated:
            managed.drop()
            _measure(managed)
            managed.owner.weights.mark_edited(managed)


def note_step(stock: Any, optimizer: Any, sub_group_id: int) -> None:
    """The end of a step of DeepSpeed's optimizer, whose parameters a later engine with a block may gather."""
    found = [] if hasattr(optimizer, "hzero") else managed_of(optimizer.fp16_groups[sub_group_id])
    for owner in dict.fromkeys(managed.owner for managed in found):
        owner.weights.before_change()
    stock(optimizer, sub_group_id)
    if found:
        found[0].owner.mark_stale([managed.param for managed in found])


def release_all(module: torch.nn.Module) -> None:
    """Releases the parameters and layers of a module from an earlier engine that was not destroyed."""
    detacher(module)()
    autotp.give_back(module)
    for managed in managed_of(module.parameters()):
        managed.owner.lanes.drain()
        managed.owner._release(managed)


# ---- units ---------------------------------------------------------------------------------------------------------------


class Unit:
    """A layer, while it is gathered: DeepSpeed has some of its parameters, and the others wait here to be requested.

    So DeepSpeed never holds a parameter that it has not requested, whichever modules of the layer a forward skips. What it
    gives back is kept too, until the layer's turn is over: backward uses what activation checkpointing has just computed
    from.

    Args:
        layer: The layer.
        members: The parameters.

    Attributes:
        layer: As given.
        members: As given.
        waiting: Those that a gather brings and DeepSpeed has not requested yet.
        out: Those that DeepSpeed has.
        used: Whether DeepSpeed has had one.
    """

    def __init__(self, layer: torch.nn.Module, members: list[Managed]) -> None:
        self.layer, self.members = layer, members
        self.waiting: set[Managed] = set()
        self.out: set[Managed] = set()
        self.used = False

    def give(self, managed: Managed) -> None:
        """DeepSpeed has a parameter."""
        self.used = True
        self.waiting.discard(managed)
        self.out.add(managed)

    def drop(self) -> None:
        """Lets go of all. What DeepSpeed has stays until it gives it back."""
        for managed in self.members:
            managed.whole = None
        self.waiting.clear()
        self.out.clear()
        self.used = False


class Units:
    """The units that are gathered, and when their turn is over: all ranks decide alike, by what DeepSpeed requests.

    Attributes:
        of: The unit of a layer, and of the modules in it whose parameters are all the unit's.
        held: Layers that DeepSpeed has as a whole, for a forward or backward.
    """

    def __init__(self) -> None:
        self._gathered: dict[Unit, None] = {}
        self._place = -1  # last key of the unit that is used; before a forward none is
        self.of: dict[torch.nn.Module, Unit] = {}
        self.held: set[torch.nn.Module] = set()

    def inside(self, module: torch.nn.Module) -> bool:
        """Whether a module is inside a layer that is held: then DeepSpeed has nothing to request and nothing to give back."""
        unit = self.of.get(module)
        return unit is not None and unit.layer in self.held and module is not unit.layer

    def widened(self, wanted: Iterable[Managed]) -> list[list[Managed]]:
        """Parameters to gather for a request: those that are not there yet, with the others of their units.

        Each large unit has a message, which its forward or backward waits for. Those that come next are first.
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
        """A gather brings a parameter."""
        if managed.unit is not None:
            self._gathered[managed.unit] = None
            managed.unit.waiting.add(managed)

    def request(self, requested: Collection[Managed]) -> None:
        """Parameters of other units are requested: lets go of complete ones.

        So the last layer of a forward stays for its backward, where the modules behind it have no unit.
        """
        now = {managed.unit for managed in requested} - {None}
        if now:
            others = [unit for unit in self._gathered if unit not in now]
            self._drop(unit for unit in others if unit.used and not unit.waiting and not unit.out)

    def use(self, module: torch.nn.Module) -> None:
        """A module is about to be used: if it has a unit, lets go of other ones.

        Incomplete units go too, of which a module was skipped or is kept by DeepSpeed for its next use. One that was only
        gathered ahead stays. Handles do not decide this, since ranks wait for them in different orders.
        """
        now = self.of.get(module)
        if now is not None:
            self._place = now.members[-1].key if now.members else self._place
            self._drop(unit for unit in self._gathered if unit is not now and unit.used)

    def end(self) -> None:
        """At the end of a forward or backward: lets go of what has been used."""
        self.held.clear()
        self._place = -1
        self._drop(unit for unit in self._gathered if unit.used)

    def drop(self) -> None:
        """Lets go of everything."""
        self._drop(self._gathered)
        self.end()

    def _drop(self, units: Iterable[Unit]) -> None:
        for unit in list(units):
            unit.drop()
            del self._gathered[unit]


def layers_of(module: torch.nn.Module, limit: int) -> list[torch.nn.Module]:
    """The layers of a model, whose parameters DeepSpeed has partitioned, from the outside in.

    They are the innermost modules that ``_no_split_modules`` names, as models of transformers do, since that list may also
    name a whole encoder; elsewhere those of a class that repeats in a ``ModuleList`` or ``Sequential``. A layer of more
    than ``limit`` elements is divided into its children. DeepSpeed's leaf modules are none: it requests their parameters
    together anyway.
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
            yield layer  # one module's parameters come together anyway

    return list(found(module))


def form_units(units: Units, module: torch.nn.Module, layers: Iterable[torch.nn.Module]) -> None:
    """Makes a unit of each layer, without parameters that another part of the model shares or that are kept whole.

    From now on DeepSpeed requests all of them when the layer's forward or backward begins.
    """
    users: dict[torch.nn.Parameter, set[int]] = {}
    inside = {one: number for number, layer in enumerate(layers) for one in layer.modules()}
    for one in module.modules():
        for param in one._parameters.values():
            if param is not None:
                users.setdefault(param, set()).add(inside.get(one, -1))
    for number, layer in enumerate(layers):
        inner: list[ZeroParameter] = [
            param for param in layer.parameters() if users[param] == {number} and not autoep.is_expert(param)
        ]
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
    """One gather of whole parameters, each with a `Whole` that alone holds its memory: two layers may have one gather."""

    def __init__(self, wait: Unsharded, on_streams: bool) -> None:
        self._wait, self._on_streams, self._arrived = wait, on_streams, False
        self._parts: list[ref[Whole]] = []

    def add(self) -> Whole:
        """The part of the next parameter."""
        part = Whole(self)
        self._parts.append(ref(part))
        return part

    def wait(self) -> None:
        """Makes the current stream wait for the parts."""
        if self._arrived and not self._on_streams:
            return
        flats = self._wait()
        for weak, flat in zip(self._parts, flats):
            if (part := weak()) is not None:
                part.flat = flat
        flats.clear()
        self._arrived = True


class Whole:
    """A whole parameter, flat ``[world * chunk]``, once its gather has been waited for."""

    def __init__(self, gathering: Gathering) -> None:
        self.gathering = gathering
        self.flat: torch.Tensor | None = None


class GatherHandle:
    """Handle of the parameters that a gather brings, or of some, as DeepSpeed's coordinator waits on it."""

    def __init__(self, gathering: Gathering, managed: Sequence[Managed]) -> None:
        self._gathering, self.params = gathering, {one.param for one in managed}
        self._parts = [(one, one.whole) for one in managed]
        for one in managed:
            if one.unit is None:
                one.whole = None

    def wait(self, handle_dependency: bool = True) -> None:
        """Makes the parameters available.

        ``handle_dependency`` is DeepSpeed's and has no effect: the decoded tensors alias no communication buffer, and the
        current stream waits for them.
        """
        if not self._parts:
            return
        self._gathering.wait()
        with lasting():
            for one, part in self._parts:
                assert part is not None and part.flat is not None, "gather has started it"
                param = one.param
                flat = part.flat.view(param.ds_tensor.dtype)  # or they are bytes
                param.data = flat[: param.ds_numel].view(param.ds_shape)
                param.ds_status = ZeroParamStatus.AVAILABLE
                if one.unit is not None and one.whole is part:
                    one.unit.give(one)
        self._parts = []  # they hold the tensors


class Handles:
    """Several handles as one; some may be DeepSpeed's own."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def of(self, param: ZeroParameter) -> Any:
        """The handle of the message that brings a parameter, where it has its own."""
        return next((one for one in self._handles if param in getattr(one, "params", ())), self)

    def wait(self, **how: Any) -> None:
        """Waits on each handle."""
        with lasting():
            for handle in self._handles:
                handle.wait(**how)


class InFlight(InflightParamRegistry):  # type: ignore[misc]
    """DeepSpeed's handles of parameters that are gathered: a module waits for the messages of its parameters only."""

    def __setitem__(self, param: ZeroParameter, handle: Any) -> None:
        super().__setitem__(param, handle.of(param) if isinstance(handle, Handles) else handle)


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


def async_accelerator() -> Any:
    """DeepSpeed's accelerator; None where it is synchronised, which runs everything in order, as CPUs do."""
    accelerator = get_accelerator()
    return None if accelerator.is_synchronized_device() else accelerator


def current_device() -> torch.device:
    """The device of this rank."""
    return torch.device(get_accelerator().current_device_name())
