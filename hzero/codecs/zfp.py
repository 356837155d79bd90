"""Reference of codec ``zfp``, in plain torch: a fixed number of bits per block of four values, in zfp's stream format.

Lindstrom, "Fixed-Rate Compressed Floating-Point Arrays" (IEEE TVCG 20(12), 2014). A block is converted to integers with one
exponent, and a lifted transform decorrelates them. Their bits are written plane by plane, the highest first, until the block's
bits are used up. The code of a plane depends on its four bits and on the number of values that already have a set bit. It comes
from a table, so no loop runs over blocks.

**Format.** The stream of zfp in one dimension, fixed rate, float32, without a header. ``rate`` is 4 to 24 bits per value; every
block of four elements takes ``4 * rate`` bits. Bytes and decoded numbers equal the output of zfpy 1.0,
``compress_numpy(x, rate=rate, write_header=False)``, except in the two cases below. A record is padded to 16 bytes. Bits fill
bytes from the lowest one. Each block has a head of 9 bits: 1, then 8 bits with the largest exponent field of its float32 plus 1.
A zero block has a bit 0 and zeros. If a block's bits end during the search for a next value, the value at which they end counts.

zfp does not define two cases. A block with NaN or infinity has the head 1, exponent 0, and zeros; it decodes to four NaNs. A
block whose numbers are all below 2^-98 is written as zero.

**Error bound.** For a block of largest magnitude m, 2^(E - 1) <= m < 2^E, the error is at most
(6.25 * 2^(34 - rate) + 12) * 2^(E - 30), plus 2^-24 of m and of itself; for rates below 7 at most m + 2^(E + 1). In units of m:
5 at rate 4, 0.8 at 8, 0.049 at 12, 0.0031 at 16, 1.2e-5 at 24. On normal numbers, ``int8`` has over 15 dB less noise than
``zfp`` at 8 bits.
"""

from __future__ import annotations

import functools

import torch
from torch.nn.functional import pad

from hzero.codecs.formats import ZFP_BLOCK, ZFP_TINY, RecordFormat

#: Bits of a block before its planes: a nonzero flag and the exponent.
_HEAD = 9
#: Conversion between two's complement and digits of base -2: add and exclusive or, or exclusive or and subtract.
_NEGABINARY, _WORD = 0xAAAAAAAA, 0xFFFFFFFF
#: Maximum bits of a plane.
_LONGEST = 7


def plane(values: int, seen: int) -> tuple[int, int, int]:
    """Returns the code of a plane.

    Args:
        values: The bit of each value, value 0 lowest.
        seen: Number of values, from value 0, that set bits of earlier planes have reached.

    Returns:
        The bits, the first one lowest; their number; and ``seen`` for the next plane.
    """
    bits, count, left = values & ((1 << seen) - 1), seen, values >> seen
    while seen < ZFP_BLOCK:
        if not left:
            return bits, count + 1, seen  # 0: no further value has a bit
        zeros = (left & -left).bit_length() - 1
        # 1, a 0 for each skipped value, and a 1 unless only the last value is left.
        ends = seen + zeros < ZFP_BLOCK - 1
        bits |= (1 | ends << (1 + zeros)) << count
        count += 1 + zeros + ends
        seen += 1 + zeros
        left >>= 1 + zeros
    return bits, count, seen


def values_of(bits: int, present: int, seen: int) -> tuple[int, int, int]:
    """Returns the values of a plane from the following bits, of which only ``present`` exist; the inverse of `plane`.

    If the bits end inside a plane, the value that is being searched counts as set.

    Returns:
        The bit of each value, the number of bits read, and ``seen`` for the next plane.
    """
    taken = min(seen, present)
    values = bits & ((1 << taken) - 1)
    while taken < present and seen < ZFP_BLOCK:
        taken += 1
        if not bits >> (taken - 1) & 1:
            break
        while seen < ZFP_BLOCK - 1 and taken < present:
            taken += 1
            if bits >> (taken - 1) & 1:
                break
            seen += 1
        values |= 1 << seen
        seen += 1
    return values, taken, seen


@functools.cache
def _tables(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Tables on a device, complete when this returns.

    Returns:
        `plane` by ``seen`` and values, int64 ``[3, 5 * 16]``; `values_of` by ``seen``, bits present and bits; the indices of a
        block's values; the indices of a plane's bits.
    """
    writing = [plane(values, seen) for seen in range(5) for values in range(16)]
    present, bits = range(_LONGEST + 1), range(1 << _LONGEST)
    reading = [values_of(every, n, seen) for seen in range(5) for n in present for every in bits]
    tables = [torch.tensor(table).t().contiguous() for table in (writing, reading)]
    return tuple(table.to(device) for table in (*tables, torch.arange(ZFP_BLOCK), torch.arange(_LONGEST)))


def encode(values: torch.Tensor, fmt: RecordFormat, *unused: object) -> list[torch.Tensor]:
    """Returns the streams, as `hzero.codecs.formats.Traits` describes."""
    rows, numel = values.shape
    short = numel % ZFP_BLOCK
    # zfp fills a short last block with the nearest values, so that the transform changes little.
    nearest = [numel - short + place for place in {0: (), 1: (0, 0, 0), 2: (1, 0), 3: (0,)}[short]]
    blocks = torch.cat((values, values[:, nearest]), dim=1).view(-1, ZFP_BLOCK)
    exponents = (blocks.view(torch.int32) >> 23 & 0xFF).amax(-1)
    lost, zero = exponents == 255, exponents <= ZFP_TINY
    plain = exponents.masked_fill(lost | zero, 127)
    factors = ((283 - plain) << 23).view(torch.float32).unsqueeze(-1)
    digits = _digits(blocks.masked_fill((lost | zero).unsqueeze(-1), 0.0).mul(factors).to(torch.int32))
    # One bit per byte, the first one first. Bits after the block's last bit are dropped.
    size, device = ZFP_BLOCK * fmt.rate, values.device
    stream = digits.new_zeros(len(blocks), size + _LONGEST, dtype=torch.uint8)
    stream[:, :_HEAD] = (1 | plain + 1 << 1).unsqueeze(-1) >> torch.arange(_HEAD, device=device) & 1
    at, seen = torch.full_like(plain, _HEAD, dtype=torch.int64), torch.zeros_like(plain, dtype=torch.int64)
    table, _, each, places = _tables(device)
    for number in range(31, -1, -1):
        bits = ((digits >> number & 1) << each).sum(-1)
        written, count, seen = table[:, seen * 16 + bits]
        # The next plane overwrites the zeros after the bits of this one.
        stream.scatter_(1, at.unsqueeze(-1) + places, (written.unsqueeze(-1) >> places & 1).to(torch.uint8))
        at = (at + count).clamp_(max=size)
    stream.masked_fill_((lost | zero).unsqueeze(-1), 0)[:, 0] = ~zero
    whole = stream[:, :size].reshape(rows, -1)
    octets = pad(whole, (0, -whole.shape[1] % 8)).view(rows, -1, 8) << torch.arange(8, device=device)
    return [octets.sum(-1).to(torch.uint8)]


def _digits(integers: torch.Tensor) -> torch.Tensor:
    """Transforms int32 ``[.., 4]`` into digits of base -2: int64 below 2**32."""
    x, y, z, w = integers.unbind(-1)
    x = (x + w) >> 1
    w = w - x
    z = (z + y) >> 1
    y = y - z
    x = (x + z) >> 1
    z = z - x
    w = (w + y) >> 1
    y = y - w
    w = w + (y >> 1)
    y = y - (w >> 1)
    coded = torch.stack((x, y, z, w), -1).to(torch.int64)
    return (coded + _NEGABINARY & _WORD) ^ _NEGABINARY


def _integers(digits: torch.Tensor) -> torch.Tensor:
    """Inverse of `_digits`, except for bits that the shifts drop: int32, with wrap-around."""
    x, y, z, w = ((digits ^ _NEGABINARY) - _NEGABINARY).to(torch.int32).unbind(-1)
    y = y + (w >> 1)
    w = w - (y >> 1)
    y = y + w
    w = (w << 1) - y
    z = z + x
    x = (x << 1) - z
    y = y + z
    z = (z << 1) - y
    w = w + x
    x = (x << 1) - w
    return torch.stack((x, y, z, w), -1)


def decode(records: torch.Tensor, numel: int, fmt: RecordFormat) -> torch.Tensor:
    """Returns float32 ``[rows, numel]`` from records uint8 ``[rows, bytes]``."""
    rows, size, device = records.shape[0], ZFP_BLOCK * fmt.rate, records.device
    stream = (records.unsqueeze(-1) >> torch.arange(8, device=device) & 1).view(rows, -1)
    stream = pad(stream[:, : fmt.blocks(numel) * size].reshape(-1, size), (0, _LONGEST)).to(torch.int64)
    exponents = (stream[:, 1:_HEAD] << torch.arange(_HEAD - 1, device=device)).sum(-1)
    at, seen = torch.full_like(exponents, _HEAD), torch.zeros_like(exponents)
    digits = stream.new_zeros(len(stream), ZFP_BLOCK)
    _, table, each, places = _tables(device)
    for number in range(31, -1, -1):
        bits = (stream.gather(1, at.unsqueeze(-1) + places) << places).sum(-1)
        present = (size - at).clamp_(max=_LONGEST)
        values, taken, seen = table[:, (seen * (_LONGEST + 1) + present) * 128 + bits]
        digits |= (values.unsqueeze(-1) >> each & 1) << number
        at += taken
    # The unit of a block, from the bits of a float64: in float32, a small unit is subnormal or zero.
    units = (exponents + 1023 - 157 << 52).view(torch.float64).to(torch.float32).unsqueeze(-1)
    decoded = _integers(digits).to(torch.float32) * units
    some = stream[:, 0] == 1
    decoded.masked_fill_(~some.unsqueeze(-1), 0.0).masked_fill_((some & (exponents == 0)).unsqueeze(-1), torch.nan)
    return decoded.view(rows, -1)[:, :numel]
