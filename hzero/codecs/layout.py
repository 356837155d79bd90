"""Layout: positions of a bucket's records in a message, and in the float32 staging buffer of the block codecs."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from hzero.codecs.formats import RecordFormat


@dataclass(frozen=True)
class Layout:
    """Offsets of one bucket in one format; the message is ``[outer][tensor][inner][record]``.

    Attributes:
        chunks: Elements of one shard of each tensor.
        record_bytes: Bytes of one record of each tensor.
        record_starts: Sum of the record bytes of the preceding tensors.
        scales_offsets: Offset of the scales inside each record.
        row_bytes: Bytes of one row: one record of every tensor.
        block_starts: Blocks of the preceding tensors.
        row_blocks: Blocks of one row.
    """

    chunks: tuple[int, ...]
    record_bytes: tuple[int, ...]
    record_starts: tuple[int, ...]
    scales_offsets: tuple[int, ...]
    row_bytes: int
    block_starts: tuple[int, ...]
    row_blocks: int


@functools.lru_cache(maxsize=4096)
def layout_of(chunks: tuple[int, ...], fmt: RecordFormat, itemsize: int) -> Layout:
    """The layout of a bucket whose shards have ``chunks`` elements of ``itemsize`` bytes."""
    records = [fmt.record_bytes(chunk, itemsize) for chunk in chunks]
    blocks = [fmt.blocks(chunk) for chunk in chunks]
    return Layout(
        chunks=chunks,
        record_bytes=tuple(records),
        record_starts=_starts(records),
        scales_offsets=tuple(fmt.scales_offset(chunk, itemsize) for chunk in chunks),
        row_bytes=sum(records),
        block_starts=_starts(blocks),
        row_blocks=sum(blocks),
    )


def _starts(sizes: list[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(sizes, initial=0))[:-1]
