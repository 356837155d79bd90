"""Parameters that the stage gathers, the units that it gathers together, and the handles on which DeepSpeed waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import z3_leaf_module

from hzero.codecs.formats import record_format
from hzero.comm import Chain, lasting
from hzero.config import PLAIN
from hzero.deepspeed.refusals import ZeroParameter


@dataclass
class Managed:
    """One parameter that this engine gathers.

    Attributes:
        param: The parameter, with DeepSpeed's attributes.
        stock: DeepSpeed's functions that the stage replaces, by name.
        own: The stage's functions in their place.
        payload: Resident payload ``[rows][record]``, uint8; None where none is kept or it was dropped.
        whole: Resident weights ``[world * chunk]``, decoded, instead of a payload; None likewise.
        chunk: Elements of each of its records; bytes of codes.
        refresh: The chain that builds the payload.
        decoded: Whether ``param.data``, while it is available, came through a codec.
        age: Refreshes of differences since the last one of whole weights; None: the next one sends whole weights.
        unit: The layer that it is gathered with; None: it is gathered when it is requested.
        part: The gathered parameter, until a handle takes it or the unit's turn is over.
    """

    param: ZeroParameter
    stock: dict[str, Any]
    own: dict[str, Any] = field(default_factory=dict)
    payload: torch.Tensor | None = None
    whole: torch.Tensor | None = None
    chunk: int = 0
    refresh: Chain[None] | None = None
    decoded: bool = False
    age: int | None = None
    unit: Unit | None = None
    part: Part | None = None

    @property
    def kept(self) -> torch.Tensor | None:
        """The resident payload, or the resident weights."""
        return self.whole if self.whole is not None else self.payload

    def put_away(self, decoded: bool = False) -> None:
        """Partitions the parameter if it is available and not in use; where it must be ``decoded``, only such a one."""
        param = self.param
        if (
            (self.decoded or not decoded)
            and param.ds_status == ZeroParamStatus.AVAILABLE
            and not param.ds_active_sub_modules
        ):
            param.partition()

    def release(self) -> None:
        """Gives the parameter DeepSpeed's functions back; what a failed gather has left under way is not there."""
        self.put_away(decoded=True)
        self.part = None
        if self.param.ds_status == ZeroParamStatus.INFLIGHT:
            self.param.ds_status = ZeroParamStatus.NOT_AVAILABLE
        for name, function in self.own.items():
            if getattr(self.param, name) == function:  # else someone has replaced ours
                setattr(self.param, name, self.stock[name])

    def copy(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """The resident copy in the weights' own type, where it lies, ``[rows, chunk]``: all shards, or those of a payload."""
        if self.whole is not None:
            return self.whole.view(rows, self.chunk)
        assert self.payload is not None, "a refresh of whole weights has made it"
        record = record_format(PLAIN).record_bytes(self.chunk, dtype.itemsize) // dtype.itemsize
        return self.payload.view(dtype).view(rows, record)[:, : self.chunk]


def _shaped(flat: torch.Tensor, param: ZeroParameter) -> torch.Tensor:
    """The whole parameter, from ``[world * chunk]`` elements of its type, or the bytes of them."""
    return flat.view(param.ds_tensor.dtype)[: param.ds_numel].view(param.ds_shape)


class Unit:
    """A layer, while it is gathered: DeepSpeed has some of its parameters, and the others wait here to be requested.

    So DeepSpeed never holds a parameter that it has not requested, whichever modules of the layer a forward skips. What it
    gives back is kept too, until the layer's turn is over: backward uses what activation checkpointing has just computed
    from.

    Args:
        members: The parameters.
    """

    def __init__(self, members: list[Managed]) -> None:
        self.members = members
        self._waiting: set[int] = set()
        self._out: set[int] = set()
        self.used = False

    @property
    def complete(self) -> bool:
        """Whether all parameters have been used and given back."""
        return self.used and not self._waiting and not self._out

    def bring(self, managed: Managed) -> None:
        """Notes that a gather brings a parameter."""
        self._waiting.add(managed.param.ds_id)

    def give(self, managed: Managed) -> None:
        """Notes that DeepSpeed has a parameter."""
        self.used = True
        self._waiting.discard(managed.param.ds_id)
        self._out.add(managed.param.ds_id)

    def take_back(self, managed: Managed) -> None:
        """Notes that DeepSpeed has it no more."""
        self._out.discard(managed.param.ds_id)

    def forget(self, managed: Managed) -> None:
        """Lets go of a parameter that has changed."""
        self._waiting.discard(managed.param.ds_id)

    def drop(self) -> None:
        """Lets go of all. What DeepSpeed has stays until it gives it back."""
        for managed in self.members:
            managed.part = None
        self._waiting.clear()
        self._out.clear()
        self.used = False


class Units:
    """The units that are gathered, and when their turn is over: all ranks decide alike, by what DeepSpeed requests."""

    def __init__(self) -> None:
        self._gathered: dict[Unit, None] = {}

    def widened(self, wanted: Iterable[Managed]) -> list[Managed]:
        """Parameters to gather for a request: those that are not there yet, with the others of their units, by id."""
        found = {managed.param.ds_id: managed for managed in wanted if managed.part is None}
        for unit in {managed.unit for managed in found.values()} - {None}:
            for other in unit.members:  # type: ignore[union-attr]
                if other.part is None and other.param.ds_status == ZeroParamStatus.NOT_AVAILABLE:
                    found[other.param.ds_id] = other
        return [found[key] for key in sorted(found)]

    def bring(self, managed: Managed) -> None:
        """Notes that a gather brings a parameter."""
        if managed.unit is not None:
            self._gathered[managed.unit] = None
            managed.unit.bring(managed)

    def turn_to(self, requested: Collection[Managed], *, waiting: bool) -> None:
        """Lets go of units whose turn is over, when parameters are requested, or ``waiting`` when they are used.

        A complete unit goes at the next request for anything else, an incomplete one, of which a module was skipped or is
        kept by DeepSpeed for its next use, when another one is used. One that was only gathered ahead stays.
        """
        now = {managed.unit for managed in requested} - {None}
        for unit in [unit for unit in self._gathered if unit not in now]:
            if unit.complete or (waiting and now and unit.used):
                self._drop(unit)

    def end(self) -> None:
        """At the end of a forward or backward: lets go of what has been used."""
        for unit in [unit for unit in self._gathered if unit.used]:
            self._drop(unit)

    def drop(self) -> None:
        """Lets go of everything."""
        for unit in list(self._gathered):
            self._drop(unit)

    def _drop(self, unit: Unit) -> None:
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


def form_units(module: torch.nn.Module, layers: Iterable[torch.nn.Module], managed: Mapping[int, Managed]) -> None:
    """Makes a unit of each layer, without parameters that another part of the model shares or that are kept whole."""
    users: dict[torch.nn.Parameter, set[int]] = {}
    inside = {one: number for number, layer in enumerate(layers) for one in layer.modules()}
    for one in module.modules():
        for param in one._parameters.values():
            if param is not None:
                users.setdefault(param, set()).add(inside.get(one, -1))
    for number, layer in enumerate(layers):
        own = [param for param in layer.parameters() if users[param] == {number} and not param.ds_persist]  # type: ignore[attr-defined]
        unit = Unit([managed[param.ds_id] for param in own])  # type: ignore[attr-defined]
        for member in unit.members:
            member.unit = unit


class Gathering:
    """One gather of whole parameters, each with a `Part` that alone holds its memory."""

    def __init__(self, chain: Chain[list[torch.Tensor]], on_streams: bool) -> None:
        self._chain, self._on_streams, self._arrived = chain, on_streams, False
        self._parts: list[ref[Part]] = []

    def add(self) -> Part:
        """The part of the next parameter."""
        part = Part(self)
        self._parts.append(ref(part))
        return part

    def wait(self) -> None:
        """Makes the current stream wait for the parts, as `Chain.wait` does."""
        if self._arrived and not self._on_streams:
            return
        flats = self._chain.wait()
        for found, flat in zip(self._parts, flats):
            part = found()
            if part is not None:
                part.flat = flat
        flats.clear()
        self._arrived = True


class Part:
    """A whole parameter, flat ``[world * chunk]``, once its gather has been waited for."""

    def __init__(self, gathering: Gathering) -> None:
        self.gathering = gathering
        self.flat: torch.Tensor | None = None


class GatherHandle:
    """Handle of parameters that gathers bring, as DeepSpeed's coordinator waits on it."""

    def __init__(self, managed: Sequence[Managed], units: Units) -> None:
        self._managed, self._units = managed, units
        self._parts = [own.part for own in managed]
        for own in managed:
            if own.unit is None:
                own.part = None

    def wait(self, handle_dependency: bool = True) -> None:
        """Makes the parameters available.

        ``handle_dependency`` is DeepSpeed's and has no effect: the decoded tensors alias no communication buffer, and the
        current stream waits for them.
        """
        if not self._parts:
            return
        self._units.turn_to(self._managed, waiting=True)
        for gathering in dict.fromkeys(part.gathering for part in self._parts if part is not None):
            gathering.wait()
        with lasting():
            for own, part in zip(self._managed, self._parts):
                assert part is not None and part.flat is not None, "gather has started it"
                own.param.data = _shaped(part.flat, own.param)
                own.param.ds_status = ZeroParamStatus.AVAILABLE
                if own.unit is not None and own.part is part:
                    own.unit.give(own)
        self._parts = []  # they hold the tensors


class ResidentHandle:
    """Handle of parameters that are resident decoded. It starts nothing, and waits for their refresh."""

    def __init__(self, managed: Sequence[Managed]) -> None:
        self._managed = managed

    def wait(self, handle_dependency: bool = True) -> None:
        """Makes the parameters available, as `GatherHandle.wait` does."""
        with lasting():
            for own in self._managed:
                assert own.refresh is not None, "gather has started it"
                own.refresh.wait()
                assert own.whole is not None, "the refresh has made it"
                param = own.param
                param.data = _shaped(own.whole, param)
                param.ds_status = ZeroParamStatus.AVAILABLE
        self._managed = ()


class StockHandle:
    """Handle of a gather by DeepSpeed. An evaluation in inference mode may wait for it, and a backward use what it gave."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def wait(self, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed's, outside of inference mode."""
        with lasting():
            self._handle.wait(*args, **kwargs)


class Handles:
    """Several handles as one."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def wait(self, handle_dependency: bool = True) -> None:
        """Waits on each handle."""
        for handle in self._handles:
            handle.wait(handle_dependency=handle_dependency)
