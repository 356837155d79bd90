"""Codecs as data: one table of their properties, and the bytes that a shard takes in a payload (docs/payload_format.md).

Pure arithmetic without torch. To add a codec, give it a name, an entry of `TRAITS` with its sizes and its error bound, and a
reference in a module of its own (`hzero.codecs.reference.RECORDS`). No other module tests a codec's name.
"""

from __future__ import annotations

import functools
import itertools
import math
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

#: A payload format.
CodecName: TypeAlias = Literal["none", "bf16", "int8", "int4", "exp", "zfp", "mpc"]

#: Both regions of a record are rounded up to this many bytes, so that every region starts where a wide load can.
ALIGNMENT = 16

#: Bytes of a scale, by the name of its type.
SCALE_BYTES = {"bf16": 2, "fp32": 4, "int8": 1}

#: Elements whose ``int8`` scales share a factor, and the bytes of it.
FACTOR_SPAN, FACTOR_BYTES = 512, 2

#: Largest code of an ``int8`` scale.
SCALE_LEVELS = 127

#: Block sizes whose scales may be codes themselves: 2 to 16 blocks share a factor.
CODED_SCALE_BLOCKS = (32, 64, 128, 256)

#: Elements that are rotated together; 0 rotates none.
ROTATIONS = (0, 64, 128)

#: Codec ``zfp``: elements of a block, and biased exponents of float32 up to which zfp's conversion to integers overflows.
ZFP_BLOCK, ZFP_TINY = 4, 28

#: Codec ``mpc``: words of a chunk, and bytes before the bitmaps of a record.
MPC_CHUNK, MPC_HEADER = 1024, 16

#: Codec ``exp``: elements that share a window of exponents, those that share a list of escapes, and the longest list.
EXP_LINE, EXP_BLOCK, EXP_ESCAPES = 512, 32768, 512


class Float(NamedTuple):
    """A floating type.

    Attributes:
        roundoff: Largest relative error of rounding a normal number to it.
        tiny: Largest absolute error of rounding any other number.
        largest: Largest finite number.
        bits: Significant bits.
    """

    roundoff: float
    tiny: float
    largest: float
    bits: int


FLOATS = {
    "fp32": Float(2.0**-24, 2.0**-150, (2 - 2.0**-23) * 2.0**127, 24),
    "bf16": Float(2.0**-8, 2.0**-134, (2 - 2.0**-7) * 2.0**127, 8),
    "fp16": Float(2.0**-11, 2.0**-25, 65504.0, 11),
}


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

    def levels(self, *, stochastic: bool) -> int:
        """Magnitude of the code of a block's largest element: for stochastic codes one that both signs have."""
        return self.highest if stochastic else -self.lowest


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
        traits = TRAITS[codec]
        if traits.levels:
            return cls(codec, block_size, scale, rotation)
        settings = {"rate": rate, "dimension": dimension}
        return cls(codec, traits.block, "", **{traits.setting: settings[traits.setting]} if traits.setting else {})

    @property
    def traits(self) -> Traits:
        """The properties of the codec."""
        return TRAITS[self.codec]

    @property
    def codes(self) -> BlockCodes:
        """The codes of a codec with scales."""
        levels = TRAITS[self.codec].levels
        assert levels is not None, self.codec
        return levels

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale; 0 for codecs without scales."""
        return SCALE_BYTES.get(self.scale, 0)

    def scales_bytes(self, numel: int) -> int:
        """Bytes of the scales of ``numel`` elements, factors included, without padding."""
        factors = -(-numel // FACTOR_SPAN) * FACTOR_BYTES if self.scale == "int8" else 0
        return self.blocks(numel) * self.scale_bytes + factors

    def blocks(self, numel: int) -> int:
        """Scales of a record of ``numel`` elements, or windows of exponents; blocks of ``zfp``, chunks of ``mpc``."""
        return -(-numel // self.block_size) if self.block_size else 0

    def code_bytes(self, numel: int, itemsize: int) -> int:
        """Bytes of the codes; in codec ``mpc`` the most that they can take.

        ``itemsize`` is that of the decoded type; only codec ``none`` depends on it.
        """
        return self.traits.codes(self, numel, itemsize)

    def scales_offset(self, numel: int, itemsize: int) -> int:
        """Offset of the scales, or of the windows of exponents, inside the record, in bytes."""
        return _aligned(self.code_bytes(numel, itemsize))

    def record_bytes(self, numel: int, itemsize: int) -> int:
        """Bytes of the whole record; 0 for an empty one."""
        return self.scales_offset(numel, itemsize) + _aligned(self.traits.behind(self, numel))

    def message_bytes(self, chunks: Sequence[int], rows: int, itemsize: int) -> int:
        """Bytes of a message of ``rows`` shards of every tensor."""
        return rows * _row_bytes(self, tuple(chunks), itemsize)

    def element_bytes(self, itemsize: int) -> float:
        """Bytes of one element in a long record, scales included; of codec ``mpc`` the most."""
        return self.record_bytes(1 << 16, itemsize) / (1 << 16)

    def error_bound(self, absmax: float, to: str, *, stochastic: bool) -> float:
        """Largest absolute error of one round trip, see `hzero.codecs.codec.Codec.error_bound`; ``to``: a key of `FLOATS`."""
        error, reach = self.traits.error(self, absmax, stochastic)
        target = FLOATS[to]
        if to not in self.traits.keeps:
            error += (absmax + error) * target.roundoff + target.tiny
        return error if reach <= target.largest else math.inf

    def alike(self, other: RecordFormat) -> bool:
        """Whether a block with a scale is a block of the other format too, the same numbers in it."""
        mine, theirs = (self.block_size, self.rotation), (other.block_size, other.rotation)
        return self.scale_bytes > 0 and other.scale_bytes > 0 and mine == theirs


@functools.lru_cache(maxsize=4096)  # every hop asks for the same few buckets
def _row_bytes(fmt: RecordFormat, chunks: tuple[int, ...], itemsize: int) -> int:
    return sum(fmt.record_bytes(chunk, itemsize) for chunk in chunks)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@functools.lru_cache(maxsize=64)
def scale_limit(fmt: RecordFormat, source: str, *, stochastic: bool) -> float:
    """Largest scale whose largest code decodes to a finite number of the source type; of scales of one byte, largest factor."""
    kind = "fp32" if fmt.scale == "fp32" else "bf16"
    limit = _rounded_down(FLOATS[source].largest / fmt.codes.levels(stochastic=stochastic), kind)
    return _rounded_down(limit / SCALE_LEVELS, kind) if fmt.scale_bytes == 1 else limit


def _rounded_down(limit: float, kind: str) -> float:
    mantissa, exponent = math.frexp(limit)
    bits = FLOATS[kind].bits
    return math.ldexp(math.floor(math.ldexp(mantissa, bits)), exponent - bits)


# ---- bytes and errors of each codec ---------------------------------------------------------------------------------


def _mpc_bytes(fmt: RecordFormat, numel: int, itemsize: int) -> int:
    # Bitmaps, and the words of bit planes, of which the last chunk has as many as its groups of 32 words and one.
    rest = -(-(numel % MPC_CHUNK) // 32) * 32
    words = numel // MPC_CHUNK * MPC_CHUNK + (min(rest + 1, MPC_CHUNK) if rest else 0)
    return MPC_HEADER + fmt.blocks(numel) * MPC_CHUNK // 8 + 4 * words if numel else 0


def _exp_heads(fmt: RecordFormat, numel: int) -> int:
    return 3 * fmt.blocks(numel) + numel // EXP_BLOCK * EXP_ESCAPES + min(numel % EXP_BLOCK, EXP_ESCAPES)


def _no_error(fmt: RecordFormat, absmax: float, stochastic: bool) -> tuple[float, float]:
    return 0.0, absmax


def _bf16_error(fmt: RecordFormat, absmax: float, stochastic: bool) -> tuple[float, float]:
    mantissa, exponent = math.frexp(absmax)
    rounded = math.ldexp(round(math.ldexp(mantissa, 8)), exponent - 8)
    return absmax * FLOATS["bf16"].roundoff + FLOATS["bf16"].tiny, rounded


def _zfp_error(fmt: RecordFormat, absmax: float, stochastic: bool) -> tuple[float, float]:
    if not absmax:
        return 0.0, 0.0
    unit = math.ldexp(1.0, math.frexp(absmax)[1] - 30)
    # Decoded integers have 32 bits. With few planes sums may wrap, so that nothing else is known of them.
    error = absmax + 2.0**31 * unit
    if fmt.rate >= 7:
        error = min(error, (6.25 * 2.0 ** (34 - fmt.rate) + 12) * unit)
    error += 2.0**-24 * (absmax + error)
    error = max(error, min(absmax, math.ldexp(1.0, ZFP_TINY - 126)))
    return error, absmax + error


def _block_error(fmt: RecordFormat, absmax: float, stochastic: bool) -> tuple[float, float]:
    size = fmt.rotation
    if not size:
        return _code_error(fmt, absmax, stochastic), 0.0  # `scale_limit` keeps it in range
    # A rotated element is a mean of magnitudes up to the same, and each decoded one a sum of `size` of them.
    rotating = 1.2 * 2.0**-23 * math.log2(size) * absmax + size * 2.0**-150
    error = size * (_code_error(fmt, absmax * (1 + 2.0**-20), stochastic) + rotating)
    overflows = size * absmax + error > FLOATS["fp32"].largest  # the largest partial sum
    return error, math.inf if overflows else absmax + error


def _code_error(fmt: RecordFormat, absmax: float, stochastic: bool) -> float:
    levels, single = fmt.codes.levels(stochastic=stochastic), FLOATS["fp32"].roundoff
    roundoff, tiny, *_ = FLOATS["fp32" if fmt.scale == "fp32" else "bf16"]
    if stochastic:  # scales are rounded up
        roundoff, tiny = 2 * roundoff, 2 * tiny
    scale = absmax / levels
    if fmt.scale_bytes == 1:
        # The product is rounded, and the code is off by a half or, clamped, by what the factor lacks, which is less. A code
        # that is rounded up may be off by two.
        off = 2 / (SCALE_LEVELS - 1) if stochastic else 0.5 / SCALE_LEVELS
        roundoff = (1 + roundoff) * (roundoff + off) + 2 * single
        tiny = (SCALE_LEVELS + 2) * tiny
    clamped = any(
        scale > scale_limit(fmt, name, stochastic=stochastic) and absmax <= kind.largest
        for name, kind in FLOATS.items()
    )
    # Largest distance of the stored scale from the exact one, and the resulting error of an element.
    drift = scale * ((2 if clamped else 1) * roundoff + 2 * single) + tiny + 2.0**-150
    step = (scale + drift) * (1.0 if stochastic else 0.5)
    cut = levels * drift
    if fmt.codes.highest < levels:
        # int4: the sign opposite to that of the largest element has 7 levels of the 8.
        cut = max(cut, scale + fmt.codes.highest * drift)
    return max(step, cut) + 3 * single * absmax + 2.0**-149


# ---- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traits:
    """What a codec is, whatever its settings.

    Attributes:
        codes: Bytes of the codes, by format, elements and the size of one.
        behind: Bytes that follow the codes, by format and elements.
        error: Largest error in float32, and the largest magnitude that a decoded element reaches, by format, largest magnitude
            in the block and whether rounding is stochastic.
        keeps: Types that a decoded element is converted to without another rounding.
        types: Types that it takes, keys of `FLOATS`.
        widens: Whether 16-bit numbers are encoded as float32, which holds them exactly.
        exact: Whether every element is decoded to its original bits, unless its block is lost.
        plain: Whether the codes are the elements themselves, which a library can sum.
        fixed: Whether a message has a fixed size. Otherwise it may use less than its records have room for.
        fallible: Whether a message may fail to hold a block, which is then decoded to NaN.
        not_summed: Why float32 sums of a stage cannot be encoded; "" if they can.
        levels: The codes of a codec with scales.
        block: Elements of a block of codecs without scales.
        setting: The setting that only this codec has, see `RecordFormat`.
        required: Whether a configuration has to say that setting.
        on_devices: Whether devices have kernels of it; otherwise they run the reference.
    """

    codes: Callable[[RecordFormat, int, int], int]
    behind: Callable[[RecordFormat, int], int] = lambda fmt, numel: 0
    error: Callable[[RecordFormat, float, bool], tuple[float, float]] = _no_error
    keeps: tuple[str, ...] = ("fp32",)
    types: tuple[str, ...] = tuple(FLOATS)
    widens: bool = False
    exact: bool = False
    plain: bool = False
    fixed: bool = True
    fallible: bool = False
    not_summed: str = ""
    levels: BlockCodes | None = None
    block: int = 0
    setting: str = ""
    required: bool = False
    on_devices: bool = True

    @property
    def narrow(self) -> bool:
        """Whether it takes bfloat16 only."""
        return self.types == ("bf16",)


TRAITS: dict[CodecName, Traits] = {
    "none": Traits(
        codes=lambda fmt, numel, itemsize: numel * itemsize,
        keeps=tuple(FLOATS),
        exact=True,
        plain=True,
        on_devices=False,
    ),
    "bf16": Traits(
        codes=lambda fmt, numel, itemsize: 2 * numel, error=_bf16_error, keeps=("fp32", "bf16"), on_devices=False
    ),
    "int8": Traits(
        codes=lambda fmt, numel, itemsize: numel,
        behind=RecordFormat.scales_bytes,
        error=_block_error,
        levels=BlockCodes(8, -127, 127),
    ),
    "int4": Traits(
        codes=lambda fmt, numel, itemsize: -(-numel // 2),
        behind=RecordFormat.scales_bytes,
        error=_block_error,
        levels=BlockCodes(4, -8, 7),
    ),
    "exp": Traits(
        codes=lambda fmt, numel, itemsize: _aligned(numel) + -(-numel // 2),
        behind=_exp_heads,
        keeps=("fp32", "bf16"),
        types=("bf16",),
        exact=True,
        fallible=True,
        not_summed="which holds bfloat16 numbers, and sums are float32",
        block=EXP_LINE,
    ),
    "zfp": Traits(
        codes=lambda fmt, numel, itemsize: -(-fmt.blocks(numel) * fmt.rate // 2),
        error=_zfp_error,
        block=ZFP_BLOCK,
        setting="rate",
        required=True,
        on_devices=False,
    ),
    "mpc": Traits(
        codes=_mpc_bytes,
        widens=True,
        exact=True,
        fixed=False,
        not_summed="whose messages have no fixed size, as those of a stage have",
        block=MPC_CHUNK,
        setting="dimension",
        on_devices=False,
    ),
}
CODECS: tuple[CodecName, ...] = typing.get_args(CodecName)
#: Codecs whose blocks share a scale.
BLOCK_CODECS: tuple[CodecName, ...] = tuple(name for name, traits in TRAITS.items() if traits.levels)
#: Codecs that give back every bit.
LOSSLESS: tuple[CodecName, ...] = tuple(name for name, traits in TRAITS.items() if traits.exact)
#: Codecs that hold float32 sums in a fixed number of bytes, as a stage's gradients need.
SUMMED: tuple[CodecName, ...] = tuple(name for name, traits in TRAITS.items() if not traits.not_summed)
#: Those that need no setting beside their name.
NAMED: tuple[CodecName, ...] = tuple(name for name in SUMMED if not TRAITS[name].required)


# ---- where records lie ----------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The shards of a bucket, and their order in a message ``[outer][tensor][inner][record]``.

    Attributes:
        chunks: Elements of one shard of each tensor.
        sizes: Axes of the rows, row-major; their product is the number of rows.
        strides: Distance in shards between neighbours on each axis: row ``(i, j, ..)`` holds shard
            ``i * strides[0] + j * strides[1] + ..``.
        outer: Number of pieces of the message, each ``[tensor][rows / outer][record]``.
    """

    chunks: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    outer: int = 1

    @classmethod
    def of(
        cls, chunks: Sequence[int], sizes: Sequence[int], strides: Sequence[int] | None = None, outer: int = 1
    ) -> Rows:
        """The rows of these axes; without strides in shard order."""
        if strides is None:
            strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        return cls(tuple(chunks), tuple(sizes), tuple(strides), outer)

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
    chunks: tuple[int, ...]
    inner: int


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


# ---- shards ---------------------------------------------------------------------------------------------------------


def chunk_numel(numel: int, world_size: int) -> int:
    """Elements of one shard of a parameter: its size over the world, rounded up, as DeepSpeed partitions it."""
    return -(-numel // world_size)


def owned_numel(numel: int, chunk: int, rank: int) -> int:
    """Elements of a rank's shard, without the padding of the last ones, which have fewer than ``chunk`` or none."""
    return min(max(numel - rank * chunk, 0), chunk)
