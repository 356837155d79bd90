"""Reference of codec ``mpc``, in plain torch: lossless for float32, with a data-dependent number of bytes.

Yang, Mukka, Hesaaraki and Burtscher, "MPC: A Massively Parallel Compression Algorithm for Scientific Data" (IEEE CLUSTER 2015).
bfloat16 and float16 are encoded as float32. Words in chunks of 1024, from the start of a record, pass
``LNVds | BIT | LNV1s | ZE``, with ``d`` the key ``dimension``, 1 to 32:

1. LNVds: from each word, the word ``d`` places before it in the chunk is subtracted, modulo 2^32; the first ``d`` words stay.
   Words that a last chunk lacks are 0 after this step.
2. BIT: in squares of 32 words, word ``j`` of the result has the bits of weight 2^(31 - j) of all 32 words, the first word's bit
   highest.
3. LNV1s: from each word, the word before it in the chunk is subtracted.
4. ZE: a bitmap of 1024 bits marks the nonzero words, word ``i`` in bit ``i % 32`` of 32-bit word ``i / 32``. Only these are kept.

A record has space for the longest encoding::

    record = used, 8 bytes | zeros, 8 bytes | bitmaps of all chunks, 128 bytes each | words that are kept, of all chunks | zeros

``used`` counts the bytes up to the last kept word, padded to 16. There are at most 1024 kept words per whole chunk, and for a
last chunk of ``m`` words min(32 * ceil(m / 32) + 1, 1024). On the wire, records have ``used`` bytes each: before a hop, the ranks
of the tier group exchange these counts, and all send as many bytes as the largest.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from hzero.codecs.formats import MPC_CHUNK, MPC_HEADER, RecordFormat

#: Rows and columns of a transposed square of bits.
_SIDE = 32
#: Words of a chunk's bitmap.
_BITMAP = MPC_CHUNK // _SIDE
#: Bits of alternate columns, for each distance between exchanged rows.
_EXCHANGED = {16: 0x0000FFFF, 8: 0x00FF00FF, 4: 0x0F0F0F0F, 2: 0x33333333, 1: 0x55555555}


def encode(values: torch.Tensor, fmt: RecordFormat, *unused: object) -> list[torch.Tensor]:
    """Returns the whole records, as `hzero.codecs.formats.Traits` describes."""
    rows, numel = values.shape
    words = pad(values.view(torch.int32), (0, -numel % MPC_CHUNK)).view(rows, -1, MPC_CHUNK)
    left = _less(words, fmt.dimension)
    left.view(rows, -1)[:, numel:] = 0
    planes = _less(_transposed(left.view(rows, -1, _SIDE)).view(words.shape), 1).view(rows, -1)
    kept = planes != 0
    bits = kept.view(rows, -1, _SIDE).to(torch.int64) << torch.arange(_SIDE, device=values.device)
    bitmaps = bits.sum(-1).to(torch.int32)
    used = MPC_HEADER + 4 * (bitmaps.shape[1] + kept.sum(-1, keepdim=True))
    # All zeros go to one place after the kept words.
    room = (fmt.record_bytes(numel, 0) - MPC_HEADER) // 4 - bitmaps.shape[1]
    places = (kept.cumsum(-1) - 1).masked_fill_(~kept, room)
    stream = planes.new_zeros(rows, room + 1).scatter_(1, places, planes.masked_fill(~kept, 0))[:, :-1]
    head = pad((used + 15) // 16 * 16, (0, 1)).view(torch.int32)
    return [torch.cat((head, bitmaps, stream), dim=1).view(torch.uint8)]


def decode(records: torch.Tensor, numel: int, fmt: RecordFormat) -> torch.Tensor:
    """Returns float32 ``[rows, numel]`` from records uint8 ``[rows, bytes]``."""
    rows, chunks = records.shape[0], fmt.blocks(numel)
    body = records[:, MPC_HEADER:].contiguous().view(torch.int32)
    bits, stream = body[:, : chunks * _BITMAP], body[:, chunks * _BITMAP :]
    kept = (bits.unsqueeze(-1) >> torch.arange(_SIDE, device=body.device) & 1).view(rows, -1) == 1
    # Bytes that no encoder writes may mark more words than the record has.
    places = (kept.cumsum(-1) - 1).clamp_(0, stream.shape[1] - 1)
    planes = stream.gather(1, places).masked_fill_(~kept, 0).view(rows, chunks, MPC_CHUNK)
    left = _transposed(_more(planes, 1).view(rows, -1, _SIDE)).view(rows, chunks, MPC_CHUNK)
    return _more(left, fmt.dimension).view(torch.float32).view(rows, -1)[:, :numel]


# ---- on the wire --------------------------------------------------------------------------------------------------------


def cut(message: torch.Tensor, parts: int, row_bytes: int) -> list[torch.Tensor]:
    """Returns the used bytes of the records of each part of a message, concatenated. The host waits for the device.

    Args:
        message: uint8 ``[parts][rows][row_bytes]``, of one tensor.
        parts: Number of parts, one per peer.
        row_bytes: Bytes of a record.
    """
    rows = message.view(parts, -1, row_bytes)
    lengths = rows[..., :8].contiguous().view(torch.int64).view(parts, -1).tolist()
    return [torch.cat([row[:length] for row, length in zip(part, used)]) for part, used in zip(rows, lengths)]


def whole(arrived: torch.Tensor, parts: int, rows: int, row_bytes: int) -> torch.Tensor:
    """Returns the message whose parts were `cut`, with zeros in the unused bytes. The host waits for the device.

    Args:
        arrived: uint8 ``[parts][length]``.
        parts: Number of parts.
        rows: Rows of each part.
        row_bytes: Bytes of a record.

    Raises:
        ValueError: A record has a length that no encoder writes.
    """
    message = arrived.new_zeros(parts, rows, row_bytes)
    for part, sent in zip(message, arrived.view(parts, arrived.numel() // parts)):
        for row in part:
            length = int(sent[:8].view(torch.int64)) if len(sent) >= 8 else 0
            if not 0 < length <= min(row_bytes, len(sent)) or length % 16:
                raise ValueError(f"found a record of {length} bytes; expected a multiple of 16 to {row_bytes}")
            row[:length] = sent[:length]
            sent = sent[length:]
    return message.view(-1)


# ---- arithmetic ---------------------------------------------------------------------------------------------------------


def _less(words: torch.Tensor, distance: int) -> torch.Tensor:
    """Subtracts from every word the word ``distance`` before it in its chunk, int32 ``[.., 1024]``, with wrap-around."""
    left = words.clone()
    left[..., distance:] -= words[..., :-distance]
    return left


def _more(left: torch.Tensor, distance: int) -> torch.Tensor:
    """Inverse of `_less`: sums along each of ``distance`` series."""
    padded = pad(left, (0, -MPC_CHUNK % distance)).to(torch.int64)
    sums = padded.unflatten(-1, (-1, distance)).cumsum(-2)
    return sums.flatten(-2)[..., :MPC_CHUNK].to(torch.int32)


def _transposed(words: torch.Tensor) -> torch.Tensor:
    """Exchanges rows and columns of squares of bits, int32 ``[.., 32]``; column 0 is the highest bit."""
    shape, words = words.shape, words.reshape(-1, _SIDE)
    for distance, mask in _EXCHANGED.items():
        pairs = words.view(-1, _SIDE // (2 * distance), 2, distance)
        above, below = pairs[:, :, 0], pairs[:, :, 1]
        moved = (above ^ (below >> distance & (1 << (32 - distance)) - 1)) & mask
        words = torch.stack((above ^ moved, below ^ moved << distance), dim=2)
    return words.reshape(shape)
