"""Reference backend: the payload formats in plain torch, on any device. The other backends follow it bit for bit.

docs/payload_format.md says what is computed here; the order of the operations in the block functions is part of it.
Block codecs stage a bucket in one float32 buffer ``[rows, blocks * block_size]``: the arithmetic takes a fixed number of
operations, and only copies remain for each tensor. Nothing loops over rows or blocks.

Buffers come from ``new_empty`` of an argument: DeepSpeed's ``zero.Init`` turns what ``torch.empty`` makes into its own
type, and a default dtype other than float32 would do the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hzero.codecs import exponents, mpc, scales, zfp
from hzero.codecs.arguments import Changed, Messages, Rounding, Rows
from hzero.codecs.formats import RecordFormat
from hzero.codecs.layout import Layout, layout_of
from hzero.codecs.rotation import rotate
from hzero.config import CodecName

_WORD = 0xFFFFFFFF
#: Codecs with modules of their own.
_OWN: dict[CodecName, Any] = {"exp": exponents, "zfp": zfp, "mpc": mpc}
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)


# ---- the operators: their signatures are stated here, and only here (hzero.codecs.ops) -------------------------------


@torch.no_grad()
def encode(source: Sequence[torch.Tensor], rows: Rows, fmt: RecordFormat, rounding: Rounding) -> torch.Tensor:
    """Encodes a bucket; see `hzero.codecs.Codec.encode`."""
    dtype = source[0].dtype
    layout = layout_of(tuple(rows.chunks), fmt, dtype.itemsize)
    if not fmt.block_size:
        return _encode_elements(source, layout, fmt, rows)
    total = rows.total
    kind = torch.bfloat16 if fmt.codec == "exp" else torch.float32
    staged = source[0].new_empty(total, layout.row_blocks * fmt.block_size, dtype=kind)
    for column, flat, chunk in zip(_columns(staged, layout, fmt), _whole(source, rows.chunks, total), rows.chunks):
        if column.shape[1] > chunk:
            column[:, chunk:].zero_()
            column = column[:, :chunk]
        column.view(*rows.sizes, chunk).copy_(_shards(flat, chunk, rows.sizes, rows.strides))
        rotate(column, chunk, fmt, 1 / max(fmt.rotation, 1))
    if fmt.codec in _OWN:
        payload = staged.new_zeros(total * layout.row_bytes, dtype=torch.uint8)
        if payload.numel():
            records = _records(payload, layout, rows.outer, rows.inner, torch.uint8)
            _OWN[fmt.codec].encode(staged, records, layout, fmt)
        return payload
    return _encode_staged(staged, layout, fmt, rows.outer, dtype, rounding)


@torch.no_grad()
def encode_feedback(
    source: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    factors: Sequence[float],
    rows: Rows,
    fmt: RecordFormat,
    rounding: Rounding,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Encodes ``source + factor * residual`` and returns the loss; see `hzero.codecs.Codec.encode_feedback`."""
    meant, coded = [], fmt._replace(rotation=0)
    for tensor, residual, factor, chunk in zip(source, residuals, factors, rows.chunks):
        total = tensor.new_zeros(rows.total * chunk if fmt.rotation else tensor.numel(), dtype=torch.float32)
        some = total[: tensor.numel()].copy_(tensor.view(-1))
        if residual.numel():
            # Product and sum are rounded separately: whether `add_` with alpha fuses them depends on the processor.
            some.add_(residual.view(-1) * factor)
        if fmt.rotation:
            rotate(total.view(-1, max(chunk, 1)), chunk, fmt, 1 / fmt.rotation)
        meant.append(total)
    message = encode(meant, rows, coded, rounding)
    sent = decode(message, rows, coded, torch.float32)
    # An overflow makes a block NaN, and not every configuration skips the step: residuals must not carry it on.
    left = [total.sub_(part[: total.numel()]).nan_to_num_(0.0, 0.0, 0.0) for total, part in zip(meant, sent)]
    if not fmt.rotation:
        return message, left
    for part, chunk in zip(left, rows.chunks):
        rotate(part.view(-1, max(chunk, 1)), chunk, fmt)
    # Here a sum of finite numbers may overflow.
    return message, [part[: t.numel()].nan_to_num(0.0, 0.0, 0.0) for part, t in zip(left, source)]


@torch.no_grad()
def encode_difference(
    source: Sequence[torch.Tensor], base: Sequence[torch.Tensor], rows: Rows, fmt: RecordFormat, rounding: Rounding
) -> torch.Tensor:
    """Encodes ``source - base``; see `hzero.codecs.Codec.encode_difference`."""
    new = [tensor.view(-1).to(torch.float32) - old.view(-1) for tensor, old in zip(source, base)]
    dtype = source[0].dtype if fmt.codec == "none" else torch.float32
    return encode([difference.to(dtype) for difference in new], rows, fmt, rounding)


@torch.no_grad()
def decode(payload: torch.Tensor, rows: Rows, fmt: RecordFormat, dtype: torch.dtype) -> list[torch.Tensor]:
    """Decodes a message into flat tensors in shard order; see `hzero.codecs.Codec.decode`."""
    layout = layout_of(tuple(rows.chunks), fmt, dtype.itemsize)
    payload = _aligned(payload)
    sizes, strides, total = rows.sizes, rows.strides, rows.total
    if fmt.block_size:
        parts = _columns(_decode_staged(payload, layout, fmt, rows.outer, rows.inner), layout, fmt)
    else:
        parts = _records(payload, layout, rows.outer, rows.inner, dtype if fmt.codec == "none" else torch.bfloat16)
        sizes, strides, _ = _axes(tuple(sizes), tuple(strides), rows.outer)
    decoded = []
    for part, chunk in zip(parts, rows.chunks):
        rotate(part, chunk, fmt)
        flat = payload.new_empty(total * chunk, dtype=dtype)
        _shards(flat, chunk, sizes, strides).copy_(part[..., :chunk].reshape(*sizes, chunk))
        decoded.append(flat)
    return decoded


@torch.no_grad()
def decode_onto(payload: torch.Tensor, rows: Rows, fmt: RecordFormat, tensors: Changed) -> None:
    """Adds what a message decodes to; see `hzero.codecs.Codec.decode_onto`."""
    # Only codec none has to be told the type that was encoded.
    dtype = tensors[0].dtype if fmt.codec == "none" else torch.float32
    add_onto(tensors, decode(payload, rows, fmt, dtype))


def add_onto(tensors: Changed, parts: Sequence[torch.Tensor]) -> None:
    """Adds flat tensors in float32 to others, which have the sums rounded once."""
    for tensor, part in zip(tensors, parts):
        tensor.copy_(part.to(torch.float32).add_(tensor.view(-1)).view(tensor.shape))


@torch.no_grad()
def decode_sum(payload: torch.Tensor, messages: Messages, fmt: RecordFormat, dtype: torch.dtype) -> list[torch.Tensor]:
    """Decodes the messages of several peers and sums them in float32, in their order."""
    peers, chunks, inner = messages
    layout = layout_of(tuple(chunks), fmt, dtype.itemsize)
    payload = _aligned(payload)
    # Outputs are copies: those of an operator may not share memory.
    sums = [payload.new_empty(inner * chunk, dtype=torch.float32) for chunk in chunks]
    if not payload.numel():
        return sums
    if fmt.block_size:
        total = _sum_staged(payload, layout, fmt, peers, inner)
        for flat, column, chunk in zip(sums, _columns(total, layout, fmt), chunks):
            rotate(column, chunk, fmt)
            flat.view(inner, chunk).copy_(column[:, :chunk])
        return sums
    elements = dtype if fmt.codec == "none" else torch.bfloat16
    for flat, records, chunk in zip(sums, _records(payload, layout, peers, inner, elements), chunks):
        rows = flat.view(inner, chunk).copy_(records[0, :, :chunk])
        for peer in range(1, peers):
            rows.add_(records[peer, :, :chunk])
    return sums


@torch.no_grad()
def decode_add(payload: torch.Tensor, messages: Messages, fmt: RecordFormat, dtype: torch.dtype, sums: Changed) -> None:
    """Decodes the messages of several peers and adds them in float32, in their order, to ``sums``; rotated ones as a sum."""
    peers, chunks, inner = messages
    if not payload.numel():
        return
    layout = layout_of(tuple(chunks), fmt, dtype.itemsize)
    payload = _aligned(payload)
    if fmt.rotation:
        for flat, part in zip(sums, decode_sum(payload, messages, fmt, dtype)):
            flat.view(-1).add_(part)
        return
    if fmt.block_size:
        parts = _decode_staged(payload, layout, fmt, peers, inner)
        records = [column.view(peers, inner, -1) for column in _columns(parts, layout, fmt)]
    else:
        records = _records(payload, layout, peers, inner, dtype if fmt.codec == "none" else torch.bfloat16)
    for flat, record, chunk in zip(sums, records, chunks):
        for peer in range(peers):
            flat.view(inner, chunk).add_(record[peer, :, :chunk])


@torch.no_grad()
def decode_sum_encode(
    payload: torch.Tensor,
    messages: Messages,
    fmt: RecordFormat,
    dtype: torch.dtype,
    outer: int,
    out: RecordFormat,
    rounding: Rounding,
) -> torch.Tensor:
    """`decode_sum` and `encode` of its result, rows in order; without intermediate tensors where the blocks agree.

    Sums that are rotated stay so.
    """
    peers, chunks, inner = messages
    if payload.numel() and fmt.scale_bytes and alike(fmt, out):
        layout = layout_of(tuple(chunks), fmt, dtype.itemsize)
        # Beyond a record's elements the sums are zero, or NaN in a block that is NaN anyway: no code changes by it.
        total = _sum_staged(_aligned(payload), layout, fmt, peers, inner)
        target = layout_of(tuple(chunks), out, torch.float32.itemsize)
        return _encode_staged(total, target, out, outer, torch.float32, rounding)
    return encode(decode_sum(payload, messages, fmt, dtype), Rows.in_order(chunks, inner, outer), out, rounding)


# ---- elements: codecs none and bf16 ---------------------------------------------------------------------------------


def _encode_elements(source: Sequence[torch.Tensor], layout: Layout, fmt: RecordFormat, rows: Rows) -> torch.Tensor:
    total, outer = rows.total, rows.outer
    dtype = source[0].dtype if fmt.codec == "none" else torch.bfloat16
    widths = [size // dtype.itemsize for size in layout.record_bytes]
    sizes, strides, splits = _axes(tuple(rows.sizes), tuple(rows.strides), outer)
    if outer == 1 and sizes == (total,) and (total == 1 or list(layout.chunks) == widths):
        # The message is the concatenated sources, each padded with zeros.
        elements = _cat_padded(source, [total * width for width in widths]).to(dtype)
    else:
        elements = source[0].new_empty(total * sum(widths), dtype=dtype)
        records = _records(elements.view(torch.uint8), layout, outer, rows.inner, dtype)
        for record, flat, chunk in zip(records, _whole(source, layout.chunks, total), layout.chunks):
            if record.shape[-1] > chunk:
                record[..., chunk:].zero_()
                record = record[..., :chunk]
            shards = _shards(flat, chunk, sizes, strides)
            if splits:
                record.view(*sizes, chunk).copy_(shards)
            else:
                record.copy_(shards.reshape(record.shape))
    if dtype != source[0].dtype:
        # Which NaN a conversion makes depends on the processor.
        elements.nan_to_num_(math.nan, math.inf, -math.inf)
    return elements.view(torch.uint8)


def alike(fmt: RecordFormat, out: RecordFormat) -> bool:
    """Whether a block of one format is a block of the other, the same numbers in it."""
    return (fmt.block_size, fmt.rotation) == (out.block_size, out.rotation)


# ---- blocks: codecs int8 and int4; the others have modules of their own -----------------------------------------------


def _encode_staged(
    staged: torch.Tensor, layout: Layout, fmt: RecordFormat, outer: int, dtype: torch.dtype, rounding: Rounding
) -> torch.Tensor:
    """A message from float32 ``[rows, blocks * block_size]``, zero beyond short blocks. Overwrites the input."""
    rows = staged.shape[0]
    if not staged.numel():
        return staged.new_empty(0, dtype=torch.uint8)
    blocks = staged.view(rows, layout.row_blocks, fmt.block_size)
    multiplied, stored = scales.encode(blocks, layout, fmt, dtype)
    # A block of zero or NaN scale has no codes: dividing by infinity makes them zero.
    divisors = multiplied.masked_fill((multiplied == 0) | multiplied.isnan(), math.inf)
    blocks.div_(divisors.unsqueeze(-1))
    if rounding.stochastic:
        staged.add_(_noise(staged, rounding.seed)).floor_()
    else:
        staged.round_()
    # Infinity over infinity is NaN; its block decodes to NaN whatever the codes are.
    codes = staged.nan_to_num_(0.0).clamp_(fmt.codes.lowest, fmt.codes.highest).to(torch.int8)
    if fmt.codec == "int4":
        # Pairs as little-endian 16-bit words: the element of even index is the low byte.
        pairs = codes.view(torch.int16)
        codes = ((pairs & 0x0F) | ((pairs >> 4) & 0xF0)).to(torch.uint8)
    payload = staged.new_zeros(rows * layout.row_bytes, dtype=torch.uint8)
    for written, own in _regions(payload, codes.view(torch.uint8), stored, layout, fmt, outer):
        written.copy_(own)
    return payload


def _decode_staged(payload: torch.Tensor, layout: Layout, fmt: RecordFormat, outer: int, inner: int) -> torch.Tensor:
    """Float32 ``[rows, blocks * block_size]``; beyond a record's elements zero, or NaN where the block is.

    Codecs with modules of their own give anything beyond a record's elements; codec ``exp`` gives bfloat16.
    """
    if fmt.codec in _OWN and payload.numel():
        return _OWN[fmt.codec].decode(_records(payload, layout, outer, inner, torch.uint8), outer * inner, layout, fmt)
    rows, width = outer * inner, layout.row_blocks * fmt.block_size
    width = width * fmt.codes.bits // 8 if fmt.scale_bytes else 0
    if not width:
        return payload.new_empty(rows, 0, dtype=torch.float32)
    codes = payload.new_zeros(rows, width)
    stored = payload.new_empty(rows, sum(map(fmt.scales_bytes, layout.chunks)))
    for written, own in _regions(payload, codes, stored, layout, fmt, outer):
        own.copy_(written)
    codes = codes.view(torch.int8)
    if fmt.codec == "int4":
        high = codes.to(torch.int16)  # extends the sign
        low = high.bitwise_left_shift(12).bitwise_right_shift_(12).bitwise_and_(0xFF)
        codes = high.bitwise_right_shift_(4).bitwise_left_shift_(8).bitwise_or_(low).view(torch.int8)
    values = codes.to(torch.float32)
    values.view(rows, layout.row_blocks, fmt.block_size).mul_(scales.decode(stored, layout, fmt).unsqueeze(-1))
    return values


def _sum_staged(payload: torch.Tensor, layout: Layout, fmt: RecordFormat, peers: int, inner: int) -> torch.Tensor:
    """Sum over peers, float32 ``[inner, blocks * block_size]``, in their order."""
    parts = _decode_staged(payload, layout, fmt, peers, inner).to(torch.float32)
    total = parts[:inner]
    for peer in range(1, peers):
        total.add_(parts[peer * inner : (peer + 1) * inner])
    return total


# ---- stochastic rounding --------------------------------------------------------------------------------------------


def noise_key(seed: int) -> int:
    """The unsigned 32-bit key of a seed."""
    return _mixed_word(_mixed_word((seed + 0x9E3779B9) & _WORD) ^ ((seed >> 32) & _WORD))


def _noise(staged: torch.Tensor, seed: int) -> torch.Tensor:
    """Numbers of (0, 1), float32 ``[rows, columns]`` like ``staged``, from seed, row and column (payload_format.md)."""
    rows, columns = staged.shape
    keys = _mixed(_words(rows, staged).bitwise_xor_(_signed(noise_key(seed))))
    bits = _mixed(keys.unsqueeze(-1) ^ _words(columns, staged))
    # 16 bits and a half: a code below 128 plus such a number is exact in float32, so multiples of the scale stay.
    return _shifted(bits, 16).to(torch.float32).add_(0.5).mul_(2.0**-16)


def _words(count: int, like: torch.Tensor) -> torch.Tensor:
    """0, 1, .. modulo 2**32, as int32: torch supports little arithmetic on unsigned types, and int32 wraps."""
    return torch.arange(count, dtype=torch.int64, device=like.device).to(torch.int32)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """`_mixed_word` of every element of an int32 tensor, which it overwrites."""
    words.bitwise_xor_(_shifted(words, 16)).mul_(_signed(_MULTIPLIERS[0]))
    words.bitwise_xor_(_shifted(words, 15)).mul_(_signed(_MULTIPLIERS[1]))
    return words.bitwise_xor_(_shifted(words, 16))


def _mixed_word(word: int) -> int:
    """``lowbias32`` of https://nullprogram.com/blog/2018/07/31/ (public domain)."""
    word = ((word ^ (word >> 16)) * _MULTIPLIERS[0]) & _WORD
    word = ((word ^ (word >> 15)) * _MULTIPLIERS[1]) & _WORD
    return word ^ (word >> 16)


def _shifted(words: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift to the right: that of int32 copies the sign."""
    return (words >> count).bitwise_and_((1 << (32 - count)) - 1)


def _signed(word: int) -> int:
    """The int32 of the same bits."""
    return (word ^ 0x80000000) - 0x80000000


# ---- views ----------------------------------------------------------------------------------------------------------


def _whole(source: Sequence[torch.Tensor], chunks: Sequence[int], rows: int) -> Iterator[torch.Tensor]:
    """The sources, flat, padded with zeros to ``rows * chunk`` elements. Only one copy at a time is alive."""
    for tensor, chunk in zip(source, chunks):
        missing = rows * chunk > tensor.numel()
        yield _cat_padded([tensor], [rows * chunk]) if missing else tensor.view(-1)


def _cat_padded(source: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """One flat copy of all sources, each padded with zeros to its size."""
    gaps = [size - tensor.numel() for tensor, size in zip(source, sizes)]
    zeros = source[0].new_zeros(max(gaps))
    return torch.cat([piece for tensor, gap in zip(source, gaps) for piece in (tensor.view(-1), zeros[:gap])])


def _shards(flat: torch.Tensor, chunk: int, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """View ``[*sizes, chunk]`` of shards in the order of the rows."""
    return flat.as_strided((*sizes, chunk), (*(stride * chunk for stride in strides), 1), flat.storage_offset())


@functools.lru_cache(maxsize=256)
def _axes(
    sizes: tuple[int, ...], strides: tuple[int, ...], outer: int
) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """The same rows with as few axes as possible that separate ``outer`` from the rest, and whether they separate it.

    They do where the first axes have ``outer`` rows and the others the rest: a view ``[outer, inner]`` of the message
    then splits into the axes.
    """
    axes: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides):
        if axes and axes[-1][1] == size * stride:
            axes[-1] = (axes[-1][0] * size, stride)
        elif size > 1:
            axes.append((size, stride))
    before = 1
    for index, (size, stride) in enumerate(axes):
        ahead = outer // before
        if ahead <= 1:
            break
        if size > ahead and size % ahead == 0:
            axes[index : index + 1] = [(ahead, size // ahead * stride), (size // ahead, stride)]
            size = ahead
        before *= size
    axes = axes or [(1, 1)]
    return tuple(size for size, _ in axes), tuple(stride for _, stride in axes), before == outer


def _columns(staged: torch.Tensor, layout: Layout, fmt: RecordFormat) -> Sequence[torch.Tensor]:
    """One view per tensor, whole blocks, of a staging buffer ``[rows, blocks * block_size]``."""
    return staged.split([fmt.blocks(chunk) * fmt.block_size for chunk in layout.chunks], dim=1)


def _regions(
    payload: torch.Tensor, codes: torch.Tensor, stored: torch.Tensor, layout: Layout, fmt: RecordFormat, outer: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of views ``[outer, inner, ..]`` of each tensor's codes, then scales: in the payload, and as staged.

    Args:
        payload: uint8 message.
        codes: uint8 ``[rows, bytes of all blocks]``.
        stored: uint8 ``[rows, bytes of all scales]``.
        layout: Of the message.
        fmt: Of the message.
        outer: Of the message.
    """
    inner = codes.shape[0] // outer
    counts = [fmt.blocks(chunk) for chunk in layout.chunks]
    per_block = fmt.block_size * fmt.codes.bits // 8
    sizes = [fmt.scales_bytes(chunk) for chunk in layout.chunks]
    staged = zip(codes.split([count * per_block for count in counts], dim=1), stored.split(sizes, dim=1))
    records = _records(payload, layout, outer, inner, torch.uint8)
    for record, (code, scale), chunk, bytes_, offset in zip(
        records, staged, layout.chunks, sizes, layout.scales_offsets
    ):
        if not chunk:
            continue
        size = fmt.code_bytes(chunk, 0)
        yield record[..., :size], code[:, :size].view(outer, inner, size)
        yield record[..., offset : offset + bytes_], scale.view(outer, inner, bytes_)


def _records(payload: torch.Tensor, layout: Layout, outer: int, inner: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """One view ``[outer, inner, record]`` per tensor, in elements of ``dtype``."""
    widths = [size // dtype.itemsize for size in layout.record_bytes]
    pieces = payload.view(dtype).view(outer, inner * sum(widths)).split([inner * width for width in widths], dim=1)
    return [piece.view(outer, inner, width) for piece, width in zip(pieces, widths)]


def _aligned(payload: torch.Tensor) -> torch.Tensor:
    """The payload itself, or a copy where its storage offset is not a multiple of 4."""
    return payload if payload.storage_offset() % 4 == 0 else payload.clone()
