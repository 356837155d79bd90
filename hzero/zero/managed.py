"""A parameter that the stage gathers, and the handles of its gathers, on which DeepSpeed's coordinator waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from hzero.codecs import Codec
from hzero.collectives import Bucket, Chain, TieredCollectives, lasting
from hzero.config import PLAIN
from hzero.sharding.records import record_format
from hzero.zero.refusals import ZeroParameter


@dataclass
class Managed:
    """One parameter that this engine gathers.

    Attributes:
        param: The parameter, with DeepSpeed's attributes.
        stock: DeepSpeed's functions that the stage replaces, by name.
        own: The stage's functions in their place.
        payload: Resident payload ``[rows][record]``, uint8; None where none is kept or it was dropped.
        unfit: Whether it is in codec ``none``, since it does not fit codec ``exp``.
        whole: Resident weights ``[world * chunk]``, decoded, in place of a payload; None likewise.
        chunk: Elements of each of its records; bytes of codes.
        refresh: The chain that builds the payload.
        decoded: Whether ``param.data``, while it is available, came through a codec.
        age: Refreshes of differences since the last one of whole weights; None: the next one sends whole weights.
    """

    param: ZeroParameter
    stock: dict[str, Any]
    own: dict[str, Any] = field(default_factory=dict)
    payload: torch.Tensor | None = None
    unfit: bool = False
    whole: torch.Tensor | None = None
    chunk: int = 0
    refresh: Chain[None] | None = None
    decoded: bool = False
    age: int | None = None

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
        if self.param.ds_status == ZeroParamStatus.INFLIGHT:
            self.param.ds_status = ZeroParamStatus.NOT_AVAILABLE
        for name, function in self.own.items():
            if getattr(self.param, name) == function:  # else someone has replaced ours
                setattr(self.param, name, self.stock[name])

    def plain(self, collectives: TieredCollectives, codec: Codec, bucket: Bucket) -> torch.Tensor:
        """The resident payload in codec ``none``; ``codec`` is that of payloads that fit theirs."""
        assert self.payload is not None, "a refresh has made it"
        held, rows = Codec.from_config(PLAIN) if self.unfit else codec, collectives.plan.resident_rows
        return collectives.transcode(bucket, self.payload, held, PLAIN, outer=1, rows=rows, seed=0)[0]

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


class GatherHandle:
    """Handle of one gather, as DeepSpeed's coordinator waits on it."""

    def __init__(self, params: Sequence[ZeroParameter], chain: Chain[list[torch.Tensor]]) -> None:
        self._params = params
        self._chain: Chain[list[torch.Tensor]] | None = chain

    def wait(self, handle_dependency: bool = True) -> None:
        """Makes the parameters available.

        ``handle_dependency`` is DeepSpeed's and has no effect: the decoded tensors alias no communication buffer, and the
        current stream waits for them.
        """
        if self._chain is None:
            return
        for param, flat in zip(self._params, self._chain.wait()):
            param.data = _shaped(flat, param)
            param.ds_status = ZeroParamStatus.AVAILABLE
        self._chain = None  # it holds the tensors of all parameters


class ResidentHandle:
    """Handle of parameters that are resident decoded. It starts nothing, and waits for their refresh."""

    def __init__(self, managed: Sequence[Managed]) -> None:
        self._managed = managed

    def wait(self, handle_dependency: bool = True) -> None:
        """Makes the parameters available, as `GatherHandle.wait` does."""
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
