"""Lost blocks: elements that codec ``exp`` could not hold, found where a message has arrived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hzero.collectives.errors import HopError
from hzero.collectives.pipeline import Streams


@dataclass(frozen=True)
class Lost:
    """Blocks of a message whose elements codec ``exp`` could not hold.

    Attributes:
        blocks: Their number, int64 ``[]``.
        what: Describes the message.
    """

    blocks: torch.Tensor
    what: str

    def check_or_keep(self, streams: Streams | None, kept: list[tuple[Any, Lost]]) -> None:
        """`check` at once; on an asynchronous device, where that would make the host wait, keeps it behind an event."""
        if streams is None:
            self.check()
        else:
            kept.append((streams.event(), self))

    def check(self) -> None:
        """Raises HopError if there are any; the same on all ranks that have the message."""
        if count := int(self.blocks):
            raise HopError(
                f"hzero: {self.what}: {count} blocks of 32,768 weights have more than 512 exponents outside of the windows of "
                "their lines, which codec exp cannot hold; possible on this tier: codec none, bf16 or int8"
            )
