"""Arguments of the codec operators that belong together; backends receive them as these tuples.

A torch.library schema has no structures, so an operator takes the fields of such a tuple one after the other, in the
order in which they stand here (`hzero.codecs.ops` flattens and rebuilds them).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple, TypeAlias

import torch

#: Tensors that an operator changes.
Changed: TypeAlias = Annotated[Sequence[torch.Tensor], "changed"]


class Rows(NamedTuple):
    """The shards of a bucket, and their order in a message ``[outer][tensor][inner][record]``.

    Attributes:
        chunks: Elements of one shard of each tensor.
        sizes: Axes of the rows, row-major; their product is the number of rows.
        strides: Distance in shards between neighbours on each axis: row ``(i, j, ..)`` holds shard
            ``i * strides[0] + j * strides[1] + ..``.
        outer: Number of pieces of the message, each ``[tensor][rows / outer][record]``.
    """

    chunks: Sequence[int]
    sizes: Sequence[int]
    strides: Sequence[int]
    outer: int

    @classmethod
    def in_order(cls, chunks: Sequence[int], rows: int, outer: int = 1) -> Rows:
        """Rows in shard order."""
        return cls(chunks, (rows,), (1,), outer)

    @property
    def total(self) -> int:
        """Number of rows."""
        return math.prod(self.sizes)

    @property
    def inner(self) -> int:
        """Rows of a piece."""
        return self.total // self.outer


class Messages(NamedTuple):
    """Messages of several peers, one after the other, each ``[tensor][inner][record]``.

    Attributes:
        peers: Number of messages.
        chunks: Elements of one shard of each tensor.
        inner: Rows of each message.
    """

    peers: int
    chunks: Sequence[int]
    inner: int


class Rounding(NamedTuple):
    """How the block codecs round.

    Attributes:
        stochastic: Whether codes are rounded stochastically, not to nearest even.
        seed: Seed of stochastic rounding.
    """

    stochastic: bool
    seed: int
