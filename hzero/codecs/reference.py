"""Reference backend: the payload formats in plain torch, on any device. The other backends follow it bit for bit.

Every backend has the functions at the top. Four prepare a call on one layout; of a message that has checksums, what writes it
adds them to those that are there, and what reads it to a tensor. Arguments are checked by
`hzero.codecs.codec`, outputs exist. Records are written tensor by tensor; the modules of codecs have their arithmetic
(`hzero.codecs.formats.Traits.reference`). Codecs ``none`` and ``bf16``, whose records are elements, are copies and casts, which
torch does as fast as memory allows: the other backends leave them to this one.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch.nn.functional import pad

from hzero.codecs.blocks import mixed, rotated
from hzero.codecs.formats import ALIGNMENT, CHECKSUM_BYTES, RecordFormat, Rows, layout_of

#: What is added to the elements before they are encoded: residuals of earlier losses, or a base that is subtracted.
Adds: TypeAlias = Literal["", "residuals", "base"]

#: Types by their names in formats, and back.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: Bytes that are summed at a time, since their numbers take 16 times as much.
_SLICE = 1 << 22


# ---- what every backend has ----------------------------------------------------------------------------


def encoder(rows: Rows, fmt: RecordFormat, dtype: torch.dtype, adds: Adds) -> Callable[..., None]:
    """A call ``(payload, source, seed, added, factors)`` that encodes a bucket, see `hzero.codecs.codec.Encoder`."""
    if not fmt.traits.reference and not adds:
        return _Elements(rows, fmt, dtype).encode
    # Sums with residuals, and differences that a codec rounds, are float32.
    coded = dtype if not adds or (adds == "base" and fmt.traits.plain) else torch.float32

    @torch.no_grad()
    def encode(payload: Any, source: Any, seed: int = 0, added: Any = (), factors: Any = ()) -> None:
        payload.zero_()
        for index, record in records_of(payload, rows, fmt, coded):
            values, chunk = source[index].view(-1), rows.chunks[index]
            if adds:
                values = values.float()
            if adds == "base":
                values = (values - added[index].view(-1)).to(coded)
            elif adds:
                # Product and sum are rounded separately: whether `add_` with alpha fuses them depends on the processor.
                values = values + added[index].view(-1).float() * factors[index]
            flat = pad(values, (0, rows.total * chunk - values.numel()))
            shards = _shards(flat, chunk, rows).reshape(rows.total, chunk)
            shards = shards.to(coded if fmt.traits.plain else torch.float32)
            shards = rotated(shards, fmt, 1 / max(fmt.rotation, 1))
            written = _record_of(shards, fmt, NAMES.get(coded, ""), seed, _first_block(rows, fmt, index))
            record.copy_(written.view(record.shape))
            if adds == "residuals":
                # An overflow makes a block NaN, and not every configuration skips the step: residuals must not carry it on.
                lost = (shards - _values_of(written, chunk, fmt, coded)).nan_to_num_(0.0, 0.0, 0.0)
                lost = rotated(lost, fmt).nan_to_num_(0.0, 0.0, 0.0)  # here a sum of finite numbers may overflow
                found = flat.new_empty(flat.numel())
                _shards(found, chunk, rows).copy_(lost.view(*rows.sizes, chunk))
                added[index].view(-1).copy_(found[: values.numel()])
        _check(payload, rows.parts)

    return encode


def decoder(rows: Rows, fmt: RecordFormat, dtype: torch.dtype, add: bool) -> Callable[..., None]:
    """A call ``(payload, tensors, checksums)`` that decodes a message, see `hzero.codecs.codec.Decoder`."""
    if not fmt.traits.reference and not add:
        return _Elements(rows, fmt, dtype).decode

    @torch.no_grad()
    def decode(payload: torch.Tensor, tensors: Sequence[torch.Tensor], checksums: Any = None) -> None:
        _check(payload, rows.parts, checksums)
        for index, record in records_of(payload, rows, fmt, dtype):
            chunk = rows.chunks[index]
            values = rotated(_values_of(record.flatten(0, -2), chunk, fmt, dtype), fmt).view(*rows.sizes, chunk)
            target = _shards(tensors[index].view(-1), chunk, rows)
            target.copy_(values.float() + target if add else values)

    return decode


def summer(rows: Rows, fmt: RecordFormat, dtype: torch.dtype, add: bool) -> Callable[..., None]:
    """A call ``(payload, sums, checksums)`` that sums the pieces of a payload in float32, see `hzero.codecs.codec.Decoder`."""
    if not fmt.traits.reference:
        message = _Elements(Rows.of(rows.chunks, (rows.inner,)), fmt, dtype)
        return functools.partial(message.sum, rows.outer, add)

    @torch.no_grad()
    def sum_(payload: torch.Tensor, sums: Sequence[torch.Tensor], checksums: Any = None) -> None:
        _check(payload, rows.parts, checksums)
        for index, record in records_of(payload, rows, fmt, dtype):
            chunk = rows.chunks[index]
            total = sums[index].view(rows.inner, chunk)
            parts = _values_of(record.flatten(0, -2), chunk, fmt, dtype).view(rows.outer, rows.inner, chunk)
            if fmt.rotation:  # decoded as one sum, and added as such
                parts = rotated(_in_order(parts), fmt).unsqueeze(0)
            for peer, part in enumerate(parts):
                (total.add_ if peer or add else total.copy_)(part)

    return sum_


def recoder(
    rows: Rows, fmt: RecordFormat, dtype: torch.dtype, summed: Rows, out: RecordFormat
) -> Callable[..., None] | None:
    """A call ``(payload, message, seed, checksums)`` that sums the pieces and encodes the sums, rotated if they are.

    None for formats that are unlike.
    """
    if not fmt.alike(out) and not (fmt.traits.plain and out.traits.plain):
        return None
    coded = dtype if out.traits.plain else torch.float32

    @torch.no_grad()
    def recode(payload: torch.Tensor, message: torch.Tensor, seed: int = 0, checksums: Any = None) -> None:
        _check(payload, rows.parts, checksums)
        message.zero_()
        records = zip(records_of(payload, rows, fmt, dtype), records_of(message, summed, out, coded))
        for (index, record), (_, written) in records:
            chunk = rows.chunks[index]
            parts = _values_of(record.flatten(0, -2), chunk, fmt, dtype).view(rows.outer, rows.inner, chunk)
            total = _record_of(_in_order(parts).to(coded), out, "fp32", seed, _first_block(rows, out, index))
            written.copy_(total.view(written.shape))
        _check(message, summed.parts)

    return recode


def checksums(parts: torch.Tensor) -> torch.Tensor:
    """Checksums of bytes: their words of 32 bits, each times a number for its place, added modulo 2**64.

    The numbers of two places differ and none is 0. So the sum tells for certain if bits of one word have changed, or if two words
    have changed places. Any other error that does not depend on the numbers goes unseen with a probability below 2**-31.

    Args:
        parts: uint8 ``[parts, bytes]``, contiguous but for its rows.

    Returns:
        int64 ``[parts]``.
    """
    sums = parts.new_zeros(len(parts), dtype=torch.int64)
    for start in range(0, parts.shape[1], _SLICE):
        some = parts[:, start : start + _SLICE]
        words = pad(some, (0, -some.shape[1] % 4)).contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        places = torch.arange(start // 4 + 1, start // 4 + 1 + words.shape[1], device=parts.device)
        sums += (words * mixed(places)).sum(1)
    return sums


def trailers(message: torch.Tensor, parts: int) -> torch.Tensor:
    """View of the checksums behind the parts of a message, int64 ``[parts, 2]``: the sum, and what a hop adds."""
    return message.view(torch.int64).view(parts, -1)[:, -CHECKSUM_BYTES // 8 :]


def _check(message: torch.Tensor, parts: int, sums: torch.Tensor | None = None) -> None:
    """Adds the checksums of a message's parts, if it has some, to those that it has, or to others."""
    if parts:
        (trailers(message, parts)[:, 0] if sums is None else sums).add_(
            checksums(message.view(parts, -1)[:, :-CHECKSUM_BYTES])
        )


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """The float32 sum over the first axis, in its order."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total


# ---- records --------------------------------------------------------------------------------------------------------


def _record_of(
    values: torch.Tensor, fmt: RecordFormat, source: str = "fp32", seed: int = 0, first_block: int = 0
) -> torch.Tensor:
    """uint8 ``[rows, bytes]`` of ``[rows, numel]``; the last three as of `hzero.codecs.blocks.encode`."""
    module = module_of(fmt)
    if module is not None:
        parts = module.encode(values, fmt, source, seed, first_block)
    else:
        if not fmt.traits.plain and values.dtype != torch.bfloat16:
            # Which NaN a conversion makes depends on the processor.
            values = values.to(torch.bfloat16).nan_to_num_(math.nan, math.inf, -math.inf)
        parts = [values.contiguous().view(torch.uint8)]
    return torch.cat([pad(part, (0, -part.shape[1] % ALIGNMENT)) for part in parts], dim=1)


def _values_of(records: torch.Tensor, numel: int, fmt: RecordFormat, dtype: torch.dtype) -> torch.Tensor:
    """``[rows, numel]``, rotated if they are, of uint8 ``[rows, bytes]``: float32, or a type that holds what was encoded."""
    module = module_of(fmt)
    if module is not None:
        values: torch.Tensor = module.decode(records, numel, fmt)
        return values
    return records.contiguous().view(dtype if fmt.traits.plain else torch.bfloat16)[:, :numel]


def module_of(fmt: RecordFormat) -> Any:
    """The module of a codec's records; None where they are elements. It is imported once it is needed."""
    name = fmt.traits.reference
    return importlib.import_module(f"hzero.codecs.{name}") if name else None


def records_of(
    payload: torch.Tensor, rows: Rows, fmt: RecordFormat, dtype: torch.dtype
) -> Iterator[tuple[int, torch.Tensor]]:
    """Each tensor that has elements, and a view ``[parts, pieces, rows, record]`` of its records."""
    layout, parts = layout_of(rows.chunks, fmt, dtype.itemsize), max(rows.parts, 1)
    shape = rows.outer // parts, rows.inner * layout.row_bytes
    pieces = payload.view(parts, -1)[:, : math.prod(shape)].unflatten(1, shape)
    records = pieces.split([rows.inner * size for size in layout.record_bytes], dim=2)
    for index, (record, size) in enumerate(zip(records, layout.record_bytes)):
        if size:
            yield index, record.unflatten(2, (rows.inner, size))


def _first_block(rows: Rows, fmt: RecordFormat, index: int) -> int:
    return layout_of(rows.chunks, fmt, 0).block_starts[index]


def _shards(flat: torch.Tensor, chunk: int, rows: Rows) -> torch.Tensor:
    """View ``[*sizes, chunk]`` of shards in the order of the rows."""
    strides = (*(stride * chunk for stride in rows.strides), 1)
    return flat.as_strided((*rows.sizes, chunk), strides, flat.storage_offset())


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
        #: Of each tensor with elements: its place in the bucket and elements of all its shards; size, stride and offset of its
        #: records in the message, of what follows them, and of the shards in the tensor.
        self._places: list[int] = []
        self._numels: list[int] = []
        self._in_message: list[_View] = []
        self._gaps: list[_View] = []
        self._in_tensors: list[_View] = []
        layout = layout_of(rows.chunks, fmt, dtype.itemsize)
        width, start = layout.row_bytes // self._type.itemsize, 0
        for index, (chunk, size) in enumerate(zip(rows.chunks, layout.record_bytes)):
            if not chunk:
                continue
            own, reached, strides = size // self._type.itemsize, 1, [1]
            for axis in reversed(rows.sizes):
                strides.insert(0, reached * own if reached < rows.inner else reached * width)
                reached *= axis
            self._places.append(index)
            self._numels.append(rows.total * chunk)
            self._in_message.append(((*rows.sizes, chunk), tuple(strides), start))
            if own > chunk:
                self._gaps.append(((*rows.sizes, own - chunk), tuple(strides), start + chunk))
            self._in_tensors.append(((*rows.sizes, chunk), (*(stride * chunk for stride in rows.strides), 1), 0))
            start += rows.inner * own

    @torch.no_grad()
    def encode(self, payload: torch.Tensor, source: Sequence[torch.Tensor], *_: Any) -> None:
        """Writes a message."""
        if not self._places:
            return
        message, tensors = payload.view(self._type), [source[place] for place in self._places]
        for index, (tensor, numel) in enumerate(zip(tensors, self._numels)):
            if missing := numel - tensor.numel():
                tensors[index] = pad(tensor.view(-1), (0, missing))
        torch._foreach_copy_(_views([message] * len(tensors), self._in_message), _views(tensors, self._in_tensors))
        for gap in self._gaps:
            _view(message, gap).zero_()
        if self._casts:
            # Which NaN a conversion makes depends on the processor.
            message.nan_to_num_(math.nan, math.inf, -math.inf)

    @torch.no_grad()
    def decode(self, payload: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Reads a message."""
        if self._places:
            records = _views([payload.view(self._type)] * len(self._places), self._in_message)
            torch._foreach_copy_(_views([tensors[place] for place in self._places], self._in_tensors), records)

    @torch.no_grad()
    def sum(self, peers: int, add: bool, payload: torch.Tensor, sums: Sequence[torch.Tensor]) -> None:
        """Sums the messages of peers, one after the other, in float32 and in their order."""
        if not self._places:
            return
        totals = _views([sums[place] for place in self._places], self._in_tensors)
        for peer, message in enumerate(payload.view(self._type).view(peers, -1)):
            parts = _views([message] * len(totals), self._in_message)
            (torch._foreach_add_ if peer or add else torch._foreach_copy_)(totals, parts)


#: Size, stride and offset.
_View: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]


def _view(tensor: torch.Tensor, view: _View) -> torch.Tensor:
    size, stride, offset = view
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _views(tensors: Sequence[torch.Tensor], views: Sequence[_View]) -> list[torch.Tensor]:
    return [_view(tensor, view) for tensor, view in zip(tensors, views)]
