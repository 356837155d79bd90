"""Reference backend: the payload formats in plain torch, on any device. The other backends follow it bit for bit.

docs/payload_format.md says what is computed here; the order of the operations in the block functions is part of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from hzero.codecs.layout import Layout, layout_of
from hzero.sharding.records import RecordFormat

SCALE_DTYPES = {2: torch.bfloat16, 4: torch.float32}
_LARGEST_CODE = {"int8": 127, "int4": 8}


# ---- the four operations ------------------------------------------------------------------------------------------


def encode(
    source: Sequence[torch.Tensor],
    chunks: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    outer: int,
    fmt: RecordFormat,
    stochastic: bool,
    seed: int,
) -> torch.Tensor:
    """Encodes a bucket; see `hzero.codecs.Codec.encode`."""
    dtype, device = source[0].dtype, source[0].device
    rows = _product(sizes)
    layout = layout_of(tuple(chunks), fmt, dtype.itemsize)
    views = [_rows_of(_padded(t, rows * chunk), chunk, sizes, strides) for t, chunk in zip(source, chunks)]
    if fmt.scale_bytes:
        staged = torch.zeros(rows, layout.row_blocks * fmt.block_size, device=device)
        for view, chunk, start in zip(views, chunks, layout.block_starts):
            first = start * fmt.block_size
            staged[:, first : first + chunk].view(*sizes, chunk).copy_(view)
        return _encode_staged(staged, layout, fmt, outer, dtype, stochastic, seed)
    elements = dtype if fmt.codec == "none" else torch.bfloat16
    payload = torch.zeros(rows * layout.row_bytes, dtype=torch.uint8, device=device)
    inner = rows // outer
    for index, view in enumerate(views):
        region = _region(payload, layout, index, outer, inner, elements)[..., : chunks[index]]
        region.copy_(view.reshape(outer, inner, chunks[index]))
    return payload


def decode(
    payload: torch.Tensor,
    chunks: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    outer: int,
    fmt: RecordFormat,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Decodes a message into flat tensors in shard order; see `hzero.codecs.Codec.decode`."""
    rows = _product(sizes)
    layout = layout_of(tuple(chunks), fmt, dtype.itemsize)
    payload = _aligned(payload)
    staged = _decode_staged(payload, layout, fmt, outer, rows // outer) if fmt.scale_bytes else None
    decoded = []
    for index, chunk in enumerate(chunks):
        flat = torch.empty(rows * chunk, dtype=dtype, device=payload.device)
        if staged is not None:
            first = layout.block_starts[index] * fmt.block_size
            found = staged[:, first : first + chunk]
        else:
            elements = dtype if fmt.codec == "none" else torch.bfloat16
            found = _region(payload, layout, index, outer, rows // outer, elements)[..., :chunk]
        _rows_of(flat, chunk, sizes, strides).copy_(found.reshape(*sizes, chunk))
        decoded.append(flat)
    return decoded


def decode_sum(
    payload: torch.Tensor, peers: int, chunks: Sequence[int], inner: int, fmt: RecordFormat, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Decodes the messages of several peers and sums them in float32, in their order."""
    if fmt.scale_bytes:
        layout = layout_of(tuple(chunks), fmt, dtype.itemsize)
        total = _sum_staged(_aligned(payload), layout, fmt, peers, inner)
        starts = [start * fmt.block_size for start in layout.block_starts]
        # Copies: outputs of an operator may not share memory.
        return [
            total[:, start : start + chunk].clone(memory_format=torch.contiguous_format).view(-1)
            for start, chunk in zip(starts, chunks)
        ]
    sums = []
    for flat, chunk in zip(decode(payload, chunks, (peers * inner,), (1,), peers, fmt, dtype), chunks):
        parts = flat.view(peers, inner * chunk)
        total = parts[0].to(torch.float32, copy=True)
        for peer in range(1, peers):
            total += parts[peer]
        sums.append(total)
    return sums


def decode_sum_encode(
    payload: torch.Tensor,
    peers: int,
    chunks: Sequence[int],
    inner: int,
    fmt: RecordFormat,
    dtype: torch.dtype,
    outer: int,
    out: RecordFormat,
    stochastic: bool,
    seed: int,
) -> torch.Tensor:
    """`decode_sum` and `encode` of its result, rows in order, without the tensors between where blocks agree."""
    if fmt.scale_bytes and out.scale_bytes and fmt.block_size == out.block_size:
        layout = layout_of(tuple(chunks), fmt, dtype.itemsize)
        total = _sum_staged(_aligned(payload), layout, fmt, peers, inner)
        target = layout_of(tuple(chunks), out, torch.float32.itemsize)
        return _encode_staged(total, target, out, outer, torch.float32, stochastic, seed)
    sums = decode_sum(payload, peers, chunks, inner, fmt, dtype)
    return encode(sums, chunks, (inner,), (1,), outer, out, stochastic, seed)


# ---- blocks ---------------------------------------------------------------------------------------------------------


def _encode_staged(
    staged: torch.Tensor,
    layout: Layout,
    fmt: RecordFormat,
    outer: int,
    dtype: torch.dtype,
    stochastic: bool,
    seed: int,
) -> torch.Tensor:
    """A message from float32 ``[rows, blocks * block_size]``, zeros where a record's last block is short."""
    rows = staged.shape[0]
    blocks = staged.view(rows, layout.row_blocks, fmt.block_size)
    scales = _scales(blocks, fmt, dtype)
    steps = scales.float()
    # A block of zero or NaN scale has no codes: dividing by infinity makes them zero.
    steps = torch.where((steps == 0) | steps.isnan(), torch.inf, steps)
    quotient = blocks / steps.unsqueeze(-1)
    if stochastic:
        noise = _noise(layout, fmt, rows, seed, staged.device)
        quotient = quotient.add_(noise).floor_()
    else:
        quotient = quotient.round_()
    low, high = (-127, 127) if fmt.codec == "int8" else (-8, 7)
    # Infinity over infinity is NaN; its block decodes to NaN whatever the codes are.
    codes = quotient.nan_to_num_(0.0).clamp_(low, high).to(torch.int8).view(rows, -1)
    per_code = 1
    if fmt.codec == "int4":
        codes = codes.view(torch.uint8)
        codes = (codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)
        per_code = 2
    payload = torch.zeros(rows * layout.row_bytes, dtype=torch.uint8, device=staged.device)
    codes = codes.view(torch.uint8)
    inner = rows // outer
    for index, chunk in enumerate(layout.chunks):
        size = -(-chunk // per_code)
        first = layout.block_starts[index] * fmt.block_size // per_code
        region = _region(payload, layout, index, outer, inner, torch.uint8)
        region[..., :size].copy_(codes[:, first : first + size].view(outer, inner, size))
        places = _region(payload, layout, index, outer, inner, scales.dtype)
        offset, count = layout.scales_offsets[index] // fmt.scale_bytes, fmt.blocks(chunk)
        start = layout.block_starts[index]
        places[..., offset : offset + count].copy_(scales[:, start : start + count].view(outer, inner, count))
    return payload


def _scales(blocks: torch.Tensor, fmt: RecordFormat, dtype: torch.dtype) -> torch.Tensor:
    """Scales ``[rows, blocks]`` in their storage type; NaN for a block that holds NaN or infinity."""
    low, high = torch.aminmax(blocks, dim=-1)
    if fmt.codec == "int8":
        extreme = torch.maximum(-low, high)
        scales = extreme / 127
    else:
        # The element of largest magnitude maps to -8; the negative one where both signs reach it.
        extreme = torch.where(-low >= high, low, high)
        extreme = torch.where(low.isnan(), low, extreme)
        scales = extreme / -8
    stored = scales.to(SCALE_DTYPES[fmt.scale_bytes])
    limit = scale_limit(fmt, dtype)
    stored = stored.clamp(-limit, limit)
    return torch.where(extreme.isfinite(), stored, torch.nan)


@functools.lru_cache(maxsize=64)
def scale_limit(fmt: RecordFormat, dtype: torch.dtype) -> float:
    """Largest scale whose largest code still decodes to a finite number of the source type."""
    storage = SCALE_DTYPES[fmt.scale_bytes]
    wanted = torch.tensor(torch.finfo(dtype).max / _LARGEST_CODE[fmt.codec], dtype=torch.float64)
    limit = wanted.to(storage)
    if limit.double() * _LARGEST_CODE[fmt.codec] > torch.finfo(dtype).max:
        limit = torch.nextafter(limit, torch.zeros_like(limit))
    return float(limit)


def _decode_staged(payload: torch.Tensor, layout: Layout, fmt: RecordFormat, outer: int, inner: int) -> torch.Tensor:
    """Float32 ``[rows, blocks * block_size]``; what lies beyond a record's elements is of no meaning."""
    rows, per_code = outer * inner, 2 if fmt.codec == "int4" else 1
    width = layout.row_blocks * fmt.block_size // per_code
    codes = torch.zeros(rows, width, dtype=torch.uint8, device=payload.device)
    storage = SCALE_DTYPES[fmt.scale_bytes]
    scales = torch.empty(rows, layout.row_blocks, dtype=storage, device=payload.device)
    for index, chunk in enumerate(layout.chunks):
        size = -(-chunk // per_code)
        first = layout.block_starts[index] * fmt.block_size // per_code
        region = _region(payload, layout, index, outer, inner, torch.uint8)
        codes[:, first : first + size].view(outer, inner, size).copy_(region[..., :size])
        places = _region(payload, layout, index, outer, inner, storage)
        offset, count = layout.scales_offsets[index] // fmt.scale_bytes, fmt.blocks(chunk)
        start = layout.block_starts[index]
        scales[:, start : start + count].view(outer, inner, count).copy_(places[..., offset : offset + count])
    if fmt.codec == "int4":
        signed = codes.view(torch.int8)
        pairs = torch.empty(rows, width, 2, dtype=torch.int8, device=payload.device)
        pairs[..., 0] = (signed << 4) >> 4  # the arithmetic shift back extends the sign
        pairs[..., 1] = signed >> 4
        values = pairs.view(rows, layout.row_blocks, fmt.block_size)
    else:
        values = codes.view(torch.int8).view(rows, layout.row_blocks, fmt.block_size)
    return (values * scales.float().unsqueeze(-1)).view(rows, -1)


def _sum_staged(payload: torch.Tensor, layout: Layout, fmt: RecordFormat, peers: int, inner: int) -> torch.Tensor:
    """Sum over peers, float32 ``[inner, blocks * block_size]``, zero beyond a record's elements."""
    parts = _decode_staged(payload, layout, fmt, peers, inner).view(peers, inner, -1)
    total = parts[0]
    for peer in range(1, peers):
        total = total.add_(parts[peer]) if peer > 1 else total + parts[peer]
    for chunk, start in zip(layout.chunks, layout.block_starts):
        # Codes there are zero, but zero times a NaN scale is not.
        end = (start + fmt.blocks(chunk)) * fmt.block_size
        total[:, start * fmt.block_size + chunk : end] = 0
    return total


def _noise(layout: Layout, fmt: RecordFormat, rows: int, seed: int, device: torch.device) -> torch.Tensor:
    """Uniform numbers of [0, 1) for stochastic rounding, ``[rows, blocks, block_size]``; docs/payload_format.md."""
    position = _positions(layout, fmt).to(device)
    index = torch.arange(rows, device=device).unsqueeze(-1) * layout.row_elements + position
    mask = 0xFFFFFFFF
    bits = (index & mask) ^ ((index >> 32) * 0x85EBCA6B & mask) ^ (seed * 0x9E3779B9 & mask)
    # lowbias32 of https://nullprogram.com/blog/2018/07/31/ (public domain constants).
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352D) & mask
    bits = ((bits ^ (bits >> 15)) * 0x846CA68B) & mask
    bits = bits ^ (bits >> 16)
    return ((bits >> 8).float() * 2.0**-24).view(rows, layout.row_blocks, fmt.block_size)


@functools.lru_cache(maxsize=256)
def _positions(layout: Layout, fmt: RecordFormat) -> torch.Tensor:
    """Position in a row of every staged element, int64 ``[blocks * block_size]``; arbitrary beyond the elements."""
    places = torch.zeros(layout.row_blocks * fmt.block_size, dtype=torch.int64)
    for chunk, start, first in zip(layout.chunks, layout.block_starts, layout.positions):
        places[start * fmt.block_size : start * fmt.block_size + chunk] = torch.arange(first, first + chunk)
    return places


# ---- views ----------------------------------------------------------------------------------------------------------


def _padded(tensor: torch.Tensor, numel: int) -> torch.Tensor:
    flat = tensor.reshape(-1)
    if flat.numel() == numel:
        return flat
    whole = flat.new_zeros(numel)
    whole[: flat.numel()] = flat
    return whole


def _rows_of(flat: torch.Tensor, chunk: int, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """View ``[*sizes, chunk]`` of shards in the order of the rows."""
    return flat.as_strided((*sizes, chunk), (*(stride * chunk for stride in strides), 1), flat.storage_offset())


def _region(
    payload: torch.Tensor, layout: Layout, index: int, outer: int, inner: int, dtype: torch.dtype
) -> torch.Tensor:
    """View ``[outer, inner, record]`` of one tensor's records, in elements of ``dtype``."""
    elements = payload.view(dtype)
    size = dtype.itemsize
    record, start = layout.record_bytes[index] // size, layout.record_starts[index] // size
    return elements.as_strided(
        (outer, inner, record),
        (inner * layout.row_bytes // size, record, 1),
        elements.storage_offset() + inner * start,
    )


def _aligned(payload: torch.Tensor) -> torch.Tensor:
    """The payload itself, or a copy where it starts at an odd place of its storage."""
    return payload if payload.storage_offset() % 4 == 0 and payload.is_contiguous() else payload.clone()


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
