"""Units: layers whose parameters are gathered together.

The first request for a parameter of a layer gathers the whole layer. DeepSpeed's coordinator sees only the parameters that it has
requested. The others wait in the unit.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import (
    ZeroParamStatus,
    free_param,
    register_external_parameter,
    unregister_external_parameter,
)
from deepspeed.utils import z3_leaf_module

from hzero.comm import lasting
from hzero.deepspeed.handles import Whole, ZeroParameter
from hzero.engine.parameter import Parameter

#: A message with this many elements gets no further unit. Its transfer then takes longer than the latency of a hop.
_MESSAGE_NUMEL = 1 << 20


@dataclass(eq=False, kw_only=True)
class Managed(Parameter):
    """One parameter that an engine gathers. DeepSpeed's parameter refers to it by the attribute ``hzero_managed``.

    Attributes:
        param: DeepSpeed's parameter.
        owner: The engine that gathers it, `hzero.deepspeed.stage_state.StageState`.
        stock: DeepSpeed's replaced functions, by name.
        inexact: Whether ``param.data`` has been decoded from a lossy codec, while the parameter is available.
        unit: The layer whose parameters are gathered together. None: the parameter is gathered when it is requested.
        whole: The gathered parameter, until a handle takes it or the unit is dropped.
        layers: Layers that request the parameter although it belongs to a module inside them.
    """

    param: ZeroParameter
    owner: Any = field(init=False)
    stock: dict[str, Any] = field(default_factory=dict)
    inexact: bool = False
    unit: Unit | None = None
    whole: Whole | None = None
    layers: list[torch.nn.Module] = field(default_factory=list)

    def measure(self) -> bool:
        """Updates the properties that may change. Returns whether the size has changed."""
        param = self.param
        code_bytes = param.ds_tensor.dtype.itemsize if self.dtype == torch.uint8 else 1
        changed = (param.ds_numel, code_bytes) != (self.numel, self.code_bytes)
        self.numel, self.code_bytes = param.ds_numel, code_bytes
        self.trained, self.urgent = param.requires_grad, param.ds_persist
        return changed

    def attach(self, owner: Any) -> None:
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
            with contextlib.suppress(RuntimeError):  # it is not registered
                unregister_external_parameter(layer, self.param)
        if self.unit is not None:
            self.unit.members.remove(self)

    def all_gather(self, param_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        """``param.all_gather``. Gathers secondary partitions for a forward outside the parameter's module, else exact shards."""
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
        kinds = (
            Counter(map(type, parent)) if isinstance(parent, (torch.nn.ModuleList, torch.nn.Sequential)) else Counter()
        )
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


def form_units(units: Units, module: torch.nn.Module, layers: Iterable[torch.nn.Module]) -> None:
    """Makes a unit of each layer, without parameters that other parts of the model share or that are kept whole.

    DeepSpeed then requests all parameters of a unit when the forward or backward of the layer begins.
    """
    users: dict[torch.nn.Parameter, set[int]] = {}
    inside = {one: number for number, layer in enumerate(layers) for one in layer.modules()}
    for one in module.modules():
        for param in one.parameters(recurse=False):
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
