"""Scales of codecs ``int8`` and ``int4``, in plain torch: from the blocks' extremes to bytes of a record, and back."""

from __future__ import annotations

import functools
import math

import torch

from hzero.codecs.formats import FACTOR_SPAN, RecordFormat
from hzero.codecs.layout import Layout

#: Types of scales as they are multiplied, by the bytes of a stored one. Those of one byte are products with a factor.
SCALE_DTYPES = {1: torch.bfloat16, 2: torch.bfloat16, 4: torch.float32}
_SCALE_BITS = {1: 8, 2: 8, 4: 24}  # significant bits of each
#: Largest code of a scale of one byte.
SCALE_LEVELS = 127


def encode(
    blocks: torch.Tensor, layout: Layout, fmt: RecordFormat, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of blocks.

    Args:
        blocks: float32 ``[rows, blocks, block_size]``.
        layout: Of the message.
        fmt: Of the message.
        dtype: Type of the elements, whose range limits the scales.

    Returns:
        float32 ``[rows, blocks]``, as a decoder multiplies by them, NaN for a block that holds NaN or infinity, or, with
        scales of one byte, whose span does; and uint8 ``[rows, bytes]``, the stored scales of all records.
    """
    if fmt.codec == "int8":
        extremes, level = torch.maximum(-blocks.amin(-1), blocks.amax(-1)), 127.0
    else:
        extremes, level = _extremes(blocks), -8.0
    # On CUDA a division by a Python number multiplies by its reciprocal, which is not the same last bit.
    exact = extremes / extremes.new_full((), level)
    limit = scale_limit(fmt, dtype)
    if fmt.scale_bytes == 1:
        return _coded(exact, extremes.isfinite(), limit, layout, fmt)
    # Adding zero turns -0 into +0: a block without a scale has one bit pattern, and decodes to +0.
    stored = exact.to(SCALE_DTYPES[fmt.scale_bytes]).clamp_(-limit, limit).add_(0.0)
    stored.masked_fill_(~extremes.isfinite(), math.nan)
    return stored.float(), stored.view(torch.uint8)


def decode(stored: torch.Tensor, layout: Layout, fmt: RecordFormat) -> torch.Tensor:
    """The scales, float32 ``[rows, blocks]``, of the bytes that `encode` gives."""
    if fmt.scale_bytes > 1:
        return stored.view(SCALE_DTYPES[fmt.scale_bytes]).float()
    rows, scales = stored.shape[0], []
    for part, chunk in zip(stored.split([fmt.scales_bytes(chunk) for chunk in layout.chunks], dim=1), layout.chunks):
        spans, together = _spans(chunk, fmt)
        if not spans:
            continue
        padded = torch.nn.functional.pad(part, (0, spans * (2 + together) - part.shape[1])).view(rows, spans, -1)
        factors = padded[..., :2].contiguous().view(torch.bfloat16).float()
        scales.append(_products(padded[..., 2:].view(torch.int8).float(), factors)[:, : fmt.blocks(chunk)])
    return torch.cat(scales, dim=1)


def _coded(
    exact: torch.Tensor, finite: torch.Tensor, limit: float, layout: Layout, fmt: RecordFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales as codes of one byte with a bfloat16 factor for every `FACTOR_SPAN` elements of a record."""
    rows = exact.shape[0]
    scales, stored = [], []
    marked = exact.masked_fill(~finite, math.inf)
    for part, chunk in zip(marked.split([fmt.blocks(chunk) for chunk in layout.chunks], dim=1), layout.chunks):
        spans, together = _spans(chunk, fmt)
        if not spans:
            continue
        padded = torch.nn.functional.pad(part, (0, spans * together - part.shape[1])).view(rows, spans, together)
        largest = padded.abs().amax(-1, keepdim=True)
        factors = (largest / largest.new_full((), SCALE_LEVELS)).to(torch.bfloat16).clamp_(max=limit)
        factors.masked_fill_(largest.isinf(), math.nan)
        divisors = factors.float().masked_fill_((factors == 0) | factors.isnan(), math.inf)
        # Infinity over infinity is NaN; its span has no codes.
        codes = (padded / divisors).round_().nan_to_num_(0.0).clamp_(-SCALE_LEVELS, SCALE_LEVELS)
        bytes_ = torch.cat([factors.view(torch.uint8), codes.to(torch.int8).view(torch.uint8)], dim=2)
        stored.append(bytes_.view(rows, -1)[:, : fmt.scales_bytes(chunk)])
        scales.append(_products(codes, factors.float())[:, : part.shape[1]])
    return torch.cat(scales, dim=1), torch.cat(stored, dim=1)


def _products(codes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Codes times factors, rounded to bfloat16 with ties away from zero, as float32 ``[rows, blocks]``."""
    products = codes * factors
    rounded = (products.view(torch.int32) + 0x8000).bitwise_and_(-0x10000).view(torch.float32)
    # CUDA's NaN has all bits but the sign: a carry would make it a zero.
    return torch.where(products.isnan(), products, rounded).view(codes.shape[0], -1)


def _spans(chunk: int, fmt: RecordFormat) -> tuple[int, int]:
    """Factors of a record, and the blocks that share one."""
    return -(-chunk // FACTOR_SPAN), FACTOR_SPAN // fmt.block_size


def _extremes(blocks: torch.Tensor) -> torch.Tensor:
    """Element of largest magnitude of each block, with its sign; the first one where several reach it."""
    if not blocks.is_cpu:
        return _first_extremes(blocks)
    low, high = blocks.amin(-1), blocks.amax(-1)
    extremes = torch.where(-low > high, low, high)
    # An argmax takes ten times as long, so only blocks where both signs reach the magnitude get one. On a device the
    # host would have to wait to find them.
    tied = (-low == high) & (high > 0)
    if tied.any():
        extremes[tied] = _first_extremes(blocks[tied])
    return extremes


def _first_extremes(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)).squeeze(-1)


@functools.lru_cache(maxsize=64)
def scale_limit(fmt: RecordFormat, dtype: torch.dtype) -> float:
    """Largest scale whose largest code still decodes to a finite number of the source type; of one byte, largest factor."""
    limit = _rounded_down(torch.finfo(dtype).max / -fmt.codes.lowest, fmt)
    return _rounded_down(limit / SCALE_LEVELS, fmt) if fmt.scale_bytes == 1 else limit


def _rounded_down(limit: float, fmt: RecordFormat) -> float:
    mantissa, exponent = math.frexp(limit)
    bits = _SCALE_BITS[fmt.scale_bytes]
    return math.ldexp(math.floor(math.ldexp(mantissa, bits)), exponent - bits)
