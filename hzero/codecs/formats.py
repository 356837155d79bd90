"""Records: bytes that a shard takes in a payload. Pure arithmetic; codecs build on it (docs/payload_format.md)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from hzero.config import CodecConfig, CodecName

#: Both regions of a record are rounded up to this many bytes, so that every region starts where a wide load can.
ALIGNMENT = 16

#: Bytes of a scale, by the name of its type.
SCALE_BYTES = {"bf16": 2, "fp32": 4, "int8": 1}

#: Elements whose ``int8`` scales share a factor, and the bytes of it.
FACTOR_SPAN, FACTOR_BYTES = 512, 2

#: Elements that are rotated together; 0 rotates none.
ROTATIONS = (0, 64, 128)


class BlockCodes(NamedTuple):
    """The codes of a codec whose blocks share a scale.

    Attributes:
        bits: Bits of a code.
        lowest: Lowest code that is written; the largest in magnitude.
        highest: Highest code that is written.
    """

    bits: int
    lowest: int
    highest: int


#: Codecs ``int8`` and ``int4``, whose blocks share a scale.
BLOCK_CODECS: dict[CodecName, BlockCodes] = {"int8": BlockCodes(8, -127, 127), "int4": BlockCodes(4, -8, 7)}


#: Codec ``zfp``: elements of a block. Codec ``mpc``: words of a chunk, and bytes before the bitmaps of a record.
ZFP_BLOCK, MPC_CHUNK, MPC_HEADER = 4, 1024, 16

#: Codec ``exp``: elements that share a window of exponents, those that share a list of escapes, and the longest list.
EXP_LINE, EXP_BLOCK, EXP_ESCAPES = 512, 32768, 512


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def chunk_numel(numel: int, world_size: int) -> int:
    """Elements of one shard of a parameter: its size over the world, rounded up, as DeepSpeed partitions it."""
    return -(-numel // world_size)


def owned_numel(numel: int, chunk: int, rank: int) -> int:
    """Elements of a rank's shard, without the padding of the last ones, which have fewer than ``chunk`` or none."""
    return min(max(numel - rank * chunk, 0), chunk)


class RecordFormat(NamedTuple):
    """The settings that fix the layout of a record.

    Attributes:
        codec: Name of the codec.
        block_size: Elements that share a scale, or in codec ``exp`` a window of exponents; those of a block of codec ``zfp`` or
            a chunk of codec ``mpc``; 0 for the other codecs.
        scale: Type of the scales, a key of `SCALE_BYTES`; "" without scales.
        rotation: Elements that are rotated together before they are coded, a divisor of the block's; 0: none are.
        rate: Bits of a value in codec ``zfp``; else 0.
        dimension: Distance of the values that codec ``mpc`` subtracts; else 0.
    """

    codec: CodecName
    block_size: int
    scale: str
    rotation: int = 0
    rate: int = 0
    dimension: int = 0

    @classmethod
    def of(
        cls, codec: CodecName, block_size: int, scale: str, rotation: int = 0, rate: int = 0, dimension: int = 0
    ) -> RecordFormat:
        """The format of valid settings: two that differ only in settings without meaning give the same format."""
        if codec in BLOCK_CODECS:
            return cls(codec, block_size, scale, rotation)
        if codec == "zfp":
            return cls(codec, ZFP_BLOCK, "", rate=rate)
        if codec == "mpc":
            return cls(codec, MPC_CHUNK, "", dimension=dimension)
        return cls(codec, EXP_LINE if codec == "exp" else 0, "")

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale; 0 for codecs without scales."""
        return SCALE_BYTES.get(self.scale, 0)

    def scales_bytes(self, numel: int) -> int:
        """Bytes of the scales of ``numel`` elements, factors included, without padding."""
        factors = -(-numel // FACTOR_SPAN) * FACTOR_BYTES if self.scale == "int8" else 0
        return self.blocks(numel) * self.scale_bytes + factors

    @property
    def codes(self) -> BlockCodes:
        """The codes of a block codec."""
        return BLOCK_CODECS[self.codec]

    def blocks(self, numel: int) -> int:
        """Scales of a record of ``numel`` elements, or windows of exponents; blocks of ``zfp``, chunks of ``mpc``."""
        return -(-numel // self.block_size) if self.block_size else 0

    def code_bytes(self, numel: int, itemsize: int) -> int:
        """Bytes of the codes; in codec ``mpc`` the most that they can take.

        ``itemsize`` is that of the decoded type; only codec ``none`` depends on it.
        """
        if self.codec == "zfp":
            return -(-self.blocks(numel) * self.rate // 2)
        if self.codec == "mpc":
            # Bitmaps, and the words of bit planes, of which the last chunk has as many as its groups of 32 words and one.
            rest = -(-(numel % MPC_CHUNK) // 32) * 32
            words = numel // MPC_CHUNK * MPC_CHUNK + (min(rest + 1, MPC_CHUNK) if rest else 0)
            return MPC_HEADER + self.blocks(numel) * MPC_CHUNK // 8 + 4 * words if numel else 0
        if self.codec == "exp":
            return _aligned(numel) + -(-numel // 2)
        if self.block_size:
            return -(-numel * self.codes.bits // 8)
        return numel * (itemsize if self.codec == "none" else 2)

    def scales_offset(self, numel: int, itemsize: int) -> int:
        """Offset of the scales, or of the windows of exponents, inside the record, in bytes."""
        return _aligned(self.code_bytes(numel, itemsize))

    def record_bytes(self, numel: int, itemsize: int) -> int:
        """Bytes of the whole record; 0 for an empty one."""
        behind = self.scales_bytes(numel)
        if self.codec == "exp":
            behind = 3 * self.blocks(numel) + numel // EXP_BLOCK * EXP_ESCAPES + min(numel % EXP_BLOCK, EXP_ESCAPES)
        return self.scales_offset(numel, itemsize) + _aligned(behind)

    def message_bytes(self, chunks: Sequence[int], rows: int, itemsize: int) -> int:
        """Bytes of a message of ``rows`` shards of every tensor."""
        return rows * _row_bytes(self, tuple(chunks), itemsize)


@functools.lru_cache(maxsize=4096)  # every hop asks for the same few buckets
def _row_bytes(fmt: RecordFormat, chunks: tuple[int, ...], itemsize: int) -> int:
    return sum(fmt.record_bytes(chunk, itemsize) for chunk in chunks)


def record_format(config: CodecConfig) -> RecordFormat:
    """The format of a codec's settings."""
    own = (config.rate or 0, config.dimension or 1)
    return RecordFormat.of(config.codec, config.block_size, config.scale, config.rotation, *own)


def element_bytes(config: CodecConfig, itemsize: int) -> float:
    """Bytes of one element in a long record, scales included; of codec ``mpc`` the most. ``itemsize``: of the decoded type."""
    return record_format(config).record_bytes(1 << 16, itemsize) / (1 << 16)
