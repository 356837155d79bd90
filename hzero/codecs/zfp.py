"""Reference of codec ``zfp``, in plain torch: a fixed number of bits for each block of four values, in the stream of zfp.

Lindstrom, "Fixed-Rate Compressed Floating-Point Arrays" (IEEE TVCG 20(12), 2014): a block becomes integers of one exponent,
a lifted transform takes what neighbours share out of them, and their bits are written plane by plane, the highest first,
until the bits of the block are used up (docs/payload_format.md). What a plane is written as depends on its four bits and on
how many of the values have had a bit set, so it comes from a table; nothing loops over blocks.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import torch

from hzero.codecs.formats import ZFP_BLOCK, ZFP_TINY, Layout, RecordFormat

#: Bits of a block before its planes: that it is not zero, and the exponent.
_HEAD = 9
#: Bits that one word of a block holds here; two hold the longest one, 24 bits a value.
_HALF, _MASK = 48, (1 << 48) - 1
#: Digits of base -2 from two's complement and back: add and exclusive or, or exclusive or and subtract.
_NEGABINARY, _WORD = 0xAAAAAAAA, 0xFFFFFFFF
#: Most bits that a plane takes.
_LONGEST = 7


def plane(values: int, seen: int) -> tuple[int, int, int]:
    """What a plane is written as.

    Args:
        values: The bit of each value, value 0 lowest.
        seen: How many values, from value 0, have been reached by set bits of planes before.

    Returns:
        The bits, the first one lowest; their number; and ``seen`` for the next plane.
    """
    bits, count, left = values & ((1 << seen) - 1), seen, values >> seen
    while seen < ZFP_BLOCK:
        if not left:
            return bits, count + 1, seen  # 0: no further value has a bit
        zeros = (left & -left).bit_length() - 1
        # 1, a 0 for each value that is passed over, and a 1 unless only the last value is left.
        ends = seen + zeros < ZFP_BLOCK - 1
        bits |= (1 | ends << (1 + zeros)) << count
        count += 1 + zeros + ends
        seen += 1 + zeros
        left >>= 1 + zeros
    return bits, count, seen


def values_of(bits: int, present: int, seen: int) -> tuple[int, int, int]:
    """The values of a plane from the bits that follow, of which only ``present`` are there; the inverse of `plane`.

    Where the bits end inside a plane, a value that is being looked for counts as found.

    Returns:
        The bit of each value, the bits taken, and ``seen`` for the next plane.
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
def _writing(device: torch.device) -> torch.Tensor:
    """int64 ``[3, 5 * 16]``: `plane` by ``seen`` and values. The copy to a device ends before this returns."""
    return torch.tensor([plane(values, seen) for seen in range(5) for values in range(16)]).t().contiguous().to(device)


@functools.cache
def _reading(device: torch.device) -> torch.Tensor:
    """int64 ``[3, 5 * 8 * 128]``: `values_of` by ``seen``, bits present, up to 7, and bits."""
    every = [
        values_of(bits, n, seen) for seen in range(5) for n in range(_LONGEST + 1) for bits in range(1 << _LONGEST)
    ]
    return torch.tensor(every).t().contiguous().to(device)


@functools.cache
def _scales(device: torch.device) -> torch.Tensor:
    """float32 ``[256]``: the unit of a block by the exponent in its head; that of small ones is subnormal or zero.

    Made of words: DeepSpeed's ``zero.Init`` gives new tensors of numbers its own type.
    """
    words = [struct.unpack("i", struct.pack("f", 2.0 ** (e - 157)))[0] for e in range(256)]
    return torch.tensor(words, dtype=torch.int32).view(torch.float32).to(device)


def encode(values: torch.Tensor, records: Sequence[torch.Tensor], layout: Layout, fmt: RecordFormat) -> None:
    """Writes records of zeroed memory from float32 ``[rows, blocks * 4]``."""
    rows = values.shape[0]
    blocks = _filled(values, layout).view(rows, -1, ZFP_BLOCK)
    exponents = ((blocks.view(torch.int32) >> 23) & 0xFF).amax(-1)
    lost, zero = exponents == 255, exponents <= ZFP_TINY
    plain = exponents.masked_fill(lost | zero, 127)
    factors = ((283 - plain) << 23).view(torch.float32).unsqueeze(-1)
    digits = _digits(blocks.masked_fill((lost | zero).unsqueeze(-1), 0.0).mul(factors).to(torch.int32))
    low = (1 | (plain + 1) << 1).to(torch.int64)
    high, at, seen = torch.zeros_like(low), torch.full_like(low, _HEAD), torch.zeros_like(low)
    table = _writing(values.device)
    for number in range(31, -1, -1):
        bits = (digits >> number & 1).mul_(torch.tensor([1, 2, 4, 8], device=values.device)).sum(-1)
        written, count, seen = table[:, seen * 16 + bits]
        low |= (written << at.clamp(max=_HALF)).masked_fill(at >= _HALF, 0)
        high |= (written << (at - _HALF).clamp(0, _HALF)).masked_fill(at < _HALF, 0) | low >> _HALF
        low &= _MASK
        high &= _MASK
        at += count
    low.masked_fill_(lost, 1).masked_fill_(zero, 0)
    high.masked_fill_(lost | zero, 0)
    places = torch.arange(fmt.rate, device=values.device)
    words = torch.where(places < 12, low.unsqueeze(-1), high.unsqueeze(-1))
    nibbles = (words >> places % 12 * 4 & 15).to(torch.uint8)
    for record, chunk, first in zip(records, layout.chunks, layout.block_starts):
        own = nibbles[:, first : first + fmt.blocks(chunk)].reshape(rows, -1)
        own = torch.nn.functional.pad(own, (0, own.shape[1] % 2))
        size = own.shape[1] // 2
        record[..., :size].copy_((own[:, ::2] | own[:, 1::2] << 4).view(*record.shape[:2], size))


def _filled(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Writes what zfp takes for the values that a last block lacks: the nearest ones, so that little changes."""
    for chunk, first in zip(layout.chunks, layout.block_starts):
        here = chunk % ZFP_BLOCK
        last = values[:, (first + chunk // ZFP_BLOCK) * ZFP_BLOCK :][:, :ZFP_BLOCK]
        if here == 1:
            last[:, 1] = last[:, 0]
        if here in (1, 2):
            last[:, 2] = last[:, 1]
        if here:
            last[:, 3] = last[:, 0]
    return values


def _digits(integers: torch.Tensor) -> torch.Tensor:
    """The transform of int32 ``[.., 4]``, in digits of base -2: int64 below 2**32."""
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
    """The inverse of `_digits` but for what the shifts drop: int32, which wraps."""
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


def decode(records: Sequence[torch.Tensor], rows: int, layout: Layout, fmt: RecordFormat) -> torch.Tensor:
    """float32 ``[rows, blocks * 4]``; what is beyond a record has no meaning."""
    device = records[0].device
    nibbles = records[0].new_zeros(rows, layout.row_blocks, fmt.rate)
    for record, chunk, first in zip(records, layout.chunks, layout.block_starts):
        blocks = fmt.blocks(chunk)
        packed = record[..., : fmt.code_bytes(chunk, 0)].reshape(rows, -1)
        pairs = torch.stack((packed & 15, packed >> 4), -1).view(rows, -1)
        nibbles[:, first : first + blocks] = pairs[:, : blocks * fmt.rate].view(rows, blocks, fmt.rate)
    places = torch.arange(fmt.rate, device=device)
    words = nibbles.to(torch.int64) << places % 12 * 4
    low, high = words[..., :12].sum(-1), words[..., 12:].sum(-1)
    exponents = (low >> 1) & 0xFF
    at, seen = torch.full_like(low, _HEAD), torch.zeros_like(low)
    digits = torch.zeros(*low.shape, ZFP_BLOCK, dtype=torch.int64, device=device)
    table, each = _reading(device), torch.arange(ZFP_BLOCK, device=device)
    for number in range(31, -1, -1):
        # The next bits, of either word or across both.
        bits = torch.where(
            at < _HALF,
            (low >> at.clamp(max=_HALF)) | (high << (_HALF - at).clamp(min=0)),
            high >> (at - _HALF).clamp(min=0),
        )
        present = (ZFP_BLOCK * fmt.rate - at).clamp(0, _LONGEST)
        values, taken, seen = table[:, (seen * (_LONGEST + 1) + present) * 128 + (bits & 127)]
        digits |= (values.unsqueeze(-1) >> each & 1) << number
        at += taken
    decoded = _integers(digits).to(torch.float32) * _scales(device)[exponents].unsqueeze(-1)
    some = low & 1 == 1
    decoded = decoded.masked_fill(~some.unsqueeze(-1), 0.0)
    return decoded.masked_fill((some & (exponents == 0)).unsqueeze(-1), torch.nan).view(rows, -1)
