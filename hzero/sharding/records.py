"""Records: how many bytes a shard takes in a payload. Pure arithmetic; codecs build on it (docs/payload_format.md)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from hzero.config import CodecConfig

#: Both regions of a record are rounded up to this many bytes, so that every one starts where a wide load can.
ALIGNMENT = 16

#: Bytes of a scale, by the name of its type.
SCALE_BYTES = {"bf16": 2, "fp32": 4}

_BITS = {"bf16": 16, "int8": 8, "int4": 4}


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def chunk_numel(numel: int, world_size: int) -> int:
    """Elements of one shard of a parameter: its size over the world, rounded up, as DeepSpeed partitions it."""
    return -(-numel // world_size)


@dataclass(frozen=True)
class RecordFormat:
    """What fixes the layout of a record.

    Attributes:
        codec: Name of the codec.
        block_size: Elements that share a scale.
        scale_bytes: Bytes of a scale; 0 where there are none.
    """

    codec: str
    block_size: int
    scale_bytes: int

    @classmethod
    def of(cls, codec: str, block_size: int, scale: str) -> RecordFormat:
        """The format of settings that are known to be valid."""
        if codec in ("none", "bf16"):
            # No scales, so no blocks: two settings that differ in the block size alone are the same format.
            return cls(codec, 0, 0)
        return cls(codec, block_size, SCALE_BYTES[scale])

    def blocks(self, numel: int) -> int:
        """Scales of a record of ``numel`` elements."""
        return -(-numel // self.block_size) if self.scale_bytes else 0

    def code_bytes(self, numel: int, itemsize: int) -> int:
        """Bytes of the codes. ``itemsize`` is that of the decoded type; only codec ``none`` depends on it."""
        if self.codec == "none":
            return numel * itemsize
        return -(-numel * _BITS[self.codec] // 8)

    def scales_offset(self, numel: int, itemsize: int) -> int:
        """Where the scales start inside the record, in bytes."""
        return _aligned(self.code_bytes(numel, itemsize))

    def record_bytes(self, numel: int, itemsize: int) -> int:
        """Bytes of the whole record; none for an empty one."""
        return self.scales_offset(numel, itemsize) + _aligned(self.blocks(numel) * self.scale_bytes)

    def message_bytes(self, chunks: Sequence[int], rows: int, itemsize: int) -> int:
        """Bytes of a message of ``rows`` shards of every tensor."""
        return rows * _row_bytes(self, tuple(chunks), itemsize)


@functools.lru_cache(maxsize=4096)  # the same few buckets are asked for at every hop
def _row_bytes(fmt: RecordFormat, chunks: tuple[int, ...], itemsize: int) -> int:
    return sum(fmt.record_bytes(chunk, itemsize) for chunk in chunks)


def record_format(config: CodecConfig) -> RecordFormat:
    """The format that a codec's settings lead to."""
    return RecordFormat.of(config.codec, config.block_size, config.scale)
