"""Reference backend: the payload formats in plain torch, on any device. The other backends follow it bit for bit.

docs/payload_format.md says what is computed here; the order of the operations in the block functions is part of it.
Block codecs stage a bucket in one float32 buffer ``[rows, blocks * block_size]``: the arithmetic takes a fixed number of
operations, and only copies remain for each tensor. Nothing loops over rows or blocks.

Every backend has the four functions at the top, which prepare a call on one layout. Arguments are checked by
`hzero.codecs.codec`, outputs exist. Buffers come from ``new_empty`` of an argument: DeepSpeed's ``zero.Init`` turns what
``torch.empty`` makes into its own type, and a default dtype other than float32 would do the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch

from hzero.codecs import exponents, mpc, zfp
from hzero.codecs.formats import (
    FACTOR_SPAN,
    SCALE_LEVELS,
    CodecName,
    Layout,
    Messages,
    RecordFormat,
    Rows,
    layout_of,
    scale_limit,
)

#: What is added to the elements before they are encoded: residuals of earlier losses, or a base that is subtracted.
Adds: TypeAlias = Literal["", "residuals", "base"]

#: Codecs with records of their own: ``encode`` writes them from rows of whole blocks, ``decode`` gives such rows.
RECORDS: dict[CodecName, Any] = {"exp": exponents, "zfp": zfp, "mpc": mpc}
#: Types by their names in formats, and back.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)


# ---- calls: every backend has these four ----------------------------------------------------------------------------


def encoder(rows: Rows, fmt: RecordFormat, dtype: torch.dtype, adds: Adds, stochastic: bool) -> Callable[..., None]:
    """A call ``(payload, source, seed, added, factors, left)`` that encodes a bucket, see `hzero.codecs.codec.Encoder`."""
    if not fmt.block_size and not adds:
        return _Elements(rows, fmt, dtype).encode
    return functools.partial(_encode_bucket, rows, fmt, adds, stochastic)


def decoder(rows: Rows, fmt: RecordFormat, dtype: torch.dtype, add: bool) -> Callable[..., None]:
    """A call ``(payload, tensors)`` that decodes a message, see `hzero.codecs.codec.Decoder`."""
    if not fmt.block_size and not add:
        return _Elements(rows, fmt, dtype).decode
    return functools.partial(_decode_bucket, rows, fmt, dtype, add)


def summer(messages: Messages, fmt: RecordFormat, dtype: torch.dtype, add: bool) -> Callable[..., None]:
    """A call ``(payload, sums)`` that sums messages in float32, see `hzero.codecs.codec.Summer`."""
    if not fmt.block_size:
        rows = Rows.of(messages.chunks, (messages.peers, messages.inner), outer=messages.peers)
        return functools.partial(_Elements(rows, fmt, dtype).sum, messages.peers, add)
    return functools.partial(_sum_messages, messages, fmt, dtype, add)


def recoder(
    messages: Messages, fmt: RecordFormat, dtype: torch.dtype, outer: int, out: RecordFormat, stochastic: bool
) -> Callable[..., None] | None:
    """A call ``(payload, message, seed)`` that sums messages and encodes the sums, which stay rotated if they are.

    None for formats that are unlike.
    """
    if fmt.traits.plain and out.traits.plain and outer == 1:
        return functools.partial(_sum_elements, messages.peers, dtype)
    if not fmt.alike(out):
        return None
    return functools.partial(_recode_messages, messages, fmt, dtype, outer, out, stochastic)


# ---- buckets --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _encode_bucket(
    rows: Rows,
    fmt: RecordFormat,
    adds: Adds,
    stochastic: bool,
    payload: torch.Tensor,
    source: Sequence[torch.Tensor],
    seed: int = 0,
    added: Sequence[torch.Tensor] = (),
    factors: Sequence[float] = (),
    left: Sequence[torch.Tensor] = (),
) -> None:
    if adds == "residuals":
        _encode_sums(rows, fmt, stochastic, payload, source, seed, added, factors, left)
        return
    if adds == "base":
        dtype = source[0].dtype if fmt.traits.plain else torch.float32
        source = [(new.view(-1).float() - old.view(-1)).to(dtype) for new, old in zip(source, added)]
    _encode(rows, fmt, stochastic, payload, source, seed)


def _encode(
    rows: Rows, fmt: RecordFormat, stochastic: bool, payload: torch.Tensor, source: Sequence[torch.Tensor], seed: int
) -> None:
    dtype = source[0].dtype
    layout = layout_of(rows.chunks, fmt, dtype.itemsize)
    if not payload.numel():
        return
    if not fmt.block_size:
        _Elements(rows, fmt, dtype).encode(payload, source)
        return
    kind = torch.bfloat16 if fmt.traits.narrow else torch.float32
    staged = source[0].new_empty(rows.total, layout.row_blocks * fmt.block_size, dtype=kind)
    for column, flat, chunk in zip(_columns(staged, layout, fmt), _whole(source, rows.chunks, rows.total), rows.chunks):
        if column.shape[1] > chunk:
            column[:, chunk:].zero_()
            column = column[:, :chunk]
        column.view(*rows.sizes, chunk).copy_(_shards(flat, chunk, rows.sizes, rows.strides))
        _rotate(column, chunk, fmt, 1 / max(fmt.rotation, 1))
    if fmt.codec in RECORDS:
        records = _records(payload.zero_(), layout, rows.outer, rows.inner, torch.uint8)
        RECORDS[fmt.codec].encode(staged, records, layout, fmt)
    else:
        _encode_staged(staged, payload, layout, fmt, rows.outer, NAMES[dtype], stochastic, seed)


def _encode_sums(
    rows: Rows,
    fmt: RecordFormat,
    stochastic: bool,
    payload: torch.Tensor,
    source: Sequence[torch.Tensor],
    seed: int,
    residuals: Sequence[torch.Tensor],
    factors: Sequence[float],
    left: Sequence[torch.Tensor],
) -> None:
    meant, coded = [], fmt._replace(rotation=0)
    for tensor, residual, factor, chunk in zip(source, residuals, factors, rows.chunks):
        total = tensor.new_zeros(rows.total * chunk if fmt.rotation else tensor.numel(), dtype=torch.float32)
        some = total[: tensor.numel()].copy_(tensor.view(-1))
        if residual.numel():
            # Product and sum are rounded separately: whether `add_` with alpha fuses them depends on the processor.
            some.add_(residual.view(-1).float() * factor)
        if fmt.rotation:
            _rotate(total.view(-1, max(chunk, 1)), chunk, fmt, 1 / fmt.rotation)
        meant.append(total)
    _encode(rows, coded, stochastic, payload, meant, seed)
    sent = [payload.new_empty(rows.total * chunk, dtype=torch.float32) for chunk in rows.chunks]
    _decode_bucket(rows, coded, torch.float32, False, payload, sent)
    for total, part, kept, chunk in zip(meant, sent, left, rows.chunks):
        # An overflow makes a block NaN, and not every configuration skips the step: residuals must not carry it on.
        lost = total.sub_(part[: total.numel()]).nan_to_num_(0.0, 0.0, 0.0)
        if fmt.rotation:
            _rotate(lost.view(-1, max(chunk, 1)), chunk, fmt)
            lost.nan_to_num_(0.0, 0.0, 0.0)  # here a sum of finite numbers may overflow
        kept.view(-1).copy_(lost[: kept.numel()])


@torch.no_grad()
def _decode_bucket(
    rows: Rows,
    fmt: RecordFormat,
    dtype: torch.dtype,
    add: bool,
    payload: torch.Tensor,
    tensors: Sequence[torch.Tensor],
) -> None:
    layout = layout_of(rows.chunks, fmt, dtype.itemsize)
    payload = _aligned(payload)
    sizes, strides = rows.sizes, rows.strides
    if fmt.block_size:
        parts = _columns(_decode_staged(payload, layout, fmt, rows.outer, rows.inner), layout, fmt)
    else:
        parts = _records(payload, layout, rows.outer, rows.inner, dtype if fmt.traits.plain else torch.bfloat16)
        sizes, strides, _ = _axes(sizes, strides, rows.outer)
    for part, tensor, chunk in zip(parts, tensors, rows.chunks):
        _rotate(part, chunk, fmt)
        target = _shards(tensor.view(-1), chunk, sizes, strides)
        decoded = part[..., :chunk].reshape(*sizes, chunk)
        target.copy_(decoded.float() + target if add else decoded)


@torch.no_grad()
def _sum_messages(
    messages: Messages,
    fmt: RecordFormat,
    dtype: torch.dtype,
    add: bool,
    payload: torch.Tensor,
    sums: Sequence[torch.Tensor],
) -> None:
    peers, chunks, inner = messages
    if not payload.numel():
        return
    layout = layout_of(chunks, fmt, dtype.itemsize)
    payload = _aligned(payload)
    if fmt.rotation:  # decoded as one sum, and added as such
        totals = _columns(_sum_staged(payload, layout, fmt, peers, inner), layout, fmt)
        for flat, total, chunk in zip(sums, totals, chunks):
            _rotate(total, chunk, fmt)
            rows = flat.view(inner, chunk)
            (rows.add_ if add else rows.copy_)(total[:, :chunk])
        return
    parts = _decode_staged(payload, layout, fmt, peers, inner)
    records = [column.view(peers, inner, -1) for column in _columns(parts, layout, fmt)]
    for flat, record, chunk in zip(sums, records, chunks):
        rows = flat.view(inner, chunk)
        for peer in range(peers):
            (rows.add_ if peer or add else rows.copy_)(record[peer, :, :chunk])


@torch.no_grad()
def _recode_messages(
    messages: Messages,
    fmt: RecordFormat,
    dtype: torch.dtype,
    outer: int,
    out: RecordFormat,
    stochastic: bool,
    payload: torch.Tensor,
    message: torch.Tensor,
    seed: int = 0,
) -> None:
    peers, chunks, inner = messages
    if not payload.numel():
        return
    layout = layout_of(chunks, fmt, dtype.itemsize)
    # Beyond a record's elements the sums are zero, or NaN in a block that is NaN anyway: no code changes by it.
    total = _sum_staged(_aligned(payload), layout, fmt, peers, inner)
    target = layout_of(chunks, out, torch.float32.itemsize)
    _encode_staged(total, message, target, out, outer, "fp32", stochastic, seed)


@torch.no_grad()
def _sum_elements(peers: int, dtype: torch.dtype, payload: torch.Tensor, message: torch.Tensor, seed: int = 0) -> None:
    """Sums whole messages of elements, rounded once to their type."""
    parts = _aligned(payload).view(dtype).view(peers, -1)
    if peers == 2:  # one addition rounds once in any type
        torch.add(parts[0], parts[1], out=message.view(dtype))
        return
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total.add_(part)
    message.view(dtype).copy_(total)


# ---- elements: codecs none and bf16 ---------------------------------------------------------------------------------


class _Elements:
    """Records of elements: where those of a bucket lie in a message and in the tensors, found once.

    Args:
        rows: The rows of the message.
        fmt: Its format.
        dtype: Type of the tensors.
    """

    def __init__(self, rows: Rows, fmt: RecordFormat, dtype: torch.dtype) -> None:
        self._type = dtype if fmt.traits.plain else torch.bfloat16
        self._casts = self._type != dtype
        self._some = [index for index, chunk in enumerate(rows.chunks) if chunk]
        self._chunks, self._total = rows.chunks, rows.total
        layout = layout_of(rows.chunks, fmt, dtype.itemsize)
        widths = [size // self._type.itemsize for size in layout.record_bytes]
        self._widths, width = widths, sum(widths)
        sizes, strides, self._splits = _axes(rows.sizes, rows.strides, rows.outer)
        self._laid_together = rows.outer == 1 and sizes == (rows.total,) and list(rows.chunks) == widths
        self._records: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []  # in the message: size, stride, offset
        self._gaps: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []  # behind records
        self._shards: list[tuple[tuple[int, ...], tuple[int, ...]]] = []  # in tensors: size, stride
        start = 0
        for chunk, own in zip(rows.chunks, widths):
            over_rows, reached = list[int](), 1
            for size in reversed(sizes):
                inside = reached * own if reached < rows.inner else reached * width
                over_rows.insert(0, inside)
                reached *= size
            if not self._splits:
                over_rows = [rows.inner * width, own]
            shape = sizes if self._splits else (rows.outer, rows.inner)
            self._records.append(((*shape, chunk), (*over_rows, 1), start))
            self._gaps.append(((*shape, own - chunk), (*over_rows, 1), start + chunk))
            self._shards.append(((*sizes, chunk), (*(stride * chunk for stride in strides), 1)))
            start += rows.inner * own

    def _in_message(self, message: torch.Tensor) -> list[torch.Tensor]:
        first = message.storage_offset()
        return [message.as_strided(*self._records[i][:2], first + self._records[i][2]) for i in self._some]

    def _in_tensors(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = [tensors[i].as_strided(*self._shards[i], tensors[i].storage_offset()) for i in self._some]
        if not self._splits:
            found = [shards.reshape(self._records[i][0]) for i, shards in zip(self._some, found)]
        return found

    @torch.no_grad()
    def encode(self, payload: torch.Tensor, source: Sequence[torch.Tensor], *_: Any) -> None:
        """Writes a message."""
        if not self._some:
            return
        message = payload.view(self._type)
        short = any(source[i].numel() < self._total * self._chunks[i] for i in self._some)
        if self._laid_together and not short and not self._casts:
            torch.cat([tensor.view(-1) for tensor in source], out=message)
            return
        if short:
            source = list(_whole(source, self._chunks, self._total))
        torch._foreach_copy_(self._in_message(message), self._in_tensors(source))
        first = message.storage_offset()
        for index in self._some:
            if self._widths[index] > self._chunks[index]:
                size, stride, offset = self._gaps[index]
                message.as_strided(size, stride, first + offset).zero_()
        if self._casts:
            # Which NaN a conversion makes depends on the processor.
            message.nan_to_num_(math.nan, math.inf, -math.inf)

    @torch.no_grad()
    def decode(self, payload: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Reads a message."""
        if not self._some:
            return
        records = self._in_message(_aligned(payload).view(self._type))
        if self._splits:
            torch._foreach_copy_(self._in_tensors(tensors), records)
            return
        for index, record in zip(self._some, records):
            size, stride = self._shards[index]
            target = tensors[index].as_strided(size, stride, tensors[index].storage_offset())
            target.copy_(record.reshape(size))

    @torch.no_grad()
    def sum(self, peers: int, add: bool, payload: torch.Tensor, sums: Sequence[torch.Tensor]) -> None:
        """Sums the messages of peers, the first axis of the rows, in float32 and in their order."""
        if not self._some:
            return
        message, inner = _aligned(payload).view(self._type).view(peers, -1), self._total // peers
        padded = [(place, i) for place, i in enumerate(self._some) if self._widths[i] > self._chunks[i]]
        sizes, flat = [inner * self._widths[i] for i in self._some], [sums[i].view(-1) for i in self._some]
        for place, index in padded:
            flat[place] = flat[place].view(inner, self._chunks[index])
        for peer, part in enumerate(message):
            parts = list(part.split(sizes))
            for place, index in padded:
                parts[place] = parts[place].view(inner, self._widths[index])[:, : self._chunks[index]]
            if peer or add:
                torch._foreach_add_(flat, parts)
            else:
                torch._foreach_copy_(flat, parts)


# ---- blocks: codecs int8 and int4 -----------------------------------------------------------------------------------


def _encode_staged(
    staged: torch.Tensor,
    payload: torch.Tensor,
    layout: Layout,
    fmt: RecordFormat,
    outer: int,
    source: str,
    stochastic: bool,
    seed: int,
) -> None:
    """Writes a message from float32 ``[rows, blocks * block_size]``, zero beyond short blocks. Overwrites the input."""
    rows = staged.shape[0]
    blocks = staged.view(rows, layout.row_blocks, fmt.block_size)
    multiplied, stored = _scales_of(blocks, layout, fmt, source, stochastic)
    # A block of zero or NaN scale has no codes: dividing by infinity makes them zero.
    divisors = multiplied.masked_fill((multiplied == 0) | multiplied.isnan(), math.inf)
    blocks.div_(divisors.unsqueeze(-1))
    if stochastic:
        staged.add_(_noise(staged, seed)).floor_()
    else:
        staged.round_()
    # Infinity over infinity is NaN; its block decodes to NaN whatever the codes are.
    codes = staged.nan_to_num_(0.0).clamp_(fmt.codes.lowest, fmt.codes.highest).to(torch.int8)
    if fmt.codes.bits == 4:
        # Pairs as little-endian 16-bit words: the element of even index is the low byte.
        pairs = codes.view(torch.int16)
        codes = ((pairs & 0x0F) | ((pairs >> 4) & 0xF0)).to(torch.uint8)
    payload.zero_()
    for written, own in _regions(payload, codes.view(torch.uint8), stored, layout, fmt, outer):
        written.copy_(own)


def _decode_staged(payload: torch.Tensor, layout: Layout, fmt: RecordFormat, outer: int, inner: int) -> torch.Tensor:
    """Float32 ``[rows, blocks * block_size]``; beyond a record's elements zero, or NaN where the block is.

    Codecs with modules of their own give anything beyond a record's elements; codec ``exp`` gives bfloat16.
    """
    if fmt.codec in RECORDS and payload.numel():
        return RECORDS[fmt.codec].decode(
            _records(payload, layout, outer, inner, torch.uint8), outer * inner, layout, fmt
        )
    rows, width = outer * inner, layout.row_blocks * fmt.block_size
    width = width * fmt.codes.bits // 8 if fmt.scale_bytes else 0
    if not width:
        return payload.new_empty(rows, 0, dtype=torch.float32)
    codes = payload.new_zeros(rows, width)
    stored = payload.new_empty(rows, sum(map(fmt.scales_bytes, layout.chunks)))
    for written, own in _regions(payload, codes, stored, layout, fmt, outer):
        own.copy_(written)
    codes = codes.view(torch.int8)
    if fmt.codes.bits == 4:
        high = codes.to(torch.int16)  # extends the sign
        low = high.bitwise_left_shift(12).bitwise_right_shift_(12).bitwise_and_(0xFF)
        codes = high.bitwise_right_shift_(4).bitwise_left_shift_(8).bitwise_or_(low).view(torch.int8)
    values = codes.to(torch.float32)
    values.view(rows, layout.row_blocks, fmt.block_size).mul_(_stored_scales(stored, layout, fmt).unsqueeze(-1))
    return values


def _sum_staged(payload: torch.Tensor, layout: Layout, fmt: RecordFormat, peers: int, inner: int) -> torch.Tensor:
    """Sum over peers, float32 ``[inner, blocks * block_size]``, in their order."""
    parts = _decode_staged(payload, layout, fmt, peers, inner).to(torch.float32)
    total = parts[:inner]
    for peer in range(1, peers):
        total.add_(parts[peer * inner : (peer + 1) * inner])
    return total


# ---- scales ---------------------------------------------------------------------------------------------------------


def _scales_of(
    blocks: torch.Tensor, layout: Layout, fmt: RecordFormat, source: str, stochastic: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of blocks.

    Args:
        blocks: float32 ``[rows, blocks, block_size]``.
        layout: Of the message.
        fmt: Of the message.
        source: Type of the elements, whose range limits the scales.
        stochastic: Whether codes are: scales are then positive and rounded up, so that no code is clamped.

    Returns:
        float32 ``[rows, blocks]``, as a decoder multiplies by them, NaN for a block that holds NaN or infinity, or, with
        scales of one byte, whose span does; and uint8 ``[rows, bytes]``, the stored scales of all records.
    """
    highest = fmt.codes.highest
    if stochastic or fmt.codes.lowest == -highest:
        extremes, level = torch.maximum(-blocks.amin(-1), blocks.amax(-1)), float(highest)
    else:  # the sign of the largest element decides which one has the additional code below zero
        extremes, level = _extremes(blocks), float(fmt.codes.lowest)
    # On CUDA a division by a Python number multiplies by its reciprocal, which is not the same last bit.
    exact = extremes / extremes.new_full((), level)
    limit = scale_limit(fmt, source, stochastic=stochastic)
    if fmt.scale_bytes == 1:
        return _coded(exact, extremes.isfinite(), limit, layout, fmt, stochastic)
    # Adding zero turns -0 into +0: a block without a scale has one bit pattern, and decodes to +0.
    rounded = _up(exact) if stochastic and fmt.scale_bytes == 2 else exact
    stored = rounded.to(_scale_type(fmt)).clamp_(-limit, limit).add_(0.0)
    stored.masked_fill_(~extremes.isfinite(), math.nan)
    return stored.float(), stored.view(torch.uint8)


def _up(numbers: torch.Tensor) -> torch.Tensor:
    """The next bfloat16 that is not below a number, which is not negative; as float32."""
    return (numbers.view(torch.int32) + 0xFFFF).bitwise_and_(-0x10000).view(torch.float32)


def _stored_scales(stored: torch.Tensor, layout: Layout, fmt: RecordFormat) -> torch.Tensor:
    """The scales, float32 ``[rows, blocks]``, of the bytes that `_scales_of` gives."""
    if fmt.scale_bytes > 1:
        return stored.view(_scale_type(fmt)).float()
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
    exact: torch.Tensor,
    finite: torch.Tensor,
    limit: float,
    layout: Layout,
    fmt: RecordFormat,
    stochastic: bool,
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
        # Rounded up, a scale needs the product of its code not to be below it: one code is kept for that.
        ratio = largest / largest.new_full((), SCALE_LEVELS - stochastic)
        factors = (_up(ratio) if stochastic else ratio).to(torch.bfloat16).clamp_(max=limit)
        factors.masked_fill_(largest.isinf(), math.nan)
        divisors = factors.float().masked_fill_((factors == 0) | factors.isnan(), math.inf)
        # Infinity over infinity is NaN; its span has no codes.
        quotients = padded / divisors
        codes = quotients.ceil_() if stochastic else quotients.round_()
        codes.nan_to_num_(0.0).clamp_(-SCALE_LEVELS, SCALE_LEVELS)
        if stochastic:
            below = _products(codes, factors.float()).view(padded.shape) < padded
            codes.add_(below.float()).clamp_(max=SCALE_LEVELS)
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


def _scale_type(fmt: RecordFormat) -> torch.dtype:
    """Type that codes are multiplied by; scales of one byte are products with a factor of it."""
    return torch.float32 if fmt.scale == "fp32" else torch.bfloat16


# ---- rotation -------------------------------------------------------------------------------------------------------


def _rotate(rows: torch.Tensor, chunk: int, fmt: RecordFormat, factor: float = 1.0) -> None:
    """Multiplies float32 records, the rows of a matrix, by ``factor`` and rotates them, in place, where the format says so.

    Groups of ``rotation`` elements are rotated, so that no element is far larger than the rest of its block, as SDP4Bit does
    (arXiv 2410.15526). The last block of a record stays as it is unless it consists of such groups: rotated elements are
    smaller, and those beside them would set their scale. The rotation is a Walsh-Hadamard transform: its own inverse but for
    a factor of 1 / rotation, a power of two.
    """
    size = fmt.rotation
    if not size:
        return
    whole = chunk // fmt.block_size * fmt.block_size if chunk % size else chunk
    if not whole:
        return
    groups = rows[:, :whole].reshape(-1, size) * factor
    distance = 1
    while distance < size:
        pairs = groups.view(-1, 2, distance)
        groups = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), dim=1)
        distance *= 2
    rows[:, :whole].copy_(groups.view(-1, whole))


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
        yield torch.cat(_padded([tensor], [rows * chunk])) if missing else tensor.view(-1)


def _padded(source: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
    """The sources, flat, each followed by the zeros that it lacks."""
    gaps = [size - tensor.numel() for tensor, size in zip(source, sizes)]
    zeros = source[0].new_zeros(max(gaps))
    return [piece for tensor, gap in zip(source, gaps) for piece in (tensor.view(-1), zeros[:gap])]


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
