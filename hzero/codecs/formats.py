"""Codecs as data: one table of their properties, and the bytes of a shard in a payload (docs/payload_format.md).

Pure arithmetic without torch. To add a codec, define its name, an entry of `TRAITS` with its sizes and error bound, and a
reference module, whose two functions `Traits` describes. The page docs/architecture.md lists the other steps, such as settings
and kernels. Of other code, `hzero plan`'s search lists names, and codecs without codes share kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

#: A payload format.
CodecName: TypeAlias = Literal["none", "bf16", "int8", "int4", "zfp", "mpc", "exact"]

#: Number of the payload format. Raise it with every change of docs/payload_format.md after which another release would read a
#: payload differently. Ranks compare it before their first message (`hzero.comm.peers.unused_name`), and every checksum has it.
PAYLOAD_FORMAT = 1

#: Regions of a record are padded to a multiple of this many bytes, so that every region starts at an address for wide loads.
ALIGNMENT = 16

#: Bytes of the checksum after a part of a message.
CHECKSUM_BYTES = 16

#: Bytes of a block's scale, a bfloat16.
SCALE_BYTES = 2

#: Codec ``zfp``: elements of a block, and the largest biased exponent of float32 at which zfp's conversion to integers
#: overflows.
ZFP_BLOCK, ZFP_TINY = 4, 28

#: Codec ``mpc``: words of a chunk, and bytes of a record before the bitmaps.
MPC_CHUNK, MPC_HEADER = 1024, 16


class Float(NamedTuple):
    """A floating-point type.

    Attributes:
        roundoff: Largest relative error of rounding a normal number to the type.
        tiny: Largest absolute error of rounding any other number.
        largest: Largest finite number.
    """

    roundoff: float
    tiny: float
    largest: float


#: Exclusive limit for the elements of a shard and the rows of a message: kernels count them in 32 bits.
_MOST = 2**31

FLOATS = {
    "fp32": Float(2.0**-24, 2.0**-150, (2 - 2.0**-23) * 2.0**127),
    "bf16": Float(2.0**-8, 2.0**-134, (2 - 2.0**-7) * 2.0**127),
    "fp16": Float(2.0**-11, 2.0**-25, 65504.0),
}


class BlockCodes(NamedTuple):
    """The codes of a codec whose blocks share a scale: integers. `_code_error` and stochastic rounding rely on it.

    Attributes:
        bits: Bits of a code.
        lowest: Lowest code, which has the largest magnitude.
        highest: Highest code.
    """

    bits: int
    lowest: int
    highest: int


class RecordFormat(NamedTuple):
    """The settings that determine a codec's records. Settings that do not apply to the codec are 0.

    Attributes:
        codec: Name of the codec.
        block_size: Elements that share a scale; elements of a block of ``zfp`` or a chunk of ``mpc``; 0 for other codecs.
        rotation: Elements that are rotated together before encoding, a divisor of the block size; 0 for none.
        rate: Bits per value in codec ``zfp``.
        dimension: Distance between the values that codec ``mpc`` subtracts.
        bits: Expected bits of a weight in codec ``exact``. Only plans use it.
        stochastic: Whether codes are rounded stochastically instead of to nearest even; only with scales. It changes no size.
    """

    codec: CodecName
    block_size: int = 0
    rotation: int = 0
    rate: int = 0
    dimension: int = 0
    bits: float = 0
    stochastic: bool = False

    @classmethod
    def of(
        cls, codec: CodecName, block_size: int = 0, rotation: int = 0, stochastic: bool = False, **own: float | None
    ) -> RecordFormat:
        """Returns the format for valid settings. Settings that do not apply to the codec are ignored.

        ``own``: `Traits.settings`; None is the default.
        """
        traits = TRAITS[codec]
        if traits.codes:
            return cls(codec, block_size, rotation, stochastic=stochastic)
        settings: dict[str, Any] = {name: own.get(name) or default for name, default in traits.settings.items()}
        return cls(codec, traits.block)._replace(**settings)

    @property
    def traits(self) -> Traits:
        """The properties of the codec."""
        return TRAITS[self.codec]

    @property
    def codes(self) -> BlockCodes:
        """The codes of a codec with scales."""
        codes = self.traits.codes
        assert codes is not None, self.codec
        return codes

    @property
    def levels(self) -> int:
        """Magnitude of the code for a block's largest element; with stochastic rounding, one that both signs have."""
        return self.codes.highest if self.stochastic else -self.codes.lowest

    def blocks(self, numel: int) -> int:
        """Number of scales of a record of ``numel`` elements; blocks of ``zfp``, chunks of ``mpc``."""
        return -(-numel // self.block_size) if self.block_size else 0

    def regions(self, numel: int, itemsize: int) -> tuple[int, ...]:
        """Bytes of the regions of a record, without padding; codes come first.

        Args:
            numel: Elements of the record.
            itemsize: Item size of the decoded dtype; only codec ``none`` depends on it.
        """
        return self.traits.regions(self, numel, itemsize)

    def offsets(self, numel: int, itemsize: int) -> tuple[int, ...]:
        """Start offsets of the regions of a record, and its end.

        If codes and a single scale fit in `ALIGNMENT` bytes, they share these bytes, with the scale last. With tens of thousands
        of ranks, a bias has one element per record.
        """
        sizes = self.regions(numel, itemsize)
        if self.traits.codes and self.blocks(numel) == 1 and sum(sizes) <= ALIGNMENT:
            return 0, ALIGNMENT - SCALE_BYTES, ALIGNMENT
        padded = (-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
        return tuple(itertools.accumulate(padded, initial=0))

    def record_bytes(self, numel: int, itemsize: int) -> int:
        """Bytes of the whole record, the maximum for codec ``mpc``; 0 for an empty record."""
        return self.offsets(numel, itemsize)[-1]

    def message_bytes(self, chunks: Sequence[int], rows: int, itemsize: int) -> int:
        """Bytes of a message of ``rows`` shards of every tensor."""
        return rows * layout_of(tuple(chunks), self, itemsize).row_bytes

    def element_bytes(self, itemsize: int) -> float:
        """Bytes per element in a long record, including scales; the maximum for codec ``mpc``."""
        return self.record_bytes(1 << 16, itemsize) / (1 << 16)

    def error_bound(self, absmax: float, to: str) -> float:
        """Largest absolute error of a round trip; see `hzero.codecs.codec.Codec.error_bound`. ``to`` is a key of `FLOATS`."""
        error, reach = self.traits.error(self, absmax)
        target = FLOATS[to]
        if to not in self.traits.keeps:
            error += (absmax + error) * target.roundoff + target.tiny
        return error if reach <= target.largest else math.inf

    def alike(self, other: RecordFormat) -> bool:
        """Whether both formats have scales and the same blocks, with the same numbers in them."""
        both_scaled = self.traits.codes is not None and other.traits.codes is not None
        return both_scaled and (self.block_size, self.rotation) == (other.block_size, other.rotation)

    def scale_limit(self, source: str) -> float:
        """Largest scale, a bfloat16, whose largest code decodes to a finite number of the source type."""
        mantissa, exponent = math.frexp(FLOATS[source].largest / self.levels)
        return math.ldexp(math.floor(math.ldexp(mantissa, 8)), exponent - 8)


# ---- bytes and errors of each codec ---------------------------------------------------------------------------------


def _mpc_regions(fmt: RecordFormat, numel: int, itemsize: int) -> tuple[int, ...]:
    # Bitmaps and words of bit planes. The last chunk has as many words as its groups of 32 words, plus one.
    rest = -(-(numel % MPC_CHUNK) // 32) * 32
    words = numel // MPC_CHUNK * MPC_CHUNK + (min(rest + 1, MPC_CHUNK) if rest else 0)
    return (MPC_HEADER + fmt.blocks(numel) * MPC_CHUNK // 8 + 4 * words if numel else 0,)


def _exact_regions(fmt: RecordFormat, numel: int, itemsize: int) -> tuple[int, ...]:
    return (min(math.ceil(numel * fmt.bits / 8), numel * 2) if itemsize == 2 else numel * itemsize,)


def _bf16_error(fmt: RecordFormat, absmax: float) -> tuple[float, float]:
    mantissa, exponent = math.frexp(absmax)
    rounded = math.ldexp(round(math.ldexp(mantissa, 8)), exponent - 8)
    return absmax * FLOATS["bf16"].roundoff + FLOATS["bf16"].tiny, rounded


def _zfp_error(fmt: RecordFormat, absmax: float) -> tuple[float, float]:
    if not absmax:
        return 0.0, 0.0
    unit = math.ldexp(1.0, math.frexp(absmax)[1] - 30)
    # Decoded integers have 32 bits. With few planes, sums may wrap, so this is the only bound.
    error = absmax + 2.0**31 * unit
    if fmt.rate >= 7:
        error = min(error, (6.25 * 2.0 ** (34 - fmt.rate) + 12) * unit)
    error += 2.0**-24 * (absmax + error)
    error = max(error, min(absmax, math.ldexp(1.0, ZFP_TINY - 126)))
    return error, absmax + error


def _block_error(fmt: RecordFormat, absmax: float) -> tuple[float, float]:
    size = fmt.rotation
    if not size:
        return _code_error(fmt, absmax), 0.0  # `scale_limit` keeps it in range
    # A rotated element is a mean, with a magnitude of at most absmax. A decoded element is a sum of `size` of them.
    rotating = 1.2 * 2.0**-23 * math.log2(size) * absmax + size * 2.0**-150
    error = size * (_code_error(fmt, absmax * (1 + 2.0**-20)) + rotating)
    overflows = size * absmax + error > FLOATS["fp32"].largest  # the largest partial sum
    return error, math.inf if overflows else absmax + error


def _code_error(fmt: RecordFormat, absmax: float) -> float:
    single, (roundoff, tiny, _) = FLOATS["fp32"].roundoff, FLOATS["bf16"]
    if fmt.stochastic:  # scales are rounded up
        roundoff, tiny = 2 * roundoff, 2 * tiny
    scale = absmax / fmt.levels
    clamped = any(scale > fmt.scale_limit(name) and absmax <= kind.largest for name, kind in FLOATS.items())
    # Largest distance between stored and exact scale, and the resulting error of an element.
    drift = scale * ((2 if clamped else 1) * roundoff + 2 * single) + tiny + 2.0**-150
    step = (scale + drift) * (1.0 if fmt.stochastic else 0.5)
    cut = fmt.levels * drift
    if fmt.codes.highest < fmt.levels:
        # int4: the sign opposite to the largest element's has one level less.
        cut = max(cut, scale + fmt.codes.highest * drift)
    return max(step, cut) + 3 * single * absmax + 2.0**-149


# ---- the table ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Traits:
    """Properties of a codec that do not depend on its settings.

    The reference module of a codec has two functions, in plain torch and for tensors on any device. They encode and decode the
    records of one tensor, a row each; `hzero.codecs.reference` selects the rows, rotates, pads and places the records:

    - ``encode(values, fmt, source, seed, first_block)`` returns the regions of the records, uint8 ``[rows, bytes]`` each, in the
      order and with the bytes of `regions`; shorter regions are padded with zeros. ``values`` is float32 ``[rows, numel]``, with
      at least one element, and must not be changed. ``fmt`` is the `RecordFormat`, ``source`` the dtype of the elements as a key
      of `FLOATS`, and ``seed`` the seed of stochastic rounding. ``first_block`` is the number of blocks of the preceding tensors
      in a row.
    - ``decode(records, numel, fmt)`` returns float32 ``[rows, numel]`` from uint8 ``[rows, bytes]``, the padded records. It must
      accept any bytes.

    Attributes:
        regions: See `RecordFormat.regions`.
        error: Largest error in float32, and the largest magnitude of a decoded element, by format and largest magnitude in the
            block.
        reference: Module of hzero.codecs that encodes and decodes its records in plain torch; "" if records are the elements,
            in their own type if ``plain``, else in bfloat16.
        compiled: Where compiled code exists: nowhere, in the library for CPUs, or on devices too.
        widens: Whether it encodes float32 only. 16-bit numbers are then converted to float32 before, without loss.
        keeps: Types to which a decoded element is converted without another rounding.
        exact: Whether every element is decoded to its original bits.
        plain: Whether codes are the elements themselves, which a library can sum.
        fixed: Whether messages have a fixed size, as a stage requires. Otherwise, a message may use less than its records'
            space.
        changes: Whether messages have the changes of weights from the receivers' copy, which only a refresh can send.
        codes: The integer codes of a codec whose blocks share a scale. Only these codecs have the settings block size, rotation
            and stochastic rounding.
        block: Elements of a block, for codecs without scales.
        span: Elements that a kernel processes together if they are not a block. Arguments: whether it encodes, and the longest
            record.
        between_groups: Codec that replaces it between groups of nodes if none is set. Few bytes cross groups, so a coarse codec
            saves little time there.
        settings: Settings that only this codec has, with their defaults; see `RecordFormat`.
    """

    regions: Callable[[RecordFormat, int, int], tuple[int, ...]]
    error: Callable[[RecordFormat, float], tuple[float, float]] = lambda fmt, absmax: (0.0, absmax)
    reference: str = ""
    compiled: Literal["", "cpu", "all"] = ""
    widens: bool = False
    keeps: tuple[str, ...] = ("fp32",)
    exact: bool = False
    plain: bool = False
    fixed: bool = True
    changes: bool = False
    codes: BlockCodes | None = None
    block: int = 0
    span: Callable[[bool, int], int] | None = None
    between_groups: CodecName | None = None
    settings: Mapping[str, float] = dataclasses.field(default_factory=dict)


TRAITS: dict[CodecName, Traits] = {
    "none": Traits(
        lambda fmt, numel, itemsize: (numel * itemsize,),
        compiled="all",
        keeps=tuple(FLOATS),
        exact=True,
        plain=True,
        span=lambda encodes, longest: 1024,
    ),
    "bf16": Traits(
        lambda fmt, numel, itemsize: (2 * numel,),
        _bf16_error,
        compiled="all",
        keeps=("fp32", "bf16"),
        span=lambda encodes, longest: 1024,
    ),
    "int8": Traits(
        lambda fmt, numel, itemsize: (numel, SCALE_BYTES * fmt.blocks(numel)),
        _block_error,
        reference="blocks",
        compiled="all",
        codes=BlockCodes(8, -127, 127),
    ),
    "int4": Traits(
        lambda fmt, numel, itemsize: (-(-numel // 2), SCALE_BYTES * fmt.blocks(numel)),
        _block_error,
        reference="blocks",
        compiled="all",
        codes=BlockCodes(4, -8, 7),
        between_groups="int8",
    ),
    "zfp": Traits(
        lambda fmt, numel, itemsize: (-(-fmt.blocks(numel) * fmt.rate // 2),),
        _zfp_error,
        reference="zfp",
        compiled="cpu",
        block=ZFP_BLOCK,
        span=lambda encodes, longest: 64,  # so blocks end at whole words
        settings={"rate": 16},
    ),
    "mpc": Traits(
        _mpc_regions,
        reference="mpc",
        compiled="cpu",
        widens=True,
        exact=True,
        fixed=False,
        block=MPC_CHUNK,
        span=lambda encodes, longest: longest if encodes else MPC_CHUNK,  # single chunks can be decoded
        settings={"dimension": 1},
    ),
    "exact": Traits(
        _exact_regions,
        keeps=tuple(FLOATS),
        exact=True,
        fixed=False,
        changes=True,
        settings={"bits": 3.5},
    ),
}
#: Codecs whose blocks share a scale.
BLOCK_CODECS: tuple[CodecName, ...] = tuple(name for name, traits in TRAITS.items() if traits.codes)
#: Codecs that preserve every bit, in messages of a fixed size.
LOSSLESS: tuple[CodecName, ...] = tuple(name for name, traits in TRAITS.items() if traits.exact and traits.fixed)
#: Codecs with messages of a fixed size, as a stage requires.
FIXED: tuple[CodecName, ...] = tuple(name for name, traits in TRAITS.items() if traits.fixed)


# ---- record layout --------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The shards of a bucket, and their order in a message ``[outer][tensor][inner][record]``; made by `of`.

    Attributes:
        chunks: Elements of one shard of each tensor.
        sizes: Axes of the rows, row-major and as few as possible; the product of the first ones is ``outer``.
        strides: Distance in shards between neighbours on each axis: row ``(i, j, ..)`` contains shard ``i * strides[0] + j *
            strides[1] + ..``.
        outer: Number of pieces of the message, each ``[tensor][rows / outer][record]``.
        parts: Number of parts of the message. A part consists of successive pieces and ends with a checksum. 0: no checksums.
    """

    chunks: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    outer: int
    parts: int = 0

    @classmethod
    def of(
        cls,
        chunks: Sequence[int],
        sizes: Sequence[int],
        strides: Sequence[int] | None = None,
        outer: int = 1,
        parts: int = 0,
    ) -> Rows:
        """Returns the rows for these axes; without strides, in shard order.

        Raises:
            ValueError: The axes miss or repeat a shard, or pieces divide an axis or parts unevenly.
        """
        if not chunks or not 0 <= min(chunks) <= max(chunks) < _MOST:
            raise ValueError(f"chunks: found {list(chunks)[:8]}; expected at least one, each from 0 to 2**31 - 1")
        if not sizes or min(sizes) < 1 or math.prod(sizes) >= _MOST:
            raise ValueError(f"sizes: found {list(sizes)}; expected sizes of at least 1 with fewer than 2**31 rows")
        if strides is None:
            strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        # Each shard is reached once exactly if each stride is the product of the sizes with smaller strides. Otherwise, a shard
        # would be written twice and another one never.
        reached = 1
        for stride, size in sorted((stride, size) for stride, size in zip(strides, sizes) if size > 1):
            reached = reached * size if stride == reached else 0
        if not reached or len(strides) != len(sizes):
            raise ValueError(f"strides: found {list(strides)}, which miss or repeat shards of sizes {list(sizes)}")
        merged: list[tuple[int, int]] = []
        for size, stride in zip(sizes, strides):
            if merged and merged[-1][1] == size * stride:
                merged[-1] = merged[-1][0] * size, stride
            elif size > 1:
                merged.append((size, stride))
        axes: list[tuple[int, int]] = []
        left = outer  # pieces that the axes so far do not separate
        for size, stride in merged or [(1, 1)]:
            ahead = max(min(left, size), 1)
            if left % ahead or size % ahead:
                break
            axes += [(ahead, size // ahead * stride), (size // ahead, stride)] if 1 < ahead < size else [(size, stride)]
            left //= ahead
        if left != 1:
            raise ValueError(f"outer: found {outer}, which does not divide rows of {list(sizes)}")
        if parts < 0 or (parts and outer % parts):
            raise ValueError(f"parts: found {parts}; expected a divisor of the {outer} pieces, or 0")
        return cls(tuple(chunks), tuple(size for size, _ in axes), tuple(stride for _, stride in axes), outer, parts)

    @property
    def total(self) -> int:
        """Number of rows."""
        return math.prod(self.sizes)

    @property
    def inner(self) -> int:
        """Rows per piece."""
        return self.total // self.outer

    def message_bytes(self, fmt: RecordFormat, itemsize: int) -> int:
        """Bytes of the message, including checksums."""
        return fmt.message_bytes(self.chunks, self.total, itemsize) + CHECKSUM_BYTES * self.parts


class Layout(NamedTuple):
    """Offsets of one bucket in one format; the message is ``[outer][tensor][inner][record]``.

    Attributes:
        record_bytes: Bytes of one record of each tensor.
        record_starts: Sum of the record bytes of the preceding tensors.
        scales_offsets: Offset of the scales in each record.
        row_bytes: Bytes of one row: one record of every tensor.
        block_starts: Number of blocks of the preceding tensors.
    """

    record_bytes: tuple[int, ...]
    record_starts: tuple[int, ...]
    scales_offsets: tuple[int, ...]
    row_bytes: int
    block_starts: tuple[int, ...]


@functools.lru_cache(maxsize=4096)  # hops share few buckets
def layout_of(chunks: tuple[int, ...], fmt: RecordFormat, itemsize: int) -> Layout:
    """Returns the layout of a bucket whose shards have ``chunks`` elements of ``itemsize`` bytes."""
    offsets = [fmt.offsets(chunk, itemsize) for chunk in chunks]
    *starts, row_bytes = itertools.accumulate((record[-1] for record in offsets), initial=0)
    *block_starts, _ = itertools.accumulate(map(fmt.blocks, chunks), initial=0)
    return Layout(
        record_bytes=tuple(record[-1] for record in offsets),
        record_starts=tuple(starts),
        scales_offsets=tuple(record[len(record) - 2] for record in offsets),
        row_bytes=row_bytes,
        block_starts=tuple(block_starts),
    )


# ---- shards ---------------------------------------------------------------------------------------------------------


def chunk_numel(numel: int, world_size: int) -> int:
    """Elements of one shard of a parameter: its size divided by the world size, rounded up, as in DeepSpeed."""
    return -(-numel // world_size)


def owned_numel(numel: int, chunk: int, rank: int) -> int:
    """Elements of a rank's shard without padding. The last ranks' shards have fewer than ``chunk`` elements, or none."""
    return min(max(numel - rank * chunk, 0), chunk)
