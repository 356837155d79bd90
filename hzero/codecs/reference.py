"""Reference backend: the payload formats in plain torch, on any device. The other backends match it bit for bit.

Every backend has the functions at the top. Three of them prepare a call for one layout. For a message with checksums, a call
that writes adds to the checksums in the message, and a call that reads adds to a tensor. `hzero.codecs.codec` has checked the
arguments and allocated the outputs. Records are written tensor by tensor. The modules of codecs have the arithmetic
(`hzero.codecs.formats.Traits.reference`). Records of codecs ``none`` and ``bf16`` are the elements.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch.nn.functional import pad

from hzero.codecs.blocks import mixed, rotated
from hzero.codecs.formats import CHECKSUM_BYTES, RecordFormat, Rows, layout_of

#: A prepared call: it reads and writes the tensors of its arguments. Those after the tensors have names.
Run: TypeAlias = Callable[..., None]


class Backend(Protocol):
    """Prepares calls of codecs. This module is one backend; its functions describe arguments and results."""

    def encoder(self, rows: Rows, fmt: RecordFormat, dtype: torch.dtype, feedback: bool = False) -> Run:
        """Prepares to encode."""

    def decoder(self, rows: Rows, fmt: RecordFormat, dtype: torch.dtype, sums: bool = False, add: bool = False) -> Run:
        """Prepares to decode, or to sum."""

    def recoder(self, rows: Rows, fmt: RecordFormat, dtype: torch.dtype, summed: Rows, out: RecordFormat) -> Run | None:
        """Prepares to sum and encode in one pass. None: in two."""

    def checksums(self, parts: torch.Tensor) -> torch.Tensor:
        """Computes checksums of bytes."""


#: Dtypes by their names in formats, and the reverse.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: Bytes per slice of a checksum, since its integers need 16 times as much memory.
_SLICE = 1 << 22


# ---- functions of every backend ------------------------------------------------------------------------


def encoder(rows: Rows, fmt: RecordFormat, dtype: torch.dtype, feedback: bool = False) -> Run:
    """Returns a call ``(payload, tensors, *, seed, residuals, factors)`` that encodes; see `hzero.codecs.codec.Encoder`."""
    coded = torch.float32 if feedback else dtype

    @torch.no_grad()
    def encode(payload: Any, tensors: Any, *, seed: int = 0, residuals: Any = (), factors: Any = ()) -> None:
        payload.zero_()
        for index, record in records_of(payload, rows, fmt, coded):
            values, chunk = tensors[index].view(-1), rows.chunks[index]
            if feedback:
                # Product and sum are rounded separately: on some processors, `add_` with alpha fuses them.
                values = values.float() + residuals[index].view(-1).float() * factors[index]
            flat = pad(values, (0, rows.total * chunk - values.numel()))
            shards = _shards(flat, chunk, rows).reshape(rows.total, chunk)
            shards = shards.to(torch.float32 if fmt.traits.reference else coded)
            shards = rotated(shards, fmt, 1 / max(fmt.rotation, 1))
            written = _record_of(shards, fmt, NAMES.get(coded, ""), seed, _first_block(rows, fmt, index))
            record.copy_(written.view(record.shape))
            if feedback:
                # An overflow makes a block NaN, and some configurations do not skip the step. Residuals must not keep the NaN.
                lost = (shards - _values_of(written, chunk, fmt, coded)).nan_to_num_(0.0, 0.0, 0.0)
                lost = rotated(lost, fmt).nan_to_num_(0.0, 0.0, 0.0)  # a sum of finite numbers may overflow
                found = flat.new_empty(flat.numel())
                _shards(found, chunk, rows).copy_(lost.view(*rows.sizes, chunk))
                residuals[index].view(-1).copy_(found[: values.numel()])
        _check(payload, rows.parts)

    return encode


def decoder(rows: Rows, fmt: RecordFormat, dtype: torch.dtype, sums: bool = False, add: bool = False) -> Run:
    """Returns a call ``(payload, tensors, *, checksums)`` that decodes or sums a message; see `hzero.codecs.codec.Decoder`."""

    @torch.no_grad()
    def decode(payload: torch.Tensor, tensors: Sequence[torch.Tensor], *, checksums: Any = None) -> None:
        _check(payload, rows.parts, checksums)
        for index, record in records_of(payload, rows, fmt, dtype):
            chunk = rows.chunks[index]
            values = rotated(_values_of(record.flatten(0, -2), chunk, fmt, dtype), fmt).view(*rows.sizes, chunk)
            _shards(tensors[index].view(-1), chunk, rows).copy_(values)

    @torch.no_grad()
    def sum_(payload: torch.Tensor, tensors: Sequence[torch.Tensor], *, checksums: Any = None) -> None:
        _check(payload, rows.parts, checksums)
        for index, record in records_of(payload, rows, fmt, dtype):
            chunk = rows.chunks[index]
            total = tensors[index].view(rows.inner, chunk)
            parts = _values_of(record.flatten(0, -2), chunk, fmt, dtype).view(rows.outer, rows.inner, chunk)
            if fmt.rotation:  # sum first, rotate once, then add
                parts = rotated(_in_order(parts), fmt).unsqueeze(0)
            for peer, part in enumerate(parts):
                (total.add_ if peer or add else total.copy_)(part)

    return sum_ if sums else decode


def recoder(rows: Rows, fmt: RecordFormat, dtype: torch.dtype, summed: Rows, out: RecordFormat) -> Run | None:
    """Returns a call ``(payload, *, message, seed, checksums)`` that sums the pieces and encodes the sums, still rotated.

    None if the formats have neither the same blocks nor plain elements.
    """
    if not fmt.alike(out) and not (fmt.traits.plain and out.traits.plain):
        return None
    coded = dtype if out.traits.plain else torch.float32

    @torch.no_grad()
    def recode(payload: torch.Tensor, *, message: torch.Tensor, seed: int = 0, checksums: Any = None) -> None:
        _check(payload, rows.parts, checksums)
        sums = []
        for index, record in records_of(payload, rows, fmt, dtype):
            parts = _values_of(record.flatten(0, -2), rows.chunks[index], fmt, dtype)
            total = _in_order(parts.view(rows.outer, rows.inner, -1)).to(coded)
            sums.append((index, total.nan_to_num_(math.nan, math.inf, -math.inf) if out.traits.plain else total))
        message.zero_()  # it may share the payload's memory
        for (index, total), (_, written) in zip(sums, records_of(message, summed, out, coded)):
            record = _record_of(total, out, "fp32", seed, _first_block(rows, out, index))
            written.copy_(record.view(written.shape))
        _check(message, summed.parts)

    return recode


def checksums(parts: torch.Tensor) -> torch.Tensor:
    """Checksums of bytes: the sum of their 32-bit words, each times a factor for its place, modulo 2**64.

    The factors of two places differ, and none is 0. The sum therefore detects with certainty if bits of one word have changed,
    or if two words are swapped. Any other error that does not depend on the factors is missed with a probability below 2**-31.

    Args:
        parts: uint8 ``[parts, bytes]`` with contiguous rows.

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
    """View of the checksums after the parts of a message, int64 ``[parts, 2]``: the sum, and the address that a hop adds."""
    return message.view(torch.int64).view(parts, -1)[:, -CHECKSUM_BYTES // 8 :]


def _check(message: torch.Tensor, parts: int, sums: torch.Tensor | None = None) -> None:
    """Adds the checksums of a message's parts, if it has parts, to ``sums``; None: to the checksums in the message."""
    if parts:
        sums = trailers(message, parts)[:, 0] if sums is None else sums
        sums.add_(checksums(message.view(parts, -1)[:, :-CHECKSUM_BYTES]))


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """Returns the float32 sum over the first axis, in its order."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total


# ---- records --------------------------------------------------------------------------------------------------------


def _record_of(values: torch.Tensor, fmt: RecordFormat, source: str, seed: int, first_block: int) -> torch.Tensor:
    """Returns uint8 ``[rows, bytes]`` for ``[rows, numel]``; the other arguments are as in `hzero.codecs.formats.Traits`."""
    module = module_of(fmt)
    if module is not None:
        parts = module.encode(values, fmt, source, seed, first_block)
    else:
        if not fmt.traits.plain and values.dtype != torch.bfloat16:
            # The NaN of a conversion depends on the processor.
            values = values.to(torch.bfloat16).nan_to_num_(math.nan, math.inf, -math.inf)
        parts = [values.contiguous().view(torch.uint8)]
    starts = fmt.offsets(values.shape[1], values.element_size())
    rooms = (end - start for start, end in itertools.pairwise(starts))
    return torch.cat([pad(part, (0, room - part.shape[1])) for part, room in zip(parts, rooms)], dim=1)


def _values_of(records: torch.Tensor, numel: int, fmt: RecordFormat, dtype: torch.dtype) -> torch.Tensor:
    """Returns ``[rows, numel]``, still rotated, from uint8 ``[rows, bytes]``: float32 or a dtype for the encoded values."""
    module = module_of(fmt)
    if module is not None:
        values: torch.Tensor = module.decode(records, numel, fmt)
        return values
    return records.contiguous().view(dtype if fmt.traits.plain else torch.bfloat16)[:, :numel]


def module_of(fmt: RecordFormat) -> Any:
    """Returns the module of a codec's records, imported at first use; None if records are elements."""
    name = fmt.traits.reference
    return importlib.import_module(f"hzero.codecs.{name}") if name else None


def records_of(
    payload: torch.Tensor, rows: Rows, fmt: RecordFormat, dtype: torch.dtype
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields the index of each nonempty tensor, and a view ``[parts, pieces, rows, record]`` of its records."""
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
    """Returns a view ``[*sizes, chunk]`` of shards in the order of the rows."""
    strides = (*(stride * chunk for stride in rows.strides), 1)
    return flat.as_strided((*rows.sizes, chunk), strides, flat.storage_offset())
