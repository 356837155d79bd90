"""Reference of codecs ``int8`` and ``int4``, in plain torch: blocks of elements that share a scale.

docs/payload_format.md specifies the computation, including the order of operations. Buffers come from ``new_empty`` of an
argument: DeepSpeed's ``zero.Init`` converts the results of ``torch.empty`` to its type.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import pad

from hzero.codecs.formats import RecordFormat

_WORD = 0xFFFFFFFF


def encode(values: torch.Tensor, fmt: RecordFormat, source: str, seed: int, first_block: int) -> list[torch.Tensor]:
    """Returns codes and scales, as `hzero.codecs.formats.Traits` describes. The range of ``source`` limits the scales."""
    rows, numel = values.shape
    blocks = pad(values, (0, -numel % fmt.block_size)).view(rows, -1, fmt.block_size)
    scales = _scales_of(blocks, fmt, fmt.scale_limit(source))
    # A block with scale zero or NaN has no codes: division by infinity sets them to zero.
    divisors = scales.float().masked_fill_((scales == 0) | scales.isnan(), math.inf)
    quotients = (blocks / divisors.unsqueeze(-1)).view(rows, -1)
    if fmt.stochastic:
        quotients.add_(_noise(quotients, seed, first_block * fmt.block_size)).floor_()
    else:
        quotients.round_()
    # Infinity divided by infinity is NaN. Its block decodes to NaN with any codes.
    codes = quotients.nan_to_num_(0.0).clamp_(-fmt.levels, fmt.codes.highest).to(torch.int8).view(torch.uint8)
    if fmt.codes.bits < 8:
        # The first code of a byte is in its lowest bits. The shifted codes share no bit, so a sum joins them.
        parts = (codes & (1 << fmt.codes.bits) - 1).unflatten(1, (-1, 8 // fmt.codes.bits))
        codes = (parts << _shifts(parts, fmt)).sum(-1, dtype=torch.uint8)
    return [codes[:, : fmt.regions(numel, 0)[0]], scales.view(torch.uint8)]


def decode(records: torch.Tensor, numel: int, fmt: RecordFormat) -> torch.Tensor:
    """Returns values, still rotated, as `hzero.codecs.formats.Traits` describes."""
    (codes_end, scales_end), (_, scales, _) = fmt.regions(numel, 0), fmt.offsets(numel, 0)
    codes = records[:, :codes_end]
    if fmt.codes.bits < 8:
        parts = (codes.unsqueeze(-1) >> _shifts(codes, fmt)).flatten(1) & (1 << fmt.codes.bits) - 1
        codes = (parts ^ -fmt.codes.lowest) + fmt.codes.lowest  # wraps: sign extension of few bits
    values = codes[:, :numel].view(torch.int8).float()
    stored = records[:, scales : scales + scales_end].contiguous().view(torch.bfloat16)
    return values.mul_(stored.float().repeat_interleave(fmt.block_size, 1)[:, :numel])


def _shifts(like: torch.Tensor, fmt: RecordFormat) -> torch.Tensor:
    """Bit positions of the codes in a byte."""
    return torch.arange(0, 8, fmt.codes.bits, dtype=torch.uint8, device=like.device)


# ---- scales ---------------------------------------------------------------------------------------------------------


def _scales_of(blocks: torch.Tensor, fmt: RecordFormat, limit: float) -> torch.Tensor:
    """Scales, bfloat16 ``[rows, blocks]``, of float32 ``[rows, blocks, block_size]``; NaN for a block with NaN or infinity.

    Stochastic codes have positive scales that are rounded up, so that no code is clamped.
    """
    if fmt.stochastic or fmt.codes.lowest == -fmt.codes.highest:
        extremes, level = blocks.abs().amax(-1), float(fmt.levels)
    else:  # the sign of the largest element, the first one, decides which one has the additional code below zero
        extremes, level = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)).squeeze(-1), float(fmt.codes.lowest)
    # On CUDA, division by a Python number multiplies by its reciprocal, whose last bit may differ.
    exact = extremes / extremes.new_full((), level)
    if fmt.stochastic:  # round up to bfloat16; the number is not negative
        exact = (exact.view(torch.int32) + 0xFFFF).bitwise_and_(-0x10000).view(torch.float32)
    # Adding zero turns -0 into +0. A block without a scale then has one bit pattern, and decodes to +0.
    stored = exact.to(torch.bfloat16).clamp_(-limit, limit).add_(0.0)
    return stored.masked_fill_(~extremes.isfinite(), math.nan)


# ---- rotation -------------------------------------------------------------------------------------------------------


def rotated(rows: torch.Tensor, fmt: RecordFormat, factor: float = 1.0) -> torch.Tensor:
    """Multiplies records float32 ``[rows, numel]`` by ``factor`` and rotates them, if the format has a rotation.

    Groups of ``rotation`` elements are rotated, so that no element is far larger than the rest of its block, as in SDP4Bit
    (arXiv 2410.15526). The last block of a record stays unchanged unless it consists of whole groups: rotated elements are
    smaller, so the others would set their scale. The rotation is a Walsh-Hadamard transform. It is its own inverse up to a
    factor of 1 / rotation, a power of two.
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
    """Returns the unsigned 32-bit key for a seed."""
    return int(mixed(mixed((seed + 0x9E3779B9) & _WORD) ^ ((seed >> 32) & _WORD)))


def _noise(like: torch.Tensor, seed: int, first_column: int) -> torch.Tensor:
    """Returns numbers in (0, 1), float32 ``[rows, columns]``, from seed, row and column (docs/payload_format.md).

    Two columns share a 32-bit word. A record's first column is even.
    """
    rows = torch.arange(like.shape[0], dtype=torch.int64, device=like.device)
    pairs = torch.arange((like.shape[1] + 1) // 2, dtype=torch.int64, device=like.device)
    keys = mixed(rows & _WORD ^ noise_key(seed))
    words = mixed(keys.unsqueeze(-1) ^ (pairs + first_column % 2**32 // 2) % 2**31)
    bits = torch.stack((words & 0xFFFF, words >> 16), dim=-1).flatten(1)[:, : like.shape[1]]
    # 16 bits and a half: a code below 128 plus such a number is exact in float32, so multiples of the scale are preserved.
    return bits.to(torch.float32).add_(0.5).mul_(2.0**-16)


def mixed(word: Any) -> Any:
    """Applies ``lowbias32`` of https://nullprogram.com/blog/2018/07/31/ (public domain) to a number, or to int64 below 2**32."""
    word = ((word ^ word >> 16) * 0x7FEB352D) & _WORD
    word = ((word ^ word >> 15) * 0x846CA68B) & _WORD
    return word ^ word >> 16
