"""Handles on gathers, for which DeepSpeed's coordinator waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias
from weakref import ref

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import InflightParamRegistry

from hzero.comm import lasting
from hzero.engine.weights import Unsharded

#: A torch.nn.Parameter with DeepSpeed's attributes (ds_id, ds_tensor, ds_status and so on).
ZeroParameter: TypeAlias = Any


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

    def __init__(self, gathering: Gathering, managed: Sequence[Any]) -> None:
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
