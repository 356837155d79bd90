"""Reference of codecs ``int8``, ``int4`` and ``int2``, in plain torch: blocks of elements that share a scale.

docs/payload_format.md says what is computed here; the order of the operations is part of it. Buffers come from ``new_empty`` of
an argument: DeepSpeed's ``zero.Init`` turns what ``torch.empty`` makes into its own type.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import pad

from hzero.codecs.formats import RecordFormat

_WORD = 0xFFFFFFFF


def encode(values: torch.Tensor, fmt: RecordFormat, source: str, seed: int, first_block: int) -> list[torch.Tensor]:
    """The parts of records: codes, and scales.

    Args:
        values: float32 ``[rows, numel]``, rotated if the format says so.
        fmt: Their format.
        source: Type of the elements, whose range limits the scales.
        seed: Of stochastic rounding.
        first_block: Blocks of the tensors before in a row.

    Returns:
        uint8 ``[rows, bytes]`` each.
    """
    rows, numel = values.shape
    blocks = pad(values, (0, -numel % fmt.block_size)).view(rows, -1, fmt.block_size)
    scales = _scales_of(blocks, fmt, fmt.scale_limit(source))
    # A block of zero or NaN scale has no codes: dividing by infinity makes them zero.
    divisors = scales.float().masked_fill_((scales == 0) | scales.isnan(), math.inf)
    quotients = (blocks / divisors.unsqueeze(-1)).view(rows, -1)
    if fmt.stochastic:
        quotients.add_(_noise(quotients, seed, first_block * fmt.block_size)).floor_()
    else:
        quotients.round_()
    # Infinity over infinity is NaN; its block decodes to NaN whatever the codes are.
    codes = quotients.nan_to_num_(0.0).clamp_(-fmt.levels, fmt.codes.highest).to(torch.int8).view(torch.uint8)
    if fmt.codes.bits < 8:
        # The first code of a byte is in its lowest bits. The shifted codes share no bit, so a sum joins them.
        parts = (codes & (1 << fmt.codes.bits) - 1).unflatten(1, (-1, 8 // fmt.codes.bits))
        codes = (parts << _shifts(parts, fmt)).sum(-1, dtype=torch.uint8)
    return [codes[:, : fmt.regions(numel, 0)[0]], scales.view(torch.uint8)]


def decode(records: torch.Tensor, numel: int, fmt: RecordFormat) -> torch.Tensor:
    """float32 ``[rows, numel]``, still rotated, of records uint8 ``[rows, bytes]``."""
    (codes_end, scales_end), (_, scales, _) = fmt.regions(numel, 0), fmt.offsets(numel, 0)
    codes = records[:, :codes_end]
    if fmt.codes.bits < 8:
        parts = (codes.unsqueeze(-1) >> _shifts(codes, fmt)).flatten(1) & (1 << fmt.codes.bits) - 1
        codes = (parts ^ -fmt.codes.lowest) + fmt.codes.lowest  # wraps: the sign of so few bits
    values = codes[:, :numel].view(torch.int8).float()
    stored = records[:, scales : scales + scales_end].contiguous().view(torch.bfloat16)
    return values.mul_(stored.float().repeat_interleave(fmt.block_size, 1)[:, :numel])


def _shifts(like: torch.Tensor, fmt: RecordFormat) -> torch.Tensor:
    """Places of the codes in a byte."""
    return torch.arange(0, 8, fmt.codes.bits, dtype=torch.uint8, device=like.device)


# ---- scales ---------------------------------------------------------------------------------------------------------


def _scales_of(blocks: torch.Tensor, fmt: RecordFormat, limit: float) -> torch.Tensor:
    """bfloat16 ``[rows, blocks]`` of float32 ``[rows, blocks, block_size]``; NaN for a block that holds NaN or infinity.

    Stochastic codes have positive scales that are rounded up, so that no code is clamped.
    """
    if fmt.stochastic or fmt.codes.lowest == -fmt.codes.highest:
        extremes, level = blocks.abs().amax(-1), float(fmt.levels)
    else:  # the sign of the largest element, the first one, decides which one has the additional code below zero
        extremes, level = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)).squeeze(-1), float(fmt.codes.lowest)
    # On CUDA a division by a Python number multiplies by its reciprocal, which is not the same last bit.
    exact = extremes / extremes.new_full((), level)
    if fmt.stochastic:  # the next bfloat16 that is not below a number, which is not negative
        exact = (exact.view(torch.int32) + 0xFFFF).bitwise_and_(-0x10000).view(torch.float32)
    # Adding zero turns -0 into +0: a block without a scale has one bit pattern, and decodes to +0.
    stored = exact.to(torch.bfloat16).clamp_(-limit, limit).add_(0.0)
    return stored.masked_fill_(~extremes.isfinite(), math.nan)


# ---- rotation -------------------------------------------------------------------------------------------------------


def rotated(rows: torch.Tensor, fmt: RecordFormat, factor: float = 1.0) -> torch.Tensor:
    """Records float32 ``[rows, numel]``, times ``factor`` and rotated where the format says so.

    Groups of ``rotation`` elements are rotated, so that no element is far larger than the rest of its block, as SDP4Bit does
    (arXiv 2410.15526). The last block of a record stays as it is unless it consists of such groups: rotated elements are
    smaller, and those beside them would set their scale. The rotation is a Walsh-Hadamard transform: its own inverse but for
    a factor of 1 / rotation, a power of two.
    """
    size, numel = fmt.rotation, rows.shape[1]
    whole = 0 if not size else numel // fmt.block_size * fmt.block_size if numel % size else numel
    if not whole:
        return rows
    groups = rows[:, :whole].reshape(-1, size) * factor
    distance = 1
    while distance < size:
        pairs = groups.view(-1, 2, distance)
        groups = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), dim=1)
        distance *= 2
    return torch.cat((groups.view(-1, whole), rows[:, whole:]), dim=1)


# ---- stochastic rounding --------------------------------------------------------------------------------------------


def noise_key(seed: int) -> int:
    """The unsigned 32-bit key of a seed."""
    key: int = mixed(mixed((seed + 0x9E3779B9) & _WORD) ^ ((seed >> 32) & _WORD))
    return key


def _noise(like: torch.Tensor, seed: int, first_column: int) -> torch.Tensor:
    """Numbers of (0, 1), float32 ``[rows, columns]``, from seed, row and column (docs/payload_format.md).

    Two columns share a word of 32 bits. A record's first column is even.
    """
    rows = torch.arange(like.shape[0], dtype=torch.int64, device=like.device)
    pairs = torch.arange((like.shape[1] + 1) // 2, dtype=torch.int64, device=like.device)
    keys = mixed(rows & _WORD ^ noise_key(seed))
    words = mixed(keys.unsqueeze(-1) ^ (pairs + first_column % 2**32 // 2) % 2**31)
    bits = torch.stack((words & 0xFFFF, words >> 16), dim=-1).flatten(1)[:, : like.shape[1]]
    # 16 bits and a half: a code below 128 plus such a number is exact in float32, so multiples of the scale stay.
    return bits.to(torch.float32).add_(0.5).mul_(2.0**-16)


def mixed(word: Any) -> Any:
    """``lowbias32`` of https://nullprogram.com/blog/2018/07/31/ (public domain), of a number or of int64 ones below 2**32."""
    word = ((word ^ word >> 16) * 0x7FEB352D) & _WORD
    word = ((word ^ word >> 15) * 0x846CA68B) & _WORD
    return word ^ word >> 16
