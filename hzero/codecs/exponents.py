"""Reference of codec ``exp``, in plain torch: lossless for bfloat16, whose exponents take few values in any stretch.

A record has the signs and mantissas as they are, a code of 4 bits for each exponent, and what the codes leave out: a window
of exponents for each line of 512 elements, and a list of escapes for each block of 64 lines (docs/payload_format.md). All
lines of a bucket are computed together; nothing loops over rows, blocks or lines.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from hzero.codecs.formats import EXP_BLOCK, EXP_ESCAPES, EXP_LINE, Layout, RecordFormat

#: Codes of a window: 1 to 14 stand for successive exponents, 0 for exponent 0, 15 for one of the list.
_WINDOW, _ESCAPE = 14, 15
#: Where the two windows that are tried end: so far above the exponent of this rank in the line; and the last base.
_WINDOW_AT, _LAST_BASE = ((1, 0), (64, 3)), 241
#: Where nothing else is said: exponents beyond the list, and every byte of a block whose list is too short.
_LOST = 255
_LINES = EXP_BLOCK // EXP_LINE


class _Parts(NamedTuple):
    """The parts of all records of a bucket, side by side.

    Attributes:
        tails: uint8 ``[rows, lines * 512]``, sign and mantissa.
        codes: uint8 ``[rows, lines * 256]``, two codes in each.
        starts: int16 ``[rows, lines]``, where the escapes of a line start in the list of its block; unsigned.
        bases: uint8 ``[rows, lines]``, the exponent before the window.
        lists: uint8 ``[rows, blocks * 512]``.
    """

    tails: torch.Tensor
    codes: torch.Tensor
    starts: torch.Tensor
    bases: torch.Tensor
    lists: torch.Tensor

    def regions(
        self, records: Sequence[torch.Tensor], layout: Layout, fmt: RecordFormat
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of views ``[outer, inner, ..]`` of each tensor's parts: in the payload, and here."""
        before = 0  # blocks of the tensors before
        for record, chunk, first, heads in zip(records, layout.chunks, layout.block_starts, layout.scales_offsets):
            lines, codes = fmt.blocks(chunk), -(-chunk // 2)
            listed = chunk // EXP_BLOCK * EXP_ESCAPES + min(chunk % EXP_BLOCK, EXP_ESCAPES)
            places = (
                (first * EXP_LINE, chunk, 0),
                (first * EXP_LINE // 2, codes, fmt.code_bytes(chunk, 0) - codes),
                (first, lines, heads),
                (first, lines, heads + 2 * lines),
                (before * EXP_ESCAPES, listed, heads + 3 * lines),
            )
            before += -(-chunk // EXP_BLOCK)
            for part, (start, count, offset) in zip(self, places) if chunk else ():
                written = record[..., offset : offset + count * part.element_size()].view(part.dtype)
                yield written, part[:, start : start + count].view(*record.shape[:2], count)


class _Lines(NamedTuple):
    """The lines of a row, each ``[lines]``.

    Attributes:
        block: The line's block, counted over the row.
        first: First line of the block.
        last: Last line of the block.
        numel: Elements of the line.
        limit: Escapes that the block's list holds.
        heads: First line of each block, ``[blocks]``.
    """

    block: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    numel: torch.Tensor
    limit: torch.Tensor
    heads: torch.Tensor


@functools.lru_cache(maxsize=64)
def _lines(layout: Layout, fmt: RecordFormat, device: torch.device) -> _Lines:
    # What is kept is copied to a device: whatever stream asks for it next need not wait for this one.
    columns: list[tuple[torch.Tensor, ...]] = []
    heads: list[torch.Tensor] = []
    blocks = 0
    for chunk, start in zip(layout.chunks, layout.block_starts):
        own = torch.arange(fmt.blocks(chunk))
        first = own - own % _LINES
        last = (first + _LINES - 1).clamp_(max=fmt.blocks(chunk) - 1)
        limit = (chunk - first * EXP_LINE).clamp_(max=EXP_ESCAPES)
        numel = (chunk - own * EXP_LINE).clamp_(max=EXP_LINE)
        columns.append((own // _LINES + blocks, first + start, last + start, numel, limit))
        heads.append(first[::_LINES] + start)
        blocks += len(heads[-1])
    return _Lines(*(torch.cat(list(column)).to(device) for column in (*zip(*columns), heads)))


def encode(values: torch.Tensor, records: Sequence[torch.Tensor], layout: Layout, fmt: RecordFormat) -> None:
    """Writes records of zeroed memory from bfloat16 ``[rows, lines * 512]``, zero beyond a record."""
    bits = values.view(torch.int16)
    rows, lines = bits.shape[0], _lines(layout, fmt, bits.device)
    exponents = ((bits >> 7) & 0xFF).view(rows, -1, EXP_LINE)
    bases = _bases(exponents)
    codes = exponents - bases.unsqueeze(-1)
    codes.masked_fill_((codes < 1) | (codes > _WINDOW), _ESCAPE).masked_fill_(exponents == 0, 0)
    escaped = codes == _ESCAPE
    counts = escaped.sum(-1)
    ends = counts.cumsum(1)
    starts = ends - counts
    starts, total = starts - starts[:, lines.first], ends[:, lines.last] - starts[:, lines.first]
    lost = total > lines.limit
    # Escapes in the order of the elements; all that go into no list meet in one place behind them.
    places = escaped.cumsum(-1).add_((starts + lines.block * EXP_ESCAPES - 1).unsqueeze(-1))
    places.masked_fill_(~escaped | lost.unsqueeze(-1), len(lines.heads) * EXP_ESCAPES)
    lists = bits.new_zeros(rows, len(lines.heads) * EXP_ESCAPES + 1, dtype=torch.uint8)
    lists.scatter_(1, places.view(rows, -1), exponents.to(torch.uint8).view(rows, -1))
    here = torch.arange(EXP_LINE, device=bits.device) < lines.numel.unsqueeze(-1)
    gone = lost.unsqueeze(-1) & here
    codes = codes.masked_fill_(gone, _ESCAPE).view(rows, -1, 2).to(torch.uint8)
    tails = ((bits >> 8) & 0x80 | bits & 0x7F).view(exponents.shape)
    parts = _Parts(
        tails.masked_fill_(gone, _LOST).to(torch.uint8).view(rows, -1),
        codes[..., 0] | codes[..., 1] << 4,
        starts.masked_fill_(lost, -1).to(torch.int16),
        bases.masked_fill_(lost, _LOST).to(torch.uint8),
        lists[:, :-1].masked_fill(lost[:, lines.heads].repeat_interleave(EXP_ESCAPES, 1), _LOST),
    )
    for written, own in parts.regions(records, layout, fmt):
        written.copy_(own)


def _bases(exponents: torch.Tensor) -> torch.Tensor:
    """The exponent before each line's window, int16 ``[rows, lines]``, from exponents ``[rows, lines, 512]``."""
    counts = exponents.new_zeros((*exponents.shape[:2], 258), dtype=torch.int32)
    counts.scatter_add_(-1, exponents.to(torch.int64), counts.new_ones(()).expand(exponents.shape))
    reaching = counts.flip(-1).cumsum(-1).flip(-1)  # elements of at least an exponent
    bases = [((reaching[..., 1:] >= rank).sum(-1) + room - _WINDOW).clamp_(0, _LAST_BASE) for rank, room in _WINDOW_AT]
    escapes = [
        (reaching.gather(-1, (base + _WINDOW + 1).unsqueeze(-1)) - reaching.gather(-1, (base + 1).unsqueeze(-1)))
        for base in bases
    ]
    return torch.where((escapes[1] < escapes[0]).squeeze(-1), bases[1], bases[0]).to(torch.int16)


def decode(records: Sequence[torch.Tensor], rows: int, layout: Layout, fmt: RecordFormat) -> torch.Tensor:
    """bfloat16 ``[rows, lines * 512]``; what is beyond a record has no meaning."""
    lines = _lines(layout, fmt, records[0].device)
    numel = layout.row_blocks * EXP_LINE
    zeros, empty = records[0].new_zeros, records[0].new_empty  # elements that no record has are zero
    parts = _Parts(
        zeros(rows, numel),
        zeros(rows, numel // 2),
        empty(rows, layout.row_blocks, dtype=torch.int16),
        empty(rows, layout.row_blocks),
        empty(rows, len(lines.heads) * EXP_ESCAPES),
    )
    for written, own in parts.regions(records, layout, fmt):
        own.copy_(written)
    codes = torch.stack([parts.codes & 15, parts.codes >> 4], dim=-1).view(rows, -1, EXP_LINE)
    escaped = codes == _ESCAPE
    places = escaped.cumsum(-1).add_((parts.starts.to(torch.int64) & 0xFFFF).unsqueeze(-1)).sub_(1)
    listed = escaped & (places < lines.limit.unsqueeze(-1))
    places.add_((lines.block * EXP_ESCAPES).unsqueeze(-1)).masked_fill_(~listed, parts.lists.shape[1])
    lists = torch.nn.functional.pad(parts.lists, (0, 1), value=_LOST)
    escapes = lists.gather(1, places.view(rows, -1)).view(codes.shape)
    exponents = torch.where(escaped, escapes, parts.bases.unsqueeze(-1) + codes)  # uint8, which wraps
    exponents = exponents.masked_fill_(codes == 0, 0).to(torch.int32).view(rows, -1)
    tails = parts.tails.to(torch.int32)
    return ((tails & 0x80) << 8 | exponents << 7 | tails & 0x7F).to(torch.int16).view(torch.bfloat16)


@functools.lru_cache(maxsize=256)
def marks(layout: Layout, fmt: RecordFormat, outer: int, inner: int, device: torch.device) -> torch.Tensor:
    """Places in a message of the first byte of every block's windows: `_LOST` where the block is lost, and only there."""
    found = []
    for chunk, start, size, heads in zip(
        layout.chunks, layout.record_starts, layout.record_bytes, layout.scales_offsets
    ):
        lines = fmt.blocks(chunk)
        records = torch.arange(outer).mul_(inner * layout.row_bytes).unsqueeze(-1) + inner * start
        records = records + torch.arange(inner) * size
        blocks = torch.arange(0, lines, _LINES) + heads + 2 * lines
        found.append((records.unsqueeze(-1) + blocks).view(-1))
    return torch.cat(found).to(device)  # as in `_lines`


def lost(payload: torch.Tensor, layout: Layout, fmt: RecordFormat, outer: int, inner: int) -> torch.Tensor:
    """Number of lost blocks in a message, int64 ``[]``. The host does not wait for it."""
    return (payload[marks(layout, fmt, outer, inner, payload.device)] == _LOST).sum()
