"""Reference of codec ``exp``, in plain torch: lossless for bfloat16, whose exponents take few values in any stretch.

A record has the signs and mantissas as they are, a code of 4 bits for each exponent, and what the codes leave out: a window
of exponents for each line of 512 elements, and a list of escapes for each block of 64 lines (docs/payload_format.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from hzero.codecs.formats import EXP_BLOCK, EXP_ESCAPES, EXP_LINE, RecordFormat

#: Codes of a window: 1 to 14 stand for successive exponents, 0 for exponent 0, 15 for one of the list.
_WINDOW, _ESCAPE = 14, 15
#: Where the two windows that are tried end: so far above the exponent of this rank in the line; and the last base.
_WINDOW_AT, _LAST_BASE = ((1, 0), (64, 3)), 241
#: Where nothing else is said: exponents beyond the list, and every byte of a block whose list is too short.
_LOST = 255
_LINES = EXP_BLOCK // EXP_LINE


def encode(values: torch.Tensor, fmt: RecordFormat, *unused: object) -> list[torch.Tensor]:
    """The parts of records, uint8 ``[rows, bytes]`` each, of bfloat16 ``[rows, numel]``."""
    rows, numel = values.shape
    lines = fmt.blocks(numel)
    # Whole blocks of lines, zero behind the record.
    bits = pad(values.view(torch.int16), (0, -numel % (min(lines, _LINES) * EXP_LINE)))
    exponents = (bits >> 7 & 0xFF).view(rows, -1, min(lines, _LINES), EXP_LINE)
    bases = _bases(exponents)
    codes = exponents - bases.unsqueeze(-1)
    codes.masked_fill_((codes < 1) | (codes > _WINDOW), _ESCAPE).masked_fill_(exponents == 0, 0)
    escaped = codes == _ESCAPE
    counts = escaped.sum(-1)
    starts = counts.cumsum(-1) - counts
    room = (numel - torch.arange(exponents.shape[1], device=bits.device) * EXP_BLOCK).clamp_(max=EXP_ESCAPES)
    lost = (counts.sum(-1) > room).unsqueeze(-1)
    # Escapes in the order of the elements; all that go into no list meet in one place behind it.
    places = escaped.flatten(2).cumsum(-1).sub_(1).masked_fill_(~escaped.flatten(2) | lost, EXP_ESCAPES)
    lists = bits.new_zeros(*places.shape[:2], EXP_ESCAPES + 1, dtype=torch.uint8)
    lists.scatter_(-1, places, exponents.flatten(2).to(torch.uint8))
    lists = lists[..., :EXP_ESCAPES].masked_fill(lost, _LOST).flatten(1)
    codes = codes.masked_fill_(lost.unsqueeze(-1), _ESCAPE).to(torch.uint8).view(rows, -1)
    codes = pad(codes[:, :numel], (0, numel % 2))
    tails = (bits >> 8 & 0x80 | bits & 0x7F).view(exponents.shape).masked_fill_(lost.unsqueeze(-1), _LOST)
    heads = (
        starts.masked_fill_(lost, -1).to(torch.int16).flatten(1)[:, :lines].contiguous().view(torch.uint8),
        bases.masked_fill_(lost, _LOST).to(torch.uint8).flatten(1)[:, :lines],
        lists[:, : fmt.regions(numel, 0)[2] - 3 * lines],
    )
    return [tails.to(torch.uint8).view(rows, -1)[:, :numel], codes[:, ::2] | codes[:, 1::2] << 4, torch.cat(heads, 1)]


def _bases(exponents: torch.Tensor) -> torch.Tensor:
    """The exponent before each line's window, int16 ``[..]``, from exponents ``[.., 512]``."""
    counts = exponents.new_zeros((*exponents.shape[:-1], 258), dtype=torch.int32)
    counts.scatter_add_(-1, exponents.to(torch.int64), counts.new_ones(()).expand(exponents.shape))
    reaching = counts.flip(-1).cumsum(-1).flip(-1)  # elements of at least an exponent
    bases = [((reaching[..., 1:] >= rank).sum(-1) + room - _WINDOW).clamp_(0, _LAST_BASE) for rank, room in _WINDOW_AT]
    escapes = [
        (reaching.gather(-1, (base + _WINDOW + 1).unsqueeze(-1)) - reaching.gather(-1, (base + 1).unsqueeze(-1)))
        for base in bases
    ]
    return torch.where((escapes[1] < escapes[0]).squeeze(-1), bases[1], bases[0]).to(torch.int16)


def decode(records: torch.Tensor, numel: int, fmt: RecordFormat) -> torch.Tensor:
    """bfloat16 ``[rows, numel]`` of records uint8 ``[rows, bytes]``."""
    rows, lines, (_, packed, tables, _) = records.shape[0], fmt.blocks(numel), fmt.offsets(numel, 0)
    tails, codes, heads = records[:, :numel].to(torch.int32), records[:, packed:tables], records[:, tables:]
    codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)[:, :numel]
    codes = pad(codes, (0, -numel % EXP_LINE)).view(rows, lines, EXP_LINE)
    starts = heads[:, : 2 * lines].contiguous().view(torch.int16).to(torch.int64) & 0xFFFF
    bases, lists = heads[:, 2 * lines : 3 * lines], pad(heads[:, 3 * lines :], (0, 1), value=_LOST)
    escaped = codes == _ESCAPE
    block = torch.arange(lines, device=records.device).unsqueeze(-1) // _LINES
    places = escaped.cumsum(-1).add_(starts.unsqueeze(-1)).sub_(1)
    listed = escaped & (places < (numel - block * EXP_BLOCK).clamp_(max=EXP_ESCAPES))
    places.add_(block * EXP_ESCAPES).masked_fill_(~listed, lists.shape[1] - 1)
    escapes = lists.gather(1, places.view(rows, -1)).view(codes.shape)
    exponents = torch.where(escaped, escapes, bases.unsqueeze(-1) + codes)  # uint8, which wraps
    exponents = exponents.masked_fill_(codes == 0, 0).to(torch.int32).view(rows, -1)[:, :numel]
    return ((tails & 0x80) << 8 | exponents << 7 | tails & 0x7F).to(torch.int16).view(torch.bfloat16)


def lost(records: Sequence[tuple[torch.Tensor, int]], fmt: RecordFormat) -> torch.Tensor:
    """Number of lost blocks, int64 ``[]``. The host does not wait for it.

    Args:
        records: The records of each tensor, ``[.., bytes]``, and the elements of one.
        fmt: Their format.
    """
    first_bases = []  # of every block: `_LOST` where it is lost, and only there
    for record, numel in records:
        lines, heads = fmt.blocks(numel), fmt.offsets(numel, 0)[2]
        first_bases.append(record[..., heads + 2 * lines : heads + 3 * lines : _LINES].reshape(-1))
    return (torch.cat(first_bases) == _LOST).sum()
