"""Primary shards: what DeepSpeed's optimizer writes on this rank, and what the stage encodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from hzero.codecs.formats import chunk_numel, owned_numel
from hzero.comm import Bucket, Chain, Collectives
from hzero.deepspeed.refusals import ZeroParameter
from hzero.engine.routes import Routes


class PrimaryShards:
    """Reads this rank's shards of parameters, in order with those who write them.

    Args:
        collectives: The stage's tiered collectives.
        routes: How each parameter travels.
    """

    def __init__(self, collectives: Collectives, routes: Routes) -> None:
        self._plan, self._routes = collectives.plan, routes
        self._changed: Any = None
        self._reader: Chain[Any] | None = None

    def note_change(self) -> None:
        """The shards change on this stream; what encodes them, on another one, waits for this point."""
        if not get_accelerator().is_synchronized_device():
            self._changed = get_accelerator().Event()
            self._changed.record(get_accelerator().current_stream())

    def await_change(self) -> None:
        """Makes the current stream, which is about to read shards, wait for their last change."""
        if self._changed is not None:
            get_accelerator().current_stream().wait_event(self._changed)

    def read_by(self, chain: Chain[Any]) -> None:
        """Notes the chain that encodes shards last."""
        self._reader = chain

    def before_change(self) -> None:
        """Makes the current stream, which is about to write shards, wait until they have been encoded."""
        if self._reader is not None:
            self._reader.wait_read()

    def dtype(self, param: ZeroParameter) -> torch.dtype:
        """The type in which a parameter travels: its own, or uint8 for the bytes of codes."""
        dtype: torch.dtype = param.ds_tensor.dtype
        return torch.uint8 if self._routes.of(param).codes else dtype

    def numel(self, param: ZeroParameter) -> int:
        """Elements of `dtype` of a parameter."""
        return int(param.ds_numel * self._size(param))

    def chunk(self, param: ZeroParameter) -> int:
        """Elements of `dtype` of each of its shards."""
        return chunk_numel(param.ds_numel, self._plan.grid.world_size) * self._size(param)

    def _size(self, param: ZeroParameter) -> int:
        return param.ds_tensor.dtype.itemsize if self._routes.of(param).codes else 1

    def bucket(self, params: Sequence[ZeroParameter]) -> Bucket:
        """Parameters that travel in one type as the tensors of one message."""
        return Bucket(
            keys=tuple(param.ds_id for param in params),
            chunks=tuple(map(self.chunk, params)),
            dtype=self.dtype(params[0]),
            role="weights",
        )

    def of(self, params: Sequence[ZeroParameter], bucket: Bucket) -> list[torch.Tensor]:
        """The shards, without padding: that of the last ones holds no element, and DeepSpeed does not set it."""
        self.await_change()
        shards = []
        for param, chunk in zip(params, bucket.chunks):
            owned = owned_numel(self.numel(param), chunk, self._plan.rank)
            shard = param.ds_tensor.detach().view(-1).view(bucket.dtype)
            shards.append(shard[:owned].to(params[0].device))
        return shards
