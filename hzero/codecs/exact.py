"""Codec ``exact``: 16-bit weights to the last bit, as changes from the copy that the receivers hold.

An optimizer step moves a weight by a few units in the last place, and the exponent of the old weight tells how far. A change is
a difference of bit patterns as ordered integers. Rice codes (Rice and Plaunt, IEEE Transactions on Communications 19(6), 1971)
have one parameter for each class of old exponents and message. Lanes of weights have their own words, so they decode side by
side.

A record holds one row of a whole bucket: head, then stream (docs/payload_format.md). `measure` makes the head, which tells the
size of the stream. Ranks agree on the largest stream, and `encode` writes the record. The compiled code of the tensors' device
does the work (hip_kernels), or else the reference below. On a device, nothing waits for the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate, product
from typing import NamedTuple

import numpy as np
import torch

from hzero.codecs import backends
from hzero.codecs.codec import check_payload, check_tensors
from hzero.codecs.formats import ALIGNMENT
from hzero.codecs.launchers import EXACT, EXACT_ROWS, GROUPS, TENSORS, THREADS, DeviceKernels, HostLibrary, divisor

#: Weights of a lane, and lanes of a block. A lane has at most 248 words, so that a byte holds their number.
LANE, BLOCK = 256, 64
#: Ones before 16 raw bits. Fewer ones are the quotient of a Rice code.
ESCAPE = 15
#: Classes of old weights; their parameters have 4 bits each.
CLASSES, HIGHEST = 64, 15
#: Bytes of the table of parameters and of the fixed part of a head; places of the check and of the number of words.
TABLE, FIXED_PART, CHECK, WORDS = CLASSES // 2, 48, 32, 36
#: Bins of the changes of a class, by which the kernels count bits; ``exact_bin`` of hip_kernels explains them.
BINS = 112
#: Dtypes that the codec has, with the shift and the offset that make a class of a magnitude.
CLASS_OF = {torch.bfloat16: (7, 84), torch.float16: (9, 0)}


class Layout(NamedTuple):
    """Places in the record of a bucket's row.

    Attributes:
        chunks: Elements of one shard of each tensor.
        lanes: Lanes of all tensors.
        blocks: Blocks of all tensors.
        lane_bytes: Place of the lanes' numbers of words, after the blocks' starts.
        head: Bytes of the head.
    """

    chunks: tuple[int, ...]
    lanes: int
    blocks: int
    lane_bytes: int
    head: int

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(chunks: tuple[int, ...]) -> Layout:
        """Returns the layout of a bucket whose shards have ``chunks`` elements."""
        counts = [-(-chunk // LANE) for chunk in chunks]
        lanes, blocks = sum(counts), sum(-(-count // BLOCK) for count in counts)
        lane_bytes = _padded(FIXED_PART + 4 * blocks)
        return Layout(chunks, lanes, blocks, lane_bytes, _padded(lane_bytes + lanes))

    def record_bytes(self, words: int) -> int:
        """Bytes of a record with a stream of at least ``words`` words of 32 bits.

        A stream's size has five significant bits, so that few sizes occur.
        """
        step = 1 << max((4 * words).bit_length() - 5, 0)
        return self.head + _padded(-(-4 * words // step) * step)

    @property
    def dense_bytes(self) -> int:
        """Bytes of the row without a codec."""
        return 2 * sum(self.chunks)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


# ---- calls --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure(new: Sequence[torch.Tensor], old: Sequence[torch.Tensor], head: torch.Tensor) -> None:
    """Chooses the parameters of a record, and writes its head.

    Args:
        new: This rank's shard of each tensor, flat; missing elements count as unchanged.
        old: The same shards as all ranks hold them, flat, ``[chunk]``.
        head: uint8 ``[Layout.head]`` to write, at a multiple of 16 bytes.

    Raises:
        TypeError: Dtypes or devices differ, or the codec does not have the dtype.
        ValueError: Sizes or strides are not as stated.
    """
    layout = _checked_shards(new, old, head)
    check_payload(head, layout.head, "the head of a record")
    launcher = _launcher(head.device)
    if launcher is None:
        _measure(new, old, head, layout)
        return
    head.zero_()
    counts = head.new_zeros(CLASSES * BINS, dtype=torch.int32)
    arguments = _arguments(layout, head, counts, old, new)
    for kernel in ("exact_count", "exact_table", "exact_lengths", "exact_starts"):
        _launch(launcher, kernel, arguments, head.device)


@torch.no_grad()
def encode(new: Sequence[torch.Tensor], old: Sequence[torch.Tensor], record: torch.Tensor) -> None:
    """Writes the stream of a record behind its head.

    Args:
        new: As in `measure`, unchanged since.
        old: As in `measure`.
        record: uint8, with the head of `measure`, and at least as many words as the head states; at a multiple of 16 bytes.

    Raises:
        TypeError: As in `measure`.
        ValueError: As in `measure`.
    """
    layout = _checked_shards(new, old, record)
    _check_record(record, layout, 1)
    launcher = _launcher(record.device)
    if launcher is None:
        _encode(new, old, record, layout)
        return
    record[layout.head :].zero_()
    _launch(launcher, "exact_encode", _arguments(layout, record, record[:0], old, new), record.device)


@torch.no_grad()
def decode(message: torch.Tensor, copies: Sequence[torch.Tensor], order: Sequence[int]) -> torch.Tensor:
    """Replaces old weights by new ones. Accepts any bytes.

    Args:
        message: uint8, one record for each row of ``order``.
        copies: The old weights of each tensor, ``[rows, chunk]``; rows may be apart in memory.
        order: For each record, the row of the tensors; each at most once.

    Returns:
        Whether each record had the weights that its check states, bool ``[records]``.

    Raises:
        TypeError: As in `measure`.
        ValueError: As in `measure`, or ``order`` has other rows.
    """
    dtype, rows = _check_dtype(copies, "copies"), len(copies[0])
    for index, copy in enumerate(copies):
        if copy.dtype is not dtype or copy.device != message.device:
            expected = f"expected {dtype} on {message.device}"
            raise TypeError(f"copies[{index}]: found {copy.dtype} on {copy.device}; {expected}")
        if copy.dim() != 2 or len(copy) != rows:
            raise ValueError(f"copies[{index}]: found shape {tuple(copy.shape)}; expected {rows} rows")
        if copy.numel():
            step, chunk = (copy.stride(0), copy.shape[1]) if rows > 1 else (copy.shape[1],) * 2
            if step < chunk or (chunk > 1 and copy.stride(1) != 1):
                raise ValueError(f"copies[{index}]: found strides {copy.stride()}; expected contiguous rows")
            needed = (copy.storage_offset() + step * (rows - 1) + chunk) * copy.element_size()
            if (found := copy.untyped_storage().nbytes()) < needed:
                raise ValueError(f"copies[{index}]: found {found} bytes of storage; expected {needed}: it was freed")
    if len(set(order)) != len(order) or not all(0 <= row < rows for row in order):
        raise ValueError(f"order: found {list(order)[:8]}; expected each of {rows} rows at most once")
    layout = Layout.of(tuple(copy.shape[1] for copy in copies))
    _check_record(message, layout, len(order))
    if message.data_ptr() % ALIGNMENT:
        message = message.clone()
    records = message.view(len(order), -1) if len(order) else message.view(0, layout.head)
    launcher = _launcher(message.device)
    if launcher is None:
        return _decode(records, copies, order, layout)
    checks = message.new_zeros(len(order), dtype=torch.int32)
    _launch(launcher, "exact_decode", _arguments(layout, records, checks, copies, (), order), message.device)
    return checks == records.view(torch.int32)[:, CHECK // 4]


def _check_dtype(tensors: Sequence[torch.Tensor], name: str) -> torch.dtype:
    if not tensors:
        raise ValueError(f"{name}: found no tensors; expected at least one")
    if tensors[0].dtype not in CLASS_OF:
        raise TypeError(f"{name}[0]: found {tensors[0].dtype}; expected bfloat16 or float16 in codec exact")
    return tensors[0].dtype


def _checked_shards(new: Sequence[torch.Tensor], old: Sequence[torch.Tensor], written: torch.Tensor) -> Layout:
    """Checks what is encoded, and that the bytes to write start at an aligned address. Returns the layout."""
    dtype, chunks = _check_dtype(old, "old"), [one.numel() for one in old]
    check_tensors("old", old, dtype, written.device, chunks)
    most = [min(one.numel(), chunk) for one, chunk in zip(new, chunks, strict=True)]  # a shard may lack some at its end
    check_tensors("new", new, dtype, written.device, most)
    if written.data_ptr() % ALIGNMENT:
        raise ValueError(f"payload: found address {written.data_ptr():#x}; expected a multiple of {ALIGNMENT}")
    return Layout.of(tuple(chunks))


def _check_record(message: torch.Tensor, layout: Layout, records: int) -> None:
    size = message.numel() // max(records, 1)
    whole = size if size >= layout.head and size % ALIGNMENT == 0 else layout.head
    check_payload(message, whole * records, f"{records} records with heads of {layout.head} and whole vectors")


def words_of(head: torch.Tensor) -> torch.Tensor:
    """Returns the words of the stream that a head of `measure` states, int32 ``[]``."""
    return head.view(torch.int32)[WORDS // 4]


# ---- kernels ------------------------------------------------------------------------------------------------------------


def _launcher(device: torch.device) -> HostLibrary | DeviceKernels | None:
    """The launcher of a device's compiled code; None: the reference computes."""
    return getattr(backends.of(device), "launcher", None)


@functools.lru_cache(maxsize=4096)
def _templates(chunks: tuple[int, ...], dtype: torch.dtype) -> list[tuple[np.ndarray, list[int]]]:
    """Arguments of kernels without addresses and rows, for some of the tensors each, and which these are."""
    lanes = [-(-chunk // LANE) for chunk in chunks]
    blocks = [-(-count // BLOCK) for count in lanes]
    whole, templates = [index for index, chunk in enumerate(chunks) if chunk], []
    for first in range(0, len(whole), TENSORS):
        some, argument = whole[first : first + TENSORS], np.zeros((), EXACT)
        argument["shift"], argument["offset"] = CLASS_OF[dtype]
        argument["tensors"], tensor = len(some), argument["tensor"][: len(some)]
        for field, sizes in {"first_block": blocks, "first_lane": lanes, "first_place": chunks}.items():
            before = [0, *accumulate(sizes)]
            tensor[field] = [before[index] % 2**32 for index in some]
        tensor["chunk"], tensor["blocks"] = zip(*((chunks[index], blocks[index]) for index in some))
        tensor["by_blocks"] = [divisor(blocks[index]) for index in some]
        templates.append((argument, some))
    return templates


def _arguments(
    layout: Layout,
    records: torch.Tensor,
    sums: torch.Tensor,
    old: Sequence[torch.Tensor],
    new: Sequence[torch.Tensor] = (),
    order: Sequence[int] = (0,),
) -> list[tuple[np.ndarray, int]]:
    """Arguments of kernels for all tensors and rows, and how many workgroups of a device share the work of each."""
    made, firsts = [], range(0, len(order), EXACT_ROWS)
    for (template, some), first in product(_templates(layout.chunks, old[0].dtype), firsts):
        rows, argument = order[first : first + EXACT_ROWS], template.copy()
        argument["record_bytes"] = size = records.shape[-1]
        argument["message"], argument["sums"] = records.data_ptr() + first * size, sums.data_ptr() + 4 * first
        argument["lane_bytes"], argument["head"], argument["blocks"] = layout.lane_bytes, layout.head, layout.blocks
        argument["records"], argument["rows"][: len(rows)] = len(rows), rows
        tensor = argument["tensor"][: len(some)]
        tensor["old"] = [old[index].data_ptr() for index in some]
        tensor["step"] = [old[index].stride(0) for index in some]
        if new:
            tensor["fresh"], tensor["numel"] = zip(*((new[index].data_ptr(), new[index].numel()) for index in some))
        groups = [0, *accumulate(-(-int(blocks) * len(rows) * BLOCK // THREADS) for blocks in tensor["blocks"])]
        argument["first_group"] = groups[:-1] + [2**32 - 1] * (GROUPS - len(some))
        made.append((argument, groups[-1]))
    return made


def _launch(
    launcher: HostLibrary | DeviceKernels, kernel: str, arguments: list[tuple[np.ndarray, int]], device: torch.device
) -> None:
    """Launches a kernel. Two kernels make the parts of a head that all tensors share, in one workgroup."""
    run, once = launcher.kernel("exact", kernel), kernel in ("exact_table", "exact_starts")
    for argument, workgroups in arguments[: 1 if once else None]:
        run(argument, 1 if once else workgroups, device)


# ---- reference ----------------------------------------------------------------------------------------------------------


def ordered(bits: torch.Tensor) -> torch.Tensor:
    """Bit patterns as integers in the order of their values, int32; -0 is one below +0."""
    bits = bits.to(torch.int32) & 0xFFFF
    return torch.where(bits < 0x8000, bits, 0x7FFF - bits)


def _classes(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    shift, offset = CLASS_OF[dtype]
    return (((bits.to(torch.int32) & 0x7FFF) >> shift) - offset).clamp_(0, CLASSES - 1)


def _zigzag(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    change = _wrapped(ordered(new) - ordered(old) & 0xFFFF, 16)
    return torch.where(change >= 0, 2 * change, -2 * change - 1)


@functools.lru_cache(maxsize=256)
def _lanes(chunks: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lane and place in the lane of every weight of a row, and the first lane of every block. Neighbours are in other lanes."""
    lanes, places, firsts, before = [], [], [], 0
    for chunk in chunks:
        for start in range(0, chunk, LANE * BLOCK):
            size = min(chunk - start, LANE * BLOCK)
            count, at = -(-size // LANE), torch.arange(size)
            lanes.append(before + at % count)
            places.append(at // count)
            firsts.append(before)
            before += count
    empty = torch.zeros(0, dtype=torch.int64)
    return torch.cat(lanes or [empty]), torch.cat(places or [empty]), torch.tensor(firsts, dtype=torch.int64)


def _joined(tensors: Sequence[torch.Tensor], olds: Sequence[torch.Tensor]) -> torch.Tensor:
    """Bits of a row, int16; missing elements are unchanged."""
    return torch.cat([torch.cat((one, old[one.numel() :])).view(torch.int16) for one, old in zip(tensors, olds)])


def _codes(new: torch.Tensor, old: torch.Tensor, dtype: torch.dtype, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes of weights, int64, and their numbers of bits."""
    zigzag, parameter = _zigzag(new, old).long(), table[_classes(old, dtype).long()]
    quotient = zigzag >> parameter
    far = quotient >= ESCAPE
    quotient = quotient.clamp(max=ESCAPE)
    ones = (1 << quotient) - 1
    near = ones | (zigzag & (1 << parameter) - 1) << quotient + 1
    return torch.where(far, ones | (new.long() & 0xFFFF) << ESCAPE, near), torch.where(
        far, ESCAPE + 16, quotient + 1 + parameter
    )


def _measure(new: Sequence[torch.Tensor], old: Sequence[torch.Tensor], head: torch.Tensor, layout: Layout) -> None:
    dtype = old[0].dtype
    news, olds = _joined(new, old), _joined(old, old)
    zigzag, classes = _zigzag(news, olds).long(), _classes(olds, dtype).long()
    costs = torch.zeros(CLASSES, HIGHEST + 1, dtype=torch.int64, device=head.device)
    for parameter in range(HIGHEST + 1):
        quotient = zigzag >> parameter
        bits = torch.where(quotient >= ESCAPE, ESCAPE + 16, quotient + 1 + parameter)
        costs[:, parameter].index_add_(0, classes, bits)
    table = costs.argmin(dim=1)
    _, lengths = _codes(news, olds, dtype, table)
    lanes, _, firsts = (one.to(head.device) for one in _lanes(layout.chunks))
    bits = torch.zeros(layout.lanes, dtype=torch.int64, device=head.device).index_add_(0, lanes, lengths)
    words = (bits + 31) // 32
    starts = words.cumsum(0) - words
    head.zero_()
    head[:TABLE] = (table[0::2] | table[1::2] << 4).to(torch.uint8)
    head[CHECK : CHECK + 4].view(torch.int32).copy_(_check(news)[0])
    head[WORDS : WORDS + 4].view(torch.int32).copy_(words.sum())
    head[FIXED_PART : FIXED_PART + 4 * layout.blocks].view(torch.int32).copy_(starts[firsts])
    head[layout.lane_bytes :][: layout.lanes] = words.to(torch.uint8)


def _encode(new: Sequence[torch.Tensor], old: Sequence[torch.Tensor], record: torch.Tensor, layout: Layout) -> None:
    dtype = old[0].dtype
    news, olds = _joined(new, old), _joined(old, old)
    codes, lengths = _codes(news, olds, dtype, _table(record))
    lanes, places, _ = (one.to(record.device) for one in _lanes(layout.chunks))
    by_lane = torch.zeros(layout.lanes, LANE + 1, dtype=torch.int64, device=record.device)
    by_lane[lanes, places + 1] = lengths
    words = record[layout.lane_bytes :][: layout.lanes].long()
    starts = words.cumsum(0) - words
    at = 32 * starts[lanes] + by_lane.cumsum(1)[lanes, places]
    stream = torch.zeros((record.numel() - layout.head) // 4 + 1, dtype=torch.int64, device=record.device)
    low, high = codes << at % 32 & 0xFFFFFFFF, codes >> 32 - at % 32
    stream.index_add_(0, at // 32, low).index_add_(0, at // 32 + 1, high)
    record[layout.head :].view(torch.int32).copy_(_wrapped(stream[:-1]))


def _decode(
    records: torch.Tensor, copies: Sequence[torch.Tensor], order: Sequence[int], layout: Layout
) -> torch.Tensor:
    right = []
    for record, row in zip(records, order):
        olds = torch.cat([copy[row] for copy in copies]).view(torch.int16)
        news = _decoded(record, layout, olds, copies[0].dtype)
        for copy, part in zip(copies, news.view(copies[0].dtype).split(layout.chunks)):
            copy[row] = part
        right.append(_check(news)[0] == record[CHECK : CHECK + 4].clone().view(torch.int32)[0])
    return torch.stack(right) if right else records.new_empty(0, dtype=torch.bool)


def _decoded(record: torch.Tensor, layout: Layout, olds: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bits of a row's new weights, int16: all lanes side by side, one weight after the other."""
    lanes, places, _ = (one.to(record.device) for one in _lanes(layout.chunks))
    stream = record[layout.head :].clone().view(torch.int32).long() & 0xFFFFFFFF
    stream = torch.cat((stream, stream.new_zeros(2)))
    at = 32 * _starts(record, layout)
    parameters, order = _table(record)[_classes(olds, dtype).long()], ordered(olds).long()
    news = torch.empty_like(olds)
    for place in range(int(places.max()) + 1 if len(places) else 0):
        (here,) = (places == place).nonzero(as_tuple=True)
        lane, parameter = lanes[here], parameters[here]
        start = at[lane]
        word = (start // 32).clamp(max=len(stream) - 2)
        window = (stream[word] | stream[word + 1] << 32) >> start % 32  # of 63 bits, the sign's aside
        ones = window & (1 << ESCAPE) - 1
        quotient = torch.log2((~ones & ones + 1).double()).long()
        far = quotient == ESCAPE
        zigzag = (quotient << parameter | window >> quotient + 1 & (1 << parameter) - 1) & 0xFFFF
        moved = order[here] + torch.where(zigzag % 2 == 0, zigzag // 2, -(zigzag // 2) - 1)
        moved = _wrapped(moved & 0xFFFF, 16)
        bits = torch.where(far, window >> ESCAPE, torch.where(moved >= 0, moved, 0x7FFF - moved))
        news[here] = _wrapped(bits & 0xFFFF, 16).to(torch.int16)
        at[lane] = start + torch.where(far, ESCAPE + 16, quotient + 1 + parameter)
    return news


def _starts(record: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The first word of every lane, from its block's start; bytes that no encoder writes may lead anywhere."""
    words = record[layout.lane_bytes :][: layout.lanes].long()
    starts = record[FIXED_PART : FIXED_PART + 4 * layout.blocks].clone().view(torch.int32).long() & 0xFFFFFFFF
    before, firsts = words.cumsum(0) - words, _lanes(layout.chunks)[2].to(record.device)
    sizes = torch.diff(firsts, append=firsts.new_tensor([layout.lanes]))
    return before + (starts - before[firsts]).repeat_interleave(sizes)


def _table(record: torch.Tensor) -> torch.Tensor:
    pairs = record[:TABLE].long()
    return torch.stack((pairs & HIGHEST, pairs >> 4), dim=1).view(-1)


def _check(bits: torch.Tensor) -> torch.Tensor:
    """Sum of a row's bit patterns, each times an odd number for its place, modulo 2**32; int32 ``[1]``."""
    places = 2 * torch.arange(len(bits), device=bits.device) + 1
    return _wrapped(((bits.long() & 0xFFFF) * places).sum().view(1) & 0xFFFFFFFF).to(torch.int32)


def _wrapped(numbers: torch.Tensor, bits: int = 32) -> torch.Tensor:
    """Unsigned numbers as signed ones of the same bits."""
    return torch.where(numbers < 1 << bits - 1, numbers, numbers - (1 << bits))
