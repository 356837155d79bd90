"""Lost blocks: elements that codec ``exp`` could not hold, found on a device after their message has arrived."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hzero.collectives.errors import HopError


@dataclass(frozen=True)
class Lost:
    """Blocks of a message whose elements codec ``exp`` could not hold.

    Attributes:
        blocks: Their number, int64 ``[]``.
        what: Describes the message.
    """

    blocks: torch.Tensor
    what: str

    def check(self) -> None:
        """Raises HopError if there are any; the same on all ranks that have the message."""
        if count := int(self.blocks):
            raise HopError(
                f"hzero: {self.what}: {count} blocks of 32,768 numbers have more than 512 exponents outside of the windows of "
                "their lines, which codec exp cannot hold; possible on this tier: codec none, bf16 or int8"
            )
