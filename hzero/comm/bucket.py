"""Bucket: the parameters that share one message per hop."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from hzero.comm.wires import STAGE, Lane
from hzero.config import Tier

T = TypeVar("T")


@dataclass(frozen=True)
class Bucket:
    """Description of the tensors that a chain moves.

    Attributes:
        keys: One stable id per tensor (DeepSpeed's ``ds_id``), by which residuals are kept.
        chunks: Elements of one shard of each tensor: its size over the world, rounded up.
        dtype: Type of the decoded elements; also their type on the wire under codec ``none``.
        role: The kind of state; of a `Communicator`'s messages the operation.
        channel: First part of the names of its lanes.
        direction: Last part, of a message from rank to rank; "" for none.
        name: Describes the tensors in messages; "" takes role and keys.
    """

    keys: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: torch.dtype
    role: str
    channel: str = STAGE
    direction: str = ""
    name: str = ""

    @functools.cached_property
    def label(self) -> str:
        """Name of the bucket in an error message."""
        return self.name or f"{self.role} of {len(self.keys)} parameters (ids {self.keys[0]}..{self.keys[-1]})"

    def lane(self, tier: Tier) -> Lane:
        """The lane of its hops on a tier."""
        return (self.channel, tier, self.direction) if self.direction else (self.channel, tier)


def in_buckets(items: Iterable[tuple[T, int]], limit: int) -> Iterator[list[T]]:
    """Cuts ``(item, elements)`` pairs into lists of at most ``limit`` elements, at least one item each."""
    bucket: list[T] = []
    filled = 0
    for item, elements in items:
        if bucket and filled + elements > limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += elements
    if bucket:
        yield bucket
